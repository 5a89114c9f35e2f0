"""Advantages relative to the group's mean."""

import numpy as np
from numpy.typing import NDArray


def dr_grpo(rewards_G: NDArray[np.float64], total_rewards_G: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return R - mean(R), [G] (Dr. GRPO, arXiv 2503.20783; PyVision-RL, arXiv 2602.20739)."""
    return rewards_G - rewards_G.mean()
