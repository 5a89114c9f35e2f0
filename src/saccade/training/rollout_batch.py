"""Lots: the groups that one step learns from, rolled out in rounds until there are enough of them.

    prompts ──take──> roll_out ──groups──> select ── enough? ──> Lot
       ▲                 ▲                   │ no: another round, at most `max_rounds`
       │                 └───────────────────┘
       └── prompts of groups beyond the target, and of stragglers, where `spare: requeue`

A spare group's prompt goes again, its episodes don't: by the time they were learned from, their weights would be one
version older than those of everybody else in their step. So requeueing makes nothing stale, whatever `rl.staleness` is;
what it costs is rolling the group out anew, and what it saves is the prompt, which else would wait for its next epoch.

With `overlaunch` above 1 a round begins more groups than it waits for. The last to end are cancelled, whole: a step
doesn't wait for its slowest conversation. Long attempts are then learned from less often than short ones. Attempts of
such a group that had ended are lost with it; they are counted apart from those that are cancelled, and so are their
tokens. How much had been sampled of the others only the engine knew.
"""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from saccade.algorithms.gating import draw
from saccade.algorithms.select import Filtered, Selection, select
from saccade.errors import EngineError
from saccade.evaluation.metrics import failed, step_metrics
from saccade.protocols import Agent, Context
from saccade.rollouts.collect import collect
from saccade.rollouts.run import Run, run_episode
from saccade.rollouts.stage import Stage
from saccade.training.prompts import Prompts, epoch_at, task_at
from saccade.types import Episode, Group, Task, seed_of
from saccade.waiting import together, until

Seen = Callable[[int, Sequence[Group]], None]
Ended = defaultdict[int, list[Episode]]  # by place


@dataclass(frozen=True, slots=True, kw_only=True)
class Lot:
    """The groups that step `number` (from 0) learns from, and what was measured of all that were rolled out for it.

    >>> Lot(number=3, kept=(), missing=8, tokens=640, measured={"reward": 0.5}).missing
    8
    """

    number: int
    kept: tuple[Group, ...]
    missing: int  # groups short of the target
    tokens: int  # sampled for it, those of groups that were not kept included
    measured: Mapping[str, float]

    @property
    def held(self) -> int:
        """Tokens of all its conversations, which is what its memory grows with; pictures are on disk."""
        episodes = (episode for group in self.kept for member in group.members for episode in member.episode.walk())
        return sum(len(episode.ledger) for episode in episodes)


async def draw_lot(
    stage: Stage,
    tasks: Sequence[Task],
    prompts: Prompts,
    number: int,
    *,
    seen: Seen | None = None,
    run: Run = run_episode,
) -> tuple[Lot, Prompts]:
    """Roll out what step `number` learns from, each attempt `run`, and what is left of the prompts.

    A later round takes as many prompts as groups are missing, oversampled like the first. `seen` is told of all groups.
    Raises EngineError where no attempt of the step got anywhere, or none could be graded.
    """
    settings = stage.recipe.rl
    found: dict[int, Group] = {}
    late: list[int] = []
    ended: Ended = defaultdict(list)
    wanted, rounds, chosen = settings.prompts, 0, select([], settings.select, target=settings.prompts)
    while chosen.missing and rounds < settings.select.max_rounds:
        awaited, begun = settings.select.launched(wanted)
        places, prompts = prompts.take(begun)
        rolled = await roll_out(stage, tasks, places, number, earlier=found, enough=awaited, run=run, ended=ended)
        late += [place for place in places if place not in rolled]
        found |= rolled
        chosen = select(list(found.values()), settings.select, target=settings.prompts)
        wanted, rounds = chosen.missing, rounds + 1
    groups = list(found.values())
    refuse_broken(groups, number)
    if seen is not None:
        seen(number, groups)
    if settings.select.spare == "requeue":
        prompts = prompts.again([*_places_of(chosen.spare, found), *late])
    lost = [episode for place in late for episode in ended[place]]
    cancelled = {
        "groups/cancelled": float(len(late)),
        "episodes/cancelled": float(settings.group * len(late) - len(lost)),
        "episodes/discarded": float(len(lost)),
    }
    measured = {**step_metrics(groups), **_selection(chosen), **cancelled, "rounds": float(rounds)}
    sampled = [*lost, *(member.episode for group in groups for member in group.members)]
    tokens = sum(episode.usage.sampled_tokens for episode in sampled)
    return Lot(number=number, kept=chosen.kept, missing=chosen.missing, tokens=tokens, measured=measured), prompts


