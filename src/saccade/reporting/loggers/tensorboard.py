"""TensorBoard: curves of every stage, shown by `tensorboard --logdir RUN/tensorboard`."""

from collections.abc import Mapping
from typing import Any

from saccade.runlog import Run


class tensorboard:
    """Writes event files into the run folder, those of each stage in a folder of its own."""

    package = "tensorboard"

    def __init__(self, run: Run) -> None:
        self._folder = run.path / "tensorboard"
        self._writers: dict[str, Any] = {}

    def log(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        """Write a step; what a stopped run had already written of it and of later ones is not shown any more."""
        from torch.utils.tensorboard import SummaryWriter

        if stage not in self._writers:
            make: Any = SummaryWriter
            self._writers[stage] = make(str(self._folder / stage), purge_step=step)
        for name, value in values.items():
            self._writers[stage].add_scalar(name, value, step)
        self._writers[stage].flush()

    def close(self) -> None:
        """Close the files."""
        for writer in self._writers.values():
            writer.close()
