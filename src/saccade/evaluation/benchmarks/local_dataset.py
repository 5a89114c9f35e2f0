"""A local copy of a data set: its rows one at a time, and the files that they name.

copy = Copy(root=Path("Video-MME"))              the folder as the hub lays it out, or one file of rows
for row in copy.rows("videomme/test-*.parquet")  the first pattern that a file fits
row.text("question")                         DataError with file, row and field where it isn't one
"""

import base64
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from saccade.data.raw import Row, json_list, kept, read_rows
from saccade.errors import DataError, boundary
from saccade.runlog import writing
from saccade.types import Media, MediaKind

UNPACKED = "unpacked"  # the folder, beside the rows, for pictures that were stored inside them


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
            yield from read_rows(file, readers=_READERS)

    def files(self, *patterns: str) -> list[Path]:
        """The files that fit the first pattern which any fits."""
        if self.root.is_file():
            return [self.root]
        if not self.root.exists():
            mend = "download the data set there, name the folder that it is in, or fetch it with --data hub:main"
            raise DataError(f"there is no folder {self.root}; {mend}")
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

    def beside(self, media: Media, *names: str, required: bool = False) -> str:
        """The first of these files that is there, as a path from the folder of `media`, else ""; of a `required` one
        the first name, so that what lacks it is found out.

        So a task says the same wherever its copy lies.
        """
        places = [self.folder / name for name in names]
        found = next((place for place in places if place.is_file()), places[0] if required else None)
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
        folder = self.folder / UNPACKED
        with writing(folder):
            return Media(path=str(kept(content, folder)), kind=MediaKind.IMAGE)


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


# ---- what data sets are published in, besides ----------------------------------------------------------------------


def _json(file: Path) -> Iterator[Any]:
    """A list of rows, or an object of them by key, which becomes the field `key`."""
    with file.open(encoding="utf-8-sig") as text:
        listed = text.read(1024).lstrip().startswith("[")
    if listed:
        yield from json_list(file)
        return
    with boundary(DataError, f"{file}: not valid JSON; download the file again"):
        found = json.loads(file.read_text(encoding="utf-8-sig"))
    if not isinstance(found, Mapping):
        raise DataError(f"{file}: it should hold a list of rows, or rows by key")
    yield from ({"key": key, "row": value} for key, value in found.items())


def _lines(file: Path) -> Iterator[Any]:
    with file.open(encoding="utf-8") as lines:
        yield from ({"line": line.rstrip("\n")} for line in lines if line.strip())


_READERS = {".json": _json, ".txt": _lines}
