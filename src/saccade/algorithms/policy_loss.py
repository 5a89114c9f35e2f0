"""What all policy losses share: token weights, importance weights, the KL penalty, statistics.

Axis letters: N sampled tokens of a micro-batch or of a whole batch, S sequences. Logprob tensors hold natural logs of
the sampled token's probability. The loss of a token is

    tis_weight * loss (`losses/*`, of logp, old and A) + kl_coef * k3

`train_step` subtracts the entropy bonus, entropy_coef * entropy, weighted alike.

- `old` are the OLD logprobs: the proximal policy's, which are the trainer's before the update (`prox_logp_N`, after
  AReaL), or with `old_logprobs: engine` the engine's.
- tis_weight = min(w, cap) with w = exp(trainer - engine), of the trainer's logprobs before the update: AReaL's
  decoupled objective (arXiv 2505.24298). There is ONE such weight per token. For a token of the current weights it
  corrects the mismatch of engine and trainer (truncated importance sampling), up to `tis_cap`; for a token of older
  weights (a STALE token) it also corrects staleness, up to `stale_tis_cap`. A cap of None leaves those tokens
  unweighted. With `above_tis_cap: mask` or `above_stale_tis_cap: mask` the weight is 0 where w > cap, as in AReaL's
  code: the token has no loss but counts in the average.
- k3 estimates the KL divergence from the REFERENCE policy, the weights that RL started from.

A batch may be cut into micro-batches between sequences (`pack` never cuts one): `compute_token_weights` is evaluated
once on the whole batch and sliced, so the losses and gradients of the parts add up to those of the whole. `merge_stats`
combines the statistics of the parts accordingly.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from saccade import plugins
from saccade.algorithms.ratios import compute_token_ratio, k3
from saccade.config.schema import LossConfig
from saccade.errors import ConfigError, convert_errors

Aggregation = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum_norm"]
_METRICS_WITH_MAX = ("ratio", "tis_weight", "engine_trainer_logprob_diff")
# Metrics of every update: a loss's own statistic of the same name would replace one, or be replaced.
_STEP_METRICS = ("step", "stage", "updates", "loss", "entropy", "grad_norm", "lr", "packed_tokens", "trained_tokens")
_TOKEN_METRICS = ("tokens", "approx_kl", "kl", "tis_weight", "frac_tis_truncated", "engine_trainer_logprob_diff")
# Compare the engine with the trainer.
ENGINE_GAP_METRICS = ("tis_weight", "frac_tis_truncated", "engine_trainer_logprob_diff")
_MEASURED_WITH_MAX = ("tis_weight", "engine_trainer_logprob_diff", "staleness")
_SHARED_METRICS = {*_STEP_METRICS, *_TOKEN_METRICS} | {
    f"{name}_{kind}" for name in _MEASURED_WITH_MAX for kind in ("mean", "max")
}
# (logp_N, old_logp_N, adv_N, seq_N) -> the loss and statistics of each token, [N]; see `algorithms/losses`
TokenLoss = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Mapping[str, Tensor]]]


def resolve_loss(settings: LossConfig) -> TokenLoss:
    """Return the recipe's loss with its settings. Raises ConfigError for an unknown name or setting.

    The loss raises it, too, if the plugin fails, returns tensors that don't have one value per token, or names a
    statistic like a metric of every update.
    """
    name, key = settings.name, "rl.loss.name"
    bound = plugins.resolve("algorithms.losses", name, settings.settings)

    def compute_loss(
        logp_N: Tensor, old_logp_N: Tensor, adv_N: Tensor, seq_N: Tensor
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        with convert_errors(ConfigError, f"the loss {name!r} failed", key=key, value=name):
            loss_N, stats = bound(logp_N, old_logp_N, adv_N, seq_N)
            shapes = {"the loss": loss_N.shape, **{stat: value.shape for stat, value in stats.items()}}
        if wrong := {what: tuple(shape) for what, shape in shapes.items() if shape != logp_N.shape}:
            message = f"the loss {name!r} must return tensors of the shape {tuple(logp_N.shape)}, one value per token"
            raise ConfigError(f"{message}, not {wrong}", key=key, value=name)
        if taken := sorted(_SHARED_METRICS & stats.keys()):
            message = f"the loss {name!r} returns statistics with the names of logged metrics: {', '.join(taken)}"
            raise ConfigError(f"{message}; rename them", key=key, value=name)
        return loss_N, stats

    return compute_loss


def compute_token_weights(seq_N: Tensor, *, aggregation: Aggregation, token_sum_divisor: float = 256.0) -> Tensor:
    """Return the weight of each token's loss in the sum over a WHOLE batch of N tokens, [N].

    `seq_N` holds one integer per sequence. `token_mean`: 1 / N. `seq_mean_token_mean`: 1 / (S * tokens of its
    sequence), so that each sequence counts the same (GRPO). `seq_mean_token_sum_norm`: 1 / (S * token_sum_divisor), a
    constant divisor (Dr. GRPO, arXiv 2503.20783). S is the number of sequences in `seq_N`.

    >>> compute_token_weights(torch.tensor([4, 4, 4, 9]), aggregation="seq_mean_token_mean").tolist()[-1]
    0.5
    """
    if seq_N.numel() == 0:
        return torch.zeros_like(seq_N, dtype=torch.float32)
    # index_N: each token's sequence as an index into S
    _, index_N, length_S = torch.unique(seq_N, return_inverse=True, return_counts=True)
    if aggregation == "token_mean":
        divisor_N = torch.full_like(seq_N, seq_N.numel(), dtype=torch.float32)
    elif aggregation == "seq_mean_token_mean":
        divisor_N = (length_S[index_N] * len(length_S)).float()
    else:
        divisor_N = torch.full_like(seq_N, len(length_S), dtype=torch.float32) * token_sum_divisor
    return 1.0 / divisor_N


def compute_policy_loss(
    logp_N: Tensor,
    prox_logp_N: Tensor | None,
    adv_N: Tensor,
    weight_N: Tensor,
    *,
    settings: LossConfig,
    token_loss: TokenLoss | None = None,
    engine_logp_N: Tensor | None = None,
    stale_N: Tensor | None = None,
    seq_N: Tensor | None = None,
    ref_logp_N: Tensor | None = None,
    kl_coef: float = 0.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of the module's docstring (a scalar with a gradient to `logp_N`) and detached statistics.

    `prox_logp_N` are the trainer's logprobs before the update; None means the current ones (one update per batch:
    r = 1). `token_loss` is that of `settings`, resolved beforehand. `engine_logp_N` are the logprobs that the engine
    reported, None if unknown. `stale_N` marks tokens sampled by older weights; None means none. `seq_N` holds one
    integer per sequence; None means one sequence. `weight_N` is this micro-batch's slice of `compute_token_weights`. No
    gradient flows to anything but `logp_N`. Raises ValueError if `kl_coef` is set without reference logprobs, or for
    unequal shapes.
    """
    logp_N = logp_N.to(torch.promote_types(logp_N.dtype, torch.float32))
    now_N = logp_N.detach()
    trainer_N = now_N if prox_logp_N is None else prox_logp_N.detach().to(now_N.dtype)
    engine_N = trainer_N if engine_logp_N is None else engine_logp_N.detach().to(now_N.dtype)
    seq_N = torch.zeros_like(logp_N, dtype=torch.int64) if seq_N is None else seq_N
    stale_N = torch.zeros_like(logp_N, dtype=torch.bool) if stale_N is None else stale_N
    references = [] if ref_logp_N is None else [ref_logp_N]
    shapes = [tuple(tensor.shape) for tensor in (logp_N, trainer_N, adv_N, weight_N, engine_N, seq_N, *references)]
    if logp_N.ndim != 1 or len(set(shapes)) > 1:
        raise ValueError(f"the loss needs flat tensors of equal shape, got {shapes}")
    if kl_coef > 0 and ref_logp_N is None:
        raise ValueError(f"kl_coef={kl_coef} needs the reference's logprobs; ref_logp_N is None")
    adv_N, weight_N = adv_N.detach().to(now_N.dtype), weight_N.detach().to(now_N.dtype)

    old_N = engine_N if settings.old_logprobs == "engine" else trainer_N
    loss_N, token_stats = (token_loss or resolve_loss(settings))(logp_N, old_N, adv_N, seq_N)
    # No gradient flows through it: both logprobs are detached.
    importance_N = compute_token_ratio(trainer_N, engine_N)
    loss_N = loss_N * _compute_tis_weights(importance_N, stale_N, settings)
    if ref_logp_N is not None:
        loss_N = loss_N + kl_coef * k3(logp_N, ref_logp_N)
    # The tokens are samples of the old policy, so this estimates KL(old || policy): k3's first argument has sampled.
    metrics = {**token_stats, "approx_kl": k3(old_N, logp_N)}
    metrics |= {"tis_weight": importance_N, "engine_trainer_logprob_diff": (trainer_N - engine_N).abs()}
    metrics |= {"frac_tis_truncated": importance_N > _select_tis_caps(stale_N, settings)}
    metrics |= {} if ref_logp_N is None else {"kl": k3(logp_N, ref_logp_N)}
    return (loss_N * weight_N).sum(), _compute_stats(metrics)


