"""Groups and many groups: seeds, frame budgets, order, bounds, failures."""

import asyncio
import functools

import pytest
from error_cases import raises
from virtual_time import run_in_virtual_time

from saccade.engines.scripted import Scripted
from saccade.environments.tool_calling import ToolCalling
from saccade.errors import ConfigError, EngineError, MediaError
from saccade.protocols import Context, Done, Environment, Observation
from saccade.rewards.compose import score_each
from saccade.rollouts.collect import collect
from saccade.rollouts.runner import DEADLINE_ERROR, run_episode
from saccade.testing import FakeMediaLoader
from saccade.types import AnswerType, EpisodeStatus, Group, Media, Message, SamplingParams, Score, Task, Ungraded
from saccade.utils.hashing import derive_seed


def task(name, path="clip.mp4"):
    return Task(
        id=name, question=f"What is {name}?", media=(Media(path=path),), answer_type=AnswerType.OPEN, ground_truth="red"
    )


def base(renderer, engine=None, **changes):
    engine = engine or Scripted(renderer, replies=lambda ledger: "</think><answer>red</answer>")
    given = {
        "engine": engine,
        "renderer": renderer,
        "media": FakeMediaLoader(),
        "sampling": SamplingParams(),
        "seed": 3,
    }
    return Context(**{**given, **changes})


def score_answered(episode):
    return Score(value=float(episode.status is EpisodeStatus.ANSWERED))


ones = score_each(score_answered)


class Quick(Environment):
    """Needs no media; its prompt holds its seed; calls `hook(task, ctx)` first."""

    def __init__(self, hook=None):
        self.hook = hook

    async def reset(self, task, ctx):
        await asyncio.sleep(0)
        if self.hook is not None:
            await self.hook(task, ctx)
        return Observation(messages=(Message(role="user", parts=(f"{ctx.seed}",)),), num_frames=ctx.frame_budget)

    async def step(self, reply, ctx):
        return Done(status=EpisodeStatus.ANSWERED)


async def run_one_group(task, make_environment, context, *, group_size, **options):
    """Return the episodes of one task."""
    (group,) = await collect(
        [task], each_in(make_environment), context, group_size=group_size, score_fn=ones, **options
    )
    return [member.episode for member in group.scored_episodes]


def make_hooked(hook):
    """The environment of every task, which calls `hook(task, ctx)` at its reset."""
    return lambda task: functools.partial(Quick, hook)


def each_in(environment):
    return lambda task: environment


def test_seeds_are_digested_from_run_epoch_task_and_index(renderer):
    seeds = []

    async def note(task, ctx):
        seeds.append(ctx.seed)

    asyncio.run(run_one_group(task("a"), functools.partial(Quick, note), base(renderer), group_size=3, seed_salts=7))
    assert seeds == [derive_seed(3, 7, task("a").digest, index) for index in range(3)]


def test_a_group_shares_its_frame_budget_and_its_prompt(renderer):
    episodes = asyncio.run(run_one_group(task("a"), ToolCalling, base(renderer), group_size=4, frame_budgets=[8]))
    assert [episode.frame_budget for episode in episodes] == [8] * 4
    prompts = {id(episode.ledger.segments[0]) for episode in episodes}
    assert len(prompts) == 1  # the very same segment: rendered once


def test_the_budget_of_the_context_holds_where_none_is_drawn(renderer):
    episodes = asyncio.run(run_one_group(task("a"), Quick, base(renderer, frame_budget=16), group_size=2))
    assert [episode.frame_budget for episode in episodes] == [16, 16]


@pytest.mark.parametrize("error", [EngineError("the engine is gone"), MediaError("the file is gone")])
def test_a_failure_ends_the_episode_not_the_run(renderer, error):
    async def fail(task, ctx):
        if ctx.seed == derive_seed(3, 0, task.digest, 1):
            raise error

    episodes = asyncio.run(
        run_one_group(task("a"), functools.partial(Quick, fail), base(renderer, frame_budget=4), group_size=3)
    )
    assert [episode.status for episode in episodes] == [
        EpisodeStatus.ANSWERED,
        EpisodeStatus.ABORTED,
        EpisodeStatus.ANSWERED,
    ]
    assert (episodes[1].error, episodes[1].environment, episodes[1].frame_budget) == (str(error), "quick", 4)


def test_a_missing_file_ends_its_own_group_alone(renderer):
    tasks = [task("a"), task("b", "missing.mp4")]
    good, bad = asyncio.run(collect(tasks, each_in(ToolCalling), base(renderer), group_size=2, score_fn=ones))
    assert good.score_values == (1.0, 1.0)
    assert [member.episode.status for member in bad.scored_episodes] == [EpisodeStatus.ABORTED] * 2


def test_an_error_of_the_user_stops_everything(renderer):
    cancelled = []

    async def fail(task, ctx):
        if task.id == "b":
            raise ConfigError("fix me", key="rl.steps")
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(task.id)
            raise

    with raises(ConfigError, key="rl.steps"):
        asyncio.run(collect([task("a"), task("b")], make_hooked(fail), base(renderer), group_size=2, score_fn=ones))
    assert cancelled == ["a", "a"]


