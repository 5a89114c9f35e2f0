"""Reinforcement learning: the training loop.

    prompts ──> rollout batch: collect, select ──> advantages ──samples──> policy update ──> weight sync ──> log line
                      ▲   engine.generate                                                         │
                      └──────────────────────── the next weight version ──────────────────────────┘

By default the loop is synchronous: the trainer waits for the rollouts, the rollouts wait for the engine. With
`rl.max_staleness: N` rollouts continue while a second thread runs the policy update, at most N weight versions ahead
(see `group_scheduler.py`). Episodes in progress during a weight sync continue (`rl.episodes_on_sync: continue`),
each token with the version that sampled it, or start over (`restart`), which discards their tokens. With
`rl.simulated_staleness: N` batches are delayed by N versions, to study the effect of staleness; the first N + 1 batches
are then sampled by version 0:

    version    0        1   2   3
    collects   0 1 2    3   4   5      batches of steps 0, 1, 2 ..., with N = 2
    trains on  0        1   2   3

A step depends only on the seed, its number, the weights and the checkpoint (`TrainerState`), so a resumed run equals an
uninterrupted one. The exceptions are `max_staleness` and `over_provision`, where the training data depend on timing.
"""

import contextlib
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from saccade.algorithms.group_advantages import compute_frac_correct_with_negative_advantage, compute_group_advantages
from saccade.algorithms.group_filter import filter_by_advantage
from saccade.errors import DataError
from saccade.media.relocation import map_media_paths
from saccade.rollouts.components import TrainingComponents
from saccade.rollouts.restart_on_sync import RestartOnSync
from saccade.rollouts.runner import run_episode
from saccade.training import checkpoint
from saccade.training.alarms import AlarmMonitor
from saccade.training.background import CheckCancelled, defer_interrupt, run_in_thread
from saccade.training.batch_collector import BatchCollector
from saccade.training.checkpoint import Checkpoint
from saccade.training.checkpoint_writer import CheckpointWriter, FinishedStep, save_on_stop
from saccade.training.distributed.vlm import (
    ShardedOptimizer,
    ShardedReference,
    ShardedVisionLanguageModel,
    create_optimizer,
)
from saccade.training.group_scheduler import GroupScheduler, PendingGroup
from saccade.training.optimizer import Optimizer, compute_learning_rate
from saccade.training.policy_update import OnTokens, update_policy
from saccade.training.prompt_sampler import PromptSampler
from saccade.training.reference import Reference, get_trainable_parameters, load_initial_weights
from saccade.training.rl_checks import check_algorithms, check_staleness
from saccade.training.rollout_batch import (
    OnGroups,
    OnRollouts,
    RolloutBatch,
    collect_batch,
    collect_group,
    compute_filter_metrics,
    take_prompts,
)
from saccade.training.step_timer import StepTimer, compute_update_speed
from saccade.training.step_trace import StepTrace
from saccade.training.token_log import TokenValues
from saccade.training.train_step import StepReport
from saccade.training.training_samples import build_samples, mask_stale_tokens
from saccade.training.validation import ValidationSchedule
from saccade.types import Task, TrainingSample
from saccade.utils.jsonl import read_jsonl, relativize_path, write_jsonl

LogStep = Callable[[Mapping[str, float]], None]
OnTrainedTokens = Callable[[int, Sequence[TokenValues]], Awaitable[None]]  # step from 1, values
PENDING_BATCHES, PENDING_GROUPS = "pending_batches.jsonl", "pending_groups.jsonl"  # files of a checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """The state of a run between two steps: what a checkpoint holds besides weights and optimizer."""

    num_finished_steps: int
    prompt_sampler: PromptSampler
    pending_batches: tuple[RolloutBatch, ...]  # collected but not yet trained on
    pending_groups: tuple[PendingGroup, ...] = ()  # of no batch yet
    initial_weights_folder: str  # the weights that RL started from


