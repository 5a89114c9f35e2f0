"""Supervised fine-tuning on demonstrations: both roles, packed, with loss masks from the ledger.

    demonstrations ──draw──> replay in the environment ──> samples ──> pack ──> forward, backward, optimizer step

A step's samples depend only on the seed and the step's number (and, with `auxiliary_warmup`, on the number of steps),
so a resumed run equals an uninterrupted one.
"""

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from saccade.config.schema import SftConfig
from saccade.errors import DataError
from saccade.rollouts.components import TrainingComponents
from saccade.training import checkpoint
from saccade.training.demonstrations import replay_demonstration
from saccade.training.optimizer import Optimizer, compute_learning_rate
from saccade.training.packing import Batch, build_prefix_trees
from saccade.training.train_step import StepReport, pack_samples, train_step
from saccade.types import Demonstration, TrainingSample
from saccade.utils.hashing import derive_seed

LogStep = Callable[[Mapping[str, float]], None]


async def train(
    components: TrainingComponents, demonstrations: Sequence[Demonstration], *, folder: Path, log_step: LogStep
) -> None:
    """Train `components.backbone` in place for the recipe's steps; write checkpoints below `folder`.

    Resumes from the newest checkpoint there (the components must have been loaded from it). Raises DataError without
    demonstrations.
    """
    settings = components.recipe.sft
    if not demonstrations:
        path = components.recipe.data.demonstrations
        raise DataError(
            f"data.demonstrations={path} holds no demonstrations, and SFT needs at least one; "
            "generate a synthetic dataset (saccade data synth) or set another file",
            key="data.demonstrations",
            value=path,
        )
    optimizer = Optimizer(components.backbone.model, settings.optim, settings.steps)
    last = checkpoint.find_newest_checkpoint(folder)
    if last is not None:
        last.restore(optimizer)
    first_step, draw_start = last.step if last else 0, time.perf_counter()
    by_context = group_by_context(demonstrations)
    async with contextlib.aclosing(iterate_batches(components, by_context, first_step)) as batches:
        async for step, samples in batches:
            train_start = time.perf_counter()
            optimizer.start_step(step)
            report = await asyncio.to_thread(update_model, components, samples, settings, optimizer)
            train_end = time.perf_counter()
            log_step(
                {
                    "step": step + 1,
                    **report.as_metrics(),
                    "lr": compute_learning_rate(settings.optim, step, settings.steps),
                    "tokens_per_second": report.packed_tokens / (train_end - draw_start),
                    "seconds/draw": train_start - draw_start,
                    "seconds/train": train_end - train_start,
                }
            )
            if (step + 1) % settings.save_every == 0 or step + 1 == settings.steps:
                checkpoint.save_checkpoint(
                    folder, step=step + 1, backbone=components.backbone, optimizer=optimizer, trainer_state={}
                )
            draw_start = time.perf_counter()


DemonstrationsByContext = Mapping[tuple[object, ...], Sequence[Demonstration]]


def group_by_context(demonstrations: Sequence[Demonstration]) -> DemonstrationsByContext:
    """Group demonstrations by media and frame budget: those of one group share the tokens of their overview."""
    by_context: dict[tuple[object, ...], list[Demonstration]] = {}
    for demonstration in demonstrations:
        context = (demonstration.task.media, demonstration.frame_budget, demonstration.is_auxiliary)
        by_context.setdefault(context, []).append(demonstration)
    return by_context


async def iterate_batches(
    components: TrainingComponents, demonstrations_by_context: DemonstrationsByContext, first_step: int
) -> AsyncGenerator[tuple[int, list[TrainingSample]], None]:
    """Yield each step's number (from 0) and samples; the next samples are drawn while the current ones are trained."""
    settings = components.recipe.sft

    def start_drawing(step: int) -> "asyncio.Task[list[TrainingSample]]":
        is_warmup, seed = step < round(settings.auxiliary_warmup * settings.steps), components.recipe.seed
        fraction = 1.0 if is_warmup else settings.auxiliary_fraction
        seed = derive_seed(seed, "sft", step)
        return asyncio.create_task(
            draw_samples(components, demonstrations_by_context, settings, seed, auxiliary_fraction=fraction)
        )

    next_samples = start_drawing(first_step)
    try:
        for step in range(first_step, settings.steps):
            samples = await next_samples
            if step + 1 < settings.steps:
                next_samples = start_drawing(step + 1)
            yield step, samples
    finally:
        next_samples.cancel()


async def draw_samples(
    components: TrainingComponents,
    demonstrations_by_context: DemonstrationsByContext,
    settings: SftConfig,
    seed: int,
    *,
    auxiliary_fraction: float,
) -> list[TrainingSample]:
    """Draw random contexts, up to `settings.samples_per_context` demonstrations of each, for one step's tokens.

    A fraction `auxiliary_fraction` of the contexts is auxiliary, if there are any. Tokens are counted as packed: a
    shared prefix counts once.
    """
    rng, rollout_context = random.Random(seed), components.build_context(seed=seed)
    main = [key for key, group in demonstrations_by_context.items() if not group[0].is_auxiliary]
    auxiliary = [key for key, group in demonstrations_by_context.items() if group[0].is_auxiliary]
    samples, num_tokens = list[TrainingSample](), 0
    while num_tokens < settings.tokens_per_step:
        is_auxiliary = not main or (auxiliary and rng.random() < auxiliary_fraction)
        group = demonstrations_by_context[rng.choice(auxiliary if is_auxiliary else main)]
        new_samples: list[TrainingSample] = []
        for demonstration in rng.sample(group, min(len(group), settings.samples_per_context)):
            new_samples += await replay_demonstration(
                demonstration, components.environments(demonstration.task), rollout_context
            )
        num_tokens += sum(tree.num_tokens for tree in build_prefix_trees(new_samples, settings.pack_length))
        samples += new_samples
    return samples


def update_model(
    components: TrainingComponents, samples: Sequence[TrainingSample], settings: SftConfig, optimizer: Optimizer
) -> StepReport:
    """Take one optimizer step on the mean negative log-likelihood of all trained tokens."""
    batches = pack_samples(components.backbone, samples, settings)
    count = sum(len(batch.token_N) for batch in batches)

    def compute_loss(_: Batch, logp_N: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
        return -logp_N.sum() / count, {"tokens": torch.tensor(float(len(logp_N)))}

    with torch.enable_grad():
        return train_step(
            components.backbone, optimizer, batches, compute_loss, load_pixels=components.media.load_pixels
        )