def test_groups_have_the_order_of_the_tasks_however_they_finish(renderer):
    finished, second_is_done = [], asyncio.Event()

    async def wait(task, ctx):
        if task.id == "a":
            await second_is_done.wait()

    def on_group_done(place, group):
        finished.append((place, group.task.id))
        second_is_done.set()

    groups = asyncio.run(
        collect(
            [task("a"), task("b")],
            make_hooked(wait),
            base(renderer),
            group_size=2,
            score_fn=ones,
            frame_budgets=(4, 8),
            on_group_done=on_group_done,
        )
    )
    assert [group.task.id for group in groups] == ["a", "b"]
    assert finished == [(1, "b"), (0, "a")]
    assert [[member.episode.frame_budget for member in group.scored_episodes] for group in groups] == [[4, 4], [8, 8]]


@pytest.mark.parametrize(("max_concurrency", "most"), [(4, 4), (5, 4), (1, 2), (512, 12)])
def test_episodes_at_once_are_bounded(renderer, max_concurrency, most):
    running = peak = 0

    async def count(task, ctx):
        nonlocal running, peak
        running, peak = running + 1, max(peak, running + 1)
        await asyncio.sleep(0.002)
        running -= 1

    tasks = [task(str(n)) for n in range(6)]
    run_in_virtual_time(
        collect(tasks, make_hooked(count), base(renderer), group_size=2, score_fn=ones, max_concurrency=max_concurrency)
    )
    assert peak == most


def test_events_name_their_task_and_index(renderer):
    seen = set()
    ctx = base(renderer, on_event=lambda event, data: seen.add((event, data["task"], data["index"])))
    asyncio.run(collect([task("a"), task("b")], each_in(ToolCalling), ctx, group_size=2, score_fn=ones))
    ends = {(name, index) for event, name, index in seen if event == "end"}
    assert ends == {("a", 0), ("a", 1), ("b", 0), ("b", 1)}


def test_the_same_run_gives_the_same_groups(renderer):
    def run():
        groups = asyncio.run(
            collect([task("a"), task("b")], each_in(ToolCalling), base(renderer), group_size=3, score_fn=ones)
        )
        return [member.episode.ledger for group in groups for member in group.scored_episodes]

    assert run() == run()


def test_ungraded_episodes_are_counted_and_no_members(renderer):
    async def unsure(episode):
        await asyncio.sleep(0)
        odd = sum(episode.ledger.segments[0].tokens) % 2
        return Ungraded(reason="the judge is away") if odd else Score(value=1.0, correct=1.0)

    tasks = [task(str(n)) for n in range(8)]
    groups = asyncio.run(collect(tasks, each_in(Quick), base(renderer), group_size=3, score_fn=score_each(unsure)))
    for group in groups:
        episodes = asyncio.run(run_one_group(group.task, Quick, base(renderer), group_size=3))
        lost = [episode.group_index for episode in group.ungraded]
        assert lost == [i for i in range(3) if sum(episodes[i].ledger.segments[0].tokens) % 2]
        assert [ungraded.episode.ledger for ungraded in group.ungraded] == [episodes[i].ledger for i in lost]
        assert [scored.episode.ledger for scored in group.scored_episodes] == [
            episodes[i].ledger for i in range(3) if i not in lost
        ]
        assert {ungraded.reason for ungraded in group.ungraded} <= {"the judge is away"}
        assert group.score_values == (1.0,) * len(group.scored_episodes)
    assert {len(group.scored_episodes) for group in groups} >= {1, 2}
    empty = Group(task=tasks[0], scored_episodes=(), ungraded=groups[0].ungraded)
    assert (empty.score_values, empty.solve_rate) == ((), 0.0)


class RecordingTemperatures(Scripted):
    """Records the temperature of each request."""

    async def generate(self, request):
        self.temperatures = [*getattr(self, "temperatures", ()), request.sampling.temperature]
        return await super().generate(request)


def collect_with_baseline(renderer, score_fn):
    engine = RecordingTemperatures(renderer, replies=lambda ledger: "red")
    options = {"group_size": 2, "score_fn": score_fn, "with_greedy_baseline": True}
    return engine, asyncio.run(collect([task("a")], each_in(Quick), base(renderer, engine), **options))


def test_a_group_may_have_a_greedy_baseline(renderer):
    """It is sampled at temperature 0, has the next index, seed and place in `max_concurrency`, and is scored alone."""
    sizes = []

    async def score(episodes):
        sizes.append(len(episodes))
        return await ones(episodes)

    engine, [group] = collect_with_baseline(renderer, score)
    assert (len(group.scored_episodes), group.greedy_baseline.score.value) == (2, 1.0)
    assert sorted(engine.temperatures) == [0.0, 1.0, 1.0]
    assert sizes == [2, 1]
    assert group.score_values == (1.0, 1.0)
    seeds = {derive_seed(3, 0, task("a").digest, index): index for index in range(3)}
    prompts = [renderer.decode(member.episode.ledger.input_ids()) for member in group.members]
    assert [next(index for seed, index in seeds.items() if str(seed) in prompt) for prompt in prompts] == [0, 1, 2]


