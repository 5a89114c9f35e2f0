"""Estimates against values computed by hand: means over seeds, both intervals, paired differences."""

import math
from statistics import fmean

import pytest
from ablation_cases import build_columns
from hypothesis import given
from hypothesis import strategies as st

from saccade.metrics.statistics import STUDENT_T_QUANTILES, compute_seed_interval, estimate_over_seeds
from saccade.runs.ablations.results import VariantResult, compute_task_means, estimate_difference, estimate_final_mean


def test_episodes_of_a_task_are_averaged_first():
    estimate = build_columns(task=["a", "a", "b"], accuracy=[1.0, 0.0, 1.0], calls=[2, 2, 4])
    assert compute_task_means(estimate, "accuracy") == {"a": 0.5, "b": 1.0}
    assert compute_task_means(estimate, "calls", ("task", "b")) == {"b": 4.0}


def test_seeds_have_equal_weight():
    estimate = estimate_over_seeds([{"a": 1.0, "b": 1.0, "c": 1.0, "d": 1.0}, {"e": 0.0}])
    assert estimate.mean == 0.5
    assert estimate.seed_means == (1.0, 0.0)
    assert estimate.num_tasks == 5


def test_seed_interval_is_students_t():
    # mean 0.5, sd 0.1, three seeds: 4.303 * 0.1 / sqrt(3) = 0.24844
    assert compute_seed_interval([0.4, 0.5, 0.6]) == pytest.approx((0.25156, 0.74844), abs=1e-5)
    assert compute_seed_interval([0.0, 1.0]) == pytest.approx((0.5 - 12.706 * 0.5, 0.5 + 12.706 * 0.5))
    assert compute_seed_interval([0.7]) is None
    assert list(STUDENT_T_QUANTILES) == sorted(STUDENT_T_QUANTILES, reverse=True)
    many = [float(i % 2) for i in range(100)]
    low, high = compute_seed_interval(many)
    assert high - low == pytest.approx(2 * STUDENT_T_QUANTILES[-1] * math.sqrt(0.25 * 100 / 99) / 10)


def test_task_interval_matches_a_proportion():
    # 40 of 100 tasks in each of two seeds: the standard error of the mean of both is sqrt(0.24 / 200) = 0.0346
    tasks = {f"t{i}": float(i < 40) for i in range(100)}
    low, high = estimate_over_seeds([tasks, tasks]).task_interval
    assert low == pytest.approx(0.4 - 1.96 * 0.0346, abs=0.012)
    assert high == pytest.approx(0.4 + 1.96 * 0.0346, abs=0.012)


def test_difference_is_paired_by_task_within_a_seed():
    before = {0: {"a": 0.0, "b": 1.0}, 1: {"c": 0.0}}
    after = {0: {"a": 1.0, "b": 1.0}, 1: {"c": 1.0}, 2: {"d": 1.0}}
    estimate = estimate_difference(after, before)
    assert estimate.seed_means == (0.5, 1.0)
    assert estimate.mean == 0.75
    assert estimate_difference({0: {"a": 1.0}}, {1: {"a": 1.0}}) is None
    assert estimate_difference({0: {"a": 1.0}}, {0: {"b": 1.0}}) is None


def test_estimate_of_nothing_is_none():
    assert estimate_over_seeds([]) is None
    assert estimate_over_seeds([{}]) is None


def test_final_mean_is_over_the_last_third():
    rows = [{"step": step, "accuracy": float(step)} for step in range(1, 10)]
    result = VariantResult(
        condition="c", variant="a", before={}, after={}, step_metrics={0: rows, 1: [*rows[:-1], {"step": 9}]}
    )
    estimate = estimate_final_mean(result, "accuracy")
    assert estimate.seed_means == (8.0, 7.5)
    assert estimate.task_interval is None
    assert estimate_final_mean(result, "missing") is None


@given(st.lists(st.lists(st.floats(0, 1), min_size=1, max_size=8), min_size=1, max_size=4))
def test_mean_is_within_its_intervals(seeds):
    estimate = estimate_over_seeds([{f"t{i}": value for i, value in enumerate(values)} for values in seeds])
    assert estimate.mean == pytest.approx(fmean(map(fmean, seeds)))
    # A bootstrap of few tasks need not hold the mean, but it can't leave the values.
    assert min(min(values) for values in seeds) - 1e-9 <= estimate.task_interval[0] <= estimate.task_interval[1]
    assert (
        estimate.seed_interval is None
        or estimate.seed_interval[0] <= estimate.mean + 1e-9 <= estimate.seed_interval[1] + 2e-9
    )
