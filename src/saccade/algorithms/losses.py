"""The clipped policy loss on flat tensors of sampled tokens.

Axis letters: N sampled tokens of a micro-batch or of a whole batch, S sequences. Tensors of logprobs are natural logs
of the probability of the token that was sampled.

A batch may be cut into micro-batches anywhere: `token_weights` is computed once from the whole batch and sliced, so
that the losses of the parts add up to the loss of the whole, and their gradients too. `merge_stats` joins the
statistics of the parts in the same way.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from saccade.config import Loss

Aggregation = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum_norm"]
_LOG_LIMIT = 20.0  # |log ratio| beyond this is cut, so that exp() stays finite
_MEASURED_CAP = 2.0  # the cap by which truncation is measured where it is switched off


def token_weights(seq_N: Tensor, *, aggregation: Aggregation, sum_norm: float = 256.0) -> Tensor:
    """What each token's loss is multiplied by before all are added up, [N], for the N tokens of a WHOLE batch.

    `seq_N` holds any integer per sequence. `token_mean`: 1 / N. `seq_mean_token_mean`: 1 / (S * tokens of its
    sequence), each sequence counts the same (GRPO). `seq_mean_token_sum_norm`: 1 / (S * sum_norm), a constant divisor
    (Dr.GRPO, arXiv 2503.20783). S counts the sequences that occur in `seq_N`.

    >>> token_weights(torch.tensor([4, 4, 4, 9]), aggregation="seq_mean_token_mean").tolist()[-1]
    0.5
    """
    if seq_N.numel() == 0:
        return torch.zeros_like(seq_N, dtype=torch.float32)
    # place_N: index into S of each token's sequence
    _, place_N, length_S = torch.unique(seq_N, return_inverse=True, return_counts=True)
    if aggregation == "token_mean":
        divisor_N = torch.full_like(seq_N, seq_N.numel(), dtype=torch.float32)
    elif aggregation == "seq_mean_token_mean":
        divisor_N = (length_S[place_N] * len(length_S)).float()
    else:
        divisor_N = torch.full_like(seq_N, len(length_S), dtype=torch.float32) * sum_norm
    return 1.0 / divisor_N


def policy_loss(
    logp_N: Tensor,
    old_logp_N: Tensor | None,
    adv_N: Tensor,
    weight_N: Tensor,
    *,
    settings: Loss,
    engine_logp_N: Tensor | None = None,
    ref_logp_N: Tensor | None = None,
    kl_weight: float = 0.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss (a scalar with a gradient to `logp_N`) and detached scalar statistics.

    Per token, with r = exp(logp - old_logp): -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) (PPO, arXiv
    1707.06347), for A < 0 at most -dual_clip A (arXiv 1912.09729), times the truncated importance weight
    min(exp(old_logp - engine_logp), importance_cap), plus kl_weight * k3(logp, ref_logp); summed with `weight_N`, this
    micro-batch's slice of `token_weights`.

    `old_logp_N` is the trainer's before the update; None means the present one (one update per batch: r = 1).
    `engine_logp_N` is what sampling reported, None where it is unknown. Everything but `logp_N` is held constant.
    The statistics are means over tokens, or maxima where the name ends so: `clip_fraction`, `ratio_mean`, `ratio_max`,
    `approx_kl` (k3 of the update), `kl` (k3 to the reference, 0 without), `importance_mean`, `importance_max`,
    `importance_truncated` (both before truncation, measured even where `importance_cap` is None),
    `logprob_gap_mean`, `logprob_gap_max` (|trainer - engine|); and `tokens`, their number. ValueError where `kl_weight`
    is set without reference logprobs, or for unequal shapes.
    """
    logp_N = logp_N.to(torch.promote_types(logp_N.dtype, torch.float32))
    now_N = logp_N.detach()
    old_N = now_N if old_logp_N is None else old_logp_N.detach().to(now_N.dtype)
    engine_N = old_N if engine_logp_N is None else engine_logp_N.detach().to(now_N.dtype)
    _same_shape(logp_N, old_N, adv_N, weight_N, engine_N)
    adv_N, weight_N = adv_N.detach().to(now_N.dtype), weight_N.detach().to(now_N.dtype)

    ratio_N = _ratio(logp_N, old_N)
    loss_N, clipped_N = _clipped(ratio_N, adv_N, settings)
    # the trainer's own gap to the engine: detached, so it weighs tokens and has no gradient
    importance_N = _ratio(old_N, engine_N)
    if settings.importance_cap is not None:
        loss_N = loss_N * importance_N.clamp(max=settings.importance_cap)
    kl_N = torch.zeros_like(logp_N)
    if ref_logp_N is not None:
        _same_shape(logp_N, ref_logp_N)
        kl_N = k3(logp_N, ref_logp_N)
    elif kl_weight > 0:
        raise ValueError("kl_weight is above 0 but no reference logprobs were given")
    loss = ((loss_N + kl_weight * kl_N) * weight_N).sum()

    cap = _MEASURED_CAP if settings.importance_cap is None else settings.importance_cap
    gap_N = (old_N - engine_N).abs()
    means = {"clip_fraction": clipped_N, "approx_kl": k3(logp_N, old_N), "kl": kl_N, "ratio_mean": ratio_N}
    means |= {"importance_mean": importance_N, "importance_truncated": importance_N > cap, "logprob_gap_mean": gap_N}
    maxima = {"ratio_max": ratio_N, "importance_max": importance_N, "logprob_gap_max": gap_N}
    return loss, _stats(means, maxima)


