"""Two evaluations of the same tasks: how they differ, how sure that is, and what tools gained and harmed.

Every number is over tasks: attempts at one are averaged first, and a task is right from an average of one half on.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from saccade.errors import DataError
from saccade.evaluation.expansion import Expansion, read_expansion
from saccade.evaluation.intervals import Estimate, estimate, same_media
from saccade.evaluation.metrics import (
    RIGHT,
    Difference,
    accuracy_of,
    by_task,
    calls_made,
    paired_difference,
    undecided,
    units_of,
)
from saccade.evaluation.report import Grid, gained, ranged, weights_of
from saccade.evaluation.run import differences, read_records
from saccade.evaluation.verdicts import judged, read_verdicts
from saccade.types import Scored, Task, Unscored

UNSURE = 0.05  # a p-value from here on is no evidence of a difference


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """What tools are worth, over the `called` tasks: those in which the evaluation with tools wrote a call.

    `gain` is the share of them that are right with tools and wrong without, `harm` the share that are wrong with tools
    and right without; the rest are right, or wrong, in both. `with_tools` names the evaluation that has them.

    >>> gain = Estimate(mean=0.3, low=0.2, high=0.4, n=90)
    >>> Tools(with_tools="b", called=90, gain=gain, harm=Estimate(mean=0.1, low=0.0, high=0.2, n=90)).net
    0.2
    """

    with_tools: str
    called: int
    gain: Estimate
    harm: Estimate

    @property
    def net(self) -> float:
        """What is gained less what is harmed."""
        return round(self.gain.mean - self.harm.mean, 12)


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """What two limited evaluations say of all `tasks`: their accuracies and the difference, each task counting for
    those of its stratum that were not attempted. `unseen` is the share of all tasks in strata of which none was.

    >>> Whole.__dataclass_fields__["tasks"].type
    <class 'int'>
    """

    tasks: int
    unseen: float
    accuracy: tuple[Estimate, Estimate]
    difference: Difference


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two evaluations by name, each with its accuracy, and the second minus the first with a paired bootstrap interval.

    Of the tasks that are right in one alone, `only_first` are right in the first and `only_second` in the second;
    `p_value` is McNemar's exact test of the two numbers. `tools` is None unless one of the two, and no other, has run
    tools. Tasks that go together, such as those about one clip, make as many `units`, and intervals are over these;
    McNemar's test takes tasks for independent. `other` names what else the two differ in, such as weights. `undecided`
    are the answers that only a judge can tell right or wrong, and none did: they count as wrong. `visual_tokens` are
    those of an attempt on average, overview and all that was shown later. `whole` is what the two say of all tasks,
    where a limit chose theirs.

    >>> Pair.__dataclass_fields__["p_value"].type
    <class 'float'>
    """

    first: str
    second: str
    accuracy: tuple[Estimate, Estimate]
    difference: Difference
    units: int
    only_first: int
    only_second: int
    p_value: float
    tools: Tools | None
    other: tuple[str, ...] = ()
    undecided: tuple[int, int] = (0, 0)
    visual_tokens: tuple[float, float] = (0.0, 0.0)
    whole: Whole | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        tools = None if self.tools is None else {**asdict(self.tools), "net": self.tools.net}
        return {**asdict(self), "tools": tools}


def compare(
    first: tuple[str, Sequence[Scored]],
    second: tuple[str, Sequence[Scored]],
    *,
    expansion: Expansion | None = None,
    unit: Callable[[Task], str] = same_media,
) -> Pair:
    """Two evaluations, each with its name; `expansion` says how the tasks of a limit stand for the whole. Tasks of one
    `unit` aren't independent of each other, and intervals are over units.

    Raises DataError where their tasks are not the same.
    """
    (old_name, old), (new_name, new) = first, second
    _check_tasks(first, second)
    before, after, units = _right(old), _right(new), units_of(old, unit)
    only = [sum(one[task] and not other[task] for task in one) for one, other in ((before, after), (after, before))]
    return Pair(
        first=old_name,
        second=new_name,
        accuracy=(_accuracy(old, units), _accuracy(new, units)),
        difference=paired_difference(old, new, units=units),
        units=len({*units.values()}),
        only_first=only[0],
        only_second=only[1],
        p_value=mcnemar(*only),
        tools=_tools(first, second, units),
        undecided=(sum(map(undecided, old)), sum(map(undecided, new))),
        visual_tokens=(_visual_tokens(old), _visual_tokens(new)),
        whole=_whole(old, new, expansion, units),
    )


