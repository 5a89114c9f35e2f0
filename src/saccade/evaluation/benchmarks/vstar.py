"""V*: small objects in large images."""

import re
from collections.abc import Iterator

from saccade.evaluation.benchmarks.answer_extraction import split_inline_options
from saccade.evaluation.benchmarks.base import Benchmark, Grade, grade_choice, group_by_extras
from saccade.evaluation.benchmarks.local_dataset import BenchmarkRow
from saccade.types import AnswerType, Task

_PATTERNS = (
    r"^([A-D])",
    r"(?:ANSWER|CHOICE|OPTION)(?:\s+IS)?[\s:]+([A-D])",
    r"\(([A-D])\)",
    r"([A-D])\s*[.)\]]",
    r"(?:^|\s)([A-D])(?:\s|$)",
)


def vstar() -> Benchmark:
    """Define V* (Wu and Xie 2023, arXiv 2312.14135), 191 questions; accuracy over all of them, and per category.

    The published rule ranks options by likelihood and parses no text; `strict` is lmms-eval's rule for text: in upper
    case, the first letter of the answer if it is one of A-D (so "Both" is B), else one after `answer`, `choice` or
    `option`, `(X)`, `X.` or `X)`, a letter alone, the only one of A-D in the text.
    """
    return Benchmark(
        name="vstar",
        repo_id="craigwu/vstar_bench",
        file_patterns=("test_questions.jsonl", "data/test-*.parquet", "*.tsv", "*.jsonl"),
        num_tasks=191,
        parse_row=_parse_row,
        grade_strict=_grade_strict,
        strata=group_by_extras("category"),
        stratum_sizes={"category": {"direct_attributes": 115, "relative_position": 76}},
    )


def _grade_strict(text: str, task: Task) -> Grade:
    # As in the official code: in upper case the article "a" is a letter too.
    plain = text.strip().upper()
    match = next((match for pattern in _PATTERNS if (match := re.search(pattern, plain))), None)
    letters = re.findall("[A-D]", plain)
    lone = letters[0] if len(letters) == 1 else None
    return grade_choice(match[1] if match else lone, task)


def _parse_row(row: BenchmarkRow) -> Iterator[Task]:
    question, options = split_inline_options(row.get_text("text", "question"))
    if not options:
        raise row.build_field_error("text", "it should hold the options, a line each: (A) ...")
    yield Task(
        id=f"{row.get_text('category')}-{row.get_text('question_id', 'index')}",
        question=question,
        media=(row.resolve_image(row.get("image")),) if row.has("image") else (),
        answer_type=AnswerType.CHOICE,
        ground_truth=row.get_option_letter(len(options), "label", "answer"),
        options=options,
        extras={"category": row.get_text("category")},
    )
