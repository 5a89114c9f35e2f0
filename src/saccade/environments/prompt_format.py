"""A prompt protocol: how a published system is spoken to (one prompt file), and how it speaks (one reader).

    agents/prompts/agentic_sage.yaml     what is said: system, question, results, the order to answer; tools and limits
    chat/syntaxes/sage.py                what is read: a pure function from a reply's text to its answer and calls

The file names its reader (`syntax`), so a system whose surface syntax is known already needs no code. Calls run through
Saccade's own tools: the reader puts them under our names.
"""

import functools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from saccade import plugins
from saccade.agents._prompt import Read, Voice
from saccade.config import parsed
from saccade.errors import ConfigError
from saccade.ledger import Picture
from saccade.media.picks import STAMP, stamp, timed
from saccade.protocols import Clip
from saccade.sections import Count, Section, Span, Whole, made
from saccade.tools._tool import Tools
from saccade.types import Block, BlockKind, Reply, Stop, ToolResult

PACKAGED = Path(__file__).parent / "prompts"


class Protocol(Section):
    """What a prompt file holds. `{question}`, `{video}`, `{clock}`, `{result}` and `{error}` are filled in.

    `syntax` names the reader, of chat/syntaxes or as a path from the prompt file's folder. `schemas` are announced by
    the model family's own template, beside `system` or (empty) what the family says by itself. `stamp` goes before a
    frame and may hold `seconds` and `number`. `tools` are ours that calls reach, `offered` their names to the model. A
    finished reply without calls and tags is an answer where `bare_answer` says so, as in the published loops. With the
    tools off `toolless_system` and `toolless_question` stand for `system` and `question`, where they are given.
    """

    syntax: str = "tool_call"
    system: str = ""
    schemas: tuple[dict[str, Any], ...] = ()
    question: str = "{question}"
    toolless_system: str | None = None
    toolless_question: str | None = None
    overview_frames: Count = 64
    overview_pixels: Span = (784, 50176)
    stamp: str = STAMP
    teller: Literal["tool", "user"] = "tool"  # in whose turn results come
    result: str = "{result}"
    failure: str = "Error: {error}"
    forced_answer: str = ""
    tools: Tools = Field(default_factory=dict)
    offered: tuple[str, ...] = ()
    bare_answer: bool = True
    max_turns: Whole = 0
    max_calls: Count = 1


def without_tools(protocol: Protocol) -> Protocol:
    """The protocol as it is spoken with the tools off: nothing that is said offers one."""
    words = {"system": protocol.toolless_system, "question": protocol.toolless_question, "schemas": ()}
    return protocol.model_copy(update={key: value for key, value in words.items() if value is not None})


def protocol_names() -> tuple[str, ...]:
    """The packaged protocols, sorted."""
    return tuple(sorted(path.stem for path in PACKAGED.glob("*.yaml")))


@functools.cache
def protocol_named(name: str) -> tuple[Protocol, Callable[..., Reply]]:
    """A packaged protocol by its name, or one of your own by its path (ending in .yaml); and its reader.

    Raises ConfigError for an unknown name, key or reader, and a stamp that can't be written.
    """
    own = name.endswith((".yaml", ".yml"))
    path = Path(name) if own else PACKAGED / f"{name}.yaml"
    if not (path.is_file() if own else name in protocol_names()):
        mend = plugins.nearest(name, protocol_names())
        raise ConfigError(f"there is no protocol {name!r}; {mend}, or the path of a .yaml file")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the protocol {path} can't be read: {error}") from error
    protocol = made(Protocol, parsed(text, f"the protocol {path}"), f"the protocol {path}")
    try:
        stamp(0.0, 0, protocol.stamp)
    except (ValueError, LookupError, AttributeError) as error:
        raise ConfigError(f"the protocol {path}: the stamp may hold {{seconds}} and {{number}} alone") from error
    syntax = str(path.parent / protocol.syntax) if protocol.syntax.endswith(".py") else protocol.syntax
    return protocol, plugins.load("chat.syntaxes", syntax)


def _known(name: str) -> str:
    protocol_named(name)
    return name


# In the signature of an agent: a protocol by name; what doesn't exist is refused before anything runs.
Named = Annotated[str, AfterValidator(_known)]


def asked(protocol: Protocol, question: str, path: str, clip: Clip | None) -> str:
    """The question as the protocol puts it, with the name of the video's file and its length as hh:mm:ss."""
    whole = int(clip.duration) if clip else 0
    clock = f"{whole // 3600:02}:{whole // 60 % 60:02}:{whole % 60:02}"
    said = protocol.question.replace("{video}", Path(path).name).replace("{clock}", clock)
    return said.replace("{question}", question)  # last, so that nothing in it is filled in


def reading(protocol: Protocol, read: Callable[..., Reply]) -> Read:
    """How a reply is read: by the reader, then, where the protocol has bare answers, as one."""

    def meant(reply: Reply, stop: Stop) -> Reply:
        found = read(reply.text, len(reply.forced))
        bare = "".join(block.body for block in found.of(BlockKind.TEXT)).strip()
        tagged = found.calls or found.of(BlockKind.ANSWER)
        if not protocol.bare_answer or stop is not Stop.STOP or tagged or not bare:
            return found
        return replace(found, blocks=(*found.blocks, Block(kind=BlockKind.ANSWER, body=bare, closed=True)))

    return meant


def telling(protocol: Protocol) -> Voice:
    """How a result is put: its text and frames, or its error, where the protocol's words have room for them."""

    def put(result: ToolResult, number: int) -> tuple[str | Picture, ...]:
        shown = timed(result.pictures, protocol.stamp)
        if result.error is None:
            before, _, after = protocol.result.partition("{result}")
            return before + result.text, *shown, after
        return result.text + protocol.failure.replace("{error}", result.error), *shown

    return put


def announced(protocol: Protocol) -> tuple[str, ...]:
    """The schemas of its tools as JSON, for the system turn."""
    return tuple(json.dumps(schema, ensure_ascii=False) for schema in protocol.schemas)
