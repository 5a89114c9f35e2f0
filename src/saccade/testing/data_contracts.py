"""Check the contracts of data importers and benchmarks."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from saccade.data.dataset import find_task_problem
from saccade.data.source_row import SourceRow
from saccade.errors import DataError
from saccade.evaluation.benchmark_result import build_plain_result
from saccade.evaluation.benchmarks.base import Answer, Benchmark, GradedAnswer, Scoring, grade
from saccade.types import Demonstration, Task

_ANSWER_TEXTS = (
    *("A", "(b)", r"\boxed{C}", r"\boxed{", "<answer>", "</answer>", "<think>", "12", "-3.5", "3 - 5", "00:12 - 1:30"),
    *(
        "I can't tell.",
        "A or B",
        "\u2212\u0663",
        "答案是B",
        "{}",
        '{"short answer": null}',
        "[[1, 2]]",
        "nan",
        "\x00",
        "9^{9^9}",
    ),
    *("((" * 2000, "a " * 5000, "1" * 5000, "\ud800", "\x00"),
)


def check_benchmark(benchmark: Benchmark, tasks: Sequence[Task]) -> None:
    """Check that both rules grade any answer consistently and that failed episodes are counted but never graded.

    The lenient rule must accept the ground truth itself, and metrics must weight results.
    """
    name, ids = benchmark.name, [task.id for task in tasks]
    assert ids, f"{name}: there must be tasks to check"
    assert len(set(ids)) == len(ids), f"{name}: two tasks have the same id"
    for text in _ANSWER_TEXTS:
        answers = {task: Answer(text=text) for task in ids}
        for scoring in get_args(Scoring):
            first, second = (grade(benchmark, tasks, answers, scoring=scoring) for _ in range(2))
            assert first == second, f"{name}: the {scoring} rule gives {text[:20]!r} two different grades"
            values = [graded.grade.value for graded in first if graded.grade.value is not None]
            assert all(0 <= value <= 1 for value in values), f"{name}: a grade of {text[:20]!r} is not in [0, 1]"
            report = build_plain_result(benchmark, first, scoring=scoring)
            numbers = [*report.metrics.values(), *report.upper_bounds.values()]
            assert all(map(math.isfinite, numbers)), f"{name}: a metric is not finite for {text[:20]!r}"
            assert report.num_tasks == len(tasks), f"{name}: the denominator must be all tasks"
            assert report.primary_metric in report.metrics, f"{name}: {report.primary_metric!r} is not a metric"
    ground_truths = {task.id: Answer(text=str(task.ground_truth)) for task in tasks}
    correct = grade(benchmark, tasks, ground_truths, scoring="lenient")
    _check_weights(benchmark, correct)
    rejected = [
        graded.task.id for graded in correct if graded.task.ground_truth != "" and graded.grade.value not in (1, None)
    ]
    assert not rejected, f"{name}: the lenient rule rejects the ground truth of {rejected[0]}"
    errors = {task.id: Answer(text=str(task.ground_truth), error="the server died") for task in tasks}
    failed = build_plain_result(benchmark, grade(benchmark, tasks, errors))
    assert (failed.errors, failed.unparsed) == (len(tasks), 0), f"{name}: a failed episode must count as an error only"
    blank = build_plain_result(benchmark, grade(benchmark, tasks, {}))
    assert failed.metrics == blank.metrics, f"{name}: an answer with an error was graded"


def _check_weights(benchmark: Benchmark, results: Sequence[GradedAnswer]) -> None:
    """Check that a result of weight 2 counts like two of weight 1, so that a weighted sample estimates the full set."""
    joint_keys = dict.fromkeys(benchmark.joint_key(result.task) for result in results)
    heavy = {*list(joint_keys)[::2]}
    mixed = [replace(result, grade=replace(result.grade, value=1 / (1 + i))) for i, result in enumerate(results)]
    weighted = [replace(result, weight=1.0 + (benchmark.joint_key(result.task) in heavy)) for result in mixed]
    copies = [
        replace(result, sample_index=result.sample_index + 1, weight=1.0) for result in weighted if result.weight > 1
    ]
    metrics, expected = benchmark.compute_metrics(weighted), benchmark.compute_metrics([*mixed, *copies])
    wrong = [name for name in metrics if not math.isclose(metrics[name], expected[name], abs_tol=1e-9)]
    assert not wrong, f"{benchmark.name}: {wrong[0]!r} must weight results (as `mean` does)"


def check_importer(importer: Callable[[SourceRow], Iterator[Task | Demonstration]], values: Mapping[str, Any]) -> None:
    """Check that a valid row gives valid items, reproducibly and with ids unlike those of another row.

    A row with any field replaced, at any depth, must give valid items or a DataError that names file and row.
    """
    items = list(importer(_build_row(values)))
    assert items, "a valid row gave no items"
    assert items == list(importer(_build_row(values))), "the same row gave different items"
    another = {**values, **({"id": "another"} if "id" in values else {})}
    ids = [task.id for task in _extract_tasks([*items, *importer(replace(_build_row(another), number=8))])]
    assert len({*ids}) == len(ids), f"two rows gave tasks with the same id: {ids}"
    for corrupted in _generate_corruptions(values):
        if not isinstance(corrupted, dict):
            continue
        corrupted_items, problem = list[Task | Demonstration](), "rows.jsonl, row 7"
        try:
            corrupted_items = list(importer(_build_row(corrupted)))
        except DataError as error:
            problem = str(error)
        assert "rows.jsonl, row 7" in problem, f"an error must name the row: {problem}"
        for task in _extract_tasks([*items, *corrupted_items]):
            assert find_task_problem(task) is None, f"{corrupted} gave an invalid task: {find_task_problem(task)}"


def _build_row(values: Mapping[str, Any]) -> SourceRow:
    return SourceRow(file=Path("rows.jsonl"), number=7, values=values, save_media=lambda content: "saved.png")


def _extract_tasks(items: Sequence[Task | Demonstration]) -> list[Task]:
    return [item.task if isinstance(item, Demonstration) else item for item in items]


def _generate_corruptions(value: Any) -> Iterator[Any]:
    """Yield the value with one part of it replaced or removed."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            rest = {name: other for name, other in value.items() if name != key}
            yield rest
            yield from ({**rest, key: corrupted} for corrupted in _generate_corruptions(inner))
    if isinstance(value, list):
        yield from (value[:index] + value[index + 1 :] for index in range(len(value)))
        yield from (
            [*value[:index], corrupted, *value[index + 1 :]]
            for index, item in enumerate(value)
            for corrupted in _generate_corruptions(item)
        )
    yield from (None, "", " ", "{", "no", 7, -0.5, True, [], [[]], {}, {"a": 1}, b"\x89PNG", math.nan)
