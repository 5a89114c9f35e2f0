"""Prompt formats: how a published system is prompted (one prompt file) and how its replies are parsed (one parser).

    environments/prompts/agentic_sage.yaml    templates: system, question, results, final answer; tools and limits
    chat/tool_formats/sage.py                 a pure function from a reply's text to its answer and calls

The file names its parser (`tool_format`), so a system with a known call syntax needs no code. Calls run through
Saccade's own tools: the parser maps them to our names.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from saccade import plugins
from saccade.config.load import parse_yaml
from saccade.config.schema import IntRange, NonNegativeInt, PositiveInt, Section, parse_section
from saccade.errors import ConfigError, boundary
from saccade.media.frame_sampling import TIMESTAMP_FORMAT, format_timestamp
from saccade.tools.base import Tools
from saccade.types import Reply

PROMPTS_DIR = Path(__file__).parent / "prompts"
KEY = "environment.settings.prompt_format"


class PromptFormat(Section):
    """A prompt file; `{question}`, `{video}`, `{clock}`, `{result}` and `{error}` are placeholders.

    `tool_format` names the parser, of chat/tool_formats or as a path relative to the prompt file. The model family's
    chat template lists `tool_schemas` beside `system`, or beside the family's own system prompt if that is empty.
    `timestamp_format` precedes a frame and may hold `seconds` and `number`. `tools` are Saccade's, which calls reach;
    `tool_names` are their names as the model knows them. With the tools off, `no_tools_system` and `no_tools_question`
    replace `system` and `question`, if they are given.
    """

    tool_format: str = "tool_call"
    system: str = ""
    tool_schemas: tuple[dict[str, Any], ...] = ()
    question: str = "{question}"
    no_tools_system: str | None = None
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
    max_turns: NonNegativeInt = 0
    max_calls: PositiveInt = 1


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
    with boundary(ConfigError, f"the prompt format {path} can't be read", key=str(path)):
        text = path.read_text(encoding="utf-8")
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


# The type of a setting: a prompt format by name; an unknown one is rejected before anything runs.
PromptFormatName = Annotated[str, AfterValidator(_validate_prompt_format)]
