"""RL: training on the engine's own tokens, one policy in engine and trainer, resuming bit for bit, every setting."""

import asyncio
import importlib.util
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from error_cases import raises
from training_cases import RecordingEngine, alternate, are_equal, copy_weights, interrupt, with_reward

from saccade.algorithms.group_advantages import compute_group_advantages
from saccade.config.schema import AdvantageConfig
from saccade.errors import BrokenEngineError, DataError, EngineError
from saccade.training import checkpoint, policy_update, rl
from saccade.training.optimizer import Optimizer, compute_learning_rate
from saccade.training.rollout_batch import RolloutBatch, collect_groups
from saccade.training.train_step import pack_samples
from saccade.training.training_samples import build_samples
from saccade.utils.jsonl import read_jsonl

pytestmark = pytest.mark.slow  # every test samples episodes


def load_alternating(workspace, *overrides, weights):
    """Load components whose rewards differ within every group, and are the same in a resumed run."""
    return with_reward(workspace.load_components(*overrides, weights=weights), alternate)


@pytest.fixture(scope="module")
def whole_run(workspace, trained_weights, tmp_path_factory):
    """An uninterrupted run of four steps: components, metrics, folder."""
    components, folder = load_alternating(workspace, weights=trained_weights), tmp_path_factory.mktemp("rl")
    return components, workspace.run_rl(components, folder), folder


@pytest.fixture(scope="module")
def collected_groups(workspace, trained_weights):
    """The components, with a recording engine, and the groups of a step."""
    components = load_alternating(workspace, weights=trained_weights)
    components = replace(components, engine=RecordingEngine(components.engine))
    return components, asyncio.run(collect_groups(components, workspace.tasks, (0, 1), 0))


def samples_of(groups):
    return build_samples(groups, compute_group_advantages(groups, AdvantageConfig()), "shared")


def load_optimizer(components):
    return Optimizer(components.vlm.model, components.recipe.rl.optim, components.recipe.rl.steps)


def list_episodes(groups):
    return [scored.episode for group in groups for scored in group.scored_episodes]


# ---- tokens ----------------------------------------------------------------------------------------------------------


def test_every_trained_token_is_the_engines_own(collected_groups):
    components, groups = collected_groups
    completions = {}
    for ledger, completion in components.engine.completions:
        sampled = (completion.tokens, completion.logprobs, completion.version)
        completions.setdefault(ledger.prefix_hashes()[-1], []).append(sampled)
    samples, num_tokens = samples_of(groups), 0
    for sample in samples:
        for index, segment in enumerate(sample.ledger.segments):
            if segment.is_sampled:
                expected = completions[sample.ledger.prefix(index).prefix_hashes()[-1]]
                assert (segment.tokens, segment.logprobs, segment.version) in expected
                num_tokens += len(segment.tokens)
    assert len(samples) > len(list_episodes(groups))  # there are sub-agents
    assert num_tokens == sum(len(completion.tokens) for _, completion in components.engine.completions)


@pytest.mark.parametrize("damage", ["token", "lost", "duplicate", "moved"])
def test_a_batch_with_other_tokens_raises(collected_groups, monkeypatch, damage):
    components, groups = collected_groups
    samples = samples_of(groups)

    def pack_damaged(*arguments, **settings):
        batches = pack_samples(*arguments, **settings)
        names = ("row_N", "logit_index_N", "token_N", "engine_logp_N", "advantage_N", "sample_N", "version_N")
        indices = np.arange(len(batches[0].token_N))
        if damage == "token":
            batches[0].token_N[3] += 1
        if damage == "moved":
            batches[0].sample_N[0] += 1
        indices = {"lost": indices[1:], "duplicate": np.append(indices, 0)}.get(damage, indices)
        return [replace(batches[0], **{name: getattr(batches[0], name)[indices] for name in names}), *batches[1:]]

    monkeypatch.setattr(policy_update, "pack_samples", pack_damaged)
    before = copy_weights(components)
    with raises(EngineError):
        policy_update.update_policy(components, samples, components.recipe.rl, load_optimizer(components))
    assert are_equal(before, copy_weights(components))