async def train(
    components: TrainingComponents,
    tasks: Sequence[Task],
    *,
    folder: Path,
    log_step: LogStep,
    on_groups: OnGroups | None = None,
    on_rollouts: OnRollouts | None = None,
    on_tokens: OnTrainedTokens | None = None,
    validation: ValidationSchedule | None = None,
    alarms: AlarmMonitor | None = None,
    trace: StepTrace | None = None,
) -> None:
    """Train `components.vlm` in place for the recipe's steps; write checkpoints below `folder`.

    `log_step` receives one row of metrics per step, `on_groups` every step's groups when they are collected,
    `on_rollouts` the records of all its episodes, and `on_tokens` what the update computed for each token.
    `validation`, `alarms` and `trace` observe the training without changing a number of it. A step that keeps no group
    makes no update: its `updates` is 0, and it has no loss. Resumes from the newest checkpoint in `folder` (the
    components must have been loaded from it). Raises DataError without tasks, EngineError if engine and trainer
    disagree about a token, RunError if groups are missing and `rl.selection.on_underfilled` is "stop", ConfigError if
    `rl.max_staleness` needs an engine with separate weights, AlarmError if an alarm stops the training.
    """
    validation, alarms = validation or ValidationSchedule(), alarms or AlarmMonitor()
    settings = components.recipe.rl
    if not tasks:
        files = components.recipe.data.train
        raise DataError(f"data.train={files} holds no tasks, and RL needs at least one", key="data.train", value=files)
    check_staleness(components.recipe, components.engine.has_separate_weights)
    check_algorithms(settings)
    optimizer = create_optimizer(components.vlm, settings.optim, settings.steps)
    state = load_trainer_state(components, checkpoint.find_newest_checkpoint(folder), optimizer)
    checkpoint.protect_checkpoint(Path(state.initial_weights_folder))
    reference = load_reference(components, state)
    # The weight version is the number of finished steps, including those without an update.
    await components.engine.sync_weights(components.vlm, state.num_finished_steps)
    timer = StepTimer(components.score_fn, is_overlapped=settings.max_staleness > 0)
    restart_on_sync = RestartOnSync()
    timed_components = replace(components, score_fn=timer.score_fn)
    collector = build_batch_collector(timed_components, tasks, state, on_groups, on_rollouts, restart_on_sync)
    writer = CheckpointWriter(
        folder=folder,
        vlm=components.vlm,
        optimizer=optimizer,
        retention=settings.checkpoints,
        get_scores=validation.get_scores,
    )
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(writer.close)
        stack.push_async_callback(validation.cancel)
        await validation.start(state.num_finished_steps, components.engine, components.vlm)
        stack.push_async_callback(collector.close)
        while state.num_finished_steps < settings.steps:
            step = state.num_finished_steps + 1
            writer.check()
            optimizer.start_step(state.num_finished_steps)
            num_tokens_before, token_values = collector.num_sampled_tokens, list[TokenValues]()
            timer.start_step()
            with trace.record(step) if trace else contextlib.nullcontext():
                async with save_state_on_stop(writer, state):
                    batch = await collector.collect()
                    timer.end_phase("rollout")
                    samples, metrics = build_training_samples(batch, components)
                    report = await run_policy_update(components, samples, optimizer, reference, token_values.extend)
                timer.end_phase("train")
                row = {
                    **{"step": step, **batch.metrics, **metrics},
                    "lr": compute_learning_rate(settings.optim, batch.step, settings.steps),
                    "updates": report.updates if report else 0,
                    **(report.as_metrics() if report else {}),
                }
                log_row = partial(log_step, row)
                async with save_state_on_stop(writer, state, batch_collector=collector, log_step=log_row):
                    if on_tokens:
                        await on_tokens(step, token_values)
                        timer.end_phase("token_log")
                    if validation.is_running:  # it samples from the weights that the sync replaces
                        await validation.finish()
                        timer.end_phase("validation_wait")
                    row |= await update_engine_weights(components, step, restart_on_sync)
            collector.set_version(step)  # before the checkpoint: groups start while it is written
            timer.end_phase("weight_sync")
            row |= restart_on_sync.pop_metrics()
            row |= timer.compute_metrics(components.vlm.device, collector.num_sampled_tokens - num_tokens_before)
            if pause_seconds := row.get("weight_sync/pause_seconds"):
                row["weight_sync/pause_share"] = pause_seconds / timer.step_seconds
            row |= compute_update_speed(components.vlm, report, settings.epochs_per_batch, timer.train_seconds)
            row |= alarms.check(step, row)
            state = advance_trainer_state(state, collector)
            is_saving = checkpoint.should_save(step, settings, is_validated=validation.is_due(step))
            if is_saving:  # no step that the metrics have is older than the last checkpoint's successor
                await writer.finish()
            log_step(row)
            # Before the validation, which may take long, and during which a kill would lose the steps before it.
            if is_saving:
                # The episodes in progress share the process with the copy, and a write without a copy.
                with components.clock.pause():
                    await writer.save(build_finished_step(folder, state))
            async with save_state_on_stop(writer, state):
                await validation.start(step, components.engine, components.vlm)
                if validation.is_due(step):
                    await writer.prune()
                alarms.raise_stop()
        await validation.finish()
        await writer.prune()
        alarms.raise_stop()


