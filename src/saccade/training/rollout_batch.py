"""Collect the rollout batch of a step: sample groups in rounds until enough of them pass the filters.

    prompts ──take──> collect ──groups──> select ── enough? ──> RolloutBatch
       ▲                 ▲                   │ no: another round, at most `max_sampling_rounds`
       │                 └───────────────────┘
       └── with `surplus: requeue`, prompts of surplus and of cancelled groups

`max_video_share` limits the videos of a round, which is PyVision-RL's generation batch (arXiv 2602.20739): the next
prompts without a video take the place of further videos, which are surplus.

A surplus group is one beyond the target. Its episodes are discarded: in a later step they would be staler than that
step's other groups. With `surplus: requeue` its prompt is sampled again in a later step, which costs another rollout;
without, the prompt is not drawn again before its next epoch.

With `over_provision` above 1 a round starts more groups than it waits for and cancels the last ones, so that a step
doesn't wait for its slowest episode. This makes long episodes rarer in the training data. The finished episodes of a
cancelled group are discarded (`episodes/discarded`, their tokens are counted); its other episodes are cancelled
(`episodes/cancelled`), and their tokens are unknown.

Without a limit of rounds (`max_sampling_rounds: null`) a step ends with fewer groups once it has drawn each task about
once, or after a round in which every episode failed; a warning reports the groups that are missing after 4, 8, 16, ...
rounds.

With `rl.max_staleness` above 0 the groups of a round come from a `GroupScheduler`, where they may have started
during earlier steps.

`on_rollouts` receives a record of every episode that was started for the step, with what became of it and why.
"""

import logging
import math
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from saccade.algorithms.frame_budget import draw_frame_budget
from saccade.algorithms.group_advantages import needs_greedy_baseline
from saccade.algorithms.group_filter import FilterReport, SelectionResult, select_groups
from saccade.config.schema import MAX_EPISODES_IN_PROGRESS, Recipe, RlConfig
from saccade.data.mixture import Mixture
from saccade.errors import DataError, EngineError, RunError
from saccade.ledger import Ledger
from saccade.metrics.episode_metrics import compute_step_metrics, has_usable_episode
from saccade.rollouts.collect import collect
from saccade.rollouts.components import TrainingComponents
from saccade.rollouts.runner import RunEpisode, run_episode
from saccade.training.episode_log import Outcome, RolloutRecord
from saccade.training.group_scheduler import GroupScheduler
from saccade.training.prompt_sampler import PromptSampler
from saccade.types import Episode, EpisodeStatus, Group, MediaKind, Score, Task
from saccade.utils.hashing import derive_seed

OnGroups = Callable[[int, Sequence[Group]], None]
OnRollouts = Callable[[str, int, Sequence[RolloutRecord]], Awaitable[None]]  # stage, step from 1, records
_logger = logging.getLogger("saccade")
_FIRST_WARNED_ROUND = 4
CANCELLED_ERROR = "cancelled: enough other groups of the step had ended (rl.selection.over_provision)"
STALE_ERROR = "cancelled: too stale for the next step (rl.on_stale_group); the prompt is drawn again"


@dataclass(frozen=True, slots=True, weakref_slot=True, kw_only=True)
class RolloutBatch:
    """The groups that step `step` (from 0) trains on, and metrics of all groups collected for it."""

    step: int
    groups: tuple[Group, ...]
    num_sampled_tokens: int  # including those of groups that were not kept
    metrics: Mapping[str, float]


