"""Demonstrations: what a good agent would say, as text, turned into exact ledgers by the agent itself.

The agent runs as it always does; only its engine is another one, which rehearses the written replies. So prompts,
frames, tool results, forced prefixes and sub-agents' conversations of SFT are those of RL and evaluation, token for
token, and the loss mask comes from the ledger.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from saccade.errors import DataError, EngineError
from saccade.evaluation.metrics import BROKEN
from saccade.ledger import Ledger, Origin
from saccade.protocols import Agent, Context, Renderer
from saccade.training.credit import sample_of
from saccade.types import Completion, Demo, Sample, Sampling, Stop, seed_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsed:
    """An engine that says what was written for each seed. Raises EngineError where nothing was."""

    renderer: Renderer
    replies: Mapping[int, str]
    version: int = 0
    own_weights: bool = True  # or none at all

    async def generate(self, ledger: Ledger, sampling: Sampling) -> Completion:
        """The rest of the reply written for this request's seed, ended by the family's first stop id."""
        if sampling.seed not in self.replies:
            raise EngineError("it has fewer replies than turns, or a call that no sub-agent answers")
        last, text = ledger.segments[-1], self.replies[sampling.seed]
        if last.origin is Origin.FORCED:
            text = text.removeprefix(self.renderer.decode(last.tokens))
        tokens = (*self.renderer.encode(text), self.renderer.stop_ids[0])
        return Completion(tokens=tokens, logprobs=(0.0,) * len(tokens), version=self.version, stop=Stop.STOP)

    async def publish(self, weights: Any, version: int) -> None:
        """Nothing to take."""

    async def close(self) -> None:
        """Nothing to stop."""


async def rehearse(demo: Demo, agent: Agent, ctx: Context) -> list[Sample]:
    """The conversations of a demonstration, both roles, with advantage 1 on every token that is to be learned.

    Raises DataError for a demonstration that has no reply where the agent asks for one, or nothing to learn.
    """
    seed = seed_of("demo", demo.task.digest, demo.frames)
    replies = {seed_of(seed, turn): text for turn, text in enumerate(demo.replies)}
    for turn, texts in enumerate(demo.children):
        replies.update({seed_of(seed, "child", turn, index): text for index, text in enumerate(texts)})
    engine = Rehearsed(renderer=ctx.renderer, replies=replies)
    episode = await agent(demo.task, replace(ctx, engine=engine, seed=seed, frames=demo.frames))
    own, *children = episode.walk()
    alone = demo.children and not demo.main
    learned = [each for each in (children if alone else (own, *children)) if each.ledger.sampled_tokens()]
    if episode.end in BROKEN or not learned:
        reason = episode.error or "its calls reach no sub-agent"
        raise DataError(f"the demonstration of task {demo.task.id} with {demo.frames} frames is of no use: {reason}")
    return [sample_of(conversation, 1.0) for conversation in learned]
