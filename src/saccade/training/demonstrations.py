"""Turn demonstrations (replies as text) into exact ledgers by running the environment on them.

The environment runs as in RL; its engine replays the written replies. So the prompts, frames, tool results, prefills
and sub-agent conversations of SFT equal those of RL and evaluation, token for token, and the loss mask comes from the
ledger.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from saccade.errors import DataError, EngineError
from saccade.ledger import Origin
from saccade.metrics.episode_metrics import ERROR_STATUSES
from saccade.protocols import Context, EnvironmentFactory, Renderer, WeightSource
from saccade.rollouts.runner import run_episode
from saccade.training.training_samples import build_sample
from saccade.types import Completion, Demonstration, FinishReason, GenerationRequest, TrainingSample
from saccade.utils.hashing import derive_seed


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayEngine:
    """An engine that returns the written reply of each seed, or raises EngineError if there is none."""

    renderer: Renderer
    replies_by_seed: Mapping[int, str]
    version: int = 0
    has_separate_weights: bool = True  # it has none, so the trainer may update concurrently

    async def generate(self, request: GenerationRequest) -> Completion:
        """Return the reply of this request's seed, without a prefilled beginning, and the family's first stop id."""
        if request.sampling.seed not in self.replies_by_seed:
            raise EngineError("it has fewer replies than turns, or a call without a sub-agent's reply")
        last_segment, text = request.ledger.segments[-1], self.replies_by_seed[request.sampling.seed]
        if last_segment.origin is Origin.PREFILL:
            text = text.removeprefix(self.renderer.decode(last_segment.tokens))
        tokens = (*self.renderer.encode(text), self.renderer.stop_ids[0])
        return Completion(
            tokens=tokens, logprobs=(0.0,) * len(tokens), version=self.version, finish_reason=FinishReason.STOP
        )

    async def sync_weights(self, source: WeightSource, version: int) -> None:
        """Do nothing: the engine has no weights."""

    async def close(self) -> None:
        """Do nothing."""


async def replay_demonstration(
    demonstration: Demonstration, make_environment: EnvironmentFactory, ctx: Context
) -> list[TrainingSample]:
    """Return the conversations of a demonstration (both roles) as samples with advantage 1 on every trained token.

    Raises DataError for a demonstration that lacks a reply the environment needs, or that has nothing to train.
    """
    seed = derive_seed("demo", demonstration.task.digest, demonstration.frame_budget)
    replies = {derive_seed(seed, turn): text for turn, text in enumerate(demonstration.replies)}
    for turn, texts in enumerate(demonstration.children):
        replies.update({derive_seed(seed, "child", turn, index): text for index, text in enumerate(texts)})
    engine = ReplayEngine(renderer=ctx.renderer, replies_by_seed=replies)
    replay_ctx = replace(ctx, engine=engine, seed=seed, frame_budget=demonstration.frame_budget, episode_timeout=None)
    episode = await run_episode(demonstration.task, make_environment, replay_ctx)
    conversations = list(episode.walk())
    if demonstration.children and demonstration.is_auxiliary:  # train the sub-agents' conversations only
        conversations = conversations[1:]
    trained = [conversation for conversation in conversations if conversation.ledger.sampled_tokens()]
    if episode.status in ERROR_STATUSES or not trained:
        task, budget = demonstration.task, demonstration.frame_budget
        reason = episode.error or "its calls reach no sub-agent"
        message = f"the demonstration of task {task.id} with {budget} frames can't be replayed: {reason}"
        raise DataError(message, key="replies", value=task.id)
    return [build_sample(conversation, 1.0) for conversation in trained]
