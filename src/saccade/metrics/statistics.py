"""Means with 95 % intervals: percentile bootstraps over units (Efron & Tibshirani 1993, section 13.3).

A unit is what is one piece of evidence: all attempts at a task, and all tasks about the same files. Who fails to see
what happens in a clip fails all questions about it, so that they are drawn together; repeats and further questions then
don't make an interval narrower than they may. Where all units score the same, the bootstrap knows no spread and the
interval is a point; read it with n.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from saccade.errors import DataError
from saccade.types import Task

RESAMPLES = 2000
SEED = 20605  # of every bootstrap, so that a report is reproducible to the digit


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean with its 95 % interval, over `n` tasks.

    >>> Estimate(mean=0.5, low=0.25, high=0.75, n=8).n
    8
    """

    mean: float
    low: float
    high: float
    n: int


def same_media(task: Task) -> str:
    """The unit of a task whose questions share files; a task without one stands alone."""
    return "\n".join(media.path for media in task.media) or task.id


def estimate(
    values: Sequence[float],
    tasks: Sequence[str],
    *,
    resamples: int = RESAMPLES,
    weights: Mapping[str, float] | None = None,
    units: Mapping[str, str] | None = None,
) -> Estimate:
    """The mean of all values with its interval; `tasks[i]` is the task of `values[i]`. DataError if empty.

    `weights` says, by task, how often its values count (once by default), `units` what each task is drawn with (by
    itself by default).

    >>> estimate([1.0, 1.0, 0.0, 0.0], ["a", "b", "c", "d"])
    Estimate(mean=0.5, low=0.0, high=1.0, n=4)
    """
    if not values:
        raise DataError("there is no episode to take a mean over")
    held: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for value, task in zip(values, tasks, strict=True):
        times = weights[task] if weights else 1.0
        held[units[task] if units else task].append((times * value, times))
    # Exact sums in a fixed order: the same episodes give the same numbers, in any order.
    sums, counts = (np.array([math.fsum(one[part] for one in held[unit]) for unit in sorted(held)]) for part in (0, 1))
    # One resample at a time: an index matrix of all of them would take gigabytes on a large benchmark.
    draws = np.random.default_rng(SEED)
    means = np.empty(resamples)
    for i in range(resamples):
        drawn = draws.integers(0, len(sums), len(sums))
        means[i] = sums[drawn].sum() / counts[drawn].sum()
    low, high = np.percentile(means, [2.5, 97.5])
    return Estimate(mean=float(sums.sum() / counts.sum()), low=float(low), high=float(high), n=len({*tasks}))