async def collect_batch(
    components: TrainingComponents,
    tasks: Sequence[Task],
    prompt_sampler: PromptSampler,
    step: int,
    *,
    on_groups: OnGroups | None = None,
    on_rollouts: OnRollouts | None = None,
    run_fn: RunEpisode = run_episode,
    group_scheduler: GroupScheduler | None = None,
) -> tuple[RolloutBatch, PromptSampler]:
    """Collect the batch of step `step` with `run_fn`; return it and the advanced prompt sampler.

    Each further round takes as many prompts as groups are missing, oversampled like the first. With a
    `group_scheduler`, which has a sampler of its own, it takes groups from there. `on_groups` receives all groups,
    `on_rollouts` all records. Raises DataError if `max_video_share` needs tasks without a video and there are none,
    EngineError if every episode of the step failed, or if none could be graded, and RunError if groups are missing and
    `rl.selection.on_underfilled` is "stop".
    """
    settings = components.recipe.rl
    progress = _Progress.start(tasks, prompt_sampler, settings)
    while progress.may_collect(settings):
        if group_scheduler is not None:
            num_required, _ = settings.selection.compute_start_counts(progress.selection.num_missing)
            progress.add_round(await group_scheduler.take(step, num_required), settings, step)
            continue
        prompt_indices, num_required = progress.take_prompts(components)
        groups_by_index: dict[int, Group] = {}
        await collect_groups(
            components,
            tasks,
            prompt_indices,
            step,
            earlier_indices=progress.groups_by_prompt,
            num_required=num_required,
            on_group_done=groups_by_index.__setitem__,
            on_discarded=progress.discarded.append,
            run_fn=run_fn,
        )
        ended = {
            prompt_index: groups_by_index[i] for i, prompt_index in enumerate(prompt_indices) if i in groups_by_index
        }
        progress.cancelled_indices += [prompt_index for prompt_index in prompt_indices if prompt_index not in ended]
        progress.add_round(ended, settings, step)
    if group_scheduler is not None:
        progress.cancelled_indices, progress.discarded = await group_scheduler.cancel_stale()
    groups, discarded = [*progress.groups_by_prompt.values()], progress.discarded
    if on_rollouts is not None:  # before a check fails, which the records may explain
        seed, mixture = components.recipe.seed, Mixture.from_tasks(tasks)
        records = build_records(
            step,
            groups,
            removed_by=progress.selection.removed_by,
            discarded=discarded,
            cancelled_tasks=[mixture.get_task(seed, prompt_index)[0] for prompt_index in progress.cancelled_indices],
            num_episodes=_count_episodes(settings),
            environment=components.recipe.environment.name,
            cancel_reason=STALE_ERROR if settings.streaming else CANCELLED_ERROR,
        )
        await on_rollouts("rl", step + 1, records)
    require_usable_episodes(groups, step)
    if on_groups is not None:
        on_groups(step, groups)
    selection = progress.selection
    if selection.num_missing and settings.selection.on_underfilled == "stop":
        raise RunError(
            f"step {step + 1} kept {len(selection.kept_groups)} of {settings.prompts_per_step} groups in "
            f"{progress.num_rounds} rounds. Raise rl.selection.oversample or rl.selection.max_sampling_rounds, or set "
            "rl.selection.on_underfilled=continue",
            key="rl.selection.on_underfilled",
            value="stop",
        )
    num_cancelled = len(progress.cancelled_indices)
    baselines = [group.greedy_baseline.score.total for group in groups if group.greedy_baseline]
    has_video_limit = settings.selection.max_video_share is not None
    num_surplus_videos = group_scheduler.num_surplus_videos if group_scheduler else len(progress.surplus_video_indices)
    metrics = {
        **compute_step_metrics(groups),
        **({"greedy_baseline_reward": fmean(baselines)} if baselines else {}),
        "groups/kept": float(len(selection.kept_groups)),
        "groups/missing": float(selection.num_missing),
        **compute_filter_metrics(selection.filter_reports),
        "groups/cancelled": float(num_cancelled),
        "episodes/cancelled": float(_count_episodes(settings) * num_cancelled - len(discarded)),
        "episodes/discarded": float(len(discarded)),
        "sampling_rounds": float(progress.num_rounds),
        **(components.executor.pop_metrics() if components.executor else {}),
        **(group_scheduler.metrics if group_scheduler is not None else {}),
        **({"prompts/surplus_videos": float(num_surplus_videos)} if has_video_limit else {}),
    }
    sampled = [*discarded, *(episode for group in groups for episode in group.all_episodes)]
    batch = RolloutBatch(
        step=step,
        groups=selection.kept_groups,
        num_sampled_tokens=sum(episode.usage.sampled_tokens for episode in sampled),
        metrics=metrics,
    )
    _pin_images(components, batch.groups, batch)
    requeued_indices = progress.list_surplus() if settings.selection.surplus == "requeue" else []
    if group_scheduler is not None:
        group_scheduler.complete_batch(requeued_indices)
    return batch, progress.prompt_sampler.requeue(requeued_indices)


