"""RL: the engine's own tokens, one policy in engine and trainer, and a resumed run that is the same run."""

import asyncio
import importlib.util
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from training_cases import Recorder, equal, turns, weights, with_score

from saccade.algorithms.advantages import credit
from saccade.config import Advantage
from saccade.errors import BrokenEngineError, DataError, EngineError
from saccade.training import checkpoint, rl
from saccade.training import learn as learn_module
from saccade.training.credit import samples_of
from saccade.training.learn import learn
from saccade.training.lots import roll_out
from saccade.training.optim import Optimizer, rate
from saccade.training.pack import pack
from saccade.types import seed_of
from saccade.waiting import settled

pytestmark = pytest.mark.slow  # every test rests on episodes that were sampled


@pytest.fixture(scope="module")
def whole(home, schooled, tmp_path_factory):
    """An uninterrupted run of four steps: stage, metrics, folder."""
    stage, folder = spread(home.stage(weights=schooled)), tmp_path_factory.mktemp("rl")
    return stage, home.rl(stage, folder), folder


@pytest.fixture(scope="module")
def rolled(home, schooled):
    """A step's groups, what the engine sampled for them, and the stage."""
    stage = home.stage(weights=schooled)
    stage = replace(spread(stage), engine=Recorder(stage.engine))
    return stage, list(asyncio.run(roll_out(stage, home.tasks, (0, 1), 0)).values())


def spread(stage):
    """A reward that is known from the episode alone, so that it is the same after a resume."""
    return with_score(stage, lambda episode, count: seed_of(episode.ledger.compact()) % 7)


def of(groups, children="shared"):
    return samples_of(groups, credit(groups, Advantage()), children)


# ---- tokens ----------------------------------------------------------------------------------------------------------


def test_every_trained_token_is_the_engines_own(rolled):
    stage, groups = rolled
    served = {ledger.keys()[-1]: [] for ledger, _ in stage.engine.served}
    for ledger, completion in stage.engine.served:
        served[ledger.keys()[-1]].append((completion.tokens, completion.logprobs, completion.version))
    samples, total = of(groups), 0
    for sample in samples:
        for place, segment in enumerate(sample.ledger.segments):
            if segment.sampled:
                said = served[sample.ledger.fork(place).keys()[-1]]
                assert (segment.tokens, segment.logprobs, segment.version) in said
                total += len(segment.tokens)
    assert len(samples) > sum(len(group.members) for group in groups), "no sub-agent was asked"
    assert total == sum(len(completion.tokens) for _, completion in stage.engine.served)


@pytest.mark.parametrize("harm", ["token", "lost", "twice", "moved"])
def test_a_tampered_batch_is_refused(rolled, monkeypatch, harm):
    stage, groups = rolled
    samples = of(groups)

    def tampered(*given, **settings):
        batches = pack(*given, **settings)
        names = ("row_N", "at_N", "token_N", "old_logp_N", "advantage_N", "sample_N", "version_N")
        chosen = np.arange(len(batches[0].token_N))
        if harm == "token":
            batches[0].token_N[3] += 1
        if harm == "moved":
            batches[0].sample_N[0] += 1
        chosen = {"lost": chosen[1:], "twice": np.append(chosen, 0)}.get(harm, chosen)
        return [replace(batches[0], **{name: getattr(batches[0], name)[chosen] for name in names}), *batches[1:]]

    monkeypatch.setattr(learn_module, "pack", tampered)
    before = weights(stage)
    with pytest.raises(EngineError, match="trains other tokens than the engine sampled"):
        learn(stage, samples, stage.recipe.rl, optimizer(stage))
    assert equal(before, weights(stage))


def optimizer(stage):
    return Optimizer(stage.backbone.model, stage.recipe.rl.optim, stage.recipe.rl.steps)


# ---- engine and trainer ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("children", ["none", "shared"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_engine_and_trainer_have_one_policy(home, schooled, tmp_path, children, temperature):
    stage = home.stage(
        f"rl.advantage.children={children}", f"sampling.temperature={temperature}", "rl.steps=2", weights=schooled
    )
    groups = []
    rows = home.rl(with_score(stage, turns), tmp_path, seen=lambda number, found: groups.append(found))
    for row, found in zip(rows, groups, strict=True):
        assert 0 < row["logprob_gap_mean"] <= 1e-5
        assert row["logprob_gap_max"] <= 1e-4
        assert row["ratio_mean"] == row["ratio_max"] == 1.0
        assert row["importance_mean"] == pytest.approx(1.0, abs=1e-5)
        conversations = [each for group in found for member in group.members for each in member.episode.walk()]
        mains = [member.episode for group in found for member in group.members]
        trained = conversations if children == "shared" else mains
        assert row["trained_tokens"] == sum(len(each.ledger.sampled_tokens()) for each in trained)
    assert any(member.episode.children for found in groups for group in found for member in group.members)


