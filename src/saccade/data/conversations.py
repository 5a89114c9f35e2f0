"""Published conversations as demonstrations: who said what, with which files, and what the tools answered.

user ──> assistant (calls) ──> tool ──> assistant (answer) ──> user (another question) ──> ...
└──────────────── one demonstration ────────────────┘        └── the next one

A tool's answer counts as what a sub-agent said, call by call; what Python printed is found again by running the code.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from saccade.data.answers import bare, judged
from saccade.data.raw import Row
from saccade.types import Demo, Media, MediaKind, Task

ROLES = {
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "bot", "model", "function_call"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function", "tool_response", "ipython"), "tool"),
    **dict.fromkeys(("system", "developer"), "system"),
}
PLACEHOLDER = re.compile(r"[ \t]*<(?:image|video)>[ \t]*\n?")
_SHORT: Mapping[type, Any] = {bytes: lambda content: f"{len(content)} bytes"}  # a picture is no remark
_RESPONSE = re.compile(r"<tool_response>(.*?)</tool_response>", re.DOTALL)
_OUTPUT = re.compile(r"\s*<(?:interpreter|tool_response)>")


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """One message: `Said(role="user", text="Who is it?", media=(Media(path="a.mp4"),))`."""

    role: str  # system | user | assistant | tool
    text: str
    media: tuple[Media, ...] = ()


def messages(row: Row, name: str) -> list[Said]:
    """The messages of a field: OpenAI's (`role`, `content`, media parts, `tool_calls`) or ShareGPT's (`from`, `value`).

    Raises DataError, naming row and field, for anything else.
    """
    found = [_message(row, each, f"{name}.{place}") for place, each in enumerate(row.list(name))]
    if not any(said.role == "user" for said in found):
        raise row.wrong(name, "no message in it is the user's")
    return found


def _message(row: Row, value: Any, where: str) -> Said:
    message = row.as_mapping(value, where)
    role = ROLES.get(str(message.get("role") or message.get("from")).lower())
    if role is None:
        raise row.wrong(where, f"its role should be one of {', '.join(ROLES)}")
    content = message.get("content") if message.get("content") is not None else message.get("value")
    parts = content if isinstance(content, list | tuple) else [content]
    texts, media = [], []
    for place, part in enumerate(parts):
        if part is None:
            continue
        if isinstance(part, str):
            texts.append(part)
            continue
        place_of = f"{where}.content.{place}"
        kind = str(row.as_mapping(part, place_of).get("type") or "text").removeprefix("input_").removesuffix("_url")
        if kind == "text":
            texts.append(str(part.get("text") or ""))
        elif kind in ("video", "image"):
            names = {key: each for key, each in part.items() if key != "type"}
            media.append(row.medium(names, place_of, MediaKind(kind)))
        else:
            raise row.wrong(place_of, f"a part of type {kind!r} is neither text nor image nor video")
    text = "".join(texts) + _calls(row, message.get("tool_calls"), where)
    if role == "user" and _OUTPUT.match(text):
        role = "tool"
    return Said(role=role, text=text, media=tuple(media))


def _calls(row: Row, calls: Any, where: str) -> str:
    """Calls that stand beside a text as the text that they are for our models."""
    written = ""
    for place, call in enumerate(calls or ()):
        function = row.as_mapping(call, f"{where}.tool_calls.{place}").get("function", call)
        arguments = row.as_mapping(function, f"{where}.tool_calls.{place}.function").get("arguments")
        try:
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments or {}
        except ValueError as error:
            raise row.wrong(f"{where}.tool_calls.{place}", f"its arguments are not valid JSON: {error}") from error
        # Parquet gives every call the arguments of all calls, the others' being null.
        given = {key: value for key, value in dict(arguments).items() if value is not None}
        text = json.dumps({"name": function.get("name"), "arguments": given}, ensure_ascii=False)
        written += f"\n<tool_call>\n{text}\n</tool_call>"
    return written


def asked(said: Said) -> str:
    """A message's text without the placeholders of its media."""
    return PLACEHOLDER.sub("", said.text).strip()


