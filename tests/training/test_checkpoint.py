"""Checkpoints: written atomically, resumed from the newest; an unreadable one raises an error with its path."""

import json
import os
import shutil
from traceback import StackSummary
from types import SimpleNamespace

import pytest
import torch
from error_cases import raises
from torch.distributed.checkpoint.api import CheckpointException
from training_cases import Killed, are_equal, copy_weights
from transformers import AutoModelForImageTextToText, AutoTokenizer

from saccade.config.schema import CheckpointConfig, SftConfig
from saccade.errors import RunError
from saccade.models import checkpoint_io
from saccade.runs import pipeline
from saccade.training import checkpoint
from saccade.training.distributed import worker
from saccade.training.distributed.vlm import ShardedOptimizer
from saccade.training.optimizer import Optimizer


@pytest.fixture(scope="module")
def components(workspace):
    return workspace.load_components()


@pytest.fixture
def optimizer(components):
    """An optimizer with moments, as after a step."""
    optimizer = load_optimizer(components)
    for parameter in components.vlm.trainable_parameters:
        parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer.step()
    return optimizer


def load_optimizer(components):
    return Optimizer(components.vlm.model, components.recipe.sft.optim, 4)


def save(folder, step, components, optimizer, **trainer_state):
    return checkpoint.save_checkpoint(
        folder, step=step, vlm=components.vlm, optimizer=optimizer, trainer_state=trainer_state
    )


def list_steps(folder):
    return [saved.step for saved in checkpoint.list_checkpoints(folder)]


def test_transformers_opens_a_checkpoint(tmp_path, components, optimizer):
    saved = save(tmp_path, 3, components, optimizer)
    assert saved == checkpoint.Checkpoint(step=3, folder=tmp_path / "step-000003")
    assert saved == checkpoint.find_newest_checkpoint(tmp_path)
    model = AutoModelForImageTextToText.from_pretrained(saved.folder, dtype=torch.float32)
    assert are_equal(dict(model.named_parameters()), copy_weights(components))
    tokenizer = AutoTokenizer.from_pretrained(saved.folder)
    assert tuple(tokenizer.encode("When is red shown?")) == components.vlm.renderer.encode("When is red shown?")


def test_restore_loads_optimizer_and_trainer_state(tmp_path, components, optimizer):
    saved = save(tmp_path, 3, components, optimizer, position=[1, "two"])
    restored = load_optimizer(components)
    assert saved.restore(restored) == {"step": 3, "position": [1, "two"]}
    pairs = zip(optimizer.state_dict()["optimizers"], restored.state_dict()["optimizers"], strict=True)
    for state, restored_state in pairs:
        assert state["state"].keys() == restored_state["state"].keys() != set()
        for key, moments in state["state"].items():
            assert all(torch.equal(moments[name], restored_state["state"][key][name]) for name in moments)


def test_the_two_newest_checkpoints_and_other_folders_are_kept(tmp_path, components, optimizer):
    assert checkpoint.find_newest_checkpoint(tmp_path / "nowhere") is None
    for name in ("step-000001-mine", "step-best", ".step-000009.part"):
        (tmp_path / name).mkdir()
    for step in (1, 2, 3):
        save(tmp_path, step, components, optimizer)
    assert list_steps(tmp_path) == [2, 3]
    assert (tmp_path / "step-000001-mine").is_dir()
    assert (tmp_path / "step-best").is_dir()


@pytest.mark.parametrize(
    ("retention", "scores", "kept"),
    [
        ({}, {}, [11, 12]),
        ({"last": 1}, {}, [12]),
        ({"last": 1, "keep_steps": (3, 5)}, {}, [3, 5, 12]),
        ({"last": 1, "keep_every": 5}, {}, [5, 10, 12]),
        ({"last": 1, "best": 2}, {2: 0.25, 4: 0.5, 6: 0.5, 8: 0.75}, [4, 8, 12]),
        ({"last": 1, "best": 1, "mode": "min"}, {2: 0.25, 4: 0.5, 6: float("nan")}, [2, 12]),
        ({"last": 2, "best": 1}, {99: 1.0}, [11, 12]),  # no checkpoint of the best step
    ],
)
def test_retention_selects_checkpoints(tmp_path, retention, scores, kept):
    for step in range(1, 13):
        (tmp_path / f"step-{step:06d}").mkdir()
    checkpoint.prune_checkpoints(tmp_path, CheckpointConfig(**retention), scores)
    assert list_steps(tmp_path) == kept


def test_the_best_checkpoint_is_linked(tmp_path):
    retention = CheckpointConfig(last=1, best=1)
    for step, scores in ((1, {1: 0.5}), (2, {1: 0.5, 2: 0.25}), (3, {1: 0.5, 2: 0.25, 3: 0.75})):
        (tmp_path / f"step-{step:06d}").mkdir()
        checkpoint.prune_checkpoints(tmp_path, retention, scores)
        best = max(scores, key=scores.get)
        assert (tmp_path / "best").resolve().name == f"step-{best:06d}"
        assert not (tmp_path / "best").readlink().is_absolute()  # the run can be moved
    assert list_steps(tmp_path) == [3]


