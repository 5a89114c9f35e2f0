"""MLVU, the development set's seven multiple-choice tasks."""

from collections.abc import Iterator, Sequence

from saccade.data.raw import LETTERS, Row
from saccade.evaluation.benchmarks._benchmark import UNPARSED, Benchmark, Mark, Result, accuracy, extra
from saccade.evaluation.benchmarks._rows import Copy
from saccade.evaluation.benchmarks._rules import choice_mark, inline_options, mean_of_means, tolerant_choice, unlabelled
from saccade.types import Kind, Task

COUNTS = {
    "plotQA": 539,
    "needle": 355,
    "ego": 352,
    "count": 206,
    "order": 259,
    "anomaly_reco": 200,
    "topic_reasoning": 264,
}
_FOLDERS = {name: f"{place}_{name}" for place, name in enumerate(COUNTS, start=1)}
_FREE = ("subPlot", "sub_scene", "summary")


def mlvu() -> Benchmark:
    """MLVU dev (Zhou et al. 2024, arXiv 2406.04264), 2,175 questions with options; `m_avg` is the mean of seven tasks.

    Official: the character before the first `)`, else the answer must be nothing but the letter. Where two options have
    one text the gold is the last of them; two answers are in no option, so that nothing is right there. The two tasks
    that a judge scores are no part of this and are passed over.
    """
    return Benchmark(
        name="mlvu",
        hub="MLVU/MVLU",
        patterns=("MLVU/json/[1-7]_*.json", "json/[1-7]_*.json", "data/[1-7]_*.json", "data/test-*.parquet", "*.jsonl"),
        count=sum(COUNTS.values()),
        read=_read,
        official=_official,
        tolerant=tolerant_choice,
        headline="m_avg",
        metrics=_metrics,
        strata={"task": extra("task")},
        counts={"task": COUNTS},
    )


def _official(text: str, task: Task) -> Mark:
    before, bracket, _ = text.partition(")")
    letter = before[-1:] if bracket else text
    return choice_mark(letter, task) if letter and letter in LETTERS[: len(task.choices)] else UNPARSED


def _metrics(results: Sequence[Result]) -> dict[str, float]:
    return {"m_avg": mean_of_means(results, extra("task")), **accuracy(results)}


def _read(row: Row, copy: Copy) -> Iterator[Task]:
    name = {"findNeedle": "needle"}.get(kind := row.text("question_type", "task_type"), kind)
    if name in _FREE:
        return
    if name not in COUNTS:
        raise row.wrong("question_type", f"it should be one of {', '.join(COUNTS)}; not {name!r}")
    stem, _ = inline_options(row.text("question"))  # one of the copies writes the options into the question
    options, video = unlabelled(row.texts("candidates")), row.text("video", "video_name")
    folders = (f"MLVU/video/{_FOLDERS[name]}/", f"video/{_FOLDERS[name]}/", "videos/", "")
    yield Task(
        id=row.text("question_id") if row.has("question_id") else f"{name}-{row.number}",
        question=stem,
        media=copy.video(*(f"{folder}{video}" for folder in folders)),
        kind=Kind.CHOICE,
        gold=_gold(row, options),
        choices=options,
        extras={"task": name, "duration": row.values.get("duration")},
    )


def _gold(row: Row, options: Sequence[str]) -> str:
    answer = row.text("answer")
    same = [letter for letter, option in zip(LETTERS, options, strict=False) if option == answer]
    if same:
        return same[-1]
    return answer if answer in LETTERS[: len(options)] and row.has("video_name") else ""
