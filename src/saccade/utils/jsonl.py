"""Read and write JSON Lines: one line per task, episode, group or other frozen dataclass, read back equal.

Untyped values (`Task.extras`, `Call.arguments`) must be JSON-like: a tuple in them is read back as a list. Infinities
and NaN are preserved.
"""

import contextlib
import dataclasses
import gc
import json
import os
import stat
from collections.abc import Hashable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json

from saccade.errors import DataError
from saccade.utils.files import open_file, read_bytes, require_regular, sync_path, write_atomically, write_text

ItemT = TypeVar("ItemT")


def write_jsonl(path: str | os.PathLike[str], items: Iterable[Any]) -> None:
    """Write one line per item, atomically and durably."""
    with write_atomically(Path(path)) as partial, open_file(partial, "wb") as file:
        file.writelines(encode_json_line(item) for item in items)


def require_file(path: str | os.PathLike[str]) -> None:
    """Raise DataError, with the path as key, unless it is a readable file."""
    key = os.fspath(path)
    try:
        is_folder = stat.S_ISDIR(os.stat(path).st_mode)
        require_regular(path)
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(f"{path}: there is no such file", key=key) from None
    except OSError as error:
        raise DataError(f"{path} can't be read: {(error.strerror or str(error)).lower()}", key=key) from error
    if is_folder:
        raise DataError(f"{path} is a folder; name a file", key=key)
    if not os.access(path, os.R_OK):
        raise DataError(f"{path} can't be read: permission denied", key=key)


def to_jsonable(item: Any) -> Any:
    """Return an item as plain JSON values: mappings, lists, strings, numbers."""
    return json.loads(encode_json_line(item))


def write_json(path: Path, value: Any) -> Path:
    """Write a value, such as a frozen dataclass, as a JSON file, atomically. Raises RunError with the path as key."""
    return write_text(path, json.dumps(value, default=_convert_for_json, indent=1) + "\n")


def read_json(path: Path, item_type: type[ItemT], *, hint: str) -> ItemT:
    """Return the item of a JSON file. Raises DataError, with path as key and hint as end, if it can't be read."""
    try:
        return validate_as(json.loads(read_bytes(path)), item_type, str(path))
    except (DataError, OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        reason = reason if isinstance(error, DataError) else f"{path} can't be read: {reason}"
        raise DataError(f"{reason}; {hint}", key=str(path)) from error


def append_jsonl(path: str | os.PathLike[str], item: Any) -> None:
    """Append one line durably; remove a truncated last line first."""
    with open_file(path, "a+b") as file:
        is_new = not file.seek(0, os.SEEK_END)
        _repair_last_line(file)
        file.write(encode_json_line(item))
        file.flush()
        os.fsync(file.fileno())
    if is_new:
        sync_path(Path(path).parent)


@contextlib.contextmanager
def pause_garbage_collection() -> Iterator[None]:
    """Pause the collector while thousands of objects are made that all stay: it would visit each of them often."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def read_jsonl(
    path: str | os.PathLike[str], item_type: type[ItemT], *, skip_truncated_line: bool = False
) -> list[ItemT]:
    """Return every item of the file, typed; `skip_truncated_line` ignores a last line that an interruption truncated.

    Raises DataError, which names file and line and has the field as key, for a line that isn't an `item_type`.
    """
    with pause_garbage_collection():
        return list(iterate_jsonl(path, item_type, skip_truncated_line=skip_truncated_line))


def iterate_jsonl(
    path: str | os.PathLike[str], item_type: type[ItemT], *, skip_truncated_line: bool = False
) -> Iterator[ItemT]:
    """Yield what `read_jsonl` returns, one item at a time."""
    source = Path(path)
    require_file(source)
    with open_file(source) as file:
        for number, line in enumerate(file, start=1):
            if not line.strip() or (skip_truncated_line and _is_truncated(line)):
                continue
            yield parse_json_line(line, item_type, f"{source}, line {number}")


def relativize_path(folder: Path, file: str, root: Path | None) -> str:
    """Return the path by which files in `folder` refer to `file`: relative if it is inside `root`, else absolute.

    A run can thus be moved as a whole. `os.path.normpath(folder / path)` is the file.
    """
    absolute = os.path.abspath(file)
    is_inside = root is not None and Path(absolute).is_relative_to(os.path.abspath(root))
    return os.path.relpath(absolute, os.path.abspath(folder)) if is_inside else absolute


def encode_json_line(item: Any, *, sort_keys: bool = False) -> bytes:
    """Encode an item as one line of JSON."""
    # Python's JSON keeps infinities and lone surrogates, which pydantic's loses.
    text = json.dumps(item, default=_convert_for_json, separators=(",", ":"), sort_keys=sort_keys)
    return text.encode() + b"\n"


def _convert_for_json(value: Any) -> Any:
    """Convert dataclasses and mappings to objects (tuples become lists, enums their values)."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: (getattr(value, field.name), field.metadata) for field in dataclasses.fields(value)}
        return {name: item for name, (item, meta) in fields.items() if item is not None or not meta.get("omit_none")}
    if isinstance(value, Mapping):
        return dict(value)
    raise DataError(f"a {type(value).__name__} can't be written as JSON; use plain values", value=value)


def parse_json_line(line: bytes, item_type: type[ItemT], location: str) -> ItemT:
    """Return the item of one line. Raises DataError, which names `location`."""
    try:
        value = json.loads(line)
    except RecursionError as error:
        raise DataError(f"{location}: the JSON is nested too deeply to read", key=location) from error
    except ValueError as error:
        ending = "" if line.endswith(b"\n") else " and without a line end (was its writing interrupted?)"
        raise DataError(f"{location}: not valid JSON{ending}: {error}", key=location) from error
    return validate_as(value, item_type, location)


def parse_plain_json(text: bytes) -> Any:
    """Return what `json.loads` returns, in half the time. Raises ValueError or RecursionError like it."""
    try:
        return from_json(text)
    except ValueError:  # also for a lone surrogate, which json reads
        return json.loads(text)


def validate_as(value: Any, item_type: type[ItemT], location: str) -> ItemT:
    """Convert a plain value to `item_type`. Raises DataError, which names `location` and has the field as key."""
    try:
        return _get_type_adapter(cast(Hashable, item_type)).validate_python(value)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "the whole line"
        message = f"{location}, field {field}: {first['msg']} (read as {item_type.__name__})"
        raise DataError(message, key=field, value=first["input"]) from error


_get_type_adapter = cache(TypeAdapter[Any])  # building one is slow


def _repair_last_line(file: Any) -> None:
    """Make an open file end with a line end: complete a valid last line, remove a truncated one."""
    size = file.seek(0, os.SEEK_END)
    if not size:
        return
    file.seek(size - 1)
    if file.read(1) == b"\n":
        return
    file.seek(0)
    last = file.read().rpartition(b"\n")[2]
    if _is_truncated(last):
        file.truncate(size - len(last))
    else:
        file.write(b"\n")


def _is_truncated(line: bytes) -> bool:
    """Return whether the last line of a file is truncated."""
    if line.endswith(b"\n"):
        return False
    try:
        json.loads(line)
    except RecursionError:  # reading the line reports it
        return False
    except ValueError:
        return True
    return False
