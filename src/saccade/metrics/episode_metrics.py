"""What episodes say about a model: means with intervals, tables by slice, and one line of numbers per training step.

Pure: the same episodes give the same numbers, in any order. Denominators are fixed: an episode that broke scores 0 and
is counted, and so is one without an answer. Intervals are over files: see `intervals`.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

import numpy as np

from saccade.algorithms.anchoring import rewards, worth
from saccade.errors import DataError
from saccade.evaluation.intervals import Estimate, estimate, same_media
from saccade.evaluation.options import published
from saccade.types import End, Episode, Form, Group, Scored, Task

RIGHT = 0.5  # an accuracy from here on counts as solved
BROKEN = frozenset({End.TOOL_BROKEN, End.ABORTED})

Slice = Callable[[Scored], str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """After minus before on the tasks that both attempted; `unpaired` tasks are in one of the two only.

    >>> Difference(mean=0.2, low=0.1, high=0.3, n=8, better=3, worse=1, unpaired=0).better
    3
    """

    mean: float
    low: float
    high: float
    n: int
    better: int
    worse: int
    unpaired: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Accuracy on a slice of the tasks; `floor` is what the best constant answer scores there, where that is known.

    >>> Row(name="when", accuracy=Estimate(mean=0.5, low=0.25, high=0.75, n=8), floor=0.1, calls=2.0).name
    'when'
    """

    name: str
    accuracy: Estimate
    floor: float | None
    calls: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """An evaluation in numbers; rates are per episode, `ends` are shares of the episodes.

    >>> Summary.__dataclass_fields__["errors"].type
    <class 'int'>
    """

    tasks: int
    episodes: int
    accuracy: Estimate
    floor: float | None
    compliance: Estimate
    calls: float
    executed: float
    succeeded: float
    tool_share: float
    turns: float
    sampled_tokens: float
    visual_tokens: float
    seconds: float
    errors: int
    unanswered: int
    ungraded: int
    ends: Mapping[str, float]
    slices: Mapping[str, tuple[Row, ...]]
    at_k: Mapping[str, float] = field(default_factory=dict)
    undecided: int = 0  # answers that only a judge can tell right or wrong, and none did: they count 0
    whole: Estimate | None = None  # the accuracy over all `whole_tasks`, where only those of a limit were attempted
    whole_tasks: int = 0


# ---- one episode ---------------------------------------------------------------------------------------------------


def failed(episode: Episode) -> bool:
    """Whether the episode broke for a reason that isn't the model's, or its prompt alone was too long."""
    return episode.end in BROKEN or (episode.end is End.CONTEXT_FULL and not episode.turns)


def task_of(scored: Scored) -> str:
    """Whose attempt it is, by digest: the same for all orders of the options."""
    return published(scored.episode.task).digest


def accuracy_of(scored: Scored) -> float:
    """The accuracy of an episode in [0, 1]; 0 where it broke."""
    return 0.0 if failed(scored.episode) else scored.score.parts.get("accuracy", 0.0)


def calls_made(episode: Episode) -> int:
    """The calls that the main agent wrote, malformed ones included."""
    return sum(len(turn.reply.calls) for turn in episode.turns)


def calls_leaked(episode: Episode) -> int:
    """Those of them that were written in the leaked form."""
    return sum(call.form is Form.LEAKED for turn in episode.turns for call in turn.reply.calls)


def question_of(task: Task) -> str | None:
    """The kind of question as the data set names it, where it does."""
    named = task.extras.get("question")
    return named if isinstance(named, str) else None


def response_tokens(episode: Episode) -> int:
    """The tokens that the main agent sampled, its sub-agents' not counted."""
    return len(episode.ledger.sampled_tokens())


def overview_times(episode: Episode) -> tuple[float, ...]:
    """The times (seconds) of the frames that the prompt showed."""
    slots = episode.ledger.segments[0].slots if episode.ledger.segments else ()
    return tuple(slot.picture.time for slot in slots if slot.picture.time is not None)


def undecided(scored: Scored) -> bool:
    """Whether only a judge can say what it is worth; its accuracy is 0 until one does."""
    return bool(scored.score.parts.get("undecided"))


# ---- intervals -----------------------------------------------------------------------------------------------------


def paired_difference(
    before: Sequence[Scored],
    after: Sequence[Scored],
    *,
    weights: Mapping[str, float] | None = None,
    units: Mapping[str, str] | None = None,
) -> Difference:
    """The difference in accuracy, after minus before, by a bootstrap over the units of the tasks of both.

    Attempts at one task are averaged first; `weights` and `units` are those of `estimate`; tasks about the same files
    are a unit by default. DataError where no task is in both.
    """
    # Pairing takes out what makes some tasks harder than others, which is most of the variance.
    old, new = _task_means(before), _task_means(after)
    shared = sorted(old.keys() & new.keys())
    if not shared:
        raise DataError("the two evaluations share no task, so there is no paired difference")
    deltas = [new[task] - old[task] for task in shared]
    found = estimate(deltas, shared, weights=weights, units=units or units_of(before))
    return Difference(
        mean=found.mean,
        low=found.low,
        high=found.high,
        n=found.n,
        better=sum(delta > 1e-9 for delta in deltas),
        worse=sum(delta < -1e-9 for delta in deltas),
        unpaired=len(old.keys() ^ new.keys()),
    )


