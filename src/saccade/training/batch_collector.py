"""The batches of a run's steps, in order.

    collect_batch ──batch──> BatchCollector ──collect──> trainer: policy update, weight sync ──> the next `collect`

Each batch is collected when the trainer waits for it, in turns with the policy updates; with `simulated_staleness` that
many steps earlier. With `rl.max_staleness` above 0 it consists of groups that were started during earlier steps
(`group_scheduler`).
"""

from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from saccade.metrics.episode_metrics import count_tokens
from saccade.training.group_scheduler import GroupScheduler, PendingGroup
from saccade.training.prompt_sampler import PromptSampler
from saccade.training.rollout_batch import RolloutBatch

CollectBatch = Callable[[PromptSampler, int], Awaitable[tuple[RolloutBatch, PromptSampler]]]


class BatchCollector:
    """Collects the batches of steps `version` to `end_step` − 1, in order, each `simulated_staleness` steps ahead.

    `batches` are collected already. While they have `max_tokens` tokens or more (0: no limit), none is collected ahead.
    `num_sampled_tokens` counts the tokens sampled for the batches it collected. `collect_batch` takes groups from
    `group_scheduler`, if there is one.
    """

    def __init__(
        self,
        collect_batch: CollectBatch,
        prompt_sampler: PromptSampler,
        batches: Sequence[RolloutBatch],
        *,
        version: int,
        end_step: int,
        simulated_staleness: int,
        max_tokens: int = 0,
        group_scheduler: GroupScheduler | None = None,
    ) -> None:
        self.num_sampled_tokens, self._max_tokens, self._group_scheduler = 0, max_tokens, group_scheduler
        self._collect_batch, self._prompt_sampler, self._batches = collect_batch, prompt_sampler, deque(batches)
        self._next_step, self._end_step = version + len(batches), end_step
        self._simulated_staleness = simulated_staleness

    @property
    def state(self) -> tuple[PromptSampler, tuple[RolloutBatch, ...], tuple[PendingGroup, ...]]:
        """Return what a checkpoint saves: the sampler of the next prompts, and the batches and groups to train on."""
        sampler, groups = self._group_scheduler.state if self._group_scheduler else (self._prompt_sampler, ())
        return sampler, tuple(self._batches), groups

    def set_version(self, version: int) -> None:
        """Record that the engine has new weights."""
        if self._group_scheduler is not None:
            self._group_scheduler.set_version(version)

    async def close(self) -> None:
        """Cancel the groups in progress."""
        if self._group_scheduler is not None:
            await self._group_scheduler.close()

    async def collect(self) -> RolloutBatch:
        """Return the next batch."""
        while not self._batches or self._has_room():
            batch, self._prompt_sampler = await self._collect_batch(self._prompt_sampler, self._next_step)
            self._batches.append(batch)
            self._next_step += 1
            self.num_sampled_tokens += batch.num_sampled_tokens
        return self._batches.popleft()

    def _has_room(self) -> bool:
        """Return whether another batch is collected ahead."""
        num_tokens = count_tokens(group for batch in self._batches for group in batch.groups)
        is_full = self._max_tokens and num_tokens >= self._max_tokens
        return self._next_step < self._end_step and len(self._batches) <= self._simulated_staleness and not is_full
