"""Update the policy on samples: pack them, compute old and reference logprobs if a setting needs them, take steps.

    samples ──> mini-batches of whole groups ──> packed micro-batches ──> KL penalty, whitening over all mini-batches
    `epochs_per_batch` times, for each mini-batch: gradients of its micro-batches add up ──> one optimizer step

Axis letters: N trained tokens of a micro-batch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from saccade.algorithms.group_advantages import whiten_tokens
from saccade.algorithms.policy_loss import (
    compute_policy_loss,
    compute_reward_to_go,
    compute_token_weights,
    resolve_loss,
)
from saccade.algorithms.ratios import k1, k3
from saccade.config.schema import KlConfig, RlConfig
from saccade.errors import EngineError
from saccade.rollouts.components import TrainingComponents
from saccade.training.background import CheckCancelled
from saccade.training.optimizer import Optimizer
from saccade.training.packing import Batch
from saccade.training.reference import Reference
from saccade.training.train_step import StepReport, forward, merge_reports, pack_samples, train_step
from saccade.training.training_samples import split_mini_batches
from saccade.types import TrainingSample


def update_policy(
    components: TrainingComponents,
    samples: Sequence[TrainingSample],
    settings: RlConfig,
    optimizer: Optimizer,
    reference: Reference | None = None,
    check_cancelled: CheckCancelled = lambda: None,
) -> StepReport:
    """Take `epochs_per_batch` passes over the samples of a rollout batch, with one optimizer step per mini-batch.

    The trainer's logprobs before the first step (the proximal policy) are those of that step's forward pass, so they
    are computed beforehand only for further steps. Advantages are whitened over the whole rollout batch, losses
    averaged over a mini-batch. `check_cancelled` is called before each micro-batch. Raises EngineError if a packed
    token isn't the one that the engine sampled.
    """
    backbone, batches = components.backbone, list[Batch]()
    mini_batches: list[slice] = []  # of `batches`
    for mini_batch in split_mini_batches(samples, settings.mini_batches):
        packed = pack_samples(backbone, mini_batch, settings)
        check_engine_tokens(mini_batch, packed)
        mini_batches.append(slice(len(batches), len(batches) + len(packed)))
        batches += packed
    ref_logps: list[Tensor | None] = [None] * len(batches)
    if reference is not None:
        with reference.swap_in():
            ref_logps = [*_compute_logprobs(components, batches, check_cancelled)]
        batches = [
            _apply_kl_penalty(batch, ref_N, settings.kl) for batch, ref_N in zip(batches, ref_logps, strict=True)
        ]
    num_updates = settings.epochs_per_batch * len(mini_batches)
    needs_proximal = num_updates > 1 and settings.loss.old_logprobs == "trainer"
    proximal_logps = (
        [*_compute_logprobs(components, batches, check_cancelled)] if needs_proximal else [None] * len(batches)
    )
    if settings.advantage.whiten == "tokens":
        batches = _whiten_advantages(batches)
    weights = [weight_N for part in mini_batches for weight_N in _compute_token_weights(batches[part], settings)]
    batch_indices = {id(batch): index for index, batch in enumerate(batches)}
    version, token_loss = components.engine.version, resolve_loss(settings.loss)

    def compute_loss(batch: Batch, logp_N: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
        check_cancelled()
        device = logp_N.device
        index = batch_indices[id(batch)]
        return compute_policy_loss(
            logp_N,
            proximal_logps[index],
            torch.from_numpy(batch.advantage_N).to(device),
            weights[index].to(device),
            settings=settings.loss,
            token_loss=token_loss,
            rollout_logp_N=torch.from_numpy(batch.rollout_logp_N).to(device),
            stale_N=torch.from_numpy(batch.version_N < version).to(device),
            seq_N=torch.from_numpy(batch.sample_N).to(device),
            ref_logp_N=ref_logps[index],
            kl_coef=settings.kl.loss_coef,
        )

    load_pixels, temperature = components.media.load_pixels, components.recipe.sampling.temperature
    reports = [
        train_step(backbone, optimizer, batches[part], compute_loss, load_pixels=load_pixels, temperature=temperature)
        for _ in range(settings.epochs_per_batch)
        for part in mini_batches
    ]
    # Loss and gradient norm are the first pass's, statistics such as ratios the last one's.
    first_pass, last_pass = (
        merge_reports(part) for part in (reports[: len(mini_batches)], reports[-len(mini_batches) :])
    )
    stats = {**last_pass.stats, **_compute_staleness(batches, version)}
    return replace(first_pass, stats=stats, updates=num_updates)


def _compute_token_weights(batches: Sequence[Batch], settings: RlConfig) -> Sequence[Tensor]:
    """Return the weights of the tokens of a mini-batch's micro-batches, which add up to one average."""
    weight_N = compute_token_weights(
        torch.from_numpy(np.concatenate([batch.sample_N for batch in batches])),
        aggregation=settings.loss.aggregation,
        sum_norm=settings.loss.sum_norm,
    )
    return torch.split(weight_N, [len(batch.token_N) for batch in batches])


