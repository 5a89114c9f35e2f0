"""Frame-budget gating: how many frames an overview shows (ParaVT, arXiv 2605.20342)."""

from collections.abc import Sequence

from saccade.errors import ConfigError
from saccade.types import Task, seed_of


def draw(frames: Sequence[int], *, run_seed: int, epoch: int, task: Task) -> int | None:
    """The frame budget K of a task in an epoch, uniform over `frames`; None where gating is off (`frames` empty).

    It depends on the run's seed, the epoch and the task's id alone, so every episode of a group has the same K.
    ConfigError for a budget below one frame.

    >>> from saccade.types import Kind
    >>> task = Task(id="w-1", question="?", media=(), kind=Kind.OPEN, gold="red")
    >>> [draw((4, 8, 16, 32, 64), run_seed=0, epoch=epoch, task=task) for epoch in range(4)]
    [64, 64, 4, 16]
    """
    if any(budget < 1 for budget in frames):
        raise ConfigError(f"gating.frames holds {min(frames)}: every frame budget must be at least 1")
    # 63 bits over a handful of budgets: the bias of the remainder is far below any count of tasks
    return frames[seed_of("gating", run_seed, epoch, task.id) % len(frames)] if frames else None
