"""The clipped surrogate of PPO, with the ratio of each token."""

import torch
from torch import Tensor

from saccade.algorithms.ratios import compute_token_ratio
from saccade.config.schema import DualClip, NonNegativeFloat


def ppo_clip(
    logp_N: Tensor,
    old_logp_N: Tensor,
    adv_N: Tensor,
    seq_N: Tensor,
    *,
    clip_low: NonNegativeFloat = 0.2,  # the ratio is clipped below 1 - clip_low
    clip_high: NonNegativeFloat = 0.2,  # the ratio is clipped above 1 + clip_high
    dual_clip: DualClip | None = None,  # bound of the loss of a negative advantage, as a factor of it; null = none
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return max(-r A, -clip(r, 1 - clip_low, 1 + clip_high) A) with r = exp(logp - old) (PPO, arXiv 1707.06347).

    For A < 0 the maximum is at most -dual_clip A (arXiv 1912.09729). `clip_fraction` marks the tokens whose gradient
    clipping removed. With one update per batch and `rl.loss.old_logprobs: trainer` r is exactly 1, and no clip setting
    has an effect.
    """
    return clip_surrogate(compute_token_ratio(logp_N, old_logp_N), adv_N, clip_low, clip_high, dual_clip)


def clip_surrogate(
    ratio_N: Tensor, adv_N: Tensor, clip_low: float, clip_high: float, dual_clip: float | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of `ppo_clip` for any ratio, and its statistics."""
    # The larger loss of both, so that leaving the interval is never rewarded.
    bounded_N = ratio_N.clamp(1 - clip_low, 1 + clip_high)
    loss_N = torch.maximum(-adv_N * ratio_N, -adv_N * bounded_N)
    clipped_N = -adv_N * bounded_N > -adv_N * ratio_N
    if dual_clip is not None:
        # Without this bound, the loss of a bad action that became far more likely is unbounded.
        ceiling_N = torch.where(adv_N < 0, -adv_N * dual_clip, torch.inf)
        clipped_N = clipped_N | (loss_N > ceiling_N)
        loss_N = torch.minimum(loss_N, ceiling_N)
    return loss_N, {"clip_fraction": clipped_N, "ratio": ratio_N}
