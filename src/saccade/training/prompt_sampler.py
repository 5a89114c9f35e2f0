"""Sample the next prompts: every task once per epoch, in a new order for each epoch.

A *position* is an index into the infinite sequence of epochs:

    position  0  1  2  3 | 4  5  6  7 | 8 ...        4 tasks
    epoch         0      |      1     |  2
    task      b  d  a  c | c  a  d  b | ...

Requeued positions are taken first, then new ones. A position determines everything about a prompt (its task, epoch and
frame budget), also if files are mixed by weight, so a checkpoint saves positions only.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSampler:
    """The positions to sample next: the requeued ones, then `next_position` and all after it.

    >>> PromptSampler(next_position=7, requeued_positions=(2, 4)).take(3)
    ((2, 4, 7), PromptSampler(next_position=8, requeued_positions=()))
    """

    next_position: int = 0
    requeued_positions: tuple[int, ...] = ()

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "PromptSampler":
        """Return the sampler whose fields, as plain values, a checkpoint holds."""
        return cls(next_position=int(state["next_position"]), requeued_positions=tuple(state["requeued_positions"]))

    def take(self, count: int) -> tuple[tuple[int, ...], "PromptSampler"]:
        """Return the next `count` positions, and the sampler after them."""
        requeued = self.requeued_positions[:count]
        end = self.next_position + count - len(requeued)
        rest = replace(self, next_position=end, requeued_positions=self.requeued_positions[count:])
        return (*requeued, *range(self.next_position, end)), rest

    def requeue(self, positions: Iterable[int]) -> "PromptSampler":
        """Return a sampler that takes these positions again first, in ascending order."""
        return replace(self, requeued_positions=tuple(sorted({*positions, *self.requeued_positions})))
