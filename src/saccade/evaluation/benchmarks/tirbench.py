"""TIR-Bench: thirteen tasks that require image operations; letters, numbers, lists and words."""

import functools
import re
from collections.abc import Callable, Iterator, Sequence

from saccade.data.source_row import OPTION_LETTERS
from saccade.evaluation.benchmarks.answer_extraction import strip_formatting
from saccade.evaluation.benchmarks.base import UNPARSED, Benchmark, Grade, JudgePrompt, group_by_extras
from saccade.evaluation.benchmarks.local_dataset import BenchmarkRow
from saccade.rewards.answer_types.reader import names_text, read_letter, read_number
from saccade.rewards.math_worker_pool import MathWorkerError, MathWorkerPool
from saccade.rewards.text_normalization import extract_boxed, normalize_and_casefold, normalize_text
from saccade.types import AnswerType, Task

TASK_COUNTS = {
    **{"color": 100, "contrast": 50, "instrument": 80, "jigsaw": 120, "math": 120, "maze": 120, "ocr": 60},
    **{"refcoco": 120, "rotation_game": 75, "spot_difference": 100, "symbolic": 50, "visual_search": 120},
    "word_search": 100,
}

_OCR_OVERRIDES = {"60.jpg": "mobi", "62.jpg": "aires"}  # of the published code, for file names that contain the key
_EXTRACTION_PROMPT = (
    "You read a candidate's solution of a task about one or two pictures, and say what it gives as its final answer. "
    "Take it as it stands; don't solve the task, and don't correct the answer. Say {form}."
)
_ANSWER_FORMS = {
    "jigsaw": "all numbers of the arrangement in its order, on one line, with blanks between them, such as 3 1 4 2",
    "spot_difference": "the numbers that are named, with commas between them, such as 2, 5, 7, or the one number",
    "word_search": "the row and the column with a comma between them, such as 3, 4, or the one number",
}


def tirbench() -> Benchmark:
    """Define TIR-Bench (Li et al. 2025, arXiv 2511.01833), 1,215 samples; the mean of values in [0, 1].

    In the published code a language model extracts the answer first, except for OCR. Here a judge does; without one a
    rule extracts it in both scoring modes: the content of the last box, else the final answer. `strict` then applies
    the published rule, quirks included (an unknown text is the nearest letter, `7 2` is 72). Its last resort for
    numbers is math-verify: `1,200`, `2,5` and `10^3` have their values, number words none. Without that package such
    answers are undecided.
    """
    return Benchmark(
        name="tirbench",
        repo_id="Agents-X/TIR-Bench",
        file_patterns=("TIR-Bench.json", "data/test-*.parquet", "*.jsonl"),
        num_tasks=1215,
        parse_row=_parse_row,
        grade_strict=_grade_strict,
        grade_lenient=lambda text, task: _build_grade(text, score_lenient(extract_boxed_answer(text, task), task)),
        strata=group_by_extras("task"),
        stratum_sizes={"task": TASK_COUNTS},
        fixed_order_reason="its options are written into the questions and images",
        judge_prompt=JudgePrompt(extraction_prompt=build_extraction_prompt, extract_always=True),
    )


def _grade_strict(text: str, task: Task) -> Grade:
    try:
        return _build_grade(text, score_strict(extract_boxed_answer(text, task), task))
    except MathWorkerError:  # math-verify isn't installed
        return Grade(extracted=text.strip() or None, value=None)


def _build_grade(text: str, value: float | None) -> Grade:
    return UNPARSED if value is None or not text.strip() else Grade(extracted=text.strip(), value=value)


def _parse_row(row: BenchmarkRow) -> Iterator[Task]:
    row = row.with_values(row.get_mapping("row")) if row.has("row") else row
    name = row.require_one_of("task", row.get_text("task", "category"), TASK_COUNTS)
    metadata = row.values.get("meta_data") or row.values.get("metadata") or {}
    images = [row.values[field] for field in ("image_1", "image_2") if row.has(field)]
    yield Task(
        id=row.get_text("id"),
        question=row.get_text("prompt"),
        media=tuple(row.resolve_image(field) for field in images),
        answer_type=AnswerType.OPEN,
        ground_truth=row.get_text("answer") if not isinstance(row.get("answer"), list) else str(row.get("answer")),
        extras={
            "task": name,
            "image_1": images[0] if images and isinstance(images[0], str) else "",
            "difficulty": metadata.get("difficulty") if isinstance(metadata, dict) else None,
        },
    )


def build_extraction_prompt(task: Task) -> str:
    """Return the judge's instruction for extracting an answer; "" for OCR, which searches the response itself."""
    name, expected = task.extras["task"], str(task.ground_truth)
    if name == "ocr":
        return ""
    if _parses_as(float, expected):
        form = "the number alone, without its unit"
    elif {*expected} <= {*OPTION_LETTERS}:
        form = "the letter of the option, which the question gives its text, or the letters, such as B or AC"
    else:
        form = _ANSWER_FORMS.get(name, "the word or the expression alone")
    return _EXTRACTION_PROMPT.format(form=form)


def extract_boxed_answer(text: str, task: Task) -> str:
    """Return the content of the last box, else the whole text; for OCR the response itself."""
    boxes = extract_boxed(text)
    return boxes[-1] if boxes and task.extras["task"] != "ocr" else text