def demos(row: Row, talk: Sequence[Said], *, media: Sequence[Media], wrap: bool, where: str) -> Iterator[Demo]:
    """A demonstration per question of a conversation; a later question says what was said before.

    `media` belong to the whole row. A last reply without answer tags is the answer as a whole where `wrap`. Raises
    DataError where questions, replies and tools don't take turns.
    """
    system = "\n".join(said.text for said in talk if said.role == "system")
    turns = [said for said in talk if said.role != "system"]
    starts = [place for place, said in enumerate(turns) if said.role == "user"]
    if starts[0] != 0:
        raise row.wrong(where, "it should begin with the user's question")
    before: list[str] = []
    shown = tuple(media)
    for number, (start, end) in enumerate(zip(starts, [*starts[1:], len(turns)], strict=True)):
        shown += turns[start].media
        own = asked(turns[start])
        question = "\n".join([*before, own]) if before else own
        one = _demo(row, question, turns[start + 1 : end], shown, wrap=wrap, where=where)
        before += [f"Asked before: {own}", f"Answered: {one.task.gold}"]
        extras = {**one.task.extras, **({"system": system} if system else {})}
        name = row.id if len(starts) == 1 else f"{row.id}.{number}"
        yield replace(one, task=replace(one.task, id=name, extras=extras))


def _demo(row: Row, question: str, rest: Sequence[Said], shown: tuple[Media, ...], *, wrap: bool, where: str) -> Demo:
    if not question:
        raise row.wrong(where, "a question of it has no words")
    replies, children = _turns(row, rest, where)
    if "<answer>" not in replies[-1] and re.search(r"<(?:tool_call|tool_code|code)>", replies[-1]):
        raise row.wrong(where, "its last reply calls a tool, and nothing answers")
    if not any("<answer>" in reply for reply in replies) and wrap:
        # what was thought and called before stays in front of the answer
        head, thought, last = replies[-1].rpartition("</think>")
        replies = (*replies[:-1], f"{head}{thought}<answer>{last.strip()}</answer>")
    tagged = re.findall(r"<answer>(.*?)</answer>", replies[-1], re.DOTALL)
    answer = bare(tagged[-1] if tagged else replies[-1])
    if not answer:
        raise row.wrong(where, "its last reply has no answer")
    found = judged(row, question, answer, where=where)
    task = Task(
        id=row.id, question=found.question, media=shown, kind=found.kind, gold=found.gold, choices=found.choices
    )
    return Demo(task=task, frames=None, replies=replies, children=children if any(children) else ())


def _turns(row: Row, rest: Sequence[Said], where: str) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """The replies to one question, and what the tools answered after each but the last."""
    replies: list[str] = []
    answers: list[list[str]] = []
    for said in rest:
        if said.role == "tool":
            if not replies:
                raise row.wrong(where, "a tool answers before anything was called")
            answers[-1] += [text.strip() for text in _RESPONSE.findall(said.text)] or [said.text.strip()]
        elif replies and not answers[-1]:
            replies[-1] += said.text  # a reply that was cut into two messages, such as a thought and its call
        else:
            replies.append(said.text)
            answers.append([])
    if not replies or answers[-1]:
        raise row.wrong(where, "it should end with the assistant's reply")
    if any(not reply.strip() for reply in replies):
        raise row.wrong(where, "a reply of the assistant is blank")
    # agents that begin a reply force its first tag with the line end behind it
    whole = tuple(re.sub(r"\A\s*<think>\s*", "<think>\n", reply) for reply in replies)
    return whole, tuple(_heard(row, *turn, where) for turn in zip(replies[:-1], answers[:-1], strict=True))


def _heard(row: Row, reply: str, answers: Sequence[str], where: str) -> tuple[str, ...]:
    calls = reply.count("<tool_call>") + reply.count("<tool_code>")
    if not calls:
        return ()  # Python, whose output is found by running it
    if len(answers) != calls:
        raise row.wrong(where, f"a turn has {calls} calls and {len(answers)} tool responses")
    if not all(answers):
        raise row.wrong(where, "a tool response has no text")
    return tuple(answers)


def extras_of(row: Row, *used: str) -> Mapping[str, Any]:
    """What else the row says, as far as JSON has words for it."""
    rest = {name: value for name, value in row.values.items() if name not in used and value is not None}
    return json.loads(json.dumps(rest, default=lambda value: _SHORT.get(type(value), str)(value)))
