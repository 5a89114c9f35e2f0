"""MathVision, test: competition problems with an image; letters, numbers and formulas."""

import re
from collections.abc import Iterator

from saccade.data.source_row import OPTION_LETTERS
from saccade.evaluation.benchmarks.answer_extraction import parse_float
from saccade.evaluation.benchmarks.base import UNPARSED, Benchmark, Grade, grade_choice, group_by_extras
from saccade.evaluation.benchmarks.formulas import (
    are_formulas_equal,
    evaluate_formula,
    extract_formula,
    have_equal_values,
)
from saccade.evaluation.benchmarks.local_dataset import BenchmarkRow
from saccade.rewards.answer_types.reader import read_letter
from saccade.types import AnswerType, Task

_ANSWER_LEADS = ("the final answer is", "the answer is", "the correct answer is", "the answer should be")
_UNITS = ("{m}^3", "m^3", "{units}", "units", "{km}", "km")


def mathvision(*, mini: bool = False) -> Benchmark:
    """Define MathVision (Wang et al. 2024, arXiv 2402.14804), the 3,040 test problems, or the 304 of testmini.

    Strict: a letter at the end of a sentence or alone on the first line, a number after `is`, the text after `the
    answer is`, the last box; then strings are normalized and compared, then values rounded to two decimals. If there
    are options, the text of the right option is also correct.
    """
    split = "testmini" if mini else "test"
    return Benchmark(
        name="mathvision_mini" if mini else "mathvision",
        repo_id="MathLLMs/MathVision",
        file_patterns=(f"{split}.jsonl", f"data/{split}.jsonl", f"data/{split}-*.parquet", "*.jsonl"),
        num_tasks=304 if mini else 3040,
        parse_row=_parse_row,
        grade_strict=_grade_strict,
        grade_lenient=_grade_lenient,
        strata=group_by_extras("subject", "level"),
    )


def _grade_strict(text: str, task: Task) -> Grade:
    answer = extract_model_answer(text)
    is_correct = is_equal(str(task.ground_truth), answer) or is_equal(_get_ground_truth_option(task), answer)
    return Grade(extracted=answer, value=float(is_correct)) if answer else UNPARSED


def _grade_lenient(text: str, task: Task) -> Grade:
    if task.options:
        letter = read_letter(text, OPTION_LETTERS[: len(task.options)], task.options, in_prose=True)
        if letter:
            return grade_choice(letter, task)
    formula, expected = extract_formula(text), _get_ground_truth_option(task) or str(task.ground_truth)
    return Grade(extracted=formula, value=float(are_formulas_equal(formula, expected))) if formula else UNPARSED


def _get_ground_truth_option(task: Task) -> str:
    """Return the text of the right option; "" without options, or if they are in the image."""
    return task.options[OPTION_LETTERS.index(str(task.ground_truth))] if task.options else ""


def _parse_row(row: BenchmarkRow) -> Iterator[Task]:
    options = row.get_texts("options") if row.has("options") else ()
    # All parts are in one image; a marker at the end names no specific part.
    question = re.sub(r"\s*<image1>\s*$", "", row.get_text("question"))
    image = row.get("decoded_image", "image")
    yield Task(
        id=row.get_text("id"),
        question=question,
        media=(row.resolve_image(image),),
        answer_type=AnswerType.CHOICE if options else AnswerType.MATH,
        ground_truth=row.get_option_letter(len(options), "answer") if options else row.get_text("answer"),
        options=options,
        extras={"subject": row.get_text_or_empty("subject"), "level": row.get_text_or_empty("level")},
    )


# ---- the published extraction and equality, rule by rule -----------------------------------------------------------
# The published code evaluates the model's text as Python; `evaluate_formula` handles only numbers.


