"""Compute means with 95 % intervals: percentile bootstraps over clusters (Efron & Tibshirani 1993, section 13.3).

A cluster is one independent piece of evidence: all samples of a task, and all tasks about the same files. A model that
misses an event in a clip fails all questions about it, so they are drawn together; repeated samples and further
questions then don't narrow the interval. If all clusters score the same, the bootstrap has no spread and the interval
is a point; read it together with n.

Runs of several seeds have two intervals: over tasks (other questions, same seeds) and over seeds (other data, weights
and training: Student's t over the seeds' means). Axis letters: S seeds, N tasks of a seed, R resamples.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

import numpy as np

from saccade.errors import DataError
from saccade.types import Task

NUM_RESAMPLES = 2000
BOOTSTRAP_SEED = 20605  # for every bootstrap, so that a report is reproducible to the digit
# The 97.5 % quantiles of Student's t with 1, 2, 3, … degrees of freedom; the last serves for any more.
STUDENT_T_QUANTILES = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060,
)  # fmt: skip
Interval = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Record a mean with its 95 % interval, over `n` tasks."""

    mean: float
    low: float
    high: float
    n: int


def get_media_key(task: Task) -> str:
    """Return the cluster key of a task: its files, or its id if it has none."""
    return "\n".join(media.path for media in task.media) or task.id


def bootstrap_mean(
    values: Sequence[float],
    tasks: Sequence[str],
    *,
    num_resamples: int = NUM_RESAMPLES,
    weights: Mapping[str, float] | None = None,
    clusters: Mapping[str, str] | None = None,
) -> Estimate:
    """Return the mean of all values with its interval; `tasks[i]` is the task of `values[i]`. Raises DataError without
    a value.

    `weights` maps a task to how often its values count (1 by default), `clusters` to the cluster it is drawn with
    (itself by default).

    >>> bootstrap_mean([1.0, 1.0, 0.0, 0.0], ["a", "b", "c", "d"])
    Estimate(mean=0.5, low=0.0, high=1.0, n=4)
    """
    if not values:
        raise DataError("there is no episode to average over; run the evaluation first", key="episodes")
    members: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)  # by cluster: (weight * value, weight)
    for value, task in zip(values, tasks, strict=True):
        weight = weights[task] if weights else 1.0
        members[clusters[task] if clusters else task].append((weight * value, weight))
    # Exact sums in a fixed order: the same episodes give the same numbers, in any order.
    sums, counts = (
        np.array([math.fsum(pair[part] for pair in members[cluster]) for cluster in sorted(members)]) for part in (0, 1)
    )
    # One resample at a time: an index matrix of all resamples takes gigabytes on a large benchmark.
    rng = np.random.default_rng(BOOTSTRAP_SEED)
    means = np.empty(num_resamples)
    for i in range(num_resamples):
        drawn = rng.integers(0, len(sums), len(sums))
        means[i] = sums[drawn].sum() / counts[drawn].sum()
    low, high = np.percentile(means, [2.5, 97.5])
    return Estimate(mean=float(sums.sum() / counts.sum()), low=float(low), high=float(high), n=len({*tasks}))


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedEstimate:
    """A mean over seeds, its two intervals, the mean of each seed, and the number of tasks."""

    mean: float
    task_interval: Interval | None = None  # None for metrics of training steps
    seed_interval: Interval | None = None  # None with one seed
    seed_means: tuple[float, ...]
    num_tasks: int = 0


def estimate_over_seeds(task_values_by_seed: Sequence[Mapping[str, float]]) -> SeedEstimate | None:
    """Return the mean over seeds of the means over their tasks, with both intervals; None without values."""
    values_S = [np.array([values[task] for task in sorted(values)]) for values in task_values_by_seed if values]
    if not values_S:
        return None
    means_S = tuple(float(values_N.mean()) for values_N in values_S)
    rng = np.random.default_rng(BOOTSTRAP_SEED)
    resampled_SR = [
        values_N[rng.integers(0, len(values_N), (NUM_RESAMPLES, len(values_N)))].mean(1) for values_N in values_S
    ]
    low, high = np.percentile(np.mean(resampled_SR, axis=0), [2.5, 97.5])
    return SeedEstimate(
        mean=fmean(means_S),
        task_interval=(float(low), float(high)),
        seed_interval=compute_seed_interval(means_S),
        seed_means=means_S,
        num_tasks=sum(map(len, values_S)),
    )


def compute_seed_interval(means_S: Sequence[float]) -> Interval | None:
    """Return Student's t interval of the mean over seeds; None for fewer than two."""
    if len(means_S) < 2:
        return None
    quantile = STUDENT_T_QUANTILES[min(len(means_S) - 1, len(STUDENT_T_QUANTILES)) - 1]
    half = quantile * stdev(means_S) / math.sqrt(len(means_S))
    return (fmean(means_S) - half, fmean(means_S) + half)
