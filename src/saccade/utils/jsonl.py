"""Nouns on disk: one JSON line per task, episode, group or any other frozen type, read back identical.

Values without a type of their own (`Task.extras`, `Call.arguments`) must be JSON-like: a tuple in them comes back as
a list. Infinite and not-a-number floats survive.
"""

import contextlib
import dataclasses
import json
import os
import stat
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

from pydantic import TypeAdapter, ValidationError

from saccade.errors import DataError
from saccade.ledger import Picture
from saccade.types import Media

Noun = TypeVar("Noun")


def write_jsonl(path: str | os.PathLike[str], items: Iterable[Any]) -> None:
    """Write one line per item. The file appears complete or not at all."""
    with whole(Path(path)) as partial, partial.open("wb") as file:
        file.writelines(line(item) for item in items)


def need_file(path: str | os.PathLike[str]) -> None:
    """Raises DataError, which says why, where a path isn't that of a file that can be read."""
    try:
        folder = stat.S_ISDIR(os.stat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(f"{path}: there is no such file") from None
    except OSError as error:
        raise DataError(f"{path} can't be read: {(error.strerror or str(error)).lower()}") from error
    if folder:
        raise DataError(f"{path} is a folder; name a file")
    if not os.access(path, os.R_OK):
        raise DataError(f"{path} can't be read: permission denied")


@contextlib.contextmanager
def whole(target: Path) -> Iterator[Path]:
    """A path to write, which becomes `target` where nothing fails and is deleted where something does."""
    partial = target.with_name(target.name + ".part")
    try:
        yield partial
        os.replace(partial, target)  # atomic: a reader sees the old file or the new one
    finally:
        partial.unlink(missing_ok=True)


def plain(item: Any) -> Any:
    """A noun as JSON has it: mappings, lists, texts, numbers."""
    return json.loads(line(item))


def append(path: str | os.PathLike[str], item: Any) -> None:
    """Add one line; a line that an interruption had left torn at the end is cut off first."""
    with Path(path).open("a+b") as file:
        _mend(file)
        file.write(line(item))


def read_jsonl(path: str | os.PathLike[str], kind: type[Noun], *, torn_end: bool = False) -> list[Noun]:
    """Every item of the file, typed; `torn_end` passes over a last line that was cut off while it was written.

    Raises DataError, naming file, line and field, for anything that isn't a `kind`.
    """
    return list(iterate_jsonl(path, kind, torn_end=torn_end))


def iterate_jsonl(path: str | os.PathLike[str], kind: type[Noun], *, torn_end: bool = False) -> Iterator[Noun]:
    """Like `read_jsonl`, one item at a time."""
    source = Path(path)
    need_file(source)
    with source.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip() or (torn_end and _torn(line)):
                continue
            yield _parse(line, kind, f"{source}, line {number}")


def relocated(item: Noun, change: Callable[[str], str]) -> Noun:
    """A noun with the path of every file and picture in it changed."""
    changed: Any = item
    if isinstance(item, Media | Picture):
        changed = dataclasses.replace(item, path=change(item.path))
    elif isinstance(item, tuple) and item and dataclasses.is_dataclass(item[0]):
        changed = tuple(relocated(each, change) for each in item)
    elif dataclasses.is_dataclass(item) and not isinstance(item, type):
        parts = {field.name: getattr(item, field.name) for field in dataclasses.fields(item)}
        changed = dataclasses.replace(item, **{name: relocated(part, change) for name, part in parts.items()})
    return cast(Noun, changed)


def seen_from(folder: Path, file: str, root: Path | None) -> str:
    """How what lies in `folder` names a file: as seen from there where it lies below `root`, else absolute.

    So a run may be moved as a whole. `os.path.normpath(folder / name)` finds the file again.
    """
    whole = os.path.abspath(file)
    below = root is not None and Path(whole).is_relative_to(os.path.abspath(root))
    return os.path.relpath(whole, os.path.abspath(folder)) if below else whole


def line(item: Any) -> bytes:
    """A noun as a line of JSON."""
    # Python's own JSON keeps what pydantic's loses: infinities, lone surrogates.
    return json.dumps(item, default=_plain, separators=(",", ":")).encode() + b"\n"


def _plain(value: Any) -> Any:
    """What JSON has no word for: dataclasses and mappings as objects (tuples are lists, enums their values)."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return dict(value)
    raise DataError(f"a {type(value).__name__} can't be written as JSON; use plain values")


def _parse(line: bytes, kind: type[Noun], where: str) -> Noun:
    try:
        value = json.loads(line)
    except ValueError as error:
        ending = "" if line.endswith(b"\n") else " and without a line end (was its writing interrupted?)"
        raise DataError(f"{where}: not valid JSON{ending}: {error}") from error
    return typed(value, kind, where)


def typed(value: Any, kind: type[Noun], where: str) -> Noun:
    """A plain value as a noun. Raises DataError, naming `where` and the field, for anything that isn't a `kind`."""
    try:
        item: Noun = _adapter(cast(Hashable, kind)).validate_python(value)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "the whole line"
        raise DataError(f"{where}, field {field}: {first['msg']} (read as {kind.__name__})") from error
    return item


@cache
def _adapter(kind: Hashable) -> TypeAdapter[Any]:
    return TypeAdapter(cast(type[Any], kind))


def _mend(file: Any) -> None:
    """Leave the end of an open file at a line end: complete a whole last line, cut off a torn one."""
    size = file.seek(0, os.SEEK_END)
    if not size:
        return
    file.seek(size - 1)
    if file.read(1) == b"\n":
        return
    file.seek(0)
    last = file.read().rpartition(b"\n")[2]
    if _torn(last):
        file.truncate(size - len(last))
    else:
        file.write(b"\n")


def _torn(line: bytes) -> bool:
    """Whether a line, the last of its file, was cut off while it was written."""
    if line.endswith(b"\n"):
        return False
    try:
        json.loads(line)
    except ValueError:
        return True
    return False
