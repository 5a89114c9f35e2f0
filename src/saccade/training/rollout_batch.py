"""Collect the rollout batch of a step: sample groups in rounds until enough of them pass the filters.

    prompts ──take──> collect ──groups──> select ── enough? ──> RolloutBatch
       ▲                 ▲                   │ no: another round, at most `max_sampling_rounds`
       │                 └───────────────────┘
       └── with `surplus: requeue`, prompts of surplus and of cancelled groups

With `rl.video_share` a round samples tasks with videos and all others concurrently, each kind with its own prompts and
its own number of groups, so that a dropped group is replaced by one of its kind.

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

`on_rollouts` receives a record of every episode that was started for the step, with what became of it and why.
"""

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean
from typing import Any

from saccade.algorithms.frame_budget import draw_frame_budget
from saccade.algorithms.group_advantages import needs_baseline_episode
from saccade.algorithms.group_filter import FilterReport, SelectionResult, merge_filter_reports, select_groups
from saccade.config.schema import RlConfig
from saccade.data.mixture import Mixture
from saccade.errors import DataError, EngineError, RunError
from saccade.ledger import Ledger
from saccade.metrics.episode_metrics import compute_step_metrics, has_failed
from saccade.rollouts.collect import collect
from saccade.rollouts.components import TrainingComponents
from saccade.rollouts.runner import RunEpisode, run_episode
from saccade.training.episode_log import Outcome, RolloutRecord
from saccade.training.prompt_sampler import PromptSampler
from saccade.types import Episode, EpisodeStatus, Group, MediaKind, Score, Task
from saccade.utils.async_utils import gather_or_cancel
from saccade.utils.hashing import derive_seed

OnGroups = Callable[[int, Sequence[Group]], None]
OnRollouts = Callable[[str, int, Sequence[RolloutRecord]], Awaitable[None]]  # stage, step from 1, records
_logger = logging.getLogger("saccade")
_FIRST_WARNED_ROUND = 4
CANCELLED_ERROR = "cancelled: enough other groups of the step had ended (rl.selection.over_provision)"


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutBatch:
    """The groups that step `step` (from 0) trains on, and metrics of all groups collected for it."""

    step: int
    groups: tuple[Group, ...]
    num_sampled_tokens: int  # including those of groups that were not kept
    metrics: Mapping[str, float]

    @property
    def num_tokens(self) -> int:
        """Return the tokens of all conversations, a measure of its memory; images are on disk."""
        episodes = (episode for group in self.groups for scored in group.members for episode in scored.episode.walk())
        return sum(len(episode.ledger) for episode in episodes)


