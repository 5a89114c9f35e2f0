"""Run forward, backward and one optimizer step over packed batches, for any loss.

Axis letters: B rows, T tokens, N trained tokens.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from statistics import fmean

import numpy as np
import torch
from torch import Tensor

from saccade.algorithms.policy_loss import merge_stats
from saccade.config.schema import RlConfig, SftConfig
from saccade.errors import RunError
from saccade.models import checkpoint_io
from saccade.models.backbone import Backbone, LoadPixels
from saccade.models.policy import PolicyInputs
from saccade.training.background import CheckCancelled
from saccade.training.distributed.backbone import DividedBackbone, DividedOptimizer
from saccade.training.optimizer import Optimizer
from saccade.training.packing import Batch, pack
from saccade.types import TrainingSample

LossFn = Callable[[Batch, Tensor], tuple[Tensor, Mapping[str, Tensor]]]  # (batch, logp_N) -> loss, statistics


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """Measurements of an optimizer step, or of a rollout batch's steps (see `merge_reports`)."""

    loss: float  # sum over the micro-batches
    entropy: float  # mean over the trained tokens, in nats
    grad_norm: float  # before clipping
    packed_tokens: int  # without padding
    trained_tokens: int  # tokens with a loss
    stats: Mapping[str, float]  # of the loss function
    updates: int = 1  # optimizer steps

    def as_metrics(self) -> dict[str, float]:
        """Return the measurements but `updates` by name, as a row of the log holds them."""
        values = asdict(self)
        del values["updates"]
        stats = values.pop("stats")
        return {**values, **{name: value for name, value in stats.items() if name != "tokens"}}


def merge_reports(reports: Sequence[StepReport]) -> StepReport:
    """Return the report of a pass over mini-batches from the reports of its steps.

    Tokens and updates are summed, loss and gradient norm averaged over the steps, entropy and statistics over the
    tokens; of `*_max` it is the maximum.
    """
    if len(reports) == 1:  # exactly, without multiplying and dividing by the tokens
        return reports[0]
    trained_tokens = sum(report.trained_tokens for report in reports)
    return StepReport(
        loss=fmean(report.loss for report in reports),
        entropy=sum(report.entropy * report.trained_tokens for report in reports) / max(trained_tokens, 1),
        grad_norm=fmean(report.grad_norm for report in reports),
        packed_tokens=sum(report.packed_tokens for report in reports),
        trained_tokens=trained_tokens,
        stats=merge_stats([report.stats for report in reports]),
        updates=sum(report.updates for report in reports),
    )


def pack_samples(backbone: Backbone, samples: Sequence[TrainingSample], settings: SftConfig | RlConfig) -> list[Batch]:
    """Pack samples into micro-batches of the recipe's size."""
    return pack(
        samples,
        compute_positions=backbone.renderer.compute_position_ids,
        pack_length=settings.pack_length,
        micro_batch_size=settings.micro_batch_size,
        num_parallel_micro_batches=backbone.num_parallel_micro_batches,
    )


def forward(backbone: Backbone, batch: Batch, *, load_pixels: LoadPixels, temperature: float) -> tuple[Tensor, Tensor]:
    """Return logprobs [N] and entropies [N] (detached) of the trained tokens under the sampling distribution."""
    # Each distinct image is encoded once, however often the batch contains it.
    unique = {image.key: image for image in batch.images}
    index_by_key = {key: index for index, key in enumerate(unique)}
    inputs = PolicyInputs(
        ids_BT=torch.from_numpy(batch.ids_BT).to(backbone.device),
        positions_3BT=torch.from_numpy(batch.positions_3BT).to(backbone.device),
        mask_BTS=build_tree_attention_mask(
            torch.from_numpy(batch.tree_BT).to(backbone.device), torch.from_numpy(batch.branch_BT).to(backbone.device)
        ),
        row_N=torch.from_numpy(batch.row_N).to(backbone.device),
        predictor_N=torch.from_numpy(batch.predictor_N).to(backbone.device),
        token_N=torch.from_numpy(batch.token_N).to(backbone.device),
        vision_passes=backbone.iterate_vision_passes(list(unique.values()), load_pixels),
        image_indices=[index_by_key[image.key] for image in batch.images],
    )
    logp_N, entropy_N = backbone.policy(inputs, temperature)
    return logp_N, entropy_N


def build_tree_attention_mask(tree_BT: Tensor, branch_BT: Tensor) -> Tensor:
    """Return the tree attention mask of packed rows (see `pack`), bool [B, query T, key T]."""
    T = tree_BT.shape[1]
    # In place: the mask of a row of 20,000 tokens takes 400 MB.
    mask_BTT = tree_BT[:, :, None] == tree_BT[:, None, :]
    mask_BTT &= (branch_BT[:, None, :] == 0) | (branch_BT[:, :, None] == branch_BT[:, None, :])
    return mask_BTT.logical_and_(torch.ones(T, T, dtype=torch.bool, device=tree_BT.device).tril())


