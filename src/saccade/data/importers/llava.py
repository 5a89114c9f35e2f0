"""Import LLaVA and ShareGPT rows: conversations about images and videos."""

from collections.abc import Iterator

from pydantic import AliasChoices, Field

from saccade.data.conversations import Messages, build_demonstrations, collect_extras
from saccade.data.source_row import Images, RowModel, SourceRow, Videos
from saccade.types import Demonstration


class _LlavaRow(RowModel):
    messages: Messages = Field(validation_alias=AliasChoices("conversations", "messages"))
    image: Images = ()
    images: Images = ()
    video: Videos = ()
    videos: Videos = ()


def llava(row: SourceRow, *, wrap_answer: bool = True, rerun_code: bool = False) -> Iterator[Demonstration]:
    """Yield a demonstration per question of `conversations` (or `messages`), with the row's images and videos.

    Messages of the role `observation`, and a user's that begin with `<interpreter>`, are tool responses. Placeholders
    show the row's files in order. With `rerun_code`, code runs when the demonstration is replayed; otherwise its output
    is the row's.
    """
    values, name = row.parse(_LlavaRow), "conversations" if row.has("conversations") else "messages"
    yield from build_demonstrations(
        row,
        values.messages,
        media=(*values.image, *values.images, *values.video, *values.videos),
        extras=collect_extras(row, name, "image", "images", "video", "videos"),
        wrap_answer=wrap_answer,
        field_name=name,
        rerun_code=rerun_code,
    )
