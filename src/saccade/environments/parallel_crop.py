"""The environment of tools: show an overview of the media, run the calls of each reply concurrently.

With `tools={"crop_video": {}}` sub-agents answer questions about windows of the video (ParaVT, arXiv 2605.20342);
`dispatch="sequential"` runs one call per turn, as the LongVT baseline does. With `tools={"zoom_image": {}}` the model
sees boxes of images itself. `tools={}` is the control without tools.
"""

from collections.abc import Mapping
from typing import Any, Literal

from saccade.environments.tool_environment import ToolEnvironment, ToolSettings
from saccade.tools.base import Tools

SYSTEM_PROMPT = (
    "You answer questions about a video or about pictures. Of a video you see a few frames, each after its time. Think "
    "first, inside <think></think>. To look closer, call tools, each call inside <tool_call></tool_call>; calls of one "
    "reply run at the same time. Give the final answer inside <answer></answer>."
)
FINAL_ANSWER_PROMPT = "No more calls are possible. Give your answer now, inside <answer></answer>."

DEFAULT_TOOLS: Mapping[str, Mapping[str, Any]] = {"crop_video": {}}


class ParallelCropSettings(ToolSettings):
    """Settings of `parallel_crop`."""

    tools: Tools = DEFAULT_TOOLS  # tools by name, each with its own settings
    dispatch: Literal["parallel", "sequential"] = "parallel"  # sequential = max_calls is 1: other calls are refused
    show_tool_schemas: bool = True  # list the tools in the system turn
    system: str = SYSTEM_PROMPT  # system prompt; empty = none
    final_answer_prompt: str = FINAL_ANSWER_PROMPT  # user's message after the last tool turn; empty = none


class ParallelCrop(ToolEnvironment):
    """Show an overview, then run the calls of each reply concurrently: `max_calls` per turn, `max_turns` tool turns."""

    settings: ParallelCropSettings

    @property
    def tool_schemas(self) -> tuple[Mapping[str, Any], ...]:
        """See ToolEnvironment."""
        return super().tool_schemas if self.settings.show_tool_schemas else ()

    @property
    def max_calls(self) -> int:
        """See ToolEnvironment."""
        return 1 if self.settings.dispatch == "sequential" else self.settings.max_calls


parallel_crop = ParallelCrop