async def run_policy_update(
    components: TrainingComponents,
    samples: Sequence[TrainingSample],
    optimizer: Optimizer | ShardedOptimizer,
    reference: Reference | ShardedReference | None,
    on_tokens: OnTokens,
) -> StepReport | None:
    """Update the policy on the samples, if there are any; in a second thread if rollouts continue meanwhile."""
    if not samples:
        return None

    def update(check_cancelled: CheckCancelled) -> StepReport:
        return update_policy(
            components, samples, components.recipe.rl, optimizer, reference, check_cancelled, on_tokens
        )

    if components.recipe.rl.max_staleness:
        return await run_in_thread(update, "the policy update")
    # A validation on servers may run beside it, whose episodes make no progress while the event loop is blocked.
    with components.clock.pause(), defer_interrupt("the policy update"):
        return update(lambda: None)


async def update_engine_weights(
    components: TrainingComponents, version: int, restart_on_sync: RestartOnSync
) -> Mapping[str, float]:
    """Sync the trained weights to the engine; return metrics. The clock of the episodes in progress is paused."""
    should_restart = components.recipe.rl.episodes_on_sync == "restart"
    with components.clock.pause(), restart_on_sync.cancel_episodes() if should_restart else contextlib.nullcontext():
        return await components.engine.sync_weights(components.vlm, version) or {}


def build_batch_collector(
    components: TrainingComponents,
    tasks: Sequence[Task],
    state: TrainerState,
    on_groups: OnGroups | None,
    on_rollouts: OnRollouts | None,
    restart_on_sync: RestartOnSync,
) -> BatchCollector:
    """Build the collector of the batches of the remaining steps."""
    settings = components.recipe.rl
    run_fn = restart_on_sync.run_episode if settings.episodes_on_sync == "restart" else run_episode
    version, prompt_sampler, group_scheduler = state.num_finished_steps, state.prompt_sampler, None
    if settings.max_staleness:
        group_scheduler = GroupScheduler(
            partial(collect_group, components, tasks, run_fn=run_fn),
            partial(take_prompts, components.recipe, tasks),
            prompt_sampler,
            state.pending_groups,
            settings=settings,
            version=version,
            next_step=version + len(state.pending_batches),
        )
    return BatchCollector(
        partial(
            collect_batch,
            components,
            tasks,
            on_groups=on_groups,
            on_rollouts=on_rollouts,
            run_fn=run_fn,
            group_scheduler=group_scheduler,
        ),
        prompt_sampler,
        state.pending_batches,
        version=version,
        end_step=settings.steps,
        simulated_staleness=settings.simulated_staleness,
        max_tokens=settings.max_queued_tokens,
        group_scheduler=group_scheduler,
    )


def build_training_samples(
    batch: RolloutBatch, components: TrainingComponents
) -> tuple[list[TrainingSample], dict[str, float]]:
    """Return a batch's training samples, and metrics of their advantages."""
    settings, groups = components.recipe.rl, batch.groups
    advantages = compute_group_advantages(groups, settings.advantage)
    totals = [advantages_G.total_G for advantages_G in advantages]
    masks, reports = filter_by_advantage(groups, totals, settings.active_filters)
    metrics = {
        "frac_correct_with_negative_advantage": compute_frac_correct_with_negative_advantage(groups, totals),
        **compute_filter_metrics(reports),
    }
    decode = components.vlm.renderer.decode
    samples = build_samples(groups, advantages, settings.advantage.sub_agent_advantage, decode=decode, masks=masks)
    if settings.on_stale_group == "mask":
        samples, num_stale_tokens = mask_stale_tokens(samples, batch.step - settings.max_staleness)
        metrics["masked_stale_tokens"] = float(num_stale_tokens)
    return samples, metrics


