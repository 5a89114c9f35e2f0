"""A queue of rollout batches, collected up to `max_lag` weight versions ahead of the trainer.

    collect ──batch──> queue ──get──> trainer: policy update, weight sync ──set_version(version)──┐
       ▲                                                                                         │
       └── batch n starts when n − version <= max_lag, and continues over weight syncs <─────────┘

Two asyncio tasks: one runs `collect_batches`, the other calls `get` and trains. The collector waits only for a version
and the trainer only for a batch, so they can't deadlock. With `max_lag` 0 they alternate. In `lockstep` the trainer
gets a batch once the collector waits for a version, which makes runs reproducible (simulated staleness). Otherwise it
gets a batch while the next one is being collected, and the versions of that one's tokens depend on timing.

The queue holds at most `max_lag` + 1 batches. While it holds `max_tokens` tokens or more (0: no limit), no batch is
started, so its memory is bounded by `max_tokens` plus one batch.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from saccade.training.prompt_sampler import PromptSampler
from saccade.training.rollout_batch import RolloutBatch

CollectBatch = Callable[[PromptSampler, int], Awaitable[tuple[RolloutBatch, PromptSampler]]]


class RolloutQueue:
    """Collects the batches of steps `version` to `end_step` − 1, while a task runs `collect_batches`.

    `batches` are queued already. `num_sampled_tokens` counts the tokens sampled for the batches it collected.
    """

    def __init__(
        self,
        collect_batch: CollectBatch,
        prompt_sampler: PromptSampler,
        batches: Sequence[RolloutBatch],
        *,
        version: int,
        end_step: int,
        max_lag: int,
        lockstep: bool,
        max_tokens: int = 0,
    ) -> None:
        self.num_sampled_tokens, self._max_tokens = 0, max_tokens
        self._collect_batch, self._prompt_sampler, self._queue = collect_batch, prompt_sampler, deque(batches)
        self._version, self._end_step, self._max_lag, self._lockstep = version, end_step, max_lag, lockstep
        self._next_step = version + len(batches)  # of the batch being collected, or collected next
        self._failure: BaseException | None = None  # of the collector
        self._changed = asyncio.Event()

    @property
    def state(self) -> tuple[PromptSampler, tuple[RolloutBatch, ...]]:
        """Return what a checkpoint saves: the prompt sampler after the last complete batch, and the queued batches."""
        return self._prompt_sampler, tuple(self._queue)

    async def get(self) -> RolloutBatch:
        """Return the next batch, in order. Raises the collector's exception if it failed."""
        await self._wait_until(self._is_ready)
        if self._failure is not None and not self._queue:
            raise self._failure
        self._changed.set()  # the collector may have room for another batch
        return self._queue.popleft()

    def _is_ready(self) -> bool:
        is_collecting = self._failure is None and self._next_step < self._end_step
        return not is_collecting or (bool(self._queue) and not (self._lockstep and self._can_start_next()))

    def set_version(self, version: int) -> None:
        """Record that the engine has new weights."""
        self._version = version
        self._changed.set()

    async def collect_batches(self) -> None:
        """Collect the batches, in order; `get` raises the first failure again."""
        try:
            while self._next_step < self._end_step:
                await self._wait_until(self._can_start_next)
                batch, self._prompt_sampler = await self._collect_batch(self._prompt_sampler, self._next_step)
                self._queue.append(batch)
                self.num_sampled_tokens += batch.num_sampled_tokens
                self._next_step += 1
                self._changed.set()
        except BaseException as error:
            self._failure = error
            self._changed.set()
            raise

    def _can_start_next(self) -> bool:
        """Return whether the next batch may be started: it is within `max_lag`, and the queue isn't full."""
        num_tokens = sum(batch.num_tokens for batch in self._queue)
        is_full = self._max_tokens and self._queue and num_tokens >= self._max_tokens
        return self._next_step - self._version <= self._max_lag and not is_full

    async def _wait_until(self, condition: Callable[[], bool]) -> None:
        # Both tasks wait here. Setting the event wakes every waiting task; clearing it doesn't affect woken ones.
        while not condition():
            self._changed.clear()
            await self._changed.wait()