def score_strict(text: str, task: Task) -> float | None:
    """Apply the published rule; None if a list can't be parsed. Raises MathWorkerError without math-verify."""
    name, expected = task.extras["task"], str(task.ground_truth)
    if name == "ocr":
        overrides = (word for file, word in _OCR_OVERRIDES.items() if file in str(task.extras["image_1"]))
        expected = next(overrides, expected)
        return float(expected in text)
    text = text.replace("*", "").strip()
    if name == "jigsaw":
        return _score_jigsaw(text, expected, task)
    if name in _LIST_SCORERS and not _parses_as(int, expected):
        return _LIST_SCORERS[name](text, expected)
    if expected.isalpha():
        return _score_letters(text, expected, task)
    return _score_number(text, expected)


def score_lenient(text: str, task: Task) -> float | None:
    """Score the same tasks by the letter, the last number or the word of the answer, ignoring case and formatting."""
    name, expected = task.extras["task"], str(task.ground_truth)
    if name == "ocr":
        return float(names_text(text, expected))
    plain = strip_formatting(normalize_text(text)).strip()
    if name == "jigsaw" or (name in _LIST_SCORERS and not _parses_as(int, expected)):
        return score_strict(plain, task)
    if len(expected) == 1 and expected.isalpha():
        letter = read_letter(plain, OPTION_LETTERS, in_prose=True)
        return None if letter is None else float(letter == expected)
    if expected.isalpha():
        return float(sorted(re.findall("[A-Za-z]", plain)) == sorted(expected))
    number = read_number(text, in_prose=True)
    if _parses_as(float, expected):
        return None if number is None else float(number == float(expected))
    return float(normalize_and_casefold(plain).rstrip(".") == normalize_and_casefold(expected))


def _parses_as(parser: Callable[[str], object], text: str) -> bool:
    try:
        parser(text)
    except ValueError:
        return False
    return True


def _score_number(text: str, ground_truth: str) -> float | None:
    """Compare numbers without letters, colons and blanks (`7 2` is 72), else let math-verify find and compare them.

    A ground truth that is no number never matches. None for a text without numbers.
    """
    number_type = int if _parses_as(int, ground_truth) else float
    if not _parses_as(number_type, ground_truth):
        return 0.0
    plain = re.sub(r"[A-Za-z*:\s]+", "", text.replace("Extracted answer:", "")).strip()
    if _parses_as(number_type, plain) and number_type(plain) == number_type(ground_truth):
        return 1.0
    if not re.search(r"\d|\\|\$", text):  # no digit, no formula: math-verify finds nothing
        return None
    if number_type is int and re.fullmatch(r"-?\d{1,15}", text):  # another integer for math-verify, too
        return 0.0
    return float(_get_math_workers().verify_texts(ground_truth, text))


@functools.cache
def _get_math_workers() -> MathWorkerPool:
    return MathWorkerPool(cpu_seconds=3, num_workers=1)


def _score_letters(text: str, ground_truth: str, task: Task) -> float:
    if len(ground_truth) > 1:
        return float(sorted(text) == sorted(ground_truth))
    predicted = text.replace("Extracted answer:", "").strip()
    if ground_truth not in OPTION_LETTERS:
        return 0.0
    if predicted not in (*OPTION_LETTERS,):
        for letter in f"{OPTION_LETTERS}H":  # which the published list holds twice
            if any(f"{letter}{gap}{predicted}" in task.question for gap in (". ", ".", " ", "")):
                predicted = letter
        # The published code maps any text to the letter with the least edit distance, ties to the first: delete all
        # other characters, or replace one of them.
        length = len(predicted)
        predicted = min(OPTION_LETTERS, key=lambda letter: length - 1 if letter in predicted else max(length, 1))
    return float(predicted == ground_truth)


def _score_pair(text: str, ground_truth: str) -> float | None:
    matches = [re.search(r"\b(\d+)\s*,\s*(\d+)\b", answer) for answer in (text, ground_truth)]
    predicted, expected = ([*map(_parse_int, match.groups())] if match else None for match in matches)
    return None if predicted is None else float(predicted == expected)


def _parse_int(digits: str) -> int:
    """Return digits as an integer; -1, which no ground truth has, if there are more than 18."""
    return int(digits) if len(digits) <= 18 else -1


def _score_set_iou(text: str, ground_truth: str) -> float:
    """Return the IoU of the two sets of integers; two empty sets score 1."""
    predicted, expected = ({*map(_parse_int, re.findall(r"\d+", answer))} for answer in (text, ground_truth))
    return len(predicted & expected) / len(predicted | expected) if predicted | expected else 1.0


def _score_jigsaw(text: str, ground_truth: str, task: Task) -> float | None:
    """Return the fraction of correct positions in the first run of exactly n * n integers."""
    try:
        count = int(task.extras["difficulty"]) ** 2
    except (TypeError, ValueError):
        return None
    predicted, expected = (_find_number_run(answer, count) for answer in (text, ground_truth))
    return None if predicted is None or expected is None else sum(map(int.__eq__, predicted, expected)) / count


def _find_number_run(text: str, count: int) -> Sequence[int] | None:
    runs = ([*map(_parse_int, re.findall(r"\d+", run))] for run in re.findall(r"[\d\s,，]+", text))
    return next((run for run in runs if len(run) == count), None)


_LIST_SCORERS: dict[str, Callable[[str, str], float | None]] = {
    "word_search": _score_pair,
    "spot_difference": _score_set_iou,
}
