"""Mix datasets by weight into one endless sequence of tasks.

    weights 2 : 1          cycle 0           cycle 1
    prompt index            0  1  2           3  4  5   ...
    dataset                 a  b  a           a  a  b
    index in dataset        0  0  1           2  3  1

Every cycle takes the share of its weight from each dataset, in shuffled order. Each dataset is traversed in epochs as
if it were alone: every task once, in the order of the epoch. Everything follows from the seed and the prompt index, so
that a run resumes from an index alone, and a single dataset gives the same order with and without a mixture.
"""

import functools
import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from saccade.errors import DataError
from saccade.types import Task
from saccade.utils.hashing import derive_seed

MAX_CYCLE_LENGTH = 1000  # prompts


@dataclass(frozen=True, slots=True, eq=False)
class Mixture(Sequence[Task]):
    """Datasets, with weights above 0, as a sequence of all their tasks; `get_task` draws from them by weight."""

    datasets: tuple[Sequence[Task], ...]
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.datasets or not all(map(len, self.datasets)):
            raise DataError("a dataset of the mixture is empty; remove its file from data.train", key="data.train")

    @classmethod
    def from_tasks(cls, tasks: Sequence[Task]) -> "Mixture":
        """Return tasks as a mixture: unchanged if they are one, else as its only dataset."""
        return tasks if isinstance(tasks, Mixture) else cls((tasks,), (1.0,))

    def __getitem__(self, index: Any) -> Any:
        """Return the task (or tasks) at an index of the concatenated datasets."""
        return [task for dataset in self.datasets for task in dataset][index]

    def __iter__(self) -> Iterator[Task]:
        return itertools.chain.from_iterable(self.datasets)

    def __len__(self) -> int:
        return sum(map(len, self.datasets))

    def get_task(self, seed: int, prompt_index: int) -> tuple[Task, int]:
        """Return the task at an index of the sequence, and the epoch of its dataset."""
        dataset = self.datasets[0]
        if len(self.datasets) > 1:
            # From the prompt index alone: a resumed run needs no other state.
            counts = compute_cycle_counts(self.weights)
            cycle, rank = divmod(prompt_index, sum(counts))
            index, offset = shuffle_cycle(counts, seed, cycle)[rank]
            dataset, prompt_index = self.datasets[index], cycle * counts[index] + offset
            seed = derive_seed("part", seed, index)  # two datasets of the same length must not be shuffled alike
        epoch, rank = divmod(prompt_index, len(dataset))
        return dataset[compute_epoch_order(len(dataset), seed, epoch)[rank]], epoch


@functools.lru_cache(maxsize=64)
def compute_cycle_counts(weights: tuple[float, ...]) -> tuple[int, ...]:
    """Return the prompts per cycle of each dataset: the shortest cycle with exact shares, at most 1000 prompts.

    Weights that need a longer cycle are rounded by largest remainder; every dataset gets at least one prompt.

    >>> compute_cycle_counts((2.0, 1.0)), compute_cycle_counts((0.7, 0.3))
    ((2, 1), (7, 3))
    """
    total = sum(weights)
    for length in range(len(weights), MAX_CYCLE_LENGTH + 1):
        exact = [weight / total * length for weight in weights]
        if all(abs(share - round(share)) < 1e-9 and round(share) for share in exact):
            return tuple(map(round, exact))
    exact = [weight / total * MAX_CYCLE_LENGTH for weight in weights]
    counts = [max(1, math.floor(share)) for share in exact]
    by_remainder = sorted(range(len(counts)), key=lambda index: counts[index] - exact[index])
    for index in by_remainder[: max(0, MAX_CYCLE_LENGTH - sum(counts))]:
        counts[index] += 1
    return tuple(counts)


@functools.lru_cache(maxsize=8)
def shuffle_cycle(counts: tuple[int, ...], seed: int, cycle: int) -> tuple[tuple[int, int], ...]:
    """Return, for each prompt of a cycle, the dataset's index and the number of its earlier prompts in the cycle."""
    # Every cycle holds each dataset's exact share, so that no part of training lacks one by chance.
    indices = [index for index, count in enumerate(counts) for _ in range(count)]
    random.Random(derive_seed("mixture", seed, cycle)).shuffle(indices)
    offsets = [itertools.count() for _ in counts]
    return tuple((index, next(offsets[index])) for index in indices)


@functools.lru_cache(maxsize=32)  # a training step looks up each of its prompts
def compute_epoch_order(num_tasks: int, seed: int, epoch: int) -> tuple[int, ...]:
    """Return the shuffled indices of a dataset's tasks in an epoch."""
    indices = list(range(num_tasks))
    random.Random(derive_seed("order", seed, epoch)).shuffle(indices)
    return tuple(indices)
