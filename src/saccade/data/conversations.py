"""Turn published conversations into demonstrations: messages with their media, tool calls and tool responses.

user ──> assistant (calls) ──> tool ──> assistant (answer) ──> user (another question) ──> ...
└──────────────── one demonstration ────────────────┘        └── the next one

A tool response becomes the reply of a sub-agent, call by call; the output of Python code, a response with images and
one that reports an error become recorded results. An image belongs to the message that shows it: a user's belongs to
the task, a figure to the result.
"""

import builtins
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

from pydantic import AfterValidator, AliasChoices, BeforeValidator, Field, JsonValue, ValidationInfo, model_validator

from saccade.chat.parser import parse_reply
from saccade.data.source_row import RowModel, SourceRow, Text, decode_json, list_values, parse_media
from saccade.data.task_builder import build_task
from saccade.rewards.answer_types.base import unwrap_answer
from saccade.types import BlockKind, Demonstration, Media, MediaKind, RecordedResult

ROLE_ALIASES = {
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "bot", "model", "function_call"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function", "tool_response", "ipython"), "tool"),
    **dict.fromkeys(("system", "developer"), "system"),
}
# Blanks in front of a tag match only from their first one: else every blank of a long run would scan the rest of it.
_PART_KEYS = ("text", "video", "video_url", "image", "image_url")  # of parts without a type
MEDIA_PLACEHOLDER_PATTERN = re.compile(r"(?:(?<![ \t])[ \t]++)?<(?:image|video)>[ \t]*+\n?")
_TOOL_OUTPUT_PATTERN = re.compile(r"\s*<(?:interpreter|tool_response)>")
_PLACEHOLDER_PATTERNS = {kind: re.compile(f"<{kind.value}>") for kind in MediaKind}
# PyVision's names around an image, which its environment writes: <image_clue_0><image></image_clue_0>
_IMAGE_NAME_PATTERN = re.compile(r"<image_clue_\d+>\s*</image_clue_\d+>[ \t]*\n{0,2}")
_INTERPRETER_PATTERN = re.compile(r"(?:(?<!\s)\s++)?<interpreter>(.*?)(?:</interpreter>\s*+|\Z)", re.DOTALL)


_ERROR_RESPONSE_PATTERN = re.compile(r"\[Error\b:?+\s*+(.*)\]", re.DOTALL)  # a whole tool response, as ParaVT writes it


# How a recorded error begins: published prefixes and tracebacks in any line, a plain "Error:" in the first one, and the
# name of an exception, built-in or with its module, in the last one. What the code printed stands above it.
_EXCEPTION_NAMES = [
    name
    for name, value in vars(builtins).items()
    if isinstance(value, type) and issubclass(value, Exception) and not issubclass(value, Warning)
]
_ERROR_PATTERN = re.compile(
    r"\A[ \t]*+Error:"
    r"|^[ \t]*+(?:Execution error:|Tool error:|Traceback \(most recent call last\))"
    rf"|^[ \t]*+(?:{'|'.join(_EXCEPTION_NAMES)}|(?:\w+\.)+\w*(?:Error|Exception))(?::[^\n]*)?\Z",
    re.MULTILINE,
)


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
    declared = part.get("type") or next((key for key in _PART_KEYS if part.get(key) is not None), "text")
    kind = str(declared).removeprefix("input_").removesuffix("_url")
    if kind == "text":
        return str(part.get("text") or "")
    if kind not in ("video", "image"):
        raise ValueError(f"a part of type {kind!r} is neither text nor image nor video")
    references = {key: reference for key, reference in part.items() if key != "type"}
    if not any(references.values()):
        return f"<{kind}>"  # it stands for the next file of the row
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
        return _IMAGE_NAME_PATTERN.sub("", MEDIA_PLACEHOLDER_PATTERN.sub("", self.text)).strip()

    @property
    def media(self) -> tuple[Media, ...]:
        """The media files that the message shows."""
        return tuple(part for part in self.content if isinstance(part, Media))

    def count_placeholders(self, kind: MediaKind) -> int:
        """Return how many media files of the row the message shows, beside those that are parts of it."""
        if self.role not in ("user", "tool"):
            return 0
        num_parts = sum(media.kind is kind for media in self.media)
        return max(len(_PLACEHOLDER_PATTERNS[kind].findall(self.text)) - num_parts, 0)

    def parse_result(self) -> RecordedResult:
        """Return the result that a message of the interpreter shows, without the tags that the environment writes.

        Raises ValueError if it announces images and has none.
        """
        body = _INTERPRETER_PATTERN.sub(r"\1", self.question).strip("\n")
        output = body.removeprefix("Text Result:").strip("\n")
        text = output.removesuffix("Image Result:").rstrip()
        images = tuple(media for media in self.media if media.kind is MediaKind.IMAGE)
        if text != output.rstrip() and not images:
            raise ValueError("a tool response announces images, but none is there")
        error = _ERROR_PATTERN.search(text)
        if error is None:
            return RecordedResult(text=text, images=images)
        return RecordedResult(text=text[: error.start()].rstrip(), images=images, error=text[error.start() :].strip())


