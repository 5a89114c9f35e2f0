"""Rows of a file as they stand there, one at a time: JSONL, a JSON list, CSV, TSV, Parquet.

A row knows its place, so that whatever is wrong with one of its fields is said with file, row and field.
"""

import base64
import binascii
import csv
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any, TextIO

from saccade.data import parquet
from saccade.data.record import need_file, whole
from saccade.errors import DataError
from saccade.types import Media, MediaKind

CHUNK = 2**20  # characters of a JSON list that are read at a time
LONGEST = 2**26  # characters of one item of it
FIELD = 2**31 - 1  # bytes of a field of a table: pictures in base64 are tens of megabytes
LETTERS = "ABCDEFGHIJ"
STILLS = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff"})

_SIGNS = {b"\x89PNG": ".png", b"\xff\xd8\xff": ".jpg", b"GIF8": ".gif", b"RIFF": ".webp", b"BM": ".bmp"}

Keep = Callable[[bytes], str]
Reader = Callable[[Path], Iterator[Any]]


def _nowhere(content: bytes) -> str:
    raise DataError("it holds the bytes of a picture, which only `saccade data import` can put into files")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row of a file: the third one of a.csv, say, whose fields are read by name.

    Where several names are given, the first field that holds something counts: copies of a data set disagree on names.
    `keep` puts the bytes of a picture that stands in the row into a file, and says where that is.

    >>> Row(file=Path("a.csv"), number=3, values={"answer": 4}).text("gold", "answer")
    '4'
    """

    file: Path
    number: int  # from 1
    values: Mapping[str, Any]
    keep: Keep = field(default=_nowhere)

    @property
    def id(self) -> str:
        """An id that no other row of the file has, such as "train-00000003"."""
        return f"{self.file.stem}-{self.number:08d}"

    def wrong(self, where: str, problem: str) -> DataError:
        """An error that names file, row and field."""
        return DataError(f"{self.file}, row {self.number}, field {where}: {problem}")

    def inner(self, values: Mapping[str, Any]) -> "Row":
        """A row that lies inside this one."""
        return replace(self, values=values)

    def has(self, name: str) -> bool:
        """Whether the field is there and isn't empty."""
        return self.values.get(name) not in (None, "", [], {}, ())

    def get(self, *names: str) -> Any:
        """The field's value. Raises DataError where it is missing or empty."""
        found = next(filter(self.has, names), None)
        if found is None:
            fields = ", ".join(map(str, self.values)) or "none"
            raise self.wrong(names[0], f"it is missing or empty; the row's fields are {fields}")
        return self.values[found]

    def text(self, *names: str) -> str:
        """A text, or a number as one."""
        return self.as_text(self.get(*names), names[0])

    def as_text(self, value: Any, where: str) -> str:
        """A value as text. Raises DataError for anything but a text or a number."""
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise self.wrong(where, f"it should be a text, not {_short(value)}")
        if not str(value).strip():
            raise self.wrong(where, "it is blank")
        return str(value)

    def label(self, name: str) -> str:
        """A text that may be empty, such as the name of a row's group; the field must be there all the same."""
        return "" if self.values.get(name) == "" else self.text(name)

    def number_of(self, *names: str) -> float:
        """A number, which may be written as a text."""
        try:
            return float(self.text(*names))
        except ValueError:
            raise self.wrong(names[0], f"it should be a number, not {_short(self.get(*names))}") from None

    def letter(self, options: int, *names: str) -> str:
        """The letter of one of so many options, which may stand in brackets."""
        value = self.text(*names).strip().strip("().").upper()
        if len(value) != 1 or value not in LETTERS[:options]:
            raise self.wrong(names[0], f"it should be one of {LETTERS[:options]}, not {_short(self.get(*names))}")
        return value

    def mapping(self, name: str) -> Mapping[str, Any]:
        """A mapping, or JSON that is one."""
        return self.as_mapping(self._decoded(name), name)

    def as_mapping(self, value: Any, where: str) -> Mapping[str, Any]:
        """A value that is a mapping. Raises DataError."""
        if not isinstance(value, Mapping):
            raise self.wrong(where, f"it should be a mapping of names to values, not {_short(value)}")
        return value

    def list(self, name: str) -> list[Any]:
        """A list, or JSON that is one; a mapping or a text alone is a list of one."""
        found = self.get(name)
        if isinstance(found, str) and found.strip().startswith("[") and found.strip().endswith("]"):
            found = self._decoded(name)
        if isinstance(found, str | Mapping):
            return [found]
        if not isinstance(found, list | tuple):
            raise self.wrong(name, f"it should be a list, not {_short(found)}")
        return list(found)

    def texts(self, *names: str) -> tuple[str, ...]:
        """A list of texts, and nothing that would have to become one."""
        found = self.get(*names)
        if not isinstance(found, list | tuple):
            raise self.wrong(names[0], f"it should be a list, not {_short(found)}")
        return tuple(str(each) for each in found)

    def _decoded(self, name: str) -> Any:
        value = self.get(name)
        if not isinstance(value, str):
            return value
        try:
            return json.loads(value)
        except (ValueError, RecursionError) as error:
            raise self.wrong(name, f"it is not valid JSON: {error}") from error

    def media(self, name: str, kind: MediaKind | None = None) -> tuple[Media, ...]:
        """The files that a field names; of unknown kind, the ending of a name decides. Raises DataError."""
        values = self.list(name)
        return tuple(self.medium(value, f"{name}.{place}", kind) for place, value in enumerate(values))

    def medium(self, value: Any, where: str, kind: MediaKind | None = None) -> Media:
        """A file by its path, or in a mapping as `video`, `image`, `path` or `url`; or their bytes."""
        if isinstance(value, Mapping):
            keys = [
                key for key in ("bytes", "video", "image", "video_url", "image_url", "path", "url") if value.get(key)
            ]
            if not keys:
                raise self.wrong(where, f"it names no file, but holds {', '.join(map(str, value)) or 'nothing'}")
            known = {"video": MediaKind.VIDEO, "image": MediaKind.IMAGE}.get(keys[0].removesuffix("_url"), kind)
            return self.medium(value[keys[0]], f"{where}.{keys[0]}", known)
        if isinstance(value, str) and value.startswith("data:"):
            value = self._unpacked(value, where)
        if isinstance(value, bytes):
            return Media(path=self.keep(value), kind=kind or MediaKind.IMAGE)
        path = self.as_text(value, where).strip().removeprefix("file://")
        if "\0" in path:
            raise self.wrong(where, "a path can't hold a zero byte")
        still = PurePosixPath(path).suffix.lower() in STILLS
        return Media(path=path, kind=kind or (MediaKind.IMAGE if still else MediaKind.VIDEO))

    def _unpacked(self, text: str, where: str) -> bytes:
        head, _, body = text.partition(",")
        try:
            return base64.b64decode(body, validate=True) if head.endswith(";base64") else body.encode()
        except (binascii.Error, ValueError) as error:
            raise self.wrong(where, f"its data can't be read as base64: {error}") from error


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def kept(content: bytes, folder: Path) -> Path:
    """A file of the folder with these bytes, named after them and their form; the same ones share a file."""
    ending = ".mp4" if content[4:8] == b"ftyp" else ".bin"
    ending = next((name for sign, name in _SIGNS.items() if content.startswith(sign)), ending)
    path = folder / f"{hashlib.sha256(content).hexdigest()[:32]}{ending}"
    if not path.exists():
        folder.mkdir(exist_ok=True)
        with whole(path) as partial:
            partial.write_bytes(content)
    return path


