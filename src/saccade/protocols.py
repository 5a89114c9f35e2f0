"""The verbs: what a renderer, an engine, a tool, an agent and a reward must do. Contexts are given, never kept."""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from saccade.errors import ConfigError
from saccade.ledger import Box, Ledger, Picture, Segment
from saccade.types import Completion, Episode, Message, Reply, Sampling, Score, Task, Ungraded
from saccade.waiting import PausableClock


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """How large a picture may be for the model: pixels per picture, after resizing."""

    min_pixels: int
    max_pixels: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Clip:
    """What is known of a video before it is decoded: length in seconds, frames, size in pixels as shown."""

    path: str
    digest: str
    duration: float
    frames: int
    width: int
    height: int


class MediaLibrary(Protocol):
    """Pictures in time. Every method raises MediaError with one clear sentence."""

    async def probe(self, path: str) -> Clip:
        """What the video at `path` is."""

    async def frames(self, path: str, times: Sequence[float], *, factor: int, budget: Budget) -> list[Picture]:
        """One picture per time (seconds), sides multiples of `factor`; each carries the TRUE time of its frame."""

    async def size(self, path: str) -> tuple[int, int]:
        """Width and height (pixels) of the still picture in the file at `path`, as it stands upright."""

    async def image(self, path: str, *, factor: int, budget: Budget, box: Box | None = None) -> Picture:
        """The still picture in the file at `path`, or a box of it (pixels), sized like a frame; it has no time."""

    async def keep(self, pixels: Any, *, factor: int, budget: Budget) -> Picture:
        """A picture that a tool made (uint8 RGB [height, width, 3]), sized like a frame and kept as a file."""

    def pixels(self, picture: Picture) -> Any:
        """The pixels, uint8 RGB [height, width, 3] as a numpy array; decoded again if no longer cached."""


class Renderer(Protocol):
    """Words <-> tokens, for one model family and tokenizer."""

    factor: int  # pixels per side of one visual token
    stop_ids: tuple[int, ...]
    forbidden_ids: tuple[int, ...]

    def render(
        self, ledger: Ledger, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] = ()
    ) -> Segment:
        """Only the new: closes the open turn if needed, adds `messages`, opens the assistant's next turn."""

    def encode(self, text: str) -> tuple[int, ...]:
        """Plain text to ids; text that looks like a vision placeholder or a turn mark never becomes one."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Ids to text, special tokens included."""

    def parse(self, tokens: Sequence[int], *, forced: Sequence[int] = ()) -> Reply:
        """One turn's forced and sampled ids to a reply; never raises."""


class Engine(Protocol):
    """Tokens in, tokens out."""

    @property
    def own_weights(self) -> bool:
        """Whether it samples from weights of its own, so that the trainer may change its own ones meanwhile.

        It is the same for all engines of a class, and the class itself is asked before one is made.
        """

    @property
    def version(self) -> int:
        """The version of the weights it samples from."""

    async def generate(self, ledger: Ledger, sampling: Sampling) -> Completion:
        """Sample a continuation of the ledger. Cancelling the task frees what it holds."""

    async def publish(self, weights: Any, version: int) -> None:
        """Take new weights; whatever was cached from the old ones is dropped."""

    async def close(self) -> None:
        """Stop, and fail what is still waiting."""


class TextEngine(ABC):
    """An engine that is asked in words and answers in words: for evaluation and `saccade ask`, never for training.

    Its server makes the tokens, and nobody else sees them. It reads the ledgers of its own `renderer`; its completions
    spell what was said in ids of that renderer, with neither logprobs nor a version.
    """

    own_weights = True
    version = 0
    renderer: Renderer

    @abstractmethod
    async def meet(self) -> str:
        """Make sure of the server; the name of the model that it is asked for."""

    @abstractmethod
    async def generate(self, ledger: Ledger, sampling: Sampling) -> Completion:
        """See `Engine`."""

    async def publish(self, weights: Any, version: int) -> None:
        """Refused with a ConfigError: there is nothing to learn from."""
        raise ConfigError(f"the engine {type(self).__name__} {UNTRAINABLE}")

    @abstractmethod
    async def close(self) -> None:
        """See `Engine`."""


UNTRAINABLE = (
    "is asked in words, so neither the tokens nor their logprobs are known and nothing can be learned from it: it is "
    "for `saccade eval` and `saccade ask`; train with engine.name=local, vllm or sglang"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a recipe wants of servers: the checkpoint's folder, tokens of a conversation, whether new weights come.

    `renderer` is None where the checkpoint can't be read; then its words can't be compared with a server's.
    """

    model: str
    renderer: Renderer | None
    context: int
    training: bool


@runtime_checkable
class Remote(Protocol):
    """What an engine's class has besides where servers do the work: they can be looked at before a run begins."""

    async def visit(self, needs: Needs, /, **settings: Any) -> Mapping[str, str | Exception]:
        """By address, what a server is, or why it can't be used; nothing of it is changed. It belongs to the class.

        Raises SaccadeError where none can be asked.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What an agent, and through it a tool, is given for one episode.

    `seed` is the episode's own; `frames` is the frame budget K that gating drew (None: the agent's setting). `seconds`
    is how long an episode may take; from them whoever starts it sets the `deadline`, in seconds of the `clock`, at
    which it ends as aborted; the clock is paused while the engine takes new weights. `watch` is told of events as they
    happen, for live display.
    """

    engine: Engine
    renderer: Renderer
    media: MediaLibrary
    sampling: Sampling
    seed: int
    frames: int | None = None
    seconds: float | None = None
    deadline: float | None = None
    clock: PausableClock = field(default_factory=PausableClock)
    watch: Callable[[str, Mapping[str, Any]], None] | None = None


class Agent(Protocol):
    """How a task is attempted."""

    def __call__(self, task: Task, ctx: Context) -> Awaitable[Episode]:
        """Attempt the task once. Raises only for what the user must mend; all else is the episode's `end`."""


Grade = float | Score | Ungraded
Settled = Score | Ungraded


class Reward(Protocol):
    """What an episode is worth, by one measure: a function, or a class whose instances are called.

    A class takes its settings, and holds what costs time to make (a judge's client). A reward with a keyword-only
    parameter `accuracy: float` is given what the recipe's accuracy term said of the episode.
    """

    def __call__(self, episode: Episode, task: Task) -> Grade | Awaitable[Grade]:
        """A value, usually in [0, 1]; the same episode has the same reward.

        `Ungraded` where it can't be known (never 0 then), and a `Score` where some of it is to be credited apart from
        the rest, under names of its own. Whoever waits for something (a server, a process) is awaited.
        """


# All rewards of a recipe together: the score of an episode, or why there is none; see `rewards._compose.compose`.
Scorer = Callable[[Episode, Task], Settled | Awaitable[Settled]]
