"""Which groups are learned from: whole groups, filtered, ranked and cut to a target."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from saccade.algorithms.advantages import is_punished
from saccade.algorithms.anchoring import rewards
from saccade.config import Select
from saccade.types import Episode, Group, Scored


@dataclass(frozen=True, slots=True, kw_only=True)
class Filtered:
    """What one filter did: groups and episodes before it that it kept and removed, and how many of those were correct.

    The correct shares are of episodes with accuracy of at least one half; 0.0 where there was none.

    >>> Filtered(name="spread", groups=(6, 2), episodes=(48, 16), correct=(0.5, 1.0)).groups[1]
    2
    """

    name: str  # ends | image | length | survivors | spread | target | correct_with_negative_advantage
    groups: tuple[int, int]  # kept, removed
    episodes: tuple[int, int]
    correct: tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The groups to learn from, those that were good but too many, and what each filter did, in order.

    >>> Selection(kept=(), spare=(), report=(), missing=3).missing
    3
    """

    kept: tuple[Group, ...]
    spare: tuple[Group, ...]
    report: tuple[Filtered, ...]
    missing: int  # groups short of the target


def select(groups: Sequence[Group], settings: Select, *, target: int) -> Selection:
    """Filter and rank groups and take at most `target` of them, each whole.

    In order:
      ends       drops the episodes whose end is in `settings.drop_ends`;
      image      with `must_show_image`, drops those in which no tool showed a picture, to the model or to a sub-agent;
      length     with `max_tokens`, drops those with a conversation, a sub-agent's included, of more expanded tokens;
      survivors  drops groups with fewer than two episodes left;
      spread     drops groups whose rewards' population std, over the survivors, is not above `settings.min_spread`;
      target     takes the first groups, after ranking by that std from large to small (ties by task id) where
                 `settings.rank` is "std", else as they came.
    `correct_with_negative_advantage` is not for here: it needs advantages, and leaves those of the others as they are
    (see `forgiven`).
    """
    stages: dict[str, Sequence[Group]] = {"": groups}
    for name, fits in _fitness(settings).items():
        stages[name] = [_only(group, fits) for group in _last(stages)]
    # statistics of a group are derived from its members, so they are those of the survivors from here on
    stages["survivors"] = [group for group in _last(stages) if len(group.members) > 1]
    stages["spread"] = [group for group in _last(stages) if _spread(group) > settings.min_spread]
    ranked = sorted(_last(stages), key=_rank) if settings.rank == "std" else _last(stages)
    stages["target"] = ranked[:target]
    report = [
        filtered(name, *pair) for name, pair in zip(list(stages)[1:], itertools.pairwise(stages.values()), strict=True)
    ]
    kept, spare = tuple(ranked[:target]), tuple(ranked[target:])
    return Selection(kept=kept, spare=spare, report=tuple(report), missing=target - len(kept))


def forgiven(groups: Sequence[Group], credits: Sequence[NDArray[np.float64]]) -> Filtered:
    """What is left out of the loss where correct episodes with a negative advantage are (PyVision-RL's filter).

    The groups keep them as something to compare with, so that nobody else's advantage changes.
    """
    after = [
        replace(group, members=tuple(itertools.compress(group.members, _unpunished(group, values))))
        for group, values in zip(groups, credits, strict=True)
    ]
    return filtered("correct_with_negative_advantage", groups, after)


def _unpunished(group: Group, values_G: NDArray[np.float64]) -> list[bool]:
    return [not is_punished(member, float(value)) for member, value in zip(group.members, values_G, strict=True)]


def _fitness(settings: Select) -> dict[str, Callable[[Episode], bool]]:
    """The filters of single episodes that are switched on, by name: what an episode must be to stay."""
    fits: dict[str, Callable[[Episode], bool]] = {"ends": lambda episode: episode.end not in settings.drop_ends}
    if settings.must_show_image:
        fits["image"] = _saw_more
    if settings.max_tokens:
        fits["length"] = lambda episode: all(len(each.ledger) <= settings.max_tokens for each in episode.walk())
    return fits


def _saw_more(episode: Episode) -> bool:
    shown = any(result.pictures for result in episode.results)
    return shown or any(child.ledger.pictures() for child in episode.children)


def _only(group: Group, fits: Callable[[Episode], bool]) -> Group:
    return replace(group, members=tuple(member for member in group.members if fits(member.episode)))


def _last(stages: Mapping[str, Sequence[Group]]) -> Sequence[Group]:
    return list(stages.values())[-1]


def _spread(group: Group) -> float:
    """The population std of the whole rewards, an anchor that is credited apart included."""
    return float(np.std(rewards(group)))


def _rank(group: Group) -> tuple[float, str]:
    """Widest first; rounded, so that the order of members can't break a tie."""
    return (-round(_spread(group), 9), group.task.id)


def filtered(name: str, before: Sequence[Group], after: Sequence[Group]) -> Filtered:
    """What a filter did between two stages that share their members."""
    kept = [member for group in after for member in group.members]
    # members are shared between the stages, never copied, so identity tells who is left
    left = {id(member) for member in kept}
    removed = [member for group in before for member in group.members if id(member) not in left]
    return Filtered(
        name=name,
        groups=(len(after), len(before) - len(after)),
        episodes=(len(kept), len(removed)),
        correct=(_correct(kept), _correct(removed)),
    )


def _correct(members: Sequence[Scored]) -> float:
    return sum(member.score.parts.get("accuracy", 0.0) >= 0.5 for member in members) / max(1, len(members))
