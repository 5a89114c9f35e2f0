"""Estimates of the full set from a limited evaluation: weights by hand, sums for any strata, and accuracies."""

from collections import Counter

import pytest
from error_cases import raises
from evaluation_cases import NAMES, STRATA, build_tasks, make_scored, task
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.errors import DataError
from saccade.evaluation.benchmark_result import build_benchmark_result, read_benchmark_result, write_benchmark_result
from saccade.evaluation.benchmarks.base import (
    Answer,
    Benchmark,
    Grade,
    compute_accuracy,
    compute_macro_average,
    grade,
    group_by_extra,
)
from saccade.evaluation.compare import Evaluation, compare_evaluations
from saccade.evaluation.subset import StratifiedWeights, Subset, compute_stratified_weights, read_stratified_weights
from saccade.reporting.benchmark_report import build_evaluation_tables, build_overview_tables
from saccade.reporting.evaluation_report import build_tables

ROWS = st.lists(st.tuples(NAMES, st.sampled_from("pq")), min_size=2, max_size=40)


def test_the_constant_answer_baseline_of_a_limit_is_that_of_the_whole_file(tmp_path):
    """Of eight "red" and eight "blue" tasks a sample of one has one answer, which then seems to be always right."""
    tasks = [task(f"t-{i}", ground_truth="red" if i % 2 else "blue") for i in range(16)]
    Subset(limit=1).compute_weights(tasks).write(tmp_path / "test.jsonl")
    weights = read_stratified_weights(tmp_path / "test.jsonl")
    scored = [make_scored(item, 1.0) for item in Subset(limit=1).select(tasks)]
    baselines = [
        compare_evaluations({"a": Evaluation(scored=scored, weights=stored)}).summaries["a"].constant_baseline
        for stored in (weights, None)
    ]
    assert baselines == [0.5, 1.0]


def test_weights_by_hand():
    paths = {f"x{i}": (("x",), ("p",) if i < 6 else ("q",)) for i in range(8)}  # six of x p, two of x q
    paths |= {f"y{i}": (("y",), ("p",)) for i in range(4)}  # and four of y
    weights, uncovered = compute_stratified_weights(paths, {"x0", "x1", "x6", "y0", "y1"})
    assert weights == {"x0": 3, "x1": 3, "x6": 2, "y0": 2, "y1": 2}
    assert not uncovered
    # x q has no sampled task, so x p represents all of x; y has none, so x represents it.
    weights, uncovered = compute_stratified_weights(paths, {"x0", "x1"})
    assert weights == {"x0": 6, "x1": 6}
    assert uncovered == {"x6", "x7", "y0", "y1", "y2", "y3"}


@settings(max_examples=60, deadline=None)
@given(ROWS, st.integers(1, 40))
def test_weights_sum_to_the_full_set_and_to_row_sizes(rows, limit):
    tasks = build_tasks(rows)
    subset = Subset(limit=limit, strata=STRATA)
    sampled, weights = subset.apply_limit(tasks), subset.compute_weights(tasks)
    if len(sampled) == len(tasks):
        assert weights is None
        return
    assert weights.weights.keys() == {task.id for task in sampled}
    assert weights.full_set_size == len(tasks)
    assert sum(weights.weights.values()) == pytest.approx(len(tasks))
    assert min(weights.weights.values()) >= 1 - 1e-9
    assert 0 <= weights.uncovered < 1
    if weights.uncovered:
        return

    def names(task):
        return (str(task.extras["a"]), task.extras["b"])

    sizes, held = Counter(map(names, tasks)), Counter()
    for sample in sampled:
        held[names(sample)] += weights.weights[sample.id]
    assert held == pytest.approx(sizes)


def benchmark_of(count):
    """Return a benchmark with two tables; easy tasks are rare in the full set, and half of a limited sample."""

    def rule(text, task):
        return Grade(extracted=text, value=float(text == "right"))

    return Benchmark(
        name="mine",
        repo_id="",
        file_patterns=(),
        num_tasks=count,
        parse_row=lambda row: [],
        grade_strict=rule,
        grade_lenient=rule,
        primary_metric="accuracy",
        compute_metrics=lambda results: {
            **compute_accuracy(results),
            "mean_of_rows": compute_macro_average(results, group_by_extra("a")),
        },
        strata={"a": STRATA[0], "b": STRATA[1]},
    )


