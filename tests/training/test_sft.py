"""SFT: the loss decreases, a resumed run equals an uninterrupted one, packed samples don't affect each other."""

import asyncio
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from error_cases import raises
from training_cases import are_equal, copy_weights, interrupt

from saccade.config.schema import SftConfig
from saccade.errors import ConfigError, DataError
from saccade.ledger import Ledger
from saccade.training import checkpoint, sft
from saccade.training.optimizer import Optimizer
from saccade.training.packing import pack
from saccade.training.train_step import forward
from saccade.types import TrainingSample
from saccade.utils.hashing import derive_seed


def draw_samples(workspace, components, *, seed=1, auxiliary_fraction=0.5, settings=None, demonstrations=None):
    prefix_groups = sft.group_by_prefix(demonstrations or workspace.demonstrations)
    return asyncio.run(
        sft.draw_samples(
            components,
            prefix_groups,
            settings or components.recipe.sft,
            seed=seed,
            auxiliary_fraction=auxiliary_fraction,
        )
    )


@pytest.fixture(scope="module")
def whole_run(workspace, tmp_path_factory):
    """An uninterrupted run of four steps: components, metrics, folder."""
    components, folder = workspace.load_components(), tmp_path_factory.mktemp("sft")
    return components, workspace.run_sft(components, folder), folder


@pytest.fixture(scope="module")
def drawn_samples(workspace):
    """The components and the samples of a step."""
    components = workspace.load_components("sft.tokens_per_step=900")
    return components, draw_samples(workspace, components)


@pytest.mark.slow
def test_the_loss_decreases(workspace, tmp_path):
    components = workspace.load_components("sft={steps: 30, save_every: 30}")
    vocab_size = components.vlm.model.lm_head.out_features
    rows = workspace.run_sft(components, tmp_path, demonstrations=workspace.demonstrations[:8])
    assert rows[0]["loss"] == pytest.approx(math.log(vocab_size), rel=0.05)
    assert np.mean([row["loss"] for row in rows[-5:]]) < 0.6 * rows[0]["loss"]
    assert all(row["grad_norm"] > 0 and row["trained_tokens"] < row["packed_tokens"] for row in rows)


@pytest.mark.slow
def test_the_loss_is_the_mean_over_the_trained_tokens(drawn_samples, workspace):
    components, samples = drawn_samples
    logprobs = compute_logprobs(components, samples)
    trained = workspace.load_components()
    optimizer = Optimizer(trained.vlm.model, components.recipe.sft.optim, 1)
    report = sft.update_model(trained, samples, components.recipe.sft, optimizer)
    assert report.loss == pytest.approx(-float(torch.cat(logprobs).mean()), rel=1e-5)
    assert report.trained_tokens == sum(len(sample.ledger.sampled_tokens()) for sample in samples)


# ---- resuming --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_runs_with_equal_recipe_and_seed_are_equal(workspace, whole_run, tmp_path):
    components, rows, _ = whole_run
    second = workspace.load_components()
    assert workspace.run_sft(second, tmp_path) == rows
    assert are_equal(copy_weights(second), copy_weights(components))


@pytest.mark.slow
def test_another_seed_gives_another_run(workspace, whole_run, tmp_path):
    assert workspace.run_sft(workspace.load_components("seed=6"), tmp_path)[0] != whole_run[1][0]


@pytest.mark.slow
@pytest.mark.parametrize(("kill_at", "saved"), [(3, 2), (4, 2), (1, 0)])
def test_a_resumed_run_equals_the_uninterrupted_one(workspace, whole_run, tmp_path, kill_at, saved):
    components, rows, folder = whole_run
    assert workspace.run_sft(workspace.load_components(), tmp_path, kill_at=kill_at) == rows[:kill_at]
    last = checkpoint.find_newest_checkpoint(tmp_path)
    assert (last.step if last else 0) == saved
    resumed = workspace.load_components(weights=last.folder if last else None)
    assert workspace.run_sft(resumed, tmp_path) == rows[saved:]
    assert are_equal(copy_weights(resumed), copy_weights(components))
    states, resumed_states = (
        torch.load(run / "step-000004/optimizer.pt", weights_only=True)["optimizers"] for run in (folder, tmp_path)
    )
    for state, resumed_state in zip(states, resumed_states, strict=True):
        assert state["state"].keys() == resumed_state["state"].keys()
        for key, moments in state["state"].items():
            assert all(torch.equal(moments[name], resumed_state["state"][key][name]) for name in moments)


