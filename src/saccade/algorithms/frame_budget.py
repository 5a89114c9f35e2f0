"""Frame-budget gating: draw how many frames the overview of a video shows (ParaVT, arXiv 2605.20342)."""

from collections.abc import Sequence

from saccade.types import Task
from saccade.utils.hashing import derive_seed


def draw_frame_budget(frame_budgets: Sequence[int], *, run_seed: int, epoch: int, task: Task) -> int | None:
    """Return a task's frame budget K for an epoch, uniform over `frame_budgets`; None if there are none (gating off).

    K depends only on the run's seed, the epoch and the task's id, so every episode of a group has the same K.

    >>> from saccade.types import AnswerType
    >>> task = Task(id="w-1", question="?", media=(), answer_type=AnswerType.OPEN, ground_truth="red")
    >>> [draw_frame_budget((4, 8, 16, 32, 64), run_seed=0, epoch=epoch, task=task) for epoch in range(4)]
    [64, 64, 4, 16]
    """
    if not frame_budgets:
        return None
    # A 63-bit seed modulo a handful of budgets: the bias is far below what any number of tasks could show.
    return frame_budgets[derive_seed("gating", run_seed, epoch, task.id) % len(frame_budgets)]
