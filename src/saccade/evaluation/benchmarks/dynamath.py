"""DynaMath: 501 questions in ten variants each; what counts is whether all ten are right."""

import json
import math
import re
from collections.abc import Iterator, Sequence

from saccade.data.raw import LETTERS, Row
from saccade.evaluation.benchmarks._answers import letter_of
from saccade.evaluation.benchmarks._benchmark import UNPARSED, Benchmark, Mark, Result, accuracy, extra, mean
from saccade.evaluation.benchmarks._formulas import same_formula, tolerant_formula
from saccade.evaluation.benchmarks._latex import value_of
from saccade.evaluation.benchmarks._rows import Copy
from saccade.types import Kind, Task

TOLERANCE = 0.001
_TYPES = {"int": "float", "single answer": "text"} | {name: name for name in ("float", "multiple choice", "text")}


def dynamath() -> Benchmark:
    """DynaMath (Zou et al. 2024, arXiv 2411.00836), 501 seeds in ten variants; average and worst case.

    Official: the response is JSON, and its `short answer` counts: a number within 0.001 (the first word, `2π` is two
    pi), a letter (or the gold letter among the first three characters), a text that holds the gold. The worst case is
    the share of seeds with every variant right.
    """
    return Benchmark(
        name="dynamath",
        hub="DynaMath/DynaMath_Sample",
        patterns=("data/sample_variant*.parquet", "sample_variant*.parquet", "trial*/dataset.json", "*.jsonl"),
        count=5010,
        read=_read,
        official=_official,
        tolerant=_tolerant,
        headline="average",
        metrics=_metrics,
        strata={name: extra(name) for name in ("variant", "subject", "level", "answer_type")},
        counts={"variant": {str(variant): 501 for variant in range(1, 11)}},
        unit=extra("seed"),
        together=extra("seed"),
        ordered="its options are written into the questions",
    )


def _official(text: str, task: Task) -> Mark:
    try:
        said = json.loads(text)
    except (ValueError, RecursionError):
        return UNPARSED
    if not isinstance(said, dict) or "short answer" not in said:
        return UNPARSED
    answer = str(said["short answer"])
    return Mark(read=answer, value=float(_right(answer, task)))


def _right(answer: str, task: Task) -> bool:
    kind, gold = task.extras["answer_type"], str(task.gold)
    if kind == "float":
        return abs(_float(answer) - float(gold)) <= TOLERANCE
    if kind == "multiple choice":
        return answer == gold if len(answer) == 1 else gold in answer[:3]
    return gold in answer


def _float(answer: str) -> float:
    """The first word as a number, not-a-number where it is none; what stands before a π is multiplied by it."""
    word = answer if answer.isdigit() else answer.split(" ")[0]
    try:
        return float(word.split("π")[0]) * math.pi if "π" in word else float(word)
    except ValueError:
        return math.nan


def _tolerant(text: str, task: Task) -> Mark:
    """The short answer, or all of it where there is no JSON, read as a person would."""
    inner = re.search(r"\{.*\}", text, re.DOTALL)
    official = _official(inner[0], task) if inner else UNPARSED
    said = text if official.read is None else official.read
    if task.extras["answer_type"] == "multiple choice":
        letter = letter_of(said, LETTERS[:6])
        return UNPARSED if letter is None else Mark(read=letter, value=float(letter == task.gold))
    found = tolerant_formula(said)
    if found is None:
        return UNPARSED
    if task.extras["answer_type"] == "float":
        value = value_of(found.rpartition("=")[2])
        return Mark(read=found, value=float(value is not None and abs(value - float(task.gold)) <= TOLERANCE))  # type: ignore[arg-type]
    return Mark(read=found, value=float(same_formula(found, str(task.gold)) or str(task.gold) in said))


def _metrics(results: Sequence[Result]) -> dict[str, float]:
    worst: dict[tuple[str, int], Result] = {}  # of each seed's variants
    for each in results:
        seed = str(each.task.extras["seed"]), each.attempt
        worst[seed] = min(worst.get(seed, each), each, key=lambda one: one.value)
    rate = mean([*worst.values()], of=lambda each: each.value >= 1)
    return {"average": accuracy(results)["accuracy"], "worst_case": 100 * rate}


def _read(row: Row, copy: Copy) -> Iterator[Task]:
    seed, variant = _place(row)
    inner = row.inner(row.mapping("row")) if row.has("row") else row
    kind = inner.text("answer_type", "question_type").strip().lower()
    if kind not in _TYPES:
        raise row.wrong("answer_type", f"it should be float, multiple choice or text, not {kind!r}")
    gold = inner.text("ground_truth", "answer").strip()
    if _TYPES[kind] == "float":
        inner.number_of("ground_truth", "answer")
    picture = inner.get("decoded_image", "image")
    trial = f"trial{variant}/" if row.has("row") else ""  # where each variant has a folder, its rows don't name it
    yield Task(
        id=f"{seed}-{variant}",
        question=inner.text("question"),
        media=(copy.picture(f"{trial}{picture}" if isinstance(picture, str) and "." in picture[-6:] else picture),),
        kind=Kind.OPEN,
        gold=gold,
        extras={
            **{"seed": seed, "variant": variant, "answer_type": _TYPES[kind]},
            "subject": " ".join(inner.label("subject").split()),
            "level": inner.text("knowledge_level", "level").strip(),
        },
    )


def _place(row: Row) -> tuple[str, str]:
    """The seed question and the variant of a row; where it doesn't say, the name of its file or folder does."""
    if row.has("question_id"):
        return row.text("question_id"), row.text("id")
    if row.has("qid"):
        return row.text("qid"), row.text("varid")
    named = re.search(r"(?:trial|variant)(\d+)", str(row.file))
    variant = row.text("trial") if row.has("trial") else named[1] if named else ""
    if not variant:
        raise row.wrong("trial", "it is missing; call the file sample_variant1 to 10, or put it into trial1 to 10")
    return row.text("key", "id"), variant
