"""The scaffold that the Qwen-VL families share (ChatML turns, the hermes block of tools)."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from saccade.chat.families._family import Piece, Scaffold, Spoken
from saccade.chat.families._vision import Vision, read_vision
from saccade.errors import DataError
from saccade.ledger import Picture
from saccade.types import Message

_TOOLS_BEFORE = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
_TOOLS_AFTER = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    '<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n'
    "</tool_call>"
)
_REPLY = Scaffold("<|im_start|>assistant\n")
_ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True, kw_only=True)
class QwenFamily:
    """A Qwen-VL family; `default_system` is what its template says where no system message is given."""

    name: str
    default_system: str | None = None
    turn_end: str = "<|im_end|>"
    turn_gap: str = "\n"
    reply: Scaffold = _REPLY
    placeholder: str = "<|image_pad|>"
    stops: tuple[str, ...] = ("<|im_end|>", "<|endoftext|>")
    forbidden: tuple[str, ...] = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")

    def start(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[Piece]:
        """The system turn (given, default or none, with the block of tools), then the other messages."""
        given = bool(messages) and messages[0].role == "system"
        system: list[Piece] = list(_parts(messages[0])) if given else []
        if not given and self.default_system is not None:
            system = [self.default_system]
        # An empty system message still has its turn, and the blank line before the tools.
        spoken = given or bool(system)
        if tools:
            gap = [Scaffold("\n\n")] if spoken else []
            system = [*system, *gap, *_tools(tools)]
        opening = _turn("system", system) if spoken or tools else []
        return [*opening, *self.turns(messages[1:] if given else messages)]

    def turns(self, messages: Sequence[Message]) -> list[Piece]:
        """Each message as a closed turn; neighbouring tool results share one user turn, in order."""
        pieces: list[Piece] = []
        for is_tool, group in groupby(messages, key=lambda message: message.role == "tool"):
            if is_tool:
                pieces += _turn("user", _results(list(group)))
                continue
            for message in group:
                pieces += _turn(message.role, list(_parts(message)))
        return pieces

    def vision(self, folder: str) -> Vision:
        """The geometry of the checkpoint's vision tower."""
        return read_vision(folder)


def _turn(role: str, parts: list[Piece]) -> list[Piece]:
    if role not in _ROLES:
        raise DataError(f"no role is called {role!r}; the roles are {', '.join(_ROLES)}")
    return [Scaffold(f"<|im_start|>{role}\n"), *parts, Scaffold("<|im_end|>\n")]


def _parts(message: Message) -> Iterator[Piece]:
    for part in message.parts:
        if isinstance(part, Picture):
            yield from (Scaffold("<|vision_start|>"), part, Scaffold("<|vision_end|>"))
        else:
            yield Spoken(part) if message.role == "assistant" or message.tags else part


def _results(messages: list[Message]) -> list[Piece]:
    pieces: list[Piece] = []
    for index, message in enumerate(messages):
        lead = "\n" if index else ""
        pieces += [Scaffold(f"{lead}<tool_response>\n"), *_parts(message), Scaffold("\n</tool_response>")]
    return pieces


def _tools(tools: Sequence[Mapping[str, Any]]) -> list[Piece]:
    # As the templates' own filter writes JSON: default separators, other alphabets unescaped.
    lines = "".join("\n" + json.dumps(dict(tool), ensure_ascii=False) for tool in tools)
    return [Scaffold(_TOOLS_BEFORE), lines, Scaffold(_TOOLS_AFTER)]
