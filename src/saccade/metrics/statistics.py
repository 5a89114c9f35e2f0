"""Compute means with 95 % intervals over clusters, and decide whether a difference is significant.

A cluster is one independent piece of evidence: all samples of a task, and all tasks about the same files. A model that
misses an event in a clip fails all questions about it, so repeated samples and further questions don't narrow an
interval. An estimate therefore holds the number of clusters beside that of tasks, and `explain_insignificance` alone
decides whether a difference is significant.

The interval (`compute_interval`) is Student's t over the clusters' means and one pseudo-cluster at each bound of the
metric. It generalizes Agresti and Coull's interval of a proportion (1998, The American Statistician 52:119), which adds
two successes and two failures, to fractional scores. The plain t interval and the bootstrap have no width if all
clusters score the same, and are too narrow for few clusters; an exact interval of a mean of unknown distribution
doesn't exist. `benchmarks/interval_coverage.py` measures the coverage of all of them.

Runs of several seeds have two intervals: over clips (other questions, same seeds) and over seeds (other data, weights
and training); see `estimate_over_seeds`. Axis letters: C clusters, S seeds.
"""

import math
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

import numpy as np
from numpy.typing import ArrayLike, NDArray

from saccade.errors import DataError
from saccade.types import Task

MIN_CLUSTERS = 6  # of a significant difference: with five, a sign test can't reach the level (2 / 2**5 = 0.0625)
SIGNIFICANCE_LEVEL = 0.05  # a p-value of this or more is no evidence of a difference
ROUNDING = 1e-9  # a difference of less is none
Z_QUANTILE = 1.959964  # the 97.5 % quantile of the normal distribution
# The 97.5 % quantiles of Student's t with 1, 2, 3, … degrees of freedom.
STUDENT_T_QUANTILES = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060,
)  # fmt: skip
Interval = tuple[float, float]
FRACTION_BOUNDS: Interval = (0.0, 1.0)
DIFFERENCE_BOUNDS: Interval = (-1.0, 1.0)  # of fractions


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Record a mean with its 95 % interval, over `n` tasks in `num_clusters` clusters."""

    mean: float  # the mean of all values
    low: float  # lower end of the interval
    high: float  # upper end of the interval
    n: int  # number of tasks
    num_clusters: int  # number of clusters


def get_media_key(task: Task) -> str:
    """Return the cluster key of a task: its files, or its id if it has none."""
    return "\n".join(media.path for media in task.media) or task.id


def estimate_clustered_mean(
    values: Sequence[float],
    tasks: Sequence[str],
    *,
    weights: Mapping[str, float] | None = None,
    clusters: Mapping[str, str] | None = None,
    bounds: Interval = FRACTION_BOUNDS,
) -> Estimate:
    """Return the mean of all values with its interval; `tasks[i]` is the task of `values[i]`. Raises DataError without
    a value.

    `weights` maps a task to how often its values count (1 by default), `clusters` to its cluster (itself by default);
    `bounds` are the least and the largest possible value.

    >>> estimate = estimate_clustered_mean([1.0, 1.0, 0.0, 0.0], ["a", "b", "c", "d"])
    >>> estimate.mean, round(estimate.low, 2), round(estimate.high, 2), estimate.n, estimate.num_clusters
    (0.5, 0.0, 1.0, 4, 4)
    """
    if not values:
        raise DataError("there is no episode to average over; run the evaluation first", key="episodes")
    means_C, weights_C = average_by_cluster(values, tasks, weights=weights, clusters=clusters)
    mean, (low, high) = _average(means_C, weights_C), compute_interval(means_C, weights_C, bounds=bounds)
    return Estimate(mean=mean, low=low, high=high, n=len({*tasks}), num_clusters=len(means_C))


def average_by_cluster(
    values: Sequence[float],
    tasks: Sequence[str],
    *,
    weights: Mapping[str, float] | None = None,
    clusters: Mapping[str, str] | None = None,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the weighted mean of each cluster and its total weight [C], ordered by the clusters' names.

    Raises DataError for a value that is not finite.
    """
    members: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)  # by cluster: (weight * value, weight)
    for value, task in zip(values, tasks, strict=True):
        if not math.isfinite(value):
            raise DataError(f"a value of the task {task} is {value}; evaluate the task again", key=task, value=value)
        weight = weights[task] if weights else 1.0
        members[clusters[task] if clusters else task].append((weight * value, weight))
    # Exact sums in a fixed order: the same episodes give the same numbers, in any order.
    sums_C, weights_C = (
        np.array([math.fsum(pair[part] for pair in members[cluster]) for cluster in sorted(members)]) for part in (0, 1)
    )
    return sums_C / weights_C, weights_C


