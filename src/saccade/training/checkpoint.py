"""Checkpoints of a stage: the model as a Hugging Face folder, the optimizer, and the state of the trainer.

A checkpoint is written to a temporary folder and then renamed, so it is never partial. A resumed run loads the newest.
"""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from saccade.errors import RunError, convert_errors
from saccade.models.backbone import Backbone
from saccade.training.optimizer import Optimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint on disk; `step` is the number of finished steps."""

    step: int
    folder: Path

    def restore(self, optimizer: Optimizer) -> dict[str, Any]:
        """Load the optimizer's state and return the trainer's. Raises RunError."""
        with read_boundary(self.folder):
            optimizer.load_state_dict(torch.load(self.folder / "optimizer.pt", map_location="cpu", weights_only=True))
            trainer_state: dict[str, Any] = json.loads((self.folder / "trainer_state.json").read_text())
        return trainer_state


def read_boundary(folder: Path) -> AbstractContextManager[None]:
    """Convert any exception inside the block into a RunError that names the checkpoint's folder."""
    message = f"the checkpoint {folder} can't be read; delete it to resume from the previous one"
    return convert_errors(RunError, message, key=str(folder))


def save_checkpoint(
    folder: Path,
    *,
    step: int,
    backbone: Backbone,
    optimizer: Optimizer,
    trainer_state: Mapping[str, Any],
    write_extra_files: Callable[[Path], None] = lambda part_folder: None,
) -> Checkpoint:
    """Write checkpoint `step`, with `write_extra_files`, and delete all but the two newest. Raises RunError."""
    target = folder / f"step-{step:06d}"
    part_folder = folder / f".step-{step:06d}.part"
    message = f"the checkpoint {target} can't be written; free space or choose another run folder"
    with convert_errors(RunError, message, key=str(target)):
        shutil.rmtree(part_folder, ignore_errors=True)
        part_folder.mkdir(parents=True)
        backbone.save(part_folder)
        torch.save(optimizer.state_dict(), part_folder / "optimizer.pt")
        (part_folder / "trainer_state.json").write_text(json.dumps(dict(trainer_state)))
        write_extra_files(part_folder)
        shutil.rmtree(target, ignore_errors=True)
        os.replace(part_folder, target)
        for old in list_checkpoints(folder)[:-2]:
            shutil.rmtree(old.folder)
    return Checkpoint(step=step, folder=target)


def list_checkpoints(folder: Path) -> list[Checkpoint]:
    """Return the checkpoints below `folder`, oldest first."""
    suffixes = ((path.name.removeprefix("step-"), path) for path in folder.glob("step-*"))
    # The user may keep other folders here, such as a copy of a checkpoint.
    checkpoints = [Checkpoint(step=int(suffix), folder=path) for suffix, path in suffixes if suffix.isdecimal()]
    return sorted(checkpoints, key=lambda checkpoint: checkpoint.step)


def find_newest_checkpoint(folder: Path) -> Checkpoint | None:
    """Return the checkpoint to resume from, if there is one."""
    checkpoints = list_checkpoints(folder)
    return checkpoints[-1] if checkpoints else None
