"""Read rows of published files one at a time: JSONL, a JSON list, CSV, TSV, Parquet.

    class Row(RowModel):               the fields of a source, with their types
        question: Text
        videos: Videos = ()

    for row in read_rows("a.parquet"):
        values = row.parse(Row)        or a single field: row.get_text("question")

A row has its file and number, so that errors about its fields name file, row and field.
"""

import base64
import csv
import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, TypeAdapter, ValidationError, ValidationInfo, model_validator

from saccade.data import parquet
from saccade.errors import DataError
from saccade.types import IMAGE_SUFFIXES, Media, MediaKind
from saccade.utils.files import open_file, write_atomically
from saccade.utils.jsonl import require_file

CHUNK_CHARS = 2**20  # read from a JSON list at a time
MAX_ITEM_CHARS = 2**26  # of one item of a JSON list
MAX_FIELD_BYTES = 2**31 - 1  # of a table cell: images in base64 take tens of megabytes
OPTION_LETTERS = "ABCDEFGHIJ"

_MAGIC_BYTES = {b"\x89PNG": ".png", b"\xff\xd8\xff": ".jpg", b"GIF8": ".gif", b"RIFF": ".webp", b"BM": ".bmp"}
_MEDIA_KEYS = ("bytes", "video", "image", "video_url", "image_url", "path", "url")

MediaSaver = Callable[[bytes], str]
Reader = Callable[[Path], Iterator[Any]]
RowT = TypeVar("RowT", bound="RowModel")


def is_empty(value: Any) -> bool:
    """Return whether a field counts as missing: copies of a dataset differ in what they write for no value."""
    return value in (None, "", [], {}, ())


