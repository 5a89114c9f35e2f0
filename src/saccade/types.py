"""Define the data types: tasks, replies, turns, episodes, scores, samples. Frozen, keyword-only, standard library only.

    Task ─environment─> Episode ─rewards─> ScoredEpisode ─> Group ─advantages─> TrainingSample ─pack─> Batch

Each stage has its own type: no field stays empty until a later stage fills it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import PurePath
from typing import Any, Literal

from saccade.ledger import ImageRef, Ledger
from saccade.ledger import Message as Message
from saccade.utils.hashing import compute_digest


class MediaKind(StrEnum):
    """The kind of a media file."""

    VIDEO = "video"
    IMAGE = "image"


@dataclass(frozen=True, slots=True, kw_only=True)
class Media:
    """A media file of a task, such as `Media(path="clips/0001.mp4")`."""

    path: str
    kind: MediaKind = MediaKind.VIDEO


class AnswerType(StrEnum):
    """The packaged answer types (`rewards/answer_types`), which decide how an answer is parsed and compared."""

    CHOICE = "choice"
    OPEN = "open"
    GROUNDING = "grounding"
    NUMBER = "number"
    MATH = "math"
    BOX = "box"
    POINT = "point"


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A question with its media, answer type and ground truth.

    `ground_truth` is a letter (choice), a text (open), a formula (math), a start and an end in seconds (grounding), a
    number, or the four sides of a box (box and point: see the answer type `box`). `options` are the option texts in
    order. `extras` holds all further fields of the dataset's row, unchanged.

    >>> answer_type, ground_truth = AnswerType.GROUNDING, (3.0, 5.0)
    >>> task = Task(
    ...     id="w-1", question="When is red shown?", media=(), answer_type=answer_type, ground_truth=ground_truth
    ... )
    >>> task.digest[:12]
    'e7b33662fea1'
    """

    id: str
    question: str
    media: tuple[Media, ...]
    answer_type: str  # name of an answer type; never the path of a file
    ground_truth: str | float | tuple[float, ...]
    options: tuple[str, ...] = ()
    extras: Mapping[str, Any] = field(default_factory=dict)
    # name of a recipe's environment; None = its default. Left out of files and of the digest if it is None.
    environment: str | None = field(default=None, metadata={"omit_none": True})

    @property
    def digest(self) -> str:
        """Return a digest for seeds, cache keys and resuming, independent of folders and of subtitle files."""
        # Only the file names enter the digest, so that a moved dataset gives the same run.
        extras = {name: value for name, value in self.extras.items() if name != "subtitles"}
        media = [(PurePath(file.path).name, file.kind) for file in self.media]
        # These keys are frozen: seeds derive from the digest, so renaming one would change every sampled episode.
        identity = {
            "id": self.id,
            "question": self.question,
            "kind": self.answer_type,
            "gold": self.ground_truth,
            "choices": self.options,
            "extras": extras,
            "media": media,
        }
        if self.environment is not None:
            identity["environment"] = self.environment
        return compute_digest(identity)


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """A demonstration for SFT, as text: the reply of each turn, and the replies of its sub-agents.

    `replies` are complete, prefilled part included, such as `("<think>Red.</think><answer>red</answer>",)`.
    `children[t]` are the sub-agents' replies of turn t, in the order of its calls. With `is_auxiliary`, only
    the sub-agents' replies have a loss; if there are none, the demonstration's own replies have one.
    """

    task: Task
    frame_budget: int | None
    replies: tuple[str, ...]
    children: tuple[tuple[str, ...], ...] = ()
    is_auxiliary: bool = False


# ---- replies -------------------------------------------------------------------------------------------------------


class CallFormat(StrEnum):
    """The syntax of a call: Saccade's own, Python as learned in pretraining, or an external system's."""

    NATIVE = "native"
    PYTHON_STYLE = "python_style"
    EXTERNAL = "external"


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One tool call as the model wrote it; `error` is why a malformed call can't be executed."""

    name: str
    arguments: Mapping[str, Any]
    call_format: CallFormat
    error: str | None = None

    @property
    def ok(self) -> bool:
        """Return whether the call was parsed."""
        return self.error is None