def _task_means(scored: Iterable[Scored]) -> dict[str, float]:
    return {task: fmean(accuracy_of(each) for each in attempts) for task, attempts in by_task(scored).items()}


def units_of(scored: Iterable[Scored], unit: Callable[[Task], str] = same_media) -> dict[str, str]:
    """What each task is drawn with, by its digest: by default all tasks about the same files."""
    return {task_of(each): unit(published(each.episode.task)) for each in scored}


def by_task(scored: Iterable[Scored]) -> dict[str, list[Scored]]:
    """The attempts at each task, by its digest, in order."""
    groups: defaultdict[str, list[Scored]] = defaultdict(list)
    for each in scored:
        groups[task_of(each)].append(each)
    return groups


# ---- an evaluation -------------------------------------------------------------------------------------------------


def summarize(
    scored: Sequence[Scored],
    *,
    floors: Mapping[str, float] | None = None,
    slices: Mapping[str, Slice] | None = None,
    ungraded: int = 0,
) -> Summary:
    """An evaluation in numbers. `floors` are blind floors by question kind; `slices` adds tables to kind, question and
    frame budget: a function names the row an episode belongs to, or None. `ungraded` attempts are counted, and in none
    of the means. DataError where there is no episode.
    """
    tasks, units = list(map(task_of, scored)), units_of(scored)
    cut: dict[str, Slice] = {
        "kind": lambda each: each.episode.task.kind.value,
        "question": lambda each: question_of(each.episode.task),
        "frames": lambda each: None if each.episode.frames is None else f"K={each.episode.frames}",
        **(slices or {}),
    }
    known = floors or {}
    return Summary(
        tasks=len(set(tasks)),
        episodes=len(scored),
        accuracy=_accuracy(scored),
        floor=_floor(scored, known),
        compliance=estimate([each.score.parts.get("compliance", 0.0) for each in scored], tasks, units=units),
        slices={name: table(scored, by, known) for name, by in cut.items()},
        at_k=at_k(scored),
        ends=_ends(scored),
        errors=sum(failed(each.episode) for each in scored),
        unanswered=sum(each.episode.answer is None and not failed(each.episode) for each in scored),
        ungraded=ungraded,
        undecided=sum(map(undecided, scored)),
        whole=None,
        whole_tasks=0,
        seconds=fmean(each.episode.usage.seconds for each in scored),
        **_behaviour(scored),
    )


def table(scored: Sequence[Scored], by: Slice, floors: Mapping[str, float]) -> tuple[Row, ...]:
    """One row per name that `by` gives, names in order (numbers in them by value)."""
    rows: defaultdict[str, list[Scored]] = defaultdict(list)
    for each in scored:
        name = by(each)
        if name is not None:
            rows[name].append(each)
    return tuple(
        Row(
            name=name,
            accuracy=_accuracy(rows[name]),
            floor=_floor(rows[name], floors),
            calls=fmean(calls_made(each.episode) for each in rows[name]),
        )
        for name in sorted(rows, key=lambda name: (len(name) if name.startswith("K=") else 0, name))
    )


def _accuracy(scored: Sequence[Scored]) -> Estimate:
    return estimate(list(map(accuracy_of, scored)), list(map(task_of, scored)), units=units_of(scored))


def _floor(scored: Sequence[Scored], floors: Mapping[str, float]) -> float | None:
    """The mean blind floor of these episodes' questions; None unless it is known for each."""
    known = [floors.get(question_of(each.episode.task) or "") for each in scored]
    return None if None in known else fmean(value for value in known if value is not None)


def _behaviour(scored: Sequence[Scored]) -> dict[str, float]:
    """What episodes do and cost, on average."""
    episodes = [each.episode for each in scored]
    results = [episode.results for episode in episodes]
    return {
        "calls": fmean(calls_made(episode) for episode in episodes),
        "executed": fmean(sum(result.executed for result in each) for each in results),
        "succeeded": fmean(sum(result.ok for result in each) for each in results),
        "tool_share": fmean(calls_made(episode) > 0 for episode in episodes),
        "turns": fmean(len(episode.turns) for episode in episodes),
        "sampled_tokens": fmean(episode.usage.sampled_tokens for episode in episodes),
        "visual_tokens": fmean(episode.usage.visual_tokens for episode in episodes),
    }


def _ends(scored: Sequence[Scored]) -> dict[str, float]:
    counts = Counter(each.episode.end.value for each in scored)
    return {end.value: counts[end.value] / len(scored) for end in End if counts[end.value]}


def at_k(scored: Sequence[Scored]) -> dict[str, float]:
    """avg@k and pass@k of an evaluation; see `rates_at_k`."""
    return rates_at_k([[accuracy_of(one) for one in each] for each in by_task(scored).values()])


