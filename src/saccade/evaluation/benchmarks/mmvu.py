"""MMVU, validation: expert questions about videos, with options or open."""

import re
from collections.abc import Iterator

from saccade.data.source_row import OPTION_LETTERS
from saccade.evaluation.benchmarks.base import (
    UNDECIDED,
    Benchmark,
    Grade,
    JudgePrompt,
    grade_choice,
    grade_choice_lenient,
    group_by_extras,
)
from saccade.evaluation.benchmarks.local_dataset import BenchmarkRow
from saccade.rewards.answer_types.denials import has_denial
from saccade.rewards.answer_types.reader import clean_text, names_text, read_letter, read_number
from saccade.rewards.text_normalization import normalize_and_casefold, normalize_text
from saccade.types import AnswerType, Task

DISCIPLINES = {
    "Science": (
        "Astronomy, Biology, Chemistry, Electromagnetism, Geography, Materials Science, Mechanics, Modern Physics, "
        "Neurobiology, Thermodynamics"
    ),
    "Engineering": (
        "Biomedical Engineering, Civil Engineering, Computer Science, Electrical Engineering, "
        "Electronics and Communication, Mechanical Engineering"
    ),
    "Healthcare": "Basic Medicine, Clinical Medicine, Dentistry, Pharmacy, Preventive Medicine",
    "Humanities and Social Science": "Art, Economics, History, Law, Literature, Management",
}
_DISCIPLINE_BY_SUBJECT = {subject: name for name, subjects in DISCIPLINES.items() for subject in subjects.split(", ")}
JUDGE_INSTRUCTIONS = (
    "You decide whether a candidate has answered an expert's question about a video, which you can't see, as the "
    "reference does. Where options are listed, it is right only if it settles on the reference's option. Where none "
    "are, it is right only if it states the very technique, concept or value of the reference, explicitly and beyond "
    "doubt; one that is broader, merely related, or one of several is wrong."
)
_SUPERSCRIPTS = str.maketrans({digit: f"^{value}" for value, digit in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")})


def mmvu() -> Benchmark:
    """Define MMVU (Zhao et al. 2025, arXiv 2501.12380), the 1,000 validation questions.

    The published rule is a judge for both kinds of question (correct, true or false), so `strict` decides only clear
    cases: a letter alone, announced or boxed in an answer that denies nothing, and an open answer that equals the
    ground truth ignoring case. Everything else is undecided. The lenient rule also reads letters within sentences, and
    accepts an open answer that contains the ground truth as whole words, or its number with the same unit, and denies
    nothing.
    """
    return Benchmark(
        name="mmvu",
        repo_id="yale-nlp/MMVU",
        file_patterns=("validation.json", "data/validation.json", "data/validation-*.parquet", "*.jsonl"),
        num_tasks=1000,
        parse_row=_parse_row,
        grade_strict=_grade_strict,
        grade_lenient=_grade_lenient,
        strata=group_by_extras("discipline", "question_type", "subject"),
        stratum_sizes={
            "discipline": {"Science": 318, "Engineering": 348, "Healthcare": 193, "Humanities and Social Science": 141},
            "question_type": {"multiple-choice": 625, "open-ended": 375},
        },
        judge_prompt=JudgePrompt(instructions=JUDGE_INSTRUCTIONS),
    )


def _grade_strict(text: str, task: Task) -> Grade:
    text = clean_text(text)
    if task.options:
        # Not in prose: no list of denials is complete ("C is a distractor"), and a judge decides the rest.
        letter = read_letter(text, OPTION_LETTERS[: len(task.options)], task.options)
        return grade_choice(None if has_denial(normalize_text(text)) else letter, task, UNDECIDED)
    is_correct = _normalize_text(text) == _normalize_text(str(task.ground_truth))
    return Grade(extracted=text or None, value=1.0 if is_correct else None)


def _grade_lenient(text: str, task: Task) -> Grade:
    text = clean_text(text)
    if task.options:
        return grade_choice_lenient(text, task, UNDECIDED)
    answer, expected = _normalize_text(text), _normalize_text(str(task.ground_truth))
    number = read_number(expected) if re.match(r"-?[\d.]", expected) else None
    unit = expected.lstrip("-0123456789., ")
    has_unit = re.search(rf"(?<![^\W\d_]){re.escape(unit)}(?!\w)", answer)
    has_value = number is not None and read_number(answer, in_prose=True) == number and has_unit
    return Grade(extracted=text or None, value=1.0 if names_text(answer, expected) or has_value else None)


def _normalize_text(text: str) -> str:
    return " ".join(normalize_and_casefold(text.translate(_SUPERSCRIPTS)).split()).rstrip(".")


def _parse_row(row: BenchmarkRow) -> Iterator[Task]:
    question_types = ("multiple-choice", "open-ended")
    question_type = row.require_one_of("question_type", row.get_text("question_type"), question_types)
    subject = str(row.get_mapping("metadata").get("subject", "")).replace("_", " ")
    row.require_one_of("metadata.subject", subject, _DISCIPLINE_BY_SUBJECT)
    choices = row.get_mapping("choices") if question_type == "multiple-choice" else {}
    options = tuple(str(choices[letter]) for letter in sorted(choices) if choices[letter] not in ("", None))
    # In a URL the part below the repository is the path in a copy.
    path = row.get_text("video_path", "video").rpartition("/resolve/main/")[2]
    yield Task(
        id=row.get_text("id"),
        question=row.get_text("question"),
        media=row.resolve_video(path, f"videos/{path}"),
        answer_type=AnswerType.CHOICE if options else AnswerType.OPEN,
        ground_truth=row.get_option_letter(len(options), "answer") if options else row.get_text("answer"),
        options=options,
        extras={"question_type": question_type, "subject": subject, "discipline": _DISCIPLINE_BY_SUBJECT[subject]},
    )
