"""Define the data types: tasks, replies, turns, episodes, scores, samples. Frozen, keyword-only, standard library only.

    Task ─environment─> Episode ─rewards─> ScoredEpisode ─> Group ─advantages─> TrainingSample ─pack─> MicroBatch

Each stage has its own type. Fields are final, with two exceptions: the policy update adds loss weights and logprobs to
a `MicroBatch`, and the runner adds results to a `Turn`.
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

    VIDEO = "video"  # shown as frames with their times
    IMAGE = "image"  # a still image


# of files, where nothing else says their kind
IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff"})
VIDEO_SUFFIXES = frozenset({".avi", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".ts", ".webm"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Media:
    """A media file of a task, such as `Media(path="clips/0001.mp4")`."""

    path: str  # absolute, or relative to the working directory
    kind: MediaKind = MediaKind.VIDEO  # whether it is a video or an image


class AnswerType(StrEnum):
    """The packaged answer types (`rewards/answer_types`), which decide how an answer is parsed and compared."""

    CHOICE = "choice"  # a letter
    OPEN = "open"  # a text
    GROUNDING = "grounding"  # a start and an end in seconds
    NUMBER = "number"  # a number
    MATH = "math"  # a formula
    BOX = "box"  # left, top, right, bottom of the box, in pixels or as fractions
    POINT = "point"  # the sides of a box that contains the point


class _DigestSlot:
    """Where a frozen task keeps its digest, which reports read hundreds of times; it is no field of the task."""

    __slots__ = ("_digest",)
    _digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Task(_DigestSlot):
    """A question with its media, answer type and ground truth.

    >>> answer_type, ground_truth = AnswerType.GROUNDING, (3.0, 5.0)
    >>> task = Task(
    ...     id="w-1", question="When is red shown?", media=(), answer_type=answer_type, ground_truth=ground_truth
    ... )
    >>> task.digest[:12]
    'e7b33662fea1'
    """

    id: str  # unique in its dataset
    question: str  # as the prompt shows it
    media: tuple[Media, ...]  # videos and images, in the order of the prompt
    answer_type: str  # name of an answer type; never the path of a file
    ground_truth: str | float | tuple[float, ...]  # in the form that `AnswerType` gives for the answer type
    options: tuple[str, ...] = ()  # of a multiple-choice question: the texts, in order, without letters
    extras: Mapping[str, Any] = field(default_factory=dict)  # all further fields of the dataset's row, unchanged
    # name of a recipe's environment; None = its default. Left out of files and of the digest if it is None.
    environment: str | None = field(default=None, metadata={"omit_none": True})

    @property
    def source(self) -> str:
        """Return the dataset that the row names as `data_source` or `source`; "" if it names none."""
        return next((str(self.extras[name]) for name in ("data_source", "source") if self.extras.get(name)), "")

    @property
    def digest(self) -> str:
        """Return a digest for seeds, cache keys and resuming, independent of folders and of subtitle files."""
        try:
            digest: str = self._digest
        except AttributeError:
            digest = self._compute_digest()
            object.__setattr__(self, "_digest", digest)
        return digest

    def _compute_digest(self) -> str:
        # Only the file names enter the digest, so that a moved dataset gives the same run.
        # These keys are frozen: seeds derive from the digest, so renaming one would change every sampled episode.
        frozen = {"evidence": "needs"}
        extras = {frozen.get(name, name): value for name, value in self.extras.items() if name != "subtitles"}
        media = [(PurePath(file.path).name, file.kind) for file in self.media]
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
class RecordedResult:
    """The result of a call as a published conversation shows it; replaying its demonstration doesn't run the call."""

    text: str = ""  # as the model reads it, without the environment's tags
    images: tuple[Media, ...] = ()  # that the call showed, in order
    error: str | None = None  # what the model reads if the call failed


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """A demonstration for SFT, as text: the reply of each turn, and the replies of its sub-agents.

    With `is_auxiliary`, only the sub-agents' replies have a loss; if there are none, the demonstration's own replies
    have one.
    """

    task: Task  # the question
    frame_budget: int | None  # the prompt's number of frames, K; None: the environment's own setting
    replies: tuple[str, ...]  # complete, prefilled part included: `("<think>Red.</think><answer>red</answer>",)`
    children: tuple[tuple[str, ...], ...] = ()  # per turn: the sub-agents' replies, in the order of its calls
    is_auxiliary: bool = False  # whether it trains the sub-agents' replies alone
    results: tuple[tuple[RecordedResult, ...], ...] = ()  # per turn: results of its calls; empty where calls are run

    @property
    def media(self) -> tuple[Media, ...]:
        """Return the media of the task, and the images of the recorded results."""
        return self.task.media + tuple(image for turn in self.results for result in turn for image in result.images)


# ---- replies -------------------------------------------------------------------------------------------------------


