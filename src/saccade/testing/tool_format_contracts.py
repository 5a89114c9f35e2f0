"""Check the contract of a tool format."""

import json
from collections.abc import Callable

from saccade.types import Reply

TAGS = ("<think>", "</think>", "<answer>", "</answer>", "<tool_call>", "</tool_call>", "<json>", "</json>", "```json")
CALL_TEXTS = ("{}", "[1]", '{"name": "crop_video"', '{"a": NaN}', "crop_video(1, 2)", "start=1 end=2", "{" * 999)


def check_tool_format(parse_reply: Callable[..., Reply]) -> None:
    """Check that any text parses to a reply with the whole text, whose calls have plain JSON arguments or an error."""
    for opening in ("", *TAGS):
        for body in ("", "B", "\ud800", *CALL_TEXTS):
            for closing in ("", *TAGS):
                _check_text(parse_reply, f"{opening}{body}{closing}", len(opening))


def _check_text(parse_reply: Callable[..., Reply], text: str, prefill_length: int) -> None:
    reply = parse_reply(text, prefill_length)
    assert (reply.text, reply.prefill) == (text, text[:prefill_length]), f"{text!r} was parsed as {reply.text!r}"
    assert reply == parse_reply(text, prefill_length), f"{text!r} was parsed in two ways"
    for call in reply.calls:
        assert call.error or call.name, f"a call in {text!r} has neither a name nor an error"
        json.dumps(dict(call.arguments), allow_nan=False)