# ---- engine and trainer ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sub_agent_advantage", ["none", "shared"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_engine_and_trainer_have_one_policy(workspace, trained_weights, tmp_path, sub_agent_advantage, temperature):
    overrides = (
        f"rl.advantage.sub_agent_advantage={sub_agent_advantage}",
        f"sampling.temperature={temperature}",
        "rl.steps=2",
    )
    components, groups_by_step = load_alternating(workspace, *overrides, weights=trained_weights), []
    rows = workspace.run_rl(components, tmp_path, on_groups=lambda step, groups: groups_by_step.append(groups))
    for row, groups in zip(rows, groups_by_step, strict=True):
        assert 0 < row["engine_trainer_logprob_diff_mean"] <= 1e-5
        assert row["engine_trainer_logprob_diff_max"] <= 1e-4
        assert row["ratio_mean"] == row["ratio_max"] == 1.0
        assert row["tis_weight_mean"] == pytest.approx(1.0, abs=1e-5)
        trained = episodes = list_episodes(groups)
        if sub_agent_advantage == "shared":
            trained = [conversation for episode in episodes for conversation in episode.walk()]
        assert row["trained_tokens"] == sum(len(episode.ledger.sampled_tokens()) for episode in trained)
    assert any(episode.children for groups in groups_by_step for episode in list_episodes(groups))


def test_the_weight_version_is_the_number_of_finished_steps(workspace, whole_run, tmp_path):
    """The engine samples step n with the weights of n finished steps, also in a resumed run."""
    components, _, folder = whole_run
    assert components.engine.version == 4
    shutil.copytree(folder / "step-000002", tmp_path / "step-000002")
    resumed, groups_by_step = load_alternating(workspace, "rl.steps=3", weights=folder / "step-000002"), []
    workspace.run_rl(resumed, tmp_path, on_groups=lambda step, groups: groups_by_step.append((step, groups)))
    ((step, groups),) = groups_by_step
    assert step == 2
    versions = {version for episode in list_episodes(groups) for version in episode.ledger.versions()}
    assert versions == {-1, 2}


def test_the_policy_moves_towards_reward(workspace, trained_weights, tmp_path):
    """With a penalty per call, the model stops calling.

    Over four random initializations, an episode had 2.2 to 4 calls at first, and at most 0.1 in the last four steps.
    """
    overrides = "rl={steps: 14, prompts_per_step: 3, save_every: 14, optim: {lr: 1e-3, warmup_steps: 0}}"
    components = workspace.load_components(overrides, weights=trained_weights)
    rows = workspace.run_rl(with_reward(components, lambda episode, count: -len(episode.results)), tmp_path)
    num_calls = [-row["reward"] for row in rows]
    assert np.mean(num_calls[:2]) > 1.0
    assert np.mean(num_calls[-4:]) < 0.5


# ---- resuming --------------------------------------------------------------------------------------------------------


def test_runs_with_equal_recipe_and_seed_are_equal(workspace, trained_weights, whole_run, tmp_path):
    components, rows, _ = whole_run
    second = load_alternating(workspace, weights=trained_weights)
    assert workspace.run_rl(second, tmp_path) == rows
    assert are_equal(copy_weights(second), copy_weights(components))


@pytest.mark.parametrize(("kill_at", "saved"), [(3, 2), (1, 0)])
def test_a_resumed_run_equals_the_uninterrupted_one(workspace, trained_weights, whole_run, tmp_path, kill_at, saved):
    components, rows, _ = whole_run
    killed = load_alternating(workspace, weights=trained_weights)
    assert workspace.run_rl(killed, tmp_path, kill_at=kill_at) == rows[:kill_at]
    last = checkpoint.find_newest_checkpoint(tmp_path)
    assert (last.step if last else 0) == saved
    resumed = load_alternating(workspace, weights=last.folder if last else trained_weights)
    assert workspace.run_rl(resumed, tmp_path) == rows[saved:]
    assert are_equal(copy_weights(resumed), copy_weights(components))


