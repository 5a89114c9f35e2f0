"""Implement the chat template that the Qwen-VL families share (ChatML turns, the Hermes tool block)."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from saccade.chat.families.base import ModelText, Piece, TemplateText
from saccade.chat.families.vision_geometry import VisionGeometry, load_vision_geometry
from saccade.errors import DataError
from saccade.ledger import ImageRef
from saccade.types import Message

_TOOLS_HEADER = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
_TOOLS_FOOTER = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    '<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n'
    "</tool_call>"
)
_GENERATION_PROMPT = TemplateText("<|im_start|>assistant\n")
_ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True, kw_only=True)
class QwenFamily:
    """A Qwen-VL family; `default_system_prompt` is used if there is no system message."""

    name: str
    default_system_prompt: str | None = None
    turn_end: str = "<|im_end|>"
    turn_separator: str = "\n"
    generation_prompt: TemplateText = _GENERATION_PROMPT
    image_token: str = "<|image_pad|>"
    video_token: str | None = "<|video_pad|>"
    stop_tokens: tuple[str, ...] = ("<|im_end|>", "<|endoftext|>")
    forbidden_tokens: tuple[str, ...] = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
    supports_prefix_sharing: bool = True

    def render_start(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[Piece]:
        """Render the system turn (given, default or none, with the tool block), then the other messages."""
        is_given = bool(messages) and messages[0].role == "system"
        system: list[Piece] = list(_render_parts(messages[0])) if is_given else []
        if not is_given and self.default_system_prompt is not None:
            system = [self.default_system_prompt]
        # The template renders an empty system message as a turn too, with the blank line before the tools.
        has_prompt = is_given or bool(system)
        if tools:
            # As the templates' `tojson` filter: default separators, non-ASCII characters unescaped.
            schemas = "".join("\n" + json.dumps(dict(tool), ensure_ascii=False) for tool in tools)
            gap = [TemplateText("\n\n")] if has_prompt else []
            system += [*gap, TemplateText(_TOOLS_HEADER), schemas, TemplateText(_TOOLS_FOOTER)]
        opening = _render_turn("system", system) if has_prompt or tools else []
        return [*opening, *self.render_turns(messages[1:] if is_given else messages)]

    def render_turns(self, messages: Sequence[Message]) -> list[Piece]:
        """Render each message as a closed turn; adjacent tool results share one user turn, in order."""
        pieces: list[Piece] = []
        for is_tool, group in groupby(messages, key=lambda message: message.role == "tool"):
            if is_tool:
                pieces += _render_turn("user", _render_tool_results(group))
                continue
            for message in group:
                pieces += _render_turn(message.role, _render_parts(message))
        return pieces

    def load_vision_geometry(self, folder: str) -> VisionGeometry:
        """Load the geometry of the checkpoint's vision tower."""
        return load_vision_geometry(folder)


def _render_turn(role: str, parts: Iterable[Piece]) -> list[Piece]:
    if role not in _ROLES:
        raise DataError(f"there is no role {role!r}; the roles are {', '.join(_ROLES)}", key="role", value=role)
    return [TemplateText(f"<|im_start|>{role}\n"), *parts, TemplateText("<|im_end|>\n")]


def _render_parts(message: Message) -> Iterator[Piece]:
    for part in message.parts:
        if isinstance(part, ImageRef):
            yield from (TemplateText("<|vision_start|>"), part, TemplateText("<|vision_end|>"))
        else:
            yield ModelText(part) if message.role == "assistant" or message.tags_as_tokens else part


def _render_tool_results(messages: Iterable[Message]) -> Iterator[Piece]:
    for index, message in enumerate(messages):
        yield TemplateText("\n<tool_response>\n" if index else "<tool_response>\n")
        yield from _render_parts(message)
        yield TemplateText("\n</tool_response>")
