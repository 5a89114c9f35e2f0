"""Restarted episodes: finished ones are kept, unfinished ones are discarded and counted; no task is left over."""

import asyncio
import functools

from test_collect import Quick, base, run_one_group, task
from virtual_time import run_in_virtual_time

from saccade.engines.scripted import Scripted
from saccade.environments.tool_calling import ToolCalling
from saccade.rollouts.restart_on_sync import RestartOnSync
from saccade.types import EpisodeStatus

ANSWER = "</think><answer>red</answer>"
CALL = '</think><tool_call>{"name": "crop_video", "arguments": {"start_time": 0, "end_time": 4}}</tool_call>'


class Held(Scripted):
    """Calls, then answers; the answers from the third on wait for `go`."""

    def __init__(self, renderer):
        super().__init__(renderer, replies=lambda ledger: ANSWER if self.answers(ledger) else CALL)
        self.go, self.num_answers, self.cancelled = asyncio.Event(), 0, 0

    @staticmethod
    def answers(ledger):
        return any(segment.is_sampled for segment in ledger.segments) or not segment_is_main(ledger)

    async def generate(self, request):
        if segment_is_main(request.ledger) and self.answers(request.ledger):
            self.num_answers += 1
            if self.num_answers > 2:
                try:
                    await self.go.wait()
                except asyncio.CancelledError:
                    self.cancelled += 1
                    raise
        return await super().generate(request)


def segment_is_main(ledger):
    """A sub-agent's prompt has no forced prefix."""
    return len(ledger.segments) > 1


def test_unfinished_episodes_restart_with_the_new_weights(renderer):
    async def body():
        engine, renewal, ended = Held(renderer), RestartOnSync(), []

        async def run(*attempt):
            ended.append(await renewal.run_episode(*attempt))
            return ended[-1]

        running = asyncio.create_task(
            run_one_group(task("a"), ToolCalling, base(renderer, engine), group_size=4, run_fn=run)
        )
        while engine.num_answers < 4 or len(ended) < 2:
            await asyncio.sleep(0.001)
        lost = sum(len(completion.tokens) for _, completion in engine.history)
        with renewal.cancel_episodes():
            await engine.sync_weights(None, 1)
            await asyncio.sleep(0.05)  # all that can happen before the update ends
            assert engine.cancelled == 2
            count = len(engine.history)
            await asyncio.sleep(0.05)
            assert len(engine.history) == count, "an episode was restarted before the new weights were there"
        engine.go.set()
        episodes = await running
        return renewal, episodes, lost

    renewal, episodes, lost = run_in_virtual_time(body())
    assert [episode.status for episode in episodes] == [EpisodeStatus.ANSWERED] * 4
    versions = [{version for version in episode.ledger.versions() if version >= 0} for episode in episodes]
    assert sorted(map(tuple, versions)) == [(0,), (0,), (1,), (1,)]
    kept = sum(episode.usage.sampled_tokens for episode in episodes if 0 in episode.ledger.versions())
    assert renewal.pop_metrics() == {"episodes/restarted": 2.0, "restart_discarded_tokens": float(lost - kept)}
    assert lost > kept
    assert renewal.pop_metrics() == {"episodes/restarted": 0.0, "restart_discarded_tokens": 0.0}


def test_a_restarted_episode_has_its_whole_timeout(renderer):
    times = []

    async def hang_at_first(task, ctx):
        times.append(ctx.deadline - ctx.clock.time())
        await asyncio.sleep(60 if len(times) == 1 else 0)

    async def body():
        renewal, ctx = RestartOnSync(), base(renderer, episode_timeout=5.0)
        running = asyncio.create_task(
            run_one_group(
                task("a"),
                functools.partial(Quick, hang_at_first),
                ctx,
                group_size=1,
                run_fn=renewal.run_episode,
            )
        )
        await asyncio.sleep(0.1)
        with renewal.cancel_episodes():
            pass
        await running

    run_in_virtual_time(body())
    assert times == [5.0, 5.0]


def test_episodes_cancelled_before_they_begin_leave_no_task(renderer):
    async def body():
        renewal = RestartOnSync()
        with renewal.cancel_episodes():
            running = asyncio.create_task(
                run_one_group(task("a"), ToolCalling, base(renderer), group_size=3, run_fn=renewal.run_episode)
            )
            await asyncio.sleep(0.01)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            return [other for other in asyncio.all_tasks() if other is not asyncio.current_task()]

    assert run_in_virtual_time(body()) == []