def _pin_images(components: TrainingComponents, groups: Iterable[Group], owner: RolloutBatch | Group) -> None:
    """Keep the images of groups in memory until `owner` is dropped: after training on it, or without."""
    episodes = (scored.episode for group in groups for scored in group.scored_episodes)
    ledgers = (conversation.ledger for episode in episodes for conversation in episode.walk())
    components.media.pin((image for ledger in ledgers for image in ledger.images()), owner)


@dataclass(slots=True, kw_only=True)
class _Progress:
    """What a step has collected so far."""

    tasks: Sequence[Task]
    prompt_sampler: PromptSampler  # advanced by each round, without requeued prompts
    selection: SelectionResult
    num_rounds: int = 0
    groups_by_prompt: dict[int, Group] = field(default_factory=dict)
    cancelled_indices: list[int] = field(default_factory=list)
    surplus_video_indices: list[int] = field(default_factory=list)  # above max_video_share
    discarded: list[Episode] = field(default_factory=list)  # of cancelled groups
    is_failing: bool = False  # no episode of the last round is usable

    @classmethod
    def start(cls, tasks: Sequence[Task], prompt_sampler: PromptSampler, settings: RlConfig) -> "_Progress":
        """Return the progress before the first round. Raises DataError if `max_video_share` needs other tasks."""
        share = settings.selection.max_video_share
        if share is not None and share < 1 and all(map(_has_video, tasks)):
            raise DataError(
                f"rl.selection.max_video_share={share:g} fills a batch with tasks without a video, and data.train has "
                "none: add some, or set it to null",
                key="rl.selection.max_video_share",
                value=share,
            )
        return cls(tasks=tasks, prompt_sampler=prompt_sampler, selection=_select([], settings))

    def may_collect(self, settings: RlConfig) -> bool:
        """Return whether groups are missing and another round may follow.

        Without a limit of rounds, a step draws each task about once, and ends if the engine or the rewards fail.
        """
        if not self.selection.num_missing:
            return False
        if settings.selection.max_sampling_rounds is not None:
            return self.num_rounds < settings.selection.max_sampling_rounds
        num_prompts = len(self.groups_by_prompt) + len(self.cancelled_indices)
        return self.num_rounds == 0 or (num_prompts < len(self.tasks) and not self.is_failing)

    def take_prompts(self, components: TrainingComponents) -> tuple[list[int], int]:
        """Return the indices of a round's prompts, and how many of their groups must end."""
        num_required, num_started = components.recipe.rl.selection.compute_start_counts(self.selection.num_missing)
        prompt_indices, surplus_video_indices, self.prompt_sampler = take_prompts(
            components.recipe, self.tasks, self.prompt_sampler, num_started
        )
        self.surplus_video_indices += surplus_video_indices
        return prompt_indices, num_required

    def add_round(self, groups_by_prompt: Mapping[int, Group], settings: RlConfig, step: int) -> None:
        """Add a round's groups, and select among all of the step."""
        self.groups_by_prompt |= groups_by_prompt
        self.selection = _select(self.groups_by_prompt.values(), settings)
        self.num_rounds += 1
        self.is_failing = not has_usable_episode(groups_by_prompt.values())
        is_warned = self.num_rounds >= _FIRST_WARNED_ROUND and self.num_rounds.bit_count() == 1
        if settings.selection.max_sampling_rounds is None and self.selection.num_missing and is_warned:
            num_kept, target = len(self.selection.kept_groups), settings.prompts_per_step
            message = "Step %d kept %d of %d groups in %d rounds; it draws up to %d prompts, each task about once"
            _logger.warning(message, step + 1, num_kept, target, self.num_rounds, len(self.tasks))

    def list_surplus(self) -> list[int]:
        """Return the prompts of surplus and cancelled groups, and surplus videos."""
        # Filters make new groups of the same episodes, so a group's prompt index is found by its first episode.
        prompt_index_by_episode = {
            id(scored): prompt_index
            for prompt_index, group in self.groups_by_prompt.items()
            for scored in group.scored_episodes
        }
        surplus_indices = [
            prompt_index_by_episode[id(group.scored_episodes[0])] for group in self.selection.surplus_groups
        ]
        return [*surplus_indices, *self.cancelled_indices, *self.surplus_video_indices]


