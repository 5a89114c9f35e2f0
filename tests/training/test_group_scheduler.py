"""The group scheduler: staleness, each prompt once, slow groups, resuming, failures, no task left running."""

import asyncio
import random
from collections import Counter

import pytest
from error_cases import raises
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.config.schema import RlConfig
from saccade.errors import ConfigError
from saccade.ledger import Ledger
from saccade.metrics.episode_metrics import count_tokens
from saccade.training.group_scheduler import GroupScheduler, PendingGroup
from saccade.training.prompt_sampler import PromptSampler
from saccade.types import AnswerType, Episode, EpisodeStatus, Group, Score, ScoredEpisode, Task

WAIT_LIMIT = 300.0  # seconds, of a wait that should end at once


def build_group(prompt_index, status=EpisodeStatus.ANSWERED, version=None):
    task = Task(id=str(prompt_index), question="?", media=(), ground_truth="", answer_type=AnswerType.OPEN)
    ledger = Ledger().observe((1,) * (1 + prompt_index % 3))
    if version is not None:
        ledger = ledger.append_completion((2,), logprobs=(-1.0,), version=version)
    episode = Episode(task=task, environment="", ledger=ledger, turns=(), status=status)
    return Group(task=task, scored_episodes=(ScoredEpisode(episode=episode, score=Score(value=0.0)),))


class Rollouts:
    """Runs each group for `num_yields(prompt_index)` iterations of the event loop; records how they started and ended.

    With a `scheduler` each group ends with a token of the scheduler's version, which is recorded as the group's.
    """

    def __init__(self, num_yields=lambda prompt_index: 1, fail_at=None):
        self.num_yields, self.fail_at = num_yields, fail_at
        self.version_by_prompt, self.num_running, self.most_running, self.cancelled = {}, 0, 0, []
        self.ended, self.scheduler = set(), None

    async def run_group(self, prompt_index, version, on_discarded):
        self.version_by_prompt[prompt_index] = version
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            for _ in range(self.num_yields(prompt_index)):
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.cancelled.append(prompt_index)
            raise
        finally:
            self.num_running -= 1
        if prompt_index == self.fail_at:
            raise ConfigError("the environment failed", key="environment.name", value="broken")
        self.ended.add(prompt_index)
        if self.scheduler is None:
            return build_group(prompt_index)
        self.version_by_prompt[prompt_index] = self.scheduler._version
        return build_group(prompt_index, version=self.scheduler._version)


def take_prompts(prompt_sampler, count):
    prompt_indices, prompt_sampler = prompt_sampler.take(count)
    return prompt_indices, (), prompt_sampler


def build_scheduler(rollouts, config, *, state=None, step=0):
    state = state or (PromptSampler(), ())
    return GroupScheduler(rollouts.run_group, take_prompts, *state, settings=config, version=step, next_step=step)


async def train(
    scheduler, config, *, step=0, end_step=None, between=lambda: 0, on_step=lambda step, prompt_indices: None
):
    """Take the groups of all steps, as `collect_batch` does; `between` returns a number of event loop iterations."""
    for number in range(step, config.steps if end_step is None else end_step):
        prompt_indices = [*await asyncio.wait_for(scheduler.take(number, config.prompts_per_step), WAIT_LIMIT)]
        await scheduler.cancel_stale()
        scheduler.complete_batch(())
        on_step(number, prompt_indices)
        for _ in range(between()):  # the policy update
            await asyncio.sleep(0)
        scheduler.set_version(number + 1)


CONFIGS = st.builds(
    lambda kind, **values: RlConfig(**kind, **values),
    st.sampled_from(
        [
            {},
            {"selection": {"over_provision": 1.5}},
            *({"streaming": True, "on_stale_group": value} for value in ("wait", "drop", "mask")),
        ]
    ),
    steps=st.integers(1, 8),
    prompts_per_step=st.integers(1, 4),
    max_staleness=st.integers(1, 4),
    max_groups_in_progress=st.integers(0, 6),
    max_queued_tokens=st.integers(0, 9),
)


