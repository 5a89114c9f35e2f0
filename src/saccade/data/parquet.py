"""Parquet files, some rows at a time: the only user of pyarrow, which is an optional extra.

Whatever their size, files are read and written in batches; a batch is all that is ever held.
"""

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from saccade.data.record import need_file
from saccade.errors import ConfigError, DataError, boundary

BUFFER = 2**20  # bytes of a column that are read at a time
BATCH_ROWS = 256  # rows may hold pictures, so that few of them already fill some megabytes


def _pyarrow() -> Any:
    try:
        importlib.import_module("pyarrow.parquet")
        return importlib.import_module("pyarrow")
    except ImportError as error:
        raise ConfigError("reading Parquet needs pyarrow; install it with: pip install 'saccade[parquet]'") from error


def _opened(path: Path) -> Any:
    need_file(path)
    pyarrow = _pyarrow()
    with boundary(DataError, f"{path} can't be read as Parquet; download it again"):
        # with a buffer columns are read as they are needed, else a whole row group is
        return pyarrow.parquet.ParquetFile(path, pre_buffer=False, buffer_size=BUFFER)


def iterate(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a Parquet file in order, as plain values. Raises DataError."""
    with _opened(path) as file, boundary(DataError, f"{path} can't be read as Parquet; download it again"):
        for batch in file.iter_batches(batch_size=BATCH_ROWS):
            yield from batch.to_pylist()


def count(path: Path) -> int:
    """How many rows a Parquet file holds; its end is all that is read."""
    with _opened(path) as file:
        return int(file.metadata.num_rows)


def write(path: Path, columns: Mapping[str, str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows whose `columns` are of the named types: "text", "texts", "list of texts", "whole", "yes or no".

    The rows are written in groups as they come; give a path that nobody reads yet.
    """
    pyarrow = _pyarrow()
    text = pyarrow.string()
    types = {
        "text": text,
        "texts": pyarrow.list_(text),
        "list of texts": pyarrow.list_(pyarrow.list_(text)),
        "whole": pyarrow.int64(),
        "yes or no": pyarrow.bool_(),
    }
    schema = pyarrow.schema([(name, types[kind]) for name, kind in columns.items()])
    held: list[Mapping[str, Any]] = []
    with pyarrow.parquet.ParquetWriter(path, schema) as writer:
        for row in rows:
            held.append(row)
            if len(held) >= BATCH_ROWS * 16:
                writer.write_table(pyarrow.Table.from_pylist(held, schema=schema))
                held.clear()
        writer.write_table(pyarrow.Table.from_pylist(held, schema=schema))


class Feed:
    """The rows of a Parquet file from row `start` (from 0) on, as many at a time as are asked for."""

    def __init__(self, path: Path, start: int = 0) -> None:
        with _opened(path) as file:
            self.schema = file.schema_arrow
        self.left = count(path) - start
        self._batches = _window(path, start)
        self._rest: Any = None

    def take(self, rows: int) -> Iterator[Any]:
        """The next rows as batches."""
        while rows and self.left:
            batch = next(self._batches) if self._rest is None else self._rest
            self._rest = batch.slice(rows) if batch.num_rows > rows else None
            batch = batch.slice(0, rows)
            rows, self.left = rows - batch.num_rows, self.left - batch.num_rows
            yield batch


def rewrite(feed: Feed, target: Path, change: Callable[[Any], Any], *, rows: int) -> int:
    """Write the next `rows` rows of a file with every text in them changed; how many there were.

    Columns without a text, and those in which `change` changes nothing, are copied as they are.
    """
    pyarrow = _pyarrow()
    before = feed.left
    with pyarrow.parquet.ParquetWriter(target, feed.schema) as writer:
        for batch in feed.take(rows):
            columns = [_changed(pyarrow, column, change) for column in batch.columns]
            writer.write_batch(pyarrow.RecordBatch.from_arrays(columns, schema=batch.schema))
    return before - feed.left


def join(parts: Sequence[Path], target: Path) -> None:
    """Write the rows of several files of one schema as one."""
    pyarrow = _pyarrow()
    with _opened(parts[0]) as first:
        schema = first.schema_arrow
    with pyarrow.parquet.ParquetWriter(target, schema) as writer:
        for part in parts:
            for batch in _batches(part):
                writer.write_batch(batch)


def _batches(path: Path) -> Iterator[Any]:
    with _opened(path) as file:
        yield from file.iter_batches(batch_size=BATCH_ROWS)


def _window(path: Path, start: int) -> Iterator[Any]:
    """The batches from row `start` on, without reading the row groups before it."""
    with _opened(path) as file, boundary(DataError, f"{path} can't be read as Parquet; download it again"):
        first = 0
        while first < file.num_row_groups and start >= file.metadata.row_group(first).num_rows:
            start -= file.metadata.row_group(first).num_rows
            first += 1
        for batch in file.iter_batches(batch_size=BATCH_ROWS, row_groups=list(range(first, file.num_row_groups))):
            if start < batch.num_rows:
                yield batch.slice(start)
            start = max(0, start - batch.num_rows)


def _changed(pyarrow: Any, column: Any, change: Callable[[Any], Any]) -> Any:
    if not _has_text(pyarrow, column.type):
        return column
    old = column.to_pylist()
    new = [change(value) for value in old]
    return column if new == old else pyarrow.array(new, type=column.type)


def _has_text(pyarrow: Any, kind: Any) -> bool:
    if pyarrow.types.is_dictionary(kind):
        return _has_text(pyarrow, kind.value_type)
    if pyarrow.types.is_nested(kind):
        return any(_has_text(pyarrow, kind.field(number).type) for number in range(kind.num_fields))
    return bool(pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind))
