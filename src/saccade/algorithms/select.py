"""Which groups are learned from: whole groups, filtered, ranked and cut to a target."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from saccade.config import Select
from saccade.errors import ConfigError
from saccade.types import End, Group, Scored


@dataclass(frozen=True, slots=True, kw_only=True)
class Filtered:
    """What one filter did: groups and episodes before it that it kept and removed, and how many of those were correct.

    The correct shares are of episodes with accuracy of at least one half; 0.0 where there was none.

    >>> Filtered(name="spread", groups=(6, 2), episodes=(48, 16), correct=(0.5, 1.0)).groups[1]
    2
    """

    name: str  # ends | survivors | spread | target
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

    In order: `ends` drops the episodes whose end is in `settings.drop_ends`; `survivors` drops groups with fewer than
    two episodes left; `spread` drops groups whose rewards' population std, over the survivors, is not above
    `settings.min_spread`; `target` takes the first groups, after ranking by that std from large to small (ties by task
    id) where `settings.rank` is "std", else as they came. ConfigError for an unknown end.
    """
    unknown = sorted(set(settings.drop_ends) - {end.value for end in End})
    if unknown:
        known = ", ".join(end.value for end in End)
        raise ConfigError(f"rl.select.drop_ends holds {unknown[0]!r}: an episode ends as one of {known}")
    # statistics of a group are derived from its members, so they are those of the survivors from here on
    whole = [_without(group, settings.drop_ends) for group in groups]
    compared = [group for group in whole if len(group.members) > 1]
    spread = [group for group in compared if group.spread > settings.min_spread]
    ranked = sorted(spread, key=_rank) if settings.rank == "std" else spread
    kept, spare = ranked[:target], ranked[target:]
    stages = (groups, whole, compared, spread, kept)
    names = ("ends", "survivors", "spread", "target")
    report = [_filtered(name, *pair) for name, *pair in zip(names, stages, stages[1:], strict=False)]
    return Selection(kept=tuple(kept), spare=tuple(spare), report=tuple(report), missing=target - len(kept))


def _without(group: Group, ends: Sequence[str]) -> Group:
    return replace(group, members=tuple(member for member in group.members if member.episode.end not in ends))


def _rank(group: Group) -> tuple[float, str]:
    """Widest first; rounded, so that the order of members can't break a tie."""
    return (-round(group.spread, 9), group.task.id)


def _filtered(name: str, before: Sequence[Group], after: Sequence[Group]) -> Filtered:
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
