"""Import RL rows of ParaVT-Parquet: `prompt` with `<video>` placeholders, `videos`, `extra_info` as JSON."""

from collections.abc import Iterator
from typing import Any

from pydantic import AliasChoices, Field

from saccade.data.conversations import Messages, add_system_prompt
from saccade.data.source_row import Images, RowModel, SourceRow, Text, Videos
from saccade.data.task_builder import build_task
from saccade.types import Task


class _ParaVtRlExtraInfo(RowModel):
    answer: Any
    question_type: Text = "oe"  # mcq, tvg, or open
    options: tuple[Text, ...] = Field(default=(), validation_alias=AliasChoices("options", "choices"))


class _ParaVtRlRow(RowModel):
    prompt: Messages
    extra_info: _ParaVtRlExtraInfo
    videos: Videos = ()
    images: Images = ()


def paravt_rl(row: SourceRow) -> Iterator[Task]:
    """Yield one task; `extra_info` holds its `answer` and its `question_type` (mcq, tvg, or open by default)."""
    values = row.parse(_ParaVtRlRow)
    user_messages = [message for message in values.prompt if message.role == "user"]
    media = sum((message.media for message in user_messages), ())
    for name, kind, files in (("videos", "video", values.videos), ("images", "image", values.images)):
        placeholders = sum(message.text.count(f"<{kind}>") for message in user_messages)
        if placeholders not in (0, len(files)):
            problem = f"it has {len(files)} files for {placeholders} <{kind}> placeholders in the prompt"
            raise row.build_field_error(name, problem, value=len(files))
        media += files
    if not media:
        raise row.build_field_error("videos", "the row names no media file")
    question = "\n".join(message.question for message in user_messages if message.question)
    if not question:
        raise row.build_field_error("prompt", "its question has no text")
    info, extras = values.extra_info, row.get_mapping("extra_info")
    for name in ("question", "answer", "options", "choices"):
        extras.pop(name, None)
    yield build_task(
        row,
        question,
        info.answer,
        media,
        field_name="extra_info.answer",
        declared_type=info.question_type,
        option_texts=info.options,
        extras=add_system_prompt(extras, values.prompt),
    )
