"""HR-Bench at 4K and 8K: each question four times, with rotated options."""

import re
from collections.abc import Iterator, Sequence
from typing import Literal

from saccade.evaluation.benchmarks.base import (
    UNDECIDED,
    Benchmark,
    Grade,
    GradedAnswer,
    JudgePrompt,
    compute_accuracy,
    compute_macro_average,
    grade_choice,
    grade_choice_lenient,
    group_by_extra,
    group_by_extras,
)
from saccade.evaluation.benchmarks.local_dataset import BenchmarkRow
from saccade.types import AnswerType, Media, Task

JUDGE_INSTRUCTIONS = (
    "You decide whether a candidate has answered a multiple-choice question about a picture, which you can't see, as "
    "the reference does. It is right only if it settles on the reference's option, by the letter or by what that says; "
    "one that settles on none, or on another, is wrong."
)
_LETTERS = "ABCD"
_MAX_TOKENS_FROM_END = 4  # the one letter must be among this many tokens at the end
_API_FAILURE = "Failed to obtain answer via API"
_REFUSALS = (
    "Sorry, I can't help with images of people yet.",
    "I can't process this file.",
    "I'm sorry, but without the image provided",
    "Cannot determine the answer",
)
_NO_OPTION = "Z"  # as the published code calls it
# Neither a colon nor a bracket is allowed before the letter, and it may begin a word.
_ANNOUNCED_LETTER = re.compile(r"answer\s+is\s+\**([a-d])", re.IGNORECASE)
_MAX_POINTER_CHARS = 64  # characters up to which an image's field is the index of the row that holds the image


def hrbench(*, size: Literal["4k", "8k"] = "4k") -> Benchmark:
    """Define HR-Bench (Wang et al. 2024, arXiv 2408.15556), 800 rows of either `size`; the mean of its four rotations.

    The published rule samples a language model; `strict` is the one its authors refer to (VLMEvalKit): one of four
    refusals is wrong, else the only capital option letter among the words if it is one of the last four, else the
    letter after `answer is` and asterisks in any case, even inside a word, else the only option whose text occurs in a
    response that isn't too long, else a judge. Without a judge such answers count as wrong, as in its exact mode, and
    are reported as undecided.
    """
    images: dict[str, Media] = {}  # by the index of the row that contains them

    def parse_row(row: BenchmarkRow) -> Iterator[Task]:
        index, image = row.get_text("index"), row.get("image")
        if isinstance(image, str) and len(image) <= _MAX_POINTER_CHARS and image in images:
            media = images[image]
        else:
            media = images[index] = row.resolve_image(image)
        yield Task(
            id=index,
            question=row.get_text("question"),
            media=(media,),
            answer_type=AnswerType.CHOICE,
            ground_truth=row.get_option_letter(4, "answer"),
            options=tuple(row.get_text(letter) for letter in _LETTERS),
            extras={"category": row.get_text("category"), "rotation": row.get_text("cycle_category")},
        )

    return Benchmark(
        name=f"hrbench_{size}",
        repo_id="DreamMr/HR-Bench",
        file_patterns=(
            *(f"hr_bench_{size}.tsv", f"hrbench_version_split/hrbench_{size}-*.parquet", f"*{size}*", "*.jsonl"),
        ),
        num_tasks=800,
        parse_row=parse_row,
        grade_strict=_grade_strict,
        grade_lenient=lambda text, task: grade_choice_lenient(text, task, UNDECIDED),
        primary_metric="average",
        compute_metrics=_compute_metrics,
        strata=group_by_extras("category", "rotation"),
        stratum_sizes={"category": {"single": 400, "cross": 400}},
        fixed_order_reason="its metric is the mean over four published orders of the same options",
        judge_prompt=JudgePrompt(instructions=JUDGE_INSTRUCTIONS),
    )


def _grade_strict(text: str, task: Task) -> Grade:
    if _API_FAILURE not in text and (letter := _find_letter(text)):
        return grade_choice(letter, task)
    quoted = [letter for letter, option in zip(_LETTERS, task.options, strict=True) if option.lower() in text.lower()]
    is_short = len(text) <= 2 * sum(map(len, task.options))
    return grade_choice(quoted[0] if is_short and len(quoted) == 1 else None, task, UNDECIDED)


def _find_letter(text: str) -> str | None:
    if any(refusal in text for refusal in _REFUSALS):
        return _NO_OPTION
    words = re.sub(r"[.()\[\],:;!*#{}]", " ", text).split()
    present = [letter for letter in _LETTERS if letter in words]
    if len(present) == 1 and words.index(present[0]) >= len(words) - _MAX_TOKENS_FROM_END:
        return present[0]
    if not present and _NO_OPTION in words:
        return _NO_OPTION
    announced = _ANNOUNCED_LETTER.search(text)
    return announced[1].upper() if announced else None


def _compute_metrics(results: Sequence[GradedAnswer]) -> dict[str, float]:
    """Return the mean over rotations of the accuracy: over all, single and cross rows."""
    rotation, category = group_by_extra("rotation"), group_by_extra("category")
    metrics = {"average": compute_macro_average(results, rotation)}
    for name, key in (("single", "fsp"), ("cross", "fcp")):
        selected = [result for result in results if category(result.task) == name]
        if selected:
            metrics[key] = compute_macro_average(selected, rotation)
    return {**metrics, "mean_of_rows": compute_accuracy(results)["accuracy"]}
