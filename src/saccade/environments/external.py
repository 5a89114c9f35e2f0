"""Other systems' published prompt formats, for evaluation and `saccade ask`.

`prompt_format` names a prompt file (`direct`, `reasoning`, `agentic_general`, `agentic_minimal`, `agentic_videozoomer`,
`agentic_sage`, `agentic_longvt`), or is the path of your own; see docs/prompt-formats. No reward reads these formats,
so they can't be trained on.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from saccade.config.schema import IntRange, NonNegativeInt, PositiveInt, Section
from saccade.environments.prompt import build_prompt, find_first_video, format_question
from saccade.environments.prompt_format import (
    PromptFormatName,
    fill_question_template,
    format_tool_result,
    load_prompt_format,
    parse_reply,
    without_tools,
)
from saccade.environments.tool_environment import ToolEnvironment, ToolSettings
from saccade.ledger import ImageRef
from saccade.protocols import Context
from saccade.tools.base import Tools
from saccade.types import FinishReason, Message, Reply, Task, ToolResult


class ExternalSettings(Section):
    """Settings of `external`; tools, limits and the overview are the prompt format's own where they are null."""

    prompt_format: PromptFormatName = "agentic_general"  # packaged prompt format, or path of a .yaml file
    tools: Tools | None = None  # tools by name, each with its own settings; {} = the control without tools
    max_turns: NonNegativeInt | None = None  # tool turns
    max_calls: PositiveInt | None = None  # calls per turn
    num_frames: PositiveInt | None = None  # frames of all videos together, unless the task has a frame budget
    frame_pixels: IntRange | None = None  # minimum and maximum pixels per frame
    image_pixels: IntRange = (3136, 2000000)  # minimum and maximum pixels per image
    max_tool_result_tokens: PositiveInt = 2048  # longest text of a result, tokens; the rest is truncated
    max_context_tokens: PositiveInt = 65536  # longest conversation, tokens, replies included
    max_subtitle_tokens: NonNegativeInt = 2048  # maximum tokens of the subtitles beside the frames


class External(ToolEnvironment):
    """Write prompts and parse replies in the format that another system was trained with."""

    settings_type = ExternalSettings
    tags_as_tokens = True  # as in the templates that the systems were trained with

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        given = ExternalSettings.model_validate(settings)
        prompt_format, self.parse_text = load_prompt_format(given.prompt_format)
        tools = prompt_format.tools if given.tools is None else given.tools
        self.prompt_format = prompt_format if tools else without_tools(prompt_format)
        self.tool_result_role = self.prompt_format.tool_result_role
        shared = prompt_format.model_dump(include={*ToolSettings.model_fields})
        overrides = given.model_dump(exclude={"prompt_format"}, exclude_none=True)
        self.settings = ToolSettings(
            **{**shared, "system": self.prompt_format.system, **overrides, "force_think": False}
        )

    @property
    def tool_schemas(self) -> tuple[Mapping[str, Any], ...]:
        """See ToolEnvironment; here they are the prompt format's own."""
        return self.prompt_format.tool_schemas

    @property
    def tool_names(self) -> tuple[str, ...]:
        """See ToolEnvironment."""
        return self.prompt_format.tool_names or super().tool_names

    async def build_prompt(self, task: Task, ctx: Context) -> tuple[tuple[Message, ...], int]:
        """Return the messages of the prompt with the question in the format's template; and the number of frames."""
        (*system, user), num_frames = await build_prompt(
            task,
            ctx,
            self.settings,
            system=self.settings.system,
            timestamp_format=self.prompt_format.timestamp_format,
            tags_as_tokens=True,
        )
        video = find_first_video(task)
        clip = await ctx.media.probe(video.path) if video else None
        question = fill_question_template(self.prompt_format, format_question(task), video.path if video else "", clip)
        return (*system, replace(user, parts=(*user.parts[:-1], question))), num_frames

    def parse_reply(self, reply: Reply, finish_reason: FinishReason) -> Reply:
        """Read a reply by the format's parser."""
        return parse_reply(self.prompt_format, self.parse_text, reply, finish_reason)

    def format_result(self, result: ToolResult, first_image_index: int) -> tuple[str | ImageRef, ...]:
        """See ToolEnvironment."""
        return format_tool_result(self.prompt_format, result)


external = External