def _compute_logprobs(
    components: TrainingComponents, batches: Sequence[Batch], check_cancelled: CheckCancelled
) -> list[Tensor]:
    """Return the current weights' logprobs of each micro-batch's tokens, without a gradient."""
    temperature, load_pixels = components.recipe.sampling.temperature, components.media.load_pixels
    logprobs: list[Tensor] = []
    with torch.no_grad():
        for batch in batches:
            check_cancelled()
            logprobs.append(forward(components.backbone, batch, load_pixels=load_pixels, temperature=temperature)[0])
    return logprobs


def _apply_kl_penalty(batch: Batch, ref_logp_N: Tensor | None, settings: KlConfig) -> Batch:
    """Subtract from each advantage `reward_coef` times the KL estimate of the rest of its sequence."""
    if not settings.reward_coef or ref_logp_N is None:
        return batch
    estimate_kl = k1 if settings.estimator == "k1" else k3
    # A reward belongs to the policy that sampled the tokens, so its logprobs are the engine's.
    kl_N = estimate_kl(torch.from_numpy(batch.rollout_logp_N), ref_logp_N.cpu())
    penalty_N = settings.reward_coef * compute_reward_to_go(kl_N, torch.from_numpy(batch.sample_N))
    return replace(batch, advantage_N=batch.advantage_N - penalty_N.numpy())


def _whiten_advantages(batches: Sequence[Batch]) -> list[Batch]:
    """Normalize the advantages over the trained tokens of all micro-batches."""
    white_N = whiten_tokens(np.concatenate([batch.advantage_N for batch in batches])).astype(np.float32)
    ends = np.cumsum([len(batch.advantage_N) for batch in batches])[:-1]
    return [replace(batch, advantage_N=part_N) for batch, part_N in zip(batches, np.split(white_N, ends), strict=True)]


def _compute_staleness(batches: Sequence[Batch], version: int) -> dict[str, float]:
    """Return mean and maximum over the trained tokens of the weight versions between sampling and training."""
    staleness_N = version - np.concatenate([batch.version_N for batch in batches])
    return {"staleness_mean": float(staleness_N.mean()), "staleness_max": float(staleness_N.max())}


def check_engine_tokens(samples: Sequence[TrainingSample], batches: Sequence[Batch]) -> None:
    """Raise EngineError unless the batches train exactly the sampled tokens, each once, in order."""
    trained_tokens: dict[int, list[int]] = {}
    for batch in batches:
        for index, token in zip(batch.sample_N.tolist(), batch.token_N.tolist(), strict=True):
            trained_tokens.setdefault(index, []).append(token)
    for index, sample in enumerate(samples):
        if tuple(trained_tokens.get(index, ())) != sample.ledger.sampled_tokens():
            raise EngineError(f"the packed tokens of sample {index} differ from those that the engine sampled")