def k1(logp_N: Tensor, ref_logp_N: Tensor) -> Tensor:
    """The plain estimator of KL(policy || reference) per sampled token, [N]: logp - ref_logp; of either sign."""
    return logp_N - ref_logp_N.detach()


def k3(logp_N: Tensor, ref_logp_N: Tensor) -> Tensor:
    """Schulman's estimator of KL(policy || reference) per sampled token, [N]: exp(d) - d - 1, d = ref_logp - logp.

    >>> round(k3(torch.tensor([-1.0]), torch.tensor([-1.5])).item(), 4)
    0.1065
    """
    log_N = (ref_logp_N.detach() - logp_N).clamp(-_LOG_LIMIT, _LOG_LIMIT)
    return log_N.exp() - log_N - 1


def merge_stats(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
    """The statistics of a batch from those of its micro-batches: means weighted by `tokens`, maxima, `tokens` added.

    >>> one = {"ratio_mean": torch.tensor(1.0), "ratio_max": torch.tensor(1.2), "tokens": torch.tensor(3.0)}
    >>> two = {"ratio_mean": torch.tensor(2.0), "ratio_max": torch.tensor(2.5), "tokens": torch.tensor(1.0)}
    >>> merge_stats([one, two])
    {'ratio_mean': 1.25, 'ratio_max': 2.5, 'tokens': 4.0}
    """
    if not parts:
        return {"tokens": 0.0}
    tokens = [float(part["tokens"]) for part in parts]
    merged: dict[str, float] = {}
    for name in parts[0]:
        values = [float(part[name]) for part in parts]
        if name.endswith("_max"):
            merged[name] = max(values)
        elif name == "tokens":
            merged[name] = sum(tokens)
        else:
            merged[name] = sum(value * count for value, count in zip(values, tokens, strict=True)) / max(
                1.0, sum(tokens)
            )
    return merged


def _ratio(logp_N: Tensor, base_N: Tensor) -> Tensor:
    return (logp_N - base_N).clamp(-_LOG_LIMIT, _LOG_LIMIT).exp()


def _clipped(ratio_N: Tensor, adv_N: Tensor, settings: Loss) -> tuple[Tensor, Tensor]:
    """The surrogate loss per token, and whether clipping took the token's gradient away."""
    # the worse of both, so that a step is never paid for leaving the interval
    bounded_N = ratio_N.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    loss_N = torch.maximum(-adv_N * ratio_N, -adv_N * bounded_N)
    clipped_N = -adv_N * bounded_N > -adv_N * ratio_N
    if settings.dual_clip is not None:
        # a bad action that became far more likely would otherwise weigh without bound
        ceiling_N = torch.where(adv_N < 0, -adv_N * settings.dual_clip, torch.inf)
        clipped_N = clipped_N | (loss_N > ceiling_N)
        loss_N = torch.minimum(loss_N, ceiling_N)
    return loss_N, clipped_N


def _stats(means: Mapping[str, Tensor], maxima: Mapping[str, Tensor]) -> dict[str, Tensor]:
    count = next(iter(maxima.values())).numel()
    stats = {name: values_N.detach().float().sum() / max(1, count) for name, values_N in means.items()}
    stats |= {name: values_N.detach().max() if count else torch.zeros(()) for name, values_N in maxima.items()}
    return stats | {"tokens": torch.tensor(float(count))}


def _same_shape(first: Tensor, *others: Tensor) -> None:
    shapes = [tuple(tensor.shape) for tensor in (first, *others)]
    if first.ndim != 1 or len(set(shapes)) > 1:
        raise ValueError(f"the loss needs flat tensors of one shape, got {shapes}")
