"""VSI-Bench: spatial questions about indoor videos, answered with letters or numbers."""

from collections.abc import Iterator, Sequence
from statistics import fmean

import numpy as np

from saccade.evaluation.benchmarks.answer_extraction import parse_float, strip_option_labels
from saccade.evaluation.benchmarks.base import (
    UNPARSED,
    Benchmark,
    Grade,
    GradedAnswer,
    compute_accuracy,
    grade_choice,
    grade_choice_lenient,
    group_by_extra,
    group_by_extras,
    tabulate,
)
from saccade.evaluation.benchmarks.local_dataset import BenchmarkRow
from saccade.rewards.answer_types.reader import read_number
from saccade.types import AnswerType, Task

NUMERIC_TASKS = ("object_counting", "object_abs_distance", "object_size_estimation", "room_size_estimation")
_DIRECTION_TASKS = tuple(f"object_rel_direction_{level}" for level in ("easy", "medium", "hard"))
CHOICE_TASKS = ("object_rel_distance", *_DIRECTION_TASKS, "route_planning", "obj_appearance_order")
_THRESHOLDS = np.linspace(0.5, 0.95, 10)  # as published; literals differ from it in the last binary digit


def vsibench() -> Benchmark:
    """Define VSI-Bench (Yang et al. 2024, arXiv 2412.14171), 5,130 questions; the mean of eight task scores.

    Strict: the first space-separated token without its periods is the answer, a letter in any case or a number. Numbers
    earn their mean relative accuracy, |p - t| / t <= 1 - theta over ten theta from 0.50 to 0.95. The three levels of
    relative direction are averaged into one task first. The lenient rule takes the last number (`reader.read_number`).
    """
    return Benchmark(
        name="vsibench",
        repo_id="nyu-visionx/VSI-Bench",
        file_patterns=("test.jsonl", "full/test-*.parquet", "test-*.parquet", "data/test-*.parquet", "*.jsonl"),
        num_tasks=5130,
        parse_row=_parse_row,
        grade_strict=_grade_strict,
        grade_lenient=_grade_lenient,
        primary_metric="overall",
        compute_metrics=_compute_metrics,
        strata=group_by_extras("question_type", "dataset"),
    )


def compute_mean_relative_accuracy(predicted: float, ground_truth: float) -> float:
    """Return the fraction of ten thresholds that the relative error satisfies; for a ground truth of 0 only 0 is right.

    >>> [compute_mean_relative_accuracy(predicted, 100.0) for predicted in (105.0, 110.0, 125.0, 150.0, 151.0)]
    [1.0, 0.9, 0.6, 0.1, 0.0]
    """
    if ground_truth == 0:
        return float(predicted == 0)
    return float(np.mean(abs(predicted - ground_truth) / ground_truth <= 1 - _THRESHOLDS))


def _grade_strict(text: str, task: Task) -> Grade:
    token = text.split(" ")[0].rstrip(".").strip()
    if task.answer_type == AnswerType.CHOICE:
        return grade_choice(token.upper() if len(token) == 1 else None, task)
    return _grade_number(parse_float(token), task)


def _grade_lenient(text: str, task: Task) -> Grade:
    if task.answer_type == AnswerType.CHOICE:
        return grade_choice_lenient(text, task)
    return _grade_number(read_number(text, in_prose=True), task)


def _grade_number(predicted: float | None, task: Task) -> Grade:
    if predicted is None:
        return UNPARSED
    assert isinstance(task.ground_truth, float)
    return Grade(extracted=f"{predicted:g}", value=compute_mean_relative_accuracy(predicted, task.ground_truth))


def _compute_metrics(results: Sequence[GradedAnswer]) -> dict[str, float]:
    """Return the mean of the tasks, then the tasks in published order; an incomplete copy has only some of them."""
    rows = tabulate(results, group_by_extra("question_type"))
    scores = {name: row.value for name, row in rows.items()}
    levels = [scores[name] for name in _DIRECTION_TASKS if name in scores]
    if levels:
        scores["object_rel_direction"] = fmean(levels)
    order = (*NUMERIC_TASKS, "object_rel_distance", "object_rel_direction", "route_planning", "obj_appearance_order")
    tasks = {name: scores[name] for name in order if name in scores}
    return {"overall": fmean(tasks.values()), **tasks, "mean_of_questions": compute_accuracy(results)["accuracy"]}


def _parse_row(row: BenchmarkRow) -> Iterator[Task]:
    question_types = (*NUMERIC_TASKS, *CHOICE_TASKS)
    question_type = row.require_one_of("question_type", row.get_text("question_type"), question_types)
    options = strip_option_labels(row.get_texts("options")) if question_type in CHOICE_TASKS else ()
    video = f"{row.get_text('dataset')}/{row.get_text('scene_name')}.mp4"
    yield Task(
        id=row.get_text("id"),
        question=row.get_text("question"),
        media=row.resolve_video(video, f"videos/{video}"),
        answer_type=AnswerType.CHOICE if options else AnswerType.NUMBER,
        ground_truth=row.get_option_letter(len(options), "ground_truth") if options else row.get_number("ground_truth"),
        options=options,
        extras={"question_type": question_type, "dataset": row.get_text("dataset"), "pruned": row.values.get("pruned")},
    )
