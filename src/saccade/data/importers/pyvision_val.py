"""Import validation rows of PyVision-RL: `question`, `answer`, and `image_path` or `video_path`."""

from collections.abc import Iterator
from typing import Any

from saccade.data.conversations import collect_extras
from saccade.data.importers.pyvision_rl import find_declared_type
from saccade.data.source_row import Images, RowModel, SourceRow, Text, Videos
from saccade.data.task_builder import build_task
from saccade.types import Task


class _PyVisionValRow(RowModel):
    question: Text
    answer: Any
    image_path: Images = ()
    video_path: Videos = ()
    data_source: Text = ""
    ability: Text = ""


def pyvision_val(row: SourceRow) -> Iterator[Task]:
    """Yield one task: CHOICE if its answer is one of the question's options, else the type that its origin implies."""
    values = row.parse(_PyVisionValRow)
    media = values.image_path + values.video_path
    if not media:
        raise row.build_field_error("image_path", "neither image_path nor video_path names a file")
    yield build_task(
        row,
        values.question,
        values.answer,
        media,
        field_name="answer",
        declared_type=find_declared_type(values.data_source, values.ability),
        extras=collect_extras(row, "question", "answer", "image_path", "video_path"),
    )
