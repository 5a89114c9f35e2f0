"""Contracts of what brings tasks in: data sources and benchmarks."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from saccade.data.raw import Row
from saccade.data.rows import problem_of
from saccade.errors import DataError
from saccade.evaluation.benchmarks._benchmark import Answer, Benchmark, Result, grade, report
from saccade.types import Demo, Task

# ---- benchmarks ----------------------------------------------------------------------------------------------------

_ANSWERS = (
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
    """Both rules take any answer and mark it the same twice; the tolerant one knows the gold; failures are counted."""
    name, ids = benchmark.name, [task.id for task in tasks]
    assert ids, f"{name}: there must be tasks to check with"
    assert len(set(ids)) == len(ids), f"{name}: two tasks have one id"
    for text in _ANSWERS:
        answers = {task: Answer(text=text) for task in ids}
        for extractor in ("official", "tolerant"):
            first, second = (grade(benchmark, tasks, answers, extractor=extractor) for _ in range(2))
            assert first == second, f"{name}: the {extractor} rule marks {text[:20]!r} now so, now so"
            values = [each.mark.value for each in first if each.mark.value is not None]
            assert all(0 <= value <= 1 for value in values), f"{name}: a mark for {text[:20]!r} is not within 0 and 1"
            found = report(benchmark, first, extractor=extractor)
            numbers = [*found.metrics.values(), *found.at_most.values()]
            assert all(map(math.isfinite, numbers)), f"{name}: a metric is not a number for {text[:20]!r}"
            assert found.n == len(tasks), f"{name}: the denominator must be all tasks"
            assert found.headline in found.metrics, f"{name}: {found.headline!r} is not among the metrics"
    golds = grade(benchmark, tasks, {task.id: Answer(text=str(task.gold)) for task in tasks}, extractor="tolerant")
    _check_weights(benchmark, golds)
    missed = [each.task.id for each in golds if each.task.gold != "" and each.mark.value not in (1, None)]
    assert not missed, f"{name}: the tolerant rule doesn't know the gold of {missed[0]}"
    failed = {task.id: Answer(text=str(task.gold), error="the server died") for task in tasks}
    lost = report(benchmark, grade(benchmark, tasks, failed))
    assert (lost.errors, lost.unparsed) == (len(tasks), 0), f"{name}: what failed must be counted as an error alone"
    blank = report(benchmark, grade(benchmark, tasks, {}))
    assert lost.metrics == blank.metrics, f"{name}: an answer that came with an error was marked"


def _check_weights(benchmark: Benchmark, results: Sequence[Result]) -> None:
    """A result of weight 2 counts as two of weight 1 do, so that a limited sample can speak of the whole."""
    units = dict.fromkeys(benchmark.together(each.task) for each in results)
    heavy = {*list(units)[::2]}
    mixed = [replace(each, mark=replace(each.mark, value=1 / (1 + at))) for at, each in enumerate(results)]
    weighed = [replace(each, weight=1.0 + (benchmark.together(each.task) in heavy)) for each in mixed]
    copied = [*mixed, *(replace(each, attempt=each.attempt + 1, weight=1.0) for each in weighed if each.weight > 1)]
    one, other = benchmark.metrics(weighed), benchmark.metrics(copied)
    wrong = [name for name in one if not math.isclose(one[name], other[name], abs_tol=1e-9)]
    assert not wrong, f"{benchmark.name}: {wrong[0]!r} must count results by their weight (`mean` does)"


# ---- data sources --------------------------------------------------------------------------------------------------


def check_source(source: Callable[[Row], Iterator[Task | Demo]], values: Mapping[str, Any]) -> None:
    """A fair row becomes tasks or demonstrations that are sound, the same each time, with other ids than another row's.

    Whatever else stands in its fields, at any depth, gives sound ones or a DataError that names file and row.
    """
    fair = list(source(_row(values)))
    assert fair, "a fair row gave nothing"
    assert fair == list(source(_row(values))), "the same row gave two things"
    another = {**values, **({"id": "another"} if "id" in values else {})}
    ids = [task.id for task in _tasks([*fair, *source(replace(_row(another), number=8))])]
    assert len({*ids}) == len(ids), f"two rows gave tasks of one id: {ids}"
    for changed in (each for each in _broken(values) if isinstance(each, dict)):
        found, problem = _tried(source, changed)
        assert "rows.jsonl, row 7" in problem, f"an error must name the row: {problem}"
        for task in _tasks([*fair, *found]):
            assert problem_of(task) is None, f"{changed} gave a task with a problem: {problem_of(task)}"


def _tried(source: Callable[[Row], Iterator[Task | Demo]], values: Mapping[str, Any]) -> tuple[list[Task | Demo], str]:
    """What a row gives, or what is wrong with it."""
    try:
        return list(source(_row(values))), "rows.jsonl, row 7"
    except DataError as error:
        return [], str(error)


def _row(values: Mapping[str, Any]) -> Row:
    return Row(file=Path("rows.jsonl"), number=7, values=values, keep=lambda content: "kept.png")


def _tasks(items: Sequence[Task | Demo]) -> list[Task]:
    return [item.task if isinstance(item, Demo) else item for item in items]


def _broken(value: Any) -> Iterator[Any]:
    """The value with one thing in it replaced by something else, or left out."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            rest = {name: each for name, each in value.items() if name != key}
            yield rest
            yield from ({**rest, key: each} for each in _broken(inner))
    if isinstance(value, list):
        yield from (value[:place] + value[place + 1 :] for place in range(len(value)))
        yield from (
            [*value[:place], each, *value[place + 1 :]] for place, old in enumerate(value) for each in _broken(old)
        )
    yield from (None, "", " ", "{", "no", 7, -0.5, True, [], [[]], {}, {"a": 1}, b"\x89PNG", math.nan)
