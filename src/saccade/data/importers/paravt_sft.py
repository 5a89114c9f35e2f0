"""ParaVT-Parquet, rows for SFT: OpenAI's messages with media parts, tool calls and tool responses."""

from collections.abc import Iterator
from dataclasses import replace

from saccade.data.raw import Row
from saccade.data.talks import demos, extras_of, messages
from saccade.types import Demo


def paravt_sft(row: Row, *, wrap: bool = True) -> Iterator[Demo]:
    """A demonstration per question of `messages` (a list, or JSON): tool responses are what the sub-agents say.

    Pictures in a tool's response are left out: the tool shows its own when the demonstration is rehearsed.
    """
    talk = messages(row, "messages")
    rest = extras_of(row, "messages")
    for demo in demos(row, talk, media=(), wrap=wrap, where="messages"):
        yield replace(demo, task=replace(demo.task, extras={**rest, **demo.task.extras}))
