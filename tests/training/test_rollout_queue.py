"""The rollout queue: order, maximum lag, lockstep and overlap, failures, and no task left running."""

import asyncio
import time
from dataclasses import dataclass, replace

import pytest
from error_cases import raises
from hypothesis import given, settings
from hypothesis import strategies as st
from training_cases import RecordingEngine, alternate, with_reward
from virtual_time import run_in_virtual_time

from saccade.engines.scripted import Scripted
from saccade.errors import ConfigError, EngineError
from saccade.protocols import Done, Environment, Observation
from saccade.rollouts.restart_on_update import RestartOnUpdate
from saccade.training import checkpoint, policy_update, rl
from saccade.training.optimizer import Optimizer
from saccade.training.prompt_sampler import PromptSampler
from saccade.training.rollout_batch import RolloutBatch
from saccade.training.rollout_queue import RolloutQueue
from saccade.training.validation import ValidationSchedule
from saccade.types import EpisodeStatus, Message
from saccade.utils.async_utils import cancel_on_exit


def make_batch(step):
    return RolloutBatch(step=step, groups=(), num_sampled_tokens=10, metrics={})


class FakeCollector:
    """Collects each batch in `num_yields[step]` iterations of the event loop; records the version at each start."""

    def __init__(self, num_yields=(), fail_at=None):
        self.started, self.finished, self.version = [], [], 0
        self.num_yields, self.fail_at, self.was_cancelled = dict(enumerate(num_yields)), fail_at, False

    async def __call__(self, prompt_sampler, step):
        self.started.append((step, self.version))
        try:
            for _ in range(self.num_yields.get(step, 1)):
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise
        if step == self.fail_at:
            raise EngineError("the servers are down")
        self.finished.append(step)
        return make_batch(step), PromptSampler(next_position=prompt_sampler.next_position + 1)


async def consume(collector, *, end_step, max_lag, lockstep, batches=(), num_yields=(), num_steps=None):
    """Get all batches (or `num_steps`); return (step, number of batches queued behind it) of each, and the queue."""
    received, version = [], 0
    queue = RolloutQueue(
        collector, PromptSampler(), batches, version=0, end_step=end_step, max_lag=max_lag, lockstep=lockstep
    )
    async with cancel_on_exit(asyncio.create_task(queue.collect_batches())):
        while version < (end_step if num_steps is None else num_steps):
            batch = await queue.get()
            received.append((batch.step, len(queue.state[1])))
            for _ in range(dict(enumerate(num_yields)).get(version, 0)):
                await asyncio.sleep(0)
            version += 1
            collector.version = version
            queue.set_version(version)
    return received, queue


def test_without_lag_collector_and_trainer_alternate():
    collector = FakeCollector()
    received, queue = asyncio.run(consume(collector, end_step=4, max_lag=0, lockstep=True))
    assert collector.started == [(0, 0), (1, 1), (2, 2), (3, 3)]
    assert received == [(0, 0), (1, 0), (2, 0), (3, 0)]
    assert queue.state == (PromptSampler(next_position=4), ())
    assert queue.num_sampled_tokens == 40


def test_in_lockstep_every_batch_has_exactly_the_maximum_lag():
    collector = FakeCollector()
    asyncio.run(consume(collector, end_step=6, max_lag=2, lockstep=True))
    assert collector.started == [(0, 0), (1, 0), (2, 0), (3, 1), (4, 2), (5, 3)]


def test_without_lockstep_the_trainer_gets_a_batch_at_once():
    received, _ = asyncio.run(consume(FakeCollector(), end_step=6, max_lag=2, lockstep=False))
    assert [step for step, _ in received] == list(range(6))
    assert received[0] == (0, 0)


@settings(deadline=None)
@given(st.data(), st.integers(0, 4), st.booleans())
def test_batches_arrive_in_order_within_the_maximum_lag(data, max_lag, lockstep):
    yields_st = st.lists(st.integers(0, 6), min_size=8, max_size=8)
    collector = FakeCollector(data.draw(yields_st))
    received, queue = asyncio.run(
        consume(collector, end_step=8, max_lag=max_lag, lockstep=lockstep, num_yields=data.draw(yields_st))
    )
    assert [step for step, _ in received] == list(range(8))
    assert all(0 <= step - version <= max_lag for step, version in collector.started)
    assert max(num_queued for _, num_queued in received) <= max_lag
    assert queue.state == (PromptSampler(next_position=8), ())


@dataclass(frozen=True)
class SizedBatch:
    """The fields of a rollout batch that the queue reads."""

    step: int
    num_tokens: int
    num_sampled_tokens: int = 10


