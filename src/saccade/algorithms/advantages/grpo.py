"""Advantages relative to the group's mean, in units of its standard deviation."""

import numpy as np
from numpy.typing import NDArray


def grpo(rewards_G: NDArray[np.float64], total_rewards_G: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return (R - mean(R)) / (std(R) + 1e-6), [G] (GRPO, arXiv 2402.03300), with the population std of the total."""
    return (rewards_G - rewards_G.mean()) / (total_rewards_G.std() + 1e-6)