def take_prompts(
    recipe: Recipe, tasks: Sequence[Task], prompt_sampler: PromptSampler, count: int
) -> tuple[list[int], list[int], PromptSampler]:
    """Take the prompts of a round; the next ones without a video replace the videos above `max_video_share`.

    Return their prompt indices, those of the surplus videos, and the advanced sampler.
    """
    share, mixture = recipe.rl.selection.max_video_share, Mixture.from_tasks(tasks)
    prompt_indices, surplus_video_indices = list[int](), list[int]()
    num_videos_left = count if share is None else math.floor(round(share * count, 6))
    while len(prompt_indices) < count:
        taken, prompt_sampler = prompt_sampler.take(count - len(prompt_indices))
        for prompt_index in taken:
            is_video = share is not None and _has_video(mixture.get_task(recipe.seed, prompt_index)[0])
            if is_video and not num_videos_left:
                surplus_video_indices.append(prompt_index)
                continue
            num_videos_left -= is_video
            prompt_indices.append(prompt_index)
    return prompt_indices, surplus_video_indices, prompt_sampler


def _select(groups: Iterable[Group], settings: RlConfig) -> SelectionResult:
    filters, rank_by = settings.active_filters, settings.selection.rank_by
    return select_groups([*groups], filters=filters, target=settings.prompts_per_step, rank_by=rank_by)


def _has_video(task: Task) -> bool:
    return any(media.kind is MediaKind.VIDEO for media in task.media)


def _count_episodes(settings: RlConfig) -> int:
    """Return how many episodes a group samples, its baseline included."""
    return settings.group_size + needs_greedy_baseline(settings.advantage)


def collect_groups(
    components: TrainingComponents,
    tasks: Sequence[Task],
    prompt_indices: Sequence[int],
    step: int,
    *,
    earlier_indices: Collection[int] = (),
    **options: Any,
) -> Coroutine[Any, Any, list[Group]]:
    """Collect one group per prompt for step `step`, in order; `options` are those of `collect`.

    `earlier_indices` were collected for the same step before. Each prompt has the frame budget of its own epoch. A
    task that is drawn again in the same step gets other seeds.
    """
    seed, mixture = components.recipe.seed, Mixture.from_tasks(tasks)
    num_drawn = Counter(mixture.get_task(seed, prompt_index)[0].digest for prompt_index in earlier_indices)
    seed_salts = []
    for prompt_index in prompt_indices:
        digest = mixture.get_task(seed, prompt_index)[0].digest
        repeat_index = num_drawn[digest]
        num_drawn[digest] += 1
        seed_salts.append(derive_seed("again", step, repeat_index) if repeat_index else step)
    return _collect(components, mixture, prompt_indices, seed_salts, **options)


async def collect_group(
    components: TrainingComponents,
    tasks: Sequence[Task],
    prompt_index: int,
    version: int,
    on_discarded: Callable[[Episode], None],
    *,
    run_fn: RunEpisode = run_episode,
) -> Group:
    """Collect the group of a prompt, started with a weight version, for a step that isn't known yet."""
    # Another version has other seeds: a prompt may be drawn again.
    seed_salts = [derive_seed("group", version, prompt_index)]
    mixture = Mixture.from_tasks(tasks)
    [group] = await _collect(components, mixture, [prompt_index], seed_salts, on_discarded=on_discarded, run_fn=run_fn)
    _pin_images(components, [group], group)
    return group


