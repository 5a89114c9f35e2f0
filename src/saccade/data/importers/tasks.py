"""Import our own format, so that files of tasks or demonstrations can be merged, moved, or converted to Parquet."""

from collections.abc import Iterator

from saccade.data.dataset import get_task, parse_item, require_gradable
from saccade.data.source_row import SourceRow
from saccade.types import Demonstration, Task


def tasks(row: SourceRow) -> Iterator[Task | Demonstration]:
    """Yield the task or demonstration of a row unchanged."""
    item = parse_item(row, Demonstration) if "replies" in row.values else parse_item(row, Task)
    require_gradable(get_task(item), f"{row.file}, row {row.number}")
    yield item
