"""Intervals over clusters: coverage, exact for binary scores and simulated for others, and when a difference counts."""

import importlib
import math
import random
import sys
from pathlib import Path

import numpy as np
import pytest
from error_cases import raises
from hypothesis import given
from hypothesis import strategies as st

from saccade.errors import DataError
from saccade.metrics.statistics import (
    DIFFERENCE_BOUNDS,
    FRACTION_BOUNDS,
    STUDENT_T_QUANTILES,
    compute_interval,
    compute_seed_interval,
    estimate_clustered_mean,
    estimate_over_seeds,
    explain_insignificance,
    get_t_quantile,
)

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def simulation():
    sys.path.insert(0, str(BENCHMARKS))
    yield importlib.import_module("interval_coverage")
    sys.path.remove(str(BENCHMARKS))
    sys.modules.pop("interval_coverage")


# ---- intervals -----------------------------------------------------------------------------------------------------


def test_interval_by_hand():
    # Three clusters and pseudo-clusters at 0 and 1: m = (3 * 0.5 + 1) / 5, squares 0.02 + 0.25 + 0.25, t(4) = 2.776.
    low, high = compute_interval([0.4, 0.5, 0.6], bounds=FRACTION_BOUNDS)
    half = 2.776 * math.sqrt(0.52) / 5
    assert (low, high) == pytest.approx((0.5 - half, 0.5 + half))


def test_interval_of_a_difference_by_hand():
    # Eight clusters and pseudo-clusters at -1 and 1: m = 8 * 0.3 / 10, t(9) = 2.262.
    low, high = compute_interval([0.4, 0.2] * 4, bounds=DIFFERENCE_BOUNDS)
    squares = 4 * ((0.4 - 0.24) ** 2 + (0.2 - 0.24) ** 2) + (1 - 0.24) ** 2 + (1 + 0.24) ** 2
    half = 2.262 * math.sqrt(squares) / 10
    assert (low, high) == pytest.approx((0.24 - half, 0.24 + half))


def test_unseen_losses_are_within_the_interval(simulation):
    # Without a loss among eight clips, 9 of 10 clips may gain 0.1 and one may lose 0.9, which is 0 on average.
    equal_gains = [0.1] * 8
    interval = compute_interval(equal_gains, bounds=DIFFERENCE_BOUNDS)
    assert interval[0] < 0 < interval[1]
    assert explain_insignificance(equal_gains, interval) == "the interval includes zero"
    many = [0.1] * 60  # 0.9 ** 60 is 0.002: such losses would have been seen
    assert explain_insignificance(many, compute_interval(many, bounds=DIFFERENCE_BOUNDS)) == ""
    for design in simulation.RARE_LOSSES:
        for clusters in (3, 8, 16):
            assert simulation.measure_coverage(design, clusters, 150) >= 0.9, (design.name, clusters)
            assert simulation.measure_false_alarms(design, clusters, 100) <= 0.1, (design.name, clusters)


@pytest.mark.parametrize("clusters", [2, 3, 5, 8, 12, 24, 48])
def test_coverage_of_binary_scores_is_exact(clusters):
    successes = np.arange(clusters + 1)
    intervals = [compute_interval([1.0] * k + [0.0] * (clusters - k), bounds=FRACTION_BOUNDS) for k in successes]
    ways = np.array([math.comb(clusters, k) for k in successes], dtype=float)
    for p in np.linspace(0.005, 0.995, 199):
        covered = np.array([low - 1e-9 <= p <= high + 1e-9 for low, high in intervals])
        assert (ways * p**successes * (1 - p) ** (clusters - successes))[covered].sum() >= 0.92


@pytest.mark.parametrize("clusters", [3, 12, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 5, 8))])
def test_coverage_of_clustered_and_skewed_scores(simulation, clusters):
    for index in range(4, len(simulation.DESIGNS), 2):
        design = simulation.DESIGNS[index]
        assert simulation.measure_coverage(design, clusters, 150) >= 0.9, design.name


def test_plain_intervals_of_few_clusters_are_too_narrow(simulation):
    design = simulation.Design(kind="binary", mean=0.95, correlation=0.0, sizes="1 task")
    rng = np.random.default_rng(0)
    plain = [simulation.holds(design, simulation.compute_t_interval(*design.draw(rng, 5))) for _ in range(200)]
    assert np.mean(plain) < 0.5
    assert simulation.measure_coverage(design, 5, 200) > 0.95


@pytest.mark.parametrize("clusters", [3, 6, 12, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 5, 8))])
def test_no_difference_is_rarely_significant(simulation, clusters):
    rates = [simulation.measure_false_alarms(design, clusters, 100) for design in simulation.NULL_DESIGNS]
    assert np.mean(rates) <= 0.05
    assert max(rates) <= 0.1  # of 100 draws
    assert clusters >= 6 or max(rates) == 0