def _compute_tis_weights(importance_N: Tensor, stale_N: Tensor, settings: LossConfig) -> Tensor:
    """Return the importance weight, truncated or 0 above its cap, or 1 if the cap is None, [N]."""
    cap_N = _select_tis_caps(stale_N, settings)  # infinite if None
    is_masking_N = torch.where(stale_N, settings.above_stale_tis_cap == "mask", settings.above_tis_cap == "mask")
    capped_N = torch.minimum(importance_N, cap_N).masked_fill(is_masking_N & (importance_N > cap_N), 0.0)
    return torch.where(cap_N.isinf(), 1.0, capped_N)


def _select_tis_caps(stale_N: Tensor, settings: LossConfig) -> Tensor:
    fresh_cap, stale_cap = (math.inf if cap is None else cap for cap in (settings.tis_cap, settings.stale_tis_cap))
    return torch.where(stale_N, stale_cap, fresh_cap)


def compute_reward_to_go(value_N: Tensor, seq_N: Tensor) -> Tensor:
    """Return, for each token, the sum of the values from it to the end of its sequence, [N].

    The tokens of a sequence are contiguous and in order. An undiscounted reward per token adds this sum
    to each token's advantage: a token doesn't affect the tokens sampled before it.

    >>> compute_reward_to_go(torch.tensor([1.0, 2.0, 4.0, 8.0]), torch.tensor([5, 5, 5, 2])).tolist()
    [7.0, 6.0, 4.0, 8.0]
    """
    _, length_S = torch.unique_consecutive(seq_N, return_counts=True)
    parts = torch.split(value_N, length_S.tolist())
    return torch.cat([part.flip(0).cumsum(0).flip(0) for part in parts]) if parts else value_N


