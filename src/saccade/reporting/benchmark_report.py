"""A benchmark's scorecard: its report with intervals, what a question cost, and answers to look at.

    card = scorecard(benchmark, scored, results)   episodes, as the rule (and a judge) marked them, counted
    keep(path, card)                               evaluations/videomme.report.json; `read_cards` reads them all

Intervals are 95 % percentile bootstraps over the benchmark's units (`Benchmark.unit`): questions about one video, or
variants of one problem, are drawn together, so that an interval isn't narrower than they may make it. Everything is
worked out again in each resample, so the intervals are of the published metrics themselves, whatever they average.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path
from statistics import fmean

import numpy as np

from saccade.config import Recipe
from saccade.data.record import typed
from saccade.errors import DataError
from saccade.evaluation.benchmarks._answers import final_answer
from saccade.evaluation.benchmarks._benchmark import (
    Benchmark,
    Extractor,
    Metrics,
    Report,
    Result,
    averaged,
    names_of,
    report,
)
from saccade.evaluation.expansion import Expansion
from saccade.evaluation.intervals import SEED, estimate
from saccade.evaluation.metrics import calls_made
from saccade.rollouts.stage import takes_text
from saccade.runlog import write_text
from saccade.types import Scored, digest_of

RESAMPLES = 1000  # of a whole benchmark; each works out every metric again
SHOWN = 4  # answers of each sort
CARD = ".report.json"
LIMITED = "a limited sample"
UNEVEN = "rows of a table have equally many questions, whatever their sizes; an estimate of the whole weighs them by it"
LONGEST = 400  # letters of a text that is shown

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What a question took, on average over all attempts, those that broke included; `text_tokens` are all but visual.

    >>> Costs(calls=1.5, tool_share=0.9, turns=2.5, visual_tokens=900.0, text_tokens=350.0, seconds=4.0).calls
    1.5
    """

    calls: float
    tool_share: float
    turns: float
    visual_tokens: float
    text_tokens: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """An answer to look at; `sort` is error, unparsed, undecided, wrong, partly or right, `read` what the rule took.

    >>> Shown(sort="wrong", id="001-1", question="Which?", gold="C", said="It is B", read="B", value=0.0).read
    'B'
    """

    sort: str
    id: str
    question: str
    gold: str
    said: str
    read: str | None
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """What limited results say of all `questions` of a benchmark: its metrics, each question counting for those of its
    stratum that were not asked (`evaluation.expansion`), with their intervals, all in percent. `unseen` is the share of
    the questions in strata of which none was asked.

    >>> Whole(questions=2700, unseen=0.1, metrics={"accuracy": 61.5}, intervals={"accuracy": (55.0, 68.0)}).questions
    2700
    """

    questions: int
    unseen: float
    metrics: Mapping[str, float]
    intervals: Mapping[str, Interval]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scorecard(Report):
    """A report with what its page shows besides.

    `intervals` are those of `metrics`, `bounds` those of the `strata`, all in percent; `units` is how many were drawn
    from, `attempts` how many answers the `n` questions had; `conditions` say how they were asked. Where a limit chose
    the questions, `whole` is what they say of all.
    """

    attempts: int
    units: int
    conditions: Mapping[str, str]
    intervals: Mapping[str, Interval]
    bounds: Mapping[str, Mapping[str, Interval]]
    costs: Costs
    shown: tuple[Shown, ...]
    whole: Whole | None = None

    @property
    def read_by(self) -> str:
        """The extractor, and that only a part was asked where it was: such a score is another number."""
        return f"{self.extractor}, {LIMITED}" if LIMITED in self.conditions else self.extractor

    @property
    def interval(self) -> Interval:
        """The interval of the score."""
        return self.intervals[self.headline]


