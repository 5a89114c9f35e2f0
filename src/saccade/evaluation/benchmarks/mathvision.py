r"""MathVision, test: competition problems with a picture; letters, numbers and formulas."""

import re
from collections.abc import Iterator

from saccade.data.raw import LETTERS, Row
from saccade.evaluation.benchmarks._answers import letter_of
from saccade.evaluation.benchmarks._benchmark import UNPARSED, Benchmark, Mark, accuracy, extra
from saccade.evaluation.benchmarks._formulas import same_formula, tolerant_formula
from saccade.evaluation.benchmarks._mathv import is_equal, model_answer
from saccade.evaluation.benchmarks._rows import Copy
from saccade.types import Kind, Task


def mathvision(*, mini: bool = False) -> Benchmark:
    """MathVision (Wang et al. 2024, arXiv 2402.14804), the 3,040 test problems, or the 304 of testmini.

    Official: letters at the end of a sentence or alone on the first line, what follows `is` if it is a number, what
    follows `the answer is`, the last box; then strings are made alike and compared, then values rounded to two
    decimals. Where there are options, the text of the gold option is right as well.
    """
    split = "testmini" if mini else "test"
    return Benchmark(
        name="mathvision_mini" if mini else "mathvision",
        hub="MathLLMs/MathVision",
        patterns=(f"{split}.jsonl", f"data/{split}.jsonl", f"data/{split}-*.parquet", "*.jsonl"),
        count=304 if mini else 3040,
        read=_read,
        official=_official,
        tolerant=_tolerant,
        headline="accuracy",
        metrics=accuracy,
        strata={name: extra(name) for name in ("subject", "level")},
    )


def _official(text: str, task: Task) -> Mark:
    said = model_answer(text)
    right = is_equal(str(task.gold), said) or is_equal(_option(task), said)
    return Mark(read=said, value=float(right)) if said else UNPARSED


def _tolerant(text: str, task: Task) -> Mark:
    if task.choices:
        letter = letter_of(text, LETTERS[: len(task.choices)], task.choices)
        if letter:
            return Mark(read=letter, value=float(letter == task.gold))
    said = tolerant_formula(text)
    if said is None:
        return UNPARSED
    return Mark(read=said, value=float(same_formula(said, _option(task) or str(task.gold))))


def _option(task: Task) -> str:
    """The text of the gold option; "" without options, or where they are in the picture."""
    return task.choices[LETTERS.index(str(task.gold))] if task.choices else ""


def _read(row: Row, copy: Copy) -> Iterator[Task]:
    options = row.texts("options") if row.has("options") else ()
    # the parts are in one picture: the markers of a question name its parts
    question = re.sub(r"\s*<image1>\s*$", "", row.text("question"))
    picture = row.get("decoded_image", "image")
    yield Task(
        id=row.text("id"),
        question=question,
        media=(copy.picture(picture),),
        kind=Kind.CHOICE if options else Kind.MATH,
        gold=row.letter(len(options), "answer") if options else row.text("answer"),
        choices=options,
        extras={"subject": row.label("subject"), "level": row.label("level")},
    )
