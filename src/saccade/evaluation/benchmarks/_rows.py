"""A local copy of a data set, and its rows one at a time: JSON, JSON lines, CSV, TSV, plain lines and Parquet.

copy = Copy(root=Path("Video-MME"))              the folder as the hub lays it out, or one file of rows
for row in copy.rows("videomme/test-*.parquet")  the first pattern that a file fits
row.text("question")                         DataError with file, row and field where it isn't one
"""

import base64
import binascii
import csv
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from saccade.data import parquet
from saccade.errors import DataError, boundary
from saccade.runlog import writing
from saccade.types import Media, MediaKind, digest_of

LETTERS = "ABCDEFGHIJ"
UNPACKED = "unpacked"  # the folder, beside the rows, for pictures that were stored inside them
_FIELD = 2**31 - 1  # bytes in a field of a table: pictures in base64 are tens of megabytes
_PICTURES = {b"\x89PNG": ".png", b"\xff\xd8\xff": ".jpg", b"RIFF": ".webp", b"GIF8": ".gif"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row with the place it was read from, for messages such as `test.jsonl, row 3: the field 'answer' is missing`.

    >>> Row(where="test.jsonl, row 3", number=3, values={"answer": 4}).text("answer")
    '4'
    """

    where: str
    number: int  # from 1, within its file
    values: Mapping[str, Any]

    def wrong(self, why: str) -> DataError:
        """What to raise about this row."""
        return DataError(f"{self.where}: {why}")

    def any(self, *names: str) -> Any:
        """The first of these fields that is there and holds something; DataError where none is."""
        found = [self.values[name] for name in names if self.values.get(name) is not None]
        if not found:
            raise self.wrong(f"the field {names[0]!r} is missing; the row holds {', '.join(sorted(self.values))}")
        return found[0]

    def has(self, name: str) -> bool:
        """Whether a field is there and holds something."""
        return self.values.get(name) not in (None, "", [], {})

    def text(self, *names: str) -> str:
        """A field as text; numbers are written out, since data sets disagree on which fields are numbers."""
        value = self.any(*names)
        if not isinstance(value, str | int | float) or isinstance(value, bool):
            raise self.wrong(f"the field {names[0]!r} must be a text, it is {str(value)[:60]!r}")
        return str(value)

    def number_of(self, *names: str) -> float:
        """A field as a number, which may be written as a text."""
        try:
            return float(self.text(*names))
        except ValueError:
            raise self.wrong(f"the field {names[0]!r} must be a number, it is {self.any(*names)!r}") from None

    def texts(self, *names: str) -> tuple[str, ...]:
        """A field as a list of texts."""
        value = self.any(*names)
        if isinstance(value, str) or not hasattr(value, "__iter__"):
            raise self.wrong(f"the field {names[0]!r} must be a list, it is {str(value)[:60]!r}")
        return tuple(str(each) for each in value)

    def mapping(self, *names: str) -> Mapping[str, Any]:
        """A field as an object, which may be written as JSON."""
        value = self.any(*names)
        if isinstance(value, str):
            with boundary(DataError, f"{self.where}: the field {names[0]!r} is not JSON"):
                value = json.loads(value)
        if not isinstance(value, Mapping):
            raise self.wrong(f"the field {names[0]!r} must be an object, it is {str(value)[:60]!r}")
        return value

    def letter(self, options: int, *names: str) -> str:
        """A field as the letter of one of so many options."""
        value = self.text(*names).strip().strip("().").upper()
        if len(value) != 1 or value not in LETTERS[:options]:
            raise self.wrong(f"the field {names[0]!r} must be one of {LETTERS[:options]}, it is {self.any(*names)!r}")
        return value

    def inner(self, values: Mapping[str, Any]) -> "Row":
        """A row that lies inside this one."""
        return Row(where=self.where, number=self.number, values=values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """A local copy of a data set: its folder as the hub lays it out, or one file of its rows."""

    root: Path

    @property
    def folder(self) -> Path:
        """Where media are looked for."""
        return self.root if self.root.is_dir() else self.root.parent

    def rows(self, *patterns: str) -> Iterator[Row]:
        """Every row of the files that fit the first pattern which any file fits, files in order of their names.

        Raises DataError where there is no such file, or one can't be read.
        """
        for file in self.files(*patterns):
            for number, values in enumerate(_values(file), start=1):
                where = f"{file}, row {number}"
                if not isinstance(values, Mapping):
                    raise DataError(f"{where}: must be an object, it is {str(values)[:60]!r}")
                yield Row(where=where, number=number, values=values)

    def files(self, *patterns: str) -> list[Path]:
        """The files that fit the first pattern which any fits."""
        if self.root.is_file():
            return [self.root]
        if not self.root.exists():
            raise DataError(f"there is no folder {self.root}; download the data set there, or name the folder it is in")
        for pattern in patterns:
            found = sorted(path for path in self.root.glob(pattern) if path.is_file())
            if found:
                return found
        raise DataError(
            f"{self.root} lacks the split: no file fits {', '.join(patterns)}; download the data set into it once more"
        )

    def video(self, *names: str) -> tuple[Media, ...]:
        """The first of these files that is there, else the first of them: whether it exists is found out when used."""
        places = [self.folder / name for name in names]
        return (Media(path=str(next((place for place in places if place.is_file()), places[0]))),)

    def beside(self, media: Media, *names: str) -> str:
        """The first of these files that is there, as a path from the folder of `media`; "" where none is.

        So a task says the same wherever its copy lies.
        """
        found = next((self.folder / name for name in names if (self.folder / name).is_file()), None)
        return "" if found is None else Path(os.path.relpath(found, Path(media.path).parent)).as_posix()

    def picture(self, value: Any) -> Media:
        """A still picture: a path below the folder, or what the row itself holds (bytes, base64), put into a file.

        Pictures of the same content share a file. Raises RunError where it can't be written, as on a full disk.
        """
        path = _named(value)
        if path is not None:
            below = [self.folder / path, self.folder / "images" / path, self.folder / "data" / path]
            found = next((each for each in below if each.is_file()), below[0])
            return Media(path=str(found), kind=MediaKind.IMAGE)
        content = _content(value, str(self.root))
        suffix = next((each for mark, each in _PICTURES.items() if content.startswith(mark)), ".img")
        file = self.folder / UNPACKED / f"{digest_of(binascii.hexlify(content).decode())[:24]}{suffix}"
        if not file.exists() or file.stat().st_size != len(content):
            with writing(file):
                file.parent.mkdir(exist_ok=True)
                partial = file.with_name(f"{file.name}.part")
                partial.write_bytes(content)
                os.replace(partial, file)
        return Media(path=str(file), kind=MediaKind.IMAGE)


def _named(value: Any) -> str | None:
    """The path that a picture's field names, if it names one."""
    if isinstance(value, Mapping):
        return None if value.get("bytes") else str(value.get("path") or "")
    # base64 is longer than any path, and rarely holds a full stop near its end
    return value if isinstance(value, str) and len(value) < 256 and "." in value[-6:] else None


def _content(value: Any, where: str) -> bytes:
    inside = value["bytes"] if isinstance(value, Mapping) else value
    if isinstance(inside, bytes):
        return inside
    with boundary(DataError, f"{where}: a picture is neither a path, nor bytes, nor base64"):
        return base64.b64decode(inside.rpartition(",")[2], validate=True)


# ---- files ---------------------------------------------------------------------------------------------------------


def _values(file: Path) -> Iterator[Any]:
    with boundary(DataError, f"{file} can't be read; download it again"):
        yield from _READERS.get(file.suffix, _json_lines)(file)


def _json_lines(file: Path) -> Iterator[Any]:
    with file.open(encoding="utf-8") as lines:
        yield from (_parsed(line, f"{file}, line {number}") for number, line in enumerate(lines, 1) if line.strip())


def _parsed(line: str, where: str) -> Any:
    with boundary(DataError, f"{where}: not valid JSON; download the file again"):
        return json.loads(line)


def _json(file: Path) -> Iterator[Any]:
    """A list of rows, or an object of them by key, which becomes the field `key`."""
    found = json.loads(file.read_text(encoding="utf-8"))
    if isinstance(found, Mapping):
        found = [{"key": key, "row": value} for key, value in found.items()]
    yield from found


def _lines(file: Path) -> Iterator[Any]:
    with file.open(encoding="utf-8") as lines:
        yield from ({"line": line.rstrip("\n")} for line in lines if line.strip())


def _table(file: Path) -> Iterator[Any]:
    csv.field_size_limit(_FIELD)
    with file.open(encoding="utf-8", newline="") as lines:
        yield from csv.DictReader(lines, delimiter="\t" if file.suffix == ".tsv" else ",")


_READERS = {".json": _json, ".txt": _lines, ".csv": _table, ".tsv": _table, ".parquet": parquet.iterate}