async def collect_batch(
    components: TrainingComponents,
    tasks: Sequence[Task],
    prompt_sampler: PromptSampler,
    step: int,
    *,
    on_groups: OnGroups | None = None,
    on_rollouts: OnRollouts | None = None,
    run_fn: RunEpisode = run_episode,
) -> tuple[RolloutBatch, PromptSampler]:
    """Collect the batch of step `step` with `run_fn`; return it and the advanced prompt sampler.

    Each further round takes as many prompts as groups are missing, oversampled like the first. With `rl.video_share`
    tasks with videos and all other tasks are sampled concurrently in each round, each up to its share. `on_groups`
    receives all groups, `on_rollouts` all records. Raises DataError for a share of videos without such tasks,
    EngineError if every episode of the step failed, or if none could be graded, and RunError if groups are missing and
    `rl.selection.on_underfilled` is "stop".
    """
    settings = components.recipe.rl
    parts = _split_by_kind(tasks, prompt_sampler, settings)
    while unfinished := [part for part in parts if part.may_collect(settings)]:
        rounds = [part.start_round(components, step, run_fn) for part in unfinished]
        await gather_or_cancel([asyncio.create_task(groups) for groups in rounds])
        for part in unfinished:
            part.finish_round(settings, step)
    groups = [group for part in parts for group in part.groups_by_position.values()]
    if on_rollouts is not None:  # before a check fails, which the records may explain
        seed, default_environment = components.recipe.seed, components.recipe.environment.name
        cancelled_tasks = [
            Mixture.from_tasks(part.tasks).get_task(seed, position)[0]
            for part in parts
            for position in part.cancelled_positions
        ]
        records = build_records(
            step,
            groups,
            removed_by={key: name for part in parts for key, name in part.selection.removed_by.items()},
            discarded=[episode for part in parts for episode in part.discarded],
            cancelled_tasks=cancelled_tasks,
            num_episodes=_count_episodes(settings),
            environment=default_environment,
        )
        await on_rollouts("rl", step + 1, records)
    require_usable_episodes(groups, step)
    if on_groups is not None:
        on_groups(step, groups)
    num_rounds = max(part.num_rounds for part in parts)
    num_missing = sum(part.selection.num_missing for part in parts)
    kept_groups = tuple(group for part in parts for group in part.selection.kept_groups)
    if num_missing and settings.selection.on_underfilled == "stop":
        raise RunError(
            f"step {step + 1} kept {len(kept_groups)} of {settings.prompts_per_step} groups in {num_rounds} rounds. "
            "Raise rl.selection.oversample or rl.selection.max_sampling_rounds, or set "
            "rl.selection.on_underfilled=continue",
            key="rl.selection.on_underfilled",
            value="stop",
        )
    samplers = [part.requeue() if settings.selection.surplus == "requeue" else part.prompt_sampler for part in parts]
    if settings.video_share is not None:
        prompt_sampler = replace(samplers[0], videos=samplers[1])
    else:
        [prompt_sampler] = samplers
    discarded = [episode for part in parts for episode in part.discarded]
    num_cancelled = sum(len(part.cancelled_positions) for part in parts)
    baselines = [group.baseline.score.total for group in groups if group.baseline]
    metrics = {
        **compute_step_metrics(groups),
        **({"baseline_reward": fmean(baselines)} if baselines else {}),
        "groups/kept": float(len(kept_groups)),
        "groups/missing": float(num_missing),
        **compute_filter_metrics(merge_filter_reports([part.selection.filter_reports for part in parts])),
        "groups/cancelled": float(num_cancelled),
        "episodes/cancelled": float(_count_episodes(settings) * num_cancelled - len(discarded)),
        "episodes/discarded": float(len(discarded)),
        "sampling_rounds": float(num_rounds),
    }
    sampled = [*discarded, *(scored.episode for group in groups for scored in group.members)]
    batch = RolloutBatch(
        step=step,
        groups=kept_groups,
        num_sampled_tokens=sum(episode.usage.sampled_tokens for episode in sampled),
        metrics=metrics,
    )
    return batch, prompt_sampler


