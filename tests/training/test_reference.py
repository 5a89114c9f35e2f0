"""The reference policy: the weights that RL started from, swapped in for a forward pass."""

import importlib.util
import shutil

import pytest
import torch
from error_cases import raises
from training_cases import alternate, are_equal, copy_weights, with_reward

from saccade.errors import RunError
from saccade.training.reference import Reference, get_trainable_parameters, load_initial_weights

FEW = ("rl.group_size=2", "rl.epochs_per_batch=2", "sampling.max_tokens=4", "rl.optim.warmup_steps=0")
needs_peft = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")


def change_weights(components):
    """Change every trainable weight in place."""
    with torch.no_grad():
        for parameter in get_trainable_parameters(components.vlm).values():
            parameter.add_(0.5)
    return components


def get_addresses(components):
    return {name: value.data_ptr() for name, value in get_trainable_parameters(components.vlm).items()}


@pytest.mark.parametrize("reference_device", ["device", "cpu"])
def test_the_reference_is_swapped_in_and_out_without_copies(workspace, reference_device):
    components = workspace.load_components()
    before = copy_weights(components)
    reference = Reference(components.vlm, get_trainable_parameters(components.vlm), reference_device)
    after = copy_weights(change_weights(components))
    addresses = get_addresses(components)
    for _ in range(2):
        with reference.swap_in():
            assert are_equal(copy_weights(components), before)
        assert are_equal(copy_weights(components), after)
    with pytest.raises(KeyError), reference.swap_in():
        raise KeyError
    assert are_equal(copy_weights(components), after)
    assert get_addresses(components) == addresses


def test_initial_weights_are_read_from_their_folder(workspace):
    components = change_weights(workspace.load_components())
    initial_weights = load_initial_weights(components.vlm, str(workspace.root / "model"))
    assert are_equal(dict(initial_weights), copy_weights(workspace.load_components()))
    missing = str(workspace.root / "missing")
    with raises(RunError, key=missing):
        load_initial_weights(components.vlm, missing)


@needs_peft
def test_with_lora_only_the_adapters_are_stored(workspace):
    components = workspace.load_components("model.lora_rank=2")
    reference = Reference(components.vlm, get_trainable_parameters(components.vlm), "device")
    assert (
        len(reference._parameter_pairs) == len(get_trainable_parameters(components.vlm)) < len(copy_weights(components))
    )
    before = copy_weights(components)
    change_weights(components)
    with reference.swap_in():
        assert are_equal(copy_weights(components), before)


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [(), pytest.param(("model.lora_rank=2",), marks=needs_peft)])
def test_frozen_weights_are_not_stored_and_do_not_change(workspace, tmp_path, overrides):
    """With LoRA only the adapters are trained, with and without the switch."""
    components = workspace.load_components(*FEW, *overrides, "model.trained_weights=language_model", "rl.steps=1")
    before, trainable = copy_weights(components), get_trainable_parameters(components.vlm)
    assert not any(".visual." in name for name in trainable)
    assert bool(overrides) == all(".lora_" in name for name in trainable)
    [row] = workspace.run_rl(with_reward(components, alternate), tmp_path)
    assert row["updates"]
    after = copy_weights(components)
    changed = {name for name, value in before.items() if not torch.equal(value, after[name])}
    assert changed
    assert changed <= trainable.keys()


@pytest.mark.slow
@pytest.mark.parametrize(
    "kl",
    [
        "{loss_coef: 0.1}",
        "{advantage_coef: 0.1}",
        "{advantage_coef: 0.1, penalty_estimator: k3, reference_device: cpu}",
    ],
)
def test_a_run_reports_the_kl_divergence(workspace, tmp_path, kl):
    """Policy and reference are equal at first, and differ after an update."""
    components = with_reward(
        workspace.load_components(*FEW, "rl.epochs_per_batch=1", f"rl.kl={kl}", "rl.steps=2"), alternate
    )
    first, second = workspace.run_rl(components, tmp_path)
    assert abs(first["kl"]) < 1e-6
    assert second["kl"] > 1e-5


def test_without_a_coefficient_there_is_no_reference(workspace, tmp_path, monkeypatch):
    monkeypatch.setattr("saccade.training.rl.Reference", None)
    [row] = workspace.run_rl(with_reward(workspace.load_components(*FEW, "rl.steps=1"), alternate), tmp_path)
    assert "kl" not in row


@pytest.mark.slow
def test_a_large_coefficient_keeps_the_policy_near_the_reference(workspace, tmp_path):
    def measure_kl(coefficient):
        overrides = (*FEW, "rl.steps=4", f"rl.kl.loss_coef={coefficient}")
        components = with_reward(workspace.load_components(*overrides), alternate)
        return workspace.run_rl(components, tmp_path / str(coefficient))[-1]["kl"]

    assert measure_kl(100.0) < 0.5 * measure_kl(1e-9)


WITH_KL = (*FEW, "rl.kl.loss_coef=0.1", "rl.steps=3", "rl.save_every=1")


@pytest.mark.slow
def test_a_moved_run_finds_its_initial_weights(workspace, tmp_path):
    folder, new_folder = tmp_path / "a", tmp_path / "b"
    shutil.copytree(workspace.root / "model", folder / "sft" / "step-000001")
    components = workspace.load_components(*WITH_KL, weights=folder / "sft/step-000001")
    rows = workspace.run_rl(with_reward(components, alternate), folder / "rl", kill_at=3)
    folder.rename(new_folder)
    for checkpoint in ("step-000002", "step-000003"):  # resumed twice
        assert str(tmp_path) not in (new_folder / "rl/step-000002/trainer_state.json").read_text()
        resumed = with_reward(workspace.load_components(*WITH_KL, weights=new_folder / "rl" / checkpoint), alternate)
        expected = rows[2:] if checkpoint == "step-000002" else []
        assert workspace.run_rl(resumed, new_folder / "rl") == expected


@pytest.mark.slow
def test_a_resumed_run_has_the_same_reference(workspace, tmp_path):
    rows = workspace.run_rl(with_reward(workspace.load_components(*WITH_KL), alternate), tmp_path / "whole")
    killed = with_reward(workspace.load_components(*WITH_KL), alternate)
    workspace.run_rl(killed, tmp_path / "killed", kill_at=3)
    resumed = with_reward(workspace.load_components(*WITH_KL, weights=tmp_path / "killed/step-000002"), alternate)
    assert workspace.run_rl(resumed, tmp_path / "killed") == rows[2:]
