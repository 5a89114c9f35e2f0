"""Run one episode: the one path of training, evaluation and `saccade ask`.

    run_episode ── reset ─> observe ─> [ take_turn: engine.generate ─> parse ─> step ]* ─> Episode
                                         └── the ledger: prompt | prefill | sampled | observation | prefill ...

The runner owns tokens: the ledger, sampling, prefill, the context limit, deadlines and weight versions; the environment
decides what the model sees and when the episode ends. An episode that fails through no fault of the policy (engine,
media, time) ends as aborted, with the error's sentence; the others continue. What the user must fix (a setting, a task)
is raised and cancels the group.
"""

import functools
import json
import logging
import time
from collections.abc import Callable, Coroutine, Hashable
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, cast

from saccade.chat.parser import parse_reply
from saccade.errors import ConfigError, EngineError, EnvironmentServerError, MediaError, SandboxError, convert_errors
from saccade.ledger import Ledger, Origin, Segment
from saccade.plugins import get_plugin_name
from saccade.protocols import Context, Done, Environment, EnvironmentFactory, Observation, Renderer
from saccade.types import (
    Completion,
    Episode,
    EpisodeStatus,
    FinishReason,
    GenerationRequest,
    Message,
    Reply,
    Task,
    Turn,
    Usage,
)
from saccade.utils.hashing import derive_seed

EPISODE_ERRORS = (EngineError, MediaError, SandboxError, EnvironmentServerError)  # not the policy's fault
DEADLINE_ERROR = "the episode's deadline passed before it had ended"
RunEpisode = Callable[[Task, EnvironmentFactory, Context], Coroutine[Any, Any, Episode]]  # `run_episode` or a wrapper
_logger = logging.getLogger("saccade")


async def run_episode(task: Task, make_environment: EnvironmentFactory, ctx: Context) -> Episode:
    """Run one episode; a failure of engine, media or sandbox ends the episode, not the run, and so does its deadline.

    The deadline is `ctx.deadline`, or `ctx.episode_timeout` seconds from now, or never, by the context's clock. Raises
    ConfigError for any other exception of the environment.
    """
    deadline = ctx.deadline
    if deadline is None and ctx.episode_timeout is not None:
        deadline = ctx.clock.time() + ctx.episode_timeout
    bare = make_environment.func if isinstance(make_environment, functools.partial) else make_environment
    name = get_plugin_name(bare.__name__ if hasattr(bare, "__name__") else type(bare).__name__)
    rollout: Rollout | None = None
    try:
        async with ctx.clock.timeout_at(deadline) as limit:
            with convert_errors(
                ConfigError, f"the environment {name} failed on task {task.id}", key="environment.name", value=name
            ):
                environment, episode_ctx = make_environment(), _provide_sub_agents(replace(ctx, deadline=deadline))
                rollout = Rollout(task=task, environment=environment, ctx=episode_ctx, num_frames=ctx.frame_budget)
                try:
                    observation = await environment.reset(task, episode_ctx)
                    rollout.num_frames = observation.num_frames
                    rollout.observe(render_prompt(ctx.renderer, observation), observation)
                    while rollout.status is None:
                        await rollout.take_turn()
                finally:
                    await environment.close()
    except TimeoutError:
        if not limit.expired() or rollout is None:
            raise
        rollout.abort(DEADLINE_ERROR if rollout.status is None else "its deadline passed")
    except EPISODE_ERRORS as error:
        if rollout is None:
            raise
        rollout.abort(str(error))
    episode = rollout.build_episode()
    ctx.emit_event("end", episode=episode)
    return episode


def _provide_sub_agents(ctx: Context) -> Context:
    """Return the context with `run_sub_agent`, which runs episodes below this one."""

    async def run_sub_agent(task: Task, make_environment: EnvironmentFactory, *, seed: int) -> Episode:
        # The deadline is the parent's, which cancels its sub-agents.
        child_ctx = replace(ctx, seed=seed, deadline=None, episode_timeout=None, on_event=None, is_sub_agent=True)
        return await run_episode(task, make_environment, child_ctx)

    return replace(ctx, run_sub_agent=run_sub_agent)