def _whole(
    old: Sequence[Scored], new: Sequence[Scored], expansion: Expansion | None, units: Mapping[str, str]
) -> Whole | None:
    weights = weights_of(old, expansion)
    if expansion is None or not weights:
        return None
    return Whole(
        tasks=expansion.whole,
        unseen=expansion.unseen,
        accuracy=(_accuracy(old, units, weights), _accuracy(new, units, weights)),
        difference=paired_difference(old, new, weights=weights, units=units),
    )


def compare_files(first: Path, second: Path, *, unit: Callable[[Task], str] = same_media) -> Pair:
    """Two results files, with the verdicts of judges that are kept beside them; see `compare`.

    Raises DataError where one holds no result, or their tasks are not the same.
    """
    # The files of two runs often have one name, and are told apart by their paths.
    names = (first.stem, second.stem) if first.stem != second.stem else (str(first), str(second))
    records = [read_records(path) for path in (first, second)]
    found = []
    for path, name, each in zip((first, second), names, records, strict=True):
        scored = [record.scored for record in each if isinstance(record.scored, Scored)]
        if not scored:
            lost = [record.scored.reason for record in each if isinstance(record.scored, Unscored)]
            raise DataError(f"{path} holds no result{f': {lost[0]}' if lost else ''}; evaluate it first")
        found.append((name, judged(scored, read_verdicts(path))))
    # They are of the same tasks, and so of the same sample of the whole.
    expansion = read_expansion(first) or read_expansion(second)
    pair = compare(found[0], found[1], expansion=expansion, unit=unit)
    other = differences(records[0][0].under, records[1][0].under)
    judges = [bool(read_verdicts(path)) for path in (first, second)]
    return replace(pair, other=(*other, *(["a judge in one of them alone"] if judges[0] != judges[1] else [])))


def mcnemar(only_first: int, only_second: int) -> float:
    """McNemar's exact test: how likely the two numbers are to differ at least so much if each of these tasks could as
    well have gone the other way; the two-sided binomial test of one of them in their sum at one half (the exact
    conditional test in Fagerland, Lydersen and Laake 2013, BMC Medical Research Methodology 13:91).

    >>> mcnemar(1, 9), mcnemar(0, 0), mcnemar(5, 5)
    (0.021484375, 1.0, 1.0)
    """
    n, least = only_first + only_second, min(only_first, only_second)
    # Whole numbers until the last division: neither factorials nor powers fit into a float.
    tail, term = 0, 1
    for k in range(least + 1):
        tail += term
        term = term * (n - k) // (k + 1)
    return min(1.0, 2 * tail / 2**n)


def _accuracy(
    scored: Sequence[Scored], units: Mapping[str, str], weights: Mapping[str, float] | None = None
) -> Estimate:
    means = {task: fmean(map(accuracy_of, attempts)) for task, attempts in by_task(scored).items()}
    return estimate(list(means.values()), list(means), weights=weights, units=units)


def _visual_tokens(scored: Sequence[Scored]) -> float:
    return fmean(each.episode.usage.visual_tokens for each in scored)


def _right(scored: Sequence[Scored]) -> dict[str, bool]:
    return {task: fmean(map(accuracy_of, attempts)) >= RIGHT for task, attempts in by_task(scored).items()}


