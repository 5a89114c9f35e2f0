"""The batch collector: order and simulated_staleness of batches; runs whose rollouts overlap policy updates."""

import asyncio
import time
from dataclasses import replace

import pytest
from error_cases import raises
from training_cases import RecordingEngine, alternate, with_reward
from virtual_time import run_in_virtual_time

from saccade.config.schema import CheckpointConfig
from saccade.engines.scripted import Scripted
from saccade.errors import ConfigError
from saccade.protocols import Done, Environment, Observation
from saccade.rollouts.restart_on_sync import RestartOnSync
from saccade.training import checkpoint, policy_update, rl
from saccade.training.batch_collector import BatchCollector
from saccade.training.checkpoint_writer import CheckpointWriter
from saccade.training.distributed.vlm import create_optimizer
from saccade.training.prompt_sampler import PromptSampler
from saccade.training.rollout_batch import RolloutBatch
from saccade.training.validation import ValidationSchedule
from saccade.types import EpisodeStatus, Message


def make_batch(step):
    return RolloutBatch(step=step, groups=(), num_sampled_tokens=10, metrics={})


class FakeCollectBatch:
    """Collects batches; records the version at which each was started."""

    def __init__(self):
        self.started, self.version = [], 0

    async def __call__(self, prompt_sampler, step):
        self.started.append((step, self.version))
        return make_batch(step), PromptSampler(next_index=prompt_sampler.next_index + 1)


async def consume(collect_batch, *, end_step, simulated_staleness, batches=(), max_tokens=0):
    """Get all batches; return (step, number of batches that wait behind it) of each, and the collector."""
    received, version = [], 0
    collector = BatchCollector(
        collect_batch,
        PromptSampler(),
        batches,
        version=0,
        end_step=end_step,
        simulated_staleness=simulated_staleness,
        max_tokens=max_tokens,
    )
    while version < end_step:
        batch = await collector.collect()
        received.append((batch.step, len(collector.state[1])))
        version += 1
        collect_batch.version = version
    return received, collector


def test_without_lag_collecting_and_training_alternate():
    collect_batch = FakeCollectBatch()
    received, collector = asyncio.run(consume(collect_batch, end_step=4, simulated_staleness=0))
    assert collect_batch.started == [(0, 0), (1, 1), (2, 2), (3, 3)]
    assert received == [(0, 0), (1, 0), (2, 0), (3, 0)]
    assert collector.state == (PromptSampler(next_index=4), (), ())
    assert collector.num_sampled_tokens == 40


def test_every_batch_has_exactly_the_simulated_staleness():
    collect_batch = FakeCollectBatch()
    asyncio.run(consume(collect_batch, end_step=6, simulated_staleness=2))
    assert collect_batch.started == [(0, 0), (1, 0), (2, 0), (3, 1), (4, 2), (5, 3)]


def test_batches_of_a_checkpoint_come_first():
    collect_batch, batches = FakeCollectBatch(), [make_batch(0), make_batch(1)]
    received, _ = asyncio.run(consume(collect_batch, end_step=4, simulated_staleness=2, batches=batches))
    assert [step for step, _ in received] == [0, 1, 2, 3]
    assert [step for step, _ in collect_batch.started] == [2, 3]


# ---- in a run --------------------------------------------------------------------------------------------------------

NUM_REQUESTS = 4  # of a batch: two prompts, two episodes each, one reply each
OVERLAPPED = (
    "rl={group_size: 2, steps: 6, prompts_per_step: 2, max_staleness: 1, save_every: 1, pack_length: 512}",
    "sampling.max_tokens=24",
)


