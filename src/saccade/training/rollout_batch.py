"""Collect the rollout batch of a step: sample groups in rounds until enough of them pass the filters.

    prompts ──take──> collect ──groups──> select ── enough? ──> RolloutBatch
       ▲                 ▲                   │ no: another round, at most `max_sampling_rounds`
       │                 └───────────────────┘
       └── with `surplus: requeue`, prompts of surplus and of cancelled groups

A surplus group is one beyond the target. Its episodes are discarded: in a later step they would be staler than that
step's other groups. With `surplus: requeue` its prompt is sampled again in a later step, which costs another rollout;
without, the prompt is not drawn again before its next epoch.

With `over_provision` above 1 a round starts more groups than it waits for and cancels the last ones, so that a step
doesn't wait for its slowest episode. This makes long episodes rarer in the training data. The finished episodes of a
cancelled group are discarded (`episodes/discarded`, their tokens are counted); its other episodes are cancelled
(`episodes/cancelled`), and their tokens are unknown.
"""

from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from saccade.algorithms.frame_budget import draw_frame_budget
from saccade.algorithms.group_filter import FilterReport, select_groups
from saccade.data.mixture import Mixture
from saccade.errors import EngineError, RunError
from saccade.metrics.episode_metrics import compute_step_metrics, has_failed
from saccade.rollouts.collect import collect
from saccade.rollouts.components import TrainingComponents
from saccade.rollouts.runner import RunEpisode, run_episode
from saccade.training.prompt_sampler import PromptSampler
from saccade.types import Episode, Group, Task
from saccade.utils.hashing import derive_seed

OnGroups = Callable[[int, Sequence[Group]], None]


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
        episodes = (episode for group in self.groups for scored in group.episodes for episode in scored.episode.walk())
        return sum(len(episode.ledger) for episode in episodes)


async def collect_batch(
    components: TrainingComponents,
    tasks: Sequence[Task],
    prompt_sampler: PromptSampler,
    step: int,
    *,
    on_groups: OnGroups | None = None,
    run_fn: RunEpisode = run_episode,
) -> tuple[RolloutBatch, PromptSampler]:
    """Collect the batch of step `step` with `run_fn`; return it and the advanced prompt sampler.

    Each further round takes as many prompts as groups are missing, oversampled like the first. `on_groups` receives all
    groups. Raises EngineError if every episode of the step failed, or if none could be graded, and RunError if groups
    are missing and `rl.selection.on_underfilled` is "stop".
    """
    settings = components.recipe.rl
    target = settings.prompts_per_step
    select = partial(select_groups, filters=settings.active_filters, target=target, rank_by=settings.selection.rank_by)
    groups_by_position: dict[int, Group] = {}
    cancelled_positions: list[int] = []
    discarded: list[Episode] = []  # of cancelled groups
    num_rounds, selection = 0, select([])
    while selection.num_missing and num_rounds < settings.selection.max_sampling_rounds:
        num_required, num_launched = settings.selection.compute_launch_counts(selection.num_missing)
        positions, prompt_sampler = prompt_sampler.take(num_launched)
        round_groups: dict[int, Group] = {}  # by index
        await collect_groups(
            components,
            tasks,
            positions,
            step,
            earlier_positions=groups_by_position,
            num_required=num_required,
            on_group_done=round_groups.__setitem__,
            on_discarded=discarded.append,
            run_fn=run_fn,
        )
        for index, position in enumerate(positions):
            if index in round_groups:
                groups_by_position[position] = round_groups[index]
            else:
                cancelled_positions.append(position)
        selection = select([*groups_by_position.values()])
        num_rounds += 1
    groups = list(groups_by_position.values())
    require_usable_episodes(groups, step)
    if on_groups is not None:
        on_groups(step, groups)
    if selection.num_missing and settings.selection.on_underfilled == "stop":
        raise RunError(
            f"step {step + 1} kept {len(selection.kept_groups)} of {target} groups in {num_rounds} rounds. Raise "
            "rl.selection.oversample or rl.selection.max_sampling_rounds, or set rl.selection.on_underfilled=continue",
            key="rl.selection.on_underfilled",
            value="stop",
        )
    if settings.selection.surplus == "requeue":
        # Filters make new groups of the same episodes, so a group's position is found by its first episode.
        position_by_episode = {
            id(scored): position for position, group in groups_by_position.items() for scored in group.episodes
        }
        surplus_positions = [position_by_episode[id(group.episodes[0])] for group in selection.surplus_groups]
        prompt_sampler = prompt_sampler.requeue([*surplus_positions, *cancelled_positions])
    metrics = {
        **compute_step_metrics(groups),
        "groups/kept": float(len(selection.kept_groups)),
        "groups/missing": float(selection.num_missing),
        **compute_filter_metrics(selection.filter_reports),
        "groups/cancelled": float(len(cancelled_positions)),
        "episodes/cancelled": float(settings.group_size * len(cancelled_positions) - len(discarded)),
        "episodes/discarded": float(len(discarded)),
        "sampling_rounds": float(num_rounds),
    }
    sampled = [*discarded, *(scored.episode for group in groups for scored in group.episodes)]
    batch = RolloutBatch(
        step=step,
        groups=selection.kept_groups,
        num_sampled_tokens=sum(episode.usage.sampled_tokens for episode in sampled),
        metrics=metrics,
    )
    return batch, prompt_sampler


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
        score_fn=components.score_fn,
        epochs=seed_epochs,
        frame_budgets=frame_budgets,
        **options,
    )


def require_usable_episodes(groups: Sequence[Group], step: int) -> None:
    """Raise EngineError if every episode of a step failed, or none could be graded: no later step would succeed."""
    episodes = [scored.episode for group in groups for scored in group.episodes]
    ungraded = [episode for group in groups for episode in group.ungraded]
    if ungraded and not episodes:
        message = f"none of the {len(ungraded)} episodes of step {step + 1} could be graded"
        reason = ungraded[0].reason
        raise EngineError(f"{message}; the reason of the first: {reason}", key="rewards", value=reason)
    # An episode has also failed if its prompt exceeded the context, so that it has no turn.
    if all(has_failed(episode) for episode in episodes):
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
