"""Groups and many groups: seeds, frame budgets, order, bounds, failures."""

import asyncio

import pytest

from saccade.agents.parallel import parallel
from saccade.engines.scripted import scripted
from saccade.errors import ConfigError, EngineError, MediaError
from saccade.ledger import Ledger
from saccade.protocols import Context
from saccade.rollouts import run as rollouts
from saccade.rollouts.collect import collect
from saccade.rollouts.run import run_episode, run_group
from saccade.testing import PaintedMedia
from saccade.types import End, Episode, Group, Kind, Media, Sampling, Score, Task, Ungraded, seed_of


def task(name, path="clip.mp4"):
    return Task(id=name, question=f"What is {name}?", media=(Media(path=path),), kind=Kind.OPEN, gold="red")


def base(renderer, engine=None, **changes):
    engine = engine or scripted(renderer, replies=lambda ledger: "</think><answer>red</answer>")
    given = {"engine": engine, "renderer": renderer, "media": PaintedMedia(), "sampling": Sampling(), "seed": 3}
    return Context(**{**given, **changes})


def ones(episode, task):
    return Score(value=float(episode.end is End.ANSWERED), parts={})


async def quick(task, ctx):
    """An agent that needs no engine; its error names its seed."""
    await asyncio.sleep(0)
    ledger = Ledger().observe((ctx.seed % 1000,))
    return Episode(task=task, agent="quick", ledger=ledger, turns=(), end=End.ANSWERED, frames=ctx.frames)


def test_seeds_are_digested_from_run_epoch_task_and_index(renderer):
    seeds = []

    async def notes(task, ctx):
        seeds.append(ctx.seed)
        return await quick(task, ctx)

    asyncio.run(run_group(task("a"), notes, base(renderer), size=3, epoch=7))
    assert seeds == [seed_of(3, 7, task("a").digest, index) for index in range(3)]


def test_a_group_shares_its_frame_budget_and_its_prompt(renderer):
    episodes = asyncio.run(run_group(task("a"), parallel, base(renderer), size=4, frames=8))
    assert [episode.frames for episode in episodes] == [8] * 4
    prompts = {id(episode.ledger.segments[0]) for episode in episodes}
    assert len(prompts) == 1  # the very same segment: rendered once


def test_the_budget_of_the_context_holds_where_none_is_drawn(renderer):
    episodes = asyncio.run(run_group(task("a"), quick, base(renderer, frames=16), size=2))
    assert [episode.frames for episode in episodes] == [16, 16]


@pytest.mark.parametrize("error", [EngineError("the engine is gone"), MediaError("the file is gone")])
def test_a_failure_is_the_episodes_end_not_the_runs(renderer, error):
    async def fails(task, ctx):
        if ctx.seed == seed_of(3, 0, task.digest, 1):
            raise error
        return await quick(task, ctx)

    episodes = asyncio.run(run_group(task("a"), fails, base(renderer, frames=4), size=3))
    assert [episode.end for episode in episodes] == [End.ANSWERED, End.ABORTED, End.ANSWERED]
    assert (episodes[1].error, episodes[1].agent, episodes[1].frames) == (str(error), "fails", 4)


def test_a_missing_file_ends_its_own_group_alone(renderer):
    tasks = [task("a"), task("b", "missing.mp4")]
    good, bad = asyncio.run(collect(tasks, parallel, base(renderer), size=2, score=ones))
    assert good.rewards == (1.0, 1.0)
    assert [member.episode.end for member in bad.members] == [End.ABORTED] * 2


def test_what_the_user_must_mend_stops_everything(renderer):
    cancelled = []

    async def wrong(task, ctx):
        if task.id == "b":
            raise ConfigError("mend me")
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(task.id)
            raise

    with pytest.raises(ConfigError, match="mend me"):
        asyncio.run(collect([task("a"), task("b")], wrong, base(renderer), size=2, score=ones))
    assert cancelled == ["a", "a"]


def test_groups_come_in_the_order_of_the_tasks_however_they_finish(renderer):
    async def uneven(task, ctx):
        await asyncio.sleep(0.03 if task.id == "a" else 0)
        return await quick(task, ctx)

    finished = []
    groups = asyncio.run(
        collect(
            [task("a"), task("b")],
            uneven,
            base(renderer),
            size=2,
            score=ones,
            frames=lambda task: {"a": 4, "b": 8}[task.id],
            done=lambda place, group: finished.append((place, group.task.id)),
        )
    )
    assert [group.task.id for group in groups] == ["a", "b"]
    assert finished == [(1, "b"), (0, "a")]
    assert [[member.episode.frames for member in group.members] for group in groups] == [[4, 4], [8, 8]]


