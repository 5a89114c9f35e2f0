"""MathVerse, testmini: each problem in five versions, from text only to image only."""

from collections.abc import Iterator

from saccade.data.source_row import OPTION_LETTERS
from saccade.evaluation.benchmarks.base import (
    UNDECIDED,
    Benchmark,
    Grade,
    JudgePrompt,
    grade_choice,
    group_by_extra,
    group_by_extras,
)
from saccade.evaluation.benchmarks.formulas import are_formulas_equal, extract_formula
from saccade.evaluation.benchmarks.local_dataset import BenchmarkRow
from saccade.rewards.answer_types.reader import read_letter
from saccade.types import AnswerType, Task

JUDGE_INSTRUCTIONS = (
    "You decide whether a candidate has solved a mathematical problem, whose figure you may not see, as the reference "
    "does. It is right if the result that it ends with is the reference's: the same option, by its letter or by what "
    "that says, or the same number or expression in whatever form; how it got there makes no difference. A result with "
    "another value, another unit of measure or another sign is wrong."
)
EXTRACTION_PROMPT = (
    "You read the end of a candidate's solution of a mathematical problem, and say what it gives as its result: the "
    "letter of an option, a number or an expression, with its unit where it has one. Take it as it stands; don't solve "
    "the problem, and don't correct the result."
)
MAX_EXTRACTED_WORDS = 30
VERSIONS = ("Text Dominant", "Text Lite", "Vision Intensive", "Vision Dominant", "Vision Only")


def mathverse() -> Benchmark:
    """Define MathVerse (Zhang et al. 2024, arXiv 2403.14624), 788 problems in five versions.

    The published rule is a judge that extracts from the last 30 words and one that compares (1 or 0); `strict` first
    accepts an answer that equals the ground truth exactly (`--quick_match`), and all other answers need the judge. The
    lenient rule decides letters, and accepts free answers with the value of the ground truth.
    """
    questions: dict[str, str] = {}  # by problem: the version with everything in the image has no text

    def parse_row(row: BenchmarkRow) -> Iterator[Task]:
        task = _parse_task(row)
        questions[task.extras["problem_index"]] = get_question_text(task)
        yield task

    def get_question_text(task: Task) -> str:
        return str(task.extras["question_text"] or questions.get(task.extras["problem_index"], ""))

    return Benchmark(
        name="mathverse",
        repo_id="AI4Math/MathVerse",
        file_patterns=(
            *("testmini.json", "testmini/*.parquet", "testmini-*.parquet", "data/testmini-*.parquet", "*.jsonl"),
        ),
        num_tasks=3940,
        parse_row=parse_row,
        grade_strict=lambda text, task: Grade(
            extracted=text or None, value=1.0 if text.strip() == task.ground_truth else None
        ),
        grade_lenient=_grade_lenient,
        strata=group_by_extras("problem_version", "subject", "question_type"),
        stratum_sizes={
            "problem_version": dict.fromkeys(VERSIONS, 788),
            "question_type": {"multi-choice": 5 * 436, "free-form": 5 * 352},
        },
        cluster_key=group_by_extra("problem_index"),
        fixed_order_reason="its options are written into the questions",
        judge_prompt=JudgePrompt(
            instructions=JUDGE_INSTRUCTIONS,
            question=lambda task: get_question_text(task) or task.question,
            extraction_prompt=lambda task: EXTRACTION_PROMPT,
            max_words=MAX_EXTRACTED_WORDS,
        ),
    )


def _grade_lenient(text: str, task: Task) -> Grade:
    if task.extras["question_type"] == "multi-choice":
        return grade_choice(read_letter(text, OPTION_LETTERS[:6], in_prose=True), task, UNDECIDED)
    formula = extract_formula(text)
    is_correct = formula and are_formulas_equal(formula, str(task.ground_truth))
    return Grade(extracted=formula, value=1.0 if is_correct else None)


def _parse_task(row: BenchmarkRow) -> Task:
    metadata = row.get_mapping("metadata")
    return Task(
        id=f"{row.get_text('problem_version')}-{row.get_text('sample_index')}",
        question=row.get_text("query_wo"),  # the question with the instruction for its kind, as it is published
        media=(row.resolve_image(row.get("image")),) if row.has("image") else (),
        # The options are part of the question, so the letter is an open answer.
        answer_type=AnswerType.OPEN,
        ground_truth=row.get_text("answer").strip(),
        extras={
            "problem_index": row.get_text("problem_index"),
            "problem_version": row.get_text("problem_version"),
            "question_type": row.get_text("question_type"),
            # For the version with everything in the image, the judge needs a separate text.
            "question_text": row.get_text_or_empty("question_for_eval" if row.has("question_for_eval") else "question"),
            "query_cot": row.values.get("query_cot"),
            "subject": str(metadata.get("subject", "")),
            "subfield": str(metadata.get("subfield", "")),
        },
    )
