"""Turn demonstrations (replies as text) into exact ledgers by running the environment on them.

The environment runs as in RL; its engine replays the written replies. So the prompts, frames, tool results, prefills
and sub-agent conversations of SFT equal those of RL and evaluation, token for token, and the loss mask comes from the
ledger. Results that a demonstration records (the output of published code) stand where the environment would run calls.

    demonstration ──run_episode──> episode ──find_problem──> replayed completely or rejected with a reason

A demonstration is rejected if a call of it has an error result or no result, or if a reply of it is not reached: its
next reply was not written for what the model would read. It is rejected, too, if an answer of it has no end, or if the
environment would begin a thought in a reply that has none. A thought of its own without an end is kept as written.
"""

import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from saccade.chat.message_renderer import MessageRenderer
from saccade.environments.tool_environment import ToolEnvironment
from saccade.errors import DataError, EngineError
from saccade.ledger import Box, ImageRef, Origin
from saccade.media.frame_sampling import pair_frames
from saccade.media.hashing import compute_file_digest
from saccade.media.image import fit_size, read_image_size
from saccade.metrics.episode_metrics import ERROR_STATUSES
from saccade.protocols import (
    Context,
    Environment,
    EnvironmentFactory,
    MediaLoader,
    PixelBudget,
    Renderer,
    SelectEnvironment,
    VideoInfo,
    WeightSource,
)
from saccade.rollouts.runner import run_episode
from saccade.tools.base import OMISSION_MARK
from saccade.training.training_samples import build_sample
from saccade.types import (
    BlockKind,
    Completion,
    Demonstration,
    Episode,
    EpisodeStatus,
    FinishReason,
    GenerationRequest,
    TrainingSample,
    Turn,
)
from saccade.utils.async_utils import gather_or_cancel
from saccade.utils.hashing import derive_seed

MAX_CONCURRENT_CHECKS = 64
MAX_CAUSE_CHARS = 300  # of an error result in a reason
MAX_EXAMPLES = 5  # of rejected demonstrations in a message
NO_LIMIT = 2**31  # tokens


class RejectionReason(StrEnum):
    """Why a demonstration can't be replayed completely."""

    ENVIRONMENT = "environment"  # its task names an environment that isn't configured
    FAILED = "failed"  # its episode failed: unreadable media, a missing reply, a failed sandbox
    NO_THOUGHT = "no_thought"  # the environment begins a thought in a reply that has none
    UNCLOSED_ANSWER = "unclosed_answer"  # an answer has no end
    ERROR_RESULT = "error_result"  # a call was refused or failed
    SURPLUS_RESULTS = "surplus_results"  # a turn has more recorded results than calls
    SUB_AGENT = "sub_agent"  # a sub-agent's reply doesn't fit its context
    UNANSWERED_CALLS = "unanswered_calls"  # the episode ends before the calls of a reply are run
    UNREACHED_REPLY = "unreached_reply"  # the episode ends before a reply
    UNUSED_REPLIES = "unused_replies"  # sub-agents' replies belong to no call
    NOTHING_TRAINED = "nothing_trained"  # it trains sub-agents alone, and has none


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a demonstration can't be replayed completely, and the sentence about it."""

    rejection: RejectionReason
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayEngine:
    """An engine that returns the written reply of each seed, or raises EngineError if there is none."""

    renderer: Renderer
    replies_by_seed: Mapping[int, str]
    end_seed: int | None = None  # of the turn after the last written reply
    used_seeds: set[int] = field(default_factory=set)  # of the replies that were returned
    version: int = 0
    has_separate_weights: bool = True  # it has none, so the trainer may update concurrently

    async def generate(self, request: GenerationRequest) -> Completion:
        """Return the reply of this request's seed, without a prefilled beginning, and the family's first stop id."""
        seed = request.sampling.seed
        if seed not in self.replies_by_seed:
            is_end = seed == self.end_seed
            raise EngineError("it has fewer replies than turns" if is_end else "a call has no sub-agent's reply")
        self.used_seeds.add(seed)
        last_segment, text = request.ledger.segments[-1], self.replies_by_seed[seed]
        if last_segment.origin is Origin.PREFILL:
            prefill = "".join(message.text for message in last_segment.messages or ())
            text = remove_prefill(text, prefill or self.renderer.decode(last_segment.tokens))
        if isinstance(self.renderer, MessageRenderer):
            return Completion(tokens=(), logprobs=(), version=None, finish_reason=FinishReason.STOP, text=text)
        tokens = (*self.renderer.encode(text), self.renderer.stop_ids[0])
        return Completion(
            tokens=tokens, logprobs=(0.0,) * len(tokens), version=self.version, finish_reason=FinishReason.STOP
        )

    async def sync_weights(self, source: WeightSource, version: int) -> None:
        """Do nothing: the engine has no weights."""

    async def close(self) -> None:
        """Do nothing."""