@settings(deadline=None)
@given(st.data(), st.integers(1, 5), st.integers(1, 40), st.booleans())
def test_no_batch_is_started_while_the_queue_is_full(data, max_lag, max_tokens, lockstep):
    """With batches of 1 to 20 tokens, all are received, and the queue never exceeds `max_tokens` plus one batch."""
    sizes = data.draw(st.lists(st.integers(1, 20), min_size=8, max_size=8))
    collector = FakeCollector(data.draw(st.lists(st.integers(0, 6), min_size=8, max_size=8)))
    received, num_queued_at_start = set(), []

    async def collect(prompt_sampler, step):
        queued = [number for number in range(len(collector.finished)) if number not in received]
        num_queued_at_start.append(sum(sizes[number] for number in queued))
        _, prompt_sampler = await collector(prompt_sampler, step)
        return SizedBatch(step=step, num_tokens=sizes[step]), prompt_sampler

    async def consume_all():
        queue = RolloutQueue(
            collect,
            PromptSampler(),
            (),
            version=0,
            end_step=8,
            max_lag=max_lag,
            lockstep=lockstep,
            max_tokens=max_tokens,
        )
        async with cancel_on_exit(asyncio.create_task(queue.collect_batches())):
            for version in range(1, 9):
                received.add((await queue.get()).step)
                assert sum(batch.num_tokens for batch in queue.state[1]) < max_tokens + max(sizes)
                await asyncio.sleep(0)
                queue.set_version(version)

    asyncio.run(asyncio.wait_for(consume_all(), 300))
    assert received == set(range(8))
    assert all(num_tokens < max_tokens for num_tokens in num_queued_at_start)


def test_batches_of_a_checkpoint_come_first():
    collector, batches = FakeCollector(), [make_batch(0), make_batch(1)]
    received, _ = asyncio.run(consume(collector, end_step=4, max_lag=2, lockstep=True, batches=batches))
    assert [step for step, _ in received] == [0, 1, 2, 3]
    assert [step for step, _ in collector.started] == [2, 3]


def test_a_failure_is_raised_after_the_complete_batches():
    collector, received = FakeCollector(fail_at=2), []

    async def consume_all():
        queue = RolloutQueue(collector, PromptSampler(), (), version=0, end_step=9, max_lag=9, lockstep=False)
        async with cancel_on_exit(asyncio.create_task(queue.collect_batches())):
            while True:
                received.append((await queue.get()).step)

    with raises(EngineError):
        asyncio.run(consume_all())
    assert received == [0, 1]


def test_leaving_the_queue_cancels_its_task():
    collector = FakeCollector(num_yields=[0, 10**6])

    async def run():
        await consume(collector, end_step=9, max_lag=3, lockstep=False, num_steps=1, num_yields=[5])
        return [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]

    assert asyncio.run(run()) == []
    assert collector.was_cancelled
    assert collector.finished == [0]


# ---- in a run --------------------------------------------------------------------------------------------------------

NUM_REQUESTS = 4  # of a batch: two prompts, two episodes each, one reply each
OVERLAPPED = (
    "rl={group_size: 2, steps: 6, prompts_per_step: 2, max_staleness: 1, save_every: 1, pack_length: 512}",
    "sampling.max_tokens=24",
)


def load_overlapped(workspace, *overrides, weights=None):
    """Load components whose engine is scripted, so that it doesn't share the trainer's weights."""
    components = with_reward(workspace.load_components(*OVERLAPPED, *overrides, weights=weights), alternate)
    engine = Scripted(components.backbone.renderer, replies=lambda ledger: "red</think><answer>red</answer>")
    return replace(components, engine=engine)


def delay_updates(monkeypatch, engine, num_updates, num_requests_ahead):
    """Delay each update but the last until episodes of the next batch have made so many of their requests."""
    update_policy, updates = rl.update_policy, []

    def update_late(*arguments):
        updates.append(1)
        num_required = NUM_REQUESTS * len(updates) + num_requests_ahead
        deadline = time.monotonic() + 60
        while len(updates) < num_updates and len({sampling.seed for sampling in engine.requests}) < num_required:
            assert time.monotonic() < deadline, "no episode runs during the policy update"
            time.sleep(0.01)
        return update_policy(*arguments)

    monkeypatch.setattr(rl, "update_policy", update_late)


@pytest.mark.slow
def test_rollouts_overlap_policy_updates(workspace, tmp_path, monkeypatch):
    components = load_overlapped(workspace)
    engine = RecordingEngine(components.engine)
    delay_updates(monkeypatch, engine, num_updates=6, num_requests_ahead=1)
    rows = workspace.run_rl(replace(components, engine=engine), tmp_path)
    assert [(row["step"], row["updates"]) for row in rows] == [(step, 1) for step in range(1, 7)]
    assert [row["staleness_max"] for row in rows] == [0.0, *[1.0] * 5]
    assert len(engine.requests) == 6 * NUM_REQUESTS


class MixedVersionEngine(RecordingEngine):
    """After the first batch, a request waits for new weights and gets a reply of both versions; a repeated one not."""

    async def generate(self, request):
        first_version = self.version
        should_wait = len(self.requests) >= NUM_REQUESTS and request.sampling not in self.requests
        self.requests.append(request.sampling)
        deadline = time.monotonic() + 60
        while should_wait and self.version == first_version:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.001)
        for _ in range(20):  # a restart cancels the request in one of these iterations
            await asyncio.sleep(0)
        completion = await self.engine.generate(request)
        half = len(completion.tokens) // 2
        versions = (first_version,) * half + (self.version,) * (len(completion.tokens) - half)
        token_versions = versions if len(set(versions)) > 1 else ()
        completion = replace(completion, version=versions[-1], token_versions=token_versions)
        self.completions.append((request.ledger, completion))
        return completion


