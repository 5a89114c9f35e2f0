"""The clipped policy loss on flat tensors of sampled tokens.

Axis letters: N sampled tokens of a micro-batch or of a whole batch, S sequences. Tensors of logprobs are natural logs
of the probability of the token that was sampled. Per token the loss is

    importance * max(-r A, -clip(r, 1 - clip_low, 1 + clip_high) A) + kl_weight * k3

- r = exp(logp - old) (PPO, arXiv 1707.06347), and for A < 0 the maximum is at most -dual_clip A (arXiv 1912.09729). Old
  is the PROXIMAL policy, the trainer's before the update; with `against: behaviour` it is the engine's. With
  `ratio: sequence` each token has its sequence's ratio (GSPO, arXiv 2507.18071).
- importance = min(exp(proximal - engine), cap): AReaL's decoupled objective (arXiv 2505.24298). There is ONE such
  weight per token. Where the present weights sampled the token it corrects the mismatch of engine and trainer alone
  (truncated importance sampling), up to `importance_cap`; where older ones did (a STALE token) it corrects staleness
  too, up to `behaviour_cap`. A cap of None leaves those tokens unweighted.
- k3 estimates the distance to the REFERENCE policy, the weights that RL began with.

A batch may be cut into micro-batches anywhere (with ratios of sequences: between sequences; `pack` never cuts one):
`token_weights` is computed once from the whole batch and sliced, so that the losses of the parts add up to the loss of
the whole, and their gradients too. `merge_stats` joins the statistics of the parts in the same way.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from saccade.config import Loss

Aggregation = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum_norm"]
_LOG_LIMIT = 20.0  # |log ratio| beyond this is cut, so that exp() stays finite
_IMPORTANCE_CAP, _BEHAVIOUR_CAP = 2.0, 5.0  # by which truncation is measured where it is switched off
_RANGED = ("ratio", "importance", "logprob_gap")  # of these the largest value is told, too


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
    stale_N: Tensor | None = None,
    seq_N: Tensor | None = None,
    ref_logp_N: Tensor | None = None,
    kl_weight: float = 0.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of the file's top (a scalar with a gradient to `logp_N`) and detached scalar statistics (`_stats`).

    `old_logp_N` is the trainer's before the update; None means the present one (one update per batch: r = 1).
    `engine_logp_N` is what sampling reported, None where it is unknown; `stale_N` says which tokens older weights
    sampled, None = none. `seq_N` says which tokens are one sequence. `weight_N` is this micro-batch's slice of
    `token_weights`. Everything but `logp_N` is held constant. ValueError where `kl_weight` is set without reference
    logprobs, the ratio is a sequence's and `seq_N` is missing, or for unequal shapes.
    """
    logp_N = logp_N.to(torch.promote_types(logp_N.dtype, torch.float32))
    now_N = logp_N.detach()
    proximal_N = now_N if old_logp_N is None else old_logp_N.detach().to(now_N.dtype)
    engine_N = proximal_N if engine_logp_N is None else engine_logp_N.detach().to(now_N.dtype)
    _same_shape(logp_N, proximal_N, adv_N, weight_N, engine_N, *([] if ref_logp_N is None else [ref_logp_N]))
    adv_N, weight_N = adv_N.detach().to(now_N.dtype), weight_N.detach().to(now_N.dtype)

    old_N = engine_N if settings.against == "behaviour" else proximal_N
    ratio_N = _ratio(logp_N, old_N)
    if settings.ratio == "sequence":
        if seq_N is None:
            raise ValueError("the ratio of sequences needs to know which tokens are one sequence")
        ratio_N = sequence_ratio(logp_N, old_N, seq_N)
    loss_N, clipped_N = _clipped(ratio_N, adv_N, settings)
    # held constant: a weight of the token, without a gradient of its own
    importance_N = _ratio(proximal_N, engine_N)
    stale_N = torch.zeros_like(logp_N, dtype=torch.bool) if stale_N is None else stale_N
    loss_N = loss_N * _truncated(importance_N, stale_N, settings)
    if ref_logp_N is not None:
        loss_N = loss_N + kl_weight * k3(logp_N, ref_logp_N)
    elif kl_weight > 0:
        raise ValueError("kl_weight is above 0 but no reference logprobs were given")
    measured = {"clip_fraction": clipped_N, "approx_kl": k3(logp_N, old_N), "ratio": ratio_N}
    measured |= {"importance": importance_N, "logprob_gap": (proximal_N - engine_N).abs()}
    measured |= {"importance_truncated": importance_N > _caps(stale_N, settings)}
    measured |= {} if ref_logp_N is None else {"kl": k3(logp_N, ref_logp_N)}
    return (loss_N * weight_N).sum(), _stats(measured)


