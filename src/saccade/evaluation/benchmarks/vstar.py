"""V*: small things in large pictures."""

import re
from collections.abc import Iterator

from saccade.data.raw import Row
from saccade.evaluation.benchmarks._benchmark import Benchmark, Mark, accuracy, extra
from saccade.evaluation.benchmarks._rows import Copy
from saccade.evaluation.benchmarks._rules import choice_mark, inline_options, tolerant_choice
from saccade.types import Kind, Task

_PATTERNS = (
    r"^([A-D])",
    r"(?:ANSWER|CHOICE|OPTION)(?:\s+IS)?[\s:]+([A-D])",
    r"\(([A-D])\)",
    r"([A-D])\s*[.)\]]",
    r"(?:^|\s)([A-D])(?:\s|$)",
)


def vstar() -> Benchmark:
    """V* (Wu and Xie 2023, arXiv 2312.14135), 191 questions; accuracy over all of them, and per category.

    The published rule ranks options by likelihood and reads no text; `official` is lmms-eval's reading of text: in
    capitals, the first letter of the answer if it is one of A-D (so that "Both" is B), else one after `answer`,
    `choice` or `option`, `(X)`, `X.` or `X)`, a letter alone, the only one of A-D there is.
    """
    return Benchmark(
        name="vstar",
        hub="craigwu/vstar_bench",
        patterns=("test_questions.jsonl", "data/test-*.parquet", "*.tsv", "*.jsonl"),
        count=191,
        read=_read,
        official=_official,
        tolerant=tolerant_choice,
        headline="accuracy",
        metrics=accuracy,
        strata={"category": extra("category")},
        counts={"category": {"direct_attributes": 115, "relative_position": 76}},
    )


def _official(text: str, task: Task) -> Mark:
    # As in the official code: in capitals the article "a" is a letter too.
    plain = text.strip().upper()
    found = next((match for pattern in _PATTERNS if (match := re.search(pattern, plain))), None)
    letters = re.findall("[A-D]", plain)
    lone = letters[0] if len(letters) == 1 else None
    return choice_mark(found[1] if found else lone, task)


def _read(row: Row, copy: Copy) -> Iterator[Task]:
    question, options = inline_options(row.text("text", "question"))
    if not options:
        raise row.wrong("text", "it should hold the options, a line each: (A) ...")
    name = f"{row.text('category')}-{row.text('question_id', 'index')}"
    yield Task(
        id=name,
        question=question,
        media=(copy.picture(row.get("image")),) if row.has("image") else (),
        kind=Kind.CHOICE,
        gold=row.letter(len(options), "label", "answer"),
        choices=options,
        extras={"category": row.text("category")},
    )