async def roll_out(
    stage: Stage,
    tasks: Sequence[Task],
    places: Sequence[int],
    number: int,
    *,
    earlier: Collection[int] = (),
    enough: int | None = None,
    run: Run = run_episode,
    ended: Ended | None = None,
) -> dict[int, Group]:
    """A group per place, for step `number`, in the order of the places; `earlier` are those it rolled out before.

    Once `enough` of them have ended (None: all) the others are cancelled. `ended` keeps the attempts that end, by
    place. Each prompt has the frame budget of its own epoch. A task that is drawn again in the same step is attempted
    with other seeds than the first time.
    """
    seed = stage.recipe.seed
    drawn = Counter(task_at(tasks, seed, place).digest for place in earlier)
    parts: dict[tuple[int, int], list[int]] = {}
    for place in places:
        digest = task_at(tasks, seed, place).digest
        parts.setdefault((epoch_at(tasks, seed, place), drawn[digest]), []).append(place)
        drawn[digest] += 1
    found: dict[int, Group] = {}
    full = asyncio.Event()

    def keep(place: int, group: Group) -> None:
        found[place] = group
        if len(found) == enough:
            full.set()

    attempts: Ended = defaultdict(list) if ended is None else ended
    rolling = [_part(stage, tasks, part, number, *key, keep, run, attempts) for key, part in parts.items()]
    await until(full, together(rolling))
    return {place: found[place] for place in places if place in found}


async def _part(
    stage: Stage,
    tasks: Sequence[Task],
    places: Sequence[int],
    number: int,
    epoch: int,
    again: int,
    keep: Callable[[int, Group], None],
    run: Run,
    ended: Ended,
) -> None:
    """The groups of places of one epoch whose tasks differ, each drawn for the `again`-th time in this step."""
    settings, seed, budgets = stage.recipe.rl, stage.recipe.seed, stage.recipe.gating.frames
    wanted = [task_at(tasks, seed, place) for place in places]
    place_of = {task.digest: place for task, place in zip(wanted, places, strict=True)}

    async def watched(task: Task, agent: Agent, ctx: Context) -> Episode:
        episode = await run(task, agent, ctx)
        ended[place_of[task.digest]].append(episode)
        return episode

    await collect(
        wanted,
        stage.agent,
        stage.context(seed=seed),
        size=settings.group,
        score=stage.score,
        epoch=seed_of("again", number, again) if again else number,
        frames=lambda task: draw(budgets, run_seed=seed, epoch=epoch, task=task),
        done=lambda index, group: keep(places[index], group),
        run=watched,
    )


def _places_of(groups: Sequence[Group], found: Mapping[int, Group]) -> list[int]:
    # Filters make new groups of the same members, so it is these that tell where a group comes from.
    place_of = {id(member): place for place, group in found.items() for member in group.members}
    return [place_of[id(group.members[0])] for group in groups]


def refuse_broken(groups: Sequence[Group], number: int) -> None:
    """Stop where no attempt of a step got anywhere: going on would only count steps. Raises EngineError."""
    episodes = [member.episode for group in groups for member in group.members]
    ungraded = [each for group in groups for each in group.ungraded]
    if ungraded and not episodes:
        many = f"none of the {len(ungraded)} attempts of step {number + 1} could be graded"
        raise EngineError(f"{many}, the first because of: {ungraded[0].reason}")
    # Without a turn the prompt itself had no room in the context.
    if all(failed(episode) for episode in episodes):
        reason = next((episode.error for episode in episodes if episode.error), "no reason given")
        raise EngineError(f"all {len(episodes)} attempts of step {number + 1} broke, the first with: {reason}")


def _selection(chosen: Selection) -> dict[str, float]:
    kept = {"groups/kept": float(len(chosen.kept)), "groups/missing": float(chosen.missing)}
    for one in chosen.report:
        kept |= filter_metrics(one)
    return kept


def filter_metrics(one: Filtered) -> dict[str, float]:
    """What a filter kept and dropped, and how much of that was correct: flat keys for the run's log."""
    correct = dict(zip((f"correct/kept/{one.name}", f"correct/dropped/{one.name}"), one.correct, strict=True))
    counts = {"groups": one.groups, "episodes": one.episodes}
    dropped = {f"{what}/dropped/{one.name}": float(count[1]) for what, count in counts.items()}
    return {**dropped, **{f"episodes/kept/{one.name}": float(one.episodes[0])}, **correct}
