"""MLVU, the seven multiple-choice tasks of the development set."""

from collections.abc import Iterator, Sequence

from saccade.data.source_row import OPTION_LETTERS
from saccade.evaluation.benchmarks.answer_extraction import split_inline_options, strip_option_labels
from saccade.evaluation.benchmarks.base import (
    UNPARSED,
    Benchmark,
    Grade,
    GradedAnswer,
    compute_accuracy,
    compute_macro_average,
    grade_choice,
    group_by_extra,
)
from saccade.evaluation.benchmarks.local_dataset import BenchmarkRow
from saccade.types import AnswerType, Task

TASK_COUNTS = {
    **{"plotQA": 539, "needle": 355, "ego": 352, "count": 206, "order": 259, "anomaly_reco": 200},
    "topic_reasoning": 264,
}
_FOLDERS = {name: f"{number}_{name}" for number, name in enumerate(TASK_COUNTS, start=1)}
_FREE_FORM_TASKS = ("subPlot", "sub_scene", "summary")


def mlvu() -> Benchmark:
    """Define MLVU dev (Zhou et al. 2024, arXiv 2406.04264), 2,175 questions; `m_avg` is the mean of seven tasks.

    Strict: the character before the first `)`, else the answer must be only the letter. If two options have the same
    text, the last of them is right; two answers match no option, so no response to them is right. The two tasks that a
    judge scores are not included.
    """
    return Benchmark(
        name="mlvu",
        repo_id="MLVU/MVLU",
        file_patterns=(
            *("MLVU/json/[1-7]_*.json", "json/[1-7]_*.json", "data/[1-7]_*.json", "data/test-*.parquet", "*.jsonl"),
        ),
        num_tasks=sum(TASK_COUNTS.values()),
        parse_row=_parse_row,
        grade_strict=_grade_strict,
        primary_metric="m_avg",
        compute_metrics=_compute_metrics,
        strata={"task": group_by_extra("task")},
        stratum_sizes={"task": TASK_COUNTS},
    )


def _grade_strict(text: str, task: Task) -> Grade:
    before, bracket, _ = text.partition(")")
    letter = before[-1:] if bracket else text
    return grade_choice(letter, task) if letter and letter in OPTION_LETTERS[: len(task.options)] else UNPARSED


def _compute_metrics(results: Sequence[GradedAnswer]) -> dict[str, float]:
    return {"m_avg": compute_macro_average(results, group_by_extra("task")), **compute_accuracy(results)}


def _parse_row(row: BenchmarkRow) -> Iterator[Task]:
    name = {"findNeedle": "needle"}.get(kind := row.get_text("question_type", "task_type"), kind)
    if name in _FREE_FORM_TASKS:
        return
    row.require_one_of("question_type", name, TASK_COUNTS)
    stem, _ = split_inline_options(row.get_text("question"))  # one of the copies has the options in the question
    options, video = strip_option_labels(row.get_texts("candidates")), row.get_text("video", "video_name")
    folders = (f"MLVU/video/{_FOLDERS[name]}/", f"video/{_FOLDERS[name]}/", "videos/", "")
    yield Task(
        id=row.get_text("question_id") if row.has("question_id") else f"{name}-{row.number}",
        question=stem,
        media=row.resolve_video(*(f"{folder}{video}" for folder in folders)),
        answer_type=AnswerType.CHOICE,
        ground_truth=_find_ground_truth(row, options),
        options=options,
        extras={"task": name, "duration": row.values.get("duration")},
    )


def _find_ground_truth(row: BenchmarkRow, options: Sequence[str]) -> str:
    answer = row.get_text("answer")
    matching = [letter for letter, option in zip(OPTION_LETTERS, options, strict=False) if option == answer]
    if matching:
        return matching[-1]
    return answer if answer in OPTION_LETTERS[: len(options)] and row.has("video_name") else ""