@pytest.mark.slow
@pytest.mark.parametrize("on_weight_update", ["continue", "restart"])
def test_episodes_in_progress_continue_or_restart_on_a_weight_update(
    workspace, tmp_path, monkeypatch, on_weight_update
):
    """If they continue, half of each reply is stale, and the loss gets this per token; if they restart, none is."""
    components = load_overlapped(workspace, "rl.steps=3", f"rl.on_weight_update={on_weight_update}")
    engine, compute_policy_loss = MixedVersionEngine(components.engine), policy_update.compute_policy_loss
    loss_inputs = []

    def record_inputs(*arguments, **settings):
        loss_inputs.append((settings["stale_N"].tolist(), settings["rollout_logp_N"].tolist()))
        return compute_policy_loss(*arguments, **settings)

    monkeypatch.setattr(policy_update, "compute_policy_loss", record_inputs)
    delay_updates(monkeypatch, engine, num_updates=3, num_requests_ahead=NUM_REQUESTS)
    rows = workspace.run_rl(replace(components, engine=engine), tmp_path)
    assert len(rows) == 3
    _, completion = engine.completions[0]
    count = len(completion.tokens)
    half_stale = [True] * (count // 2) + [False] * (count - count // 2)
    for stale, logprobs in loss_inputs[1:]:
        assert stale == (
            half_stale * NUM_REQUESTS if on_weight_update == "continue" else [False] * NUM_REQUESTS * count
        )
        assert logprobs == pytest.approx(completion.logprobs * NUM_REQUESTS)
    num_restarted = sum(row["episodes/restarted"] for row in rows)
    assert num_restarted == (0 if on_weight_update == "continue" else 2 * NUM_REQUESTS)
    assert sum(row["discarded_tokens"] for row in rows) == 0  # no restarted episode had a complete reply


@pytest.mark.slow
@pytest.mark.parametrize("on_weight_update", ["continue", "restart"])
def test_weight_syncs_and_checkpoints_do_not_count_towards_the_timeout(
    workspace, tmp_path, monkeypatch, on_weight_update
):
    """Both take longer than the timeout of an episode in progress."""
    save_checkpoint = checkpoint.save_checkpoint

    def save_slowly(*arguments, **settings):
        asyncio.get_running_loop().advance(5.5)
        save_checkpoint(*arguments, **settings)

    monkeypatch.setattr(checkpoint, "save_checkpoint", save_slowly)
    components = load_overlapped(workspace, "sampling.episode_timeout=5", f"rl.on_weight_update={on_weight_update}")

    class SlowSyncEngine(RecordingEngine):
        async def sync_weights(self, source, version):
            await asyncio.sleep(5.5)
            await super().sync_weights(source, version)

    components, may_finish = replace(components, engine=SlowSyncEngine(components.engine)), asyncio.Event()

    class WaitingEnvironment(Environment):
        async def reset(self, task, ctx):
            await may_finish.wait()
            return Observation(messages=(Message(role="user", parts=(task.question,)),))

        async def step(self, reply, ctx):
            return Done(status=EpisodeStatus.ANSWERED)

    async def run():
        restart_on_update = RestartOnUpdate()
        context = components.build_context(seed=1)
        rollout = asyncio.create_task(restart_on_update.run_episode(workspace.tasks[0], WaitingEnvironment, context))
        await asyncio.sleep(0)
        await rl.update_engine_weights(components, 1, restart_on_update)
        state = rl.TrainerState(
            num_finished_steps=1,
            prompt_sampler=PromptSampler(),
            pending_batches=(),
            initial_weights_folder=str(workspace.root / "model"),
        )
        optimizer = Optimizer(components.backbone.model, components.recipe.rl.optim, 1)
        rl.save_trainer_state(tmp_path, components, optimizer, state, ValidationSchedule())
        assert not rollout.done()
        may_finish.set()
        return await rollout

    assert run_in_virtual_time(run()).status is EpisodeStatus.ANSWERED


@pytest.mark.slow
def test_a_killed_run_resumes(workspace, tmp_path):
    rows = workspace.run_rl(load_overlapped(workspace), tmp_path, kill_at=3)
    last = checkpoint.find_newest_checkpoint(tmp_path)
    resumed_rows = workspace.run_rl(load_overlapped(workspace, weights=last.folder), tmp_path)
    assert [row["step"] for row in (*rows[: last.step], *resumed_rows)] == list(range(1, 7))


def test_max_staleness_needs_an_engine_with_separate_weights(workspace, tmp_path):
    components = workspace.load_components("rl.max_staleness=1")
    with raises(ConfigError, key="rl.max_staleness", value=1):
        asyncio.run(rl.train(components, workspace.tasks, folder=tmp_path, log_step=lambda values: None))


def test_staleness_is_either_bounded_or_simulated(workspace):
    with raises(ConfigError, key="rl.simulated_staleness", value=1):
        workspace.load_recipe("rl={simulated_staleness: 1, max_staleness: 1}")
