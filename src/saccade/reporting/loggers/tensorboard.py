"""TensorBoard: curves of every stage, shown by `tensorboard --logdir RUN/tensorboard`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from saccade.config.schema import Recipe


class Tensorboard:
    """Write event files into the run folder, one folder per stage."""

    package = "tensorboard"

    def __init__(self, folder: Path, recipe: Recipe) -> None:
        self._log_dir = folder / "tensorboard"
        self._writers: dict[str, Any] = {}

    def log(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        """Write a step; the first one hides what an interrupted run wrote of it and of later steps."""
        from torch.utils.tensorboard import SummaryWriter

        if stage not in self._writers:
            make_writer: Any = SummaryWriter
            self._writers[stage] = make_writer(str(self._log_dir / stage), purge_step=step)
        for name, value in values.items():
            self._writers[stage].add_scalar(name, value, step)
        self._writers[stage].flush()

    def close(self) -> None:
        """Close the event files."""
        for writer in self._writers.values():
            writer.close()


tensorboard = Tensorboard
