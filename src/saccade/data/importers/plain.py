"""A plain table of files, questions and answers: CSV, TSV, JSONL, JSON or Parquet, with column names of your own."""

import json
import re
from collections.abc import Iterator
from typing import Any

from saccade.data.answers import judged
from saccade.data.raw import LETTERS, Row
from saccade.data.talks import PLACEHOLDER, extras_of
from saccade.types import Kind, MediaKind, Task


def plain(
    row: Row,
    *,
    media: str = "media",
    question: str = "question",
    answer: str = "answer",
    choices: str = "choices",
    kind: str = "kind",
    id: str = "id",
    judge: Kind | None = None,
    first: int | None = None,
    media_kind: MediaKind | None = None,
) -> Iterator[Task]:
    """One task. The first six settings are names of columns; only file, question and answer must be there.

    Several files are a JSON list, or stand with `|` between them; so do `choices`. `judge` is the kind of every row
    that names none; `first` says that answers count the choices from it (0 or 1); `media_kind` is what all files are.
    """
    choice_list = _choices(row, choices) if row.has(choices) else ()
    said: Any = row.get(answer)
    if first is not None:
        said = _counted(row, answer, first, len(choice_list))
    declared = row.text(kind) if row.has(kind) else judge and judge.value
    asked = PLACEHOLDER.sub("", row.text(question)).strip()
    found = judged(row, asked, said, where=answer, declared=declared, choices=choice_list)
    yield Task(
        id=row.text(id) if row.has(id) else row.id,
        question=found.question,
        media=tuple(row.medium(each, media, media_kind) for each in _listed(row, media, r"\|")),
        kind=found.kind,
        gold=found.gold,
        choices=found.choices,
        extras=extras_of(row, media, question, answer, choices, kind, id),
    )


def _choices(row: Row, name: str) -> tuple[str, ...]:
    """A list of choices, texts with marks between them, or choices by letter; blank ones at the end are none."""
    found = row.get(name)
    listed = tuple(found.values()) if isinstance(found, dict) else _listed(row, name, r"\||;(?=\s*[A-J][.)])")
    while listed and (listed[-1] is None or not str(listed[-1]).strip()):
        listed = listed[:-1]
    return tuple(row.as_text(each, name) for each in listed)


def _listed(row: Row, name: str, between: str) -> tuple[Any, ...]:
    value = row.get(name)
    if isinstance(value, str) and not value.strip().endswith("]"):
        return tuple(part.strip() for part in re.split(between, value) if part.strip())
    return tuple(row.list(name))


def _counted(row: Row, name: str, first: int, choices: int) -> str:
    """The letter that a number stands for."""
    try:
        place = int(json.loads(row.text(name))) - first
    except (ValueError, TypeError):
        place = -1
    if not 0 <= place < min(choices, len(LETTERS)):
        raise row.wrong(name, f"{row.values[name]!r} should count one of {choices} choices from {first}")
    return LETTERS[place]
