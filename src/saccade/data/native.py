"""The native format: a file of `Task` or of `Demo`, a line of JSON or a row of Parquet each.

Parquet has the columns `id`, `question`, `kind` and `choices`, and as JSON `media`, `gold` and `extras`, whose types
differ from row to row; demonstrations besides `frames`, `replies`, `children` and `main`.
"""

import dataclasses
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from saccade.data import parquet
from saccade.data.raw import Row, read_rows
from saccade.data.record import plain, typed, whole, write_jsonl
from saccade.errors import DataError
from saccade.plugins import nearest
from saccade.types import Demo, Media, Task

Noun = TypeVar("Noun", Task, Demo)

TASK = {**dict.fromkeys(("id", "question", "media", "kind", "gold"), "text"), "choices": "texts", "extras": "text"}
DEMO = {**TASK, "frames": "whole", "replies": "texts", "children": "list of texts", "main": "yes or no"}
AS_JSON = ("media", "gold", "extras")


def iterate(path: str | os.PathLike[str], kind: type[Noun]) -> Iterator[Noun]:
    """Every task or demonstration of a file, one at a time, as it stands there.

    Raises DataError, naming file, row and field, for anything that isn't a `kind`.
    """
    for row in read_rows(Path(path)):
        yield of_row(row, kind)


def find(path: Path, number: int, id: str | None = None) -> Task | Demo:
    """The row of a number (from 1), or of an id. Raises DataError where there is none."""
    kind: Any = kind_of(path)
    last = 0
    for row in read_rows(path):
        last = row.number
        if id is None and row.number == number:
            return of_row(row, kind)
        task = row.values.get("task")
        if id is not None and id in (row.values.get("id"), task.get("id") if isinstance(task, Mapping) else None):
            return of_row(row, kind)
    raise DataError(f"{path} has no row {f'with the id {id!r}' if id else number}; it has {last} rows")


def of_row(row: Row, kind: type[Noun]) -> Noun:
    """A row of a native file as what it is. Raises DataError, naming file, row and field."""
    where = f"{row.file}, row {row.number}"
    value = dict(row.values)
    if row.file.suffix.lower() == ".parquet":
        value = _noun(value, kind, where)
    _known(value, kind, where)
    return typed(value, kind, where)


def write(path: str | os.PathLike[str], items: Iterable[Any]) -> int:
    """Write tasks, or demonstrations, as the path's ending says; how many. The file appears complete or not at all."""
    target, counter = Path(path), itertools.count()
    counted = (item for item, _ in zip(items, counter, strict=False))
    if target.suffix.lower() != ".parquet":
        write_jsonl(target, counted)
        return next(counter)
    first = next(counted, None)
    columns = DEMO if isinstance(first, Demo) else TASK
    everything = itertools.chain([] if first is None else [first], counted)
    with whole(target) as partial:
        parquet.write(partial, columns, map(_row, everything))
    return next(counter)


def kind_of(path: str | os.PathLike[str]) -> type[Task] | type[Demo]:
    """Whether a file holds tasks or demonstrations, by its first row. Raises DataError where it holds neither."""
    first = next(iter(read_rows(Path(path))))
    if "replies" in first.values:
        return Demo
    if {"question", "gold"} <= first.values.keys():
        return Task
    raise DataError(f"{path} holds neither tasks nor demonstrations; turn it into them with `saccade data import`")


def _known(value: Any, kind: type[Any], where: str) -> None:
    """Raises DataError for a field that a noun, or one inside it, doesn't have: a slip in a name would go unnoticed."""
    if not isinstance(value, Mapping):
        return
    names = {each.name for each in dataclasses.fields(kind)}
    other = next((str(name) for name in value if name not in names), None)
    if other is not None:
        raise DataError(f"{where}, field {other}: a {kind.__name__} has no such field; {nearest(other, names)}")
    for name, inner in (("task", [value.get("task")]), ("media", value.get("media"))):
        for each in inner if name in names and isinstance(inner, list) else ():
            _known(each, {"task": Task, "media": Media}[name], f"{where}, {name}")


def _row(item: Task | Demo) -> dict[str, Any]:
    value = plain(item)
    flat = {**value.pop("task", {}), **value}
    return {**flat, **{name: json.dumps(flat[name]) for name in AS_JSON}}


def _noun(row: dict[str, Any], kind: type[Any], where: str) -> dict[str, Any]:
    flat = dict(row)
    for name in AS_JSON:
        try:
            flat[name] = json.loads(flat.get(name) or "")
        except (ValueError, TypeError) as error:
            raise DataError(f"{where}, field {name}: not valid JSON: {error} (read as {kind.__name__})") from error
    if kind is Task:
        return flat
    return {"task": {name: flat.pop(name) for name in TASK if name in flat}, **flat}
