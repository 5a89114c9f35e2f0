"""Attempts that are begun anew when new weights come, so that each is of one version.

    attempt ──> wait until open ──> run_episode ── an episode ──> its group
                      ▲                 │
                      └── given up <────┘ renewed(): shut, all under way given up, new weights, open

Attempts wait for whoever renews them, who waits for nobody: giving up is a cancellation, which frees what they hold.
"""

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from saccade.ledger import Ledger
from saccade.protocols import Agent, Context, Engine
from saccade.rollouts.run import run_episode
from saccade.types import Completion, Episode, Sampling, Task
from saccade.waiting import until


class Renewal:
    """Runs attempts, and begins those under way anew."""

    def __init__(self) -> None:
        self._attempts = self._tokens = 0
        self._open, self._given_up = asyncio.Event(), asyncio.Event()
        self._open.set()

    async def run(self, task: Task, agent: Agent, ctx: Context) -> Episode:
        """Attempt the task, as `run_episode` does, as often as it takes; each beginning has all of its time."""
        while True:
            await self._open.wait()
            counted = _Counted(ctx.engine)
            episode = await until(self._given_up, run_episode(task, agent, replace(ctx, engine=counted)))
            if episode is not None:
                return episode
            self._attempts += 1
            self._tokens += counted.tokens

    @contextlib.contextmanager
    def renewed(self) -> Iterator[None]:
        """Attempts under way are given up; they and others begin when the block has ended."""
        self._open.clear()
        given_up, self._given_up = self._given_up, asyncio.Event()
        given_up.set()
        try:
            yield
        finally:
            self._open.set()

    def lost(self) -> dict[str, float]:
        """What was lost since this was asked last: attempts that were given up, and what had been sampled for them.

        Counted are replies that had ended, those of sub-agents included; how much of the last was sampled nobody knows.
        """
        found = {"episodes/restarted": float(self._attempts), "tokens_lost": float(self._tokens)}
        self._attempts = self._tokens = 0
        return found


class _Counted:
    """An engine whose tokens are counted."""

    def __init__(self, engine: Engine) -> None:
        self.tokens, self._engine = 0, engine

    @property
    def own_weights(self) -> bool:
        return self._engine.own_weights

    @property
    def version(self) -> int:
        return self._engine.version

    async def generate(self, ledger: Ledger, sampling: Sampling) -> Completion:
        completion = await self._engine.generate(ledger, sampling)
        self.tokens += len(completion.tokens)
        return completion

    async def publish(self, weights: Any, version: int) -> None:
        await self._engine.publish(weights, version)

    async def close(self) -> None:
        await self._engine.close()
