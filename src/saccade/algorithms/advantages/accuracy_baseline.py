"""Advantages relative to the group's mean correctness."""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from saccade.config.schema import PositiveFloat


def accuracy_baseline(
    rewards_G: NDArray[np.float64],
    total_rewards_G: NDArray[np.float64],
    *,
    correct_G: NDArray[np.float64],
    std: Literal["none", "population", "sample"] = "none",  # std of the correctness that divides; none = no division
    epsilon: PositiveFloat = 1e-6,  # added to the standard deviation
) -> NDArray[np.float64]:
    """Return R - mean(C), [G], with the correctness C; with `std` divided by std(C) + epsilon.

    A bonus, as for tool calls, then counts in full: the group's mean bonus is not subtracted. It is `grpo_w_anb` of
    PyVision-RL's code (arXiv 2602.20739), which reads C = 1 from a reward other than 0. The weight of the reward term
    that is marked as correctness must be 1. If all C are equal nothing is divided (the published code divides by
    epsilon).
    """
    advantages_G = rewards_G - correct_G.mean()
    spread = 0.0 if std == "none" else float(correct_G.std(ddof=int(std == "sample")))
    return advantages_G / (spread + epsilon) if spread > epsilon else advantages_G