def test_a_users_folder_named_best_stays(tmp_path):
    for name in ("best", "step-000001"):
        (tmp_path / name).mkdir()
    checkpoint.prune_checkpoints(tmp_path, CheckpointConfig(best=1), {1: 1.0})
    assert not (tmp_path / "best").is_symlink()


def test_a_checkpoint_that_a_training_starts_from_is_never_deleted(tmp_path):
    for step in (1, 2, 3, 4):
        (tmp_path / f"step-{step:06d}").mkdir()
    (tmp_path / "step-000002" / "trainer_state.json").write_text("{}")
    for step in (1, 2):
        checkpoint.protect_checkpoint(tmp_path / f"step-{step:06d}")  # the first is no checkpoint of a training
    checkpoint.prune_checkpoints(tmp_path, CheckpointConfig(last=1), {})
    assert list_steps(tmp_path) == [2, 4]


def test_saved_steps():
    settings = SftConfig(steps=10, save_every=4, checkpoints=CheckpointConfig(keep_steps=(5,), keep_every=3, best=1))
    assert [step for step in range(1, 11) if checkpoint.should_save(step, settings)] == [3, 4, 5, 6, 8, 9, 10]
    assert checkpoint.should_save(7, settings, is_validated=True)
    assert checkpoint.count_kept_checkpoints(settings) == 2 + 1 + 3 + 1


@pytest.mark.parametrize("function", ["replace", "rmtree"])
@pytest.mark.parametrize("at", range(3))
def test_a_kill_while_pruning_loses_nothing(tmp_path, monkeypatch, function, at):
    """It is killed at each of its deletions; every checkpoint that remains is whole, and the next call completes it."""
    for step in range(1, 6):
        (tmp_path / f"step-{step:06d}").mkdir()
        (tmp_path / f"step-{step:06d}" / "weights").write_text("whole")
    calls, module = [], {"replace": os, "rmtree": shutil}[function]
    real = getattr(module, function)

    def kill(path, *others, **options):
        calls.append(path)
        if len(calls) > at:
            raise Killed
        return real(path, *others, **options)

    retention, scores = CheckpointConfig(last=1, best=1), {2: 1.0}
    with monkeypatch.context() as patch:
        patch.setattr(module, function, kill)
        with pytest.raises(Killed):
            checkpoint.prune_checkpoints(tmp_path, retention, scores)
    assert {2, 5} <= {*list_steps(tmp_path)}
    assert all((saved.folder / "weights").read_text() == "whole" for saved in checkpoint.list_checkpoints(tmp_path))
    checkpoint.prune_checkpoints(tmp_path, retention, scores)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best", "step-000002", "step-000005"]


def test_checkpoints_are_sorted_by_number(tmp_path):
    for step in (1000000, 999999, 20):
        (tmp_path / f"step-{step:06d}").mkdir()
    assert list_steps(tmp_path) == [20, 999999, 1000000]


# ---- kills -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("function", ["save_file", "torch.save", "rename"])
def test_a_kill_while_writing_leaves_the_previous_checkpoint(tmp_path, components, optimizer, monkeypatch, function):
    first = save(tmp_path, 1, components, optimizer)
    files = sorted(path.name for path in first.folder.iterdir())

    def kill(*_, **__):
        raise Killed

    with monkeypatch.context() as patch:
        targets = {"save_file": (checkpoint_io, "save_file"), "torch.save": (torch, "save"), "rename": (os, "replace")}
        patch.setattr(*targets[function], kill)
        with pytest.raises(Killed):
            save(tmp_path, 2, components, optimizer)
    assert checkpoint.find_newest_checkpoint(tmp_path) == first
    first.restore(load_optimizer(components))
    second = save(tmp_path, 2, components, optimizer)  # replaces the partial folder
    assert sorted(path.name for path in second.folder.iterdir()) == files
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000001", "step-000002"]


def test_a_full_disk_raises_with_the_checkpoints_path(tmp_path, components, optimizer, monkeypatch):
    save(tmp_path, 1, components, optimizer)

    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", fail)
    with raises(RunError, key=str(tmp_path / "step-000002")) as caught:
        save(tmp_path, 2, components, optimizer)
    assert "--resume" not in str(caught.value)  # no folder above is a run
    for name in ("invocations.json", "recipe.yaml"):
        (tmp_path / name).touch()
    with raises(RunError, key=str(tmp_path / "step-000002")) as caught:
        save(tmp_path, 2, components, optimizer)
    assert "--resume" in str(caught.value)
    assert checkpoint.find_newest_checkpoint(tmp_path).step == 1


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("enforce fail")])
def test_a_full_disk_under_a_sharded_checkpoint_says_what_to_do(tmp_path, monkeypatch, error):
    def fail(*_, **__):
        raise CheckpointException("write", {1: (error, StackSummary())})

    monkeypatch.setattr(worker, "save", fail)
    ranks = SimpleNamespace(call=lambda _, folder: worker._write_state({}, folder, None))
    unused = SimpleNamespace(save=lambda _: None)
    with raises(RunError, key=str(tmp_path / "step-000001")) as caught:
        checkpoint.save_checkpoint(tmp_path, step=1, vlm=unused, optimizer=ShardedOptimizer(ranks), trainer_state={})
    assert "free some space, then repeat the command" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


