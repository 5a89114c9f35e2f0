"""Whether the final answer is right, judged by the kind of the task."""

from typing import Literal

from saccade.rewards.choice import choice as by_choice
from saccade.rewards.grounding import grounding as by_grounding
from saccade.rewards.number import number as by_number
from saccade.rewards.open import open as by_open
from saccade.types import Episode, Kind, Task


def accuracy(
    episode: Episode,
    task: Task,
    *,
    open: Literal["f1", "exact"] = "f1",
    number: Literal["mra", "exact"] = "mra",
    tolerance: float = 0.0,
) -> float:
    """The rewards choice, open, grounding or number, as the task's kind says; in [0, 1].

    `open` and `number` are the modes of those rewards, `tolerance` is that of exact numbers. Only `Episode.answer`
    is read: what tools printed is never graded.
    """
    # judges are called as functions: this file names them, so a new kind is a branch here and a member of Kind
    if task.kind is Kind.CHOICE:
        return by_choice(episode, task)
    if task.kind is Kind.GROUNDING:
        return by_grounding(episode, task)
    if task.kind is Kind.NUMBER:
        return by_number(episode, task, mode=number, tolerance=tolerance)
    return by_open(episode, task, mode=open)
