"""Parquet files, some rows at a time: the only user of pyarrow, which is an optional extra.

Whatever their size, files are read and written in batches; a batch is all that is ever held.
"""

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from saccade.errors import ConfigError, DataError, boundary

BATCH_ROWS = 256  # rows may hold pictures, so that few of them already fill some megabytes


def _pyarrow() -> Any:
    try:
        importlib.import_module("pyarrow.parquet")
        return importlib.import_module("pyarrow")
    except ImportError as error:
        raise ConfigError("reading Parquet needs pyarrow; install it with: pip install 'saccade[parquet]'") from error


def _opened(path: Path) -> Any:
    if not path.is_file():
        raise DataError(f"{path}: there is no such file")
    pyarrow = _pyarrow()
    with boundary(DataError, f"{path} can't be read as Parquet; download it again"):
        return pyarrow.parquet.ParquetFile(path, pre_buffer=False)


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


def rewrite(source: Path, target: Path, change: Callable[[Any], Any], *, start: int, rows: int) -> int:
    """Copy `rows` rows from row `start` (from 0) on, every text in them changed; how many there were.

    Columns without a text, and those in which `change` changes nothing, are copied as they are.
    """
    pyarrow = _pyarrow()
    done = 0
    with _opened(source) as file, pyarrow.parquet.ParquetWriter(target, file.schema_arrow) as writer:
        for batch in _window(file, start, rows):
            columns = [_changed(pyarrow, column, change) for column in batch.columns]
            writer.write_batch(pyarrow.RecordBatch.from_arrays(columns, schema=batch.schema))
            done += batch.num_rows
    return done


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


def _window(file: Any, start: int, rows: int) -> Iterator[Any]:
    """The batches of rows `start` to `start + rows`, without reading the row groups before them."""
    groups, before = [], 0
    for number in range(file.num_row_groups):
        size = file.metadata.row_group(number).num_rows
        if before + size > start and before < start + rows:
            groups.append((number, before))
        before += size
    if not groups:
        return
    at = groups[0][1]
    for batch in file.iter_batches(batch_size=BATCH_ROWS, row_groups=[number for number, _ in groups]):
        first, last = max(start - at, 0), min(start + rows - at, batch.num_rows)
        at += batch.num_rows
        if first < last:
            yield batch.slice(first, last - first)


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