def load_overlapped(workspace, *overrides, weights=None):
    """Load components whose engine is scripted, so that it doesn't share the trainer's weights."""
    components = with_reward(workspace.load_components(*OVERLAPPED, *overrides, weights=weights), alternate)
    engine = Scripted(components.vlm.renderer, replies=lambda ledger: "red</think><answer>red</answer>")
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
@pytest.mark.parametrize("is_streaming", [False, True])
def test_rollouts_overlap_policy_updates(workspace, tmp_path, monkeypatch, is_streaming):
    components = load_overlapped(workspace, f"rl.streaming={is_streaming}")
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
@pytest.mark.parametrize("episodes_on_sync", ["continue", "restart"])
def test_episodes_in_progress_continue_or_restart_on_a_weight_update(
    workspace, tmp_path, monkeypatch, episodes_on_sync
):
    """If they continue, half of each reply is stale, and the loss gets this per token; if they restart, none is."""
    components = load_overlapped(workspace, "rl.steps=3", f"rl.episodes_on_sync={episodes_on_sync}")
    engine, compute_policy_loss = MixedVersionEngine(components.engine), policy_update.compute_policy_loss
    loss_inputs = []

    def record_inputs(*arguments, **settings):
        loss_inputs.append((settings["stale_N"].tolist(), settings["engine_logp_N"].tolist()))
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
            half_stale * NUM_REQUESTS if episodes_on_sync == "continue" else [False] * NUM_REQUESTS * count
        )
        assert logprobs == pytest.approx(completion.logprobs * NUM_REQUESTS)
    num_restarted = sum(row["episodes/restarted"] for row in rows)
    assert num_restarted == (0 if episodes_on_sync == "continue" else 2 * NUM_REQUESTS)
    assert sum(row["restart_discarded_tokens"] for row in rows) == 0  # no restarted episode had a complete reply


@pytest.mark.slow
@pytest.mark.parametrize("is_streaming", [False, True])
def test_groups_start_while_a_checkpoint_is_written(workspace, tmp_path, monkeypatch, is_streaming):
    """Those that only the new weights may sample: the groups of two steps had started before the first update."""
    components = load_overlapped(workspace, f"rl.streaming={is_streaming}", "rl.steps=4", "rl.save_every=1")
    engine, save_checkpoint = RecordingEngine(components.engine), checkpoint.save_checkpoint

    def save_late(*arguments, **options):
        num_required = NUM_REQUESTS * min(options["step"] + 2, 4)
        deadline = time.monotonic() + 60
        while len(engine.requests) < num_required:
            assert time.monotonic() < deadline, "no group starts while the checkpoint is written"
            time.sleep(0.01)
        save_checkpoint(*arguments, **options)

    monkeypatch.setattr(checkpoint, "save_checkpoint", save_late)
    rows = workspace.run_rl(replace(components, engine=engine), tmp_path)
    assert len(rows) == 4
    assert len(engine.requests) == 4 * NUM_REQUESTS


@pytest.mark.slow
def test_masked_groups_train_on_tokens_within_max_staleness(workspace, tmp_path, monkeypatch):
    """The first group's reply has tokens of version 0 and of the version that it ends with, which is at least 2."""
    overrides = ("rl.streaming=true", "rl.on_stale_group=mask", "rl.steps=5", "rl.prompts_per_step=1")
    components = load_overlapped(workspace, *overrides, "rl.max_groups_in_progress=2")
    loss_inputs, compute_policy_loss = [], policy_update.compute_policy_loss

    class SlowFirstEngine(RecordingEngine):
        async def generate(self, request):
            first_version, is_slow = self.version, len(self.requests) < 2  # both episodes of the first group
            self.requests.append(request.sampling)
            deadline = time.monotonic() + 60
            while is_slow and self.version < 2:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.001)
            completion = await self.engine.generate(request)
            if not is_slow:
                return completion
            versions = (first_version, *[self.version] * (len(completion.tokens) - 1))
            return replace(completion, version=self.version, token_versions=versions)

    def record_inputs(*arguments, **settings):
        loss_inputs.append(len(settings["engine_logp_N"]))
        return compute_policy_loss(*arguments, **settings)

    monkeypatch.setattr(policy_update, "compute_policy_loss", record_inputs)
    rows = workspace.run_rl(replace(components, engine=SlowFirstEngine(components.engine)), tmp_path)
    assert len(rows) == 5
    assert all(row["staleness_max"] <= 1 for row in rows)
    assert sorted(row["masked_stale_tokens"] for row in rows) == [0.0] * 4 + [2.0]
    num_tokens = max(loss_inputs)
    assert sorted(loss_inputs) == [num_tokens - 2] + [num_tokens] * 4