def compute_interval(
    means_C: ArrayLike, weights_C: ArrayLike | None = None, *, bounds: Interval | None, center: float | None = None
) -> Interval:
    """Return the 95 % interval of the weighted mean of the clusters' means [C], within `bounds`.

    With weights p_c that sum to 1, n = 1 / sum p_c^2 effective clusters and a pseudo-cluster at l and at h:

        m = (n sum_c p_c x_c + l + h) / (n + 2)
        SE^2 = (n^2 sum_c p_c^2 (x_c - m)^2 + (l - m)^2 + (h - m)^2) / (n + 2)^2
        interval = m ± t(n + 1) SE, extended to `center`, by default the weighted mean

    l and h are the `bounds`, so that the interval of equal means reaches as far as unseen clusters could: for n
    successes in n trials its lower limit is near Clopper and Pearson's exact one. Differences are no exception: if nine
    of ten clips gain 0.1 and one loses 0.9, eight clips show no loss in 0.43 of all cases.

    Without bounds nothing limits unseen clusters: the interval is plain Student's t with n - 1 degrees of freedom. Its
    coverage is 95 % for counts, 89 % for an exponential distribution (5 clusters); equal means give zero width.
    """
    x_C = np.asarray(means_C, dtype=np.float64)
    p_C = np.ones_like(x_C) if weights_C is None else np.asarray(weights_C, dtype=np.float64)
    p_C = p_C / p_C.sum()
    mean = float((p_C * x_C).sum()) if center is None else center
    num_effective = 1.0 / float((p_C**2).sum())
    # Rounding: three equal weights may make 2.9999999 effective clusters.
    count = math.floor(num_effective + 1e-6)
    if bounds is None:
        squares = float((p_C**2 * (x_C - mean) ** 2).sum())
        half = (
            get_t_quantile(max(1, count - 1)) * math.sqrt(squares * num_effective / (num_effective - 1))
            if squares
            else 0.0
        )
        return mean - half, mean + half
    low, high = bounds
    shrunk = (num_effective * mean + low + high) / (num_effective + 2)
    squares = (
        num_effective**2 * float((p_C**2 * (x_C - shrunk) ** 2).sum()) + (low - shrunk) ** 2 + (high - shrunk) ** 2
    )
    half = get_t_quantile(count + 1) * math.sqrt(squares) / (num_effective + 2)
    return max(low, min(mean, shrunk - half)), min(high, max(mean, shrunk + half))


def get_t_quantile(degrees: int) -> float:
    """Return the 97.5 % quantile of Student's t (beyond 25 degrees of freedom Fisher's expansion, to 0.001)."""
    if degrees <= len(STUDENT_T_QUANTILES):
        return STUDENT_T_QUANTILES[degrees - 1]
    z = Z_QUANTILE
    return z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)


def explain_insignificance(differences_C: Sequence[float] | NDArray[np.float64], interval: Interval) -> str:
    """Return why the clusters' differences [C], whose mean has this interval, are no evidence; "" if they are.

    Evidence of a difference takes MIN_CLUSTERS clusters, an interval that excludes zero, and an exact sign test over
    clusters that agrees: its p-value is below SIGNIFICANCE_LEVEL, and most clusters differ in the mean's direction.

    >>> explain_insignificance([0.2] * 6, (0.1, 0.3)), explain_insignificance([0.2] * 5, (0.1, 0.3))
    ('', '5 clusters, fewer than 6')
    >>> explain_insignificance([0.2] * 9, (-0.1, 0.3)), explain_insignificance([0.9, 0.9, -0.1, *[0] * 9], (0.1, 0.3))
    ('the interval includes zero', 'sign test over clusters, p = 1')
    """
    (low, high), (positive, negative) = interval, count_signs(differences_C)
    if not np.isfinite([*differences_C, low, high]).all():
        return "a difference is not a finite number"
    if len(differences_C) < MIN_CLUSTERS:
        clusters = "cluster" if len(differences_C) == 1 else "clusters"
        return f"{len(differences_C)} {clusters}, fewer than {MIN_CLUSTERS}"
    if low <= 0 <= high:
        return "the interval includes zero"
    p_value = compute_sign_test_p_value(positive, negative)
    agrees = (positive > negative) == (low > 0) and p_value < SIGNIFICANCE_LEVEL
    return "" if agrees else f"sign test over clusters, p = {p_value:.2g}"