def _collect(
    components: TrainingComponents,
    mixture: Mixture,
    prompt_indices: Sequence[int],
    seed_salts: Sequence[int],
    **options: Any,
) -> Coroutine[Any, Any, list[Group]]:
    seed, budgets, settings = components.recipe.seed, components.recipe.frame_budgets, components.recipe.rl
    drawn_tasks = [mixture.get_task(seed, prompt_index) for prompt_index in prompt_indices]
    return collect(
        [task for task, _ in drawn_tasks],
        components.environments,
        components.build_context(seed=seed),
        group_size=settings.group_size,
        max_concurrency=settings.max_groups_in_progress * _count_episodes(settings) or MAX_EPISODES_IN_PROGRESS,
        with_greedy_baseline=needs_greedy_baseline(settings.advantage),
        score_fn=components.score_fn,
        seed_salts=seed_salts,
        frame_budgets=[
            draw_frame_budget(budgets, run_seed=seed, epoch=epoch, task=task) for task, epoch in drawn_tasks
        ],
        executor=components.executor,
        **options,
    )


def build_records(
    step: int,
    groups: Sequence[Group],
    *,
    removed_by: Mapping[int, str],
    discarded: Sequence[Episode],
    cancelled_tasks: Sequence[Task],
    num_episodes: int,
    environment: str,
    cancel_reason: str = CANCELLED_ERROR,
) -> list[RolloutRecord]:
    """Return a record of every episode of step `step` (from 0): of complete groups, then of cancelled ones.

    A group samples `num_episodes`; `environment` is the name of the default one, recorded for episodes that had not
    ended.
    """
    records: list[RolloutRecord] = []

    def add(group: int, outcome: Outcome, episode: Episode, score: Score | None = None, reason: str = "") -> None:
        index = sum(record.group == group for record in records[-num_episodes:])
        record = RolloutRecord(
            stage="rl",
            step=step + 1,
            group=group,
            index=index,
            outcome=outcome,
            reason=reason,
            episode=episode,
            score=score,
        )
        records.append(record)

    for number, group in enumerate(groups):
        for scored in group.scored_episodes:
            reason = removed_by.get(id(scored), "")
            add(number, "dropped" if reason else "kept", scored.episode, scored.score, reason)
        for ungraded in group.ungraded:
            add(number, "ungraded", ungraded.episode, reason=ungraded.reason)
        if group.greedy_baseline is not None:
            add(number, "greedy_baseline", group.greedy_baseline.episode, group.greedy_baseline.score)
    ended = defaultdict[str, list[Episode]](list)
    for episode in discarded:
        ended[episode.task.digest].append(episode)
    for number, task in enumerate(cancelled_tasks, start=len(groups)):
        for _ in range(num_episodes):
            if ended[task.digest]:
                add(number, "discarded", ended[task.digest].pop(0), reason=cancel_reason)
                continue
            unfinished = Episode(
                task=task,
                environment=task.environment or environment,
                ledger=Ledger(),
                turns=(),
                status=EpisodeStatus.ABORTED,
                error=cancel_reason,
            )
            add(number, "cancelled", unfinished, reason=cancel_reason)
    return records


def require_usable_episodes(groups: Sequence[Group], step: int) -> None:
    """Raise EngineError if every episode of a step failed, or none could be graded: no later step would succeed."""
    episodes = [scored.episode for group in groups for scored in group.scored_episodes]
    ungraded = [episode for group in groups for episode in group.ungraded]
    if ungraded and not episodes:
        message = f"none of the {len(ungraded)} episodes of step {step + 1} could be graded"
        reason = ungraded[0].reason
        raise EngineError(f"{message}; the reason of the first: {reason}", key="rewards", value=reason)
    if not has_usable_episode(groups):
        error = next((episode.error for episode in episodes if episode.error), "unknown")
        message = f"all {len(episodes)} episodes of step {step + 1} failed; the error of the first: {error}"
        raise EngineError(message, key="episodes", value=error)


def compute_filter_metrics(reports: Iterable[FilterReport]) -> dict[str, float]:
    """Return what each filter kept and dropped, and the fraction of correct episodes in both, as metrics of the run."""
    metrics: dict[str, float] = {}
    for report in reports:
        metrics[f"groups/dropped/{report.name}"] = float(report.num_groups[1])
        metrics[f"episodes/dropped/{report.name}"] = float(report.num_episodes[1])
        metrics[f"episodes/kept/{report.name}"] = float(report.num_episodes[0])
        metrics[f"frac_correct/kept/{report.name}"] = report.frac_correct[0]
        metrics[f"frac_correct/dropped/{report.name}"] = report.frac_correct[1]
    return metrics
