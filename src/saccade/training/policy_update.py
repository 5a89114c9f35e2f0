"""Update the policy on samples: pack them, compute old and reference logprobs if a setting needs them, take steps.

    samples ──> mini-batches of whole groups ──> packed micro-batches ──> KL penalty, whitening over all mini-batches
    `epochs_per_batch` times, for each mini-batch: gradients of its micro-batches add up ──> one optimizer step

Axis letters: N trained tokens of a micro-batch.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from saccade.algorithms.group_advantages import whiten_tokens
from saccade.algorithms.policy_loss import (
    ENGINE_GAP_METRICS,
    TokenLoss,
    compute_policy_loss,
    compute_reward_to_go,
    compute_token_weights,
    resolve_loss,
)
from saccade.algorithms.ratios import k1, k3
from saccade.config.schema import KlConfig, RlConfig
from saccade.errors import EngineError
from saccade.models.vlm import LoadPixels
from saccade.rollouts.components import TrainingComponents
from saccade.training.background import CheckCancelled
from saccade.training.distributed.vlm import ShardedOptimizer, ShardedReference, ShardedVisionLanguageModel
from saccade.training.optimizer import Optimizer
from saccade.training.packing import MicroBatch
from saccade.training.reference import Reference
from saccade.training.token_log import TokenValues
from saccade.training.train_step import (
    MicroBatchResult,
    StepReport,
    detect_full_memory,
    forward,
    load_ahead,
    merge_reports,
    pack_samples,
    run_within_memory,
    split_to_fit,
    train_step,
)
from saccade.training.training_samples import split_mini_batches
from saccade.types import TrainingSample

OnTokens = Callable[[Iterable[TokenValues]], None]


def update_policy(
    components: TrainingComponents,
    samples: Sequence[TrainingSample],
    settings: RlConfig,
    optimizer: Optimizer | ShardedOptimizer,
    reference: Reference | ShardedReference | None = None,
    check_cancelled: CheckCancelled = lambda: None,
    on_tokens: OnTokens = lambda values: None,
) -> StepReport:
    """Take `epochs_per_batch` passes over the samples of a rollout batch, with one optimizer step per mini-batch.

    The trainer's logprobs before the first step (`prox_logp_N`) are those of that step's forward pass, so they are
    computed beforehand only for further steps. Advantages are whitened over the whole rollout batch, losses
    averaged over a mini-batch. `check_cancelled` is called before each micro-batch up to the first update. `on_tokens`
    receives what each mini-batch's first pass computed for every token. Raises EngineError if a packed token isn't the
    sampled one of its ledger.
    """
    vlm, micro_batches = components.vlm, list[MicroBatch]()
    mini_batches: list[slice] = []  # of `micro_batches`
    samples_by_mini_batch = split_mini_batches(samples, settings.num_mini_batches)
    for mini_batch in samples_by_mini_batch:
        packed = pack_samples(vlm, mini_batch, settings)
        check_packed_tokens(mini_batch, packed)
        mini_batches.append(slice(len(micro_batches), len(micro_batches) + len(packed)))
        micro_batches += packed
    with vlm.share_features():
        if reference is not None:
            with reference.swap_in():
                ref_logps = _compute_logprobs(components, micro_batches, check_cancelled)
            micro_batches = [
                _apply_kl_penalty(replace(micro_batch, ref_logp_N=ref_logp_N), settings.kl)
                for micro_batch, ref_logp_N in zip(micro_batches, ref_logps, strict=True)
            ]
        num_updates = settings.epochs_per_batch * len(mini_batches)
        if num_updates > 1 and settings.loss.old_logprobs == "trainer":
            prox_logps = _compute_logprobs(components, micro_batches, check_cancelled)
            micro_batches = [
                replace(micro_batch, prox_logp_N=logp_N)
                for micro_batch, logp_N in zip(micro_batches, prox_logps, strict=True)
            ]
        if settings.advantage.whiten == "tokens":
            micro_batches = _whiten_advantages(micro_batches)
        micro_batches = [
            micro_batch for part in mini_batches for micro_batch in _weight_tokens(micro_batches[part], settings)
        ]
        version = components.engine.version
        loss_fn = build_policy_loss(settings, version)
        load_all_pixels, temperature = components.media.load_all_pixels, components.recipe.sampling.temperature
        reports = list[StepReport]()

        def report_tokens(parts: Sequence[MicroBatch], results: Sequence[MicroBatchResult]) -> None:
            if len(reports) < len(mini_batches):
                on_tokens(_list_token_values(samples_by_mini_batch[len(reports)], parts, results))

        for part in mini_batches * settings.epochs_per_batch:
            report = train_step(
                vlm,
                optimizer,
                micro_batches[part],
                loss_fn,
                load_all_pixels=load_all_pixels,
                temperature=temperature,
                entropy_coef=settings.loss.entropy_coef,
                # Between two updates of one batch the weights are those of no step, which no checkpoint can hold.
                check_cancelled=(lambda: None) if reports else check_cancelled,
                on_results=report_tokens,
            )
            reports.append(report)
    # Loss and gradient norm are the first pass's, statistics such as ratios the last one's.
    first_pass, last_pass = (
        merge_reports(part) for part in (reports[: len(mini_batches)], reports[-len(mini_batches) :])
    )
    stats = {**last_pass.stats, **_compute_staleness(micro_batches, version)}
    if settings.loss.old_logprobs == "engine":  # no logprobs before the update: later ones contain the policy's change
        stats |= {key: value for key, value in reports[0].stats.items() if key.startswith(ENGINE_GAP_METRICS)}
    return replace(first_pass, stats=stats, updates=num_updates)


class PolicyLoss:
    """The recipe's loss of a micro-batch; `token_loss` is resolved again where it is unpickled."""

    def __init__(self, settings: RlConfig, version: int, token_loss: TokenLoss) -> None:
        self._settings, self._version, self._token_loss = settings, version, token_loss

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle everything but the resolved loss."""
        return build_policy_loss, (self._settings, self._version)

    def __call__(self, micro_batch: MicroBatch, logp_N: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the loss and its statistics."""

        def load(array_N: np.ndarray) -> Tensor:
            return torch.from_numpy(array_N).to(logp_N.device)

        assert micro_batch.weight_N is not None, "the tokens of a micro-batch have no weights"
        return compute_policy_loss(
            logp_N,
            None if micro_batch.prox_logp_N is None else load(micro_batch.prox_logp_N),
            load(micro_batch.advantage_N),
            load(micro_batch.weight_N),
            settings=self._settings.loss,
            token_loss=self._token_loss,
            engine_logp_N=load(micro_batch.engine_logp_N),
            stale_N=load(micro_batch.version_N < self._version),
            seq_N=load(micro_batch.sample_N),
            ref_logp_N=None if micro_batch.ref_logp_N is None else load(micro_batch.ref_logp_N),
            kl_coef=self._settings.kl.loss_coef,
        )