class CallFormat(StrEnum):
    """The syntax of a call."""

    NATIVE = "native"  # the model family's own
    PYTHON_STYLE = "python_style"  # Python as learned in pretraining
    THIRD_PARTY = "third_party"  # another system's


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One tool call as the model wrote it."""

    name: str  # of the tool; "" if a malformed call has none
    arguments: Mapping[str, Any]  # by name; a positional argument of a Python-style call has the key "0", "1", …
    call_format: CallFormat  # the syntax it was written in
    error: str | None = None  # why a malformed call can't be executed

    @property
    def ok(self) -> bool:
        """Return whether the call was parsed."""
        return self.error is None


class BlockKind(StrEnum):
    """The kind of a block."""

    THINK = "think"  # reasoning
    CALL = "call"  # a tool call or code
    ANSWER = "answer"  # a final answer
    TEXT = "text"  # text outside of tags
    UNMATCHED_TAG = "unmatched_tag"  # a structural tag that opens or closes nothing


# The structural tags of a reply, and the kind of block that each one holds.
TAG_KINDS = {"think": BlockKind.THINK, "answer": BlockKind.ANSWER}
TAG_KINDS |= dict.fromkeys(("tool_call", "tool_code", "code"), BlockKind.CALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A part of a reply."""

    kind: BlockKind  # the kind that the tags name
    body: str  # the text between the tags
    is_closed: bool  # whether the closing tag exists
    call: Call | None = None  # the parsed call of a block of kind CALL


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The assistant's text in one turn, parsed into blocks in order; the prefilled text is part of both.

    >>> think = Block(kind=BlockKind.THINK, body="It was red.", is_closed=True)
    >>> Reply(text="...", blocks=(think, Block(kind=BlockKind.ANSWER, body="red", is_closed=True))).answer
    'red'
    """

    text: str  # the whole reply
    blocks: tuple[Block, ...] = ()  # its parts, in order
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

    STOP = "stop"  # a stop token was sampled
    LENGTH = "length"  # `max_tokens` were sampled
    ABORTED = "aborted"  # the engine stopped the request


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Parameters of one request."""

    temperature: float = 1.0  # 0 is greedy, with logprobs of temperature 1
    max_tokens: int = 256  # most tokens of the completion
    seed: int = 0  # decides the sample together with the ledger
    stop_ids: tuple[int, ...] = ()  # tokens that end the completion
    forbidden_ids: tuple[int, ...] = ()  # vision placeholders: masked in the sampler and in the trainer


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """What an engine receives: the conversation so far, which it continues, and how to sample."""

    ledger: Ledger  # the conversation so far
    sampling: SamplingParams  # how to sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What an engine sampled: tokens with logprobs, or the text of a chat API."""

    tokens: tuple[int, ...]  # sampled tokens, the stop token included
    logprobs: tuple[float, ...]  # one per token, in nats, of the distribution that was sampled from
    version: int | None  # of the weights; None from a chat API
    finish_reason: FinishReason  # why sampling stopped
    token_versions: tuple[int, ...] = ()  # one per token if weights changed during sampling; empty: all are `version`
    text: str | None = None  # from a chat API, which returns neither tokens nor logprobs
    num_text_tokens: int = 0  # of `text`, as the server counts them


