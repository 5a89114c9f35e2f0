"""Files of tasks mixed by weight, in one endless row of places.

    weights 2 : 1        cycle 0           cycle 1
    place                0  1  2           3  4  5   ...
    from file            a  b  a           a  a  b
    its own place        0  0  1           2  3  1

Every cycle takes from each file what its weight says, in an order of its own. A file is gone through in epochs as if it
were alone: every task once, in an order of the epoch's own. All of that follows from the seed and the place, so that a
run can go on at any step from a place alone, and one file alone gives what it would give without a mixture.
"""

import functools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

from saccade.errors import DataError
from saccade.types import Task, seed_of

LONGEST = 1000  # places of a cycle


@dataclass(frozen=True, slots=True, eq=False)
class Mixture(Sequence[Task]):
    """Tasks of several files: `Mixture((films, pictures), (2.0, 1.0))` has two of films for one of pictures.

    As a sequence it is all tasks, file by file. Raises DataError where a file is empty or a weight isn't above 0.
    """

    parts: tuple[Sequence[Task], ...]
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.parts or not all(self.parts):
            raise DataError("there are no tasks to learn from; a file of a mixture is empty")
        if len(self.parts) != len(self.weights) or not all(math.isfinite(each) and each > 0 for each in self.weights):
            raise DataError(f"the weights of a mixture can't be {self.weights}; give each file a number above 0")

    @classmethod
    def of(cls, tasks: Sequence[Task]) -> "Mixture":
        """Tasks as a mixture: themselves where they are one, else alone."""
        return tasks if isinstance(tasks, Mixture) else cls((tasks,), (1.0,))

    @overload
    def __getitem__(self, at: int) -> Task: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Task]: ...
    def __getitem__(self, at: int | slice) -> Task | Sequence[Task]:
        """The task (or tasks) at a place of all files behind each other."""
        return [task for part in self.parts for task in part][at]

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def at(self, seed: int, place: int) -> tuple[Task, int]:
        """The task at a place of the row, and the epoch of its file that it belongs to."""
        number, own = self._own(seed, place)
        part = self.parts[number]
        epoch, rank = divmod(own, len(part))
        # files of one length mustn't go through their tasks in step with each other
        seed = seed if len(self.parts) == 1 else seed_of("part", seed, number)
        return part[order(len(part), seed, epoch)[rank]], epoch

    def _own(self, seed: int, place: int) -> tuple[int, int]:
        """The file that a place is taken from, and which of the file's own places it is."""
        if len(self.parts) == 1:
            return 0, place
        # From the place alone: a resumed run needs no state but how far it is.
        counts = shares(self.weights)
        cycle, rank = divmod(place, sum(counts))
        number, before = dealt(counts, seed, cycle)[rank]
        return number, cycle * counts[number] + before


@functools.lru_cache(maxsize=64)
def shares(weights: tuple[float, ...]) -> tuple[int, ...]:
    """How many places of a cycle each file has: the shortest cycle that fits the weights, at most 1000 places.

    Longer ones are rounded, by largest remainder, with one place for each at least.

    >>> shares((2.0, 1.0)), shares((0.7, 0.3)), shares((1.0, 1.0, 1.0))
    ((2, 1), (7, 3), (1, 1, 1))
    """
    total = sum(weights)
    for length in range(len(weights), LONGEST + 1):
        exact = [weight / total * length for weight in weights]
        if all(abs(each - round(each)) < 1e-9 and round(each) for each in exact):
            return tuple(map(round, exact))
    exact = [weight / total * LONGEST for weight in weights]
    counts = [max(1, math.floor(each)) for each in exact]
    by_rest = sorted(range(len(counts)), key=lambda number: counts[number] - exact[number])
    for number in by_rest[: max(0, LONGEST - sum(counts))]:
        counts[number] += 1
    return tuple(counts)


@functools.lru_cache(maxsize=8)
def dealt(counts: tuple[int, ...], seed: int, cycle: int) -> tuple[tuple[int, int], ...]:
    """For each place of a cycle its file, and how many places of the cycle that file had before."""
    # Every cycle holds each file's exact share, so that no stretch of training lacks one by chance.
    deck = [number for number, count in enumerate(counts) for _ in range(count)]
    random.Random(seed_of("mixture", seed, cycle)).shuffle(deck)
    seen = [0] * len(counts)
    row = []
    for number in deck:
        row.append((number, seen[number]))
        seen[number] += 1
    return tuple(row)


@functools.lru_cache(maxsize=32)  # a step asks for each of its places
def order(count: int, seed: int, epoch: int) -> tuple[int, ...]:
    """The order of the tasks of a file in an epoch."""
    places = list(range(count))
    random.Random(seed_of("order", seed, epoch)).shuffle(places)
    return tuple(places)
