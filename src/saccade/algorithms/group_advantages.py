"""Advantages: how much better an episode did than its group.

Axis letters: G episodes of one group, N episodes of a whole batch.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from saccade.algorithms.anchoring import rewards
from saccade.config import Advantage
from saccade.types import Group, Scored

Estimator = Literal["mean", "mean_std", "leave_one_out"]
_EPSILON = 1e-6  # added to a std before dividing


def advantages(rewards_G: ArrayLike, estimator: Estimator, *, whole_G: ArrayLike | None = None) -> NDArray[np.float64]:
    """One advantage per episode of a group, [G]; a group of one gets 0.

    `mean` A = R - mean(R) (PyVision-RL); `mean_std` A = (R - mean(R)) / (std(R) + 1e-6) (GRPO, arXiv 2402.03300, with
    the population std); `leave_one_out` A = R - the mean of the other G - 1 (RLOO, arXiv 2402.14740). Where the rewards
    are a part of larger ones, `whole_G` are those, and theirs is the std: then the advantages of the parts add up to
    the advantage of the whole. ValueError for rewards that are not finite or not a flat list.

    >>> advantages([1.3, 1.0, 0.0, 0.0], "mean").round(3).tolist()
    [0.725, 0.425, -0.575, -0.575]
    """
    values_G = np.asarray(rewards_G, dtype=np.float64)
    if values_G.ndim != 1 or not np.isfinite(values_G).all():
        raise ValueError(f"rewards must be a flat list of finite numbers, got {values_G.tolist()}")
    size = len(values_G)
    if size < 2:  # nothing to compare with
        return np.zeros_like(values_G)
    centred_G = values_G - values_G.mean()
    if estimator == "mean_std":
        return centred_G / (np.asarray(values_G if whole_G is None else whole_G).std() + _EPSILON)
    # R - mean of the others = (R - mean of all) * G / (G - 1)
    return centred_G * size / (size - 1) if estimator == "leave_one_out" else centred_G


def shaped(rewards_G: ArrayLike, *, scale: float = 1.0, bias: float = 0.0, clip: float = 20.0) -> NDArray[np.float64]:
    """Rewards as AReaL hands them on: clip((R + bias) * scale, -clip, clip), [G].

    >>> shaped([1.2, 0.2], scale=10.0, bias=-0.2).tolist()
    [10.0, 0.0]
    """
    return np.clip((np.asarray(rewards_G, dtype=np.float64) + bias) * scale, -clip, clip)


def whitened(values_N: ArrayLike) -> NDArray[np.float64]:
    """Values shifted and scaled to mean 0 and population std 1 over the batch, [N]; equal values become 0."""
    array_N = np.asarray(values_N, dtype=np.float64)
    return (array_N - array_N.mean()) / (array_N.std() + _EPSILON) if len(array_N) else array_N


def credit(groups: Sequence[Group], settings: Advantage) -> list[NDArray[np.float64]]:
    """The advantages of a batch that every sampled token bears: one array [G] per group, in order.

    Rewards are shaped, compared within their group, and, with `whiten`, whitened over all episodes of the batch. Where
    scores have an anchor apart, it has no part in these (see `anchor_credit`), but for the std by which they are
    divided: that is always of the whole reward.
    """
    return [everywhere_G for everywhere_G, _ in _credits(groups, settings)]


def anchor_credit(groups: Sequence[Group], settings: Advantage) -> list[NDArray[np.float64]]:
    """The advantages of the anchors alone, which structural tokens bear on top: one array [G] per group, in order.

    Both together are the advantages of the whole reward, so a structural token has the advantage that it would have if
    the anchor were in the score's value. All zeros where no score has an anchor apart.
    """
    return [anchor_G for _, anchor_G in _credits(groups, settings)]


def _credits(groups: Sequence[Group], settings: Advantage) -> list[NDArray[np.float64]]:
    """[2, G] per group: what every token bears, and what structural ones bear on top."""
    found = []
    for group in groups:
        whole_G, value_G = (_shaped(values_G, settings) for values_G in (rewards(group), group.rewards))
        everywhere_G = advantages(value_G, settings.estimator, whole_G=whole_G)
        # What shaping makes of the anchor is what it makes of the whole less what it makes of the rest.
        anchor_G = advantages(whole_G - value_G, settings.estimator, whole_G=whole_G)
        found.append(np.stack([everywhere_G, anchor_G]))
    if not settings.whiten or not found:
        return found
    both_2N = np.concatenate(found, axis=1)
    whole_N = both_2N.sum(axis=0)
    anchor_N = both_2N[1] / (whole_N.std() + _EPSILON)
    ends = np.cumsum([part.shape[1] for part in found])[:-1]
    return np.split(np.stack([whitened(whole_N) - anchor_N, anchor_N]), ends, axis=1)


def _shaped(rewards_G: ArrayLike, settings: Advantage) -> NDArray[np.float64]:
    return shaped(rewards_G, scale=settings.reward_scale, bias=settings.reward_bias, clip=settings.reward_clip)


def is_punished(member: Scored, advantage: float) -> bool:
    """Whether an episode is correct (accuracy of at least one half) and its advantage is below 0 all the same."""
    return advantage < 0 and member.score.parts.get("accuracy", 0.0) >= 0.5


def punished(groups: Sequence[Group], credits: Sequence[ArrayLike]) -> float:
    """The share of correct episodes (accuracy of at least one half) whose advantage is below 0; 0.0 without any."""
    below = [
        is_punished(member, value)
        for group, values_G in zip(groups, credits, strict=True)
        for member, value in zip(group.members, np.asarray(values_G).tolist(), strict=True)
        if member.score.parts.get("accuracy", 0.0) >= 0.5
    ]
    return sum(below) / max(1, len(below))
