"""Advantages relative to the reward of a greedy episode."""

import numpy as np
from numpy.typing import NDArray


def remax(
    rewards_G: NDArray[np.float64], total_rewards_G: NDArray[np.float64], *, greedy_baseline_reward: float
) -> NDArray[np.float64]:
    """Return R - b, [G], with the reward b of one greedy episode of the same prompt (ReMax, arXiv 2310.10505).

    The greedy episode costs one rollout per group and is not trained on. Groups of equal rewards may differ from b:
    turn their filter off (`rl.filters.reward_std: null`).
    """
    return rewards_G - greedy_baseline_reward