@pytest.mark.parametrize("mini_batches", [1, 2])
@pytest.mark.parametrize("during", ["rollouts", "an update", "a weight sync"])
def test_ctrl_c_saves_the_last_finished_step(workspace, trained_weights, tmp_path, monkeypatch, during, mini_batches):
    """Step 1 has no regular checkpoint; the weights between the updates of two mini-batches are those of no step."""
    overrides = ("rl.steps=2", f"rl.num_mini_batches={mini_batches}", "sampling.max_tokens=8")
    whole = load_alternating(workspace, *overrides, weights=trained_weights)
    rows = workspace.run_rl(whole, tmp_path / "whole")

    class InterruptingEngine(RecordingEngine):
        async def generate(self, request):
            if during == "rollouts" and self.version == 1 and not self.requests:
                interrupt()
            return await super().generate(request)

        async def sync_weights(self, source, version):
            self.requests.clear()
            if during == "a weight sync" and version == 1:
                interrupt()
                await asyncio.sleep(0)
            await super().sync_weights(source, version)

    def train_and_interrupt(*arguments, **settings):
        report = train_step(*arguments, **settings)
        reports.append(report)
        if len(reports) == 1:
            interrupt()
        return report

    train_step, reports = policy_update.train_step, []
    if during == "an update":
        monkeypatch.setattr(policy_update, "train_step", train_and_interrupt)
    interrupted = load_alternating(workspace, *overrides, weights=trained_weights)
    engine = InterruptingEngine(interrupted.engine)
    (row,) = workspace.run_rl(replace(interrupted, engine=engine), tmp_path / "run")
    monkeypatch.undo()
    assert row.items() <= rows[0].items()  # what is measured after the weight sync may be missing
    last = checkpoint.find_newest_checkpoint(tmp_path / "run")
    assert last.step == 1
    resumed = load_alternating(workspace, *overrides, weights=last.folder)
    assert workspace.run_rl(resumed, tmp_path / "run") == rows[1:]
    assert are_equal(copy_weights(resumed), copy_weights(whole))


@pytest.mark.parametrize("failing_call", ["generate", "sync_weights"])
def test_an_engine_failure_loses_no_finished_step(workspace, trained_weights, whole_run, tmp_path, failing_call):
    """The engine fails between two checkpoints; the run saves one more, and can be resumed from it."""

    class FailingEngine(RecordingEngine):
        async def generate(self, request):
            if failing_call == "generate" and self.version == 3:
                raise BrokenEngineError("no server is left")
            return await super().generate(request)

        async def sync_weights(self, source, version):
            if failing_call == "sync_weights" and version == 3:
                raise BrokenEngineError("no server is left")
            await super().sync_weights(source, version)

    _, rows, _ = whole_run
    components = load_alternating(workspace, weights=trained_weights)
    with raises(BrokenEngineError):
        workspace.run_rl(replace(components, engine=FailingEngine(components.engine)), tmp_path)
    last = checkpoint.find_newest_checkpoint(tmp_path)
    assert last.step == 3
    assert workspace.run_rl(load_alternating(workspace, weights=last.folder), tmp_path) == rows[3:]


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")
def test_a_run_with_lora_resumes_bit_for_bit(workspace, trained_weights, tmp_path):
    """A checkpoint's merged weights are rounded, so the base weights are read from where RL started."""
    overrides = (
        "model.lora_rank=2",
        "rl={steps: 2, save_every: 1, optim: {warmup_steps: 0}}",
        "sampling.max_tokens=16",
    )
    components = load_alternating(workspace, *overrides, weights=trained_weights)
    rows = workspace.run_rl(components, tmp_path / "whole")
    killed = load_alternating(workspace, *overrides, weights=trained_weights)
    workspace.run_rl(killed, tmp_path / "killed", kill_at=2)
    resumed = load_alternating(workspace, *overrides, weights=tmp_path / "killed/step-000001")
    assert workspace.run_rl(resumed, tmp_path / "killed") == rows[1:]
    assert are_equal(copy_weights(resumed), copy_weights(components))
    assert rows[0]["updates"] == rows[1]["updates"] == 1