def decode_json(value: Any) -> Any:
    """Decode a value that CSV and Parquet hold as JSON text; other values stay."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not valid JSON: {error}") from error


def list_values(value: Any) -> list[Any]:
    """Return the items of a list, which may be written as JSON; a single mapping or text becomes a list of one."""
    if isinstance(value, str) and value.strip().startswith("[") and value.strip().endswith("]"):
        value = decode_json(value)
    if isinstance(value, list | tuple):
        return list(value)
    if isinstance(value, str | Mapping):
        return [value]
    raise ValueError(f"it should be a list, not {value!r:.60}")


def _parse_text(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"it should be a text, not {value!r:.60}")
    if not str(value).strip():
        raise ValueError("it is blank")
    return str(value)


def parse_media(value: Any, info: ValidationInfo, *, kind: MediaKind | None = None) -> Media:
    """Return a media file given as a path, bytes, data URL, or mapping with `video`, `image`, `path` or `url`.

    Without `kind` the key of the mapping or the suffix decides. The context of validation stores bytes.
    """
    if isinstance(value, Mapping):
        key = next((key for key in _MEDIA_KEYS if value.get(key)), None)
        if key is None:
            raise ValueError(f"it should name a file, but its keys are {', '.join(map(str, value)) or 'none'}")
        key_kind = {"video": MediaKind.VIDEO, "image": MediaKind.IMAGE}.get(key.removesuffix("_url"), kind)
        return parse_media(value[key], info, kind=key_kind)
    if isinstance(value, str) and value.startswith("data:"):
        head, _, body = value.partition(",")
        value = base64.b64decode(body, validate=True) if head.endswith(";base64") else body.encode()
    if isinstance(value, bytes):
        if info.context is None:
            raise ValueError("it contains image bytes; turn them into files with `saccade data import`")
        return Media(path=info.context(value), kind=kind or MediaKind.IMAGE)
    path = _parse_text(value).strip().removeprefix("file://")
    if "\0" in path:
        raise ValueError("a path can't contain a zero byte")
    is_image = PurePosixPath(path).suffix.lower() in IMAGE_SUFFIXES
    return Media(path=path, kind=kind or (MediaKind.IMAGE if is_image else MediaKind.VIDEO))


Text = Annotated[str, BeforeValidator(_parse_text)]  # a text that isn't blank, or a number as text
JsonMapping = Annotated[dict[str, Any], BeforeValidator(decode_json)]
JsonList = Annotated[list[Any], BeforeValidator(list_values)]
MediaFile = Annotated[Media, BeforeValidator(parse_media)]
MediaFiles = Annotated[tuple[MediaFile, ...], BeforeValidator(list_values)]
_Video = Annotated[Media, BeforeValidator(functools.partial(parse_media, kind=MediaKind.VIDEO))]
_Image = Annotated[Media, BeforeValidator(functools.partial(parse_media, kind=MediaKind.IMAGE))]
Videos = Annotated[tuple[_Video, ...], BeforeValidator(list_values)]
Images = Annotated[tuple[_Image, ...], BeforeValidator(list_values)]


class RowModel(BaseModel):
    """The typed fields of a row, or of a mapping in it, which may be written as JSON; an empty field is missing."""

    @model_validator(mode="before")
    @classmethod
    def _drop_empty_fields(cls, values: Any) -> Any:
        values = decode_json(values)
        if not isinstance(values, Mapping):
            raise ValueError(f"it should be a mapping of names to values, not {values!r:.60}")
        return {name: value for name, value in values.items() if not is_empty(value)}


_build_adapter: Callable[[Any], TypeAdapter[Any]] = functools.cache(TypeAdapter)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRow:
    """A row of a published file, with typed access to its fields; access errors are DataErrors with the field as key.

    Methods with several names return the first field that isn't empty: copies of a dataset disagree on names.

    >>> SourceRow(file=Path("a.csv"), number=3, values={"answer": 4}).get_text("label", "answer")
    '4'
    """

    file: Path  # that it was read from
    number: int  # from 1
    values: Mapping[str, Any]  # the fields as the file has them
    save_media: MediaSaver | None = None  # stores image bytes that are embedded in the row; returns the file's path

    @property
    def id(self) -> str:
        """An id that is unique within the file, such as "train-00000003"."""
        return f"{self.file.stem}-{self.number:08d}"

    def build_field_error(self, field_name: str, problem: str, value: object = None) -> DataError:
        """Return a DataError that names file, row and field; its key is the field."""
        return DataError(f"{self.file}, row {self.number}, field {field_name}: {problem}", key=field_name, value=value)

    def with_values(self, values: Mapping[str, Any]) -> Self:
        """Return a row with the same position and other values, such as a nested mapping."""
        return replace(self, values=values)

    def parse(self, model: type[RowT], columns: Mapping[str, str] | None = None) -> RowT:
        """Return the fields as a typed model; `columns` are the row's own names of its fields. Raises DataError."""
        values = {name: self.values.get(column) for name, column in columns.items()} if columns else self.values
        return self.convert(values, model, columns=columns)

    def convert(
        self, value: Any, field_type: Any, field_name: str = "", columns: Mapping[str, str] | None = None
    ) -> Any:
        """Convert a value of a field (of the whole row without a name) to a type such as `Text`. Raises DataError."""
        try:
            return _build_adapter(field_type).validate_python(value, context=self.save_media)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            path = [str(part) for part in (field_name, *first["loc"]) if part != ""]
            name = ".".join([(columns or {}).get(path[0], path[0]), *path[1:]])
            if first["type"] == "missing":
                fields = ", ".join(map(str, first["input"])) or "none"
                raise self.build_field_error(name, f"it is missing or empty; the fields there are {fields}") from error
            raise self.build_field_error(name, first["msg"].removeprefix("Value error, "), first["input"]) from error

    def has(self, name: str) -> bool:
        """Return whether the field exists and isn't empty."""
        return not is_empty(self.values.get(name))

    def get(self, *names: str) -> Any:
        """Return the field's value. Raises DataError if it is missing or empty."""
        for name in filter(self.has, names):
            return self.values[name]
        fields = ", ".join(map(str, self.values)) or "none"
        raise self.build_field_error(names[0], f"it is missing or empty; the row's fields are {fields}")

    def get_text(self, *names: str) -> str:
        """Return a text, or a number as text."""
        return self.convert(self.get(*names), Text, names[0])

    def get_text_or_empty(self, name: str) -> str:
        """Return a text that may be empty; the field must exist."""
        return "" if self.values.get(name) == "" else self.get_text(name)

    def get_number(self, *names: str) -> float:
        """Return a number, which may be written as text."""
        value = self.get_text(*names)
        try:
            return float(value)
        except ValueError:
            raise self.build_field_error(names[0], f"it should be a number, not {value!r:.60}", value) from None

    def get_option_letter(self, num_options: int, *names: str) -> str:
        """Return the letter of one of `num_options` options; it may be in brackets."""
        value = self.get_text(*names).strip().strip("().").upper()
        if len(value) != 1 or value not in OPTION_LETTERS[:num_options]:
            problem = f"it should be one of {OPTION_LETTERS[:num_options]}, not {self.get(*names)!r:.60}"
            raise self.build_field_error(names[0], problem, self.get(*names))
        return value

    def get_mapping(self, name: str) -> dict[str, Any]:
        """Return a mapping, which may be written as JSON."""
        return self.convert(self.get(name), JsonMapping, name)

    def get_list(self, name: str) -> list[Any]:
        """Return a list, which may be written as JSON; a single mapping or text becomes a list of one."""
        return self.convert(self.get(name), JsonList, name)

    def get_texts(self, *names: str) -> tuple[str, ...]:
        """Return the items of a list as texts; a single value isn't accepted."""
        value = self.get(*names)
        if not isinstance(value, list | tuple):
            raise self.build_field_error(names[0], f"it should be a list, not {value!r:.60}", value)
        return tuple(map(str, value))


