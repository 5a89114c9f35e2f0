"""Other systems' published prompt formats, for evaluation and `saccade ask`.

`prompt_format` names a prompt file (`direct`, `reasoning`, `agentic_general`, `agentic_minimal`, `agentic_videozoomer`,
`agentic_sage`, `agentic_longvt`), or is the path of your own; see docs/prompt-formats. No reward reads these formats,
so they can't be trained on.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from saccade.config.schema import IntRange, NonNegativeInt, PositiveInt, Section
from saccade.environments.prompt import build_prompt, find_first_video, format_question
from saccade.environments.prompt_format import PromptFormatName, load_prompt_format
from saccade.environments.tool_environment import ToolEnvironment, ToolSettings
from saccade.ledger import ImageRef
from saccade.media.frame_sampling import interleave_timestamps
from saccade.protocols import Context
from saccade.tools.base import Tools
from saccade.types import Block, BlockKind, FinishReason, Message, Reply, Task, ToolResult


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
        if not tools:  # a control, in which no text offers a tool
            texts = {"system": prompt_format.no_tools_system, "question": prompt_format.no_tools_question}
            update = {key: text for key, text in texts.items() if text is not None}
            prompt_format = prompt_format.model_copy(update={**update, "tool_schemas": ()})
        self.prompt_format, self.tool_result_role = prompt_format, prompt_format.tool_result_role
        shared = prompt_format.model_dump(include={*ToolSettings.model_fields})
        overrides = given.model_dump(exclude={"prompt_format"}, exclude_none=True)
        self.settings = ToolSettings(**{**shared, **overrides, "force_think": False})

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
        seconds = int((await ctx.media.probe(video.path)).duration) if video else 0
        clock = f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"
        template = self.prompt_format.question.replace("{video}", Path(video.path).name if video else "")
        # The question comes last: braces in it are no placeholders.
        question = template.replace("{clock}", clock).replace("{question}", format_question(task))
        return (*system, replace(user, parts=(*user.parts[:-1], question))), num_frames

    def parse_reply(self, reply: Reply, finish_reason: FinishReason) -> Reply:
        """Parse a reply's text; text without tags that ended by itself is an answer, if the format accepts those."""
        parsed = self.parse_text(reply.text, len(reply.prefill))
        untagged = "".join(block.body for block in parsed.find_blocks(BlockKind.TEXT)).strip()
        has_tags = parsed.calls or parsed.find_blocks(BlockKind.ANSWER)
        has_ended = finish_reason is FinishReason.STOP
        if not self.prompt_format.accept_untagged_answer or not has_ended or has_tags or not untagged:
            return parsed
        return replace(parsed, blocks=(*parsed.blocks, Block(kind=BlockKind.ANSWER, body=untagged, is_closed=True)))

    def format_result(self, result: ToolResult, first_image_index: int) -> tuple[str | ImageRef, ...]:
        """See ToolEnvironment."""
        frames = interleave_timestamps(result.images, self.prompt_format.timestamp_format)
        if result.error is None:
            before, _, after = self.prompt_format.result_template.partition("{result}")
            return before + result.text, *frames, after
        return result.text + self.prompt_format.error_template.replace("{error}", result.error), *frames


external = External