def remove_prefill(reply: str, prefill: str) -> str:
    r"""Return a reply without its prefilled start, and the whole reply if it starts otherwise.

    White space around the prefill's tag may differ: published replies continue in the line of their `<think>`.

    >>> [remove_prefill(reply, "<think>\n") for reply in ("<think>\nI look.", "<think>I look.", "I look.")]
    ['I look.', 'I look.', 'I look.']
    """
    stripped, tag = reply.lstrip(), prefill.strip()
    if not stripped.startswith(tag):
        return reply
    rest = stripped[len(tag) :]
    return rest.lstrip() if prefill[-1:].isspace() else rest


async def replay_demonstration(
    demonstration: Demonstration,
    make_environment: EnvironmentFactory,
    ctx: Context,
    *,
    accept_recorded_errors: bool = False,
) -> list[TrainingSample]:
    """Return the conversations of a demonstration (both roles) as samples with advantage 1 on every trained token.

    Raises DataError for a demonstration that can't be replayed completely (see `find_problem`), or that trains nothing.
    """
    episode, problem = await replay_episode(
        demonstration, make_environment, ctx, accept_recorded_errors=accept_recorded_errors
    )
    conversations = list(episode.walk())
    if demonstration.children and demonstration.is_auxiliary:  # train the sub-agents' conversations only
        conversations = conversations[1:]
    trained = [conversation for conversation in conversations if conversation.ledger.sampled_tokens()]
    if problem is None and not trained:
        problem = Problem(RejectionReason.NOTHING_TRAINED, "its calls reach no sub-agent")
    if problem is not None:
        task, budget = demonstration.task, demonstration.frame_budget
        frames = "" if budget is None else f" with {budget} frames"
        message = f"the demonstration of task {task.id}{frames} can't be replayed: {problem.reason}"
        raise DataError(message, key="replies", value=task.id)
    return [build_sample(conversation, 1.0) for conversation in trained]


async def replay_episode(
    demonstration: Demonstration,
    make_environment: EnvironmentFactory,
    ctx: Context,
    *,
    accept_recorded_errors: bool = False,
) -> tuple[Episode, Problem | None]:
    """Run the environment on a demonstration's replies; return the episode, and why it can't be learned, if so."""
    seed = derive_seed("demo", demonstration.task.digest, demonstration.frame_budget)
    replies = {derive_seed(seed, turn): text for turn, text in enumerate(demonstration.replies)}
    children = {
        derive_seed(seed, "child", turn, index): text
        for turn, texts in enumerate(demonstration.children)
        for index, text in enumerate(texts)
    }
    end_seed = derive_seed(seed, len(demonstration.replies))
    engine = ReplayEngine(renderer=ctx.renderer, replies_by_seed=replies | children, end_seed=end_seed)
    replay_ctx = replace(
        ctx,
        engine=engine,
        seed=seed,
        frame_budget=demonstration.frame_budget,
        episode_timeout=None,
        demonstration=demonstration,
    )
    episode = await run_episode(demonstration.task, make_environment, replay_ctx)
    problem = find_problem(demonstration, episode, accept_recorded_errors=accept_recorded_errors)
    num_unused = len(children.keys() - engine.used_seeds)
    if problem is None and num_unused:
        reason = f"{num_unused} of its {len(children)} sub-agents' replies belong to no call"
        problem = Problem(RejectionReason.UNUSED_REPLIES, reason)
    return episode, problem