def sequence_ratio(logp_N: Tensor, old_logp_N: Tensor, seq_N: Tensor) -> Tensor:
    """GSPO's ratio (arXiv 2507.18071): s = exp(mean over a sequence's tokens of logp - old_logp), [N].

    Its value is s on every token; its gradient is s * d logp of the token (the paper's GSPO-token). Averaged over the
    tokens of a sequence that is the gradient of s itself, s * mean(d logp): so with the aggregation
    `seq_mean_token_mean` loss and gradient are those of the paper's equation 5, and a token may still have an advantage
    of its own. `seq_N` holds any integer per sequence.

    >>> sequence_ratio(torch.tensor([-1.0, -1.0]), torch.tensor([-1.5, -0.9]), torch.tensor([3, 3])).tolist()
    [1.2214027643203735, 1.2214027643203735]
    """
    _, place_N, length_S = torch.unique(seq_N, return_inverse=True, return_counts=True)
    log_N = (logp_N - old_logp_N).detach()
    mean_S = torch.zeros(len(length_S), dtype=log_N.dtype, device=log_N.device).index_add_(0, place_N, log_N) / length_S
    ratio_N = mean_S.clamp(-_LOG_LIMIT, _LOG_LIMIT).exp()[place_N]
    return ratio_N * (logp_N - logp_N.detach()).exp()


def _truncated(importance_N: Tensor, stale_N: Tensor, settings: Loss) -> Tensor:
    """What each token's loss is multiplied by: importance up to its cap, or 1 where there is none."""
    capped_N = torch.minimum(importance_N, _caps(stale_N, settings))
    fresh, stale = settings.importance_cap is not None, settings.behaviour_cap is not None
    return torch.where((stale_N & stale) | (~stale_N & fresh), capped_N, 1.0)


def _caps(stale_N: Tensor, settings: Loss) -> Tensor:
    fresh, stale = settings.importance_cap or _IMPORTANCE_CAP, settings.behaviour_cap or _BEHAVIOUR_CAP
    return torch.where(stale_N, stale, fresh)


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


def reward_to_go(value_N: Tensor, seq_N: Tensor) -> Tensor:
    """For each token the sum of its own value and of those behind it in its sequence, [N].

    The tokens of a sequence are neighbours, in order. A penalty per token in the reward, undiscounted, makes this part
    of each token's advantage: what was sampled before it is not its doing.

    >>> reward_to_go(torch.tensor([1.0, 2.0, 4.0, 8.0]), torch.tensor([5, 5, 5, 2])).tolist()
    [7.0, 6.0, 4.0, 8.0]
    """
    _, length_S = torch.unique_consecutive(seq_N, return_counts=True)
    parts = torch.split(value_N, length_S.tolist())
    return torch.cat([part.flip(0).cumsum(0).flip(0) for part in parts]) if parts else value_N


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


def _stats(measured: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Means over tokens; of those in `_RANGED` maxima too, under names that say which; and `tokens`, their number.

    `clip_fraction`, `ratio` (to the old policy), `approx_kl` (k3 to it), `kl` (k3 to the reference, where there is
    one), `importance` (before truncation), `importance_truncated` (the share above its cap), `logprob_gap` (of
    proximal policy and engine: where no token is stale the mismatch alone). All are measured whatever is switched off.
    """
    count = next(iter(measured.values())).numel()
    stats = {"tokens": torch.tensor(float(count))}
    for name, values_N in measured.items():
        mean = values_N.detach().float().sum() / max(1, count)
        stats |= {f"{name}_mean": mean} if name in _RANGED else {name: mean}
        if name in _RANGED:
            stats[f"{name}_max"] = values_N.detach().max() if count else torch.zeros(())
    return stats


def _same_shape(first: Tensor, *others: Tensor) -> None:
    shapes = [tuple(tensor.shape) for tensor in (first, *others)]
    if first.ndim != 1 or len(set(shapes)) > 1:
        raise ValueError(f"the loss needs flat tensors of one shape, got {shapes}")