def test_baselines_count_as_running_episodes(renderer):
    running = most = 0

    async def count(task, ctx):
        nonlocal running, most
        running, most = running + 1, max(most, running + 1)
        await asyncio.sleep(0)
        running -= 1

    options = {"group_size": 2, "score_fn": ones, "with_greedy_baseline": True, "max_concurrency": 4}
    asyncio.run(collect([task(name) for name in "abc"], make_hooked(count), base(renderer), **options))
    assert most == 3


def test_a_group_whose_baseline_is_ungraded_has_no_episodes(renderer):
    async def score(episodes):
        return [Ungraded(reason="no judge")] if len(episodes) == 1 else await ones(episodes)

    _, [group] = collect_with_baseline(renderer, score)
    assert (group.scored_episodes, group.greedy_baseline, len(group.ungraded)) == ((), None, 2)


def test_episodes_are_scored_concurrently(renderer):
    async def slow(episode):
        nonlocal waiting, most
        waiting += 1
        most = max(most, waiting)
        await asyncio.sleep(0.01)
        waiting -= 1
        return score_answered(episode)

    waiting = most = 0
    (group,) = run_in_virtual_time(
        collect([task("a")], each_in(Quick), base(renderer), group_size=4, score_fn=score_each(slow))
    )
    assert (most, group.score_values) == (4, (1.0,) * 4)


def test_one_episode_alone(renderer):
    assert asyncio.run(run_episode(task("a"), ToolCalling, base(renderer))).answer == "red"


# ---- time ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_timeout_of_an_episode_starts_with_it(renderer):
    """Four groups, one after the other: each has its own time, however long it waited for its turn."""

    class Slow(Scripted):
        async def generate(self, request):
            await asyncio.sleep(0.2)
            return await super().generate(request)

    engine = Slow(renderer, replies=lambda ledger: "</think><answer>red</answer>")
    tasks = [task(str(n)) for n in range(4)]
    groups = run_in_virtual_time(
        collect(
            tasks,
            each_in(ToolCalling),
            base(renderer, engine, episode_timeout=0.5),
            group_size=1,
            score_fn=ones,
            max_concurrency=1,
        )
    )
    assert [group.score_values for group in groups] == [(1.0,)] * 4
    episode = run_in_virtual_time(run_episode(tasks[0], ToolCalling, base(renderer, engine, episode_timeout=0.1)))
    assert (episode.status, episode.error) == (EpisodeStatus.ABORTED, DEADLINE_ERROR)
    assert episode.ledger.segments  # the environment ends the episode itself and keeps its ledger


def test_an_environment_that_hangs_is_ended_at_the_deadline(renderer):
    async def hang(task, ctx):
        await asyncio.sleep(60)

    ctx = base(renderer, episode_timeout=0.05, frame_budget=4)
    episode = run_in_virtual_time(run_episode(task("a"), functools.partial(Quick, hang), ctx))
    assert (episode.status, episode.environment, episode.error) == (EpisodeStatus.ABORTED, "quick", DEADLINE_ERROR)


@pytest.mark.parametrize("fails_at", ["reset", "close"])
@pytest.mark.parametrize("is_late", [False, True])
def test_only_an_episode_that_has_not_ended_is_aborted(renderer, fails_at, is_late):
    async def fail():
        await asyncio.sleep(60 if is_late else 0)
        raise MediaError("the file is gone")

    class Failing(Quick):
        async def reset(self, task, ctx):
            if fails_at == "reset":
                await fail()
            return await super().reset(task, ctx)

        async def close(self):
            if fails_at == "close":
                await fail()

    events = []
    ctx = base(renderer, episode_timeout=5.0, frame_budget=4, on_event=lambda kind, event: events.append((kind, event)))
    episode = run_in_virtual_time(run_episode(task("a"), Failing, ctx))
    if fails_at == "close":
        assert (episode.status, episode.error) == (EpisodeStatus.ANSWERED, None)
    else:
        error = DEADLINE_ERROR if is_late else "the file is gone"
        assert (episode.status, episode.error) == (EpisodeStatus.ABORTED, error)
    assert episode.frame_budget == 4
    assert events[-1] == ("end", {"episode": episode})


@pytest.mark.parametrize("error", [TimeoutError(), KeyError("media"), ZeroDivisionError("division by zero")])
def test_an_exception_of_the_environment_names_environment_and_task(renderer, error):
    async def fail(task, ctx):
        raise error

    with raises(ConfigError, key="environment.name", value="quick") as raised:
        asyncio.run(run_episode(task("a"), functools.partial(Quick, fail), base(renderer, episode_timeout=5)))
    assert raised.value.__cause__ is error
