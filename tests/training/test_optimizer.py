"""Learning-rate schedules and optimizer steps against numbers worked out by hand."""

import copy
import importlib.util
import math
import subprocess
import sys

import pytest
import torch
from error_cases import raises
from torch import nn

from saccade.checks.run_checks import check_recipe
from saccade.config.load import load_recipe
from saccade.config.schema import OptimizerConfig
from saccade.errors import ConfigError, RunError
from saccade.training.optimizer import Optimizer, compute_learning_rate
from saccade.training.optimizer_package import check_optimizer


class Model(nn.Module):
    """A vector, a layer's matrix and a frozen vector."""

    def __init__(self, value: float = 1.0) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((2,), value))
        self.text = nn.Module()
        self.text.layers = nn.ModuleList([nn.Linear(3, 3, bias=False)])
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        nn.init.eye_(self.text.layers[0].weight)


def set_gradients(model: Model, scale=(3.0, -4.0), layer=0.0) -> Model:
    model.scale.grad = torch.tensor(scale)
    model.text.layers[0].weight.grad = torch.full((3, 3), layer)
    return model


@pytest.mark.parametrize(
    ("settings", "rates"),
    [
        ({}, [1, 1, 1, 1]),
        ({"warmup_steps": 2}, [0.5, 1, 1, 1]),
        ({"warmup_steps": 8}, [0.125, 0.25, 0.375, 0.5]),
        ({"schedule": "linear"}, [1, 0.75, 0.5, 0.25]),
        ({"schedule": "linear", "decay_start": 0.5}, [1, 1, 1, 0.5]),
        ({"schedule": "cosine"}, [1, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2]),
        ({"schedule": "linear", "warmup_steps": 2}, [0.5, 0.75, 0.5, 0.25]),
        ({"schedule": "linear", "decay_start": 1.0}, [1, 1, 1, 1]),
    ],
)
def test_learning_rates(settings, rates):
    learning_rates = [compute_learning_rate(OptimizerConfig(lr=2.0, **settings), step, 4) for step in range(4)]
    assert learning_rates == pytest.approx([2 * rate for rate in rates])


def test_the_first_step_of_adamw_has_the_length_of_the_learning_rate():
    model = set_gradients(Model())
    optimizer = Optimizer(model, OptimizerConfig(lr=0.1, weight_decay=0.0), num_steps=1)
    assert optimizer.step() == 5.0  # the norm of (3, -4), before it is clipped to 1
    assert torch.allclose(model.scale, torch.tensor([0.9, 1.1]), atol=1e-6)
    assert model.scale.grad is None
    assert torch.equal(model.frozen, torch.ones(2))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_raises_and_changes_no_weight(value):
    model = set_gradients(Model(), scale=(value, 1.0))
    optimizer = Optimizer(model, OptimizerConfig(lr=0.1), num_steps=1)
    with raises(RunError, key="optim.lr", value=0.1):
        optimizer.step()
    assert torch.equal(model.scale, torch.ones(2))


def test_weight_decay_shrinks_weights_without_a_gradient():
    model = set_gradients(Model(), scale=(0.0, 0.0))
    Optimizer(model, OptimizerConfig(lr=0.1, weight_decay=0.5), num_steps=1).step()
    assert torch.allclose(model.scale, torch.tensor([0.95, 0.95]))


def test_gradients_are_clipped_to_the_norm():
    """The second moment after the first step is 0.05 * (g / |g|)^2."""
    model = set_gradients(Model())
    optimizer = Optimizer(model, OptimizerConfig(max_grad_norm=1.0), num_steps=1)
    optimizer.step()
    moments = [state["exp_avg_sq"] for state in optimizer.state_dict()["optimizers"][0]["state"].values()]
    expected = 0.05 * torch.tensor([0.36, 0.64])
    assert any(torch.allclose(moment, expected) for moment in moments if moment.shape == (2,))


def test_a_learning_rate_holds_for_all_updates_of_a_step():
    """With a constant gradient, each step of Adam has the length of the learning rate."""
    model = Model()
    optimizer = Optimizer(model, OptimizerConfig(lr=0.1, warmup_steps=4, max_grad_norm=1e9), num_steps=8)
    lengths = []
    for step in (0, 0, 2, 7):
        optimizer.start_step(step)
        before = model.scale.detach().clone()
        set_gradients(model)
        optimizer.step()
        lengths.append(float(before[0] - model.scale.detach()[0]))
    assert lengths == pytest.approx([0.025, 0.025, 0.075, 0.1], rel=1e-4)