@pytest.mark.slow
@pytest.mark.parametrize("during", ["the log", "an update", "a checkpoint"])
def test_ctrl_c_saves_the_last_finished_step(workspace, whole_run, tmp_path, monkeypatch, during):
    """Steps 1 and 3 have no regular checkpoint."""
    components, rows, _ = whole_run
    calls = []

    def interrupt_first(function, number):
        def run(*arguments, **settings):
            calls.append(function)
            if len(calls) == number:
                interrupt()
            return function(*arguments, **settings)

        return run

    if during == "an update":
        monkeypatch.setattr(sft, "update_model", interrupt_first(sft.update_model, 4))
    if during == "a checkpoint":
        monkeypatch.setattr(checkpoint, "save_checkpoint", interrupt_first(checkpoint.save_checkpoint, 1))
    interrupted = workspace.load_components()
    finished = workspace.run_sft(interrupted, tmp_path, interrupt_at=3 if during == "the log" else 0)
    monkeypatch.undo()
    assert finished == rows[: len(finished)]
    last = checkpoint.find_newest_checkpoint(tmp_path)
    assert last.step == len(finished)
    assert last.step in {"the log": (3, 4), "an update": (3, 4), "a checkpoint": (2, 3)}[during]
    assert not list(tmp_path.glob(".step-*"))
    resumed = workspace.load_components(weights=last.folder)
    assert workspace.run_sft(resumed, tmp_path) == rows[last.step :]
    assert are_equal(copy_weights(resumed), copy_weights(components))


def test_a_finished_run_does_nothing_when_resumed(workspace, whole_run):
    _, _, folder = whole_run
    last = checkpoint.find_newest_checkpoint(folder)
    assert last.step == 4
    assert workspace.run_sft(workspace.load_components(weights=last.folder), folder) == []


def test_a_run_without_demonstrations_raises(workspace, tmp_path):
    with raises(DataError, key="data.demonstrations"):
        asyncio.run(sft.train(workspace.load_components(), [], folder=tmp_path, log_step=lambda values: None))


EPOCHS = (
    "sft={order: shuffled_epochs, auxiliary_fraction: 0.5, tokens_per_step: 300, steps: 4}",
    "sft.demonstrations_per_prefix=1",
    "model.trained_weights=language_model",
)


@pytest.mark.slow
def test_a_resumed_run_of_shuffled_epochs_equals_the_uninterrupted_one(workspace, tmp_path):
    """The vision tower and its projector are frozen: they don't change and have no optimizer state."""
    whole, resumed = workspace.load_components(*EPOCHS), workspace.load_components(*EPOCHS)
    before = copy_weights(whole)
    rows = workspace.run_sft(whole, tmp_path / "whole")
    workspace.run_sft(resumed, tmp_path / "killed", kill_at=3)
    resumed = workspace.load_components(*EPOCHS, weights=tmp_path / "killed/step-000002")
    assert workspace.run_sft(resumed, tmp_path / "killed") == rows[2:]
    after = copy_weights(whole)
    assert are_equal(copy_weights(resumed), after)
    changed = {name for name, value in after.items() if not torch.equal(value, before[name])}
    assert changed
    assert not any(".visual." in name for name in changed)
    states = torch.load(tmp_path / "whole/step-000004/optimizer.pt", weights_only=True)["optimizers"]
    num_optimized = sum(len(group["params"]) for state in states for group in state["param_groups"])
    assert num_optimized == sum(".visual." not in name for name in before) < len(before)


# ---- drawing samples -------------------------------------------------------------------------------------------------


def name_demonstrations(units):
    return [(item.task.id, item.frame_budget, item.is_auxiliary, item.replies) for unit in units for item in unit]


@pytest.mark.parametrize("unit_size", [1, 2, 100])
def test_an_epoch_has_every_demonstration_once_in_an_order_of_its_own(workspace, unit_size):
    prefix_groups = sft.group_by_prefix(workspace.demonstrations)
    first, second = (sft.shuffle_units(prefix_groups, unit_size, seed=5, epoch=epoch) for epoch in (0, 1))
    expected = sorted(map(repr, name_demonstrations([workspace.demonstrations])))
    for units in (first, second):
        assert sorted(map(repr, name_demonstrations(units))) == expected
        assert len(units) == sft.count_units(prefix_groups, unit_size)
        assert all(len(sft.group_by_prefix(unit)) == 1 and len(unit) <= unit_size for unit in units)
    assert name_demonstrations(first) != name_demonstrations(second)
    assert sft.shuffle_units(prefix_groups, unit_size, seed=6, epoch=0) != first


