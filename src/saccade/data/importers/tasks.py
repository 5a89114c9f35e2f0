"""The native format, so that files of tasks or demonstrations can be joined, moved, or turned into Parquet and back."""

from collections.abc import Iterator

from saccade.data import native
from saccade.data.raw import Row
from saccade.data.rows import problem_of
from saccade.types import Demo, Task


def tasks(row: Row) -> Iterator[Task | Demo]:
    """What the row says, as it says it."""
    item = native.of_row(row, Demo) if "replies" in row.values else native.of_row(row, Task)
    problem = problem_of(item.task if isinstance(item, Demo) else item)
    if problem is not None:
        raise row.wrong("gold", problem)
    yield item