@settings(deadline=None, max_examples=60)
@given(CONFIGS, st.integers(0, 2**32))
def test_ages_are_bounded_and_no_prompt_is_lost_or_repeated(config, seed):
    """Over random schedules, with a kill at a random point after which the run resumes from its last checkpoint."""
    rng, trained = random.Random(seed), {}  # step -> prompt indices
    checkpoints = [(0, (PromptSampler(), ()))]
    is_dropping = config.on_stale_group == "drop" or config.selection.over_provision > 1

    def check_state(scheduler, finished):
        sampler, groups = scheduler.state
        pending = [group.prompt_index for group in groups]
        known = Counter([*sampler.requeued_indices, *pending, *(p for step in finished for p in trained[step])])
        assert not known or max(known.values()) == 1
        if config.selection.over_provision == 1:
            assert known.keys() == set(range(sampler.next_index))
        return sampler, groups

    async def run(step, state, num_iterations):
        rollouts = Rollouts(lambda prompt_index: 40 if rng.random() < 0.15 else rng.randrange(6))
        scheduler = build_scheduler(rollouts, config, state=state, step=step)
        if config.on_stale_group == "mask":
            rollouts.scheduler = scheduler

        def end_step(number, prompt_indices):
            versions = {**rollouts.version_by_prompt, **{group.prompt_index: group.version for group in state[1]}}
            for prompt_index in prompt_indices:
                version = rollouts.version_by_prompt.get(prompt_index, versions[prompt_index])
                assert 0 <= number - version <= config.max_staleness
            assert len(prompt_indices) == config.prompts_per_step
            trained[number] = prompt_indices
            checkpoints.append((number + 1, check_state(scheduler, range(number + 1))))

        training = asyncio.ensure_future(
            train(scheduler, config, step=step, between=lambda: rng.randrange(12), on_step=end_step)
        )
        ended = [set(), set(), set()]  # of the last iterations: the scheduler has a group one or two after its end
        for _ in range(num_iterations):
            ended = [*ended[1:], {*rollouts.ended}]
            await asyncio.sleep(0)
            if training.done():
                break
            finished = range(checkpoints[-1][0])
            _, groups = check_state(scheduler, finished)  # at every moment no group that has ended is lost
            if not is_dropping:
                trained_indices = {prompt_index for number in finished for prompt_index in trained[number]}
                assert ended[0] - trained_indices <= {group.prompt_index for group in groups}
        else:
            training.cancel()
        await asyncio.gather(training, return_exceptions=True)
        await scheduler.close()
        if training.done() and not training.cancelled():
            training.result()
        assert rollouts.num_running == 0
        limit = config.max_groups_in_progress
        assert not limit or rollouts.most_running <= limit
        return training.done() and not training.cancelled()

    asyncio.run(run(0, (PromptSampler(), ()), rng.randrange(1, 200)))
    step, state = checkpoints[rng.randrange(len(checkpoints))]  # a run may save more rarely than every step
    del checkpoints[1:]
    checkpoints[0] = (step, state)
    trained = {number: prompt_indices for number, prompt_indices in trained.items() if number < step}
    assert asyncio.run(run(step, state, 20_000))
    assert sorted(trained) == list(range(config.steps))
    prompt_indices = [prompt_index for step_indices in trained.values() for prompt_index in step_indices]
    assert len(set(prompt_indices)) == len(prompt_indices)
    if not is_dropping:  # nothing was started that no step trains on
        assert sorted(prompt_indices) == list(range(config.steps * config.prompts_per_step))


def test_a_slow_group_is_passed_over_until_its_last_step():
    """Position 0 ends after the others of three steps, so the third step, the last one that may train on it, waits."""
    taken, may_end = [], asyncio.Event()

    class SlowFirst(Rollouts):
        async def run_group(self, prompt_index, version, on_discarded):
            if prompt_index == 0:
                await may_end.wait()
            return await super().run_group(prompt_index, version, on_discarded)

    async def run():
        config = RlConfig(steps=6, prompts_per_step=2, max_staleness=2, streaming=True, max_groups_in_progress=3)
        scheduler = build_scheduler(SlowFirst(), config)
        task = asyncio.create_task(
            train(scheduler, config, on_step=lambda step, prompt_indices: taken.append(prompt_indices))
        )
        for _ in range(200):
            await asyncio.sleep(0)
        assert len(taken) == 2
        may_end.set()
        await task
        await scheduler.close()

    asyncio.run(run())
    assert 0 in taken[2]
    assert sorted(prompt_index for prompt_indices in taken for prompt_index in prompt_indices) == list(range(12))


def test_a_step_takes_the_oldest_group_also_if_its_prompt_was_drawn_later():
    """Prompt 0 was requeued and started again with newer weights than prompt 1."""

    async def run():
        config = RlConfig(steps=9, prompts_per_step=1, max_staleness=1, streaming=True)
        groups = [
            PendingGroup(prompt_index=number, version=1 - number, group=build_group(number)) for number in range(2)
        ]
        scheduler = build_scheduler(Rollouts(), config, state=(PromptSampler(next_index=2), groups), step=1)
        prompt_indices = [*await asyncio.wait_for(scheduler.take(1, 1), WAIT_LIMIT)]
        await scheduler.close()
        return prompt_indices

    assert asyncio.run(run()) == [1]


