"""Advantages relative to the mean of the other episodes."""

import numpy as np
from numpy.typing import NDArray


def rloo(rewards_G: NDArray[np.float64], total_rewards_G: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return R - the mean of the other G - 1, [G] (RLOO, arXiv 2402.14740); G is at least 2."""
    # R - mean of the others = (R - mean of all) * G / (G - 1)
    return (rewards_G - rewards_G.mean()) * len(rewards_G) / (len(rewards_G) - 1)