# ---- episodes ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """The result of one call: text, images, or an error that the model reads; never an exception."""

    text: str = ""  # as the model reads it
    images: tuple[ImageRef, ...] = ()  # shown after the text
    error: str | None = None  # what the model reads if the call failed
    was_executed: bool = False  # whether the tool ran to its end; set for every result of a tool without an error
    child_index: int | None = None  # index into the episode's `children`, if a sub-agent answered
    seconds: float = 0.0  # wall-clock time of the call

    @property
    def ok(self) -> bool:
        """Return whether the tool ran and succeeded."""
        return self.was_executed and self.error is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One reply and its tool results."""

    reply: Reply  # what the model wrote
    results: tuple[ToolResult, ...] = ()  # one per call of the reply, in order; empty if no call was executed
    # the environment's own reward for the reply, if it gave one; the reward `environment_return` sums them
    reward: float | None = field(default=None, metadata={"omit_none": True})


class EpisodeStatus(StrEnum):
    """Why an episode ended."""

    ANSWERED = "answered"  # the model wrote a final answer
    NO_ANSWER = "no_answer"  # the model stopped without a call and without an answer
    MAX_TURNS = "max_turns"  # the environment's limit of turns was reached
    LENGTH = "length"  # a reply reached `sampling.max_tokens`
    CONTEXT_FULL = "context_full"  # the conversation reached the environment's `max_context_tokens`
    ENVIRONMENT_ERROR = "environment_error"  # the sandbox or an environment's server failed; not the model's doing
    ABORTED = "aborted"  # the engine or the media failed, or the deadline passed; not the model's doing


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """The cost of an episode, children included."""

    unsampled_tokens: int = 0  # prompts, tool results and prefills: tokens that were not sampled
    sampled_tokens: int = 0  # tokens that the engine sampled
    visual_tokens: int = 0  # tokens of images, a part of `unsampled_tokens`
    seconds: float = 0.0  # wall-clock time


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """One rollout of a task."""

    task: Task  # the question
    environment: str  # name of the environment
    ledger: Ledger  # the tokens of the conversation
    turns: tuple[Turn, ...]  # the model's replies with their results, in order
    status: EpisodeStatus  # why it ended
    children: tuple["Episode", ...] = ()  # the episodes of its sub-agents
    usage: Usage = Usage()  # its cost, children included
    frame_budget: int | None = None  # the prompt's number of frames, K
    error: str | None = None  # what failed, with the status `environment_error` or `aborted`

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
    """Sampled tokens of an episode."""

    kind: Literal[
        "tags", "turn", "call"
    ]  # the structural tags of all replies, the reply of a turn, or one of its calls
    turn: int | None = None  # index into the episode's turns; None with "tags"
    call: int | None = None  # index into the calls of that turn's reply; None unless "call"


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """A reward for some tokens of an episode only, such as `Credit(span=Span(kind="turn", turn=0), value=0.5)`."""

    span: Span  # the tokens
    value: float  # added to their reward


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The result of the rewards of an episode.

    >>> Score(value=1.0, correct=1.0, credits=(Credit(span=Span(kind="tags"), value=0.2),)).total
    1.2
    """

    value: float  # the value to train on: the weighted sum of the parts
    parts: Mapping[str, float] = field(default_factory=dict)  # the unweighted value of each term, by its name
    correct: float | None = None  # the term that the recipe marks as correctness, in [0, 1]; None if it marks none
    credits: tuple[Credit, ...] = ()  # rewards for some tokens only; not in `value`
    # why a single reward has its value, a phrase for people; a score of several terms has `reasons`
    reason: str = ""
    reasons: Mapping[str, str] = field(default_factory=dict)  # the terms' reasons, by the names of `parts`

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

    reason: str  # one sentence


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredEpisode:
    """An episode with its score."""

    episode: Episode  # the rollout
    score: Score  # the result of the rewards


@dataclass(frozen=True, slots=True, kw_only=True)
class UngradedEpisode:
    """An episode without a score; it is never trained on."""

    episode: Episode  # the rollout
    group_index: int  # its index among the episodes that were sampled for the group
    reason: str  # why it has no score


@dataclass(frozen=True, slots=True, weakref_slot=True, kw_only=True)
class Group:
    """The episodes of one prompt that are compared with each other."""

    task: Task  # the question of all of them
    scored_episodes: tuple[ScoredEpisode, ...]  # in the order of their seeds
    ungraded: tuple[UngradedEpisode, ...] = ()  # those that have no score
    # a greedy episode (temperature 0) whose reward is subtracted from the others' (ReMax); it is not trained on
    greedy_baseline: ScoredEpisode | None = field(default=None, metadata={"omit_none": True})

    @property
    def score_values(self) -> tuple[float, ...]:
        """Return the episodes' `Score.value`, in order, without credits."""
        return tuple(episode.score.value for episode in self.scored_episodes)

    @property
    def total_rewards(self) -> tuple[float, ...]:
        """Return the episodes' `Score.total`, in order: the values plus credits, as the metric `reward` averages."""
        return tuple(episode.score.total for episode in self.scored_episodes)

    @property
    def members(self) -> tuple[ScoredEpisode, ...]:
        """Return `scored_episodes`, which are compared and trained on, and the greedy baseline scored with them."""
        return (*self.scored_episodes, self.greedy_baseline) if self.greedy_baseline else self.scored_episodes

    @property
    def all_episodes(self) -> list[Episode]:
        """Return the episodes of all members, then those that have no score."""
        return [scored.episode for scored in self.members] + [ungraded.episode for ungraded in self.ungraded]

    @property
    def solve_rate(self) -> float:
        """Return the fraction of correct episodes; 0.0 without episodes."""
        return sum(episode.score.is_correct for episode in self.scored_episodes) / (len(self.scored_episodes) or 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSample:
    """A ledger to train on.

    Raises ValueError for a wrong number of advantages, and for one on a token outside the loss mask.
    """

    ledger: Ledger  # the tokens
    advantages: tuple[float, ...]  # one per expanded token; 0.0 on each token that the engine did not sample
    group: int = 0  # index of its group in the rollout batch; a mini-batch holds whole groups

    def __post_init__(self) -> None:
        mask = self.ledger.loss_mask()
        if len(mask) != len(self.advantages):
            raise ValueError(f"{len(self.advantages)} advantages for {len(mask)} tokens")
        if any(value and not sampled for value, sampled in zip(self.advantages, mask, strict=True)):
            raise ValueError("a token that the engine did not sample has an advantage")
