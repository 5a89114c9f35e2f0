"""Estimates against values computed by hand: means over seeds, both intervals, paired differences."""

import pytest
from ablation_cases import build_columns
from error_cases import raises

from saccade.errors import RunError
from saccade.metrics.statistics import estimate_over_seeds
from saccade.runs.ablations.results import (
    VariantResult,
    collect_clips,
    compute_task_means,
    estimate_difference,
    estimate_final_mean,
    get_bounds,
)
from saccade.runs.ablations.spec import TableSpec


def test_episodes_of_a_task_are_averaged_first():
    estimate = build_columns(task=["a", "a", "b"], accuracy=[1.0, 0.0, 1.0], calls=[2, 2, 4])
    assert compute_task_means(estimate, "accuracy") == {"a": 0.5, "b": 1.0}
    assert compute_task_means(estimate, "calls", ("task", "b")) == {"b": 4.0}


def test_seeds_have_equal_weight():
    values = [{"a": 1.0, "b": 1.0, "c": 1.0, "d": 1.0}, {"e": 0.0}]
    estimate = estimate_over_seeds(values, [{task: task for task in tasks} for tasks in values], bounds=(0.0, 1.0))
    assert estimate.mean == 0.5
    assert estimate.seed_means == (1.0, 0.0)
    assert (estimate.num_tasks, estimate.num_clips) == (5, 5)


def test_clip_interval_matches_a_proportion():
    # 40 of 100 tasks in each of two seeds: the standard error of the mean of both is sqrt(0.24 / 200) = 0.0346
    tasks = {f"t{i}": float(i < 40) for i in range(100)}
    clips = {task: task for task in tasks}
    low, high = estimate_over_seeds([tasks, tasks], [clips, clips], bounds=(0.0, 1.0)).clip_interval
    assert low == pytest.approx(0.4 - 1.96 * 0.0346, abs=0.012)
    assert high == pytest.approx(0.4 + 1.96 * 0.0346, abs=0.012)


def test_difference_is_paired_by_task_within_a_seed():
    before = {0: {"a": 0.0, "b": 1.0}, 1: {"c": 0.0}}
    after = {0: {"a": 1.0, "b": 1.0}, 1: {"c": 1.0}, 2: {"d": 1.0}}
    clips = {0: {"a": "x", "b": "x"}, 1: {"c": "x"}, 2: {"d": "x"}}
    estimate = estimate_difference(after, before, clips, (-1.0, 1.0))
    assert estimate.seed_means == (0.5, 1.0)
    assert estimate.mean == 0.75
    assert (estimate.num_tasks, estimate.num_clips) == (3, 2)
    assert estimate_difference({0: {"a": 1.0}}, {1: {"a": 1.0}}, clips, None) is None
    assert estimate_difference({0: {"a": 1.0}}, {0: {"b": 1.0}}, clips, None) is None


def test_estimate_of_nothing_is_none():
    assert estimate_over_seeds([], [], bounds=None) is None
    assert estimate_over_seeds([{}], [{}], bounds=None) is None


def test_final_mean_is_over_the_last_third():
    rows = [{"step": step, "accuracy": float(step)} for step in range(1, 10)]
    result = VariantResult(
        condition="c", variant="a", before={}, after={}, step_metrics={0: rows, 1: [*rows[:-1], {"step": 9}]}
    )
    estimate = estimate_final_mean(result, "accuracy")
    assert estimate.seed_means == (8.0, 7.5)
    assert estimate.clip_interval is None
    assert estimate_final_mean(result, "missing") is None


def test_clips_of_tasks():
    columns = build_columns(task=["a", "b"], clip=["x", "x"], accuracy=[1.0, 0.0])
    result = VariantResult(condition="c", variant="v", before={}, after={0: {"greedy": columns}}, step_metrics={})
    assert collect_clips([result]) == {0: {"a": "x", "b": "x"}}
    older = {name: values for name, values in columns.items() if name != "clip"}
    with raises(RunError, key="clip", value="greedy"):
        collect_clips(
            [VariantResult(condition="c", variant="v", before={0: {"greedy": older}}, after={}, step_metrics={})]
        )


def test_bounds_of_a_table():
    assert get_bounds(TableSpec(evaluation="greedy", metric="accuracy")) == ((0.0, 1.0), (-1.0, 1.0))
    assert get_bounds(TableSpec(evaluation="greedy", metric="accuracy", minus="tools_off")) == (
        (-1.0, 1.0),
        (-2.0, 2.0),
    )
    assert get_bounds(TableSpec(evaluation="greedy", metric="calls")) == (None, None)
