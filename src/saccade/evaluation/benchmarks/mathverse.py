"""MathVerse, testmini: one problem in five versions, from all in words to all in the picture."""

from collections.abc import Iterator

from saccade.data.raw import LETTERS, Row
from saccade.evaluation.benchmarks._answers import letter_of
from saccade.evaluation.benchmarks._benchmark import Benchmark, Criterion, Mark, accuracy, extra
from saccade.evaluation.benchmarks._formulas import same_formula, tolerant_formula
from saccade.evaluation.benchmarks._rows import Copy
from saccade.types import Kind, Task

PROMPT = (
    "You decide whether a candidate has solved a mathematical problem, whose figure you may not see, as the reference "
    "does. It is right if the result that it ends with is the reference's: the same option, by its letter or by what "
    "that says, or the same number or expression in whatever form; how it got there makes no difference. A result with "
    "another value, another unit of measure or another sign is wrong."
)
READING = (
    "You read the end of a candidate's solution of a mathematical problem, and say what it gives as its result: the "
    "letter of an option, a number or an expression, with its unit where it has one. Take it as it stands; don't solve "
    "the problem, and don't mend the result."
)
LAST = 30  # words that are read
VERSIONS = ("Text Dominant", "Text Lite", "Vision Intensive", "Vision Dominant", "Vision Only")


def mathverse() -> Benchmark:
    """MathVerse (Zhang et al. 2024, arXiv 2403.14624), 788 problems in five versions.

    The published rule is a judge that extracts, from the last 30 words, and one that compares (1 or 0); `official` puts
    before both what no judge could see otherwise, an answer that is the gold to the letter (`--quick_match`), and is
    undecided without them. The tolerant rule decides letters, and finds free answers right that have the gold's value.
    """
    questions: dict[str, str] = {}  # by problem: the version that has all in its picture has no words of its own

    def read(row: Row, copy: Copy) -> Iterator[Task]:
        for task in _read(row, copy):
            questions[task.extras["problem_index"]] = said(task)
            yield task

    def said(task: Task) -> str:
        return str(task.extras["question"] or questions.get(task.extras["problem_index"], ""))

    return Benchmark(
        name="mathverse",
        hub="AI4Math/MathVerse",
        patterns=("testmini.json", "testmini/*.parquet", "testmini-*.parquet", "data/testmini-*.parquet", "*.jsonl"),
        count=3940,
        read=read,
        official=lambda text, task: Mark(read=text or None, value=1.0 if text.strip() == task.gold else None),
        tolerant=_tolerant,
        headline="accuracy",
        metrics=accuracy,
        strata={name: extra(name) for name in ("problem_version", "subject", "question_type")},
        counts={
            "problem_version": dict.fromkeys(VERSIONS, 788),
            "question_type": {"multi-choice": 5 * 436, "free-form": 5 * 352},
        },
        unit=extra("problem_index"),
        ordered="its options are written into the questions",
        criterion=Criterion(
            prompt=PROMPT,
            question=lambda task: said(task) or task.question,
            reading=lambda task: READING,
            words=LAST,
        ),
    )


def _tolerant(text: str, task: Task) -> Mark:
    if task.extras["question_type"] == "multi-choice":
        letter = letter_of(text, LETTERS[:6])
        return Mark(read=letter, value=None if letter is None else float(letter == task.gold))
    said = tolerant_formula(text)
    return Mark(read=said, value=1.0 if said and same_formula(said, str(task.gold)) else None)


def _read(row: Row, copy: Copy) -> Iterator[Task]:
    about = row.mapping("metadata")
    image = row.get("image") if row.has("image") else None
    yield Task(
        id=f"{row.text('problem_version')}-{row.text('sample_index')}",
        question=row.text("query_wo"),  # the question with the instruction for its kind, as it is published
        media=() if image is None else (copy.picture(image),),
        # the options are part of the question, so that the letter is an open answer
        kind=Kind.OPEN,
        gold=row.text("answer").strip(),
        extras={
            "problem_index": row.text("problem_index"),
            "problem_version": row.text("problem_version"),
            "question_type": row.text("question_type"),
            # of the version that has all in the picture the judge needs a text of its own
            "question": row.label("question_for_eval" if row.has("question_for_eval") else "question"),
            "query_cot": row.values.get("query_cot"),
            "subject": str(about.get("subject", "")),
            "subfield": str(about.get("subfield", "")),
        },
    )