def scorecard(
    benchmark: Benchmark,
    scored: Sequence[Scored],
    results: Sequence[Result],
    *,
    extractor: Extractor = "official",
    judge: str = "",
    known: Mapping[str, str] | None = None,
    expansion: Expansion | None = None,
) -> Scorecard:
    """The scorecard of all episodes and their `results`, of which `judge` decided some; `known` are its conditions, and
    `expansion` says how the questions of a limit stand for the whole.

    DataError where there is no episode.
    """
    plain = report(benchmark, results, extractor=extractor, judge=judge)
    units = [benchmark.unit(each.task) for each in results]
    return Scorecard(
        **{each.name: getattr(plain, each.name) for each in fields(plain)} | {"reason": cut(plain.reason)},
        attempts=len(results),
        units=len(set(units)),
        conditions=dict(known or {}),
        intervals=intervals(results, units, benchmark.metrics),
        bounds={name: _bounds(results, units, name, benchmark) for name in benchmark.strata},
        costs=costs_of(scored),
        shown=shown(results),
        whole=None if expansion is None else _whole(results, units, benchmark.metrics, expansion),
    )


def _whole(results: Sequence[Result], units: Sequence[str], metrics: Metrics, expansion: Expansion) -> Whole:
    weighed = [replace(each, weight=expansion.weights[each.task.id]) for each in results]
    return Whole(
        questions=expansion.whole,
        unseen=expansion.unseen,
        metrics=averaged(metrics, weighed),
        intervals=intervals(weighed, units, metrics),
    )


def conditions(recipe: Recipe, weights: Path | None) -> dict[str, str]:
    """What a reader must know to compare a score: the model, and the settings under which it was asked."""
    evaluation, agent = recipe.evaluation, {**recipe.agent.settings, **recipe.evaluation.agent}
    served = recipe.engine.settings
    found = {
        "model": f"{served['model']} at {served['url']}" if takes_text(recipe) else str(weights or recipe.model.path),
        **({"tokens": "unknown: the server is asked in words, and they are estimated"} if takes_text(recipe) else {}),
        "agent": recipe.agent.name,
        **{f"agent's {name}": cut(str(value)) or "none" for name, value in agent.items()},
        "tools": "on" if evaluation.tools else "off",
        "temperature": f"{evaluation.temperature:g}",
        "tokens per reply": str(recipe.sampling.max_tokens),
        "seed": str(recipe.seed),
    }
    found |= {"frames": ", ".join(map(str, evaluation.frames))} if evaluation.frames else {}
    found |= {"attempts": f"{evaluation.repeat} at each question"} if evaluation.repeat > 1 else {}
    found |= {"options": "in another order for each attempt"} if evaluation.shuffle_options else {}
    return found | ({"at most": f"{evaluation.limit} questions", LIMITED: UNEVEN} if evaluation.limit else {})


def keep(results: Path, card: Scorecard) -> Path:
    """Write the card of an evaluation beside its results file."""
    return write_text(results.with_suffix(CARD), json.dumps(asdict(card), indent=1) + "\n")


def read_cards(folder: Path) -> dict[str, Scorecard]:
    """The cards of a run by the names of their evaluations, in order. DataError where there is none, or a bad one."""
    paths = sorted((folder / "evaluations").glob(f"*{CARD}"))
    if not paths:
        raise DataError(f"{folder} holds no evaluation on a benchmark; make one with `saccade eval {folder} --bench …`")
    return {path.name.removesuffix(CARD): read_card(path) for path in paths}


def read_card(path: Path) -> Scorecard:
    """One card. DataError where it is none."""
    try:
        return typed(json.loads(path.read_bytes()), Scorecard, str(path))
    except DataError as error:
        raise DataError(f"{error}; delete it and evaluate again") from error
    except ValueError as error:
        raise DataError(f"{path} can't be read: {error}; delete it and evaluate again") from error


# ---- intervals -----------------------------------------------------------------------------------------------------