def test_versions_are_numbers_of_steps(home, whole, tmp_path):
    """The engine samples step n with the weights of n finished steps, after a resume as before."""
    stage, _, folder = whole
    assert stage.engine.version == 4
    again = spread(home.stage("rl.steps=3", weights=folder / "step-000002"))
    seen = []
    shutil.copytree(folder / "step-000002", tmp_path / "step-000002")
    home.rl(again, tmp_path, seen=lambda number, groups: seen.append((number, groups)))
    ((number, groups),) = seen
    assert number == 2
    versions = {version for group in groups for member in group.members for version in member.episode.ledger.versions()}
    assert versions == {-1, 2}


def test_the_policy_moves_towards_reward(home, schooled, tmp_path):
    """What is paid becomes more likely: where calls cost, the model stops calling."""
    stage = home.stage("rl={steps: 8, prompts: 3, save_every: 8, optim: {lr: 1e-3, warmup: 0}}", weights=schooled)
    rows = home.rl(with_score(stage, lambda episode, count: -len(episode.results)), tmp_path)
    calls = [-row["reward"] for row in rows]
    assert np.mean(calls[:2]) > 1.0
    assert np.mean(calls[-2:]) < 0.5


# ---- the same run ----------------------------------------------------------------------------------------------------


def test_the_same_recipe_and_seed_are_the_same_run(home, schooled, whole, tmp_path):
    stage, rows, _ = whole
    again = spread(home.stage(weights=schooled))
    assert home.rl(again, tmp_path) == rows
    assert equal(weights(again), weights(stage))


@pytest.mark.parametrize(("die_at", "saved"), [(3, 2), (1, 0)])
def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(home, schooled, whole, tmp_path, die_at, saved):
    stage, rows, _ = whole
    assert home.rl(spread(home.stage(weights=schooled)), tmp_path, die_at=die_at) == rows[:die_at]
    last = checkpoint.newest(tmp_path)
    assert (last.step if last else 0) == saved
    resumed = spread(home.stage(weights=last.folder if last else schooled))
    assert home.rl(resumed, tmp_path) == rows[saved:]
    assert equal(weights(resumed), weights(stage))


@pytest.mark.parametrize("what", ["sampling", "publishing"])
def test_an_engine_that_fails_loses_no_finished_step(home, schooled, whole, tmp_path, what):
    """Between two checkpoints no server is left: what was learned until then is kept, and gone on from."""

    class Failing(Recorder):
        async def generate(self, ledger, sampling):
            if what == "sampling" and self.version == 3:
                raise BrokenEngineError("no server could be used")
            return await super().generate(ledger, sampling)

        async def publish(self, weights, version):
            if what == "publishing" and version == 3:
                raise BrokenEngineError("no server could be used")
            await super().publish(weights, version)

    _, rows, _ = whole
    failing = spread(home.stage(weights=schooled))
    with pytest.raises(BrokenEngineError, match="no server"):
        home.rl(replace(failing, engine=Failing(failing.engine)), tmp_path)
    last = checkpoint.newest(tmp_path)
    assert last.step == 3
    assert home.rl(spread(home.stage(weights=last.folder)), tmp_path) == rows[3:]


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")
def test_a_run_with_adapters_resumes_to_the_bit(home, schooled, tmp_path):
    """The merged weights of a checkpoint are rounded; what lies under the adapters is read from where RL began."""
    chosen = ("model.lora_rank=2", "rl={steps: 2, save_every: 1, optim: {warmup: 0}}", "sampling.max_tokens=16")
    stage = spread(home.stage(*chosen, weights=schooled))
    rows = home.rl(stage, tmp_path / "whole")
    home.rl(spread(home.stage(*chosen, weights=schooled)), tmp_path / "cut", die_at=2)
    resumed = spread(home.stage(*chosen, weights=tmp_path / "cut/step-000001"))
    assert home.rl(resumed, tmp_path / "cut") == rows[1:]
    assert equal(weights(resumed), weights(stage))
    assert rows[0]["updates"] == rows[1]["updates"] == 1


def test_a_finished_run_has_nothing_left_to_do(home, whole):
    _, _, folder = whole
    assert home.rl(home.stage(weights=folder / "step-000004"), folder) == []


def test_no_tasks_are_an_error(home, tmp_path):
    with pytest.raises(DataError, match="no tasks"):
        asyncio.run(rl.train(home.stage(), [], folder=tmp_path, log=lambda values: None))


# ---- steps without an update, and with several -----------------------------------------------------------------------


