"""Which prompts come next: every task once an epoch, in an order of the epoch's own.

A *place* is a number in the endless row of epochs:

    place     0  1  2  3 | 4  5  6  7 | 8 ...        4 tasks
    epoch         0      |      1     |  2
    task      b  d  a  c | c  a  d  b | ...

Places are taken from the front: first those that are to go again, then new ones. Everything about a prompt (its task,
epoch and frame budget) follows from its place, so that a place is all a checkpoint has to remember; so it does where
files are mixed by weight.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from saccade.data.mixture import Mixture
from saccade.types import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """How far the row has been taken: `front` goes again, then come `cursor` and all places behind it.

    >>> places, rest = Prompts(cursor=7, front=(2, 4)).take(3)
    >>> places, rest
    ((2, 4, 7), Prompts(cursor=8, front=()))
    """

    cursor: int = 0
    front: tuple[int, ...] = ()

    def take(self, count: int) -> tuple[tuple[int, ...], "Prompts"]:
        """The next `count` places, and what is left."""
        again = self.front[:count]
        end = self.cursor + count - len(again)
        return (*again, *range(self.cursor, end)), Prompts(cursor=end, front=self.front[count:])

    def again(self, places: Iterable[int]) -> "Prompts":
        """The row with places that were taken put back at its front, earliest first."""
        return Prompts(cursor=self.cursor, front=tuple(sorted({*places, *self.front})))


def task_at(tasks: Sequence[Task], seed: int, place: int) -> Task:
    """The task at a place of the row; of several files mixed, see `data.mixture`."""
    return Mixture.of(tasks).at(seed, place)[0]


def epoch_at(tasks: Sequence[Task], seed: int, place: int) -> int:
    """The epoch that a place belongs to: its own file's, where several are mixed."""
    return Mixture.of(tasks).at(seed, place)[1]
