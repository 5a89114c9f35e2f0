"""The nouns: tasks, replies, turns, episodes, scores, samples. Frozen, keyword-only, standard library alone.

    Task ──agent──> Episode ──rewards──> Scored ──(its group)──> Group ──credit──> Sample ──pack──> Batch

A new stage is a new type: nothing here has a field that is empty until a later stage fills it.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import PurePath
from typing import Any

from saccade.ledger import Ledger, Picture


class MediaKind(StrEnum):
    """What a file holds."""

    VIDEO = "video"
    IMAGE = "image"


@dataclass(frozen=True, slots=True, kw_only=True)
class Media:
    """A file that a task is about, such as `Media(path="clips/0001.mp4")`."""

    path: str
    kind: MediaKind = MediaKind.VIDEO


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message, such as `Message(role="user", parts=("What is this?", frame))`: a part is a text or a picture."""

    role: str  # system | user | assistant | tool
    parts: tuple[str | Picture, ...]
    tags: bool = False  # whether `<think>` and its like are their tokens in its texts, as in replies; no mark ever is

    @property
    def text(self) -> str:
        """The text parts, joined."""
        return "".join(part for part in self.parts if isinstance(part, str))


class Kind(StrEnum):
    """How an answer is judged."""

    CHOICE = "choice"
    OPEN = "open"
    GROUNDING = "grounding"
    NUMBER = "number"
    MATH = "math"
    BOX = "box"
    POINT = "point"


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A question with its media, kind and gold answer.

    `gold` is a letter (choice), a text (open), a formula (math), a pair of seconds (grounding), a number, or the four
    sides of a box (box, point: see the reward `box`); `choices` are the option texts in order; `extras` holds whatever
    else a data set says, untouched.

    >>> Task(id="w-1", question="When is red shown?", media=(), kind=Kind.GROUNDING, gold=(3.0, 5.0)).digest[:12]
    'e7b33662fea1'
    """

    id: str
    question: str
    media: tuple[Media, ...]
    kind: Kind
    gold: str | float | tuple[float, ...]
    choices: tuple[str, ...] = ()
    extras: Mapping[str, Any] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """A stable digest for seeds, cache keys and resume marks, whatever folders and subtitles a machine has."""
        # Of a file's path only the name counts, so that a data set may move without changing a run.
        extras = {name: value for name, value in self.extras.items() if name != "subtitles"}
        media = [(PurePath(one.path).name, one.kind) for one in self.media]
        return digest_of({**asdict(self), "extras": extras, "media": media})


def digest_of(*identity: Any) -> str:
    """A stable digest of a full identity (JSON-like values); the same on every machine and in every process.

    >>> digest_of("run", 7) == digest_of("run", 7), digest_of("run", 7) == digest_of("run", 8)
    (True, False)
    """
    return hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode()).hexdigest()


def seed_of(*identity: Any) -> int:
    """A 63-bit seed from a full identity; never Python's `hash`, which differs from process to process."""
    return int(digest_of(*identity)[:16], 16) >> 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Demo:
    """A demonstration for SFT, as text: what to say in each turn, and what the sub-agents of each tool turn say.

    `replies` are whole, whatever part of them an agent forces, such as `("<think>Red.</think><answer>red</answer>",)`;
    `children[t]` are in turn t's order of calls. Practice has `main` false: its sub-agents, if any, are learned alone.
    """

    task: Task
    frames: int | None
    replies: tuple[str, ...]
    children: tuple[tuple[str, ...], ...] = ()
    main: bool = True


# ---- what the model says -------------------------------------------------------------------------------------------


class Form(StrEnum):
    """The surface form of a call: the trained one, the leaked pretrained one, or another system's."""

    TRAINED = "trained"
    LEAKED = "leaked"
    FOREIGN = "foreign"


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One tool call as the model wrote it, such as `Call(name="zoom", arguments={"x": 3}, form=Form.TRAINED)`.

    `error` says why a malformed one can't be run.
    """

    name: str
    arguments: Mapping[str, Any]
    form: Form
    error: str | None = None

    @property
    def ok(self) -> bool:
        """Whether the call could be parsed."""
        return self.error is None


class BlockKind(StrEnum):
    """What a stretch of a reply is."""

    THINK = "think"
    CALL = "call"
    ANSWER = "answer"
    TEXT = "text"
    STRAY = "stray"  # a structural tag that opens or closes nothing


# What gives a reply its structure, and what each tag holds.
TAGS = {"think": BlockKind.THINK, "answer": BlockKind.ANSWER}
TAGS |= dict.fromkeys(("tool_call", "tool_code", "code"), BlockKind.CALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A stretch of a reply, such as `Block(kind=BlockKind.ANSWER, body="red", closed=True)`: the body has no tags."""

    kind: BlockKind
    body: str
    closed: bool
    call: Call | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What the model said in one turn, as blocks in order; the forced prefix is included and counted.

    >>> think = Block(kind=BlockKind.THINK, body="It was red.", closed=True)
    >>> Reply(text="...", blocks=(think, Block(kind=BlockKind.ANSWER, body="red", closed=True))).answer
    'red'
    """

    text: str
    blocks: tuple[Block, ...] = ()
    forced: str = ""  # the prefix of `text` that the model was made to say

    def of(self, kind: BlockKind) -> tuple[Block, ...]:
        """The blocks of one kind, in order."""
        return tuple(block for block in self.blocks if block.kind is kind)

    @property
    def calls(self) -> tuple[Call, ...]:
        """Every call, malformed ones included, in order."""
        return tuple(block.call for block in self.blocks if block.call is not None)

    @property
    def answer(self) -> str | None:
        """The body of the last closed, non-blank answer, or None."""
        closed = [block.body for block in self.of(BlockKind.ANSWER) if block.closed and block.body.strip()]
        return closed[-1].strip() if closed else None


class Stop(StrEnum):
    """Why the engine stopped sampling."""

    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How to sample, such as `Sampling(temperature=0.7, seed=1)`; 0 is greedy, with the logprobs of temperature 1."""

    temperature: float = 1.0
    max_tokens: int = 256
    seed: int = 0
    stop_ids: tuple[int, ...] = ()
    forbidden_ids: tuple[int, ...] = ()  # vision placeholders: never sampled, masked in the trainer alike


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What an engine sampled: `Completion(tokens=(5, 7), logprobs=(-0.1, -2.0), version=0, stop=Stop.STOP)`."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    version: int | None  # None, with no logprobs, where the engine gave text, which the tokens spell
    stop: Stop
    seconds: float = 0.0
    versions: tuple[int, ...] = ()  # one per token where new weights came in between; else all are `version`


