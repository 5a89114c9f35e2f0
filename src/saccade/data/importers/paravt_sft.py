"""Import SFT rows of ParaVT-Parquet: OpenAI messages with media parts, tool calls and tool responses."""

from collections.abc import Iterator

from saccade.data.conversations import Messages, build_demonstrations, collect_extras
from saccade.data.source_row import RowModel, SourceRow
from saccade.types import Demonstration


class _ParaVtSftRow(RowModel):
    messages: Messages


def paravt_sft(row: SourceRow, *, wrap_answer: bool = True) -> Iterator[Demonstration]:
    """Yield a demonstration per question of `messages` (a list or JSON); tool responses become sub-agent replies.

    A response with images is the recorded result of its call; so is one that reports an error.
    """
    yield from build_demonstrations(
        row,
        row.parse(_ParaVtSftRow).messages,
        extras=collect_extras(row, "messages"),
        wrap_answer=wrap_answer,
        field_name="messages",
    )