def find_problem(
    demonstration: Demonstration, episode: Episode, *, accept_recorded_errors: bool = False
) -> Problem | None:
    """Return why a replayed demonstration can't be learned, or None; its turns and calls are counted from 1.

    A recorded error result is no reason with `accept_recorded_errors`.
    """
    ending = f"the episode ended with the status {episode.status.value}"
    if episode.status in ERROR_STATUSES:
        return Problem(RejectionReason.FAILED, episode.error or ending)
    for number, turn in enumerate(episode.turns, start=1):
        if problem := find_turn_problem(demonstration, number, turn, accept_recorded_errors=accept_recorded_errors):
            return problem
    for child in episode.children:
        if child.status is not EpisodeStatus.ANSWERED:
            reason = f"a sub-agent's episode ended with the status {child.status.value}"
            return Problem(RejectionReason.SUB_AGENT, reason)
    num_turns, num_replies = len(episode.turns), len(demonstration.replies)
    last_calls = episode.turns[-1].reply.calls if episode.turns else ()
    if last_calls and not episode.turns[-1].results:
        reason = f"the calls of its reply {num_turns} of {num_replies} are not answered, since {ending}"
        return Problem(RejectionReason.UNANSWERED_CALLS, f"{reason} ({num_turns - 1} tool turns)")
    if num_turns < num_replies:
        reason = f"its reply {num_turns + 1} of {num_replies} is not reached, since {ending}"
        return Problem(RejectionReason.UNREACHED_REPLY, f"{reason}: {episode.error}" if episode.error else reason)
    if any(demonstration.results[num_turns:]):
        return Problem(RejectionReason.SURPLUS_RESULTS, f"it has results of more turns than its {num_replies} replies")
    return None


def find_turn_problem(
    demonstration: Demonstration, number: int, turn: Turn, *, accept_recorded_errors: bool
) -> Problem | None:
    """Return why a replayed turn, counted from 1, can't be learned, or None."""
    prefill, own_text = turn.reply.prefill.strip(), demonstration.replies[number - 1].lstrip()
    first_block = next(iter(turn.reply.blocks), None)
    if prefill and first_block and not first_block.is_closed and not own_text.startswith(prefill):
        reason = f"reply {number} has no thought, and the environment begins every reply with {prefill}"
        advice = "write one, or set force_think=false among the environment's settings"
        return Problem(RejectionReason.NO_THOUGHT, f"{reason}; {advice}")
    if not all(block.is_closed for block in turn.reply.find_blocks(BlockKind.ANSWER)):
        return Problem(RejectionReason.UNCLOSED_ANSWER, f"reply {number} has <answer> without its end")
    recorded = demonstration.results[number - 1] if number <= len(demonstration.results) else ()
    if len(recorded) > len(turn.reply.calls):
        reason = f"turn {number} has {len(recorded)} results for {len(turn.reply.calls)} calls"
        return Problem(RejectionReason.SURPLUS_RESULTS, reason)
    for index, result in enumerate(turn.results):
        own_error = recorded[index].error if accept_recorded_errors and index < len(recorded) else None
        # The environment may refuse the call, and shows that in place of the recorded error.
        is_accepted = own_error is not None and own_error.endswith((result.error or "").removeprefix(OMISSION_MARK))
        if result.error is not None and not is_accepted:
            # A traceback ends with its cause.
            cause = (result.error.strip().splitlines() or [""])[-1].strip()[:MAX_CAUSE_CHARS]
            reason = f"call {index + 1} of turn {number} has an error result: {cause}"
            return Problem(RejectionReason.ERROR_RESULT, reason)
    return None


# ---- many demonstrations -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class DemonstrationReport:
    """How many demonstrations can be learned, and why the others can't."""

    num_rows: int  # of demonstrations that were replayed
    problems_by_row: Mapping[int, Problem]  # by row, from 1; a reason names the task

    @property
    def reasons_by_row(self) -> Mapping[int, str]:
        """The reasons as sentences."""
        return {row: problem.reason for row, problem in self.problems_by_row.items()}

    @property
    def summary(self) -> str:
        """The counts and the first reasons in one sentence."""
        num_bad = len(self.problems_by_row)
        counts = f"{self.num_rows - num_bad:,} of {self.num_rows:,} demonstrations can be replayed completely"
        rows = [f"row {row}, {reason}" for row, reason in [*self.reasons_by_row.items()][:MAX_EXAMPLES]]
        more = f"; and {num_bad - MAX_EXAMPLES:,} more" if num_bad > MAX_EXAMPLES else ""
        return f"{counts}; {num_bad:,} can't: {'; '.join(rows)}{more}" if rows else counts


