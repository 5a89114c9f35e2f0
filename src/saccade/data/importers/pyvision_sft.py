"""Import SFT rows of PyVision-RL: `messages` with Python code and its output, `images` of the task and of figures."""

from collections.abc import Iterator

from saccade.data.conversations import Messages, build_demonstrations, collect_extras
from saccade.data.importers.pyvision_rl import EnvironmentNames, select_environment
from saccade.data.source_row import Images, RowModel, SourceRow, Text, Videos
from saccade.types import Demonstration


class _PyVisionSftRow(RowModel):
    messages: Messages
    images: Images = ()
    videos: Videos = ()
    env_name: Text | None = None


def pyvision_sft(
    row: SourceRow,
    *,
    wrap_answer: bool = True,
    rerun_code: bool = False,
    environments: EnvironmentNames = None,
) -> Iterator[Demonstration]:
    """Yield a demonstration per question of `messages`; `<image>` and `<video>` show the row's files in order.

    The user's text is the whole prompt: `system_prompt: row` of an environment shows it as it stands. A user's files
    belong to the task. Figures belong to the results that show them; with `rerun_code`, code runs when the
    demonstration is replayed. `environments` is as in `pyvision_rl`.
    """
    values = row.parse(_PyVisionSftRow)
    yield from build_demonstrations(
        row,
        values.messages,
        media=(*values.images, *values.videos),
        extras={"system": "", **collect_extras(row, "messages", "images", "videos")},
        wrap_answer=wrap_answer,
        field_name="messages",
        rerun_code=rerun_code,
        environment=select_environment(row, values.env_name, environments),
    )