@pytest.mark.slow
@pytest.mark.parametrize("work", ["sync continue", "sync restart", "save", "update"])
def test_the_work_of_the_trainer_does_not_count_towards_the_timeout(workspace, tmp_path, monkeypatch, work):
    """A sync, or an update in the main thread, takes longer than the timeout of an episode in progress; a save in a
    thread, during which virtual time jumps to every timer, as well.
    """
    episodes_on_sync = "restart" if work == "sync restart" else "continue"
    overrides = ("sampling.episode_timeout=5", "rl.max_staleness=0", f"rl.episodes_on_sync={episodes_on_sync}")
    components = load_overlapped(workspace, *overrides)

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

    async def do_work(restart_on_sync):
        settings = components.recipe.rl
        optimizer = create_optimizer(components.vlm, settings.optim, settings.steps)
        if work == "update":
            loop = asyncio.get_running_loop()
            monkeypatch.setattr(rl, "update_policy", lambda *arguments: loop.advance(5.5))
            await rl.run_policy_update(components, [], optimizer, None, lambda values: None)
        elif work == "save":
            state = rl.TrainerState(
                num_finished_steps=1,
                prompt_sampler=PromptSampler(),
                pending_batches=(),
                initial_weights_folder=str(workspace.root / "model"),
            )
            writer = CheckpointWriter(
                folder=tmp_path,
                vlm=components.vlm,
                optimizer=optimizer,
                retention=CheckpointConfig(background=False),
                get_scores=ValidationSchedule().get_scores,
            )
            with components.clock.pause():
                await writer.save(rl.build_finished_step(tmp_path, state))
            assert checkpoint.find_newest_checkpoint(tmp_path).step == 1
        else:
            await rl.update_engine_weights(components, 1, restart_on_sync)

    async def run():
        restart_on_sync = RestartOnSync()
        context = components.build_context(seed=1)
        rollout = asyncio.create_task(restart_on_sync.run_episode(workspace.tasks[0], WaitingEnvironment, context))
        await asyncio.sleep(0)
        await do_work(restart_on_sync)
        assert not rollout.done()
        may_finish.set()
        return await rollout

    assert run_in_virtual_time(run()).status is EpisodeStatus.ANSWERED


@pytest.mark.slow
@pytest.mark.parametrize("is_streaming", [False, True])
def test_a_killed_run_resumes(workspace, tmp_path, is_streaming):
    streaming = f"rl.streaming={is_streaming}"
    rows = workspace.run_rl(load_overlapped(workspace, streaming), tmp_path, kill_at=3)
    last = checkpoint.find_newest_checkpoint(tmp_path)
    resumed_rows = workspace.run_rl(load_overlapped(workspace, streaming, weights=last.folder), tmp_path)
    assert [row["step"] for row in (*rows[: last.step], *resumed_rows)] == list(range(1, 7))


def test_max_staleness_needs_an_engine_with_separate_weights(workspace, tmp_path):
    components = workspace.load_components("rl.max_staleness=1")
    with raises(ConfigError, key="rl.max_staleness", value=1):
        asyncio.run(rl.train(components, workspace.tasks, folder=tmp_path, log_step=lambda values: None))


def test_staleness_is_either_bounded_or_simulated(workspace):
    with raises(ConfigError, key="rl.simulated_staleness", value=1):
        workspace.load_recipe("rl={simulated_staleness: 1, max_staleness: 1}")
