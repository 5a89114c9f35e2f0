"""Keep groups whose rewards differ: equal rewards give no gradient."""

import numpy as np

from saccade.config.schema import NonNegativeFloat
from saccade.types import Group


def reward_std(
    group: Group,
    *,
    above: NonNegativeFloat = 1e-6,  # population std of the rewards that a group must exceed
) -> bool:
    """Return whether the population std of the total rewards, credits included, is greater than `above`."""
    return float(np.std(group.total_rewards)) > above
