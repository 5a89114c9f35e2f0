"""NaN in weights, losses, gradients and updates: the run stops, and no checkpoint holds it."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from error_cases import raises
from test_policy_update import make_batch
from training_cases import alternate, with_reward

from saccade.config.schema import ModelConfig
from saccade.errors import ModelError, RunError
from saccade.models import checkpoint_io
from saccade.models.vlm import VisionLanguageModel
from saccade.training import policy_update
from saccade.training.checkpoint import list_checkpoints
from saccade.training.optimizer import Optimizer
from saccade.training.train_step import MicroBatchResult, require_finite_losses


def test_a_checkpoint_whose_weight_is_nan_is_refused(workspace, tmp_path):
    components = workspace.load_components()
    components.vlm.model.model.language_model.layers[1].mlp.up_proj.weight.data[3, 4] = math.inf
    components.vlm.save(tmp_path)
    with raises(ModelError, key="model.path", value=str(tmp_path)) as caught:
        VisionLanguageModel(ModelConfig(path=str(tmp_path)))
    assert "language_model.layers.1.mlp.up_proj.weight" in str(caught.value)


def test_a_sum_that_overflows_is_finite():
    tensors = {"a": torch.full((4,), 3e38), "b": torch.arange(3), "c": torch.tensor([1.0, math.nan])}
    assert checkpoint_io.find_nonfinite(tensors) == "c"
    assert checkpoint_io.find_nonfinite({"a": tensors["a"], "b": tensors["b"]}) is None
    assert checkpoint_io.find_nonfinite({"c": torch.tensor([math.inf, -math.inf])}) == "c"


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    return VisionLanguageModel(ModelConfig(path=str(folder))).model.state_dict()  # which refuses NaN


def plant(monkeypatch, module, name, at):
    """Make a loss NaN from call `at` on."""
    num_calls, compute = 0, getattr(module, name)

    def compute_loss(*args, **settings):
        nonlocal num_calls
        num_calls += 1
        loss, stats = compute(*args, **settings)
        return (loss * math.nan if num_calls >= at else loss), stats

    monkeypatch.setattr(module, name, compute_loss)


@pytest.mark.slow
def test_a_loss_that_is_nan_stops_rl_after_the_step_before(workspace, tmp_path, monkeypatch):
    components = with_reward(workspace.load_components("rl={save_every: 100, micro_batch_size: 64}"), alternate)
    plant(monkeypatch, policy_update, "compute_policy_loss", at=3)
    rows = []
    with raises(RunError, key="loss") as caught:
        rows += workspace.run_rl(components, tmp_path)
    assert math.isnan(caught.value.value)
    assert str(caught.value).startswith("step 3: ")
    assert [saved.step for saved in list_checkpoints(tmp_path)] == [2]
    assert read_weights(tmp_path / "step-000002")


@pytest.mark.slow
def test_a_gradient_that_is_nan_stops_sft_after_the_step_before(workspace, tmp_path, monkeypatch):
    step = Optimizer.step

    def plant_and_step(self):
        if self.current_step == 3:
            self._trainable["model.language_model.layers.0.mlp.up_proj.weight"].grad[0, 0] = math.nan
        return step(self)

    monkeypatch.setattr(Optimizer, "step", plant_and_step)
    components = workspace.load_components("sft={steps: 4, save_every: 100}")
    with raises(RunError, key="optim.lr") as caught:
        workspace.run_sft(components, tmp_path)
    assert "step 3: the gradient of model.language_model.layers.0.mlp.up_proj.weight" in str(caught.value)
    assert [saved.step for saved in list_checkpoints(tmp_path)] == [2]


@pytest.mark.slow
def test_an_update_that_makes_a_weight_infinite_is_not_saved(workspace, tmp_path, monkeypatch):
    start_step = Optimizer.start_step

    def start(self, step):
        start_step(self, step)
        for group in self.optimizers[0].param_groups if step == 2 else ():
            group["lr"] = math.inf

    monkeypatch.setattr(Optimizer, "start_step", start)
    components = workspace.load_components("sft={steps: 4, save_every: 1}")
    with raises(RunError, key="optim.lr") as caught:
        workspace.run_sft(components, tmp_path)
    assert str(caught.value).startswith("step 3: ")
    steps = [saved.step for saved in list_checkpoints(tmp_path)]
    assert steps[-1] == 2


@pytest.mark.parametrize(
    ("advantage", "entropy", "name"),
    [(math.nan, 1.0, "advantage_N hold"), (1.0, math.nan, "the logits "), (1.0, 1.0, "its inputs are finite")],
)
def test_the_first_tensor_that_is_nan_is_named(advantage, entropy, name):
    batch = make_batch([0, 0], [-1.0, -1.2], advantage=advantage)
    results = [
        MicroBatchResult(loss=loss, entropy=nats, stats={}, logp_N=np.zeros(2), entropy_N=np.zeros(2))
        for loss, nats in [(0.5, 1.0), (math.nan, entropy)]
    ]
    with raises(RunError, key="loss") as caught:
        require_finite_losses([batch, batch], results, step=4)
    assert str(caught.value).startswith("step 4: the loss of micro-batch 2 of 2")
    assert f"({name}" in str(caught.value)
