"""Schedules and updates against numbers worked out by hand."""

import copy
import math

import pytest
import torch
from torch import nn

from saccade.config import Optim
from saccade.errors import RunError
from saccade.training.optim import Optimizer, rate


class Model(nn.Module):
    """A vector, a matrix of a layer and a frozen one."""

    def __init__(self, value: float = 1.0) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((2,), value))
        self.text = nn.Module()
        self.text.layers = nn.ModuleList([nn.Linear(3, 3, bias=False)])
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        nn.init.eye_(self.text.layers[0].weight)


def pulled(model: Model, scale=(3.0, -4.0), layer=0.0) -> Model:
    """The same gradients every time."""
    model.scale.grad = torch.tensor(scale)
    model.text.layers[0].weight.grad = torch.full((3, 3), layer)
    return model


@pytest.mark.parametrize(
    ("settings", "rates"),
    [
        ({}, [1, 1, 1, 1]),
        ({"warmup": 2}, [0.5, 1, 1, 1]),
        ({"warmup": 8}, [0.125, 0.25, 0.375, 0.5]),
        ({"schedule": "linear"}, [1, 0.75, 0.5, 0.25]),
        ({"schedule": "linear", "decay_from": 0.5}, [1, 1, 1, 0.5]),
        ({"schedule": "cosine"}, [1, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2]),
        ({"schedule": "linear", "warmup": 2}, [0.5, 0.75, 0.5, 0.25]),
        ({"schedule": "linear", "decay_from": 1.0}, [1, 1, 1, 1]),
    ],
)
def test_rates(settings, rates):
    found = [rate(Optim(lr=2.0, **settings), step, 4) for step in range(4)]
    assert found == pytest.approx([2 * each for each in rates])


def test_the_first_step_of_adamw_is_the_rate_in_each_direction():
    model = pulled(Model())
    optimizer = Optimizer(model, Optim(lr=0.1, weight_decay=0.0), steps=1)
    assert optimizer.step() == 5.0  # the norm of (3, -4), before it is clipped to 1
    assert torch.allclose(model.scale, torch.tensor([0.9, 1.1]), atol=1e-6)
    assert model.scale.grad is None
    assert torch.equal(model.frozen, torch.ones(2))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_stops_it_and_changes_no_weight(value):
    model = pulled(Model(), scale=(value, 1.0))
    optimizer = Optimizer(model, Optim(lr=0.1), steps=1)
    with pytest.raises(RunError, match=f"the gradient became {value}"):
        optimizer.step()
    assert torch.equal(model.scale, torch.ones(2))


def test_weight_decay_shrinks_what_has_no_gradient():
    model = pulled(Model(), scale=(0.0, 0.0))
    Optimizer(model, Optim(lr=0.1, weight_decay=0.5), steps=1).step()
    assert torch.allclose(model.scale, torch.tensor([0.95, 0.95]))


def test_gradients_are_clipped_to_the_norm():
    """By the second moment of the first step: 0.05 * (g / |g|)^2."""
    model = pulled(Model())
    optimizer = Optimizer(model, Optim(clip_norm=1.0), steps=1)
    optimizer.step()
    moments = [state["exp_avg_sq"] for state in optimizer.state()["parts"][0]["state"].values()]
    assert any(torch.allclose(each, 0.05 * torch.tensor([0.36, 0.64])) for each in moments if each.shape == (2,))


def test_a_rate_holds_for_all_updates_of_a_step():
    """Adam with the same gradient moves by the rate each time, so the way tells the rates."""
    model = Model()
    optimizer = Optimizer(model, Optim(lr=0.1, warmup=4, clip_norm=1e9), steps=8)
    ways = []
    for number in (0, 0, 2, 7):
        optimizer.begin(number)
        before = model.scale.detach().clone()
        pulled(model)
        optimizer.step()
        ways.append(float(before[0] - model.scale.detach()[0]))
    assert ways == pytest.approx([0.025, 0.025, 0.075, 0.1], rel=1e-4)


@pytest.mark.slow
def test_muon_takes_the_matrices_of_layers_alone():
    model = pulled(Model(), layer=0.5)
    optimizer = Optimizer(model, Optim(name="muon", lr=0.1), steps=1)
    adamw, muon = optimizer.state()["parts"]
    assert [len(part["param_groups"][0]["params"]) for part in (adamw, muon)] == [1, 1]
    optimizer.step()
    moved = torch.eye(3) - model.text.layers[0].weight.detach()
    assert torch.linalg.matrix_rank(moved, tol=1e-3) == 1  # as the gradient: Muon makes it orthogonal, no larger
    assert torch.allclose(moved, moved[0, 0].expand(3, 3), atol=1e-4)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_restored_state_goes_on_to_the_bit(name):
    settings = Optim(name=name, lr=0.1, warmup=3, schedule="linear", weight_decay=0.1)
    model = Model()
    optimizer = Optimizer(model, settings, steps=6)
    twin, twins = Model(), None
    for number in range(6):
        if number == 3:
            twin.load_state_dict(model.state_dict())
            twins = Optimizer(twin, settings, steps=6)
            twins.restore(copy.deepcopy(optimizer.state()))
        for each, its in ((model, optimizer), (twin, twins)):
            if its is not None:
                its.begin(number)
                pulled(each, scale=(number + 1.0, -1.0), layer=0.1 * number)
                its.step()
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), twin.parameters(), strict=True))


def test_the_state_of_another_optimiser_is_refused():
    state = Optimizer(Model(), Optim(name="muon"), steps=1).state()
    with pytest.raises(ValueError, match="doesn't match"):
        Optimizer(Model(), Optim(name="adamw"), steps=1).restore(state)
