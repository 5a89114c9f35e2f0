"""TIR-Bench: thirteen tasks that want an image worked on; letters, numbers, lists and words."""

from collections.abc import Iterator

from saccade.data.raw import Row
from saccade.evaluation.benchmarks._benchmark import UNPARSED, Benchmark, Criterion, Mark, accuracy, extra
from saccade.evaluation.benchmarks._rows import Copy
from saccade.evaluation.benchmarks._tir import extracted, official_value, reading, tolerant_value
from saccade.types import Kind, Task

COUNTS = {
    **{"color": 100, "contrast": 50, "instrument": 80, "jigsaw": 120, "math": 120, "maze": 120, "ocr": 60},
    **{"refcoco": 120, "rotation_game": 75, "spot_difference": 100, "symbolic": 50, "visual_search": 120},
    "word_search": 100,
}


def tirbench() -> Benchmark:
    """TIR-Bench (Li et al. 2025, arXiv 2511.01833), 1,215 samples; the mean over samples, some of them in part right.

    The published code has a language model extract the answer first, but for text in pictures. So does a judge here;
    without one a rule does, in both extractors: what is in the last box, else the final answer. From there `official`
    is the published rule, oddities included (an unknown text is the nearest letter, `7 2` is 72), but for math-verify's
    last word on numbers, for which the last number counts.
    """
    return Benchmark(
        name="tirbench",
        hub="Agents-X/TIR-Bench",
        patterns=("TIR-Bench.json", "data/test-*.parquet", "*.jsonl"),
        count=1215,
        read=_read,
        official=lambda text, task: _mark(text, official_value(extracted(text, task), task)),
        tolerant=lambda text, task: _mark(text, tolerant_value(extracted(text, task), task)),
        headline="accuracy",
        metrics=accuracy,
        strata={"task": extra("task")},
        counts={"task": COUNTS},
        ordered="its options are written into the questions and pictures",
        criterion=Criterion(question=lambda task: task.question, reading=reading, every=True),
    )


def _mark(text: str, value: float | None) -> Mark:
    return UNPARSED if value is None or not text.strip() else Mark(read=text.strip(), value=value)


def _read(row: Row, copy: Copy) -> Iterator[Task]:
    row = row.inner(row.mapping("row")) if row.has("row") else row
    name = row.text("task", "category")
    if name not in COUNTS:
        raise row.wrong("task", f"it should be one of {', '.join(COUNTS)}; not {name!r}")
    about = row.values.get("meta_data") or row.values.get("metadata") or {}
    pictures = [row.values[each] for each in ("image_1", "image_2") if row.has(each)]
    yield Task(
        id=row.text("id"),
        question=row.text("prompt"),
        media=tuple(copy.picture(each) for each in pictures),
        kind=Kind.OPEN,
        gold=row.text("answer") if not isinstance(row.get("answer"), list) else str(row.get("answer")),
        extras={
            "task": name,
            "image_1": pictures[0] if pictures and isinstance(pictures[0], str) else "",
            "difficulty": about.get("difficulty") if isinstance(about, dict) else None,
        },
    )
