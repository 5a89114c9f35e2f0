"""Read and write Parquet files in batches; the only module that uses pyarrow, an optional extra.

Memory holds one batch at a time, also for files larger than memory.
"""

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from saccade.errors import ConfigError, DataError, convert_errors

BUFFER_BYTES = 2**20  # read from a column at a time
BATCH_ROWS = 256  # rows may hold images, so that a few of them take megabytes


def import_pyarrow() -> Any:
    """Return pyarrow. Raises ConfigError if it isn't installed."""
    try:
        importlib.import_module("pyarrow.parquet")
        return importlib.import_module("pyarrow")
    except ImportError as error:
        message = "Parquet needs pyarrow; install it with: pip install 'saccade[data]'"
        raise ConfigError(message, key="pyarrow") from error


def _open_parquet(path: Path) -> Any:
    pyarrow = import_pyarrow()
    with convert_errors(DataError, f"{path} can't be read as Parquet; download it again", key=str(path)):
        # with a buffer, columns are read as needed; without one, whole row groups are
        return pyarrow.parquet.ParquetFile(path, pre_buffer=False, buffer_size=BUFFER_BYTES)


def _iterate_batches(path: Path) -> Iterator[Any]:
    message = f"{path} can't be read as Parquet; download it again"
    with _open_parquet(path) as file, convert_errors(DataError, message, key=str(path)):
        yield from file.iter_batches(batch_size=BATCH_ROWS)


def iterate_parquet(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a Parquet file in order, as Python values. Raises DataError."""
    for batch in _iterate_batches(path):
        yield from batch.to_pylist()


def write_parquet(path: Path, columns: Mapping[str, str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows in groups, as they arrive; `columns` name their types as below.

    The file is incomplete until the call returns.
    """
    pyarrow = import_pyarrow()
    text = pyarrow.string()
    types = {
        "string": text,
        "list of strings": pyarrow.list_(text),
        "list of lists of strings": pyarrow.list_(pyarrow.list_(text)),
        "integer": pyarrow.int64(),
        "boolean": pyarrow.bool_(),
    }
    schema = pyarrow.schema([(name, types[kind]) for name, kind in columns.items()])
    buffered: list[Mapping[str, Any]] = []
    with pyarrow.parquet.ParquetWriter(path, schema) as writer:
        for row in rows:
            buffered.append(row)
            if len(buffered) >= BATCH_ROWS * 16:
                writer.write_table(pyarrow.Table.from_pylist(buffered, schema=schema))
                buffered.clear()
        writer.write_table(pyarrow.Table.from_pylist(buffered, schema=schema))


def rewrite_parquet(source: Path, target: Path, transform: Callable[[Any], Any]) -> int:
    """Copy a file with `transform` applied to the values of columns with strings; return the number of rows."""
    pyarrow = import_pyarrow()
    with _open_parquet(source) as file:
        schema, num_rows = file.schema_arrow, int(file.metadata.num_rows)
    with pyarrow.parquet.ParquetWriter(target, schema) as writer:
        for batch in _iterate_batches(source):
            columns = [_transform_column(pyarrow, column, transform) for column in batch.columns]
            writer.write_batch(pyarrow.RecordBatch.from_arrays(columns, schema=batch.schema))
    return num_rows


def _transform_column(pyarrow: Any, column: Any, transform: Callable[[Any], Any]) -> Any:
    if "string" not in str(column.type):  # such as list<item: string>
        return column
    old = column.to_pylist()
    new = [transform(value) for value in old]
    return column if new == old else pyarrow.array(new, type=column.type)
