"""The command line of Saccade with a fault planted in its process: `_planted_faults.py FAULT STEP MARKER ARGUMENTS`.

The fault happens once, in training step STEP; the file MARKER, which is written then, disarms it after a restart.
"""

import math
import sys
import time
from pathlib import Path
from typing import Any

import torch

from saccade.algorithms import policy_loss
from saccade.cli.app import main
from saccade.training import policy_update
from saccade.training.optimizer import Optimizer

DAY = 86400.0


class Fault:
    """A fault that happens once, in its step; `current_step` counts from 1."""

    def __init__(self, step: int, marker: Path) -> None:
        self.step, self.marker, self.current_step = step, marker, 0
        start_step = Optimizer.start_step

        def start(optimizer: Optimizer, step: int) -> None:
            self.current_step = step + 1
            start_step(optimizer, step)

        Optimizer.start_step = start  # type: ignore[method-assign]

    def is_due(self) -> bool:
        """Return whether it happens now."""
        if self.current_step != self.step or self.marker.exists():
            return False
        self.marker.touch()
        return True


def plant_in_loss(fault: Fault, kind: str) -> None:
    """Make one micro-batch's loss NaN, or its backward pass run out of memory."""
    compute = policy_loss.compute_policy_loss

    def fail(gradient: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB (planted)")

    def compute_loss(logp_N: torch.Tensor, *args: Any, **settings: Any) -> Any:
        loss, stats = compute(logp_N, *args, **settings)
        if not fault.is_due():
            return loss, stats
        if kind == "nan":
            return loss * math.nan, stats
        logp_N.register_hook(fail)
        return loss, stats

    policy_update.compute_policy_loss = compute_loss  # type: ignore[attr-defined]


def plant_in_clock(fault: Fault) -> None:
    """Set the wall clock a day ahead during the step, and a day back from the next on."""
    read = time.time

    def read_wrong() -> float:
        fault.marker.touch()
        return read() + DAY * ((fault.current_step == fault.step) - (fault.current_step > fault.step))

    time.time = read_wrong


if __name__ == "__main__":
    kind, step, marker = sys.argv[1:4]
    planted = Fault(int(step), Path(marker))
    if kind == "clock":
        plant_in_clock(planted)
    else:
        plant_in_loss(planted, kind)
    sys.argv = ["saccade", *sys.argv[4:]]
    main()
