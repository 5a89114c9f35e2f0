"""Run forward, backward and one optimizer step over packed micro-batches, for any loss.

Axis letters: B rows, T tokens, N trained tokens.
"""

import contextlib
import gc
import itertools
import json
import logging
import math
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import fmean
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from saccade.algorithms.policy_loss import merge_stats
from saccade.config.schema import RlConfig, SftConfig
from saccade.errors import RunError, SaccadeError
from saccade.models import checkpoint_io
from saccade.models.attention import find_attention_spans
from saccade.models.policy import PolicyInputs
from saccade.models.vlm import LoadAllPixels, LoadPixels, VisionLanguageModel
from saccade.training.background import CheckCancelled
from saccade.training.distributed.vlm import ShardedOptimizer, ShardedVisionLanguageModel
from saccade.training.optimizer import Optimizer, limit_threads
from saccade.training.packing import MicroBatch, pack, split_micro_batch
from saccade.types import TrainingSample
from saccade.utils.files import write_text
from saccade.utils.jsonl import read_json

LIMIT_FILE, _LIMIT_KEY = "micro_batch_limit.json", "max_micro_batch_tokens"  # of a run folder
_MEMORY_ERRORS = ("not enough memory", "out of memory")  # of torch on a CPU, and of libraries of CUDA
_logger = logging.getLogger("saccade")
T = TypeVar("T")
# (micro_batch, logp_N) -> loss, statistics
LossFn = Callable[[MicroBatch, Tensor], tuple[Tensor, Mapping[str, Tensor]]]


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


def pack_samples(
    vlm: VisionLanguageModel, samples: Sequence[TrainingSample], settings: SftConfig | RlConfig
) -> list[MicroBatch]:
    """Pack samples into micro-batches of the recipe's size."""
    return pack(
        samples,
        compute_positions=vlm.renderer.compute_position_ids,
        pack_length=settings.pack_length,
        micro_batch_size=settings.micro_batch_size,
        num_parallel_micro_batches=vlm.num_parallel_micro_batches,
        share_prefixes=vlm.renderer.supports_prefix_sharing,
    )


