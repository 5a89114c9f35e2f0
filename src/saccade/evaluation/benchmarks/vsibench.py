"""VSI-Bench: space from indoor videos, with letters or with numbers."""

from collections.abc import Iterator, Sequence
from statistics import fmean

import numpy as np

from saccade.data.raw import Row
from saccade.evaluation.benchmarks._answers import number_of
from saccade.evaluation.benchmarks._benchmark import UNPARSED, Benchmark, Mark, Result, accuracy, extra, table
from saccade.evaluation.benchmarks._rows import Copy
from saccade.evaluation.benchmarks._rules import choice_mark, tolerant_choice, unlabelled
from saccade.types import Kind, Task

NUMERIC = ("object_counting", "object_abs_distance", "object_size_estimation", "room_size_estimation")
_LEVELS = tuple(f"object_rel_direction_{level}" for level in ("easy", "medium", "hard"))
CHOICE = ("object_rel_distance", *_LEVELS, "route_planning", "obj_appearance_order")
_THRESHOLDS = np.linspace(0.5, 0.95, 10)  # not 0.5, 0.55, ...: at the edges the last binary digit counts


def vsibench() -> Benchmark:
    """VSI-Bench (Yang et al. 2024, arXiv 2412.14171), 5,130 questions; the mean of eight task scores.

    Official: the first space-separated token without its full stops is the answer, a letter in any case or a number.
    Numbers earn their mean relative accuracy, |p - t| / t <= 1 - theta over ten theta from 0.50 to 0.95. The three
    levels of relative direction are averaged into one task first. The tolerant rule reads the last number, which may be
    a word.
    """
    return Benchmark(
        name="vsibench",
        hub="nyu-visionx/VSI-Bench",
        patterns=("test.jsonl", "full/test-*.parquet", "test-*.parquet", "data/test-*.parquet", "*.jsonl"),
        count=5130,
        read=_read,
        official=_official,
        tolerant=_tolerant,
        headline="overall",
        metrics=_metrics,
        strata={"question_type": extra("question_type"), "dataset": extra("dataset")},
    )


def mean_relative_accuracy(said: float, gold: float) -> float:
    """The share of the ten thresholds that the relative error stays below; for a gold of 0 only 0 is right.

    >>> [mean_relative_accuracy(said, 100.0) for said in (105.0, 110.0, 125.0, 150.0, 151.0)]
    [1.0, 0.9, 0.6, 0.1, 0.0]
    """
    if gold == 0:
        return float(said == 0)
    return float(np.mean(abs(said - gold) / gold <= 1 - _THRESHOLDS))


def _official(text: str, task: Task) -> Mark:
    token = text.split(" ")[0].rstrip(".").strip()
    if task.kind is Kind.CHOICE:
        return choice_mark(token.upper() if len(token) == 1 else None, task)
    try:
        return _number_mark(float(token), task)
    except ValueError:
        return UNPARSED


def _tolerant(text: str, task: Task) -> Mark:
    if task.kind is Kind.CHOICE:
        return tolerant_choice(text, task)
    said = number_of(text)
    return UNPARSED if said is None else _number_mark(said, task)


def _number_mark(said: float, task: Task) -> Mark:
    assert isinstance(task.gold, float)
    return Mark(read=f"{said:g}", value=mean_relative_accuracy(said, task.gold))


def _metrics(results: Sequence[Result]) -> dict[str, float]:
    """The tasks in the published order, then their mean; of a subset only the tasks that it has."""
    cells = table(results, extra("question_type"))
    scores = {name: cell.value for name, cell in cells.items()}
    levels = [scores[name] for name in _LEVELS if name in scores]
    if levels:
        scores["object_rel_direction"] = fmean(levels)
    order = (*NUMERIC, "object_rel_distance", "object_rel_direction", "route_planning", "obj_appearance_order")
    tasks = {name: scores[name] for name in order if name in scores}
    return {"overall": fmean(tasks.values()), **tasks, "mean_of_questions": accuracy(results)["accuracy"]}


def _read(row: Row, copy: Copy) -> Iterator[Task]:
    kind = row.text("question_type")
    if kind not in (*NUMERIC, *CHOICE):
        raise row.wrong("question_type", f"it should be one of {', '.join((*NUMERIC, *CHOICE))}; not {kind!r}")
    options = unlabelled(row.texts("options")) if kind in CHOICE else ()
    video = f"{row.text('dataset')}/{row.text('scene_name')}.mp4"
    yield Task(
        id=row.text("id"),
        question=row.text("question"),
        media=copy.video(video, f"videos/{video}"),
        kind=Kind.CHOICE if options else Kind.NUMBER,
        gold=row.letter(len(options), "ground_truth") if options else row.number_of("ground_truth"),
        choices=options,
        extras={"question_type": kind, "dataset": row.text("dataset"), "pruned": row.values.get("pruned")},
    )
