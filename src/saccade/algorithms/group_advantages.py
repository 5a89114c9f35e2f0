"""Advantages: how much better an episode did than its group.

    scores ─shape─> rewards ─compare within the group (`advantages/*`)─> ─whiten over the batch─> GroupAdvantages

With `whiten: tokens` the policy update whitens instead, after the KL penalty (see `training/policy_update.py`).

Axis letters: G episodes of one group, N values of a whole batch (episodes or tokens), S spans that a group credits.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from saccade import plugins
from saccade.config.schema import AdvantageConfig
from saccade.errors import ConfigError, convert_errors
from saccade.types import Group, Span

_EPSILON = 1e-6  # added to a std before dividing
_TOKEN_EPSILON = 1e-5  # AReaL's, for `whiten: tokens`
FloatArray = NDArray[np.float64]
# (rewards [G], total rewards [G]; None: the same; the inputs that it requests) -> advantages [G]
AdvantageEstimator = Callable[..., FloatArray]
# What an estimator requests by a keyword-only parameter of that name; see `algorithms/advantages`.
ESTIMATOR_INPUTS = ("correct_G", "greedy_baseline_reward", "whiten")


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAdvantages:
    """The advantages of a group's episodes: of every sampled token, and what is added on the tokens of each span."""

    every_token_G: FloatArray
    by_span: Mapping[Span, FloatArray]  # [G] each

    @property
    def total_G(self) -> FloatArray:
        """Return the advantages of a token that all credited spans contain."""
        return self.every_token_G + sum(self.by_span.values())


def needs_greedy_baseline(settings: AdvantageConfig) -> bool:
    """Return whether the estimator compares with a greedy episode of each prompt, which rollouts must then sample."""
    return "greedy_baseline_reward" in _list_requested_inputs(settings.estimator)


def needs_correctness(settings: AdvantageConfig) -> bool:
    """Return whether the estimator reads the correctness of episodes, so that a reward term must be marked with it."""
    return "correct_G" in _list_requested_inputs(settings.estimator)


def check_estimator_settings(settings: AdvantageConfig) -> None:
    """Raise ConfigError if the estimator is unknown, has an invalid setting, or fails on the rewards 0 and 1."""
    estimate = resolve_estimator(settings.estimator, settings.settings)
    estimate([0.0, 1.0], correct_G=np.array([0.0, 1.0]), greedy_baseline_reward=0.0, whiten=settings.whiten)


def _list_requested_inputs(name: str) -> list[str]:
    parameters = inspect.signature(plugins.load("algorithms.advantages", name)).parameters
    return [key for key in ESTIMATOR_INPUTS if key in parameters]


def resolve_estimator(name: str, settings: Mapping[str, Any]) -> AdvantageEstimator:
    """Return an estimator with its settings. Raises ConfigError for an unknown name or setting.

    The estimator takes `ESTIMATOR_INPUTS` by name and returns 0 for a group of one. It raises ConfigError, too, if an
    input that the plugin requests is None, if the plugin fails or returns anything but one finite number per episode,
    and ValueError for rewards that are not finite or not a flat list.

    >>> resolve_estimator("dr_grpo", {})([1.3, 1.0, 0.0, 0.0]).round(3).tolist()
    [0.725, 0.425, -0.575, -0.575]
    """
    bound, key = plugins.resolve("algorithms.advantages", name, settings), "rl.advantage.estimator"
    requested = _list_requested_inputs(name)

    def estimate(rewards: ArrayLike, total_rewards: ArrayLike | None = None, **inputs: Any) -> FloatArray:
        rewards_G = np.asarray(rewards, dtype=np.float64)
        if rewards_G.ndim != 1 or not np.isfinite(rewards_G).all():
            raise ValueError(f"rewards must be a flat list of finite numbers, got {rewards_G.tolist()}")
        if len(rewards_G) < 2:  # nothing to compare with
            return np.zeros_like(rewards_G)
        totals_G = rewards_G if total_rewards is None else np.asarray(total_rewards, dtype=np.float64)
        if missing := [_MISSING_INPUTS[key] for key in requested if inputs.get(key) is None]:
            raise ConfigError(f"the advantage estimator {name!r} needs {', '.join(missing)}", key=key, value=name)
        with convert_errors(ConfigError, f"the advantage estimator {name!r} failed", key=key, value=name):
            values_G = np.asarray(
                bound(rewards_G, totals_G, **{key: inputs[key] for key in requested}), dtype=np.float64
            )
        if values_G.shape != rewards_G.shape or not np.isfinite(values_G).all():
            message = f"the advantage estimator {name!r} must return {len(rewards_G)} finite numbers, one per episode"
            raise ConfigError(f"{message}, not {values_G.tolist()}", key=key, value=name)
        return values_G

    return estimate