def merge_stats(parts: Sequence[Mapping[str, Tensor | float]]) -> dict[str, float]:
    """Combine the statistics of micro- or mini-batches: means weighted by `tokens`, maxima of `*_max`, summed `tokens`.

    >>> first = {"ratio_mean": torch.tensor(1.0), "ratio_max": torch.tensor(1.2), "tokens": torch.tensor(3.0)}
    >>> second = {"ratio_mean": torch.tensor(2.0), "ratio_max": torch.tensor(2.5), "tokens": torch.tensor(1.0)}
    >>> merge_stats([first, second])
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
            weighted_sum = sum(value * count for value, count in zip(values, tokens, strict=True))
            merged[name] = weighted_sum / max(1.0, sum(tokens))
    return merged


def _compute_stats(values_by_metric: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return each metric's mean over the tokens (`*_mean` and `*_max` for `_METRICS_WITH_MAX`) and `tokens`, the count.

    The metrics are those of the loss (`clip_fraction` and `ratio` to the old policy), `approx_kl` (k3 estimate of
    KL(old || policy)), `kl` (k3 to the reference, if there is one), `tis_weight` (before truncation),
    `frac_tis_truncated` (the fraction above its cap, truncated or masked; 0 without a cap) and
    `engine_trainer_logprob_diff` (of the trainer before the update). Terms that are off are measured too.
    """
    count = next(iter(values_by_metric.values())).numel()
    stats = {"tokens": torch.tensor(float(count))}
    for name, values_N in values_by_metric.items():
        mean = values_N.detach().float().sum() / max(1, count)
        stats |= {f"{name}_mean": mean} if name in _METRICS_WITH_MAX else {name: mean}
        if name in _METRICS_WITH_MAX:
            stats[f"{name}_max"] = values_N.detach().max() if count else torch.zeros(())
    return stats
