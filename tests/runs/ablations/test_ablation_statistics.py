"""Numbers worked out by hand: means over seeds, two kinds of interval, pairs."""

import math
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lab_cases import exam

from saccade.lab.figures import STUDENT, Cell, by_task, difference, figure, late, over_seeds


def test_attempts_at_a_task_are_averaged_first():
    found = exam(task=["a", "a", "b"], accuracy=[1.0, 0.0, 1.0], calls=[2, 2, 4])
    assert by_task(found, "accuracy") == {"a": 0.5, "b": 1.0}
    assert by_task(found, "calls", lambda i: found["task"][i] == "b") == {"b": 4.0}


def test_every_seed_counts_the_same_however_many_tasks_it_has():
    found = figure([{"a": 1.0, "b": 1.0, "c": 1.0, "d": 1.0}, {"e": 0.0}])
    assert found.mean == 0.5
    assert found.each == (1.0, 0.0)
    assert found.n == 5


def test_the_interval_over_seeds_is_students():
    # mean 0.5, sd 0.1, three seeds: 4.303 * 0.1 / sqrt(3) = 0.24844
    assert over_seeds([0.4, 0.5, 0.6]) == pytest.approx((0.25156, 0.74844), abs=1e-5)
    assert over_seeds([0.0, 1.0]) == pytest.approx((0.5 - 12.706 * 0.5, 0.5 + 12.706 * 0.5))
    assert over_seeds([0.7]) is None
    assert list(STUDENT) == sorted(STUDENT, reverse=True)
    many = [float(i % 2) for i in range(100)]
    low, high = over_seeds(many)
    assert high - low == pytest.approx(2 * STUDENT[-1] * math.sqrt(0.25 * 100 / 99) / 10)


def test_the_interval_over_tasks_is_that_of_a_share():
    # 40 of 100 tasks in each of two seeds: the standard error of the mean of both is sqrt(0.24 / 200) = 0.0346
    tasks = {f"t{i}": float(i < 40) for i in range(100)}
    low, high = figure([tasks, tasks]).tasks
    assert low == pytest.approx(0.4 - 1.96 * 0.0346, abs=0.012)
    assert high == pytest.approx(0.4 + 1.96 * 0.0346, abs=0.012)


def test_a_difference_is_paired_by_task_within_a_seed():
    before = {0: {"a": 0.0, "b": 1.0}, 1: {"c": 0.0}}
    after = {0: {"a": 1.0, "b": 1.0}, 1: {"c": 1.0}, 2: {"d": 1.0}}
    found = difference(after, before)
    assert found.each == (0.5, 1.0)
    assert found.mean == 0.75
    assert difference({0: {"a": 1.0}}, {1: {"a": 1.0}}) is None
    assert difference({0: {"a": 1.0}}, {0: {"b": 1.0}}) is None


def test_nothing_is_nothing():
    assert figure([]) is None
    assert figure([{}]) is None


def test_the_last_third_of_the_steps():
    rows = [{"step": step, "accuracy": float(step)} for step in range(1, 10)]
    cell = Cell(condition="c", arm="a", before={}, after={}, steps={0: rows, 1: [*rows[:-1], {"step": 9}]})
    found = late(cell, "accuracy")
    assert found.each == (8.0, 7.5)
    assert found.tasks is None
    assert late(cell, "missing") is None


@given(st.lists(st.lists(st.floats(0, 1), min_size=1, max_size=8), min_size=1, max_size=4))
def test_a_mean_lies_in_its_intervals(seeds):
    found = figure([{f"t{i}": value for i, value in enumerate(values)} for values in seeds])
    assert found.mean == pytest.approx(fmean(map(fmean, seeds)))
    # A bootstrap of few tasks need not hold the mean, but it can't leave the values.
    assert min(min(values) for values in seeds) - 1e-9 <= found.tasks[0] <= found.tasks[1]
    assert found.seeds is None or found.seeds[0] <= found.mean + 1e-9 <= found.seeds[1] + 2e-9