def count_signs(differences: Sequence[float] | NDArray[np.float64]) -> tuple[int, int]:
    """Return how many differences are positive and how many negative."""
    values = np.asarray(differences, dtype=np.float64)
    return int((values > ROUNDING).sum()), int((values < -ROUNDING).sum())


def compute_sign_test_p_value(positive: int, negative: int) -> float:
    """Return the p-value of the exact sign test: the two-sided binomial test, at one half, of one count in the sum.

    For the tasks solved in only one of two evaluations it is McNemar's exact test (the exact conditional test in
    Fagerland, Lydersen and Laake 2013, BMC Medical Research Methodology 13:91).

    >>> round(compute_sign_test_p_value(1, 9), 12), compute_sign_test_p_value(0, 0), compute_sign_test_p_value(5, 5)
    (0.021484375, 1.0, 1.0)
    """
    n, least = positive + negative, min(positive, negative)
    # The largest term of the tail by its logarithm, as binomials and powers exceed a float; each other by its ratio.
    log_binomial = math.lgamma(n + 1) - math.lgamma(least + 1) - math.lgamma(n - least + 1)
    term = total = math.exp(log_binomial - n * math.log(2))
    for k in range(least, 0, -1):
        term *= k / (n - k + 1)
        total += term
        if term < total * sys.float_info.epsilon:
            break
    return min(1.0, 2 * total)


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedEstimate:
    """A mean over seeds, its two intervals, the mean of each seed, and the numbers of tasks and clips."""

    mean: float
    clip_interval: Interval | None = None  # None for metrics of training steps, and for equal values without bounds
    seed_interval: Interval | None = None  # None with one seed
    seed_means: tuple[float, ...]
    num_tasks: int = 0
    num_clips: int = 0


def estimate_over_seeds(
    values_S: Sequence[Mapping[str, float]], clips_S: Sequence[Mapping[str, str]], *, bounds: Interval | None
) -> SeedEstimate | None:
    """Return the mean over seeds of the means over their tasks, with both intervals; None without values.

    `values_S` maps, per seed, a task to its value, and `clips_S` a task to its clip. Every seed has data of its own, so
    tasks are nested in clips and clips in seeds. `bounds` are those of the values, None for counts and times.

    The interval over clips holds the seeds fixed: `compute_interval` over the clips of all seeds, each weighing its
    tasks' share in its seed's mean. The one over seeds is Student's t over the seeds' means, whose variance is that
    between seeds plus that between clips; it is at least as wide as the one over clips, since equal means of few seeds
    are chance.
    """
    clusters_S = [
        average_by_cluster([values[task] for task in sorted(values)], sorted(values), clusters=clips)
        for values, clips in zip(values_S, clips_S, strict=True)
        if values
    ]
    if not clusters_S:
        return None
    means_S = [_average(means_C, weights_C) for means_C, weights_C in clusters_S]
    mean = fmean(means_S)
    # Seeds are held fixed: what is left is how clips differ from the mean of their seed.
    x_C = np.concatenate([x_C - seed_mean + mean for (x_C, _), seed_mean in zip(clusters_S, means_S, strict=True)])
    p_C = np.concatenate([weights_C / weights_C.sum() for _, weights_C in clusters_S])
    has_interval = bounds is not None or np.ptp(x_C) > ROUNDING
    clip_interval = compute_interval(x_C, p_C, bounds=bounds, center=mean) if has_interval else None
    seed_interval = compute_seed_interval(means_S)
    if seed_interval is not None and clip_interval is not None:
        seed_interval = min(seed_interval[0], clip_interval[0]), max(seed_interval[1], clip_interval[1])
    return SeedEstimate(
        mean=mean,
        clip_interval=clip_interval,
        seed_interval=seed_interval,
        seed_means=tuple(means_S),
        num_tasks=sum(map(len, values_S)),
        num_clips=len(x_C),
    )


def compute_seed_interval(means_S: Sequence[float]) -> Interval | None:
    """Return Student's t interval of the mean over seeds; None for fewer than two."""
    if len(means_S) < 2:
        return None
    half = get_t_quantile(len(means_S) - 1) * stdev(means_S) / math.sqrt(len(means_S))
    return (fmean(means_S) - half, fmean(means_S) + half)


def _average(means_C: NDArray[np.float64], weights_C: NDArray[np.float64]) -> float:
    return math.fsum(means_C * weights_C) / math.fsum(weights_C)
