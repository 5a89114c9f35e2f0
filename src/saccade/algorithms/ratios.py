"""Probability ratios and KL estimates from logprobs. Axis letters: N sampled tokens, S sequences."""

import torch
from torch import Tensor

_MAX_LOG_RATIO = 20.0  # |log ratio| is clamped to this, so that exp() stays finite


def compute_token_ratio(logp_N: Tensor, base_N: Tensor) -> Tensor:
    """Return exp(logp - base), [N]."""
    return (logp_N - base_N).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()


def compute_sequence_ratio(logp_N: Tensor, old_logp_N: Tensor, seq_N: Tensor) -> Tensor:
    """Return GSPO's ratio (arXiv 2507.18071), [N]: s = exp(mean of logp - old_logp over a sequence's tokens).

    Its value is s on every token; its gradient is s * d logp of the token (the paper's GSPO-token). Averaged over the
    tokens of a sequence this is the gradient of s, s * mean(d logp), and advantages may still differ between tokens.
    `seq_N` holds one integer per sequence.

    >>> compute_sequence_ratio(torch.tensor([-1.0, -1.0]), torch.tensor([-1.5, -0.9]), torch.tensor([3, 3])).tolist()
    [1.2214027643203735, 1.2214027643203735]
    """
    _, index_N, length_S = torch.unique(seq_N, return_inverse=True, return_counts=True)
    log_N = (logp_N - old_logp_N).detach()
    mean_S = torch.zeros(len(length_S), dtype=log_N.dtype, device=log_N.device).index_add_(0, index_N, log_N) / length_S
    ratio_N = mean_S.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()[index_N]
    return ratio_N * (logp_N - logp_N.detach()).exp()


def k1(logp_N: Tensor, ref_logp_N: Tensor) -> Tensor:
    """Return the plain estimator of KL(policy || reference) per sampled token, [N]: logp - ref_logp; of either sign."""
    return logp_N - ref_logp_N.detach()


def k3(logp_N: Tensor, ref_logp_N: Tensor) -> Tensor:
    """Return Schulman's estimator of KL(policy || reference) per token, [N]: exp(d) - d - 1, d = ref_logp - logp.

    The tokens must be samples of the policy: the mean of r - 1 - log r, with r = reference / policy, is then unbiased
    (http://joschu.net/blog/kl-approx.html).

    >>> round(k3(torch.tensor([-1.0]), torch.tensor([-1.5])).item(), 4)
    0.1065
    """
    log_N = (ref_logp_N.detach() - logp_N).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    return log_N.exp() - log_N - 1
