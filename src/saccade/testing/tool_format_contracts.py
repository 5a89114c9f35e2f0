"""The contract of a reader of calls: what it makes of all that models write."""

import json
from collections.abc import Callable

from saccade.types import Reply

MARKS = ("<think>", "</think>", "<answer>", "</answer>", "<tool_call>", "</tool_call>", "<json>", "</json>", "```json")
CALLS = ("{}", "[1]", '{"name": "crop_video"', '{"a": NaN}', "crop_video(1, 2)", "start=1 end=2", "{" * 999)


def check_syntax(read: Callable[..., Reply]) -> None:
    """Whatever a model writes is a reply with the whole text, and its calls are plain JSON or say what is wrong."""
    for opening in ("", *MARKS):
        for body in ("", "B", "\ud800", *CALLS):
            for closing in ("", *MARKS):
                _check_text(read, f"{opening}{body}{closing}", len(opening))


def _check_text(read: Callable[..., Reply], text: str, forced: int) -> None:
    reply = read(text, forced)
    assert (reply.text, reply.forced) == (text, text[:forced]), f"{text!r} was read as {reply.text!r}"
    assert reply == read(text, forced), f"{text!r} was read in two ways"
    for call in reply.calls:
        assert call.error or call.name, f"a call in {text!r} has neither a name nor an error"
        json.dumps(dict(call.arguments), allow_nan=False)
