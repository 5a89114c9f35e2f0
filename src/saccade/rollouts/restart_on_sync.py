"""Restart episodes when new weights arrive, so that each is of one weight version.

    run_episode ──> wait until open ──> runner.run_episode ── an episode ──> its group
                          ▲                  │
                          └─── cancelled <───┘ cancel_episodes(): close, cancel all under way, sync weights, open

Episodes wait for the weight sync, which waits for no episode: a cancellation frees what they hold.
"""

import asyncio
import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from saccade.protocols import Context, Engine, EnvironmentFactory
from saccade.rollouts.runner import run_episode
from saccade.types import Completion, Episode, GenerationRequest, Task
from saccade.utils.async_utils import run_until


class RestartOnSync:
    """Run episodes, and restart those under way at each weight sync."""

    def __init__(self) -> None:
        self._num_restarted = self._num_discarded_tokens = 0
        self._can_start, self._restart_event = asyncio.Event(), asyncio.Event()
        self._can_start.set()

    async def run_episode(self, task: Task, make_environment: EnvironmentFactory, ctx: Context) -> Episode:
        """Run an episode like `runner.run_episode`, as often as needed; each start has the full timeout."""
        while True:
            await self._can_start.wait()
            engine: Any = _TokenCountingEngine(ctx.engine)
            episode = await run_until(
                self._restart_event, run_episode(task, make_environment, replace(ctx, engine=engine))
            )
            if episode is not None:
                return episode
            self._num_restarted += 1
            self._num_discarded_tokens += engine.num_tokens

    @contextlib.contextmanager
    def cancel_episodes(self) -> Iterator[None]:
        """Cancel episodes under way; they and new ones start after the block."""
        self._can_start.clear()
        restart_event, self._restart_event = self._restart_event, asyncio.Event()
        restart_event.set()
        try:
            yield
        finally:
            self._can_start.set()

    def add_metrics(self, metrics: Mapping[str, float]) -> None:
        """Add what another process restarted, as its `pop_metrics` returned it."""
        self._num_restarted += int(metrics.get("episodes/restarted", 0))
        self._num_discarded_tokens += int(metrics.get("restart_discarded_tokens", 0))

    def pop_metrics(self) -> dict[str, float]:
        """Return the number of episodes restarted since the last call, and the number of their discarded tokens.

        Tokens of finished replies are counted, those of sub-agents included; unfinished replies are not.
        """
        metrics = {
            "episodes/restarted": float(self._num_restarted),
            "restart_discarded_tokens": float(self._num_discarded_tokens),
        }
        self._num_restarted = self._num_discarded_tokens = 0
        return metrics


class _TokenCountingEngine:
    """An engine whose sampled tokens are counted."""

    def __init__(self, engine: Engine) -> None:
        self.num_tokens, self._engine = 0, engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, request: GenerationRequest) -> Completion:
        completion = await self._engine.generate(request)
        self.num_tokens += len(completion.tokens)
        return completion