def distribute_media(
    messages: Sequence[SourceMessage], files: Sequence[Media]
) -> tuple[tuple[SourceMessage, ...], tuple[Media, ...]]:
    """Return the messages with the row's files that they show, and the files that no placeholder shows.

    The placeholders of a kind take the files of that kind in order. Raises ValueError if there are placeholders, and
    their number isn't that of the files: a figure would be shown in another message than its own.
    """
    shown: list[list[Media]] = [[] for _ in messages]
    kinds_without_placeholders = set()
    for kind in MediaKind:
        own = [file for file in files if file.kind is kind]
        counts = [message.count_placeholders(kind) for message in messages]
        if not any(counts):
            kinds_without_placeholders.add(kind)
        elif sum(counts) != len(own):
            raise ValueError(f"it has {len(own)} files for {sum(counts)} <{kind.value}> placeholders")
        queue = iter(own)
        for parts, count in zip(shown, counts, strict=True):
            parts += itertools.islice(queue, count)
    filled = [
        message.model_copy(update={"content": (*message.content, *parts)})
        for message, parts in zip(messages, shown, strict=True)
    ]
    return tuple(filled), tuple(file for file in files if file.kind in kinds_without_placeholders)


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
    rerun_code: bool = False,
    environment: str | None = None,
) -> Iterator[Demonstration]:
    """Yield a demonstration per question of a conversation; a later question includes the earlier exchanges.

    `media` and `extras` belong to the whole row; placeholders in messages show the media in order. `wrap_answer` puts a
    last reply without answer tags into answer tags; `rerun_code` drops the outputs of code, which then runs when the
    demonstration is replayed. Raises DataError if user, assistant and tools don't take turns.
    """
    extras = add_system_prompt(extras, messages)
    try:
        messages, media = distribute_media(messages, media)
    except ValueError as error:
        raise row.build_field_error(field_name, str(error)) from None
    turns = [*itertools.dropwhile(lambda message: message.role == "system", messages)]
    if any(message.role == "system" for message in turns):
        raise row.build_field_error(field_name, "a system message of it comes after the first question")
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
            replies, children, results = _parse_turns(turns[start + 1 : end])
            replies, answer = _find_answer(replies, wrap_answer)
        except ValueError as error:
            raise row.build_field_error(field_name, str(error)) from None
        task_id = row.id if len(starts) == 1 else f"{row.id}.{index}"
        task = build_task(
            row,
            question,
            answer,
            media,
            field_name=field_name,
            extras=extras,
            id=task_id,
            environment=environment,
        )
        has_results = any(results) and not rerun_code
        yield Demonstration(
            task=task, frame_budget=None, replies=replies, children=children, results=results if has_results else ()
        )
        history += f"Asked before: {turns[start].question}\nAnswered: {task.ground_truth}\n"