@dataclass(slots=True, kw_only=True)
class _Part:
    """A sequence of prompts, and what a step has collected from it so far."""

    tasks: Sequence[Task]
    prompt_sampler: PromptSampler  # advanced by each round, without requeued prompts
    target: int  # groups needed
    selection: SelectionResult
    num_rounds: int = 0
    groups_by_position: dict[int, Group] = field(default_factory=dict)
    cancelled_positions: list[int] = field(default_factory=list)
    discarded: list[Episode] = field(default_factory=list)  # of cancelled groups
    is_failing: bool = False  # no episode of the last round is usable
    round_positions: tuple[int, ...] = ()  # prompts of the round in progress
    round_groups: dict[int, Group] = field(default_factory=dict)  # its groups, by index

    def may_collect(self, settings: RlConfig) -> bool:
        """Return whether groups are missing and another round may follow.

        Without a limit of rounds, a step draws each task about once, and ends if the engine or the rewards fail.
        """
        if not self.selection.num_missing:
            return False
        if settings.selection.max_sampling_rounds is not None:
            return self.num_rounds < settings.selection.max_sampling_rounds
        num_prompts = len(self.groups_by_position) + len(self.cancelled_positions)
        return self.num_rounds == 0 or (num_prompts < len(self.tasks) and not self.is_failing)

    def start_round(
        self, components: TrainingComponents, step: int, run_fn: RunEpisode
    ) -> Coroutine[Any, Any, list[Group]]:
        """Take prompts for the missing groups, and return the coroutine that samples them."""
        selection = components.recipe.rl.selection
        num_required, num_launched = selection.compute_launch_counts(self.selection.num_missing)
        self.round_positions, self.prompt_sampler = self.prompt_sampler.take(num_launched)
        self.round_groups = {}
        return collect_groups(
            components,
            self.tasks,
            self.round_positions,
            step,
            earlier_positions=self.groups_by_position,
            num_required=num_required,
            on_group_done=self.round_groups.__setitem__,
            on_discarded=self.discarded.append,
            run_fn=run_fn,
        )

    def finish_round(self, settings: RlConfig, step: int) -> None:
        """Add the groups of the round, and select among all of them."""
        for index, position in enumerate(self.round_positions):
            if index in self.round_groups:
                self.groups_by_position[position] = self.round_groups[index]
            else:
                self.cancelled_positions.append(position)
        self.selection = _select(self.groups_by_position.values(), settings, self.target)
        self.num_rounds += 1
        self.is_failing = not _has_usable_episode([*self.round_groups.values()])
        is_warned = self.num_rounds >= _FIRST_WARNED_ROUND and self.num_rounds.bit_count() == 1
        if settings.selection.max_sampling_rounds is None and self.selection.num_missing and is_warned:
            num_kept = len(self.selection.kept_groups)
            message = "Step %d kept %d of %d groups in %d rounds; it draws up to %d prompts, each task about once"
            _logger.warning(message, step + 1, num_kept, self.target, self.num_rounds, len(self.tasks))

    def requeue(self) -> PromptSampler:
        """Return the sampler that takes the prompts of surplus and cancelled groups again first."""
        # Filters make new groups of the same episodes, so a group's position is found by its first episode.
        position_by_episode = {
            id(scored): position for position, group in self.groups_by_position.items() for scored in group.episodes
        }
        surplus_positions = [position_by_episode[id(group.episodes[0])] for group in self.selection.surplus_groups]
        return self.prompt_sampler.requeue([*surplus_positions, *self.cancelled_positions])


def _select(groups: Iterable[Group], settings: RlConfig, target: int) -> SelectionResult:
    filters, rank_by = settings.active_filters, settings.selection.rank_by
    return select_groups([*groups], filters=filters, target=target, rank_by=rank_by)


def _split_by_kind(tasks: Sequence[Task], prompt_sampler: PromptSampler, settings: RlConfig) -> list[_Part]:
    """Return the sequences of prompts: the images' and the videos'.

    Without `video_share` all tasks are one sequence. Raises DataError if a kind of which groups are needed has no task.
    """
    target, share = settings.prompts_per_step, settings.video_share
    if share is None:
        return [_build_part(tasks, prompt_sampler, target, settings)]
    num_videos = settings.num_video_groups
    samplers = (replace(prompt_sampler, videos=None), prompt_sampler.videos or PromptSampler())
    parts: list[_Part] = []
    for sampler, is_video, count in zip(samplers, (False, True), (target - num_videos, num_videos), strict=True):
        kept = Mixture.from_tasks(tasks).filter_tasks(partial(_is_kind, is_video))
        if count and kept is None:
            kind = "with" if is_video else "without"
            raise DataError(
                f"rl.video_share={share:g} needs {count} tasks {kind} a video per step, and data.train has none; add "
                "some, or remove rl.video_share",
                key="rl.video_share",
                value=share,
            )
        parts.append(_build_part(kept or (), sampler, count, settings))
    return parts


def _build_part(tasks: Sequence[Task], prompt_sampler: PromptSampler, target: int, settings: RlConfig) -> _Part:
    selection = _select([], settings, target)
    return _Part(tasks=tasks, prompt_sampler=prompt_sampler, target=target, selection=selection)