def test_estimate_equals_the_full_set_if_strata_decide(tmp_path):
    tasks = build_tasks([("easy", "p")] * 10 + [("hard", "p")] * 60 + [("hard", "q")] * 30)
    replies = {task.id: "right" if task.extras["a"] == "easy" or task.extras["b"] == "q" else "no" for task in tasks}
    benchmark, portion = benchmark_of(100), Subset(limit=12, strata=STRATA)
    chosen = portion.select(tasks)
    results = grade(benchmark, chosen, {task.id: Answer(text=replies[task.id]) for task in chosen})
    episodes = [make_scored(task, 1.0) for task in chosen]
    result = build_benchmark_result(
        benchmark,
        episodes,
        results,
        stratified_weights=portion.compute_weights(tasks),
        conditions={"a limited sample": "x"},
    )
    whole = benchmark.compute_metrics(
        grade(benchmark, tasks, {name: Answer(text=text) for name, text in replies.items()})
    )
    assert whole == pytest.approx({"accuracy": 40, "mean_of_rows": 100 * (1 + 1 / 3) / 2})
    assert result.full_set.metrics == pytest.approx(whole)
    assert result.metrics["accuracy"] == 75  # rows alike: six easy ones, three of six hard ones
    low, high = result.full_set.intervals["accuracy"]
    assert low < 40 < high
    assert result.full_set.num_questions == 100
    # Reports label it as an estimate.
    grids = [*build_overview_tables({"mine": result}, {}), *build_evaluation_tables("mine", result, {})]
    cells = {cell for grid in grids for row in (grid.header, *grid.rows) for cell in row}
    assert {"accuracy, strict, a limited sample", "accuracy, strict, of all 100, estimated"} <= cells
    assert {"% of the 12 evaluated", "% of all 100, estimated", "12 of 100"} <= cells
    write_benchmark_result(tmp_path / "mine.jsonl", result)
    assert read_benchmark_result(tmp_path / "mine.benchmark_result.json") == result


def test_estimate_for_the_tasks_of_a_run():
    tasks = [task(f"w-{i}", question="at" if i < 2 else "when") for i in range(10)]
    portion = Subset(limit=4)
    few = [make_scored(task, float(task.extras["question"] == "at")) for task in portion.select(tasks)]
    weights = portion.compute_weights(tasks)
    found = compare_evaluations({"a": Evaluation(scored=few, weights=weights)})
    summary = found.summaries["a"]
    assert (summary.accuracy.mean, summary.full_set_accuracy.mean, summary.full_set_size) == (
        0.5,
        pytest.approx(0.2),
        10,
    )
    rows = dict(row for row in build_tables(found)[0].rows)
    assert rows["… of all tasks, estimated from a limited sample"].startswith("0.20 [")
    # A file with further tasks is not that limited sample.
    more = [*few, make_scored(task("w-99"), 1.0)]
    found = compare_evaluations({"a": Evaluation(scored=more, weights=weights)})
    assert found.summaries["a"].full_set_accuracy is None


def test_weights_file_is_not_replaced_by_a_smaller_limit(tmp_path):
    results = tmp_path / "test.jsonl"
    assert read_stratified_weights(results) is None
    results.touch()
    large = StratifiedWeights(full_set_size=9, weights={"a": 3.0, "b": 3.0, "c": 3.0}, uncovered=0.0)
    small = StratifiedWeights(full_set_size=9, weights={"a": 4.5, "b": 4.5}, uncovered=0.0)
    for weights, expected in ((small, small), (large, large), (small, large)):
        weights.write_unless_covered(results)
        assert read_stratified_weights(results) == expected
    StratifiedWeights(full_set_size=9, weights={"a": 4.5, "z": 4.5}, uncovered=0.0).write_unless_covered(results)
    assert read_stratified_weights(results).weights.keys() == {"a", "z"}
    results.unlink()  # the weights file belongs to deleted results
    large.write_unless_covered(results)
    small.write_unless_covered(results)
    assert read_stratified_weights(results) == small
    for text in ("{", "[]", '{"full_set_size": 3}'):
        (tmp_path / "test.stratum_weights.json").write_text(text)
        with raises(DataError, key=str(tmp_path / "test.stratum_weights.json")):
            read_stratified_weights(results)
