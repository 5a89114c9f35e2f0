"""Check that an advantage estimator or a loss fulfills its contract. Axis letters: G episodes, N sampled tokens."""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from saccade.algorithms.group_advantages import ESTIMATOR_INPUTS

_REWARDS = ([0.0, 1.0], [1.0, 1.0, 1.0], [1.3, 1.0, 0.0, 0.0, -0.5], [-40.0, 40.0, 1e-9], [0.3] * 16)


def check_estimator(estimator: Callable[..., Any]) -> None:
    """Check that every episode gets a finite advantage, whatever its index, and more reward never a smaller one.

    A function with settings is passed with `functools.partial`.
    """
    for rewards in _REWARDS:
        rewards_G = np.array(rewards)
        correct_G = (rewards_G >= 0.5).astype(np.float64)
        advantages_G = _estimate(estimator, rewards_G, correct_G)
        assert advantages_G.shape == rewards_G.shape, f"{rewards} got advantages of the shape {advantages_G.shape}"
        assert np.isfinite(advantages_G).all(), f"{rewards} got the advantages {advantages_G.tolist()}"
        assert np.array_equal(advantages_G, _estimate(estimator, rewards_G, correct_G)), f"{rewards} got two results"
        order = np.arange(len(rewards))[::-1]
        shuffled_G = _estimate(estimator, rewards_G[order], correct_G[order])
        assert np.allclose(shuffled_G, advantages_G[order]), f"{rewards}: the order of the episodes changes advantages"
        by_reward = advantages_G[np.argsort(rewards_G, kind="stable")]
        tolerance = 1e-9 * (1 + np.abs(advantages_G).max())
        assert (np.diff(by_reward) >= -tolerance).all(), f"{rewards}: an episode with more reward got less advantage"


def _estimate(
    estimator: Callable[..., Any], rewards_G: np.ndarray[Any, Any], correct_G: np.ndarray[Any, Any]
) -> np.ndarray[Any, Any]:
    inputs = dict(zip(ESTIMATOR_INPUTS, (correct_G.copy(), 0.5, "tokens"), strict=True))
    parameters = inspect.signature(estimator).parameters
    given_G, total_G = rewards_G.copy(), rewards_G.copy()
    result = estimator(given_G, total_G, **{key: value for key, value in inputs.items() if key in parameters})
    assert np.array_equal(given_G, rewards_G), "the estimator changes the rewards it is given"
    assert np.array_equal(total_G, rewards_G), "the estimator changes the total rewards it is given"
    return np.asarray(result, dtype=np.float64)


def check_loss(loss: Callable[..., Any]) -> None:
    """Check the loss of every token: finite, independent of other sequences, and better actions become likelier.

    The last is checked where policy and old policy are equal. A function with settings is passed with
    `functools.partial`.
    """
    import torch  # a check of tools or rewards needs no torch

    generator = torch.Generator().manual_seed(0)
    seq_N = torch.tensor([3, 3, 3, 3, 0, 0, 7, 7, 7])
    old_N, noise_N, adv_N = torch.randn(3, len(seq_N), generator=generator)
    old_N = -old_N.abs()
    for scale in (0.0, 0.3, 50.0):
        logp_N = (old_N + scale * noise_N).requires_grad_()
        loss_N, stats = loss(logp_N, old_N, adv_N, seq_N)
        shapes = {"the loss": loss_N, **stats}
        for name, values_N in shapes.items():
            assert values_N.shape == seq_N.shape, f"{name} has the shape {tuple(values_N.shape)}, not one per token"
            assert torch.isfinite(values_N.float()).all(), f"{name} is {values_N.tolist()} far from the old policy"
        (gradient_N,) = torch.autograd.grad(loss_N.sum(), logp_N)
        assert torch.isfinite(gradient_N).all(), f"the gradient is {gradient_N.tolist()}"
        for seq in sorted(set(seq_N.tolist())):
            part = seq_N == seq
            part_N, _ = loss(logp_N[part], old_N[part], adv_N[part], seq_N[part])
            assert torch.allclose(part_N, loss_N[part]), "a sequence's loss depends on the other sequences"
        if scale == 0.0:
            assert (gradient_N * adv_N <= 0).all(), "a token with a positive advantage must become likelier"
            assert (gradient_N != 0).any(), "the loss has no gradient at the old policy"
    empty_N = torch.zeros(0)
    loss_N, _ = loss(empty_N, empty_N, empty_N, torch.zeros(0, dtype=torch.long))
    assert loss_N.shape == (0,), "a micro-batch without trained tokens has no loss"