def store_media_file(content: bytes, folder: Path) -> Path:
    """Store bytes in a file named after their SHA-256 and format, and return its path; equal bytes share a file."""
    suffix = ".mp4" if content[4:8] == b"ftyp" else ".bin"
    suffix = next((suffix for magic, suffix in _MAGIC_BYTES.items() if content.startswith(magic)), suffix)
    path = folder / f"{hashlib.sha256(content).hexdigest()[:32]}{suffix}"
    if not path.exists():
        folder.mkdir(exist_ok=True)
        with write_atomically(path) as partial:
            partial.write_bytes(content)
    return path


def read_rows(path: str | Path, readers: Mapping[str, Reader] | None = None) -> Iterator[SourceRow]:
    """Yield the rows of a file; `readers` add suffixes or replace readers. Raises DataError for an invalid file."""
    for row in iterate_rows_with_errors(path, readers=readers):
        if isinstance(row, DataError):
            raise row
        yield row


def iterate_rows_with_errors(
    path: str | Path, save_media: MediaSaver | None = None, readers: Mapping[str, Reader] | None = None
) -> Iterator[SourceRow | DataError]:
    """Like `read_rows`, but yield a DataError for an invalid row and continue with the next row."""
    file, all_readers = Path(path), {**_READERS, **(readers or {})}
    reader = all_readers.get(file.suffix.lower())
    if os.path.isdir(file):  # pathlib raises OSError for a name that is too long
        examples = sorted([*file.glob("*.jsonl"), *file.glob("*/*.jsonl")])
        raise DataError(f"{file} is a folder; name a file of rows, such as {[*examples, 'a.jsonl'][0]}", key=str(file))
    if reader is None:
        *others, last = all_readers
        raise DataError(f"{file}: the name of a file of rows must end in {', '.join(others)} or {last}", key=str(file))
    require_file(file)
    number = 0
    try:
        for number, values in enumerate(reader(file), start=1):
            if isinstance(values, DataError):
                yield values
            elif not isinstance(values, Mapping):
                problem = f"it should be a mapping of fields, not {values!r:.60}"
                yield DataError(f"{file}, row {number}: {problem}", key=str(file), value=values)
            else:
                yield SourceRow(file=file, number=number, values=values, save_media=save_media)
    except (UnicodeDecodeError, csv.Error, OSError) as error:
        raise DataError(f"{file}, after row {number}: the file can't be read: {error}", key=str(file)) from error
    if not number:
        raise DataError(f"{file}: the file has no rows", key=str(file))


def _iterate_jsonl(path: Path) -> Iterator[Any]:
    with open_file(path, "r", encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                yield json.loads(line)
            except (ValueError, RecursionError) as error:
                problem = f"not valid JSON; fix it or download the file again: {error}"
                yield DataError(f"{path}, line {number}: {problem}", key=str(path))


def iterate_json_list(path: Path) -> Iterator[Any]:
    """Yield the items of a JSON list, decoding them one by one while the file is read."""
    decoder = json.JSONDecoder()
    with open_file(path, "r", encoding="utf-8-sig") as file:
        text, position = file.read(CHUNK_CHARS).lstrip(), 1
        if not text.startswith("["):
            problem = "a .json file should hold a list of rows; one row per line is .jsonl"
            raise DataError(f"{path}: {problem}", key=str(path))
        number = 1
        while True:
            while position < len(text) and text[position] in " \t\r\n,":
                position += 1
            if text.startswith("]", position):
                return
            try:
                value, position = decoder.raw_decode(text, position)
            except (ValueError, RecursionError) as error:  # the item may continue in the part that isn't read yet
                text, position = text[position:], 0
                # twice the text each time, so that a long item is decoded only a few times
                more = file.read(max(CHUNK_CHARS, len(text))) if len(text) < MAX_ITEM_CHARS else ""
                if not more:
                    raise DataError(f"{path}, row {number}: not valid JSON: {error}", key=str(path)) from error
                text += more
            else:
                yield value
                number += 1


def _iterate_table(path: Path) -> Iterator[Any]:
    csv.field_size_limit(MAX_FIELD_BYTES)
    with open_file(path, "r", encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ",")
        for values in reader:
            if None in values:
                yield DataError(f"{path}, line {reader.line_num}: it has more cells than the header", key=str(path))
            else:
                yield values


_READERS: Mapping[str, Reader] = {
    **{".jsonl": _iterate_jsonl, ".ndjson": _iterate_jsonl, ".json": iterate_json_list},
    **{".csv": _iterate_table, ".tsv": _iterate_table, ".parquet": parquet.iterate_parquet},
}