def shape_rewards(rewards: ArrayLike, *, scale: float = 1.0, bias: float = 0.0, clip: float = 20.0) -> FloatArray:
    """Shape rewards as AReaL does: clip((R + bias) * scale, -clip, clip), in the shape of `rewards`.

    >>> shape_rewards([1.2, 0.2], scale=10.0, bias=-0.2).tolist()
    [10.0, 0.0]
    """
    return np.clip((np.asarray(rewards, dtype=np.float64) + bias) * scale, -clip, clip)


_MISSING_INPUTS = {
    "correct_G": "correctness: mark a reward term, as in `accuracy: {is_accuracy: true}`",
    "greedy_baseline_reward": "the reward of a greedy episode per prompt",
    "whiten": "the value of rl.advantage.whiten",
}


def whiten(values_N: ArrayLike, *, ddof: int = 0, epsilon: float = _EPSILON) -> FloatArray:
    """Return (x - mean(x)) / (std(x) + epsilon) over the batch, [N]; equal values become 0.

    `ddof` is 0 for the population std and 1 for the sample std, which is 0 for a single value.
    """
    array_N = np.asarray(values_N, dtype=np.float64)
    if not len(array_N):
        return array_N
    std = array_N.std(ddof=ddof) if len(array_N) > ddof else 0.0
    return (array_N - array_N.mean()) / (std + epsilon)


def whiten_tokens(values_N: ArrayLike) -> FloatArray:
    """Return (A - mean(A)) / (std(A) + 1e-5) over the batch's trained tokens, [N]; std is the sample std.

    It is AReaL's advantage normalization with mean and std of the batch, and that of REINFORCE++ (arXiv 2501.03262).
    Each token counts once, so a long episode shifts the mean more than a short one.

    >>> whiten_tokens([3.0, 3.0, 3.0, -1.0]).round(3).tolist()
    [0.5, 0.5, 0.5, -1.5]
    """
    return whiten(values_N, ddof=1, epsilon=_TOKEN_EPSILON)


def compute_group_advantages(groups: Sequence[Group], settings: AdvantageConfig) -> list[GroupAdvantages]:
    """Return the advantages of each group, in order.

    Rewards are shaped, compared within their group, and, with `whiten: episodes`, whitened over all episodes of the
    batch. The credits of a span are compared with the group's credits of the same span (an episode without one has 0).
    The parts add up to the advantages of the total rewards, whose std divides them all. Raises ConfigError if the
    estimator fails or needs correctness that no score has.
    """
    estimator = resolve_estimator(settings.estimator, settings.settings)
    spans = [
        sorted({credit.span for scored in group.members for credit in scored.score.credits}, key=repr)
        for group in groups
    ]
    parts = [_compute_parts(group, own, estimator, settings) for group, own in zip(groups, spans, strict=True)]
    if settings.whiten == "episodes" and parts:
        total_N = np.concatenate([part.sum(axis=0) for part in parts])
        scale, ends = total_N.std() + _EPSILON, np.cumsum([part.shape[1] for part in parts])[:-1]
        for part, white_G in zip(parts, np.split(whiten(total_N), ends), strict=True):
            part[1:] /= scale
            part[0] = white_G - part[1:].sum(axis=0)
    return [
        GroupAdvantages(every_token_G=part[0], by_span=dict(zip(own, part[1:], strict=True)))
        for part, own in zip(parts, spans, strict=True)
    ]


def _compute_parts(
    group: Group, spans: Sequence[Span], estimator: AdvantageEstimator, settings: AdvantageConfig
) -> FloatArray:
    """Return the advantages of every token and of each span, [1 + S, G]."""
    G = len(group.scored_episodes)
    shape = partial(shape_rewards, scale=settings.reward_scale, bias=settings.reward_bias, clip=settings.reward_clip)
    values = [scored.score.value for scored in group.members]
    credits = [
        [sum(credit.value for credit in scored.score.credits if credit.span == span) for scored in group.members]
        for span in spans
    ]
    correct = [scored.score.correct for scored in group.scored_episodes if scored.score.correct is not None]
    # Shaping clips and an estimator need not be linear, so a span's advantage is what its credits add to that of the
    # value and the spans before it.
    shaped = shape(np.cumsum([values, *credits], axis=0))
    advantages = [
        estimator(
            row[:G],
            shaped[-1, :G],
            correct_G=shape(correct) if len(correct) == G else None,
            greedy_baseline_reward=float(row[G]) if group.greedy_baseline else None,
            whiten=settings.whiten,
        )
        for row in shaped
    ]
    return np.diff(np.stack(advantages), axis=0, prepend=0.0)


def compute_frac_correct_with_negative_advantage(groups: Sequence[Group], advantages: Sequence[ArrayLike]) -> float:
    """Return the fraction of correct episodes whose advantage is below 0; 0.0 if none is correct."""
    is_negative = [
        value < 0
        for group, values_G in zip(groups, advantages, strict=True)
        for scored, value in zip(group.scored_episodes, np.asarray(values_G).tolist(), strict=True)
        if scored.score.is_correct
    ]
    return sum(is_negative) / max(1, len(is_negative))
