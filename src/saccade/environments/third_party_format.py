"""Other systems' published prompt formats, for evaluation and `saccade ask`.

    environments/prompts/agentic_sage.yaml    templates: system, question, results, final answer; tools and limits
    chat/tool_formats/sage.py                 a pure function from a reply's text to its answer and calls

`prompt_format` names a prompt file (`direct`, `reasoning`, `agentic_general`, `agentic_minimal`, `agentic_videozoomer`,
`agentic_sage`, `agentic_longvt`), or is the path of your own; see docs/prompt-formats. The file names its parser
(`tool_format`), so a system with a known call syntax needs no code. Calls run through Saccade's own tools: the parser
maps them to our names. No reward reads these formats, so they can't be trained on.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import AfterValidator, Field

from saccade import plugins
from saccade.config.load import parse_yaml
from saccade.config.schema import IntRange, NonNegativeInt, PositiveInt, Section, parse_section
from saccade.environments.prompt import build_prompt, find_first_video, format_question
from saccade.environments.tool_environment import ToolEnvironment, ToolSettings
from saccade.errors import ConfigError, convert_errors
from saccade.ledger import ImageRef
from saccade.media.frame_sampling import TIMESTAMP_FORMAT, format_timestamp, interleave_timestamps
from saccade.protocols import Context
from saccade.tools.base import Tools
from saccade.types import Block, BlockKind, FinishReason, Message, Reply, Task, ToolResult
from saccade.utils.files import read_text

PROMPTS_DIR = Path(__file__).parent / "prompts"
KEY = "environment.settings.prompt_format"


class PromptFormat(Section):
    """A prompt file; `{question}`, `{video}`, `{clock}`, `{result}` and `{error}` are placeholders.

    `tool_format` names the parser, of chat/tool_formats or as a path relative to the prompt file. The model family's
    chat template lists `tool_schemas` beside `system_prompt`, or beside the family's own if that is empty.
    `timestamp_format` precedes a frame and may hold `seconds` and `number`. `tools` are Saccade's, which calls reach;
    `tool_names` are their names in the prompt. With the tools off, `no_tools_system_prompt` and `no_tools_question`
    replace `system_prompt` and `question`, if they are given.
    """

    tool_format: str = "tool_call"
    system_prompt: str = ""
    tool_schemas: tuple[dict[str, Any], ...] = ()
    question: str = "{question}"
    no_tools_system_prompt: str | None = None
    no_tools_question: str | None = None
    num_frames: PositiveInt = 64
    frame_pixels: IntRange = (784, 50176)
    timestamp_format: str = TIMESTAMP_FORMAT
    tool_result_role: Literal["tool", "user"] = "tool"  # role of the messages that hold results
    result_template: str = "{result}"
    error_template: str = "Error: {error}"
    final_answer_prompt: str = ""
    tools: Tools = Field(default_factory=dict)
    tool_names: tuple[str, ...] = ()
    accept_untagged_answer: bool = True
    max_tool_turns: NonNegativeInt = 0
    max_calls_per_turn: PositiveInt = 1


def list_prompt_formats() -> tuple[str, ...]:
    """Return the names of the packaged prompt formats, sorted."""
    return tuple(sorted(path.stem for path in PROMPTS_DIR.glob("*.yaml")))


@functools.cache
def load_prompt_format(name: str) -> tuple[PromptFormat, Callable[..., Reply]]:
    """Load a packaged prompt format by name, or another by its path (ending in .yaml); and its parser.

    Raises ConfigError for an unknown name, key or parser, and for an invalid timestamp format.
    """
    is_path = name.endswith((".yaml", ".yml"))
    path = Path(name) if is_path else PROMPTS_DIR / f"{name}.yaml"
    if not (path.is_file() if is_path else name in list_prompt_formats()):
        suggestion = plugins.suggest(name, list_prompt_formats())
        raise ConfigError(
            f"there is no prompt format {name!r}; {suggestion}, or the path of a .yaml file", key=KEY, value=name
        )
    with convert_errors(ConfigError, f"the prompt format {path} can't be read", key=str(path)):
        text = read_text(path)
    source = f"the prompt format {path}"
    prompt_format = parse_section(PromptFormat, parse_yaml(text, source), source)
    try:
        format_timestamp(0.0, 0, prompt_format.timestamp_format)
    except (ValueError, LookupError, AttributeError) as error:
        template = prompt_format.timestamp_format
        raise ConfigError(
            f"{source}: timestamp_format={template!r} may hold {{seconds}} and {{number}} alone",
            key="timestamp_format",
            value=template,
        ) from error
    parser = prompt_format.tool_format
    parser = str(path.parent / parser) if parser.endswith(".py") else parser
    return prompt_format, plugins.load("chat.tool_formats", parser)


def _validate_prompt_format(name: str) -> str:
    load_prompt_format(name)
    return name


class ThirdPartyFormatSettings(Section):
    """Settings of `third_party_format`; null tools, limits and overview are the prompt format's own."""

    # packaged prompt format, or path of a .yaml file
    prompt_format: Annotated[str, AfterValidator(_validate_prompt_format)] = "agentic_general"
    tools: Tools | None = None  # tools by name, each with its own settings; {} = the control without tools
    max_tool_turns: NonNegativeInt | None = None  # turns whose calls are run
    max_calls_per_turn: PositiveInt | None = None  # calls per turn
    num_frames: PositiveInt | None = None  # frames of all videos together, unless the task has a frame budget
    frame_pixels: IntRange | None = None  # minimum and maximum pixels per frame
    image_pixels: IntRange = (3136, 2000000)  # minimum and maximum pixels per image
    max_tool_result_tokens: PositiveInt = 2048  # longest text of a result, tokens; the rest is truncated
    max_context_tokens: PositiveInt = 65536  # longest conversation, tokens, replies included
    max_subtitle_tokens: NonNegativeInt = 2048  # maximum tokens of the subtitles beside the frames


class ThirdPartyFormat(ToolEnvironment):
    """Write prompts and parse replies in the format that another system was trained with."""

    settings_type = ThirdPartyFormatSettings
    tags_as_tokens = True  # as in the templates that the systems were trained with

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        given = cast(ThirdPartyFormatSettings, self.settings)
        prompt_format, self.parse_text = load_prompt_format(given.prompt_format)
        tools = prompt_format.tools if given.tools is None else given.tools
        if not tools:  # a control, in which no text offers a tool
            texts = {"system_prompt": prompt_format.no_tools_system_prompt, "question": prompt_format.no_tools_question}
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

    async def build_prompt(self, task: Task, ctx: Context) -> tuple[Message, ...]:
        """Return the messages of the prompt with the question in the format's template."""
        *system, user = await build_prompt(
            task,
            ctx,
            self.settings,
            system_prompt=self.settings.system_prompt,
            timestamp_format=self.prompt_format.timestamp_format,
            tags_as_tokens=True,
        )
        video = find_first_video(task)
        seconds = int((await ctx.media.probe(video.path)).duration) if video else 0
        clock = f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"
        template = self.prompt_format.question.replace("{video}", Path(video.path).name if video else "")
        # The question comes last: braces in it are no placeholders.
        question = template.replace("{clock}", clock).replace("{question}", format_question(task))
        return *system, replace(user, parts=(*user.parts[:-1], question))

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


third_party_format = ThirdPartyFormat