class BlockKind(StrEnum):
    """The kind of a block."""

    THINK = "think"
    CALL = "call"
    ANSWER = "answer"
    TEXT = "text"
    UNMATCHED_TAG = "unmatched_tag"  # a structural tag that opens or closes nothing


# The structural tags of a reply, and the kind of block that each one holds.
TAG_KINDS = {"think": BlockKind.THINK, "answer": BlockKind.ANSWER}
TAG_KINDS |= dict.fromkeys(("tool_call", "tool_code", "code"), BlockKind.CALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A part of a reply: `body` is the text between the tags; `is_closed` is whether the closing tag exists."""

    kind: BlockKind
    body: str
    is_closed: bool
    call: Call | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The assistant's text in one turn, parsed into blocks in order; the prefilled text is part of both.

    >>> think = Block(kind=BlockKind.THINK, body="It was red.", is_closed=True)
    >>> Reply(text="...", blocks=(think, Block(kind=BlockKind.ANSWER, body="red", is_closed=True))).answer
    'red'
    """

    text: str
    blocks: tuple[Block, ...] = ()
    prefill: str = ""  # the prefix of `text` that was put in, not sampled

    def find_blocks(self, kind: BlockKind) -> tuple[Block, ...]:
        """Return the blocks of one kind, in order."""
        return tuple(block for block in self.blocks if block.kind is kind)

    @property
    def calls(self) -> tuple[Call, ...]:
        """Return every call in order, malformed ones included."""
        return tuple(block.call for block in self.blocks if block.call is not None)

    @property
    def answer(self) -> str | None:
        """Return the body of the last closed, non-blank answer, or None."""
        closed = [block.body for block in self.find_blocks(BlockKind.ANSWER) if block.is_closed and block.body.strip()]
        return closed[-1].strip() if closed else None


class FinishReason(StrEnum):
    """Why the engine stopped sampling."""

    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Parameters of one request; temperature 0 is greedy, with logprobs of temperature 1."""

    temperature: float = 1.0
    max_tokens: int = 256
    seed: int = 0
    stop_ids: tuple[int, ...] = ()
    forbidden_ids: tuple[int, ...] = ()  # vision placeholders: masked in the sampler and in the trainer


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """What an engine receives: the conversation so far, which it continues, and how to sample."""

    ledger: Ledger
    sampling: SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """Sampled tokens with their logprobs, the weight version and the reason why sampling stopped."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    version: int | None  # None from a chat API
    finish_reason: FinishReason
    seconds: float = 0.0
    token_versions: tuple[int, ...] = ()  # one per token if weights changed during sampling; empty: all are `version`
    text: str | None = None  # from a chat API, which returns neither tokens nor logprobs
    num_text_tokens: int = 0  # of `text`, as the server counts them


# ---- episodes ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """The result of one call: text, images, or an error that the model reads; never an exception.

    `was_executed` is Saccade's record that the tool ran to its end; the tool's output can't set it.
    """

    text: str = ""
    images: tuple[ImageRef, ...] = ()
    error: str | None = None
    was_executed: bool = False
    child_index: int | None = None  # index into the episode's `children`, if a sub-agent answered
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Return whether the tool ran and succeeded."""
        return self.was_executed and self.error is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One reply and its tool results: `results[i]` belongs to `reply.calls[i]`; empty if no call was executed.

    `reward` is the environment's own for the reply, if it gave one; the reward `environment_return` sums them.
    """

    reply: Reply
    results: tuple[ToolResult, ...] = ()
    reward: float | None = field(default=None, metadata={"omit_none": True})


class EpisodeStatus(StrEnum):
    """Why an episode ended."""

    ANSWERED = "answered"
    NO_ANSWER = "no_answer"  # the model stopped without a call and without an answer
    MAX_TURNS = "max_turns"
    LENGTH = "length"
    CONTEXT_FULL = "context_full"
    TOOL_ERROR = "tool_error"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """The cost of an episode, children included: tokens, and wall-clock seconds."""

    prompt_tokens: int = 0
    sampled_tokens: int = 0
    visual_tokens: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """One rollout of a task; `children` are the episodes of its sub-agents."""

    task: Task
    environment: str
    ledger: Ledger
    turns: tuple[Turn, ...]
    status: EpisodeStatus
    children: tuple["Episode", ...] = ()
    usage: Usage = Usage()
    frame_budget: int | None = None  # the prompt's number of frames, K
    error: str | None = None

    @property
    def answer(self) -> str | None:
        """Return the last closed, non-blank answer of all turns, or None."""
        answers = [turn.reply.answer for turn in self.turns if turn.reply.answer is not None]
        return answers[-1] if answers else None

    @property
    def results(self) -> tuple[ToolResult, ...]:
        """Return every tool result, in order of turns and calls."""
        return tuple(result for turn in self.turns for result in turn.results)

    def walk(self) -> Iterator["Episode"]:
        """Yield the episode and all its descendants, parents first."""
        yield self
        for child in self.children:
            yield from child.walk()


# ---- scores and samples --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Sampled tokens of an episode: the structural tags of all replies, the reply of a turn, or one of its calls.

    `turn` is an index into the episode's turns, `call` into the calls of that turn's reply.
    """

    kind: Literal["tags", "turn", "call"]
    turn: int | None = None  # None with "tags"
    call: int | None = None  # None unless "call"


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """A reward for some tokens of an episode only, such as `Credit(span=Span(kind="turn", turn=0), value=0.5)`."""

    span: Span
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The result of the rewards: the value to train on, and its named, unweighted parts (see `rewards.compose`).

    `credits` are not in `value`. `correct` is the value of the term that the recipe marks as correctness, in [0, 1];
    None if it marks none.

    >>> Score(value=1.0, correct=1.0, credits=(Credit(span=Span(kind="tags"), value=0.2),)).total
    1.2
    """

    value: float
    parts: Mapping[str, float] = field(default_factory=dict)
    correct: float | None = None
    credits: tuple[Credit, ...] = ()

    @property
    def total(self) -> float:
        """Return the value plus all credits."""
        return self.value + sum(credit.value for credit in self.credits)

    @property
    def is_correct(self) -> bool:
        """Return whether correctness is known and at least 0.5."""
        return self.correct is not None and self.correct >= 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Ungraded:
    """The reason why there is no score, such as `Ungraded(reason="the judge timed out")`: unknown is not 0."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredEpisode:
    """An episode with its score."""

    episode: Episode
    score: Score


@dataclass(frozen=True, slots=True, kw_only=True)
class UngradedEpisode:
    """An episode without a score, at `group_index` of its group; it is never trained on."""

    episode: Episode
    group_index: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The episodes of one prompt that are compared with each other, and those that have no score."""

    task: Task
    episodes: tuple[ScoredEpisode, ...]
    ungraded: tuple[UngradedEpisode, ...] = ()

    @property
    def rewards(self) -> tuple[float, ...]:
        """Return the episodes' score values, in order."""
        return tuple(episode.score.value for episode in self.episodes)

    @property
    def total_rewards(self) -> tuple[float, ...]:
        """Return the episodes' score values plus their credits, in order."""
        return tuple(episode.score.total for episode in self.episodes)

    @property
    def solve_rate(self) -> float:
        """Return the fraction of correct episodes; 0.0 without episodes."""
        return sum(episode.score.is_correct for episode in self.episodes) / (len(self.episodes) or 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSample:
    """A ledger to train on: one advantage per expanded token, 0.0 on each token that the engine did not sample.

    Raises ValueError for a wrong number of advantages, and for one on a token outside the loss mask.
    """

    ledger: Ledger
    advantages: tuple[float, ...]

    def __post_init__(self) -> None:
        mask = self.ledger.loss_mask()
        if len(mask) != len(self.advantages):
            raise ValueError(f"{len(self.advantages)} advantages for {len(mask)} tokens")
        if any(value and not sampled for value, sampled in zip(self.advantages, mask, strict=True)):
            raise ValueError("a token that the engine did not sample has an advantage")