# ---- reading -------------------------------------------------------------------------------------------------------


def read_rows(path: str | Path, keep: Keep = _nowhere, readers: Mapping[str, Reader] | None = None) -> Iterator[Row]:
    """The rows of a file, one at a time; `readers` know endings besides the usual ones, or know them better.

    Raises DataError where the file can't be read as its ending says.
    """
    for row in each_row(path, keep, readers):
        if isinstance(row, DataError):
            raise row
        yield row


def each_row(
    path: str | Path, keep: Keep = _nowhere, readers: Mapping[str, Reader] | None = None
) -> Iterator[Row | DataError]:
    """Like `read_rows`, but a row that is broken alone is the error that says so, and the next ones follow."""
    file, known = Path(path), {**_READERS, **(readers or {})}
    reader = known.get(file.suffix.lower())
    if reader is None:
        *others, last = known
        raise DataError(f"{file}: files of rows end in {', '.join(others)} or {last}")
    need_file(file)
    number = 0
    try:
        for number, values in enumerate(reader(file), start=1):
            if isinstance(values, DataError):
                yield values
            elif not isinstance(values, Mapping):
                yield DataError(f"{file}, row {number}: it should be a mapping of fields, not {_short(values)}")
            else:
                yield Row(file=file, number=number, values=values, keep=keep)
    except (UnicodeDecodeError, csv.Error, OSError) as error:
        raise DataError(f"{file}, after row {number}: the file can't be read: {error}") from error
    if not number:
        raise DataError(f"{file}: the file holds no row")


def _jsonl(path: Path) -> Iterator[Any]:
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                yield json.loads(line)
            except (ValueError, RecursionError) as error:
                yield DataError(f"{path}, line {number}: not valid JSON; mend it or download it again: {error}")


def json_list(path: Path) -> Iterator[Any]:
    """The items of a list, decoded one after the other while the file is read."""
    decoder = json.JSONDecoder()
    with path.open(encoding="utf-8-sig") as file:
        text = _more(file, "")
        if not text.startswith("["):
            raise DataError(f"{path}: a .json file should hold a list of rows; one row a line is .jsonl")
        at, number = 1, 0
        while (at := _next(text, at)) >= len(text) or text[at] != "]":
            value, end = _item(decoder, text, at)
            if end is None:  # it may go on in what isn't read yet
                text, at = _longer(file, text[at:], f"{path}, row {number + 1}: not valid JSON: {value}"), 0
                continue
            at, number = end, number + 1
            yield value


def _item(decoder: json.JSONDecoder, text: str, at: int) -> tuple[Any, int | None]:
    """The item at a place and where it ends; why there is none, and None."""
    try:
        return decoder.raw_decode(text, at)
    except (ValueError, RecursionError) as error:
        return str(error), None


def _longer(file: TextIO, text: str, problem: str) -> str:
    longer = _more(file, text) if len(text) < LONGEST else text
    if len(longer) == len(text):
        raise DataError(problem)
    return longer


def _more(file: TextIO, text: str) -> str:
    # twice as much each time, so that a long item isn't decoded again and again
    return text + file.read(max(CHUNK, len(text))) if text else file.read(CHUNK).lstrip()


def _next(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\r\n,":
        at += 1
    return at


def _table(path: Path) -> Iterator[Any]:
    csv.field_size_limit(FIELD)
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ",")
        for values in reader:
            if None in values:
                yield DataError(f"{path}, line {reader.line_num}: it has more cells than the header has names")
            else:
                yield values


_READERS: Mapping[str, Reader] = {
    **{".jsonl": _jsonl, ".ndjson": _jsonl, ".json": json_list},
    **{".csv": _table, ".tsv": _table, ".parquet": parquet.iterate},
}