def extract_model_answer(response: str) -> str:
    """Return the answer of a response in lower case; "" if nothing is left."""
    text = response.strip()
    for letter in "ABCDE":
        is_at_end = text.endswith((f" {letter}.", f" ({letter})."))
        if is_at_end or text.startswith((f"{letter}\n", f"({letter})\n", f"({letter}) {letter}\n")):
            text = letter
    tail = text.split("is ")[-1].rstrip(".")
    text = text if parse_float(tail) is None else tail
    if "oxed{" not in text:
        for lead in _ANSWER_LEADS:
            text = _take_sentence_after(_take_sentence_after(text, lead), lead.replace("the", "The"))
    elif text.count("oxed{") > 1:
        text = "\\boxed{" + text.split("oxed{")[-1]
    answer = _extract_math_answer(text)
    for letter in "abcde":
        answer = answer.replace(f"({letter})", letter).replace(f"{{{letter}}}", letter)
    return answer.rstrip(".").lstrip(":").strip()


def is_equal(ground_truth: str, predicted: str) -> bool:
    """Return whether two answers are the same string, tuple or list, or value rounded to two decimals."""
    ground_truth, predicted = ground_truth.lower(), predicted.lower()
    if not ground_truth.replace(" ", "") or not predicted.replace(" ", ""):
        return False
    if ground_truth.strip() == predicted.strip():
        return True
    ground_truth, predicted = _round_tuple(ground_truth), _round_tuple(predicted)
    return ground_truth == predicted or have_equal_values(ground_truth, predicted)


def _take_sentence_after(text: str, lead: str) -> str:
    """Return the first sentence of the first line after the last `lead`; without one the stripped text."""
    rest = text.split(lead)[-1].strip()
    return rest.split("\n")[0].split(". ")[0] if lead in text else rest


def _round_tuple(text: str) -> str:
    parts = text[1:-1].split(",")
    if len(parts) < 2 or (text[0], text[-1]) not in (("(", ")"), ("[", "]")):
        return text
    rounded = []
    for part in parts:
        value = evaluate_formula(part)
        is_symbol = "infty" in part or part in ("a", "-a")
        if value is None and not is_symbol:
            return text
        # The published code prints integers without decimals.
        is_integer = value is not None and value == int(value) and "." not in part and "frac" not in part
        rounded.append(part if is_symbol else str(int(value or 0)) if is_integer else str(round(value or 0.0, 2)))
    return f"{text[0]}{','.join(rounded)}{text[-1]}"


def _extract_math_answer(text: str) -> str:
    text = text.lower().replace("{}", "")
    _, box, content = text.partition("oxed{")  # up to the last closing brace: the published `oxed{(.*)}`
    answer = content.rpartition("}")[0] if box and "}" in content else text
    if "}" in answer and ("{" not in answer or answer.index("}") < answer.index("{")):
        answer = answer.split("}")[0]
    answer = answer.split("=")[-1].split("\\approx")[-1]
    answer = answer.replace(" ", "").replace("\\,", "").replace("∞", "\\infty")
    answer = answer.replace("+\\infty", "\\infty").replace("\\\\", "\\").replace("\n", "")
    answer = answer.replace("bmatrix", "pmatrix")
    for mark in ("\\text", "\\mbox", "\\left", "\\right", "^{\\circ}", "^\\circ", *_UNITS):
        answer = answer.replace(mark, "")
    return _normalize_latex(answer)


def _normalize_latex(text: str) -> str:
    """Apply the second cleaning: fractions in one notation, no currency or percent signs."""
    for before, after in (("\n", ""), ("\\!", ""), ("\\\\", "\\"), ("tfrac", "frac"), ("dfrac", "frac")):
        text = text.replace(before, after)
    for mark in ("\\left", "\\right", "^{\\circ}", "^\\circ", "\\$", "$"):
        text = text.replace(mark, "")
    text = text.split("\\text{ ")[0].replace("\\%", "").replace(" .", " 0.").replace("{.", "{0.")
    text = "0" + text if text.startswith(".") else text
    for mark in ("=", "\\approx"):
        text = text.split(mark)[-1] if text.count(mark) == 1 else text
    if "sqrt" in text:
        text = re.sub(r"\\sqrt(?!\{|$)(.)", r"\\sqrt{\1}", text, flags=re.DOTALL)
        text = re.sub(r"\\frac(?!\{)(.)([^{])", r"\\frac{\1}{\2}", text)
    text = text.replace(" ", "")
    text = "\\frac{1}{2}" if text == "0.5" else text
    return re.sub(r"^(-?\d+)/(-?\d+)$", r"\\frac{\1}{\2}", text)
