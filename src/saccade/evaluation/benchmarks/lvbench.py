"""LVBench: 103 videos of an hour and more, questions of one or more of six capabilities."""

from collections.abc import Iterator
from typing import Any

from saccade.data.raw import Row
from saccade.evaluation.benchmarks._benchmark import UNPARSED, Benchmark, Mark
from saccade.evaluation.benchmarks._rows import Copy
from saccade.evaluation.benchmarks._rules import (
    accuracy_beside,
    choice_mark,
    inline_options,
    tolerant_choice,
    unlabelled,
)
from saccade.types import Kind, Task

CAPABILITIES = {
    "key information retrieval": "KIR",
    "event understanding": "EU",
    "summarization": "Sum",
    "entity recognition": "ER",
    "reasoning": "Rea",
    "temporal grounding": "TG",
}


def lvbench() -> Benchmark:
    """LVBench (Wang et al. 2024, arXiv 2406.08035), 1,549 questions.

    Official: cut at the first `)`, go on after the first `(` if there is one, and take the first character of the first
    word; `The answer is C` therefore reads T. A question counts in each of its capabilities, and the whole is the mean
    over questions, not over the six. The official script skips questions without an answer; that number stands beside
    as `accuracy_of_answered`.
    """
    return Benchmark(
        name="lvbench",
        hub="THUDM/LVBench",
        patterns=("video_info.meta.jsonl", "data/train-*.parquet", "*.jsonl", "*.json"),
        count=1549,
        read=_read,
        official=_official,
        tolerant=tolerant_choice,
        headline="accuracy",
        metrics=accuracy_beside(lambda result: result.answer.error is None),
        strata={"capability": lambda task: task.extras["capabilities"], "genre": lambda task: task.extras["genre"]},
        counts={"capability": {"ER": 677, "EU": 647, "KIR": 291, "TG": 220, "Rea": 201, "Sum": 58}},
    )


def _official(text: str, task: Task) -> Mark:
    # "(B) because (A) …" is B: all behind the first closing bracket is dropped before one is opened.
    plain = text.strip().split(")")[0].strip()
    plain = plain.split("(")[1].strip() if "(" in plain else plain
    first = plain.split(" ")[0][:1]
    return choice_mark(first, task) if first else UNPARSED


def _read(row: Row, copy: Copy) -> Iterator[Task]:
    """One video's questions in the published form; one question in the flat copies."""
    if not row.has("qa"):
        yield _task(row, copy, _key(row), row.text("type"), row.values.get("uid") or f"{_key(row)}-{row.number}")
        return
    for each in row.list("qa"):
        inner = row.inner(row.as_mapping(each, "qa"))
        yield _task(inner, copy, row.text("key"), row.text("type"), inner.text("uid"))


def _key(row: Row) -> str:
    return row.text("key", "video", "video_path").removesuffix(".mp4")


def _task(row: Row, copy: Copy, key: str, genre: str, uid: Any) -> Task:
    stem, options = inline_options(row.text("question"))
    if not options:
        options = unlabelled(row.texts("candidates", "options"))
    kinds = row.list("question_type")
    unknown = [kind for kind in kinds if kind not in CAPABILITIES]
    if unknown:
        raise row.wrong("question_type", f"it should hold {', '.join(CAPABILITIES)}; not {unknown[0]!r}")
    return Task(
        id=str(uid),
        question=stem,
        media=copy.video(f"videos/{key}.mp4", f"video_chunks/{key}.mp4", f"all_videos/{key}.mp4", f"{key}.mp4"),
        kind=Kind.CHOICE,
        gold=_letter(row, len(options)),
        choices=options,
        extras={
            "capabilities": [CAPABILITIES[kind] for kind in kinds],
            "genre": genre,
            "time_reference": row.values.get("time_reference"),
        },
    )


def _letter(row: Row, options: int) -> str:
    """The letter alone, or at the head of the option's text: `(D) 1633`."""
    answer = row.text("answer").strip()
    letter = answer[1:2] if answer.startswith("(") else answer[:1]
    return row.inner({"answer": letter}).letter(options, "answer")
