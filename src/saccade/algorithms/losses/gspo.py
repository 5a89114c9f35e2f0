"""The clipped surrogate with one ratio per sequence (GSPO, arXiv 2507.18071)."""

from torch import Tensor

from saccade.algorithms.losses.ppo_clip import clip_surrogate
from saccade.algorithms.ratios import compute_sequence_ratio
from saccade.config.schema import DualClip, NonNegativeFloat


def gspo(
    logp_N: Tensor,
    old_logp_N: Tensor,
    adv_N: Tensor,
    seq_N: Tensor,
    *,
    clip_low: NonNegativeFloat = 3e-4,  # the ratio is clipped below 1 - clip_low
    clip_high: NonNegativeFloat = 4e-4,  # the ratio is clipped above 1 + clip_high
    dual_clip: DualClip | None = None,  # bound of the loss of a negative advantage, as a factor of it; null = none
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of `ppo_clip` with each token's sequence ratio; the defaults are the published clip range.

    With one update per batch and `rl.loss.old_logprobs: trainer` the ratio is exactly 1, as in `ppo_clip`: both have
    the same loss and gradient. With `rl.loss.aggregation: seq_mean_token_mean`, loss and gradient are those of the
    paper's equation 5.
    """
    return clip_surrogate(compute_sequence_ratio(logp_N, old_logp_N, seq_N), adv_N, clip_low, clip_high, dual_clip)
