"""The environment of tools: show an overview of the media, run the calls of each reply concurrently.

With `tools={"crop_video": {}}` sub-agents answer questions about windows of the video (ParaVT, arXiv 2605.20342);
`parallel_tool_calls=False` runs one call per turn, as the LongVT baseline does. With `tools={"zoom_image": {}}` the
model sees boxes of images itself. `tools={}` is the control without tools.
"""

from collections.abc import Mapping
from typing import Any

from saccade.environments.tool_environment import ToolEnvironment, ToolSettings
from saccade.tools.base import Tools

SYSTEM_PROMPT = (
    "You answer questions about a video or about pictures. Of a video you see a few frames, each after its time. Think "
    "first, inside <think></think>. To look closer, call tools, each call inside <tool_call></tool_call>; calls of one "
    "reply run at the same time. Give the final answer inside <answer></answer>."
)
FINAL_ANSWER_PROMPT = "No more calls are possible. Give your answer now, inside <answer></answer>."

DEFAULT_TOOLS: Mapping[str, Mapping[str, Any]] = {"crop_video": {}}


class ToolCallingSettings(ToolSettings):
    """Settings of `tool_calling`."""

    tools: Tools = DEFAULT_TOOLS  # tools by name, each with its own settings
    parallel_tool_calls: bool = True  # false = one call per turn: further ones are refused, whatever max_calls_per_turn
    show_tool_schemas: bool = True  # list the tools in the system turn
    system_prompt: str = SYSTEM_PROMPT  # system prompt; empty = none
    final_answer_prompt: str = FINAL_ANSWER_PROMPT  # user's message after the last tool turn; empty = none


class ToolCalling(ToolEnvironment):
    """Show an overview, then run the calls of each reply concurrently, at most `max_calls_per_turn` of them."""

    settings: ToolCallingSettings

    @property
    def tool_schemas(self) -> tuple[Mapping[str, Any], ...]:
        """See ToolEnvironment."""
        return super().tool_schemas if self.settings.show_tool_schemas else ()

    @property
    def max_calls_per_turn(self) -> int:
        """See ToolEnvironment."""
        return self.settings.max_calls_per_turn if self.settings.parallel_tool_calls else 1


tool_calling = ToolCalling
