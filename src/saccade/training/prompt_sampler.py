"""Sample the next prompts: every task once per epoch, in a new order for each epoch.

A *prompt index* is an index into the infinite sequence of epochs:

    index     0  1  2  3 | 4  5  6  7 | 8 ...        4 tasks
    epoch         0      |      1     |  2
    task      b  d  a  c | c  a  d  b | ...

Requeued prompt indices are taken first, then new ones. An index determines everything about a prompt (its task, epoch
and frame budget), also if files are mixed by weight, so a checkpoint saves prompt indices only.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSampler:
    """The prompt indices to sample next: the requeued ones, then `next_index` and all after it.

    >>> PromptSampler(next_index=7, requeued_indices=(2, 4)).take(3)
    ((2, 4, 7), PromptSampler(next_index=8, requeued_indices=()))
    """

    next_index: int = 0
    requeued_indices: tuple[int, ...] = ()

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "PromptSampler":
        """Return the sampler whose fields, as plain values, a checkpoint holds."""
        return cls(next_index=int(state["next_index"]), requeued_indices=tuple(state["requeued_indices"]))

    def take(self, count: int) -> tuple[tuple[int, ...], "PromptSampler"]:
        """Return the next `count` prompt indices, and the sampler after them."""
        requeued = self.requeued_indices[:count]
        end = self.next_index + count - len(requeued)
        rest = replace(self, next_index=end, requeued_indices=self.requeued_indices[count:])
        return (*requeued, *range(self.next_index, end)), rest

    def requeue(self, prompt_indices: Iterable[int]) -> "PromptSampler":
        """Return a sampler that takes these prompt indices again first, in ascending order."""
        return replace(self, requeued_indices=tuple(sorted({*prompt_indices, *self.requeued_indices})))