def test_a_finished_run_does_nothing_when_resumed(workspace, whole_run):
    _, _, folder = whole_run
    assert workspace.run_rl(workspace.load_components(weights=folder / "step-000004"), folder) == []


def test_a_run_without_tasks_raises(workspace, tmp_path):
    with raises(DataError, key="data.train"):
        asyncio.run(rl.train(workspace.load_components(), [], folder=tmp_path, log_step=lambda values: None))


# ---- steps with no update or several ---------------------------------------------------------------------------------


def test_equal_rewards_make_no_update(workspace, trained_weights, tmp_path):
    components = with_reward(workspace.load_components(weights=trained_weights), lambda episode, count: 1.0)
    before = copy_weights(components)
    rows = workspace.run_rl(components, tmp_path)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    for row in rows:
        assert (row["updates"], row["groups/kept"], row["groups/missing"]) == (0, 0.0, 2.0)
        assert row["groups/dropped/reward_std"] == 2.0
        assert "loss" not in row
    assert are_equal(before, copy_weights(components))
    assert [saved.step for saved in checkpoint.list_checkpoints(tmp_path)] == [2, 4]


def load_skipping(workspace, *overrides, weights):
    """Load components whose rewards are equal in steps 1 and 3; the step shows in the version that sampled."""

    def compute_reward(episode, count):
        return 1.0 if max(episode.ledger.versions()) in (0, 2) else count % 2

    return with_reward(workspace.load_components(*overrides, weights=weights), compute_reward)


