"""Attempts that are begun anew: what had ended is kept, what had not is given up and counted; nobody is left over."""

import asyncio

import pytest
from test_collect import base, quick, task

from saccade.agents.parallel import parallel
from saccade.engines.scripted import scripted
from saccade.rollouts.renewal import Renewal
from saccade.rollouts.run import run_group
from saccade.types import End

ANSWER = "</think><answer>red</answer>"
CALL = '</think><tool_call>{"name": "crop_video", "arguments": {"start_time": 0, "end_time": 4}}</tool_call>'


class Held(scripted):
    """Calls, then answers; the answers from the third on wait until they are let go."""

    def __init__(self, renderer):
        super().__init__(renderer, replies=lambda ledger: ANSWER if self.answers(ledger) else CALL)
        self.go, self.late, self.cancelled = asyncio.Event(), 0, 0

    @staticmethod
    def answers(ledger):
        return any(segment.sampled for segment in ledger.segments) or not segment_is_main(ledger)

    async def generate(self, ledger, sampling):
        if segment_is_main(ledger) and self.answers(ledger):
            self.late += 1
            if self.late > 2:
                try:
                    await self.go.wait()
                except asyncio.CancelledError:
                    self.cancelled += 1
                    raise
        return await super().generate(ledger, sampling)


def segment_is_main(ledger):
    """A sub-agent's prompt has no forced prefix."""
    return len(ledger.segments) > 1


def test_attempts_under_way_begin_anew_with_the_new_weights(renderer):
    async def body():
        engine, renewal, ended = Held(renderer), Renewal(), []

        async def run(*attempt):
            ended.append(await renewal.run(*attempt))
            return ended[-1]

        running = asyncio.create_task(run_group(task("a"), parallel, base(renderer, engine), size=4, run=run))
        while engine.late < 4 or len(ended) < 2:
            await asyncio.sleep(0.001)
        lost = sum(len(said.tokens) for _, said in engine.served)
        with renewal.renewed():
            await engine.publish(None, 1)
            await asyncio.sleep(0.05)
            assert engine.cancelled == 2
            count = len(engine.served)
            await asyncio.sleep(0.05)
            assert len(engine.served) == count, "an attempt was begun before the new weights were there"
        engine.go.set()
        episodes = await running
        return renewal, episodes, lost

    renewal, episodes, lost = asyncio.run(body())
    assert [episode.end for episode in episodes] == [End.ANSWERED] * 4
    versions = [{each for each in episode.ledger.versions() if each >= 0} for episode in episodes]
    assert sorted(map(tuple, versions)) == [(0,), (0,), (1,), (1,)]
    kept = sum(episode.usage.sampled_tokens for episode in episodes if 0 in episode.ledger.versions())
    assert renewal.lost() == {"episodes/restarted": 2.0, "tokens_lost": float(lost - kept)}
    assert lost > kept
    assert renewal.lost() == {"episodes/restarted": 0.0, "tokens_lost": 0.0}


def test_an_attempt_that_begins_anew_has_all_of_its_time(renderer):
    times = []

    async def slow_at_first(task, ctx):
        times.append(ctx.deadline - ctx.clock.time())
        await asyncio.sleep(60 if len(times) == 1 else 0)
        return await quick(task, ctx)

    async def body():
        renewal, ctx = Renewal(), base(renderer, seconds=5.0)
        running = asyncio.create_task(run_group(task("a"), slow_at_first, ctx, size=1, run=renewal.run))
        await asyncio.sleep(0.1)
        with renewal.renewed():
            pass
        await running

    asyncio.run(body())
    assert times == pytest.approx([5.0, 5.0], abs=0.05)


def test_whoever_is_cancelled_while_they_wait_to_begin_is_gone(renderer):
    async def body():
        renewal = Renewal()
        with renewal.renewed():
            running = asyncio.create_task(run_group(task("a"), parallel, base(renderer), size=3, run=renewal.run))
            await asyncio.sleep(0.01)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            return [each for each in asyncio.all_tasks() if each is not asyncio.current_task()]

    assert asyncio.run(body()) == []