def test_tokens_of_waiting_groups_are_bounded():
    """One group at a time is started until those that wait have 5 tokens, of 1 to 3 each; again after every step."""
    num_tokens = []

    async def run():
        config = RlConfig(
            steps=20,
            prompts_per_step=2,
            max_staleness=4,
            streaming=True,
            max_groups_in_progress=1,
            max_queued_tokens=5,
        )
        scheduler = build_scheduler(Rollouts(), config)

        for step in range(6):
            await train(scheduler, config, step=step, end_step=step + 1, between=lambda: 100)
            num_tokens.append(count_tokens(pending.group for pending in scheduler.state[1]))
        await scheduler.close()

    asyncio.run(run())
    assert all(5 <= count < 5 + 3 for count in num_tokens)
    assert len(num_tokens) == 6


def test_a_slow_group_that_ends_before_its_last_step_is_not_dropped():
    """Its deadline comes before those of newer groups that have ended."""
    taken, cancelled, may_end = [], [], asyncio.Event()

    class SlowFirst(Rollouts):
        async def run_group(self, prompt_index, version, on_discarded):
            if prompt_index == 0:
                await may_end.wait()
            return await super().run_group(prompt_index, version, on_discarded)

    async def run():
        config = RlConfig(
            steps=6,
            prompts_per_step=1,
            max_staleness=2,
            streaming=True,
            on_stale_group="drop",
            max_groups_in_progress=2,
        )
        rollouts = SlowFirst()
        scheduler = build_scheduler(rollouts, config)
        for step in range(3):
            taken.extend(await asyncio.wait_for(scheduler.take(step, 1), WAIT_LIMIT))
            cancelled.extend((await scheduler.cancel_stale())[0])
            scheduler.complete_batch(())
            scheduler.set_version(step + 1)
            for _ in range(50):  # newer groups end
                await asyncio.sleep(0)
            if step == 1:
                assert len(scheduler.state[1]) >= 1
                may_end.set()
            for _ in range(50):
                await asyncio.sleep(0)
        await scheduler.close()

    asyncio.run(run())
    assert cancelled == []
    assert taken[2] == 0


def test_groups_with_masked_tokens_hold_up_no_step():
    """Two groups end after their last step; later steps train on them, as groups of their newest tokens."""
    taken, num_runs, may_end = [], Counter(), asyncio.Event()

    class SlowFirst(Rollouts):
        async def run_group(self, prompt_index, version, on_discarded):
            num_runs[prompt_index] += 1
            if prompt_index < 2:
                await may_end.wait()
            return await super().run_group(prompt_index, version, on_discarded)

    async def run():
        config = RlConfig(
            steps=8,
            prompts_per_step=1,
            max_staleness=2,
            streaming=True,
            on_stale_group="mask",
            max_groups_in_progress=3,
        )
        rollouts = SlowFirst()
        scheduler = rollouts.scheduler = build_scheduler(rollouts, config)
        await train(scheduler, config, end_step=4, on_step=lambda step, prompt_indices: taken.extend(prompt_indices))
        assert not {0, 1} & {*taken}  # their start is 4 versions old
        may_end.set()
        await train(
            scheduler,
            config,
            step=4,
            between=lambda: 9,
            on_step=lambda step, prompt_indices: taken.extend(prompt_indices),
        )
        await scheduler.close()

    asyncio.run(run())
    assert {0, 1} <= {*taken[4:]}
    assert len(taken) == 8
    assert {*num_runs.values()} == {1}


def test_a_group_that_is_too_slow_is_dropped_and_its_prompt_drawn_again():
    taken, num_runs, schedulers, states = [], Counter(), [], []

    class StuckFirst(Rollouts):
        async def run_group(self, prompt_index, version, on_discarded):
            num_runs[prompt_index] += 1
            if prompt_index == 0 and num_runs[0] == 1:
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    states.append(schedulers[0].state)  # as a run that is stopped now saves it
                    on_discarded(build_group(0).scored_episodes[0].episode)
                    raise
            return await super().run_group(prompt_index, version, on_discarded)

    async def run():
        config = RlConfig(
            steps=8,
            prompts_per_step=2,
            max_staleness=1,
            streaming=True,
            on_stale_group="drop",
            max_groups_in_progress=3,
        )
        scheduler = build_scheduler(StuckFirst(), config)
        schedulers.append(scheduler)
        cancelled = []
        for step in range(config.steps):
            taken.append([*await asyncio.wait_for(scheduler.take(step, 2), WAIT_LIMIT)])
            cancelled.append(await scheduler.cancel_stale())
            scheduler.complete_batch(())
            scheduler.set_version(step + 1)
        await scheduler.close()
        return cancelled

    cancelled = asyncio.run(run())
    assert [(prompt_indices, len(episodes)) for prompt_indices, episodes in cancelled if prompt_indices] == [([0], 1)]
    assert [prompt_indices for prompt_indices, _ in cancelled].index([0]) == 1
    assert num_runs[0] == 2
    ((sampler, _),) = states
    assert 0 in sampler.requeued_indices
    assert any(0 in prompt_indices for prompt_indices in taken[2:])