@pytest.mark.slow
def test_muon_updates_only_the_layers_matrices():
    model = set_gradients(Model(), layer=0.5)
    optimizer = Optimizer(model, OptimizerConfig(name="muon", lr=0.1), num_steps=1)
    adamw, muon = optimizer.state_dict()["optimizers"]
    assert [len(part["param_groups"][0]["params"]) for part in (adamw, muon)] == [1, 1]
    optimizer.step()
    change = torch.eye(3) - model.text.layers[0].weight.detach()
    assert torch.linalg.matrix_rank(change, tol=1e-3) == 1  # Muon keeps the gradient's rank
    assert torch.allclose(change, change[0, 0].expand(3, 3), atol=1e-4)


def test_muon_trains_a_model_whose_trainable_weights_are_all_matrices():
    model = set_gradients(Model(), layer=1.0)
    model.scale.requires_grad_(False)
    before = model.text.layers[0].weight.detach().clone()
    optimizer = Optimizer(model, OptimizerConfig(name="muon", lr=0.1), num_steps=1)
    assert optimizer.step() == pytest.approx(3.0)  # of nine ones
    assert not torch.equal(model.text.layers[0].weight, before)
    assert torch.equal(model.scale, torch.ones(2))


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_restored_optimizer_continues_bit_for_bit(name):
    settings = OptimizerConfig(name=name, lr=0.1, warmup_steps=3, schedule="linear", weight_decay=0.1)
    model = Model()
    optimizer = Optimizer(model, settings, num_steps=6)
    pairs = [(model, optimizer)]
    for step in range(6):
        if step == 3:
            restored_model = Model()
            restored_model.load_state_dict(model.state_dict())
            restored = Optimizer(restored_model, settings, num_steps=6)
            restored.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            pairs.append((restored_model, restored))
        for one_model, one_optimizer in pairs:
            one_optimizer.start_step(step)
            set_gradients(one_model, scale=(step + 1.0, -1.0), layer=0.1 * step)
            one_optimizer.step()
    parameters = zip(model.parameters(), restored_model.parameters(), strict=True)
    assert all(torch.equal(first, second) for first, second in parameters)


def test_the_state_of_another_optimizer_raises():
    state = Optimizer(Model(), OptimizerConfig(name="muon"), num_steps=1).state_dict()
    with raises(ValueError, by=Optimizer.load_state_dict):
        Optimizer(Model(), OptimizerConfig(name="adamw"), num_steps=1).load_state_dict(state)


