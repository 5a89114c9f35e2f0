"""HR-Bench at 4K and 8K: each question four times, its options turned by one."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Literal

from saccade.data.raw import Row
from saccade.evaluation.benchmarks._benchmark import Benchmark, Criterion, Mark, Result, accuracy, extra, table
from saccade.evaluation.benchmarks._rows import Copy
from saccade.evaluation.benchmarks._rules import choice_mark, option, tolerant_choice
from saccade.rewards._text import asked
from saccade.types import Kind, Media, Task

PROMPT = (
    "You decide whether a candidate has answered a multiple-choice question about a picture, which you can't see, as "
    "the reference does. It is right only if it settles on the reference's option, by the letter or by what that says; "
    "one that settles on none, or on another, is wrong."
)
_LETTERS = "ABCD"
_LAST = 4  # tokens from the end among which the one letter must stand
_POINTER = 64  # characters up to which an image's field is the index of the row that holds the image


def hrbench(*, size: Literal["4k", "8k"] = "4k") -> Benchmark:
    """HR-Bench (Wang et al. 2024, arXiv 2408.15556), 800 rows of either `size`; the mean of its four rotations.

    The published rule asks a language model at random; `official` is what its authors point to (VLMEvalKit): the only
    option letter among the words if it is one of the last four, else `answer is X`, else the only option whose text
    occurs in a response that isn't too long, else a judge. Without one such answers count as wrong, as its exact mode
    has it, and are told as undecided.
    """
    pictures: dict[str, Media] = {}  # by the index of the row that held them

    def read(row: Row, copy: Copy) -> Iterator[Task]:
        index, image = row.text("index"), row.get("image")
        if isinstance(image, str) and len(image) <= _POINTER and image in pictures:
            picture = pictures[image]
        else:
            picture = pictures[index] = copy.picture(image)
        yield Task(
            id=index,
            question=row.text("question"),
            media=(picture,),
            kind=Kind.CHOICE,
            gold=row.letter(4, "answer"),
            choices=tuple(row.text(letter) for letter in _LETTERS),
            extras={"category": row.text("category"), "rotation": row.text("cycle_category")},
        )

    return Benchmark(
        name=f"hrbench_{size}",
        hub="DreamMr/HR-Bench",
        patterns=(f"hr_bench_{size}.tsv", f"hrbench_version_split/hrbench_{size}-*.parquet", f"*{size}*", "*.jsonl"),
        count=800,
        read=read,
        official=_official,
        tolerant=lambda text, task: _left(tolerant_choice(text, task)),
        headline="average",
        metrics=_metrics,
        strata={"category": extra("category"), "rotation": extra("rotation")},
        counts={"category": {"single": 400, "cross": 400}},
        ordered="its metric is the mean over four published orders of the same options",
        criterion=Criterion(prompt=PROMPT, question=lambda task: asked(task.question, task.choices), gold=option),
    )


def _official(text: str, task: Task) -> Mark:
    return _left(choice_mark(_alone(text) or _said(text) or _quoted(text, task), task))


def _left(mark: Mark) -> Mark:
    """What the letters didn't tell is left to a judge."""
    return replace(mark, value=None) if mark.read is None else mark


def _alone(text: str) -> str | None:
    words = re.sub(r"[.()\[\],:;!*#{}]", " ", text).split()
    there = [letter for letter in _LETTERS if letter in words]
    return there[0] if len(there) == 1 and words.index(there[0]) >= len(words) - _LAST else None


def _said(text: str) -> str | None:
    found = re.search(r"(?i:answer\s+is):?\s*[(\[]?([A-D])\b", text)
    return found[1] if found else None


def _quoted(text: str, task: Task) -> str | None:
    if len(text) > 2 * sum(map(len, task.choices)):
        return None
    there = [letter for letter, option in zip(_LETTERS, task.choices, strict=True) if option.lower() in text.lower()]
    return there[0] if len(there) == 1 else None


def _metrics(results: Sequence[Result]) -> dict[str, float]:
    """Per rotation the accuracy of all, single and cross; then the mean of the rotations, never all or nothing."""
    rotation, category = extra("rotation"), extra("category")
    found = {"average": fmean(cell.value for cell in table(results, rotation).values())}
    for name, short in (("single", "fsp"), ("cross", "fcp")):
        some = [each for each in results if category(each.task) == name]
        if some:
            found[short] = fmean(cell.value for cell in table(some, rotation).values())
    return {**found, "mean_of_rows": accuracy(results)["accuracy"]}