def _find_answer(replies: tuple[str, ...], wrap_answer: bool) -> tuple[tuple[str, ...], str]:
    """Return the replies, the last one with its answer in tags if it should be, and the answer."""
    parsed = [parse_reply(reply) for reply in replies]
    last = parsed[-1]
    if last.answer is None and last.calls:
        raise ValueError("its last reply calls a tool, but no tool response follows")
    for kind in (BlockKind.THINK, BlockKind.ANSWER):
        if last.answer is None and not all(block.is_closed for block in last.find_blocks(kind)):
            raise ValueError(f"its last reply has no answer, but <{kind.value}> without its end")
    if wrap_answer and not any(reply.find_blocks(BlockKind.ANSWER) for reply in parsed):
        # thinking stays in front of the answer
        thinking, end_tag, untagged = replies[-1].rpartition("</think>")
        replies = (*replies[:-1], f"{thinking}{end_tag}<answer>{untagged.strip()}</answer>")
        last = parse_reply(replies[-1])
    answer = unwrap_answer(last.answer or ("" if last.find_blocks(BlockKind.ANSWER) else replies[-1]))
    if not answer:
        raise ValueError("its last reply has no answer")
    return replies, answer


def find_bodies(tag: str, text: str) -> list[str]:
    """Return the texts between each `<tag>` and the next `</tag>`."""
    # An unclosed tag matches up to the end: else each of many unclosed tags would scan the rest of the text.
    matches = re.finditer(rf"<{tag}>(.*?)(?:(</{tag}>)|\Z)", text, re.DOTALL)
    return [match[1] for match in matches if match[2]]


class _Turns(NamedTuple):
    replies: tuple[str, ...]
    children: tuple[tuple[str, ...], ...]  # per reply but the last: the answers of its calls
    results: tuple[tuple[RecordedResult, ...], ...]  # per reply but the last: the output of its code


def _parse_turns(responses: Sequence[SourceMessage]) -> _Turns:
    """Return the replies to one question, and the tool responses after each reply but the last."""
    replies: list[str] = []
    tool_messages: list[list[SourceMessage]] = []
    for message in responses:
        if message.role == "tool":
            if not replies:
                raise ValueError("a tool response comes before any tool call")
            tool_messages[-1].append(message)
        elif replies and not tool_messages[-1]:
            replies[-1] += message.text  # a reply that is split into two messages, such as a thought and its call
        else:
            replies.append(message.text)
            tool_messages.append([])
    if not replies or tool_messages[-1]:
        raise ValueError("it should end with the assistant's reply")
    if any(not reply.strip() for reply in replies):
        raise ValueError("a reply of the assistant is blank")
    completed = tuple(map(_complete_thought, replies))
    children: list[tuple[str, ...]] = []
    results: list[tuple[RecordedResult, ...]] = []
    for reply, messages in zip(completed[:-1], tool_messages[:-1], strict=True):
        calls = parse_reply(reply).calls
        if not any(call.ok and call.name != "python" for call in calls):
            children.append(())
            results.append(tuple(message.parse_result() for message in messages))
            continue
        recorded = _parse_tool_responses(messages, len(calls))
        is_recorded = any(result.images or result.error is not None for result in recorded)
        children.append(() if is_recorded else tuple(result.text for result in recorded))
        results.append(recorded if is_recorded else ())
    return _Turns(completed, tuple(children) if any(children) else (), tuple(results))


def _complete_thought(reply: str) -> str:
    """Return a reply with `<think>` before a thought that has only an end: chat templates that open it leave it out."""
    tag = re.search(r"</?think>", reply)
    return f"<think>\n{reply}" if tag is not None and tag[0] == "</think>" else reply


def _parse_tool_responses(messages: Sequence[SourceMessage], num_calls: int) -> tuple[RecordedResult, ...]:
    """Return the tool responses that follow a reply, one per call."""
    results: list[RecordedResult] = []
    for message in messages:
        bodies = [text.strip() for text in find_bodies("tool_response", message.text)] or [message.text.strip()]
        if any(media.kind is not MediaKind.IMAGE for media in message.media):
            raise ValueError("a tool response shows a video, and a result of a call has images at most")
        if message.media and len(bodies) != 1:
            raise ValueError(f"a message of {len(bodies)} tool responses shows images, which may belong to any of them")
        for body in bodies:
            error = _ERROR_RESPONSE_PATTERN.fullmatch(body)
            text = {"text": body} if error is None else {"error": error[1].strip() or body}
            results.append(RecordedResult(**text, images=message.media))
    if len(results) != num_calls:
        raise ValueError(f"a turn has {num_calls} calls and {len(results)} tool responses")
    if not all(result.text or result.images or result.error for result in results):
        raise ValueError("a tool response has no text")
    return tuple(results)


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
