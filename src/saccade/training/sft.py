"""Supervised fine-tuning on demonstrations: both roles, packed, with loss masks from the ledger.

    demonstrations ──draw──> replay in the environment ──> samples ──> pack ──> forward, backward, optimizer step

A step's samples depend only on the seed and the step's number (and, with `auxiliary_warmup`, on the number of steps),
or, with `order: shuffled_epochs`, on the seed and the number of units drawn before, which a checkpoint holds. So a
resumed run equals an uninterrupted one.
"""

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from saccade.config.schema import SftConfig
from saccade.environments.task_environments import TaskEnvironments
from saccade.errors import DataError
from saccade.media.cache import LRUCache
from saccade.protocols import Context
from saccade.rollouts.components import TrainingComponents, apply_sft_settings
from saccade.training import checkpoint
from saccade.training.alarms import AlarmMonitor
from saccade.training.background import CheckCancelled, run_in_thread
from saccade.training.checkpoint_writer import CheckpointWriter, FinishedStep, save_on_stop
from saccade.training.demonstrations import (
    DemonstrationReport,
    check_demonstrations,
    replay_demonstration,
)
from saccade.training.distributed.vlm import ShardedOptimizer, create_optimizer
from saccade.training.optimizer import Optimizer, compute_learning_rate
from saccade.training.packing import MicroBatch, build_prefix_trees
from saccade.training.step_timer import compute_update_speed
from saccade.training.step_trace import StepTrace
from saccade.training.train_step import StepReport, pack_samples, train_step
from saccade.training.validation import ValidationSchedule
from saccade.types import Demonstration, TrainingSample
from saccade.utils.hashing import derive_seed

LogStep = Callable[[Mapping[str, float]], None]
MAX_EMPTY_DRAWS = 1000  # in a row
_MAX_CACHE_BYTES, _BYTES_PER_TOKEN = 2**28, 100  # of samples in memory

# The samples of demonstrations that were replayed before, by the demonstration's id: it outlives the cache.
ReplayCache = LRUCache[int, tuple[TrainingSample, ...]]


async def train(
    components: TrainingComponents,
    demonstrations: Sequence[Demonstration],
    *,
    folder: Path,
    log_step: LogStep,
    validation: ValidationSchedule | None = None,
    alarms: AlarmMonitor | None = None,
    trace: StepTrace | None = None,
    on_check: Callable[[DemonstrationReport], None] = lambda report: None,
) -> None:
    """Train `components.vlm` in place for the recipe's steps; write checkpoints below `folder`.

    `validation`, `alarms` and `trace` observe the training without changing a number of it. Resumes from the newest
    checkpoint there (the components must have been loaded from it). `on_check` receives the counts of demonstrations
    that can and can't be replayed completely. Raises DataError without demonstrations, and for one that can't be
    replayed unless `sft.on_bad_demonstration` is skip; AlarmError if an alarm stops the training.
    """
    settings = components.recipe.sft
    validation, alarms = validation or ValidationSchedule(), alarms or AlarmMonitor()
    if not demonstrations:
        path = components.recipe.data.demonstrations
        raise DataError(
            f"data.demonstrations={path} holds no demonstrations, and SFT needs at least one; "
            "generate a synthetic dataset (saccade data synth) or set another file",
            key="data.demonstrations",
            value=path,
        )
    environments = TaskEnvironments.from_recipe(apply_sft_settings(components.recipe))
    components = replace(components, environments=environments)
    demonstrations = await select_demonstrations(components, demonstrations, on_check)
    optimizer = create_optimizer(components.vlm, settings.optim, settings.steps)
    last = checkpoint.find_newest_checkpoint(folder)
    state = last.restore(optimizer) if last is not None else {}
    first_step = last.step if last else 0
    progress = Progress(num_finished_steps=first_step, position=int(state.get("next_position", 0)))
    writer = CheckpointWriter(
        folder=folder,
        vlm=components.vlm,
        optimizer=optimizer,
        retention=settings.checkpoints,
        get_scores=validation.get_scores,
    )

    def find_unsaved() -> FinishedStep | None:
        return progress.to_finished_step() if optimizer.num_updates == progress.num_updates else None

    prefix_groups = group_by_prefix(demonstrations)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(writer.close)
        stack.push_async_callback(validation.cancel)
        await start_validation(components, validation, first_step)
        batches = await stack.enter_async_context(
            contextlib.aclosing(iterate_batches(components, prefix_groups, first_step, progress.position))
        )
        await stack.enter_async_context(save_on_stop(writer, find_unsaved))
        draw_start = time.perf_counter()
        async for step, samples, next_position in batches:
            train_start = time.perf_counter()
            writer.check()
            optimizer.start_step(step)
            with trace.record(step + 1) if trace else contextlib.nullcontext():
                update = partial(update_model, components, samples, settings, optimizer)
                report = await run_in_thread(update, "the update")
            train_end = time.perf_counter()
            row = {
                "step": step + 1,
                **report.as_metrics(),
                "lr": compute_learning_rate(settings.optim, step, settings.steps),
                "packed_tokens_per_second": report.packed_tokens / (train_end - draw_start),
                "seconds/draw": train_start - draw_start,
                "seconds/train": train_end - train_start,
                **compute_update_speed(components.vlm, report, 1, train_end - train_start),
            }
            row |= alarms.check(step + 1, row)
            is_due = validation.is_due(step + 1)
            is_saving = checkpoint.should_save(step + 1, settings, is_validated=is_due)
            if is_saving:  # as in `rl.train`
                await writer.finish()
            log_step(row)
            progress.advance(step + 1, next_position, optimizer.num_updates)
            # Before the validation, which may take long, and during which a kill would lose the steps before it;
            # but after earlier ones, whose checkpoints can't be compared before.
            if is_saving:
                await validation.finish()
                await writer.save(progress.to_finished_step())
            await start_validation(components, validation, step + 1)
            if is_due:
                await writer.prune()
            alarms.raise_stop()
            draw_start = time.perf_counter()
        await validation.finish()
        await writer.prune()
        alarms.raise_stop()


