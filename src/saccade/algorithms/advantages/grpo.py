"""Advantages relative to the group's mean, in units of its standard deviation."""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from saccade.config.schema import PositiveFloat


def grpo(
    rewards_G: NDArray[np.float64],
    total_rewards_G: NDArray[np.float64],
    *,
    std: Literal["population", "sample"] = "population",  # divisor of the variance; population = G, sample = G - 1
    epsilon: PositiveFloat = 1e-6,  # added to the standard deviation
) -> NDArray[np.float64]:
    """Return (R - mean(R)) / (std(R) + epsilon), [G] (GRPO, arXiv 2402.03300), with the std of the total rewards."""
    return (rewards_G - rewards_G.mean()) / (total_rewards_G.std(ddof=int(std == "sample")) + epsilon)