# ---- what happened -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """What came back from one call: text, pictures, or an error the model can read; never an exception.

    `executed` says that the tool really ran to its end, by the host's own record. `ToolResult(error="no such file").ok`
    is False.
    """

    text: str = ""
    pictures: tuple[Picture, ...] = ()
    error: str | None = None
    executed: bool = False
    child: int | None = None  # index into the episode's children, where a sub-agent answered
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether the tool ran and succeeded."""
        return self.executed and self.error is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One reply and what it caused: `results[i]` answers `reply.calls[i]`; empty when no call was run."""

    reply: Reply
    results: tuple[ToolResult, ...] = ()


class End(StrEnum):
    """Why an episode ended."""

    ANSWERED = "answered"
    NO_ANSWER = "no_answer"  # the model stopped without a call and without an answer
    MAX_TURNS = "max_turns"
    LENGTH = "length"
    CONTEXT_FULL = "context_full"
    TOOL_BROKEN = "tool_broken"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What an episode cost with its children, such as `Usage(prompt_tokens=120, sampled_tokens=30, seconds=0.4)`."""

    prompt_tokens: int = 0
    sampled_tokens: int = 0
    visual_tokens: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """One attempt at a task; `children` are the episodes of sub-agents.

    >>> task = Task(id="w", question="?", media=(), kind=Kind.OPEN, gold="red")
    >>> reply = Reply(text="", blocks=(Block(kind=BlockKind.ANSWER, body="red", closed=True),))
    >>> Episode(task=task, agent="direct", ledger=Ledger(), turns=(Turn(reply=reply),), end=End.ANSWERED).answer
    'red'
    """

    task: Task
    agent: str
    ledger: Ledger
    turns: tuple[Turn, ...]
    end: End
    children: tuple["Episode", ...] = ()
    usage: Usage = Usage()
    frames: int | None = None  # the frame budget K of its prompt
    error: str | None = None

    @property
    def answer(self) -> str | None:
        """The body of the last closed answer that the model itself sampled, or None."""
        answers = [turn.reply.answer for turn in self.turns if turn.reply.answer is not None]
        return answers[-1] if answers else None

    @property
    def results(self) -> tuple[ToolResult, ...]:
        """Every tool result, in order of turns and calls."""
        return tuple(result for turn in self.turns for result in turn.results)

    def walk(self) -> Iterator["Episode"]:
        """The episode and all below it, parents first."""
        yield self
        for child in self.children:
            yield from child.walk()


# ---- what it was worth ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """What rewards say: the value that is trained on, and its named parts (unweighted, but see `rewards._compose`).

    >>> Score(value=1.5, parts={"accuracy": 1.0, "format": 1.0}).parts["accuracy"]
    1.0
    """

    value: float
    parts: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ungraded:
    """Why there is no score, such as `Ungraded(reason="the judge didn't answer")`: not known is not 0."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """An episode with its score."""

    episode: Episode
    score: Score


@dataclass(frozen=True, slots=True, kw_only=True)
class Unscored:
    """An episode that could not be graded: the `index`-th attempt of its group; nothing is learned from it."""

    episode: Episode
    index: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The attempts at one task that are compared with each other, and those that could not be graded."""

    task: Task
    members: tuple[Scored, ...]
    ungraded: tuple[Unscored, ...] = ()

    @property
    def rewards(self) -> tuple[float, ...]:
        """The members' score values, in order."""
        return tuple(member.score.value for member in self.members)

    @property
    def solved(self) -> float:
        """The share of members whose accuracy is at least one half; 0.0 without members."""
        right = sum(member.score.parts.get("accuracy", 0.0) >= 0.5 for member in self.members)
        return right / (len(self.members) or 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A ledger to learn from: one advantage per expanded token, 0.0 wherever nothing was sampled.

    >>> ledger = Ledger().observe((1, 2)).act((3,), logprobs=(-0.5,), version=0)
    >>> Sample(ledger=ledger, advantages=(0.0, 0.0, 1.0)).advantages[-1]
    1.0
    """

    ledger: Ledger
    advantages: tuple[float, ...]

    def __post_init__(self) -> None:
        mask = self.ledger.mask()
        if len(mask) != len(self.advantages):
            raise ValueError(f"{len(self.advantages)} advantages for {len(mask)} tokens")
        if any(value and not sampled for value, sampled in zip(self.advantages, mask, strict=True)):
            raise ValueError("an advantage lies on a token that was not sampled")