def test_steps_of_shuffled_epochs_continue_where_the_last_one_ended(workspace):
    """Two demonstrations are two epochs of two positions: the steps draw them again, across the end of an epoch."""
    components = workspace.load_components(*EPOCHS, "sft.tokens_per_step=1")
    prefix_groups = sft.group_by_prefix(workspace.demonstrations[:2])
    settings, position, drawn = components.recipe.sft, 0, []
    for _ in range(4):
        samples, position = asyncio.run(sft.draw_in_epochs(components, prefix_groups, settings, position))
        drawn.append(samples)
    assert position == 4
    units = [unit for epoch in (0, 1) for unit in sft.shuffle_units(prefix_groups, 1, seed=5, epoch=epoch)]
    for samples, unit in zip(drawn, units, strict=True):
        context = components.build_context(seed=5)
        assert samples == asyncio.run(sft._replay(components, unit, context))
    large = settings.model_copy(
        update={"tokens_per_step": sum(len(sample.ledger) for part in drawn for sample in part)}
    )
    together, position = asyncio.run(sft.draw_in_epochs(components, prefix_groups, large, 0))
    one_by_one = [sample for part in drawn for sample in part]
    assert together[: len(one_by_one)] == one_by_one


@pytest.mark.parametrize("key", ["auxiliary_fraction", "auxiliary_warmup"])
def test_shuffled_epochs_refuse_shares_of_auxiliary_demonstrations(key):
    with raises(ConfigError, key=f"sft.{key}", value=0.25):
        SftConfig(**{"order": "shuffled_epochs", key: 0.25})


def test_samples_depend_on_the_seed_only(drawn_samples, workspace):
    components, samples = drawn_samples
    assert draw_samples(workspace, components, seed=1) == samples
    assert draw_samples(workspace, components, seed=2) != samples


@pytest.mark.slow
def test_a_demonstration_is_replayed_once(workspace, monkeypatch):
    components = workspace.load_components("sft.steps=6")
    replayed, replay = [], sft.replay_demonstration

    async def record(demonstration, *arguments, **options):
        replayed.append(id(demonstration))
        return await replay(demonstration, *arguments, **options)

    async def draw_steps(groups):
        return [batch async for _, batch, _ in sft.iterate_batches(components, groups, 0)]

    groups = sft.group_by_prefix(workspace.demonstrations)
    without_cache = [
        asyncio.run(
            sft.draw_samples(
                components,
                groups,
                components.recipe.sft,
                derive_seed(components.recipe.seed, "sft", step),
                auxiliary_fraction=components.recipe.sft.auxiliary_fraction,
            )
        )
        for step in range(6)
    ]
    monkeypatch.setattr(sft, "replay_demonstration", record)
    samples = asyncio.run(draw_steps(groups))
    assert samples == without_cache
    assert len(replayed) == len(set(replayed)) < sum(map(len, samples))


def test_prefix_groups_are_drawn_until_the_step_has_its_tokens(drawn_samples, workspace):
    components, samples = drawn_samples
    settings = [components.recipe.sft.model_copy(update={"tokens_per_step": size}) for size in (1, 300, 900)]
    drawings = [draw_samples(workspace, components, settings=chosen) for chosen in settings]
    assert 0 < len(drawings[0]) < len(drawings[1]) < len(drawings[2])
    assert all(samples[: len(drawing)] == drawing for drawing in drawings)
    paths = {image.path for sample in drawings[0] for image in sample.ledger.images()}
    assert len(paths) == 1  # one prefix group, of one video


@pytest.mark.parametrize("auxiliary_fraction", [0.0, 1.0])
def test_the_fraction_of_auxiliary_prefix_groups(workspace, auxiliary_fraction):
    components = workspace.load_components()
    samples = draw_samples(workspace, components, auxiliary_fraction=auxiliary_fraction)
    assert has_main_conversation(components, samples) == (auxiliary_fraction == 0.0)


def has_main_conversation(components, samples):
    """Return whether some of the conversations have a prefill, which only main conversations have."""
    think = components.vlm.renderer.encode("<think>\n")
    return any(segment.tokens == think for sample in samples for segment in sample.ledger.segments)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("auxiliary_fraction", "auxiliary_warmup", "expected"),
    [(0, 0.5, [0, 0, 1, 1]), (0, 0, [1, 1, 1, 1]), (1, 0, [0, 0, 0, 0]), (0, 0.55, [0, 0, 1, 1])],
)
def test_auxiliary_groups_come_first_during_the_warmup(workspace, auxiliary_fraction, auxiliary_warmup, expected):
    components = workspace.load_components(
        "sft.steps=4", f"sft.auxiliary_fraction={auxiliary_fraction}", f"sft.auxiliary_warmup={auxiliary_warmup}"
    )

    async def draw_steps():
        prefix_groups = sft.group_by_prefix(workspace.demonstrations)
        return [
            has_main_conversation(components, samples)
            async for _, samples, _ in sft.iterate_batches(components, prefix_groups, 0)
        ]

    assert asyncio.run(draw_steps()) == expected


@pytest.mark.parametrize("is_auxiliary", [True, False])
def test_demonstrations_of_one_kind_suffice(workspace, is_auxiliary):
    demonstrations = [
        demonstration for demonstration in workspace.demonstrations if demonstration.is_auxiliary == is_auxiliary
    ]
    assert draw_samples(workspace, workspace.load_components(), demonstrations=demonstrations)