@pytest.mark.parametrize("clusters", [3, 5, 8, 12])
def test_coverage_of_counts(clusters):
    """Without bounds: calls per episode of clips with one or four tasks, and times."""
    rng = np.random.default_rng(0)
    designs = {
        "calls": (lambda: rng.binomial(6, 0.4, clusters), 2.4),
        "calls of four tasks": (lambda: rng.poisson(1.5, (clusters, 4)).mean(axis=1), 1.5),
        "seconds": (lambda: rng.gamma(8, 0.5, clusters), 4.0),
        "skewed seconds": (lambda: rng.exponential(1.0, clusters), 1.0),
    }
    for name, (draw, truth) in designs.items():
        intervals = [compute_interval(draw(), bounds=None) for _ in range(400)]
        least = 0.84 if name == "skewed seconds" else 0.9
        assert np.mean([low <= truth <= high for low, high in intervals]) >= least, name


def test_interval_without_bounds_by_hand():
    # Student's t of 1, 2 and 6: mean 3, variance 7, t(2) = 4.303; a cluster of twice the weight is no further cluster.
    half = 4.303 * math.sqrt(7 / 3)
    assert compute_interval([1.0, 2.0, 6.0], bounds=None) == pytest.approx((3 - half, 3 + half))
    low, high = compute_interval([1.0, 2.0, 6.0], [1, 2, 1], bounds=None)
    assert high - low > 2 * half * 0.8
    assert low < 2.75 < high
    assert compute_interval([2.0], bounds=None) == (2.0, 2.0)


def test_equal_scores_have_a_wide_interval():
    assert compute_interval([1.0], bounds=FRACTION_BOUNDS) == (0.0, 1.0)
    low, high = compute_interval([1.0] * 5, bounds=FRACTION_BOUNDS)
    # Clopper and Pearson's limit is 0.025 ** (1 / 5) = 0.478
    assert 0.45 < low < 0.55
    assert high == 1.0
    low, high = compute_interval([0.0] * 8, bounds=DIFFERENCE_BOUNDS)
    assert low < -0.2
    assert high > 0.2
    # Nothing is known of a metric without bounds if it never varied.
    assert compute_interval([2.0] * 5, bounds=None) == (2.0, 2.0)
    estimate = estimate_over_seeds([{"a": 2.0, "b": 2.0}], [{"a": "x", "b": "y"}], bounds=None)
    assert estimate.clip_interval is None


def test_a_dominating_cluster_counts_as_one():
    shared = compute_interval([0.9, 0.1, 0.1], [20, 1, 1], bounds=FRACTION_BOUNDS)
    assert shared == (0.0, 1.0)
    low, high = compute_interval([0.9, 0.1, 0.1] * 4, bounds=FRACTION_BOUNDS)
    assert high - low < 0.6


def test_quantiles():
    assert get_t_quantile(1) == 12.706
    assert list(STUDENT_T_QUANTILES) == sorted(STUDENT_T_QUANTILES, reverse=True)
    assert [round(get_t_quantile(degrees), 3) for degrees in (26, 40, 120, 10**6)] == [2.055, 2.021, 1.98, 1.96]


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30), st.randoms())
def test_interval_holds_the_mean_and_stays_within_bounds(values, rng):
    estimate = estimate_clustered_mean(values, [str(i) for i in range(len(values))])
    assert 0 <= estimate.low <= estimate.mean <= estimate.high <= 1
    pairs = list(enumerate(values))
    rng.shuffle(pairs)
    shuffled = estimate_clustered_mean([value for _, value in pairs], [str(i) for i, _ in pairs])
    assert shuffled == estimate  # the order of rows doesn't matter


def test_clusters_and_samples_do_not_narrow_the_interval():
    values, tasks = [1.0, 0.0] * 10, [str(i) for i in range(20)]
    once = estimate_clustered_mean(values, tasks)
    assert estimate_clustered_mean(values * 3, tasks * 3) == once
    more = [f"{i}.{question}" for question in range(3) for i in range(20)]
    clips = {task: task.split(".")[0] for task in more}
    clustered = estimate_clustered_mean(values * 3, more, clusters=clips)
    assert (clustered.low, clustered.high, clustered.n, clustered.num_clusters) == (once.low, once.high, 60, 20)
    pretended = estimate_clustered_mean(values * 3, more)
    assert pretended.high - pretended.low < once.high - once.low


def test_weights_count_tasks_several_times():
    estimate = estimate_clustered_mean([1.0, 0.0], ["a", "b"], weights={"a": 3.0, "b": 1.0})
    assert estimate.mean == 0.75
    assert (estimate.low, estimate.high) == (0.0, 1.0)


def test_empty_mean_raises():
    with raises(DataError, key="episodes"):
        estimate_clustered_mean([], [])


@pytest.mark.parametrize("value", [math.inf, -math.inf])
def test_value_that_is_not_finite_raises(value):
    with raises(DataError, key="b", value=value):
        estimate_clustered_mean([0.5, value], ["a", "b"])


