"""Turn published conversations into demonstrations: messages with their media, tool calls and tool responses.

user ──> assistant (calls) ──> tool ──> assistant (answer) ──> user (another question) ──> ...
└──────────────── one demonstration ────────────────┘        └── the next one

A tool response becomes the reply of a sub-agent, call by call; the output of Python code is reproduced by running it.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, AliasChoices, BeforeValidator, Field, JsonValue, ValidationInfo, model_validator

from saccade.data.answer_normalization import build_task
from saccade.data.source_row import RowModel, SourceRow, Text, decode_json, list_values, parse_media
from saccade.rewards.answer_types.base import unwrap_answer
from saccade.types import Demonstration, Media, MediaKind

ROLE_ALIASES = {
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "bot", "model", "function_call"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function", "tool_response", "ipython"), "tool"),
    **dict.fromkeys(("system", "developer"), "system"),
}
MEDIA_PLACEHOLDER_PATTERN = re.compile(r"[ \t]*<(?:image|video)>[ \t]*\n?")
_TOOL_RESPONSE_PATTERN = re.compile(r"<tool_response>(.*?)</tool_response>", re.DOTALL)
_TOOL_OUTPUT_PATTERN = re.compile(r"\s*<(?:interpreter|tool_response)>")


def _parse_role(value: Any) -> str:
    role = ROLE_ALIASES.get(str(value).lower())
    if role is None:
        raise ValueError(f"its role should be one of {', '.join(ROLE_ALIASES)}")
    return role


def _parse_part(part: Any, info: ValidationInfo) -> str | Media:
    """Convert a part of a message's content to a text or a media file."""
    if part is None or isinstance(part, str):
        return part or ""
    if not isinstance(part, Mapping):
        raise ValueError("it should be a text or a mapping")
    kind = str(part.get("type") or "text").removeprefix("input_").removesuffix("_url")
    if kind == "text":
        return str(part.get("text") or "")
    if kind not in ("video", "image"):
        raise ValueError(f"a part of type {kind!r} is neither text nor image nor video")
    references = {key: reference for key, reference in part.items() if key != "type"}
    return parse_media(references, info, kind=MediaKind(kind))


_Part = Annotated[str | Media, BeforeValidator(_parse_part)]
_Parts = Annotated[
    tuple[_Part, ...], BeforeValidator(lambda parts: parts if isinstance(parts, list | tuple) else [parts])
]


class _ToolFunction(RowModel):
    name: Text
    arguments: Annotated[dict[str, JsonValue], BeforeValidator(decode_json)] = Field(default_factory=dict)


class _ToolCall(RowModel):
    function: _ToolFunction  # of an OpenAI message, or bare

    @model_validator(mode="before")
    @classmethod
    def _wrap_function(cls, value: Any) -> Any:
        return {"function": value} if isinstance(value, Mapping) and "function" not in value else value

    def format(self) -> str:
        # Parquet gives every call the union of all arguments; those of other calls are null.
        arguments = {key: value for key, value in self.function.arguments.items() if value is not None}
        call = json.dumps({"name": self.function.name, "arguments": arguments}, ensure_ascii=False)
        return f"\n<tool_call>\n{call}\n</tool_call>"


class SourceMessage(RowModel):
    """One message of a published conversation: OpenAI's (`role`, `content`) or ShareGPT's (`from`, `value`)."""

    declared_role: Annotated[str, BeforeValidator(_parse_role)] = Field(validation_alias=AliasChoices("role", "from"))
    content: _Parts = Field(default=(), validation_alias=AliasChoices("content", "value"))
    tool_calls: tuple[_ToolCall, ...] = ()

    @property
    def role(self) -> str:
        """One of system, user, assistant and tool; a user's message that begins with `<interpreter>` is a tool's."""
        is_output = self.declared_role == "user" and _TOOL_OUTPUT_PATTERN.match(self.text)
        return "tool" if is_output else self.declared_role

    @property
    def text(self) -> str:
        """The texts of the message and its tool calls."""
        return "".join(part for part in self.content if isinstance(part, str)) + "".join(
            call.format() for call in self.tool_calls
        )

    @property
    def question(self) -> str:
        """The text without the placeholders of the message's media."""
        return MEDIA_PLACEHOLDER_PATTERN.sub("", self.text).strip()

    @property
    def media(self) -> tuple[Media, ...]:
        """The media files that the message shows."""
        return tuple(part for part in self.content if isinstance(part, Media))


def _require_user(messages: list[SourceMessage]) -> list[SourceMessage]:
    if not any(message.role == "user" for message in messages):
        raise ValueError("it has no message of the user")
    return messages


Messages = Annotated[list[SourceMessage], BeforeValidator(list_values), AfterValidator(_require_user)]