class Matrix(nn.Module):
    """A matrix whose moments take 8 bits, and a vector whose moments stay in float32."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.matrix = nn.Parameter(torch.full((64, 128), 0.1, dtype=dtype))
        self.vector = nn.Parameter(torch.ones(5, dtype=dtype))


def update(model, optimizer, steps):
    for step in steps:
        optimizer.start_step(step)
        generator = torch.Generator().manual_seed(step)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        optimizer.step()


needs_torchao = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs torchao")
LOW_BIT = OptimizerConfig(name="adamw_8bit", lr=0.01, warmup_steps=3, weight_decay=0.1)


@needs_torchao
@pytest.mark.slow
def test_moments_in_8_bits_take_a_quarter_of_the_bytes_and_the_same_way():
    models = [Matrix(), Matrix()]
    bits8, bits32 = (
        Optimizer(model, LOW_BIT.model_copy(update={"name": name}), num_steps=6)
        for model, name in zip(models, ("adamw_8bit", "adamw"), strict=True)
    )
    for model, optimizer in zip(models, (bits8, bits32), strict=True):
        update(model, optimizer, range(6))
    states = bits8.optimizers[0].state
    moment = states[models[0].matrix]["exp_avg"]
    assert (moment.codes.dtype, moment.codes.numel(), moment.scale.numel()) == (torch.uint8, 64 * 128, 64 * 128 // 256)
    assert states[models[0].vector]["exp_avg"].dtype == torch.float32
    lengths = [(model.matrix - Matrix().matrix).norm() for model in models]
    assert (models[0].matrix - models[1].matrix).norm() < 0.1 * lengths[1]
    assert not torch.equal(models[0].matrix, models[1].matrix)
    assert torch.allclose(models[0].vector, models[1].vector, atol=1e-6)


@needs_torchao
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_restored_optimizer_with_8_bits_continues_bit_for_bit(tmp_path, dtype):
    """Also from a copy that is written after another step."""
    model = Matrix(dtype)
    optimizer = Optimizer(model, LOW_BIT, num_steps=6)
    update(model, optimizer, range(3))
    weights, snapshot = copy.deepcopy(model.state_dict()), optimizer.take_snapshot()
    (tmp_path / "saved").mkdir()
    optimizer.save(tmp_path / "saved")
    update(model, optimizer, range(3, 6))
    (tmp_path / "copied").mkdir()
    snapshot.save(tmp_path / "copied")
    for folder in ("saved", "copied"):
        restored = Matrix(dtype)
        restored.load_state_dict(weights)
        continued = Optimizer(restored, LOW_BIT, num_steps=6)
        continued.restore(tmp_path / folder)
        update(restored, continued, range(3, 6))
        pairs = zip(model.parameters(), restored.parameters(), strict=True)
        assert all(torch.equal(first, second) for first, second in pairs), folder


@needs_torchao
@pytest.mark.slow
def test_an_installed_torchao_prints_nothing_where_it_is_not_used():
    """transformers imports it with the module that loads and saves models."""
    modules = "sys, saccade.models.vlm, transformers.quantizers.auto"
    code = f"import {modules}; sys.exit('torchao' not in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert [line for line in done.stderr.splitlines() if "torchao" in line or "_pytree" in line] == []


@pytest.mark.slow
def test_a_torchao_that_cannot_be_imported_is_one_sentence(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.delitem(sys.modules, "saccade.training.adamw_8bit", raising=False)
    monkeypatch.setitem(sys.modules, "torchao", None)
    with raises(ConfigError, key="optim.name", value="adamw_8bit"):
        Optimizer(Matrix(), LOW_BIT, num_steps=1)


def test_8_bits_without_torchao_raise_before_a_run(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with raises(ConfigError, key="optim.name", value="adamw_8bit"):
        Optimizer(Matrix(), LOW_BIT, num_steps=1)
    recipe = load_recipe("tiny/quick").with_values({"rl.optim.name": "adamw_8bit"})
    with raises(ConfigError, key="rl.optim.name", value="adamw_8bit"):
        check_recipe(recipe, ["rl"])
    check_recipe(recipe, ["sft"])


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_offloading_changes_neither_the_updates_nor_what_is_restored(name, dtype):
    settings = OptimizerConfig(name=name, lr=0.1, weight_decay=0.1)
    models = [Model().to(dtype) for _ in range(3)]
    plain, offloaded = (
        Optimizer(model, settings, num_steps=6, cpu_offload=is_offloaded)
        for model, is_offloaded in zip(models, (False, True), strict=False)
    )
    state = offloaded.state_dict()
    assert [copy.dtype for copy in state["master_copies"]] == [torch.float32] * 2
    assert not {id(parameter) for parameter in models[1].parameters()} & {id(copy) for copy in state["master_copies"]}
    restored = None
    for step in range(6):
        if step == 3:
            models[2].load_state_dict(models[1].state_dict())
            restored = Optimizer(models[2], settings, num_steps=6, cpu_offload=True)
            restored.load_state_dict(copy.deepcopy(offloaded.state_dict()))
        for model, optimizer in zip(models, (plain, offloaded, restored), strict=True):
            if optimizer is not None:
                optimizer.start_step(step)
                model.scale.grad = torch.tensor([step + 1.0, -1.0], dtype=dtype)
                model.text.layers[0].weight.grad = torch.full((3, 3), 0.1 * step, dtype=dtype)
                optimizer.step()
    for expected, actual, continued in zip(*(model.parameters() for model in models), strict=True):
        assert torch.allclose(expected, actual, rtol=1e-6 if dtype == torch.float32 else 0.01)
        assert torch.equal(actual, continued)


def test_8_bits_are_refused_on_the_cpu_that_updates_offloaded_weights(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    with raises(ConfigError, key="sft.optim.name", value="adamw_8bit"):
        check_optimizer(LOW_BIT, "sft", cpu_offload=True)
    check_optimizer(LOW_BIT, "sft")
