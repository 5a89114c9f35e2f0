"""Checkpoints: whole or not at all, the newest is what a run goes on from, and a broken one says so in one sentence."""

import json
import os
import shutil

import pytest
import torch
from training_cases import Killed, equal, weights
from transformers import AutoModelForImageTextToText, AutoTokenizer

from saccade import stages
from saccade.errors import RunError
from saccade.model import layerwise
from saccade.training import checkpoint
from saccade.training.optim import Optimizer


@pytest.fixture(scope="module")
def stage(home):
    return home.stage()


@pytest.fixture
def optimizer(stage):
    """With moments, as after a step."""
    found = Optimizer(stage.backbone.model, stage.recipe.sft.optim, 4)
    for parameter in stage.backbone.parameters:
        parameter.grad = torch.full_like(parameter, 1e-3)
    found.step()
    return found


def save(folder, step, stage, optimizer, **notes):
    return checkpoint.save(folder, step=step, backbone=stage.backbone, optimizer=optimizer, notes=notes)


def test_a_checkpoint_is_a_model_folder_of_transformers(tmp_path, stage, optimizer):
    saved = save(tmp_path, 3, stage, optimizer)
    assert saved == checkpoint.Checkpoint(step=3, folder=tmp_path / "step-000003") == checkpoint.newest(tmp_path)
    model = AutoModelForImageTextToText.from_pretrained(saved.folder, dtype=torch.float32)
    assert equal(dict(model.named_parameters()), weights(stage))
    tokenizer = AutoTokenizer.from_pretrained(saved.folder)
    assert tuple(tokenizer.encode("When is red shown?")) == stage.backbone.renderer.encode("When is red shown?")


def test_what_is_saved_is_restored(tmp_path, stage, optimizer):
    saved = save(tmp_path, 3, stage, optimizer, mark=[1, "two"])
    fresh = Optimizer(stage.backbone.model, stage.recipe.sft.optim, 4)
    assert saved.restore(fresh) == {"mark": [1, "two"]}
    pairs = zip(optimizer.state()["parts"], fresh.state()["parts"], strict=True)
    for one, two in pairs:
        assert one["state"].keys() == two["state"].keys() != set()
        for key, moments in one["state"].items():
            assert all(torch.equal(moments[name], two["state"][key][name]) for name in moments)


def test_two_are_kept_and_strangers_stay(tmp_path, stage, optimizer):
    assert checkpoint.newest(tmp_path / "nowhere") is None
    for stranger in ("step-000001-mine", "step-best", ".step-000009.part"):
        (tmp_path / stranger).mkdir()
    for step in (1, 2, 3):
        save(tmp_path, step, stage, optimizer)
    assert [each.step for each in checkpoint.checkpoints(tmp_path)] == [2, 3]
    assert (tmp_path / "step-000001-mine").is_dir()
    assert (tmp_path / "step-best").is_dir()


def test_steps_are_in_the_order_of_their_numbers(tmp_path):
    for step in (1000000, 999999, 20):
        (tmp_path / f"step-{step:06d}").mkdir()
    assert [each.step for each in checkpoint.checkpoints(tmp_path)] == [20, 999999, 1000000]


# ---- kills -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["save_file", "torch.save", "rename"])
def test_a_kill_while_writing_leaves_the_old_one(tmp_path, stage, optimizer, monkeypatch, where):
    first = save(tmp_path, 1, stage, optimizer)
    files = sorted(path.name for path in first.folder.iterdir())

    def kill(*_, **__):
        raise Killed

    with monkeypatch.context() as patch:
        places = {"save_file": (layerwise, "save_file"), "torch.save": (torch, "save"), "rename": (os, "replace")}
        patch.setattr(*places[where], kill)
        with pytest.raises(Killed):
            save(tmp_path, 2, stage, optimizer)
    assert checkpoint.newest(tmp_path) == first
    first.restore(Optimizer(stage.backbone.model, stage.recipe.sft.optim, 4))
    second = save(tmp_path, 2, stage, optimizer)  # what the kill left is in nobody's way
    assert sorted(path.name for path in second.folder.iterdir()) == files
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000001", "step-000002"]


def test_a_full_disk_is_one_sentence(tmp_path, stage, optimizer, monkeypatch):
    save(tmp_path, 1, stage, optimizer)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(RunError, match=r"step-000002 can't be written; free space .*No space left"):
        save(tmp_path, 2, stage, optimizer)
    assert checkpoint.newest(tmp_path).step == 1


# ---- broken ones -----------------------------------------------------------------------------------------------------


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path):
    path.write_bytes(b"")


def garbage(path):
    path.write_bytes(b"not what you think" * 100)


def missing(path):
    path.unlink()


@pytest.fixture(scope="module")
def run(home, tmp_path_factory):
    """A run stopped after its checkpoint of step 2."""
    folder = tmp_path_factory.mktemp("broken") / "run"

    def stop(step, values):
        if step == 3:
            raise Killed

    with pytest.raises(Killed):
        stages.sft(folder, home.recipe("sft.save_every=1"), on_step=stop)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("file", ["optimizer.pt", "notes.json", "model.safetensors", "config.json", "tokenizer.json"])
@pytest.mark.parametrize("harm", [truncate, empty, garbage, missing])
def test_a_broken_checkpoint_is_one_sentence_that_names_it(home, run, tmp_path, file, harm):
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    harm(folder / "sft/step-000002" / file)
    with pytest.raises(RunError) as caught:
        stages.sft(folder, home.recipe("sft.save_every=1"), resume=True, on_step=lambda step, values: None)
    said = str(caught.value)
    assert "step-000002 can't be read; delete it to go on from the one before" in said
    assert "\n" not in said


@pytest.mark.slow
def test_after_the_broken_one_is_deleted_the_run_goes_on(home, run, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    shutil.rmtree(folder / "sft/step-000002")
    steps, recipe = [], home.recipe("sft.save_every=1")
    last = stages.sft(folder, recipe, resume=True, on_step=lambda step, values: steps.append(step))
    assert (steps, last.name) == ([2, 3, 4], "step-000004")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 2, 3, 4]
    assert [line["loss"] for line in lines[1:3]] == [line["loss"] for line in lines[3:5]]


def test_a_checkpoint_of_another_optimiser_is_refused(home, run, tmp_path):
    folder = tmp_path / "sft"
    shutil.copytree(run / "sft", folder)
    stage = home.stage("sft.optim.name=adamw", weights=folder / "step-000002")
    with pytest.raises(RunError, match="step-000002 can't be read; delete it"):
        home.sft(stage, folder)


def test_another_recipe_cant_resume(home, run):
    other = home.recipe("sft.save_every=1", "sft.optim.clip_norm=0.7")
    with pytest.raises(RunError, match=r"sft\.optim\.clip_norm"):
        stages.sft(run, other, resume=True, on_step=lambda step, values: None)


@pytest.mark.slow
def test_a_run_may_go_further_than_was_meant(home, run, tmp_path):
    folder, steps = tmp_path / "run", []
    shutil.copytree(run, folder)
    further = home.recipe("sft={save_every: 1, steps: 5}")
    last = stages.sft(folder, further, resume=True, on_step=lambda step, values: steps.append(step))
    assert (steps, last.name) == ([3, 4, 5], "step-000005")
    assert json.loads((folder / "versions.json").read_text())[-1]["changed"] == {"sft.steps": [4, 5]}
