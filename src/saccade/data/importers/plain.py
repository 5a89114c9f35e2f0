"""Import a table of media files, questions and answers (CSV, TSV, JSONL, JSON or Parquet) with any column names."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator

from saccade.data.conversations import MEDIA_PLACEHOLDER_PATTERN, collect_extras
from saccade.data.source_row import OPTION_LETTERS, MediaFile, RowModel, SourceRow, Text, list_values
from saccade.data.task_builder import build_task
from saccade.errors import DataError
from saccade.rewards.answer_types.base import find_answer_type, find_plugin
from saccade.types import MediaKind, Task


def _split_values(value: Any, separator_pattern: str = r"\|") -> list[Any]:
    if isinstance(value, str) and not value.strip().endswith("]"):
        return [part.strip() for part in re.split(separator_pattern, value) if part.strip()]
    return list_values(value)


def _list_options(value: Any) -> list[Any]:
    """Return options given as a list, a separated text, or a mapping by letter, without blank options at the end."""
    options = [*value.values()] if isinstance(value, Mapping) else _split_values(value, r"\||;(?=\s*[A-J][.)])")
    while options and (options[-1] is None or not str(options[-1]).strip()):
        options.pop()
    return options


def _require_answer_type(name: str) -> str:
    try:
        find_plugin(name)
    except DataError as error:
        raise ValueError(str(error)) from error
    return name


DeclaredType = Annotated[str, AfterValidator(_require_answer_type)]


class _PlainRow(RowModel):
    media: Annotated[tuple[MediaFile, ...], BeforeValidator(_split_values)]
    question: Text
    answer: Any
    options: Annotated[tuple[Text, ...], BeforeValidator(_list_options)] = ()
    answer_type: Text | None = None
    id: Text = ""
    environment: Text | None = None


def plain(
    row: SourceRow,
    *,
    media: str = "media",
    question: str = "question",
    answer: str = "answer",
    options: str = "options",
    answer_type: str = "answer_type",
    id: str = "id",
    environment: str = "environment",
    default_answer_type: DeclaredType | None = None,
    index_base: int | None = None,
    media_kind: MediaKind | None = None,
) -> Iterator[Task]:
    """Yield one task. The first seven settings are column names; media, question and answer are required.

    Several media files, and several options, are a JSON list or separated by `|`. `default_answer_type` applies to rows
    that name none; with `index_base` (0 or 1) answers are option numbers that count from it; `media_kind` applies to
    every media file.
    """
    columns = {"media": media, "question": question, "answer": answer, "options": options, "answer_type": answer_type}
    columns |= {"id": id, "environment": environment}
    values = row.parse(_PlainRow, columns)
    if values.answer_type and not find_answer_type(values.answer_type):
        raise row.build_field_error(
            answer_type, f"there is no answer type {values.answer_type!r}", value=values.answer_type
        )
    answer_value = values.answer
    if index_base is not None:
        answer_value = _resolve_numbered_option(row, answer, index_base, len(values.options))
    yield build_task(
        row,
        MEDIA_PLACEHOLDER_PATTERN.sub("", values.question).strip(),
        answer_value,
        tuple(replace(item, kind=media_kind or item.kind) for item in values.media),
        field_name=answer,
        declared_type=values.answer_type or default_answer_type,
        option_texts=values.options,
        extras=collect_extras(row, *columns.values()),
        id=values.id,
        environment=values.environment,
    )


def _resolve_numbered_option(row: SourceRow, name: str, index_base: int, num_options: int) -> str:
    """Return the letter of a numbered option."""
    index = row.get_number(name) - index_base
    if index not in range(min(num_options, len(OPTION_LETTERS))):
        problem = f"{row.get(name)!r} should be the number of one of {num_options} options, counted from {index_base}"
        raise row.build_field_error(name, problem, value=row.get(name))
    return OPTION_LETTERS[int(index)]