# ---- unreadable checkpoints ------------------------------------------------------------------------------------------


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path):
    path.write_bytes(b"")


def overwrite(path):
    path.write_bytes(b"not a checkpoint" * 100)


def delete(path):
    path.unlink()


@pytest.fixture(scope="module")
def run(workspace, tmp_path_factory):
    """The folder of a run that stopped after its checkpoint of step 2."""
    folder = tmp_path_factory.mktemp("stopped") / "run"

    def stop(step, values):
        if step == 3:
            raise Killed

    with pytest.raises(Killed):
        pipeline.run_sft(folder, workspace.load_recipe("sft.save_every=1"), on_step=stop)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "file", ["optimizer.pt", "trainer_state.json", "model.safetensors", "config.json", "tokenizer.json"]
)
@pytest.mark.parametrize("damage", [truncate, empty, overwrite, delete])
def test_a_damaged_checkpoint_raises_with_its_path(workspace, run, tmp_path, file, damage):
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    damage(folder / "sft/step-000002" / file)
    with raises(RunError) as caught:
        pipeline.run_sft(folder, workspace.load_recipe("sft.save_every=1"), resume=True, on_step=lambda *_: None)
    assert str(folder / "sft/step-000002") in str(caught.value)


@pytest.mark.slow
def test_one_changed_byte_of_any_file_names_the_file(tmp_path, components, optimizer):
    saved = save(tmp_path, 3, components, optimizer)
    files = [path for path in sorted(saved.folder.rglob("*")) if path.is_file()]
    assert {"checksums.json", "model.safetensors", "optimizer.pt", "trainer_state.json"} <= {f.name for f in files}
    for file in files:
        content = file.read_bytes()
        for position in (0, len(content) // 2, len(content) - 1):
            changed = bytearray(content)
            changed[position] ^= 1
            file.write_bytes(changed)
            with raises(RunError, key=str(saved.folder)) as caught:
                saved.restore(optimizer)
            assert str(file) in str(caught.value)
        file.write_bytes(content)
    assert saved.restore(optimizer) == {"step": 3}


@pytest.mark.parametrize(
    "find", [checkpoint.find_newest_checkpoint, lambda folder: checkpoint.find_checkpoint(folder, "9")]
)
def test_a_renamed_checkpoint_is_refused(tmp_path, components, optimizer, find):
    saved = save(tmp_path, 3, components, optimizer)
    renamed = saved.folder.rename(tmp_path / "step-000009")
    with raises(RunError, key=str(renamed), value=3):
        find(tmp_path)


@pytest.mark.slow
def test_after_deleting_a_checkpoint_the_run_resumes_from_the_previous_one(workspace, run, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    shutil.rmtree(folder / "sft/step-000002")
    steps, recipe = [], workspace.load_recipe("sft.save_every=1")
    losses = [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    last = pipeline.run_sft(folder, recipe, resume=True, on_step=lambda step, values: steps.append(step))
    assert (steps, last.name) == ([2, 3, 4], "step-000004")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]  # those after the checkpoint were removed
    assert [line["loss"] for line in lines[:3]] == losses


@pytest.mark.slow
def test_a_checkpoint_of_another_optimizer_raises(workspace, run, tmp_path):
    folder = tmp_path / "sft"
    shutil.copytree(run / "sft", folder)
    components = workspace.load_components("sft.optim.name=adamw", weights=folder / "step-000002")
    with raises(RunError, key=str(folder / "step-000002")):
        workspace.run_sft(components, folder)


def test_another_recipe_cannot_resume_a_run(workspace, run):
    other = workspace.load_recipe("sft.save_every=1", "sft.optim.max_grad_norm=0.7")
    with raises(RunError) as caught:
        pipeline.run_sft(run, other, resume=True, on_step=lambda step, values: None)
    assert "sft.optim.max_grad_norm" in str(caught.value)


@pytest.mark.slow
def test_a_resumed_run_may_have_more_steps(workspace, run, tmp_path):
    folder, steps = tmp_path / "run", []
    shutil.copytree(run, folder)
    longer = workspace.load_recipe("sft={save_every: 1, steps: 5}")
    last = pipeline.run_sft(folder, longer, resume=True, on_step=lambda step, values: steps.append(step))
    assert (steps, last.name) == ([3, 4, 5], "step-000005")
    assert json.loads((folder / "invocations.json").read_text())[-1]["changed"] == {"sft.steps": [4, 5]}
