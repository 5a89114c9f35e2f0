"""Checkpoints written beside the training: what they hold, when they appear, and what a failed one costs."""

import asyncio
import errno
import threading

import pytest
import torch
from error_cases import raises
from training_cases import are_equal, copy_weights

from saccade.config.schema import CheckpointConfig
from saccade.errors import AlarmError, RunError
from saccade.models.lora import get_adapter_weights
from saccade.training import checkpoint, sft
from saccade.training.checkpoint_writer import CheckpointWriter, FinishedStep, save_on_stop
from saccade.training.optimizer import Optimizer


def update(components, optimizer):
    for parameter in components.vlm.trainable_parameters:
        parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer.step()


def build_writer(components, folder, **retention):
    optimizer = Optimizer(components.vlm.model, components.recipe.sft.optim, 4)
    return CheckpointWriter(
        folder=folder,
        vlm=components.vlm,
        optimizer=optimizer,
        retention=CheckpointConfig(**retention),
        get_scores=lambda metric: {},
    )


@pytest.fixture
def gate(monkeypatch):
    """An event without which no checkpoint is written."""
    may_write, save = threading.Event(), checkpoint.save_checkpoint

    def wait_and_save(*arguments, **settings):
        assert may_write.wait(60)
        return save(*arguments, **settings)

    monkeypatch.setattr(checkpoint, "save_checkpoint", wait_and_save)
    yield may_write
    may_write.set()


def list_steps(folder):
    return [saved.step for saved in checkpoint.list_checkpoints(folder)]


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [(), ("model.lora_rank=2",), ("model.dtype=bfloat16",)])
def test_a_checkpoint_holds_the_state_of_its_step(workspace, tmp_path, gate, overrides):
    """The weights and the optimizer change while it is written; the copy equals a save that is waited for, in bytes."""
    if overrides == ("model.lora_rank=2",):
        pytest.importorskip("peft")
    components = workspace.load_components(*overrides)
    writer = build_writer(components, tmp_path / "background")
    update(components, writer.optimizer)
    finished = FinishedStep(step=1, trainer_state={"next_index": 7})

    async def run():
        await writer.save(finished)
        assert list_steps(writer.folder) == []
        update(components, writer.optimizer)
        second = asyncio.create_task(writer.save(FinishedStep(step=2, trainer_state={})))
        await asyncio.sleep(0.05)
        assert not second.done()  # at most one write is in progress
        gate.set()
        await second
        assert list_steps(writer.folder) == [1]
        await writer.finish()

    before = copy_weights(components)
    asyncio.run(run())
    assert not are_equal(copy_weights(components), before)
    assert list_steps(writer.folder) == [1, 2]
    again = workspace.load_components(*overrides)
    waited = build_writer(again, tmp_path / "waited", background=False)
    update(again, waited.optimizer)
    asyncio.run(waited.save(finished))
    assert get_adapter_weights(again.vlm.model).keys() == get_adapter_weights(components.vlm.model).keys()
    files = {path.name: path for path in (waited.folder / "step-000001").iterdir()}
    assert {"model.safetensors", "optimizer.pt", "checksums.json"} <= files.keys()
    for name, path in files.items():
        assert (writer.folder / "step-000001" / name).read_bytes() == path.read_bytes(), name


@pytest.mark.slow
@pytest.mark.parametrize("background", [True, False])
def test_a_save_that_fails_stops_the_training_once(workspace, tmp_path, monkeypatch, caplog, background):
    """A full disk at the second checkpoint: the first stays, and the stop doesn't try a third."""
    components = workspace.load_components(f"sft={{save_every: 1, checkpoints: {{background: {background}}}}}")
    save, attempts = torch.save, []

    def fail_second(*arguments, **settings):
        attempts.append(arguments)
        if len(attempts) > 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return save(*arguments, **settings)

    monkeypatch.setattr(torch, "save", fail_second)
    with raises(RunError, key=str(tmp_path / "step-000002")):
        asyncio.run(sft.train(components, workspace.demonstrations, folder=tmp_path, log_step=lambda values: None))
    assert len(attempts) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]
    assert not caplog.records


def test_a_stop_waits_for_the_write_in_progress(workspace, tmp_path, gate):
    components = workspace.load_components()
    writer = build_writer(components, tmp_path)

    async def run():
        async with save_on_stop(writer, lambda: FinishedStep(step=2, trainer_state={})):
            await writer.save(FinishedStep(step=1, trainer_state={}))
            asyncio.get_running_loop().call_later(0.05, gate.set)
            raise AlarmError("stop")

    with pytest.raises(AlarmError):
        asyncio.run(run())
    assert list_steps(tmp_path) == [1, 2]


def test_pruning_waits_for_the_write_in_progress(workspace, tmp_path, gate):
    """It would delete the temporary folder."""
    components = workspace.load_components()
    writer = build_writer(components, tmp_path, last=1)

    async def run():
        await writer.save(FinishedStep(step=1, trainer_state={}))
        asyncio.get_running_loop().call_later(0.05, gate.set)
        await writer.prune()

    asyncio.run(run())
    assert list_steps(tmp_path) == [1]
    assert not list(tmp_path.glob(".step-*"))