def intervals(results: Sequence[Result], units: Sequence[str], statistic: Metrics) -> dict[str, Interval]:
    """Of each number of a statistic its 95 % interval; `units[i]` is what `results[i]` is drawn with.

    A unit that is drawn twice counts twice, as a unit of its own each time. Over several attempts the statistic is
    averaged, as in a report.
    """
    members: defaultdict[str, list[Result]] = defaultdict(list)
    for unit, result in zip(units, results, strict=True):
        members[unit].append(result)
    held = [members[unit] for unit in sorted(members)]
    step = 1 + max(each.attempt for each in results)

    def whole(sample: Sequence[Result]) -> dict[str, float]:
        return averaged(statistic, sample, turn=lambda each: each.attempt % step)

    @cache  # the same few copies are drawn again and again
    def drawn(place: int, time: int) -> list[Result]:
        return [replace(each, attempt=each.attempt + time * step) for each in held[place]]

    draws, found = np.random.default_rng(SEED), defaultdict[str, list[float]](list)
    for _ in range(RESAMPLES):
        times = Counter(draws.integers(0, len(held), len(held)).tolist())
        copies = (drawn(place, time) for place in sorted(times) for time in range(times[place]))
        for name, value in whole([each for copy in copies for each in copy]).items():
            found[name].append(value)
    # What a resample lacks, as a stratum that none of its units is of, has no say in the interval.
    bounds = {name: np.percentile(found[name], [2.5, 97.5]) for name in whole(results)}
    return {name: (float(low), float(high)) for name, (low, high) in bounds.items()}


def _bounds(results: Sequence[Result], units: Sequence[str], stratum: str, benchmark: Benchmark) -> dict[str, Interval]:
    """The interval of each row of a stratum's table, by the names of `Report.strata`."""
    rows: defaultdict[str, tuple[list[float], list[str]]] = defaultdict(lambda: ([], []))
    for unit, each in zip(units, results, strict=True):
        for name in names_of(benchmark.strata[stratum], each.task):
            values, clusters = rows[name]
            values.append(100 * each.value)
            clusters.append(unit)
    found = {name: estimate(values, clusters, resamples=RESAMPLES) for name, (values, clusters) in rows.items()}
    return {name: (found[name].low, found[name].high) for name in sorted(found)}


# ---- costs and answers ---------------------------------------------------------------------------------------------


def costs_of(scored: Sequence[Scored]) -> Costs:
    """The means over episodes, with their sub-agents'."""
    episodes = [each.episode for each in scored]
    usages = [each.usage for each in episodes]
    return Costs(
        calls=fmean(calls_made(each) for each in episodes),
        tool_share=fmean(calls_made(each) > 0 for each in episodes),
        turns=fmean(len(each.turns) for each in episodes),
        visual_tokens=fmean(each.visual_tokens for each in usages),
        text_tokens=fmean(each.prompt_tokens + each.sampled_tokens - each.visual_tokens for each in usages),
        seconds=fmean(each.seconds for each in usages),
    )


def shown(results: Sequence[Result]) -> tuple[Shown, ...]:
    """A few answers of each sort, what went wrong first; which ones depends on nothing but the tasks."""
    sorts: dict[str, list[Result]] = {sort: [] for sort in SORTS}
    for each in sorted(results, key=lambda each: digest_of("shown", each.task.id, each.attempt)):
        sorts[sort_of(each)].append(each)
    return tuple(_shown(sort, each) for sort, some in sorts.items() for each in some[:SHOWN])


SORTS = ("error", "unparsed", "undecided", "wrong", "partly", "right")


def sort_of(result: Result) -> str:
    """What became of an answer: one of SORTS."""
    if result.answer.error is not None:
        return "error"
    if result.mark.value is None:
        return "undecided"
    if result.unparsed:
        return "unparsed"
    return "wrong" if result.value <= 0 else "right" if result.value >= 1 else "partly"


def _shown(sort: str, result: Result) -> Shown:
    task, answer = result.task, result.answer
    return Shown(
        sort=sort,
        id=task.id,
        question=cut(task.question),
        gold=cut(" – ".join(map(str, task.gold)) if isinstance(task.gold, tuple) else str(task.gold)),
        said=cut(answer.error if answer.error is not None else final_answer(answer.text) or answer.text),
        read=None if result.mark.read is None else cut(result.mark.read),
        value=result.value,
    )


def cut(text: str) -> str:
    """Whatever a model or a data set said, short enough to be shown; lone surrogates are replaced.

    >>> cut("a" * 500)[-3:]
    'aa…'
    """
    # Half characters can't be written to a file.
    plain = text.strip().encode("utf-8", "replace").decode()
    return plain if len(plain) <= LONGEST else plain[:LONGEST] + "…"