def rates_at_k(values: Sequence[Sequence[float]]) -> dict[str, float]:
    """avg@n and pass@k for k = 2, 4, 8, … and n, the fewest attempts that any task had; empty where that is one.

    `values` holds the accuracies of each task's attempts. pass@k is the unbiased estimator 1 - C(m-c, k) / C(m, k)
    (Chen et al. 2021, arXiv 2107.03374, equation 1) with c of m attempts solved.

    >>> rates_at_k([(1, 0, 0), (0, 0, 0)])
    {'avg@3': 0.16666666666666666, 'pass@2': 0.33333333333333337, 'pass@3': 0.5}
    """
    n = min(map(len, values), default=1)
    if n < 2:
        return {}
    solved = [(len(each), sum(value >= RIGHT for value in each)) for each in values]
    found = {f"avg@{n}": fmean(map(fmean, values))}
    # With fewer draws than attempts the estimate has less noise: that is what it is for.
    for k in sorted({n, *(2**power for power in range(1, n.bit_length()) if 2**power < n)}):
        found[f"pass@{k}"] = fmean(1 - math.comb(m - c, k) / math.comb(m, k) for m, c in solved)
    return found


# ---- a training step -----------------------------------------------------------------------------------------------


def step_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """What one RL step's rollouts were worth and did: flat keys for the run's log.

    `reward` (an anchor that is credited apart included), `reward/<part>`, `accuracy`, `accuracy/<kind>`,
    `accuracy/question/<kind>`, `accuracy/K=<frames>`, `calls/K=<frames>`, `call_gain/K=<frames>` (mean reward of
    calling over skipping), `compliance`, `calls`, `calls/executed`, `calls/succeeded`, `calls/leaked`, `tool_share`,
    `turns`, `response_tokens` (main agent), `sampled_tokens` (with sub-agents), `visual_tokens`, `end/<reason>` shares,
    `errors`, `unanswered`, `ungraded` (share of all attempts; the others' shares are of those with a score), `solved`,
    `solved/all`, `solved/none` (shares of groups), `spread`. Empty where there is no group with a score.
    """
    scored = [member for group in groups for member in group.members]
    if not scored:
        return {}
    graded, ungraded = [group for group in groups if group.members], sum(len(group.ungraded) for group in groups)
    behaviour = _behaviour(scored)
    found = {"reward": fmean(worth(each.score) for each in scored), "accuracy": fmean(map(accuracy_of, scored))}
    # Compliance is a metric of its own, whether or not the recipe pays for it.
    parts = sorted({part for each in scored for part in each.score.parts} - {"compliance"})
    found |= {f"reward/{part}": fmean(each.score.parts.get(part, 0.0) for each in scored) for part in parts}
    found |= _by_slice(scored)
    found |= {"compliance": fmean(each.score.parts.get("compliance", 0.0) for each in scored)}
    found |= {"calls/executed": behaviour.pop("executed"), "calls/succeeded": behaviour.pop("succeeded"), **behaviour}
    found |= {"calls/leaked": fmean(calls_leaked(each.episode) for each in scored)}
    found |= {"response_tokens": fmean(response_tokens(each.episode) for each in scored)}
    found |= {f"end/{end}": share for end, share in _ends(scored).items()}
    found |= {
        "errors": fmean(failed(each.episode) for each in scored),
        "unanswered": fmean(each.episode.answer is None and not failed(each.episode) for each in scored),
        "ungraded": ungraded / (ungraded + len(scored)),
        "solved": fmean(group.solved for group in graded),
        "solved/all": fmean(group.solved == 1.0 for group in graded),
        "solved/none": fmean(group.solved == 0.0 for group in graded),
        "spread": fmean(float(np.std(rewards(group))) for group in graded),
    }
    return {key: float(value) for key, value in found.items()}


def _by_slice(scored: Sequence[Scored]) -> dict[str, float]:
    """Accuracy by kind, question and frame budget; calls, and what calling gains, by frame budget."""
    found: dict[str, list[float]] = {}
    called: dict[str, tuple[list[float], list[float]]] = {}
    for each in scored:
        episode, right, calls = each.episode, accuracy_of(each), calls_made(each.episode)
        found.setdefault(f"accuracy/{episode.task.kind.value}", []).append(right)
        question = question_of(episode.task)
        if question is not None:
            found.setdefault(f"accuracy/question/{question}", []).append(right)
        if episode.frames is not None:
            found.setdefault(f"accuracy/K={episode.frames}", []).append(right)
            found.setdefault(f"calls/K={episode.frames}", []).append(calls)
            called.setdefault(f"K={episode.frames}", ([], []))[calls > 0].append(worth(each.score))
    # Only where some called and some did not is there anything to compare.
    gains = {f"call_gain/{k}": fmean(yes) - fmean(no) for k, (no, yes) in called.items() if yes and no}
    return {**{key: fmean(values) for key, values in sorted(found.items())}, **dict(sorted(gains.items()))}