@pytest.mark.parametrize(("at_once", "most"), [(4, 4), (5, 4), (1, 2), (512, 12)])
def test_episodes_at_once_are_bounded(renderer, at_once, most):
    running = peak = 0

    async def counted(task, ctx):
        nonlocal running, peak
        running, peak = running + 1, max(peak, running + 1)
        await asyncio.sleep(0.002)
        running -= 1
        return await quick(task, ctx)

    tasks = [task(str(n)) for n in range(6)]
    asyncio.run(collect(tasks, counted, base(renderer), size=2, score=ones, at_once=at_once))
    assert peak == most


def test_watchers_are_told_whose_event_it_is(renderer):
    seen = set()
    ctx = base(renderer, watch=lambda event, data: seen.add((event, data["task"], data["index"])))
    asyncio.run(collect([task("a"), task("b")], parallel, ctx, size=2, score=ones))
    ends = {(name, index) for event, name, index in seen if event == "end"}
    assert ends == {("a", 0), ("a", 1), ("b", 0), ("b", 1)}


def test_the_same_run_gives_the_same_groups(renderer):
    def run():
        groups = asyncio.run(collect([task("a"), task("b")], parallel, base(renderer), size=3, score=ones))
        return [member.episode.ledger for group in groups for member in group.members]

    assert run() == run()


def test_what_can_not_be_graded_is_counted_and_no_member(renderer):
    async def unsure(episode, task):
        await asyncio.sleep(0)
        odd = int(episode.ledger.segments[0].tokens[0]) % 2
        return Ungraded(reason="the judge is away") if odd else Score(value=1.0, parts={"accuracy": 1.0})

    tasks = [task(str(n)) for n in range(8)]
    groups = asyncio.run(collect(tasks, quick, base(renderer), size=3, score=unsure))
    for group in groups:
        episodes = asyncio.run(run_group(group.task, quick, base(renderer), size=3))
        lost = [each.index for each in group.ungraded]
        assert lost == [i for i in range(3) if episodes[i].ledger.segments[0].tokens[0] % 2]
        assert [each.episode for each in group.ungraded] == [episodes[i] for i in lost]
        assert [each.episode for each in group.members] == [episodes[i] for i in range(3) if i not in lost]
        assert {each.reason for each in group.ungraded} <= {"the judge is away"}
        assert group.rewards == (1.0,) * len(group.members)
    assert {len(group.members) for group in groups} >= {1, 2}
    empty = Group(task=tasks[0], members=(), ungraded=groups[0].ungraded)
    assert (empty.rewards, empty.solved) == ((), 0.0)


def test_attempts_wait_for_their_rewards_together(renderer):
    async def slow(episode, task):
        nonlocal waiting, most
        waiting += 1
        most = max(most, waiting)
        await asyncio.sleep(0.01)
        waiting -= 1
        return ones(episode, task)

    waiting = most = 0
    (group,) = asyncio.run(collect([task("a")], quick, base(renderer), size=4, score=slow))
    assert (most, group.rewards) == (4, (1.0,) * 4)


def test_one_episode_alone(renderer):
    assert asyncio.run(run_episode(task("a"), parallel, base(renderer))).answer == "red"


# ---- time ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_episodes_seconds_begin_when_it_does(renderer):
    """Four groups, one after the other: each has its own time, however long it waited for its turn."""

    class Slow(scripted):
        async def generate(self, ledger, sampling):
            await asyncio.sleep(0.2)
            return await super().generate(ledger, sampling)

    engine = Slow(renderer, replies=lambda ledger: "</think><answer>red</answer>")
    tasks = [task(str(n)) for n in range(4)]
    groups = asyncio.run(collect(tasks, parallel, base(renderer, engine, seconds=0.5), size=1, score=ones, at_once=1))
    assert [group.rewards for group in groups] == [(1.0,)] * 4
    late = asyncio.run(run_episode(tasks[0], parallel, base(renderer, engine, seconds=0.1)))
    assert (late.end, late.error) == (End.ABORTED, "the episode's deadline passed before it had ended")
    assert late.ledger.segments  # the agent's own end: what was said is kept


def test_an_agent_that_knows_no_deadline_is_ended_too(renderer, monkeypatch):
    monkeypatch.setattr(rollouts, "GRACE", 0.05)

    async def hangs(task, ctx):
        await asyncio.sleep(60)

    episode = asyncio.run(run_episode(task("a"), hangs, base(renderer, seconds=0.05, frames=4)))
    assert (episode.end, episode.agent, episode.frames) == (End.ABORTED, "hangs", 4)
    assert "deadline" in episode.error


@pytest.mark.parametrize("error", [TimeoutError(), KeyError("media"), ZeroDivisionError("division by zero")])
def test_a_failure_of_the_agents_own_names_agent_and_task(renderer, error):
    async def fails(task, ctx):
        raise error

    with pytest.raises(ConfigError, match=r"^the agent fails failed on task a: ") as raised:
        asyncio.run(run_episode(task("a"), fails, base(renderer, seconds=5)))
    assert raised.value.__cause__ is error