def forward(
    vlm: VisionLanguageModel,
    micro_batch: MicroBatch,
    *,
    load_pixels: LoadPixels,
    temperature: float,
    has_entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return logprobs [N] and entropies [N] of the trained tokens; see `Policy.forward`."""
    # Each distinct image is encoded once, however often the micro-batch contains it.
    unique = {image.key: image for image in micro_batch.images}
    index_by_key = {key: index for index, key in enumerate(unique)}
    vlm.cache_frozen_features(unique.values(), load_pixels)
    features = [vlm.frozen_features.get(key) for key in unique]
    new_images = [image for image, known in zip(unique.values(), features, strict=True) if known is None]
    inputs = PolicyInputs(
        ids_BT=torch.from_numpy(micro_batch.ids_BT).to(vlm.device),
        positions_3BT=torch.from_numpy(micro_batch.positions_3BT).to(vlm.device),
        trees=vlm.pack_spans(
            find_attention_spans(micro_batch.tree_BT, micro_batch.branch_BT), micro_batch.ids_BT.shape[1]
        ),
        row_N=torch.from_numpy(micro_batch.row_N).to(vlm.device),
        logit_index_N=torch.from_numpy(micro_batch.logit_index_N).to(vlm.device),
        token_N=torch.from_numpy(micro_batch.token_N).to(vlm.device),
        vision_passes=vlm.iterate_vision_passes(new_images, load_pixels),
        image_features=features,
        image_indices=[index_by_key[image.key] for image in micro_batch.images],
    )
    logp_N, entropy_N = vlm.policy(inputs, temperature, has_entropy_gradient=has_entropy_gradient)
    return logp_N, entropy_N


def load_ahead(
    vlm: VisionLanguageModel,
    micro_batches: Sequence[MicroBatch],
    load_all_pixels: LoadAllPixels,
    *,
    ahead: int = 1,
) -> Iterator[tuple[MicroBatch, LoadPixels]]:
    """Yield each micro-batch with a function that returns its pixels; a thread loads the `ahead` next ones meanwhile.

    Images whose features are known need no pixels.
    """

    def load(micro_batch: MicroBatch) -> LoadPixels:
        images = {image.key: image for image in micro_batch.images if image.key not in vlm.frozen_features}
        pixels = load_all_pixels(images.values())
        return lambda image: pixels[image.key]

    with ThreadPoolExecutor(1, thread_name_prefix="saccade-pixels") as pool:
        loading = deque(pool.submit(load, micro_batch) for micro_batch in micro_batches[:ahead])
        for index, micro_batch in enumerate(micro_batches):
            loading.extend(pool.submit(load, later) for later in micro_batches[index + ahead : index + ahead + 1])
            yield micro_batch, loading.popleft().result()


def train_step(
    vlm: VisionLanguageModel,
    optimizer: Optimizer | ShardedOptimizer,
    micro_batches: Sequence[MicroBatch],
    loss_fn: LossFn,
    *,
    load_all_pixels: LoadAllPixels,
    temperature: float = 1.0,
    entropy_coef: float = 0.0,
    check_cancelled: CheckCancelled = lambda: None,
    on_results: "OnResults" = lambda micro_batches, results: None,
) -> StepReport:
    """Accumulate gradients over the micro-batches, whose losses add up, then take one optimizer step.

    `entropy_coef` is the coefficient of the entropy bonus: that times the entropies, weighted like the tokens' losses
    (`MicroBatch.weight_N`), is subtracted from the loss.
    If the weights are sharded among processes, `loss_fn` must be picklable, and each micro-batch is run by one of them.
    `check_cancelled` is called for each micro-batch. If one doesn't fit in memory, all gradients are discarded, it and
    those of its size are split, and all start again; later steps split them at once. `on_results` receives the
    micro-batches with their results. Raises RunError for a single sample that doesn't fit, ValueError for an entropy
    bonus without the weights of tokens.
    """
    if entropy_coef > 0 and any(micro_batch.weight_N is None for micro_batch in micro_batches):
        raise ValueError(f"entropy_coef={entropy_coef} needs the weights of tokens; weight_N of a micro-batch is None")

    def compute_loss(micro_batch: MicroBatch, logp_N: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
        check_cancelled()
        return loss_fn(micro_batch, logp_N)

    def accumulate() -> tuple[list[MicroBatch], list[MicroBatchResult]]:
        parts = [
            part for micro_batch in micro_batches for part, _ in split_to_fit(micro_batch, vlm.max_micro_batch_tokens)
        ]
        if isinstance(vlm, ShardedVisionLanguageModel):
            return parts, vlm.accumulate_gradients(
                parts,
                loss_fn,
                load_all_pixels=load_all_pixels,
                temperature=temperature,
                entropy_coef=entropy_coef,
                check_cancelled=check_cancelled,
            )
        vlm.model.train()
        return parts, accumulate_gradients(
            vlm,
            parts,
            compute_loss,
            load_all_pixels=load_all_pixels,
            temperature=temperature,
            entropy_coef=entropy_coef,
        )

    micro_batches, results = run_within_memory(vlm, accumulate)
    vlm.model.eval()
    require_finite_losses(micro_batches, results, optimizer.current_step)
    grad_norm = optimizer.step()
    on_results(micro_batches, results)
    trained_tokens = sum(len(micro_batch.token_N) for micro_batch in micro_batches)
    return StepReport(
        loss=sum(result.loss for result in results),
        entropy=sum(result.entropy for result in results) / max(trained_tokens, 1),
        grad_norm=grad_norm,
        packed_tokens=sum(int((micro_batch.tree_BT >= 0).sum()) for micro_batch in micro_batches),
        trained_tokens=trained_tokens,
        stats=merge_stats([result.stats for result in results]),
    )


class MemoryExceededError(SaccadeError):
    """A micro-batch of `num_tokens` tokens, with padding, doesn't fit in memory."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__(f"a micro-batch of {num_tokens} tokens doesn't fit in memory", value=num_tokens)
        self.num_tokens = num_tokens


@contextlib.contextmanager
def detect_full_memory(micro_batch: MicroBatch) -> Iterator[None]:
    """Convert an error for lack of memory, of the device or of this machine, into MemoryExceededError."""
    try:
        yield
    except (MemoryError, RuntimeError, SaccadeError) as error:  # torch.OutOfMemoryError is a RuntimeError
        cause = error.__cause__ if isinstance(error, SaccadeError) else error  # of a plugin's failure
        is_full = isinstance(cause, MemoryError | torch.OutOfMemoryError) or (
            isinstance(cause, RuntimeError) and any(text in str(cause) for text in _MEMORY_ERRORS)
        )
        if not is_full:
            raise
        raise MemoryExceededError(micro_batch.ids_BT.size) from None


def run_within_memory(vlm: VisionLanguageModel, run: Callable[[], T]) -> T:
    """Return the result of `run`, which splits micro-batches by `vlm.max_micro_batch_tokens`.

    When one doesn't fit in memory, lower that bound, discard all gradients, and run again.
    """
    while True:
        try:
            return run()
        except MemoryExceededError as error:
            num_tokens = error.num_tokens
        # Outside of the except block, whose exception holds the tensors of the failed pass.
        vlm.max_micro_batch_tokens = num_tokens - 1
        vlm.model.zero_grad(set_to_none=True)
        gc.collect()
        if vlm.device.type == "cuda":
            torch.cuda.empty_cache()
        _logger.warning(
            "A micro-batch of %d tokens doesn't fit in memory: those as large are split from now on. Lower "
            "micro_batch_size or pack_length (of rl or sft) to save the lost time",
            num_tokens,
        )


def read_token_limit(folder: Path) -> int:
    """Return the tokens of a micro-batch that fitted in an earlier start of a run. Raises DataError."""
    path = folder / LIMIT_FILE
    if not path.exists():
        return sys.maxsize
    return read_json(path, dict[str, int], hint="delete it to try micro-batches of any size again")[_LIMIT_KEY]


def write_token_limit(folder: Path, max_tokens: int) -> None:
    """Store the tokens of a micro-batch that fit, for `read_token_limit`, if any didn't. Raises RunError."""
    if max_tokens < sys.maxsize:
        write_text(folder / LIMIT_FILE, json.dumps({_LIMIT_KEY: max_tokens}) + "\n")


def split_to_fit(micro_batch: MicroBatch, max_tokens: int) -> list[tuple[MicroBatch, np.ndarray]]:
    """Split a micro-batch until no part has more than `max_tokens` tokens with padding.

    Return each part with the indices [n] of its trained tokens in the whole. Raises RunError for a single sample that
    has more.
    """
    num_tokens = micro_batch.ids_BT.size
    if num_tokens <= max_tokens:
        return [(micro_batch, np.arange(len(micro_batch.token_N)))]
    halves = split_micro_batch(micro_batch)
    if not halves:
        raise RunError(
            f"a sample of {num_tokens} tokens doesn't fit in memory, even alone in its micro-batch; set "
            "model.activation_checkpointing=true, lower environment.settings.max_context_tokens or frame_budgets, or "
            "train in more processes (--nproc)",
            key="environment.settings.max_context_tokens",
            value=num_tokens,
        )
    return [
        (part, np.flatnonzero(is_half_N)[index_N])
        for half, is_half_N in halves
        for part, index_N in split_to_fit(half, max_tokens)
    ]


class MicroBatchResult(NamedTuple):
    """What the forward pass of a micro-batch of N trained tokens computed."""

    loss: float
    entropy: float  # sum over the tokens, nats
    stats: Mapping[str, Tensor]  # of the loss function
    logp_N: np.ndarray  # logprobs
    entropy_N: np.ndarray  # entropies, nats


OnResults = Callable[[Sequence[MicroBatch], Sequence[MicroBatchResult]], None]


def require_finite_losses(micro_batches: Sequence[MicroBatch], results: Sequence[MicroBatchResult], step: int) -> None:
    """Raise RunError if the loss of a micro-batch of step `step` (from 1) isn't finite; name its first bad tensor."""
    for index, (micro_batch, result) in enumerate(zip(micro_batches, results, strict=True)):
        if not math.isfinite(result.loss):
            arrays = {key.name: getattr(micro_batch, key.name) for key in fields(micro_batch)}
            name = checkpoint_io.find_nonfinite(
                {name: torch.from_numpy(value) for name, value in arrays.items() if isinstance(value, np.ndarray)}
            ) or ("" if math.isfinite(result.entropy) else "the logits")
            reason = f"{name} hold NaN or an infinity" if name else "its inputs are finite"
            raise RunError(
                f"step {step}: the loss of micro-batch {index + 1} of {len(micro_batches)} is {result.loss} "
                f"({reason}); no weight was changed; start again with a lower learning rate or another loss",
                key="loss",
                value=result.loss,
            )


def accumulate_gradients(
    vlm: VisionLanguageModel,
    micro_batches: Sequence[MicroBatch],
    loss_fn: LossFn,
    *,
    load_all_pixels: LoadAllPixels,
    temperature: float,
    entropy_coef: float = 0.0,
) -> list[MicroBatchResult]:
    """Add up the gradients of micro-batches in this process; return each one's result.

    `entropy_coef` times the entropies, weighted as the tokens' losses are, is subtracted from the loss of `loss_fn`.
    Raises MemoryExceededError if one doesn't fit in memory; the gradients are then useless.
    """

    def compute_loss(micro_batch: MicroBatch, load_pixels: LoadPixels) -> tuple[Tensor, MicroBatchResult]:
        logp_N, entropy_N = forward(
            vlm,
            micro_batch,
            load_pixels=load_pixels,
            temperature=temperature,
            has_entropy_gradient=entropy_coef > 0,
        )
        loss, stats = loss_fn(micro_batch, logp_N)
        if entropy_coef > 0:
            assert micro_batch.weight_N is not None
            weight_N = torch.from_numpy(micro_batch.weight_N).to(entropy_N.device)
            loss = loss - entropy_coef * (weight_N * entropy_N).sum()
        entropy_N = entropy_N.detach()
        return loss, MicroBatchResult(
            loss=float(loss.detach()),
            entropy=float(entropy_N.sum()),
            stats=stats,
            logp_N=logp_N.detach().float().cpu().numpy(),
            entropy_N=entropy_N.float().cpu().numpy(),
        )

    if vlm.num_parallel_micro_batches > 1 and len(micro_batches) > 1:
        return _run_in_parallel(vlm, micro_batches, compute_loss, load_all_pixels)
    results = []
    for micro_batch, load_pixels in load_ahead(vlm, micro_batches, load_all_pixels):
        with detect_full_memory(micro_batch):
            loss, result = compute_loss(micro_batch, load_pixels)
            torch.autograd.backward(loss)
        results.append(result)
    return results


def _run_in_parallel(
    vlm: VisionLanguageModel,
    micro_batches: Sequence[MicroBatch],
    compute_loss: Callable[[MicroBatch, LoadPixels], tuple[Tensor, MicroBatchResult]],
    load_all_pixels: LoadAllPixels,
) -> list[MicroBatchResult]:
    """Run one thread per micro-batch (several per operation scale worse); gradients are added in order."""
    num_threads, parameters = vlm.num_parallel_micro_batches, vlm.trainable_parameters

    def compute_gradients(loaded: tuple[MicroBatch, LoadPixels]) -> tuple[MicroBatchResult, tuple[Tensor | None, ...]]:
        micro_batch, load_pixels = loaded
        with detect_full_memory(micro_batch), torch.enable_grad():  # gradient mode is set per thread
            loss, result = compute_loss(micro_batch, load_pixels)
            gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        return result, gradients

    results: list[MicroBatchResult] = []
    with limit_threads(1), ThreadPoolExecutor(num_threads, thread_name_prefix="saccade-batch") as pool:
        loaded = load_ahead(vlm, micro_batches, load_all_pixels, ahead=num_threads)
        # Bounds memory: at most one set of gradients per thread.
        while group := list(itertools.islice(loaded, num_threads)):
            # Not in the threads, or time would decide which pass has an image.
            for micro_batch, load_pixels in group:
                vlm.cache_frozen_features({image.key: image for image in micro_batch.images}.values(), load_pixels)
            for result, gradients in pool.map(compute_gradients, group):
                results.append(result)
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    if gradient is not None:
                        parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
    return results