def load_trainer_state(
    components: TrainingComponents, last_checkpoint: Checkpoint | None, optimizer: Optimizer | ShardedOptimizer
) -> TrainerState:
    """Return the state of a new run, or of its last checkpoint. Raises RunError if that can't be read."""
    if last_checkpoint is None:
        return TrainerState(
            num_finished_steps=0,
            prompt_sampler=PromptSampler(),
            pending_batches=(),
            initial_weights_folder=str(Path(components.recipe.model.path).resolve()),
        )
    folder = last_checkpoint.folder

    def resolve_path(file: str) -> str:
        return os.path.normpath(folder / file)

    saved = last_checkpoint.restore(optimizer)
    with checkpoint.convert_read_errors(folder):
        batches = read_jsonl(folder / PENDING_BATCHES, RolloutBatch)
        groups = read_jsonl(folder / PENDING_GROUPS, PendingGroup)
        # Relative to the stage's folder, so that a run may be moved as a whole; an absolute path stays as it is.
        initial_weights = (folder.parent / str(saved["initial_weights_folder"])).resolve()
        return TrainerState(
            num_finished_steps=last_checkpoint.step,
            prompt_sampler=PromptSampler.from_state(saved),
            pending_batches=tuple(map_media_paths(batch, resolve_path) for batch in batches),
            pending_groups=tuple(map_media_paths(group, resolve_path) for group in groups),
            initial_weights_folder=str(initial_weights),
        )


def advance_trainer_state(state: TrainerState, batch_collector: BatchCollector) -> TrainerState:
    """Return the state after one more finished step."""
    sampler, batches, groups = batch_collector.state
    step = state.num_finished_steps + 1
    return replace(
        state, num_finished_steps=step, prompt_sampler=sampler, pending_batches=batches, pending_groups=groups
    )


def build_finished_step(folder: Path, state: TrainerState) -> FinishedStep:
    """Return what a checkpoint below `folder` holds of a state."""
    run = folder.resolve().parent  # paths inside it are stored relative, so that the run can be moved
    initial_weights = relativize_path(folder.resolve(), state.initial_weights_folder, run)

    def write_pending(part_folder: Path) -> None:
        # The temporary folder is a sibling of the final one, so relative paths stay valid.
        relativize = partial(relativize_path, part_folder.resolve(), root=run)
        write_jsonl(
            part_folder / PENDING_BATCHES, [map_media_paths(batch, relativize) for batch in state.pending_batches]
        )
        write_jsonl(
            part_folder / PENDING_GROUPS, [map_media_paths(group, relativize) for group in state.pending_groups]
        )

    return FinishedStep(
        step=state.num_finished_steps,
        trainer_state={**asdict(state.prompt_sampler), "initial_weights_folder": initial_weights},
        write_extra_files=write_pending,
    )


def save_state_on_stop(
    writer: CheckpointWriter,
    state: TrainerState,
    *,
    batch_collector: BatchCollector | None = None,
    log_step: Callable[[], None] = lambda: None,
) -> contextlib.AbstractAsyncContextManager[None]:
    """Write a checkpoint if the block is stopped, as `save_on_stop` does.

    It holds `state`; or, with a `batch_collector`, the state after one more step, whose metrics `log_step` writes. A
    block that has begun to change the weights leaves neither.
    """
    num_updates = writer.optimizer.num_updates

    def find_unsaved() -> FinishedStep | None:
        if writer.optimizer.num_updates != num_updates:
            return None
        if not batch_collector:
            return build_finished_step(writer.folder, state)
        log_step()
        return build_finished_step(writer.folder, advance_trainer_state(state, batch_collector))

    return save_on_stop(writer, find_unsaved)


def load_reference(components: TrainingComponents, state: TrainerState) -> Reference | ShardedReference | None:
    """Return the reference policy if `rl.kl` needs one. Raises RunError if its weights can't be read."""
    settings = components.recipe.rl.kl
    if not (settings.loss_coef or settings.advantage_coef):
        return None
    if isinstance(components.vlm, ShardedVisionLanguageModel):
        folder = state.initial_weights_folder if state.num_finished_steps else None
        return components.vlm.create_reference(folder, settings.reference_device)
    initial_weights = (
        load_initial_weights(components.vlm, state.initial_weights_folder)
        if state.num_finished_steps
        else get_trainable_parameters(components.vlm)
    )
    return Reference(components.vlm, initial_weights, settings.reference_device)