def test_without_a_spread_nothing_is_learned(home, schooled, tmp_path):
    stage = with_score(home.stage(weights=schooled), lambda episode, count: 1.0)
    before = weights(stage)
    rows = home.rl(stage, tmp_path)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    for row in rows:
        assert (row["updates"], row["groups/kept"], row["groups/missing"]) == (0, 0.0, 2.0)
        assert row["groups/dropped/spread"] == 2.0
        assert "loss" not in row
    assert equal(before, weights(stage))
    assert [one.step for one in checkpoint.checkpoints(tmp_path)] == [2, 4]


def skipping(stage):
    """No spread in steps 1 and 3: which step it is shows by the version that sampled."""

    def value(episode, count):
        version = max(episode.ledger.versions())
        return 1.0 if version in (0, 2) else seed_of(episode.ledger.compact()) % 7

    return with_score(stage, value)


@pytest.mark.parametrize("updates", [1, 2])
def test_steps_and_rates_are_right_where_steps_differ_in_updates(home, schooled, tmp_path, updates):
    changed = (f"rl.updates={updates}", "rl.optim={warmup: 0, schedule: linear}")
    stage = skipping(home.stage(*changed, weights=schooled))
    rows = home.rl(stage, tmp_path / "whole")
    assert [row["updates"] for row in rows] == [0, updates, 0, updates]
    assert [row["lr"] for row in rows] == pytest.approx([1e-3, 0.75e-3, 0.5e-3, 0.25e-3])
    settings = stage.recipe.rl.optim
    for one in checkpoint.checkpoints(tmp_path / "whole"):
        [part] = torch.load(one.folder / "optimizer.pt", weights_only=True)["parts"]
        assert part["param_groups"][0]["lr"] == rate(settings, one.step - 1, 4)
        counts = {int(state["step"]) for state in part["state"].values()}
        assert counts == {updates * one.step // 2}
    home.rl(skipping(home.stage(*changed, weights=schooled)), tmp_path / "cut", die_at=4)
    resumed = skipping(home.stage(*changed, weights=tmp_path / "cut/step-000002"))
    assert home.rl(resumed, tmp_path / "cut") == rows[2:]
    assert equal(weights(resumed), weights(stage))


def test_later_updates_compare_with_the_trainers_first_logprobs(rolled, home, schooled, monkeypatch):
    _, groups = rolled
    stage = home.stage("rl.updates=3", "rl.optim.warmup=0", weights=schooled)
    samples, calls, real = of(groups), [], learn_module.policy_loss

    def spied(logp, old, *given, **settings):
        loss, stats = real(logp, old, *given, **settings)
        calls.append((logp.detach().clone(), old.clone(), settings["engine_logp_N"], stats))
        return loss, stats

    monkeypatch.setattr(learn_module, "policy_loss", spied)
    report = learn(stage, samples, stage.recipe.rl, optimizer(stage))
    passes = len(calls) // 3
    assert len(calls) == 3 * passes
    for place in range(passes):
        first, second, third = calls[place::passes]
        assert torch.equal(first[1], second[1])
        assert torch.equal(first[1], third[1])
        assert (first[0] - first[1]).abs().max() <= 1e-5  # the trainer's own, before any update
        assert (second[0] - second[1]).abs().max() > 1e-3
        assert (first[1] - first[2]).abs().mean() <= 1e-5
    assert report.stats["ratio_max"] > 1.001  # of the last update: that of the first is always 1
    assert report.stats["logprob_gap_mean"] <= 1e-5


def test_stale_logprobs_of_the_engine_weigh_but_are_no_ratios(rolled, home, schooled):
    """An engine that is off by 0.1 nats shows in the gap and in the importance weights; the ratio stays 1."""
    _, groups = rolled
    stage = home.stage(weights=schooled)
    samples = []
    for sample in of(groups):
        segments = [
            replace(each, logprobs=tuple(value - 0.1 for value in each.logprobs)) if each.sampled else each
            for each in sample.ledger.segments
        ]
        samples.append(replace(sample, ledger=replace(sample.ledger, segments=tuple(segments))))
    report = learn(stage, samples, stage.recipe.rl, optimizer(stage))
    assert report.stats["logprob_gap_mean"] == pytest.approx(0.1, abs=1e-4)
    assert report.stats["importance_mean"] == pytest.approx(np.exp(0.1), abs=1e-4)
    assert report.stats["ratio_max"] == 1.0


# ---- groups that wait ------------------------------------------------------------------------------------------------


def late(home, schooled, *overrides):
    return spread(home.stage("rl.staleness=2", "sampling.max_tokens=16", *overrides, weights=schooled))


def test_groups_are_learned_from_as_many_versions_later_as_asked_for(home, schooled, tmp_path):
    """Version 0 rolls out for steps 0, 1 and 2, version 1 for step 3; nothing is rolled out for a step beyond the last.

    A run that was cut goes on to the bit: the groups that waited are in its checkpoint.
    """
    seen = []
    stage = late(home, schooled)

    def watch(number, groups):
        versions = {v for group in groups for m in group.members for v in m.episode.ledger.versions()} - {-1}
        seen.append((number, versions))

    rows = home.rl(stage, tmp_path / "whole", seen=watch)
    assert seen == [(0, {0}), (1, {0}), (2, {0}), (3, {1})]
    assert [(row["staleness_mean"], row["staleness_max"]) for row in rows] == [(0, 0), (1, 1), (2, 2), (2, 2)]
    assert rows[0]["logprob_gap_mean"] < 1e-4 < rows[3]["logprob_gap_mean"]
    home.rl(late(home, schooled), tmp_path / "cut", die_at=3)
    resumed = late(home, tmp_path / "cut/step-000002")
    assert home.rl(resumed, tmp_path / "cut") == rows[2:]
    assert equal(weights(resumed), weights(stage))


def test_a_late_lot_is_corrected_or_not(home, schooled, tmp_path):
    """The same groups, learned from two versions late: with another cap the step is another one."""
    losses = {}
    for cap in ("5.0", "null"):
        stage = late(home, schooled, "rl.steps=3", f"rl.loss.behaviour_cap={cap}", "rl.optim.warmup=0")
        losses[cap] = [row["loss"] for row in home.rl(stage, tmp_path / cap)]
    assert losses["5.0"][0] == losses["null"][0]  # fresh tokens know nothing of that cap
    assert losses["5.0"][1] != losses["null"][1]


# ---- every setting ---------------------------------------------------------------------------------------------------

SETTINGS = (
    "rl.loss={ratio: sequence, clip_low: 3e-4, clip_high: 4e-4, aggregation: seq_mean_token_mean}",
    "rl.loss={against: behaviour, importance_cap: null, behaviour_cap: null}",
    "rl.loss={importance_cap: null, dual_clip: 3.0, clip_high: 0.28, aggregation: seq_mean_token_sum_norm}",
    "rl={staleness: 1, loss: {behaviour_cap: 2.0}}",
    "rl.kl.loss=0.01",
    "rl.kl={reward: 0.01, estimator: k3, keep: cpu}",
    "rl.advantage={estimator: leave_one_out, whiten: true, reward_scale: 10, reward_bias: -0.2, reward_clip: 40}",
    "rl.select={correct_with_negative_advantage: true, rank: std, oversample: 2, spare: requeue}",
    "rl.select={must_show_image: true, max_tokens: 4000, max_rounds: 2}",
    "rewards.format.settings={anchor_credit: tokens}",
)


@pytest.mark.parametrize("setting", SETTINGS)
def test_two_steps_with_every_setting(home, schooled, tmp_path, setting):
    stage = home.stage(setting, "rl.steps=2", "rl.updates=2", weights=schooled)
    paid = stage.score

    async def uneven(episode, task):
        """What the recipe pays, and a little by chance, so that something is learned."""
        score = await settled(paid(episode, task))
        return replace(score, value=score.value + seed_of(episode.ledger.compact()) % 7 / 10)

    rows = home.rl(replace(stage, score=uneven), tmp_path)
    assert len(rows) == 2
    assert all(np.isfinite(value) for row in rows for value in row.values())
    assert any(row["updates"] for row in rows)


REPORTED = """
    reward accuracy compliance calls calls/executed calls/succeeded tool_share turns response_tokens visual_tokens
    sampled_tokens entropy grad_norm approx_kl clip_fraction logprob_gap_mean logprob_gap_max importance_mean
    importance_max importance_truncated staleness_mean staleness_max punished groups/kept groups/dropped/ends
    groups/dropped/survivors groups/dropped/spread groups/dropped/target groups/cancelled episodes/cancelled ungraded
    episodes/discarded episodes/restarted tokens_lost rounds lr loss tokens trained_tokens
"""


def test_a_step_reports_what_it_must(whole):
    _, rows, _ = whole
    wanted = set(REPORTED.split())
    for row in rows:
        assert wanted <= row.keys(), wanted - row.keys()
        assert any(key.startswith("end/") for key in row)


def test_a_step_reports_what_it_costs(home, tmp_path):
    rows = []
    stage = with_score(home.stage("rl.group=2", "sampling.max_tokens=2", "rl.steps=1"), turns)
    asyncio.run(rl.train(stage, home.tasks, folder=tmp_path, log=rows.append))
    costs = {"seconds/rollout", "seconds/reward", "seconds/train", "seconds/publish", "tokens_per_second", "memory_gib"}
    assert costs <= rows[0].keys()
    assert all(rows[0][name] > 0 for name in costs)