# ---- significance --------------------------------------------------------------------------------------------------


def test_reasons_of_insignificance():
    clear = (0.1, 0.3)
    assert explain_insignificance([0.2] * 6, clear) == ""
    assert explain_insignificance([-0.2] * 6, (-0.3, -0.1)) == ""
    assert "5 clusters" in explain_insignificance([0.2] * 5, clear)
    assert "1 cluster," in explain_insignificance([0.2], clear)
    assert "zero" in explain_insignificance([0.2] * 6, (0.0, 0.3))
    # The mean is positive because of two clusters; most are negative.
    assert "p = 0.11" in explain_insignificance([0.9, 0.9, *[-0.01] * 8], clear)
    assert "p = 0.0078" in explain_insignificance([-0.1] * 8, clear)  # significant, in the other direction


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_difference_that_is_not_finite_is_no_evidence(bad):
    assert explain_insignificance([0.2] * 6, (0.1, bad))
    assert explain_insignificance([*[0.2] * 9, bad], (0.1, 0.3))


def test_many_clusters_are_tested_like_few():
    # A count of numpy's overflows where Python's doesn't.
    assert explain_insignificance(np.full(100, 0.2), (0.1, 0.3)) == ""
    assert (
        explain_insignificance(np.array([0.2] * 1000 + [-0.2] * 1000), (0.1, 0.3)) == "sign test over clusters, p = 1"
    )


def test_a_large_consistent_gain_is_significant():
    rng = random.Random(0)
    differences = [0.3 + rng.gauss(0, 0.05) for _ in range(12)]
    interval = compute_interval(differences, bounds=DIFFERENCE_BOUNDS)
    assert 0 < interval[0] < 0.3 < interval[1]
    assert explain_insignificance(differences, interval) == ""


# ---- seeds ---------------------------------------------------------------------------------------------------------


def test_seed_interval_is_students_t():
    # t with 2 degrees of freedom is 4.303; the standard error of 0.4, 0.5, 0.6 is 0.1 / sqrt(3)
    assert compute_seed_interval([0.4, 0.5, 0.6]) == pytest.approx((0.25156, 0.74844), abs=1e-5)
    assert compute_seed_interval([0.0, 1.0]) == pytest.approx((0.5 - 12.706 * 0.5, 0.5 + 12.706 * 0.5))
    assert compute_seed_interval([0.7]) is None


def make_seeds(num_seeds, num_clips, tasks_per_clip, value):
    names = [(clip, task) for clip in range(num_clips) for task in range(tasks_per_clip)]
    values = [{f"{clip}.{task}": value(seed, clip, task) for clip, task in names} for seed in range(num_seeds)]
    return values, [{f"{clip}.{task}": str(clip) for clip, task in names}] * num_seeds


def test_interval_over_clips_ignores_further_questions():
    few, many = (
        estimate_over_seeds(*make_seeds(2, 12, tasks, lambda seed, clip, task: float(clip % 2)), bounds=(0.0, 1.0))
        for tasks in (1, 8)
    )
    assert few.clip_interval == pytest.approx(many.clip_interval)
    assert (many.num_tasks, many.num_clips, len(many.seed_means)) == (192, 24, 2)


def test_interval_over_clips_holds_the_seeds_fixed():
    # Clips of a seed score alike, and seeds differ: only the interval over seeds is wide.
    values, clips = make_seeds(3, 24, 4, lambda seed, clip, task: 0.2 + 0.3 * seed)
    estimate = estimate_over_seeds(values, clips, bounds=(0.0, 1.0))
    assert estimate.clip_interval[1] - estimate.clip_interval[0] < 0.06
    assert estimate.seed_interval == pytest.approx(compute_seed_interval([0.2, 0.5, 0.8]))


def test_equal_seeds_have_no_narrow_interval():
    values, clips = make_seeds(3, 8, 4, lambda seed, clip, task: float(clip % 2))
    estimate = estimate_over_seeds(values, clips, bounds=(0.0, 1.0))
    assert estimate.seed_interval == estimate.clip_interval
    assert estimate.seed_interval[1] - estimate.seed_interval[0] > 0.3


def test_coverage_over_seeds():
    """Seeds and clips both vary: the interval over seeds holds the true mean."""
    rng, hits = np.random.default_rng(0), 0
    for _ in range(200):
        shifts = rng.normal(0, 0.1, 3)
        values, clips = make_seeds(3, 8, 3, lambda seed, clip, task: 0.0)
        for seed, tasks in enumerate(values):
            levels = np.clip(0.5 + shifts[seed] + rng.normal(0, 0.15, 8), 0, 1)
            for task in tasks:
                tasks[task] = float(rng.random() < levels[int(task.split(".")[0])])
        low, high = estimate_over_seeds(values, clips, bounds=(0.0, 1.0)).seed_interval
        hits += low <= 0.5 <= high
    assert hits / 200 >= 0.92