def _check_tasks(first: tuple[str, Sequence[Scored]], second: tuple[str, Sequence[Scored]]) -> None:
    """Raises DataError where one evaluation has a task that the other has not, or has otherwise."""
    for (here, mine), (there, theirs) in ((first, second), (second, first)):
        own, others = ({key: each[0].episode.task.id for key, each in by_task(some).items()} for some in (mine, theirs))
        lone = [name for key, name in own.items() if key not in others]
        if not lone:
            continue
        # Of one id and not of one digest: its question, gold or options changed in between.
        if lone[0] in others.values():
            why = f"the task {lone[0]} is not the same in {here!r} and in {there!r}"
        else:
            why = f"{len(lone)} of the {len(own)} tasks of {here!r} are not in {there!r}, such as {lone[0]}"
        raise DataError(f"{why}; compare evaluations of the same tasks (--limit, --shard and --tasks choose them)")


def _tools(
    first: tuple[str, Sequence[Scored]], second: tuple[str, Sequence[Scored]], units: Mapping[str, str]
) -> Tools | None:
    """What tools are worth; None unless they ran in one of the two evaluations alone."""
    # Calls can be written without any tool there; that something was executed says that there were tools.
    ran = [any(result.executed for each in scored for result in each.episode.results) for _, scored in (first, second)]
    if ran[0] == ran[1]:
        return None
    (name, using), (_, bare) = (first, second) if ran[0] else (second, first)
    right, control = _right(using), _right(bare)
    called = [task for task, each in by_task(using).items() if any(calls_made(one.episode) for one in each)]
    gain = estimate([float(right[task] and not control[task]) for task in called], called, units=units)
    harm = estimate([float(control[task] and not right[task]) for task in called], called, units=units)
    return Tools(with_tools=name, called=len(called), gain=gain, harm=harm)


def _over(pair: Pair) -> str:
    together = f", drawn as the {pair.units} files or problems that they are about"
    return f"{pair.difference.n} tasks{together if pair.units < pair.difference.n else ''}"


# ---- as tables -----------------------------------------------------------------------------------------------------


def grids(pair: Pair) -> list[Grid]:
    """The pair as a table."""
    verdict = "no evidence of a difference" if pair.p_value >= UNSURE else "evidence of a difference"
    alone = " if tasks were independent" if pair.units < pair.difference.n else ""
    rows = [
        (f"accuracy of {pair.first}", ranged(pair.accuracy[0])),
        (f"accuracy of {pair.second}", ranged(pair.accuracy[1])),
        ("difference, paired", f"{gained(pair.difference)} over {_over(pair)}"),
        (f"right in {pair.first} alone / in {pair.second} alone", f"{pair.only_first} / {pair.only_second}"),
        ("McNemar's exact test", f"p = {pair.p_value:.3g}, {verdict}{alone}"),
    ]
    if pair.whole is not None:
        rows.insert(0, ("a limited sample", f"{pair.difference.n} of {pair.whole.tasks} tasks, even over strata"))
        named = zip((pair.first, pair.second), pair.whole.accuracy, strict=True)
        rows += [(f"accuracy of {name}, {pair.whole.tasks} tasks, estimated", ranged(each)) for name, each in named]
        rows.append((f"difference, {pair.whole.tasks} tasks, estimated", gained(pair.whole.difference)))
        if pair.whole.unseen:
            stood = f"{pair.whole.unseen:.0%}, for which their neighbours stand"
            rows.append(("tasks in strata of which none was asked", stood))
    if pair.tools is not None:
        rows += [
            (f"tasks with a call in {pair.tools.with_tools}", str(pair.tools.called)),
            ("tool gain (of them, right only with tools)", ranged(pair.tools.gain)),
            ("tool harm (of them, right only without)", ranged(pair.tools.harm)),
        ]
    old, new = pair.visual_tokens
    if old or new:
        share = f", {new / old:.2f} of the first" if old else ""
        rows.append(("visual tokens per attempt", f"{old:.1f} / {new:.1f}{share}"))
    if any(pair.undecided):
        rows.append(("undecided without a judge, counted as wrong", " / ".join(map(str, pair.undecided))))
    if pair.other:
        rows.append(("they were made with other", ", ".join(pair.other)))
    return [Grid(title=f"{pair.second} − {pair.first}", header=("", ""), rows=tuple(rows))]