def _is_kind(is_video: bool, task: Task) -> bool:
    return is_video == any(media.kind is MediaKind.VIDEO for media in task.media)


def _count_episodes(settings: RlConfig) -> int:
    """Return how many episodes a group samples, its baseline included."""
    return settings.group_size + needs_baseline_episode(settings.advantage)


def collect_groups(
    components: TrainingComponents,
    tasks: Sequence[Task],
    positions: Sequence[int],
    step: int,
    *,
    earlier_positions: Collection[int] = (),
    **options: Any,
) -> Coroutine[Any, Any, list[Group]]:
    """Collect one group per position for step `step`, in the order of the positions; `options` are those of `collect`.

    `earlier_positions` were collected for the same step before. Each prompt has the frame budget of its own epoch. A
    task that is drawn again in the same step gets other seeds.
    """
    seed, budgets = components.recipe.seed, components.recipe.frame_budgets
    mixture = Mixture.from_tasks(tasks)
    num_drawn = Counter(mixture.get_task(seed, position)[0].digest for position in earlier_positions)
    batch_tasks, seed_epochs, frame_budgets = [], [], []
    for position in positions:
        task, epoch = mixture.get_task(seed, position)
        repeat_index = num_drawn[task.digest]
        num_drawn[task.digest] += 1
        batch_tasks.append(task)
        seed_epochs.append(derive_seed("again", step, repeat_index) if repeat_index else step)
        frame_budgets.append(draw_frame_budget(budgets, run_seed=seed, epoch=epoch, task=task))
    return collect(
        batch_tasks,
        components.environments,
        components.build_context(seed=seed),
        group_size=components.recipe.rl.group_size,
        with_baseline=needs_baseline_episode(components.recipe.rl.advantage),
        score_fn=components.score_fn,
        epochs=seed_epochs,
        frame_budgets=frame_budgets,
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
        for scored in group.episodes:
            reason = removed_by.get(id(scored), "")
            add(number, "dropped" if reason else "kept", scored.episode, scored.score, reason)
        for ungraded in group.ungraded:
            add(number, "ungraded", ungraded.episode, reason=ungraded.reason)
        if group.baseline is not None:
            add(number, "baseline", group.baseline.episode, group.baseline.score)
    ended = defaultdict[str, list[Episode]](list)
    for episode in discarded:
        ended[episode.task.digest].append(episode)
    for number, task in enumerate(cancelled_tasks, start=len(groups)):
        for _ in range(num_episodes):
            if ended[task.digest]:
                add(number, "discarded", ended[task.digest].pop(0), reason=CANCELLED_ERROR)
                continue
            unfinished = Episode(
                task=task,
                environment=task.environment or environment,
                ledger=Ledger(),
                turns=(),
                status=EpisodeStatus.ABORTED,
                error=CANCELLED_ERROR,
            )
            add(number, "cancelled", unfinished, reason=CANCELLED_ERROR)
    return records


def require_usable_episodes(groups: Sequence[Group], step: int) -> None:
    """Raise EngineError if every episode of a step failed, or none could be graded: no later step would succeed."""
    episodes = [scored.episode for group in groups for scored in group.episodes]
    ungraded = [episode for group in groups for episode in group.ungraded]
    if ungraded and not episodes:
        message = f"none of the {len(ungraded)} episodes of step {step + 1} could be graded"
        reason = ungraded[0].reason
        raise EngineError(f"{message}; the reason of the first: {reason}", key="rewards", value=reason)
    if not _has_usable_episode(groups):
        error = next((episode.error for episode in episodes if episode.error), "unknown")
        message = f"all {len(episodes)} episodes of step {step + 1} failed; the error of the first: {error}"
        raise EngineError(message, key="episodes", value=error)


def _has_usable_episode(groups: Sequence[Group]) -> bool:
    """Return whether an episode has a score and didn't fail; one whose prompt exceeded the context has no turn."""
    return any(not has_failed(scored.episode) for group in groups for scored in group.episodes)


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