@dataclass(slots=True, kw_only=True)
class Rollout:
    """The state of one episode under way."""

    task: Task
    environment: Environment
    ctx: Context
    ledger: Ledger = field(default_factory=Ledger)
    turns: list[Turn] = field(default_factory=list)
    children: list[Episode] = field(default_factory=list)
    num_frames: int | None = None  # video frames in the prompt; the budget until there is a prompt
    max_reply_tokens: int | None = None  # longest next reply
    status: EpisodeStatus | None = None
    error: str | None = None
    start_time: float = field(default_factory=time.perf_counter)

    def observe(self, segment: Segment, observation: Observation) -> None:
        """Append an observation as a whole and the prefill, or end the episode if they leave no room for a reply."""
        ledger = self.ledger.append(segment)
        if observation.prefill:
            ledger = ledger.append(self.ctx.renderer.render_prefill(observation.prefill))
        limit = self.environment.max_context_tokens
        if len(ledger) >= limit:
            # Whole segments are left out: no observation is ever truncated inside an image.
            self.end(
                EpisodeStatus.CONTEXT_FULL, f"{len(ledger)} tokens leave no room for a reply in a context of {limit}"
            )
            return
        self.ledger, self.max_reply_tokens = ledger, observation.max_reply_tokens

    async def take_turn(self) -> None:
        """Sample a reply and pass it to the environment."""
        turn = len(self.turns)
        self.ctx.emit_event("turn", turn=turn)
        # A sub-agent's seed is the one of its call: demonstrations look replies up by it.
        is_call = self.ctx.is_sub_agent and turn == 0
        reply_limit = min(self.ctx.sampling.max_tokens, self.max_reply_tokens or self.ctx.sampling.max_tokens)
        max_tokens = min(reply_limit, self.environment.max_context_tokens - len(self.ledger))
        sampling = replace(
            self.ctx.sampling,
            seed=self.ctx.seed if is_call else derive_seed(self.ctx.seed, turn),
            max_tokens=max_tokens,
            stop_ids=self.ctx.renderer.stop_ids,
            forbidden_ids=self.ctx.renderer.forbidden_ids,
        )
        try:
            completion = await self.ctx.engine.generate(GenerationRequest(self.ledger, sampling))
            if not set(sampling.forbidden_ids).isdisjoint(completion.tokens):
                raise EngineError("the engine sampled an image placeholder, which is forbidden")
        except EngineError as error:
            self.end(EpisodeStatus.ABORTED, str(error))
            return
        reply = parse_completion(self.ctx.renderer, self.ledger, completion)
        reply = self.environment.parse_reply(reply, completion.finish_reason)
        self.ledger = append_completion(self.ledger, completion)
        self.turns.append(Turn(reply=reply))  # before the environment steps: no exception there loses the turn
        self.ctx.emit_event("reply", turn=turn, reply=reply)
        if completion.finish_reason is FinishReason.ABORTED:
            self.end(EpisodeStatus.ABORTED)
        elif completion.finish_reason is FinishReason.LENGTH and reply.answer is None:
            is_context_limited = max_tokens < reply_limit
            self.end(EpisodeStatus.CONTEXT_FULL if is_context_limited else EpisodeStatus.LENGTH)
        else:
            await self.step(turn, reply)

    async def step(self, turn: int, reply: Reply) -> None:
        """Pass a complete reply to the environment, and record what follows."""
        try:
            outcome = await self.environment.step(reply, self.ctx)
        except EPISODE_ERRORS as error:
            self.end(EpisodeStatus.ENVIRONMENT_ERROR, str(error))
            return
        self.children += outcome.children
        self.turns[-1] = Turn(reply=reply, results=outcome.results, reward=outcome.reward)
        if outcome.results:
            self.ctx.emit_event("results", turn=turn, results=outcome.results)
        if isinstance(outcome, Done):
            self.end(outcome.status, outcome.error)
        else:
            self.observe(self.ctx.renderer.render(self.ledger, outcome.messages), outcome)

    def end(self, status: EpisodeStatus, error: str | None = None) -> None:
        """Set why the episode ends."""
        self.status, self.error = status, error

    def abort(self, error: str) -> None:
        """End the episode as aborted, unless it has ended: then only the environment's `close` failed."""
        if self.status is None:
            self.end(EpisodeStatus.ABORTED, error)
        else:
            _logger.warning("the environment %s failed to close: %s", self.environment.name, error)

    def build_episode(self) -> Episode:
        """Return the finished episode."""
        assert self.status is not None
        num_sampled, costs = self.ledger.num_sampled_tokens, [child.usage for child in self.children]
        num_visual = sum(slot.num_tokens for slot in self.ledger.slots())
        usage = Usage(
            unsampled_tokens=len(self.ledger) - num_sampled + sum(cost.unsampled_tokens for cost in costs),
            sampled_tokens=num_sampled + sum(cost.sampled_tokens for cost in costs),
            visual_tokens=num_visual + sum(cost.visual_tokens for cost in costs),
            seconds=time.perf_counter() - self.start_time,  # children run within it
        )
        return Episode(
            task=self.task,
            environment=self.environment.name,
            ledger=self.ledger,
            turns=tuple(self.turns),
            status=self.status,
            children=tuple(self.children),
            usage=usage,
            frame_budget=self.num_frames,
            error=self.error,
        )


def render_prompt(renderer: Any, prompt: Observation) -> Segment:
    """Render a prompt; the episodes of a group, and sub-agents with equal prompts, share the segment."""
    schemas = tuple(json.dumps(schema, ensure_ascii=False) for schema in prompt.tool_schemas)
    return _render_cached_prompt(cast(Hashable, renderer), prompt.messages, schemas)


@functools.lru_cache(maxsize=1024)
def _render_cached_prompt(renderer: Any, messages: tuple[Message, ...], tool_schemas: tuple[str, ...]) -> Segment:
    return renderer.render(Ledger(), messages, tools=[json.loads(schema) for schema in tool_schemas])


def parse_completion(renderer: Renderer, ledger: Ledger, completion: Completion) -> Reply:
    """Return the reply that starts with the prefill at the end of the ledger, if there is one."""
    last = ledger.segments[-1]
    prefill = last if last.origin is Origin.PREFILL else None
    if completion.text is None:
        return renderer.parse(completion.tokens, prefill=prefill.tokens if prefill else ())
    prefix = "".join(message.text for message in prefill.messages or ()) if prefill else ""
    return parse_reply(prefix + completion.text, len(prefix))


def append_completion(ledger: Ledger, completion: Completion) -> Ledger:
    """Return the ledger with the sampled tokens, one segment per weight version, or with a chat API's text."""
    if completion.text is not None:
        return ledger.append_text(completion.text, completion.num_text_tokens)
    start = 0
    for version, run in groupby(completion.token_versions or (completion.version,) * len(completion.tokens)):
        part = slice(start, start + len(list(run)))
        ledger = ledger.append_completion(completion.tokens[part], logprobs=completion.logprobs[part], version=version)
        start = part.stop
    return ledger
