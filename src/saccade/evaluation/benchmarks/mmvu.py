"""MMVU, validation: expert questions about videos, with options or open."""

import re
from collections.abc import Iterator

from saccade.data.raw import LETTERS, Row
from saccade.evaluation.benchmarks._answers import letter_of, number_of
from saccade.evaluation.benchmarks._benchmark import Benchmark, Criterion, Mark, accuracy, extra
from saccade.evaluation.benchmarks._rows import Copy
from saccade.evaluation.benchmarks._rules import option
from saccade.rewards._text import asked, folded
from saccade.types import Kind, Task

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
_OF = {subject: name for name, subjects in DISCIPLINES.items() for subject in subjects.split(", ")}
PROMPT = (
    "You decide whether a candidate has answered an expert's question about a video, which you can't see, as the "
    "reference does. Where options are listed, it is right only if it settles on the reference's option. Where none "
    "are, it is right only if it states the very technique, concept or value of the reference, explicitly and beyond "
    "doubt; one that is broader, merely related, or one of several is wrong."
)
_SUPERSCRIPTS = str.maketrans({digit: f"^{value}" for value, digit in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")})


def mmvu() -> Benchmark:
    """MMVU (Zhao et al. 2025, arXiv 2501.12380), the 1,000 validation questions.

    The published rule is a judge for both kinds of question (correct, true or false), so `official` decides only what
    no judge could see otherwise: one letter that is named, and an open answer that is the gold but for case. All else
    is undecided. The tolerant rule takes an open answer that holds the gold as whole words, or its number with the same
    unit.
    """
    return Benchmark(
        name="mmvu",
        hub="yale-nlp/MMVU",
        patterns=("validation.json", "data/validation.json", "data/validation-*.parquet", "*.jsonl"),
        count=1000,
        read=_read,
        official=lambda text, task: _letter(text, task) if task.choices else _equal(text, task),
        tolerant=lambda text, task: _letter(text, task) if task.choices else _holds(text, task),
        headline="accuracy",
        metrics=accuracy,
        strata={name: extra(name) for name in ("discipline", "question_type", "subject")},
        counts={
            "discipline": {
                **{"Science": 318, "Engineering": 348, "Healthcare": 193},
                **{"Humanities and Social Science": 141},
            },
            "question_type": {"multiple-choice": 625, "open-ended": 375},
        },
        criterion=Criterion(
            prompt=PROMPT,
            question=lambda task: asked(task.question, task.choices),
            gold=lambda task: option(task) if task.choices else str(task.gold),
        ),
    )


def _letter(text: str, task: Task) -> Mark:
    letter = letter_of(text, LETTERS[: len(task.choices)], task.choices)
    return Mark(read=letter, value=None if letter is None else float(letter == task.gold))


def _equal(text: str, task: Task) -> Mark:
    return Mark(read=text or None, value=1.0 if _plain(text) == _plain(str(task.gold)) else None)


def _holds(text: str, task: Task) -> Mark:
    said, gold = _plain(text), _plain(str(task.gold))
    whole = gold and re.search(rf"(?<![\w.-]){re.escape(gold)}(?![\w-]|\.\d)", said)
    number = number_of(gold) if re.match(r"-?[\d.]", gold) else None
    unit = gold.lstrip("-0123456789., ")
    same = number is not None and number_of(said) == number and unit in said
    hedged = re.search(r"\b(?:not|neither|nor|or)\b|n't\b", said)
    return Mark(read=text or None, value=1.0 if (whole or same) and not hedged else None)


def _plain(text: str) -> str:
    return " ".join(folded(text.translate(_SUPERSCRIPTS)).split()).rstrip(".")


def _read(row: Row, copy: Copy) -> Iterator[Task]:
    kind = row.text("question_type")
    if kind not in ("multiple-choice", "open-ended"):
        raise row.wrong("question_type", f"it should be multiple-choice or open-ended, not {kind!r}")
    subject = str(row.mapping("metadata").get("subject", "")).replace("_", " ")
    if subject not in _OF:
        raise row.wrong("metadata.subject", f"it should be a known subject, not {subject!r}")
    choices = row.mapping("choices") if kind == "multiple-choice" else {}
    options = tuple(str(choices[letter]) for letter in sorted(choices) if choices[letter] not in ("", None))
    # of an address the part below the repository is the path in a copy
    path = row.text("video_path", "video").rpartition("/resolve/main/")[2]
    yield Task(
        id=row.text("id"),
        question=row.text("question"),
        media=copy.video(path, f"videos/{path}"),
        kind=Kind.CHOICE if options else Kind.OPEN,
        gold=row.letter(len(options), "answer") if options else row.text("answer"),
        choices=options,
        extras={"question_type": kind, "subject": subject, "discipline": _OF[subject]},
    )