def build_policy_loss(settings: RlConfig, version: int) -> PolicyLoss:
    """Return the recipe's loss for tokens sampled by weights up to `version`; older ones are stale."""
    return PolicyLoss(settings, version, resolve_loss(settings.loss))


def _weight_tokens(micro_batches: Sequence[MicroBatch], settings: RlConfig) -> list[MicroBatch]:
    """Add the weights of the tokens of a mini-batch's micro-batches, which add up to one average."""
    weight_N = compute_token_weights(
        torch.from_numpy(np.concatenate([micro_batch.sample_N for micro_batch in micro_batches])),
        aggregation=settings.loss.aggregation,
        token_sum_divisor=settings.loss.token_sum_divisor,
    )
    parts = torch.split(weight_N, [len(micro_batch.token_N) for micro_batch in micro_batches])
    return [
        replace(micro_batch, weight_N=part_N.numpy()) for micro_batch, part_N in zip(micro_batches, parts, strict=True)
    ]


def _compute_logprobs(
    components: TrainingComponents, micro_batches: Sequence[MicroBatch], check_cancelled: CheckCancelled
) -> list[np.ndarray]:
    """Return the current weights' logprobs of each micro-batch's tokens, without a gradient."""
    temperature, load_all_pixels = components.recipe.sampling.temperature, components.media.load_all_pixels
    vlm = components.vlm
    if isinstance(vlm, ShardedVisionLanguageModel):
        return vlm.compute_logprobs(
            micro_batches, load_all_pixels=load_all_pixels, temperature=temperature, check_cancelled=check_cancelled
        )

    def compute(micro_batch: MicroBatch, load_pixels: LoadPixels) -> np.ndarray:
        logp_N = np.zeros(len(micro_batch.token_N), dtype=np.float32)
        for part, index_N in split_to_fit(micro_batch, vlm.max_micro_batch_tokens):
            with detect_full_memory(part):
                part_logp_N, _ = forward(vlm, part, load_pixels=load_pixels, temperature=temperature)
                logp_N[index_N] = part_logp_N.cpu().numpy()
        return logp_N

    logprobs: list[np.ndarray] = []
    with torch.no_grad():
        for micro_batch, load_pixels in load_ahead(vlm, micro_batches, load_all_pixels):
            check_cancelled()
            logprobs.append(run_within_memory(vlm, partial(compute, micro_batch, load_pixels)))
    return logprobs


