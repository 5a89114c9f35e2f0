"""DynaMath: 501 questions in ten variants each, scored on average and in the worst case."""

import json
import math
import re
from collections.abc import Iterator, Sequence

from saccade.data.source_row import OPTION_LETTERS
from saccade.evaluation.benchmarks.answer_extraction import parse_float
from saccade.evaluation.benchmarks.base import (
    UNPARSED,
    Benchmark,
    Grade,
    GradedAnswer,
    compute_accuracy,
    compute_weighted_mean,
    grade_choice,
    group_by_extra,
    group_by_extras,
)
from saccade.evaluation.benchmarks.formulas import are_formulas_equal, evaluate_formula, extract_formula
from saccade.evaluation.benchmarks.local_dataset import BenchmarkRow
from saccade.rewards.answer_types.reader import names_text, read_letter
from saccade.types import AnswerType, Task

TOLERANCE = 0.001
_ANSWER_TYPES = {"float": "float", "int": "float", "text": "text", "single answer": "text"}
_ANSWER_TYPES |= {"multiple choice": "multiple choice"}


def dynamath() -> Benchmark:
    """Define DynaMath (Zou et al. 2024, arXiv 2411.00836), 501 seeds in ten variants; average and worst case.

    Strict: the response is JSON, and its `short answer` counts: a number within 0.001 (the first word; `2π` is two pi),
    a letter (or the right letter among the first three characters), a text that contains the ground truth. The worst
    case is the fraction of seeds with every variant right.
    """
    return Benchmark(
        name="dynamath",
        repo_id="DynaMath/DynaMath_Sample",
        file_patterns=("data/sample_variant*.parquet", "sample_variant*.parquet", "trial*/dataset.json", "*.jsonl"),
        num_tasks=5010,
        parse_row=_parse_row,
        grade_strict=_grade_strict,
        grade_lenient=_grade_lenient,
        primary_metric="average",
        compute_metrics=_compute_metrics,
        strata=group_by_extras("variant", "subject", "level", "answer_type"),
        stratum_sizes={"variant": {str(variant): 501 for variant in range(1, 11)}},
        cluster_key=group_by_extra("seed"),
        joint_key=group_by_extra("seed"),
        fixed_order_reason="its options are written into the questions",
    )


def _grade_strict(text: str, task: Task) -> Grade:
    try:
        response = json.loads(text)
    except (ValueError, RecursionError):
        return UNPARSED
    if not isinstance(response, dict) or "short answer" not in response:
        return UNPARSED
    answer = str(response["short answer"])
    return Grade(extracted=answer, value=float(_is_correct(answer, task)))


def _is_correct(answer: str, task: Task) -> bool:
    answer_type, expected = task.extras["answer_type"], str(task.ground_truth)
    if answer_type == "float":
        return abs(_parse_float(answer) - float(expected)) <= TOLERANCE
    if answer_type == "multiple choice":
        return answer == expected if len(answer) == 1 else expected in answer[:3]
    return expected in answer


def _parse_float(answer: str) -> float:
    """Return the first word as a number, NaN if it is none; a number before π is multiplied by it."""
    digits, pi, _ = answer.split(" ")[0].partition("π")
    number = parse_float(digits)
    return math.nan if number is None else number * math.pi if pi else number


def _grade_lenient(text: str, task: Task) -> Grade:
    """Grade the short answer, or the whole text without JSON, as a person would read it."""
    strict = _grade_strict(text[max(0, text.find("{")) : text.rfind("}") + 1], task)
    answer = text if strict.extracted is None else strict.extracted
    if task.extras["answer_type"] == "multiple choice":
        return grade_choice(read_letter(answer, OPTION_LETTERS[:6], in_prose=True), task)
    formula, expected = extract_formula(answer), str(task.ground_truth)
    if formula is None:
        return UNPARSED
    if task.extras["answer_type"] == "float":
        value = evaluate_formula(formula.rpartition("=")[2])
        is_correct = value is not None and abs(value - float(expected)) <= TOLERANCE
    else:
        is_correct = are_formulas_equal(formula, expected) or names_text(answer, expected)
    return Grade(extracted=formula, value=float(is_correct))


def _compute_metrics(results: Sequence[GradedAnswer]) -> dict[str, float]:
    worst: dict[tuple[str, int], GradedAnswer] = {}  # by seed and sample, over its variants
    for result in results:
        seed = str(result.task.extras["seed"]), result.sample_index
        worst[seed] = min(worst.get(seed, result), result, key=lambda sample: sample.value)
    rate = compute_weighted_mean([*worst.values()], get_value=lambda result: result.value >= 1)
    return {"average": compute_accuracy(results)["accuracy"], "worst_case": 100 * rate}


def _parse_row(row: BenchmarkRow) -> Iterator[Task]:
    seed, variant = _read_seed_and_variant(row)
    inner = row.with_values(row.get_mapping("row")) if row.has("row") else row
    answer_type = inner.get_text("answer_type", "question_type").strip().lower()
    row.require_one_of("answer_type", answer_type, _ANSWER_TYPES)
    expected = inner.get_text("ground_truth", "answer").strip()
    if _ANSWER_TYPES[answer_type] == "float":
        inner.get_number("ground_truth", "answer")
    image = inner.get("decoded_image", "image")
    trial = f"trial{variant}/" if row.has("row") else ""  # rows in a variant's folder name images relative to it
    yield Task(
        id=f"{seed}-{variant}",
        question=inner.get_text("question"),
        media=(row.resolve_image(f"{trial}{image}" if isinstance(image, str) and "." in image[-6:] else image),),
        answer_type=AnswerType.OPEN,
        ground_truth=expected,
        extras={
            "seed": seed,
            "variant": variant,
            "answer_type": _ANSWER_TYPES[answer_type],
            "subject": " ".join(inner.get_text_or_empty("subject").split()),
            "level": inner.get_text("knowledge_level", "level").strip(),
        },
    )


def _read_seed_and_variant(row: BenchmarkRow) -> tuple[str, str]:
    """Return the seed question and the variant of a row, from its fields or from its file or folder name."""
    if row.has("question_id"):
        return row.get_text("question_id"), row.get_text("id")
    if row.has("qid"):
        return row.get_text("qid"), row.get_text("varid")
    match = re.search(r"(?:trial|variant)(\d+)", str(row.file))
    variant = row.get_text("trial") if row.has("trial") else match[1] if match else ""
    if not variant:
        problem = "it is missing; call the file sample_variant1 to 10, or put it into trial1 to 10"
        raise row.build_field_error("trial", problem)
    return row.get_text("key", "id"), variant