@pytest.mark.parametrize("num_updates", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_steps_with_different_numbers_of_updates(workspace, trained_weights, tmp_path, num_updates):
    """Learning rates and the optimizer's step counts are right, and a resumed run equals the uninterrupted one."""
    overrides = (f"rl.epochs_per_batch={num_updates}", "rl.optim={warmup_steps: 0, schedule: linear}")
    components = load_skipping(workspace, *overrides, weights=trained_weights)
    rows = workspace.run_rl(components, tmp_path / "whole")
    assert [row["updates"] for row in rows] == [0, num_updates, 0, num_updates]
    assert [row["lr"] for row in rows] == pytest.approx([1e-3, 0.75e-3, 0.5e-3, 0.25e-3])
    settings = components.recipe.rl.optim
    for saved in checkpoint.list_checkpoints(tmp_path / "whole"):
        [state] = torch.load(saved.folder / "optimizer.pt", weights_only=True)["optimizers"]
        assert state["param_groups"][0]["lr"] == compute_learning_rate(settings, saved.step - 1, 4)
        assert {int(moments["step"]) for moments in state["state"].values()} == {num_updates * saved.step // 2}
    killed = load_skipping(workspace, *overrides, weights=trained_weights)
    workspace.run_rl(killed, tmp_path / "killed", kill_at=4)
    resumed = load_skipping(workspace, *overrides, weights=tmp_path / "killed/step-000002")
    assert workspace.run_rl(resumed, tmp_path / "killed") == rows[2:]
    assert are_equal(copy_weights(resumed), copy_weights(components))


def test_later_updates_compare_with_the_trainers_logprobs_before_the_first(
    collected_groups, workspace, trained_weights, monkeypatch
):
    _, groups = collected_groups
    overrides = ("rl.epochs_per_batch=3", "rl.optim.warmup_steps=0")
    components = workspace.load_components(*overrides, weights=trained_weights)
    calls, compute_policy_loss = [], policy_update.compute_policy_loss

    def record_call(logp, old_logp, *arguments, **settings):
        calls.append((logp.detach().clone(), old_logp.clone(), settings["engine_logp_N"]))
        return compute_policy_loss(logp, old_logp, *arguments, **settings)

    monkeypatch.setattr(policy_update, "compute_policy_loss", record_call)
    report = policy_update.update_policy(
        components, samples_of(groups), components.recipe.rl, load_optimizer(components)
    )
    num_batches = len(calls) // 3
    assert len(calls) == 3 * num_batches
    for index in range(num_batches):
        (logp, old_logp, engine_logp), (second_logp, second_old_logp, _), (_, third_old_logp, _) = calls[
            index::num_batches
        ]
        assert torch.equal(old_logp, second_old_logp)
        assert torch.equal(old_logp, third_old_logp)
        assert (logp - old_logp).abs().max() <= 1e-5
        assert (second_logp - second_old_logp).abs().max() > 1e-3
        assert (old_logp - engine_logp).abs().mean() <= 1e-5
    assert report.stats["ratio_max"] > 1.001  # of the last update; the first one's is 1
    assert report.stats["engine_trainer_logprob_diff_mean"] <= 1e-5


def test_mini_batches_are_updates_on_parts_of_the_groups(collected_groups, workspace, trained_weights):
    """With the engine's old logprobs, two mini-batches are two rollout batches of one group each, bit for bit."""
    samples = samples_of(collected_groups[1])
    halves = [[sample for sample in samples if sample.group == number] for number in (0, 1)]
    overrides = (
        "rl.loss={old_logprobs: engine, tis_cap: null, stale_tis_cap: null}",
        "rl.advantage.whiten=none",
        "rl.optim.warmup_steps=0",
    )

    def update(parts, num_mini_batches):
        components = workspace.load_components(
            *overrides, f"rl.num_mini_batches={num_mini_batches}", weights=trained_weights
        )
        optimizer, settings = load_optimizer(components), components.recipe.rl
        reports = [policy_update.update_policy(components, part, settings, optimizer) for part in parts]
        return reports, copy_weights(components)

    [report], weights = update([samples], 2)
    parts, expected_weights = update(halves, 1)
    assert are_equal(weights, expected_weights)
    assert not are_equal(weights, update([samples], 1)[1])
    assert [report.updates, *(part.updates for part in parts)] == [2, 1, 1]
    assert report.trained_tokens == sum(part.trained_tokens for part in parts)
    assert report.loss == pytest.approx((parts[0].loss + parts[1].loss) / 2)
    assert report.stats["ratio_max"] == max(part.stats["ratio_max"] for part in parts)
    for key in ("engine_trainer_logprob_diff_mean", "engine_trainer_logprob_diff_max", "tis_weight_mean"):
        assert report.stats[key] == parts[0].stats[key] != parts[1].stats[key]  # later ones contain the policy's change


def test_every_mini_batch_compares_with_the_logprobs_before_the_first_step(
    collected_groups, workspace, trained_weights, monkeypatch
):
    """Two passes over two mini-batches; each step's token weights add up to 1."""
    overrides = ("rl={epochs_per_batch: 2, num_mini_batches: 2, micro_batch_size: 100}", "rl.optim.warmup_steps=0")
    components = workspace.load_components(*overrides, "model.num_threads=1", weights=trained_weights)
    calls, compute_policy_loss = [], policy_update.compute_policy_loss

    def record_call(logp, old_logp, advantages, weights, **settings):
        calls.append((logp.detach().clone(), old_logp.clone(), float(weights.sum())))
        return compute_policy_loss(logp, old_logp, advantages, weights, **settings)

    monkeypatch.setattr(policy_update, "compute_policy_loss", record_call)
    samples, values = samples_of(collected_groups[1]), []
    optimizer = load_optimizer(components)
    report = policy_update.update_policy(components, samples, components.recipe.rl, optimizer, on_tokens=values.extend)
    assert (report.updates, len(calls)) == (4, 4)
    # Each sampled token has its values once, although it was trained on twice.
    by_ledger = {id(row.ledger): row for row in values}
    assert len(values) == len(by_ledger) == len(samples)
    for sample in samples:
        row = by_ledger[id(sample.ledger)]
        assert row.position_N.tolist() == np.flatnonzero(sample.ledger.loss_mask()).tolist()
        assert (
            float(np.abs(row.logprob_diff_N).max()) <= 1e-4
        )  # the engine has the trainer's weights, before each update
    entropy = sum(float(row.entropy_N.sum()) for row in values) / report.trained_tokens
    assert entropy == pytest.approx(report.entropy, rel=1e-5)
    assert [total for _, _, total in calls] == pytest.approx([1.0] * 4, abs=1e-4)
    change = [float((logp - old_logp).abs().max()) for logp, old_logp, _ in calls]
    assert change[0] <= 1e-5
    assert min(change[1:]) > 1e-3
    for first, second in ((0, 2), (1, 3)):
        assert torch.equal(calls[first][1], calls[second][1])


def test_an_engine_that_differs_changes_the_tis_weight_and_not_the_ratio(collected_groups, workspace, trained_weights):
    """The engine's logprobs are off by 0.1 nats."""
    _, groups = collected_groups
    components = workspace.load_components(weights=trained_weights)
    samples = []
    for sample in samples_of(groups):
        segments = [
            replace(segment, logprobs=tuple(value - 0.1 for value in segment.logprobs))
            if segment.is_sampled
            else segment
            for segment in sample.ledger.segments
        ]
        samples.append(replace(sample, ledger=replace(sample.ledger, segments=tuple(segments))))
    report = policy_update.update_policy(components, samples, components.recipe.rl, load_optimizer(components))
    assert report.stats["engine_trainer_logprob_diff_mean"] == pytest.approx(0.1, abs=1e-4)
    assert report.stats["tis_weight_mean"] == pytest.approx(np.exp(0.1), abs=1e-4)
    assert report.stats["ratio_max"] == 1.0


# ---- simulated staleness ---------------------------------------------------------------------------------------------

STALE = ("rl.simulated_staleness=2", "sampling.max_tokens=16")


def test_simulated_staleness_delays_batches_by_as_many_versions(workspace, trained_weights, tmp_path):
    """Version 0 samples steps 0, 1 and 2, version 1 step 3, the last one.

    A resumed run equals the uninterrupted one: a checkpoint holds the pending batches.
    """
    components = load_alternating(workspace, *STALE, weights=trained_weights)
    versions_by_step = []

    def record_versions(step, groups):
        versions = {version for episode in list_episodes(groups) for version in episode.ledger.versions()} - {-1}
        versions_by_step.append((step, versions))

    rows = workspace.run_rl(components, tmp_path / "whole", on_groups=record_versions)
    assert versions_by_step == [(0, {0}), (1, {0}), (2, {0}), (3, {1})]
    assert [(row["staleness_mean"], row["staleness_max"]) for row in rows] == [(0, 0), (1, 1), (2, 2), (2, 2)]
    assert rows[0]["engine_trainer_logprob_diff_mean"] < 1e-4 < rows[3]["engine_trainer_logprob_diff_mean"]
    killed = load_alternating(workspace, *STALE, weights=trained_weights)
    workspace.run_rl(killed, tmp_path / "killed", kill_at=3)
    resumed = load_alternating(workspace, *STALE, weights=tmp_path / "killed/step-000002")
    assert workspace.run_rl(resumed, tmp_path / "killed") == rows[2:]
    assert are_equal(copy_weights(resumed), copy_weights(components))


def test_the_cap_of_stale_tokens_changes_stale_steps_only(workspace, trained_weights, tmp_path):
    losses = {}
    for cap in ("5.0", "null"):
        overrides = (*STALE, "rl.steps=3", f"rl.loss.stale_tis_cap={cap}", "rl.optim.warmup_steps=0")
        components = load_alternating(workspace, *overrides, weights=trained_weights)
        losses[cap] = [row["loss"] for row in workspace.run_rl(components, tmp_path / cap)]
    assert losses["5.0"][0] == losses["null"][0]
    assert losses["5.0"][1] != losses["null"][1]


BASELINE = (
    "rl={simulated_staleness: 1, advantage: {estimator: remax}, filters: {reward_std: null}}",
    "rl.group_size=2",
)


def test_a_resumed_run_has_the_greedy_episodes_of_its_pending_batches(workspace, tmp_path):
    """The checkpoint of step 2 holds the batch of step 3, which was sampled before."""

    def compute_reward(episode, count):
        return len(episode.ledger.sampled_tokens()) % 7

    rows = workspace.run_rl(with_reward(workspace.load_components(*BASELINE), compute_reward), tmp_path / "whole")
    killed = with_reward(workspace.load_components(*BASELINE), compute_reward)
    workspace.run_rl(killed, tmp_path / "killed", kill_at=3)
    [batch] = read_jsonl(tmp_path / "killed/step-000002" / rl.PENDING_BATCHES, RolloutBatch)
    assert all(group.greedy_baseline is not None and len(group.scored_episodes) == 2 for group in batch.groups)
    assert batch.num_sampled_tokens == sum(
        scored.episode.usage.sampled_tokens for group in batch.groups for scored in group.members
    )
    assert batch.metrics["greedy_baseline_reward"] == np.mean(
        [group.greedy_baseline.score.value for group in batch.groups]
    )
    weights = tmp_path / "killed/step-000002"
    resumed = with_reward(workspace.load_components(*BASELINE, weights=weights), compute_reward)
    assert workspace.run_rl(resumed, tmp_path / "killed") == rows[2:]


# ---- every setting ---------------------------------------------------------------------------------------------------

SETTINGS = (
    "rl.loss={name: gspo, aggregation: seq_mean_token_mean}",
    "rl.loss={old_logprobs: engine, tis_cap: null, stale_tis_cap: null}",
    "rl.loss={tis_cap: null, settings: {dual_clip: 3.0, clip_high: 0.28}, aggregation: seq_mean_token_sum_norm}",
    "rl={simulated_staleness: 1, loss: {stale_tis_cap: 2.0}}",
    "rl.kl.loss_coef=0.01",
    "rl.kl={advantage_coef: 0.01, penalty_estimator: k3, reference_device: cpu}",
    "rl.advantage={estimator: rloo, whiten: episodes, reward_scale: 10, reward_bias: -0.2, reward_clip: 40}",
    "rl={advantage: {estimator: reinforce_plus_plus, whiten: tokens}, kl: {advantage_coef: 0.01}}",
    "rl={advantage: {estimator: remax}, filters: {reward_std: null}}",
    "rl={advantage: {estimator: accuracy_baseline}, loss: {above_tis_cap: mask, above_stale_tis_cap: mask}}",
    "model.trained_weights=language_model",
    "rl={num_mini_batches: 2, advantage: {whiten: tokens}, kl: {advantage_coef: 0.01}}",
    "rl={filters: {drop_correct_with_negative_advantage: {}}, "
    "selection: {rank_by: reward_std, oversample: 2, surplus: requeue}}",
    "rl={filters: {require_tool_image: {}, length: {max_tokens: 4000}}, selection: {max_sampling_rounds: 2}}",
    "rewards.format_reward.settings={anchor_credit: tokens}",
)


@pytest.mark.parametrize("setting", SETTINGS)
def test_two_steps_with_every_setting(workspace, trained_weights, tmp_path, setting):
    """The reward is the recipe's plus one that alternates, so that every group has a reward spread."""
    components = workspace.load_components(setting, "rl.steps=2", "rl.epochs_per_batch=2", weights=trained_weights)
    recipe_score_fn, counter = components.score_fn, iter(range(10**6))

    async def score(episodes):
        scores = await recipe_score_fn(episodes)
        return [replace(score, value=score.value + 10 * (next(counter) % 2)) for score in scores]

    rows = workspace.run_rl(replace(components, score_fn=score), tmp_path)
    assert len(rows) == 2
    assert all(np.isfinite(value) for row in rows for value in row.values())
    assert any(row["updates"] for row in rows)


ALGORITHMS = """
import torch

def half_mean(rewards_G, total_rewards_G, *, share: float = 1.0):
    return rewards_G - share * rewards_G.mean()

def reinforce(logp_N, old_logp_N, adv_N, seq_N, *, scale: float = 1.0):
    return -scale * adv_N * logp_N, {"surprise": -logp_N}

def early(scored, *, turns: int = 9):
    return len(scored.episode.turns) <= turns

def not_worst(scored, *, advantage):
    return advantage > -1e6

def rank(group, *, bonus: float = 0.0):
    return [bonus * index for index, _ in enumerate(group.scored_episodes)]
"""


def test_algorithms_and_a_group_reward_from_files(workspace, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(ALGORITHMS)
    overrides = (
        f"rl.advantage={{estimator: '{file}:half_mean', settings: {{share: 0.5}}}}",
        f"rl.loss={{name: '{file}:reinforce', settings: {{scale: 2.0}}}}",
        f"rl.filters={{'{file}:early': {{turns: 8}}, '{file}:not_worst': {{}}}}",
        f"rewards={{'{file}:rank': {{weight: 1.0, settings: {{bonus: 1.0}}}}, diversity: {{weight: 0.5}}}}",
        "rl.steps=1",
    )
    [row] = workspace.run_rl(workspace.load_components(*overrides), tmp_path / "run")
    assert row["updates"] == 1
    assert row["surprise"] > 0
    assert (row["reward/rank"], row["episodes/dropped/early"], row["episodes/dropped/not_worst"]) == (1.5, 0.0, 0.0)
    assert 0.0 <= row["reward/diversity"] <= 1.0


REPORTED = """
    reward accuracy format_compliance calls calls/executed calls/succeeded frac_with_tool_call turns response_tokens
    visual_tokens sampled_tokens entropy grad_norm approx_kl clip_fraction engine_trainer_logprob_diff_mean
    engine_trainer_logprob_diff_max tis_weight_mean tis_weight_max frac_tis_truncated staleness_mean staleness_max
    frac_correct_with_negative_advantage groups/kept groups/dropped/statuses groups/dropped/too_few_episodes
    groups/dropped/reward_std groups/dropped/surplus groups/cancelled episodes/cancelled frac_ungraded
    episodes/discarded episodes/restarted restart_discarded_tokens sampling_rounds lr loss packed_tokens
    trained_tokens
"""


def test_a_step_reports_its_metrics(whole_run):
    _, rows, _ = whole_run
    expected = set(REPORTED.split())
    for row in rows:
        assert expected <= row.keys(), expected - row.keys()
        assert any(key.startswith("status/") for key in row)


def test_a_step_reports_its_costs(workspace, tmp_path):
    rows, overrides = [], ("rl.group_size=2", "sampling.max_tokens=2", "rl.steps=1")
    components = with_reward(workspace.load_components(*overrides), alternate)
    asyncio.run(rl.train(components, workspace.tasks, folder=tmp_path, log_step=rows.append))
    costs = {
        "seconds/rollout",
        "rollout/reward_seconds",
        "seconds/train",
        "seconds/weight_sync",
        "sampled_tokens_per_second",
        "memory_gib",
    }
    assert costs <= rows[0].keys()
    assert all(rows[0][name] > 0 for name in costs)
