"""The weights that RL began with, in place of the present ones for as long as it takes."""

import importlib.util
import shutil

import pytest
import torch
from training_cases import equal, turns, weights, with_score

from saccade.errors import RunError
from saccade.training.reference import Reference, first_weights, trained

FEW = ("rl.group=2", "rl.updates=2", "sampling.max_tokens=4", "rl.optim.warmup=0")
needs_peft = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")


def moved(stage):
    """The stage with every trainable weight moved."""
    with torch.no_grad():
        for value in trained(stage.backbone).values():
            value.add_(0.5)
    return stage


@pytest.mark.parametrize("keep", ["device", "cpu"])
def test_inside_the_backbone_is_the_reference_and_afterwards_itself(home, keep):
    stage = home.stage()
    before = weights(stage)
    reference = Reference(stage.backbone, trained(stage.backbone), keep)
    after = weights(moved(stage))
    places = {name: value.data_ptr() for name, value in trained(stage.backbone).items()}
    for _ in range(2):
        with reference.in_place():
            assert equal(weights(stage), before)
        assert equal(weights(stage), after)
    with pytest.raises(KeyError), reference.in_place():
        raise KeyError
    assert equal(weights(stage), after)
    assert {name: value.data_ptr() for name, value in trained(stage.backbone).items()} == places, "a copy was made"


def test_the_first_weights_are_read_from_where_rl_began(home):
    stage = moved(home.stage())
    assert equal(dict(first_weights(stage.backbone, str(home.root / "model"))), weights(home.stage()))
    with pytest.raises(RunError, match=r"rl\.kl needs the weights .*gone that RL began with"):
        first_weights(stage.backbone, str(home.root / "gone"))


@needs_peft
def test_of_a_model_with_adapters_the_adapters_alone_are_kept(home):
    stage = home.stage("model.lora_rank=2")
    reference = Reference(stage.backbone, trained(stage.backbone), "device")
    assert len(reference._pairs) == len(trained(stage.backbone)) < len(weights(stage))
    before = weights(stage)
    moved(stage)
    with reference.in_place():
        assert equal(weights(stage), before)


@pytest.mark.slow
@pytest.mark.parametrize("kl", ["{loss: 0.1}", "{reward: 0.1}", "{reward: 0.1, estimator: k3, keep: cpu}"])
def test_a_run_measures_how_far_it_has_gone(home, tmp_path, kl):
    """At first policy and reference are one; after an update they are not."""
    stage = with_score(home.stage(*FEW, "rl.updates=1", f"rl.kl={kl}", "rl.steps=2"), turns)
    first, second = home.rl(stage, tmp_path)
    assert abs(first["kl"]) < 1e-6
    assert second["kl"] > 1e-5


def test_without_a_coefficient_nothing_is_kept_or_measured(home, tmp_path, monkeypatch):
    monkeypatch.setattr("saccade.training.rl.Reference", None)
    [row] = home.rl(with_score(home.stage(*FEW, "rl.steps=1"), turns), tmp_path)
    assert "kl" not in row


@pytest.mark.slow
def test_a_large_coefficient_holds_the_policy(home, tmp_path):
    def far(weight):
        chosen = ("rl.steps=4", f"rl.kl.loss={weight}")
        rows = home.rl(with_score(home.stage(*FEW, *chosen), turns), tmp_path / str(weight))
        return rows[-1]["kl"]

    assert far(100.0) < 0.5 * far(1e-9)


@pytest.mark.slow
def test_a_run_that_was_moved_finds_the_weights_that_it_began_with(home, tmp_path):
    chosen, here, there = (*FEW, "rl.kl.loss=0.1", "rl.steps=3", "rl.save_every=1"), tmp_path / "a", tmp_path / "b"
    shutil.copytree(home.root / "model", here / "sft" / "step-000001")
    rows = home.rl(with_score(home.stage(*chosen, weights=here / "sft/step-000001"), turns), here / "rl", die_at=3)
    here.rename(there)
    for last in ("step-000002", "step-000003"):  # resumed, and resumed again
        assert str(tmp_path) not in (there / "rl/step-000002/notes.json").read_text()
        resumed = with_score(home.stage(*chosen, weights=there / "rl" / last), turns)
        assert home.rl(resumed, there / "rl") == (rows[2:] if last == "step-000002" else [])


@pytest.mark.slow
def test_a_resumed_run_is_held_to_the_same_weights(home, tmp_path):
    chosen = (*FEW, "rl.kl.loss=0.1", "rl.steps=3", "rl.save_every=1")
    rows = home.rl(with_score(home.stage(*chosen), turns), tmp_path / "whole")
    home.rl(with_score(home.stage(*chosen), turns), tmp_path / "cut", die_at=3)
    resumed = with_score(home.stage(*chosen, weights=tmp_path / "cut/step-000002"), turns)
    assert home.rl(resumed, tmp_path / "cut") == rows[2:]