@pytest.mark.parametrize("is_streaming", [False, True])
def test_a_failure_is_raised_and_no_task_is_left(is_streaming):
    config = RlConfig(steps=9, prompts_per_step=2, max_staleness=2, streaming=is_streaming)
    rollouts = Rollouts(lambda prompt_index: 10**6 if prompt_index == 6 else 1, fail_at=5)

    async def run():
        scheduler = build_scheduler(rollouts, config)
        try:
            await train(scheduler, config, on_step=lambda step, prompt_indices: trained.extend(prompt_indices))
        finally:
            states.append(scheduler.state)
            await scheduler.close()
            states.append(scheduler.state)
            assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []

    states, trained = [], []
    with raises(ConfigError, key="environment.name", value="broken"):
        asyncio.run(run())
    assert rollouts.num_running == 0
    for sampler, groups in states:  # no prompt is lost, not the one that failed either
        known = [*sampler.requeued_indices, *(group.prompt_index for group in groups), *trained]
        assert sorted(known) == list(range(sampler.next_index))
        assert 5 in sampler.requeued_indices


def test_groups_that_failed_are_begun_again_when_a_run_resumes():
    class Failing(Rollouts):
        async def run_group(self, prompt_index, version, on_discarded):
            status = EpisodeStatus.ABORTED if prompt_index == 1 else EpisodeStatus.ANSWERED
            return build_group(prompt_index, status)

    async def run():
        scheduler = build_scheduler(Failing(), RlConfig(steps=9, prompts_per_step=2, max_staleness=1, streaming=True))
        await asyncio.wait_for(scheduler.take(0, 2), WAIT_LIMIT)
        state = scheduler.state  # before the batch is complete
        await scheduler.close()
        return state

    sampler, groups = asyncio.run(run())
    assert 1 in sampler.requeued_indices
    assert 0 in {pending.prompt_index for pending in groups}


def test_a_resumed_run_drops_groups_that_are_too_old():
    async def run():
        config = RlConfig(steps=9, prompts_per_step=1, max_staleness=3, streaming=True)
        scheduler = build_scheduler(Rollouts(), config)
        await train(scheduler, config, end_step=2, between=lambda: 20)
        state = scheduler.state
        await scheduler.close()
        stricter = config.model_copy(update={"max_staleness": 1})
        return state, build_scheduler(Rollouts(), stricter, state=state, step=2).state

    (sampler, groups), (stricter_sampler, kept_groups) = asyncio.run(run())
    assert len(groups) > len(kept_groups) > 0
    assert all(pending.version >= 1 for pending in kept_groups)
    dropped = {pending.prompt_index for pending in groups} - {pending.prompt_index for pending in kept_groups}
    assert dropped <= {*stricter_sampler.requeued_indices}
    assert stricter_sampler.next_index == sampler.next_index


def test_without_streaming_groups_start_together():
    """The groups of the next step start once the last group of this one has ended."""
    started = []

    class Recording(Rollouts):
        async def run_group(self, prompt_index, version, on_discarded):
            started.append((prompt_index, frozenset(self.ended)))
            return await super().run_group(prompt_index, version, on_discarded)

    async def run():
        config = RlConfig(steps=4, prompts_per_step=3, max_staleness=2)
        rng = random.Random(0)
        scheduler = build_scheduler(Recording(lambda prompt_index: rng.randrange(1, 9)), config)
        taken = []
        await train(
            scheduler, config, between=lambda: 5, on_step=lambda step, prompt_indices: taken.append(prompt_indices)
        )
        await scheduler.close()
        return taken

    assert asyncio.run(run()) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    assert all(ended == frozenset(range(prompt_index - prompt_index % 3)) for prompt_index, ended in started)


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"streaming": True}, "rl.streaming"),
        ({"on_stale_group": "drop", "max_staleness": 1}, "rl.on_stale_group"),
        ({"on_stale_group": "mask", "max_staleness": 1}, "rl.on_stale_group"),
        (
            {"streaming": True, "max_staleness": 1, "selection": {"over_provision": 1.5}},
            "rl.selection.over_provision",
        ),
    ],
)
def test_settings_that_contradict_streaming_are_refused(values, key):
    with raises(ConfigError, key=key):
        RlConfig(**values)
