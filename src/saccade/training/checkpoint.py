"""Checkpoints of a stage: the model as a Hugging Face folder, the optimiser, and where the stage stood.

A checkpoint appears whole or not at all (written beside, then renamed). The newest one is what a resumed run loads.
"""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from saccade.errors import RunError, boundary
from saccade.model.backbone import Backbone
from saccade.training.optim import Optimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint on disk: the number of finished steps and its folder."""

    step: int
    folder: Path

    def restore(self, optimizer: Optimizer) -> dict[str, Any]:
        """Load the optimiser's state; returns what the stage noted beside it."""
        with boundary(RunError, f"the checkpoint {self.folder} can't be read; delete it to go on from the one before"):
            optimizer.restore(torch.load(self.folder / "optimizer.pt", map_location="cpu", weights_only=True))
            notes: dict[str, Any] = json.loads((self.folder / "notes.json").read_text())
        return notes


def save(
    folder: Path,
    *,
    step: int,
    backbone: Backbone,
    optimizer: Optimizer,
    notes: Mapping[str, Any],
    attach: Callable[[Path], None] = lambda place: None,
) -> Checkpoint:
    """Write checkpoint `step` below `folder`; older ones but one are deleted. `attach` may add files of its own."""
    target = folder / f"step-{step:06d}"
    fresh = folder / f".step-{step:06d}.part"
    with boundary(RunError, f"the checkpoint {target} can't be written; free space or choose another run folder"):
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
        backbone.save(fresh)
        torch.save(optimizer.state(), fresh / "optimizer.pt")
        (fresh / "notes.json").write_text(json.dumps(dict(notes)))
        attach(fresh)
        shutil.rmtree(target, ignore_errors=True)
        os.replace(fresh, target)
        for old in checkpoints(folder)[:-2]:
            shutil.rmtree(old.folder)
    return Checkpoint(step=step, folder=target)


def checkpoints(folder: Path) -> list[Checkpoint]:
    """The checkpoints below `folder`, oldest first."""
    named = ((path.name.removeprefix("step-"), path) for path in folder.glob("step-*"))
    # Whatever else somebody keeps beside them, such as a copy, is none of ours.
    found = [Checkpoint(step=int(step), folder=path) for step, path in named if step.isdecimal()]
    return sorted(found, key=lambda one: one.step)


def newest(folder: Path) -> Checkpoint | None:
    """The checkpoint that a resumed stage goes on from, if there is one."""
    found = checkpoints(folder)
    return found[-1] if found else None