def train_step(
    backbone: Backbone,
    optimizer: Optimizer | DividedOptimizer,
    batches: Sequence[Batch],
    loss_fn: LossFn,
    *,
    load_pixels: LoadPixels,
    temperature: float = 1.0,
    check_cancelled: CheckCancelled = lambda: None,
) -> StepReport:
    """Accumulate gradients over the micro-batches, whose losses add up, then take one optimizer step.

    If the weights are divided among processes, `loss_fn` must be picklable, and each micro-batch is run by one of them.
    `check_cancelled` is called for each micro-batch.
    """
    if isinstance(backbone, DividedBackbone):
        results = backbone.accumulate_gradients(
            batches, loss_fn, load_pixels=load_pixels, temperature=temperature, check_cancelled=check_cancelled
        )
    else:
        backbone.model.train()

        def compute_loss(batch: Batch, logp_N: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
            check_cancelled()
            return loss_fn(batch, logp_N)

        results = accumulate_gradients(
            backbone, batches, compute_loss, load_pixels=load_pixels, temperature=temperature
        )
    backbone.model.eval()
    require_finite_losses(batches, results, optimizer.current_step)
    grad_norm = optimizer.step()
    losses, entropies, stats = zip(*results, strict=True)
    trained_tokens = sum(len(batch.token_N) for batch in batches)
    return StepReport(
        loss=sum(losses),
        entropy=sum(entropies) / max(trained_tokens, 1),
        grad_norm=grad_norm,
        packed_tokens=sum(int((batch.tree_BT >= 0).sum()) for batch in batches),
        trained_tokens=trained_tokens,
        stats=merge_stats(stats),
    )


MicroBatchResult = tuple[float, float, Mapping[str, Tensor]]  # loss, sum of entropies, statistics


def require_finite_losses(batches: Sequence[Batch], results: Sequence[MicroBatchResult], step: int) -> None:
    """Raise RunError if the loss of a micro-batch of step `step` (from 1) isn't finite; name its first bad tensor."""
    for index, (batch, (loss, entropy, _)) in enumerate(zip(batches, results, strict=True)):
        if not math.isfinite(loss):
            arrays = {key.name: getattr(batch, key.name) for key in fields(batch)}
            name = checkpoint_io.find_nonfinite(
                {name: torch.from_numpy(value) for name, value in arrays.items() if isinstance(value, np.ndarray)}
            ) or ("" if math.isfinite(entropy) else "the logits")
            reason = f"{name} hold NaN or an infinity" if name else "its inputs are finite"
            raise RunError(
                f"step {step}: the loss of micro-batch {index + 1} of {len(batches)} is {loss} ({reason}); no weight "
                "was changed; start again with a lower learning rate or another loss",
                key="loss",
                value=loss,
            )


def accumulate_gradients(
    backbone: Backbone, batches: Sequence[Batch], loss_fn: LossFn, *, load_pixels: LoadPixels, temperature: float
) -> list[MicroBatchResult]:
    """Add up the gradients of micro-batches in this process; return each one's result."""

    def compute_loss(batch: Batch) -> tuple[Tensor, float, Mapping[str, Tensor]]:
        logp_N, entropy_N = forward(backbone, batch, load_pixels=load_pixels, temperature=temperature)
        loss, stats = loss_fn(batch, logp_N)
        return loss, float(entropy_N.sum()), stats

    if backbone.num_parallel_micro_batches > 1 and len(batches) > 1:
        return _run_in_parallel(backbone, batches, compute_loss)
    results = []
    for batch in batches:
        loss, entropy, stats = compute_loss(batch)
        torch.autograd.backward(loss)
        results.append((float(loss.detach()), entropy, stats))
    return results


def _run_in_parallel(
    backbone: Backbone,
    batches: Sequence[Batch],
    compute_loss: Callable[[Batch], tuple[Tensor, float, Mapping[str, Tensor]]],
) -> list[MicroBatchResult]:
    """Run one thread per micro-batch (several per operation scale worse); gradients are added in order."""
    num_threads, parameters = backbone.num_parallel_micro_batches, backbone.trainable_parameters

    def compute_gradients(batch: Batch) -> tuple[MicroBatchResult, tuple[Tensor | None, ...]]:
        with torch.enable_grad():  # gradient mode is set per thread
            loss, entropy, stats = compute_loss(batch)
            gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        return (float(loss.detach()), entropy, stats), gradients

    results: list[MicroBatchResult] = []
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(num_threads, thread_name_prefix="saccade-batch") as pool:
            for start in range(0, len(batches), num_threads):  # bounds memory: at most one set of gradients per thread
                for result, gradients in pool.map(compute_gradients, batches[start : start + num_threads]):
                    results.append(result)
                    for parameter, gradient in zip(parameters, gradients, strict=True):
                        if gradient is not None:
                            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
    finally:
        torch.set_num_threads(num_threads)
    return results
