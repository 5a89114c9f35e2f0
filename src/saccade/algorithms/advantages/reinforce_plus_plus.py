"""Advantages that are normalized over the batch's tokens instead of within the group."""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from saccade.errors import ConfigError


def reinforce_plus_plus(
    rewards_G: NDArray[np.float64],
    total_rewards_G: NDArray[np.float64],
    *,
    whiten: str,
    baseline: Literal["none", "group"] = "none",  # what is subtracted first; group = the group's mean reward
) -> NDArray[np.float64]:
    """Return R, or R - mean(R) with `baseline: group`, [G] (REINFORCE++ and its -baseline, arXiv 2501.03262).

    The policy update completes it: it subtracts the KL penalty of the rest of the episode (`rl.kl.advantage_coef`) from
    each token's advantage and normalizes these over all tokens of the batch, which needs `rl.advantage.whiten: tokens`.
    Without a baseline, groups of equal rewards differ from the batch: turn their filter off
    (`rl.filters.reward_std: null`). Raises ConfigError for another `whiten`.
    """
    if whiten != "tokens":
        raise ConfigError(
            f"the estimator reinforce_plus_plus is normalized over tokens, but rl.advantage.whiten={whiten}: set it to "
            "tokens",
            key="rl.advantage.whiten",
            value=whiten,
        )
    return rewards_G - rewards_G.mean() if baseline == "group" else rewards_G
