"""Select the groups to train on: filter episodes and groups, rank the groups and cut them to a target number.

groups ─filters of episodes─> ─at least two left─> ─filters of groups─> ─rank, cut─> advantages ─filters by advantage─>
"""

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from saccade import plugins
from saccade.errors import ConfigError, convert_errors
from saccade.types import Group, ScoredEpisode

Filters = Mapping[str, Mapping[str, Any]]  # settings by the filter's name, as in `rl.filters`
BUILT_IN_STAGES = ("too_few_episodes", "surplus")


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterReport:
    """What one filter did, as (kept, removed) pairs; `frac_correct` is 0.0 if there are no episodes."""

    name: str  # of the filter, or one of BUILT_IN_STAGES
    num_groups: tuple[int, int]  # kept, removed
    num_episodes: tuple[int, int]
    frac_correct: tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionResult:
    """The groups to train on, and the report of each filter, in order."""

    kept_groups: tuple[Group, ...]
    surplus_groups: tuple[Group, ...]  # they passed every filter but exceed the target
    filter_reports: tuple[FilterReport, ...]
    num_missing: int  # groups short of the target
    removed_by: Mapping[int, str]  # name of the filter that removed an episode, by `id` of the scored episode


def resolve_filters(filters: Filters) -> dict[str, dict[str, Callable[..., bool]]]:
    """Return the filters with their settings, by what they read: "scored", "group" or "advantage".

    Raises ConfigError for an unknown name or setting, a filter that reads nothing, and two filters with the same name,
    or one with the name of a built-in stage; a returned filter raises it if the plugin fails.
    """
    resolved: dict[str, dict[str, Callable[..., bool]]] = {"scored": {}, "group": {}, "advantage": {}}
    names_in_use = {*BUILT_IN_STAGES}
    for name, settings in filters.items():
        key, stage = f"rl.filters.{name}", plugins.get_object_name(name)
        bound = plugins.resolve("algorithms.filters", name, settings)
        parameters = inspect.signature(bound).parameters
        positional = [
            parameter.name for parameter in parameters.values() if parameter.kind < inspect.Parameter.KEYWORD_ONLY
        ]
        if not positional:
            message = f"the filter {name!r} has no first parameter; it must be `scored` or `group`"
            raise ConfigError(message, key=key, value=name)
        if stage in names_in_use:
            message = f"the name {stage!r} of the filter {name!r} belongs to another one or to a built-in stage"
            raise ConfigError(f"{message}; rename it", key=key, value=stage)
        names_in_use.add(stage)
        kind = "advantage" if "advantage" in parameters else "group" if positional[0] == "group" else "scored"
        resolved[kind][stage] = _report_errors(name, bound)
    return resolved


def _report_errors(name: str, should_keep: Callable[..., bool]) -> Callable[..., bool]:
    def run_filter(item: ScoredEpisode | Group, **advantage: float) -> bool:
        task_id = (item if isinstance(item, Group) else item.episode).task.id
        message = f"the filter {name!r} failed on task {task_id}"
        with convert_errors(ConfigError, message, key=f"rl.filters.{name}", value=task_id):
            return bool(should_keep(item, **advantage))

    return run_filter


def select_groups(
    groups: Sequence[Group], filters: Filters, *, target: int, rank_by: Literal["none", "reward_std"] = "none"
) -> SelectionResult:
    """Filter and rank groups and take at most `target` of them; a kept group keeps all its surviving episodes.

    Filters of episodes run first (a group whose baseline a filter drops loses all its episodes), then groups with fewer
    than two episodes left are dropped ("too_few_episodes" in the reports), then filters of groups run; each kind in the
    given order. "surplus" drops the groups after the first `target`: ranked by the std of their rewards in
    descending order (ties by task id) if `rank_by` is "reward_std", else in the given order. Filters by advantage are
    applied later (see `filter_by_advantage`).
    """
    resolved = resolve_filters(filters)
    stages: dict[str, Sequence[Group]] = {"": groups}
    last = groups
    for name, keep_episode in resolved["scored"].items():
        stages[name] = last = [_filter_episodes(group, keep_episode) for group in last]
    # A group's statistics are derived from its episodes: from here on, from the remaining ones.
    stages["too_few_episodes"] = last = [group for group in last if len(group.scored_episodes) > 1]
    for name, keep_group in resolved["group"].items():
        stages[name] = last = [group for group in last if keep_group(group)]
    ranked = last
    if rank_by == "reward_std":  # rounded, so that the order of the episodes doesn't break ties
        ranked = sorted(last, key=lambda group: (-round(float(np.std(group.total_rewards)), 9), group.task.id))
    stages["surplus"] = ranked[:target]
    kept_groups, surplus_groups = tuple(ranked[:target]), tuple(ranked[target:])
    removed_by: dict[int, str] = {}
    for name, (before, after) in zip(list(stages)[1:], itertools.pairwise(stages.values()), strict=True):
        left = {id(scored) for group in after for scored in group.scored_episodes}
        removed_by |= {
            id(scored): name for group in before for scored in group.scored_episodes if id(scored) not in left
        }
    return SelectionResult(
        kept_groups=kept_groups,
        surplus_groups=surplus_groups,
        filter_reports=tuple(
            build_filter_report(name, *pair)
            for name, pair in zip(list(stages)[1:], itertools.pairwise(stages.values()), strict=True)
        ),
        num_missing=target - len(kept_groups),
        removed_by=removed_by,
    )


def _filter_episodes(group: Group, keep_episode: Callable[..., bool]) -> Group:
    # Without its baseline nothing can be compared.
    has_baseline = group.greedy_baseline is None or keep_episode(group.greedy_baseline)
    return replace(group, scored_episodes=tuple(filter(keep_episode, group.scored_episodes)) if has_baseline else ())


def filter_by_advantage(
    groups: Sequence[Group], advantages: Sequence[NDArray[np.float64]], filters: Filters
) -> tuple[list[list[bool]], list[FilterReport]]:
    """Return masks of the episodes to train on (the others still compare), and the reports of filters by advantage."""
    masks = [[True] * len(group.scored_episodes) for group in groups]
    reports, before = [], list(groups)
    for name, keep in resolve_filters(filters)["advantage"].items():
        for group, values_G, mask in zip(groups, advantages, masks, strict=True):
            for index, (scored, value) in enumerate(zip(group.scored_episodes, values_G.tolist(), strict=True)):
                mask[index] = mask[index] and keep(scored, advantage=value)
        after = [
            replace(group, scored_episodes=tuple(itertools.compress(group.scored_episodes, mask)))
            for group, mask in zip(groups, masks, strict=True)
        ]
        reports.append(build_filter_report(name, before, after))
        before = after
    return masks, reports


def build_filter_report(name: str, before: Sequence[Group], after: Sequence[Group]) -> FilterReport:
    """Compare the groups before and after a filter."""
    kept_episodes = [scored for group in after for scored in group.scored_episodes]
    # The stages share their episodes and never copy them, so identity shows which are left.
    kept_ids = {id(scored) for scored in kept_episodes}
    removed_episodes = [scored for group in before for scored in group.scored_episodes if id(scored) not in kept_ids]
    return FilterReport(
        name=name,
        num_groups=(len(after), len(before) - len(after)),
        num_episodes=(len(kept_episodes), len(removed_episodes)),
        frac_correct=(_compute_frac_correct(kept_episodes), _compute_frac_correct(removed_episodes)),
    )


def _compute_frac_correct(scored_episodes: Sequence[ScoredEpisode]) -> float:
    return sum(scored.score.is_correct for scored in scored_episodes) / max(1, len(scored_episodes))
