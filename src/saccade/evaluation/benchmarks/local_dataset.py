"""Read a local copy of a benchmark's dataset: its rows one at a time, and the files they refer to."""

import base64
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from saccade.data.source_row import SourceRow, iterate_json_list, read_rows, store_media_file
from saccade.errors import DataError, convert_errors
from saccade.types import Media, MediaKind
from saccade.utils.files import convert_file_errors, open_file, read_text

UNPACKED_DIR = "unpacked"  # the folder, next to the rows, for images that rows contain


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkRow(SourceRow):
    """A row of a local copy whose media are below `media_dir`."""

    media_dir: Path  # the folder of the copy

    def require_one_of(self, field_name: str, value: str, allowed: Iterable[str]) -> str:
        """Return the value of a field. Raises DataError if it is not one of `allowed`."""
        if value not in allowed:
            raise self.build_field_error(field_name, f"it should be one of {', '.join(allowed)}; not {value!r}", value)
        return value

    def resolve_video(self, *names: str) -> tuple[Media, ...]:
        """Return the first of these files that exists, else the first one; whether it exists is checked on use."""
        paths = [self.media_dir / name for name in names]
        return (Media(path=str(next((path for path in paths if os.path.isfile(path)), paths[0]))),)

    def resolve_sidecar(self, media: Media, *names: str, required: bool = False) -> str:
        """Return the first of these files that exists, relative to the folder of `media`, else "".

        If it is `required`, return the first name even if it is missing, so that its absence is detected on use. The
        relative path makes a task independent of the copy's location.
        """
        paths = [self.media_dir / name for name in names]
        path = next((path for path in paths if os.path.isfile(path)), paths[0] if required else None)
        return "" if path is None else Path(os.path.relpath(path, Path(media.path).parent)).as_posix()

    def resolve_image(self, value: Any) -> Media:
        """Return an image: a path below the folder, or content of the row (bytes, base64), which is written to a file.

        Raises DataError if the content can't be decoded, RunError if the file can't be written.
        """
        path = _get_named_path(value)
        if path is not None:
            candidates = [self.media_dir / path, self.media_dir / "images" / path, self.media_dir / "data" / path]
            file = next((candidate for candidate in candidates if os.path.isfile(candidate)), candidates[0])
            return Media(path=str(file), kind=MediaKind.IMAGE)
        content, folder = value["bytes"] if isinstance(value, Mapping) else value, self.media_dir / UNPACKED_DIR
        if not isinstance(content, bytes):
            problem = f"{self.file}, row {self.number}: an image is neither a path, nor bytes, nor base64"
            with convert_errors(DataError, problem, key="image"):
                content = base64.b64decode(content.rpartition(",")[2], validate=True)
        with convert_file_errors(folder):
            return Media(path=str(store_media_file(content, folder)), kind=MediaKind.IMAGE)


def iterate_rows(root: Path, patterns: Sequence[str]) -> Iterator[BenchmarkRow]:
    """Yield every row of a copy, a folder with the hub's layout or one file of rows; see `find_row_files`."""
    media_dir = root if os.path.isdir(root) else root.parent
    for file in find_row_files(root, patterns):
        for row in read_rows(file, readers=_READERS):
            yield BenchmarkRow(**{name.name: getattr(row, name.name) for name in fields(row)}, media_dir=media_dir)


def find_row_files(root: Path, patterns: Sequence[str]) -> list[Path]:
    """Return the files that match the first matching pattern, by name. Raises DataError if there are none."""
    if os.path.isfile(root):  # pathlib raises OSError for a name that is too long
        return [root]
    if not os.path.exists(root):
        raise DataError(
            f"the folder {root} does not exist; download the dataset there, give another folder, or fetch it "
            "with --benchmark-data hub:main",
            key=str(root),
        )
    for pattern in patterns:
        files = sorted(path for path in root.glob(pattern) if path.is_file())
        if files:
            return files
    raise DataError(
        f"{root} lacks the split: no file matches {', '.join(patterns)}; download the dataset into it again",
        key=str(root),
        value=patterns,
    )


def _get_named_path(value: Any) -> str | None:
    """Return the path in an image field, or None if the field holds content."""
    if isinstance(value, Mapping):
        return None if value.get("bytes") else str(value.get("path") or "")
    # base64 is longer than any path, and rarely contains a period near its end.
    return value if isinstance(value, str) and len(value) < 256 and "." in value[-6:] else None


def _read_json(file: Path) -> Iterator[Any]:
    """Yield the rows of a JSON list, or of an object of rows by key, with the key as the field `key`."""
    with open_file(file, "r", encoding="utf-8-sig") as text:
        is_list = text.read(1024).lstrip().startswith("[")
    if is_list:
        yield from iterate_json_list(file)
        return
    with convert_errors(DataError, f"{file}: not valid JSON; download the file again", key=str(file)):
        content = json.loads(read_text(file, encoding="utf-8-sig"))
    if not isinstance(content, Mapping):
        raise DataError(f"{file} holds neither a list of rows nor rows by key; download the file again", key=str(file))
    yield from ({"key": key, "row": value} for key, value in content.items())


def _read_lines(file: Path) -> Iterator[Any]:
    with open_file(file, "r", encoding="utf-8") as lines:
        yield from ({"line": line.rstrip("\n")} for line in lines if line.strip())


_READERS = {".json": _read_json, ".txt": _read_lines}