@dataclass(slots=True, kw_only=True)
class Progress:
    """The steps that have finished, the position after them, and the optimizer's updates until then."""

    num_finished_steps: int
    position: int
    num_updates: int = 0

    def advance(self, num_finished_steps: int, position: int, num_updates: int) -> None:
        """Record that a step has finished."""
        self.num_finished_steps, self.position, self.num_updates = num_finished_steps, position, num_updates

    def to_finished_step(self) -> FinishedStep:
        """Return what a checkpoint of the last finished step holds."""
        return FinishedStep(step=self.num_finished_steps, trainer_state={"next_position": self.position})


async def start_validation(components: TrainingComponents, validation: ValidationSchedule, step: int) -> None:
    """Sync the weights of `step` to the engine and validate them, if that is due."""
    if validation.is_due(step) and step not in validation.results:
        await validation.finish()
        await components.engine.sync_weights(components.vlm, step)
        await validation.start(step, components.engine, components.vlm)


async def select_demonstrations(
    components: TrainingComponents,
    demonstrations: Sequence[Demonstration],
    on_check: Callable[[DemonstrationReport], None],
) -> list[Demonstration]:
    """Return the demonstrations that can be replayed completely.

    Raises DataError for others if `sft.on_bad_demonstration` is refuse, and if there are no others.
    """
    recipe, num_rows = components.recipe, len(demonstrations)
    num_checked = min(recipe.sft.num_checked or num_rows, num_rows)
    rows = [index * num_rows // num_checked + 1 for index in range(num_checked)]
    report = await check_demonstrations(
        {row: demonstrations[row - 1] for row in rows},
        components.environments,
        components.build_context(seed=recipe.seed),
        accept_recorded_errors=recipe.sft.accept_recorded_errors,
    )
    on_check(report)
    reasons = report.reasons_by_row
    if reasons and (recipe.sft.on_bad_demonstration == "refuse" or len(reasons) == num_checked):
        raise DataError(
            f"{recipe.data.demonstrations}: {report.summary}; correct or remove them, or leave them out with "
            "sft.on_bad_demonstration=skip",
            key="sft.on_bad_demonstration",
            value=recipe.sft.on_bad_demonstration,
        )
    return [demonstration for row, demonstration in enumerate(demonstrations, start=1) if row not in reasons]


PrefixGroups = Mapping[tuple[object, ...], Sequence[Demonstration]]


def group_by_prefix(demonstrations: Sequence[Demonstration]) -> PrefixGroups:
    """Return the prefix groups: demonstrations with the same media and frame budget, whose prompts share a prefix."""
    prefix_groups: dict[tuple[object, ...], list[Demonstration]] = {}
    for demonstration in demonstrations:
        key = (demonstration.task.media, demonstration.frame_budget, demonstration.is_auxiliary)
        prefix_groups.setdefault(key, []).append(demonstration)
    return prefix_groups


async def iterate_batches(
    components: TrainingComponents,
    prefix_groups: PrefixGroups,
    first_step: int,
    first_position: int = 0,
) -> AsyncGenerator[tuple[int, list[TrainingSample], int], None]:
    """Yield each step's number (from 0), its samples, and the position after them in the order of shuffled epochs.

    The next samples are drawn while the current ones are trained. The position stays 0 with `order: with_replacement`.
    """
    settings, cache = components.recipe.sft, ReplayCache(_MAX_CACHE_BYTES)

    async def draw(step: int, position: int) -> tuple[list[TrainingSample], int]:
        if settings.order == "shuffled_epochs":
            return await draw_in_epochs(components, prefix_groups, settings, position, cache)
        is_warmup, seed = step < round(settings.auxiliary_warmup * settings.steps), components.recipe.seed
        fraction = 1.0 if is_warmup else settings.auxiliary_fraction
        seed = derive_seed(seed, "sft", step)
        samples = await draw_samples(
            components, prefix_groups, settings, seed, auxiliary_fraction=fraction, cache=cache
        )
        return samples, 0

    next_draw = asyncio.create_task(draw(first_step, first_position))
    try:
        for step in range(first_step, settings.steps):
            samples, position = await next_draw
            if step + 1 < settings.steps:
                next_draw = asyncio.create_task(draw(step + 1, position))
            yield step, samples, position
    finally:
        next_draw.cancel()


async def draw_in_epochs(
    components: TrainingComponents,
    prefix_groups: PrefixGroups,
    settings: SftConfig,
    position: int,
    cache: ReplayCache | None = None,
) -> tuple[list[TrainingSample], int]:
    """Return the samples of one step from `position` on, and the position after them.

    A position counts units of up to `settings.demonstrations_per_prefix` demonstrations of one prefix group, which are
    packed together. Every epoch holds each demonstration once, in units and an order of its own.
    """
    seed, samples, num_tokens, num_empty_draws = components.recipe.seed, list[TrainingSample](), 0, 0
    rollout_context = components.build_context(seed=seed)
    epoch, units = -1, list[Sequence[Demonstration]]()
    while num_tokens < settings.tokens_per_step:
        if not units or position // len(units) != epoch:
            num_units = count_units(prefix_groups, settings.demonstrations_per_prefix)
            epoch = position // num_units
            units = shuffle_units(prefix_groups, settings.demonstrations_per_prefix, seed=seed, epoch=epoch)
        new_samples = await _replay(components, units[position % len(units)], rollout_context, cache)
        num_empty_draws = 0 if new_samples else num_empty_draws + 1
        require_samples(num_empty_draws)
        num_tokens += sum(tree.num_tokens for tree in build_prefix_trees(new_samples, settings.pack_length))
        samples += new_samples
        position += 1
    return samples, position


def count_units(prefix_groups: PrefixGroups, unit_size: int) -> int:
    """Return the number of units of an epoch."""
    return sum(-(-len(group) // unit_size) for group in prefix_groups.values())


def shuffle_units(
    prefix_groups: PrefixGroups, unit_size: int, *, seed: int, epoch: int
) -> list[Sequence[Demonstration]]:
    """Return the units of an epoch: each prefix group's shuffled demonstrations, `unit_size` at a time, shuffled."""
    rng = random.Random(derive_seed(seed, "sft epoch", epoch))
    units: list[Sequence[Demonstration]] = []
    for group in prefix_groups.values():
        shuffled = rng.sample(group, len(group))
        units += [shuffled[start : start + unit_size] for start in range(0, len(shuffled), unit_size)]
    rng.shuffle(units)
    return units


async def draw_samples(
    components: TrainingComponents,
    prefix_groups: PrefixGroups,
    settings: SftConfig,
    seed: int,
    *,
    auxiliary_fraction: float,
    cache: ReplayCache | None = None,
) -> list[TrainingSample]:
    """Draw random prefix groups, up to `settings.demonstrations_per_prefix` of each, for one step's tokens.

    A fraction `auxiliary_fraction` of the prefix groups is auxiliary, if there are any. Tokens are counted as packed: a
    shared prefix counts once.
    """
    rng, rollout_context = random.Random(seed), components.build_context(seed=seed)
    main = [key for key, group in prefix_groups.items() if not group[0].is_auxiliary]
    auxiliary = [key for key, group in prefix_groups.items() if group[0].is_auxiliary]
    samples, num_tokens, num_empty_draws = list[TrainingSample](), 0, 0
    while num_tokens < settings.tokens_per_step:
        is_auxiliary = not main or (auxiliary and rng.random() < auxiliary_fraction)
        group = prefix_groups[rng.choice(auxiliary if is_auxiliary else main)]
        chosen = rng.sample(group, min(len(group), settings.demonstrations_per_prefix))
        new_samples = await _replay(components, chosen, rollout_context, cache)
        num_empty_draws = 0 if new_samples else num_empty_draws + 1
        require_samples(num_empty_draws)
        num_tokens += sum(tree.num_tokens for tree in build_prefix_trees(new_samples, settings.pack_length))
        samples += new_samples
    return samples


async def _replay(
    components: TrainingComponents,
    demonstrations: Sequence[Demonstration],
    ctx: Context,
    cache: ReplayCache | None = None,
) -> list[TrainingSample]:
    """Return the samples of demonstrations; those that can't be learned are left out if the recipe skips them.

    With a `cache` a demonstration that shows its task's own media alone is replayed once.
    """
    settings, samples = components.recipe.sft, list[TrainingSample]()
    for demonstration in demonstrations:
        if cache and (cached := cache.get(id(demonstration))):
            samples += cached
            continue
        try:
            replayed = await replay_demonstration(
                demonstration,
                components.environments(demonstration.task),
                ctx,
                accept_recorded_errors=settings.accept_recorded_errors,
            )
        except DataError:  # the check before the first step decodes no frame and runs no code
            if settings.on_bad_demonstration == "refuse":
                raise
            continue
        files = {media.path for media in demonstration.task.media}
        # Images that tools make are files that may have been deleted later.
        if cache and all(image.path in files for sample in replayed for image in sample.ledger.images()):
            num_tokens = sum(len(sample.ledger) for sample in replayed)
            cache.put(id(demonstration), tuple(replayed), num_tokens * _BYTES_PER_TOKEN)
        samples += replayed
    return samples


def require_samples(num_empty_draws: int) -> None:
    """Raise DataError after MAX_EMPTY_DRAWS draws in a row without a sample."""
    if num_empty_draws > MAX_EMPTY_DRAWS:
        raise DataError(
            f"{num_empty_draws} draws in a row had no demonstration that can be learned; "
            "find the reasons with `saccade data check`",
            key="sft.on_bad_demonstration",
            value="skip",
        )


def update_model(
    components: TrainingComponents,
    samples: Sequence[TrainingSample],
    settings: SftConfig,
    optimizer: Optimizer | ShardedOptimizer,
    check_cancelled: CheckCancelled = lambda: None,
) -> StepReport:
    """Take one optimizer step on the mean negative log-likelihood of all trained tokens.

    `check_cancelled` is called before each micro-batch.
    """
    batches = pack_samples(components.vlm, samples, settings)
    loss_fn = MeanNegativeLogLikelihood(num_tokens=sum(len(batch.token_N) for batch in batches))
    with torch.enable_grad(), components.vlm.share_features():
        return train_step(
            components.vlm,
            optimizer,
            batches,
            loss_fn,
            load_all_pixels=components.media.load_all_pixels,
            check_cancelled=check_cancelled,
        )


@dataclass(frozen=True, slots=True)
class MeanNegativeLogLikelihood:
    """The part of a micro-batch in the mean over `num_tokens` trained tokens."""

    num_tokens: int  # of all micro-batches

    def __call__(self, _: MicroBatch, logp_N: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the loss, and the number of tokens."""
        return -logp_N.sum() / self.num_tokens, {"tokens": torch.tensor(float(len(logp_N)))}