async def check_demonstrations(
    demonstrations: Mapping[int, Demonstration],
    select_environment: SelectEnvironment,
    ctx: Context,
    *,
    accept_recorded_errors: bool = False,
    run_code: bool = False,
    on_progress: Callable[[int], None] = lambda done: None,
) -> DemonstrationReport:
    """Replay demonstrations, given by row, without decoding frames, and without running code unless `run_code`.

    Sizes and lengths come from the files' headers. A context with a `MessageRenderer` can't count tokens, so its
    replays have no limit of them.
    """
    check_ctx = replace(ctx, media=HeaderLoader(ctx.media))

    async def check(demonstration: Demonstration) -> Problem | None:
        try:
            make_environment = select_environment(demonstration.task)
        except DataError as error:
            return Problem(RejectionReason.ENVIRONMENT, str(error))
        if isinstance(ctx.renderer, MessageRenderer):
            make_environment = replace_settings(make_environment, max_context_tokens=NO_LIMIT)
        if not run_code:
            make_environment = skip_code(make_environment)
        _, problem = await replay_episode(
            demonstration, make_environment, check_ctx, accept_recorded_errors=accept_recorded_errors
        )
        return problem and replace(problem, reason=f"task {demonstration.task.id}: {problem.reason}")

    problems_by_row: dict[int, Problem] = {}
    rows = list(demonstrations)
    for start in range(0, len(rows), MAX_CONCURRENT_CHECKS):
        chunk = rows[start : start + MAX_CONCURRENT_CHECKS]
        problems = await gather_or_cancel([check(demonstrations[row]) for row in chunk])
        problems_by_row |= {row: problem for row, problem in zip(chunk, problems, strict=True) if problem}
        on_progress(start + len(chunk))
    return DemonstrationReport(num_rows=len(rows), problems_by_row=problems_by_row)


def skip_code(make_environment: EnvironmentFactory) -> EnvironmentFactory:
    """Return the environment with an empty result for each call of `python` that has no recorded one."""

    def make() -> Environment:
        environment = make_environment()
        if isinstance(environment, ToolEnvironment):
            environment.skipped_tools = frozenset({"python"})
        return environment

    return make


def replace_settings(make_environment: EnvironmentFactory, **values: Any) -> EnvironmentFactory:
    """Return the environment with other values of those settings that it has."""
    parameters = inspect.signature(make_environment).parameters
    return functools.partial(make_environment, **{name: value for name, value in values.items() if name in parameters})


@dataclass(frozen=True, slots=True)
class HeaderLoader:
    """A media loader that reads sizes and lengths; it decodes only what a tool reads the pixels of."""

    loader: MediaLoader

    @property
    def pairs_frames(self) -> bool:
        """See MediaLoader."""
        return self.loader.pairs_frames

    async def probe(self, path: str) -> VideoInfo:
        """See MediaLoader."""
        return await self.loader.probe(path)

    async def load_frames(
        self, path: str, times: Sequence[float], *, factor: int, budget: PixelBudget
    ) -> list[ImageRef]:
        """Return references to frames at exactly the times given, in pairs if the other loader returns pairs."""
        info = await self.loader.probe(path)
        width, height = fit_size(info.width, info.height, factor, budget)
        frames = [ImageRef(path=path, digest=info.digest, time=time, width=width, height=height) for time in times]
        return pair_frames(frames) if self.pairs_frames else frames

    async def get_image_size(self, path: str) -> tuple[int, int]:
        """See MediaLoader."""
        return read_image_size(path)

    async def load_image(self, path: str, *, factor: int, budget: PixelBudget, box: Box | None = None) -> ImageRef:
        """Return a reference to an image, or a box of it, of the right size."""
        size = read_image_size(path) if box is None else (box[2] - box[0], box[3] - box[1])
        width, height = fit_size(*size, factor, budget)
        # the content's digest: `load_pixels` compares it with the file's
        return ImageRef(path=path, digest=compute_file_digest(path), time=None, width=width, height=height, box=box)

    async def save_image(self, pixels: Any, *, factor: int, budget: PixelBudget) -> ImageRef:
        """See MediaLoader."""
        return await self.loader.save_image(pixels, factor=factor, budget=budget)

    def load_pixels(self, image: ImageRef) -> Any:
        """See MediaLoader."""
        return self.loader.load_pixels(image)

    def load_all_pixels(self, images: Collection[ImageRef]) -> Mapping[str, Any]:
        """See MediaLoader."""
        return self.loader.load_all_pixels(images)