# ---- packed samples are independent ----------------------------------------------------------------------------------


def compute_logprobs(components, samples, pack_length=1024) -> list[torch.Tensor]:
    """Return the logprobs of each sample's trained tokens."""
    logprobs = [[] for _ in samples]
    batches = pack(
        samples,
        compute_positions=components.vlm.renderer.compute_position_ids,
        pack_length=pack_length,
        micro_batch_size=8,
    )
    for batch in batches:
        with torch.no_grad():
            logp_N, _ = forward(components.vlm, batch, load_pixels=components.media.load_pixels, temperature=1.0)
        for index, value in zip(batch.sample_N.tolist(), logp_N, strict=True):
            logprobs[index].append(value)
    return [torch.stack(values) for values in logprobs]


def change_token(sample: TrainingSample, *, is_sampled: bool) -> TrainingSample:
    """Replace the last token of the last reply before its stop token, or of the first segment (the prompt)."""
    segments = list(sample.ledger.segments)
    index = max(i for i, segment in enumerate(segments) if segment.is_sampled) if is_sampled else 0
    tokens = list(segments[index].tokens)
    position = max(0, len(tokens) - 2)
    tokens[position] = 11 if tokens[position] != 11 else 12
    segments[index] = replace(segments[index], tokens=tuple(tokens))
    return replace(sample, ledger=Ledger(segments=tuple(segments)))


def compute_differences(first, second):
    return [float((one - other).abs().max()) for one, other in zip(first, second, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("is_sampled", [True, False])
@pytest.mark.parametrize("pack_length", [1024, 96])
def test_changing_one_sample_changes_no_other(drawn_samples, is_sampled, pack_length):
    components, samples = drawn_samples
    before = compute_logprobs(components, samples, pack_length)
    for index in range(0, len(samples), 3):
        changed = [*samples[:index], change_token(samples[index], is_sampled=is_sampled), *samples[index + 1 :]]
        differences = compute_differences(before, compute_logprobs(components, changed, pack_length))
        assert differences.pop(index) > 1e-4
        assert max(differences) <= 1e-6


def test_packed_samples_have_the_logprobs_of_single_ones(drawn_samples):
    components, samples = drawn_samples
    packed = compute_logprobs(components, samples)
    single = [compute_logprobs(components, [sample])[0] for sample in samples]
    assert max(compute_differences(packed, single)) <= 2e-6


@pytest.fixture
def demonstrations_with_a_bad_one(workspace):
    """The demonstrations; one of them has a reply that is never reached."""
    first, *others = workspace.demonstrations
    return [others[0], replace(first, replies=(*first.replies, "surplus")), *others[1:]]


def test_a_demonstration_that_cannot_be_learned_stops_the_run(workspace, demonstrations_with_a_bad_one, tmp_path):
    with raises(DataError, key="sft.on_bad_demonstration", value="refuse") as caught:
        workspace.run_sft(
            workspace.load_components("sft.num_checked=0"), tmp_path, demonstrations=demonstrations_with_a_bad_one
        )
    assert f"row 2, task {workspace.demonstrations[0].task.id}" in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_demonstration_that_cannot_be_learned_is_left_out(workspace, demonstrations_with_a_bad_one, tmp_path):
    components = workspace.load_components("sft.num_checked=0", "sft.on_bad_demonstration=skip", "sft.steps=1")
    reports = []
    training = sft.train(
        components,
        demonstrations_with_a_bad_one,
        folder=tmp_path,
        log_step=lambda values: None,
        on_check=reports.append,
    )
    asyncio.run(training)
    (report,) = reports
    assert (report.num_rows, [*report.reasons_by_row]) == (len(demonstrations_with_a_bad_one), [2])
    with raises(DataError, key="sft.on_bad_demonstration", value="skip"):
        workspace.run_sft(components, tmp_path / "b", demonstrations=demonstrations_with_a_bad_one[1:2])


def test_sft_has_limits_of_its_own(workspace, tmp_path):
    with_calls = [item for item in workspace.demonstrations if item.children and not item.is_auxiliary][:2]
    assert with_calls
    with raises(DataError, key="sft.on_bad_demonstration"):
        workspace.run_sft(
            workspace.load_components("environment.settings.max_calls_per_turn=1", "sft.steps=1"),
            tmp_path / "a",
            demonstrations=with_calls,
        )
    own_limit = workspace.load_components(
        "environment.settings.max_calls_per_turn=1", "sft.environment_settings={max_calls_per_turn: 5}", "sft.steps=1"
    )
    assert workspace.run_sft(own_limit, tmp_path / "b", demonstrations=with_calls)