def _apply_kl_penalty(micro_batch: MicroBatch, settings: KlConfig) -> MicroBatch:
    """Subtract from each advantage `advantage_coef` times the KL estimate of the rest of its sequence."""
    if not settings.advantage_coef or micro_batch.ref_logp_N is None:
        return micro_batch
    estimate_kl = k1 if settings.penalty_estimator == "k1" else k3
    # A reward belongs to the policy that sampled the tokens, so its logprobs are the engine's.
    kl_N = estimate_kl(torch.from_numpy(micro_batch.engine_logp_N), torch.from_numpy(micro_batch.ref_logp_N))
    penalty_N = settings.advantage_coef * compute_reward_to_go(kl_N, torch.from_numpy(micro_batch.sample_N))
    return replace(micro_batch, advantage_N=micro_batch.advantage_N - penalty_N.numpy())


def _whiten_advantages(micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
    """Normalize the advantages over the trained tokens of all micro-batches."""
    white_N = whiten_tokens(np.concatenate([micro_batch.advantage_N for micro_batch in micro_batches])).astype(
        np.float32
    )
    ends = np.cumsum([len(micro_batch.advantage_N) for micro_batch in micro_batches])[:-1]
    return [
        replace(micro_batch, advantage_N=part_N)
        for micro_batch, part_N in zip(micro_batches, np.split(white_N, ends), strict=True)
    ]


def _compute_staleness(micro_batches: Sequence[MicroBatch], version: int) -> dict[str, float]:
    """Return mean and maximum over the trained tokens of the weight versions between sampling and training."""
    staleness_N = version - np.concatenate([micro_batch.version_N for micro_batch in micro_batches])
    return {"staleness_mean": float(staleness_N.mean()), "staleness_max": float(staleness_N.max())}


def _list_token_values(
    samples: Sequence[TrainingSample], micro_batches: Sequence[MicroBatch], results: Sequence[MicroBatchResult]
) -> Iterator[TokenValues]:
    """Yield the values of each sample of the micro-batches, from the results of their forward passes.

    The trainer's logprobs are those before the update (`prox_logp_N`) where a setting has them computed.
    """
    for micro_batch, result in zip(micro_batches, results, strict=True):
        logp_N = result.logp_N if micro_batch.prox_logp_N is None else micro_batch.prox_logp_N
        for index in np.unique(micro_batch.sample_N).tolist():
            is_own_N, ledger = micro_batch.sample_N == index, samples[index].ledger
            yield TokenValues(
                ledger=ledger,
                position_N=np.flatnonzero(ledger.loss_mask()),  # the tokens of a sample are packed in order
                logprob_diff_N=logp_N[is_own_N] - micro_batch.engine_logp_N[is_own_N],
                entropy_N=result.entropy_N[is_own_N],
            )


def check_packed_tokens(samples: Sequence[TrainingSample], micro_batches: Sequence[MicroBatch]) -> None:
    """Raise EngineError unless the micro-batches train exactly the sampled tokens, each once, in order."""
    trained_tokens: dict[int, list[int]] = {}
    for micro_batch in micro_batches:
        for index, token in zip(micro_batch.sample_N.tolist(), micro_batch.token_N.tolist(), strict=True):
            trained_tokens.setdefault(index, []).append(token)
    for index, sample in enumerate(samples):
        if tuple(trained_tokens.get(index, ())) != sample.ledger.sampled_tokens():
            raise EngineError(f"the packed tokens of sample {index} differ from the sampled tokens of its ledger")