def build_demonstrations(
    row: SourceRow,
    messages: Sequence[SourceMessage],
    *,
    media: tuple[Media, ...] = (),
    extras: Mapping[str, Any],
    wrap_answer: bool,
    field_name: str,
) -> Iterator[Demonstration]:
    """Yield a demonstration per question of a conversation; a later question includes the earlier exchanges.

    `media` and `extras` belong to the whole row. `wrap_answer` puts a last reply without answer tags into answer tags.
    Raises DataError if user, assistant and tools don't take turns.
    """
    extras = add_system_prompt(extras, messages)
    turns = [message for message in messages if message.role != "system"]
    starts = [index for index, message in enumerate(turns) if message.role == "user"]
    if starts[0] != 0:
        raise row.build_field_error(field_name, "it should begin with the user's question")
    history = ""
    for index, (start, end) in enumerate(zip(starts, [*starts[1:], len(turns)], strict=True)):
        media += turns[start].media
        question = history + turns[start].question
        try:
            if not question:
                raise ValueError("a question of it has no text")
            replies, children = _parse_turns(turns[start + 1 : end])
            replies, answer = _find_answer(replies, wrap_answer)
        except ValueError as error:
            raise row.build_field_error(field_name, str(error)) from None
        task_id = row.id if len(starts) == 1 else f"{row.id}.{index}"
        task = build_task(row, question, answer, media, field_name=field_name, extras=extras, id=task_id)
        yield Demonstration(task=task, frame_budget=None, replies=replies, children=children)
        history += f"Asked before: {turns[start].question}\nAnswered: {task.ground_truth}\n"


def _find_answer(replies: tuple[str, ...], wrap_answer: bool) -> tuple[tuple[str, ...], str]:
    """Return the replies, the last one with its answer in tags if it should be, and the answer."""
    if "<answer>" not in replies[-1] and re.search(r"<(?:tool_call|tool_code|code)>", replies[-1]):
        raise ValueError("its last reply calls a tool, but no tool response follows")
    if not any("<answer>" in reply for reply in replies) and wrap_answer:
        # thinking stays in front of the answer
        thinking, end_tag, answer = replies[-1].rpartition("</think>")
        replies = (*replies[:-1], f"{thinking}{end_tag}<answer>{answer.strip()}</answer>")
    tagged_answers = re.findall(r"<answer>(.*?)</answer>", replies[-1], re.DOTALL)
    answer = unwrap_answer(tagged_answers[-1] if tagged_answers else replies[-1])
    if not answer:
        raise ValueError("its last reply has no answer")
    return replies, answer


def _parse_turns(responses: Sequence[SourceMessage]) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """Return the replies to one question, and the tool responses after each reply but the last."""
    replies: list[str] = []
    tool_responses: list[list[str]] = []
    for message in responses:
        if message.role == "tool":
            if not replies:
                raise ValueError("a tool response comes before any tool call")
            tagged = [text.strip() for text in _TOOL_RESPONSE_PATTERN.findall(message.text)]
            tool_responses[-1] += tagged or [message.text.strip()]
        elif replies and not tool_responses[-1]:
            replies[-1] += message.text  # a reply that is split into two messages, such as a thought and its call
        else:
            replies.append(message.text)
            tool_responses.append([])
    if not replies or tool_responses[-1]:
        raise ValueError("it should end with the assistant's reply")
    if any(not reply.strip() for reply in replies):
        raise ValueError("a reply of the assistant is blank")
    # environments that prefill a reply end the tag with a line break
    normalized = tuple(re.sub(r"\A\s*<think>\s*", "<think>\n", reply) for reply in replies)
    children: list[tuple[str, ...]] = []
    for reply, texts in zip(replies[:-1], tool_responses[:-1], strict=True):
        num_calls = reply.count("<tool_call>") + reply.count("<tool_code>")
        if num_calls and len(texts) != num_calls:
            raise ValueError(f"a turn has {num_calls} calls and {len(texts)} tool responses")
        if num_calls and not all(texts):
            raise ValueError("a tool response has no text")
        children.append(tuple(texts) if num_calls else ())  # the output of Python code is reproduced by running it
    return normalized, tuple(children) if any(children) else ()


def add_system_prompt(extras: Mapping[str, Any], messages: Sequence[SourceMessage]) -> dict[str, Any]:
    """Return the extras with the system messages of a conversation, if it has any, as `system`."""
    system = "\n".join(message.text for message in messages if message.role == "system")
    return {**extras, **({"system": system} if system else {})}


def collect_extras(row: SourceRow, *used_fields: str) -> dict[str, Any]:
    """Return the row's other fields as JSON values, for `Task.extras`; bytes become their length."""
    rest = {name: value for name, value in row.values.items() if name not in used_fields and value is not None}
    return json.loads(
        json.dumps(rest, default=lambda value: f"{len(value)} bytes" if isinstance(value, bytes) else str(value))
    )
