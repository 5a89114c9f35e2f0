"""What a benchmark is: where its rows lie, what they ask, two rules that mark answers, and the metric it is known by.

    tasks = benchmark.tasks(Path("Video-MME"))                  rows to tasks; counts and ids are checked
    results = grade(benchmark, tasks, answers)                  final answer, then the rule, for every task
    report(benchmark, results)                                  the metric over all tasks, whatever went wrong

`official` is the published rule to the letter, its oddities included; `tolerant` reads what a person would. Both get
the final answer alone (`final_answer`), since no published rule knows of reasoning, calls or tags. Denominators are
fixed: what broke, what has no answer and what couldn't be read counts 0, and is counted.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import fsum
from pathlib import Path
from statistics import fmean
from typing import Literal

from saccade.data.raw import Row
from saccade.errors import DataError
from saccade.evaluation.benchmarks._answers import final_answer
from saccade.evaluation.benchmarks._rows import Copy
from saccade.evaluation.intervals import same_media
from saccade.evaluation.metrics import rates_at_k
from saccade.media.subtitles import subtitles_path
from saccade.types import Task

Extractor = Literal["official", "tolerant"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """What a rule read in an answer (None: nothing), and its worth in [0, 1]; None where only a judge can say.

    >>> Mark(read="B", value=1.0).read
    'B'
    """

    read: str | None
    value: float | None


UNPARSED = Mark(read=None, value=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came of a task: all that the model said, untouched, or why it could say nothing.

    >>> Answer(text="", error="the video can't be decoded").error
    "the video can't be decoded"
    """

    text: str
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A task with its answer and its mark; `attempt` counts the answers to one task, where it was put several times.

    `weight` is how often it counts in a mean, where it stands for others that were not asked.
    """

    task: Task
    answer: Answer
    mark: Mark
    attempt: int = 0
    weight: float = 1.0

    @property
    def value(self) -> float:
        """What it counts; 0 while it is undecided."""
        return self.mark.value or 0.0

    @property
    def open(self) -> bool:
        """Whether only a judge can say what it is worth."""
        return self.mark.value is None

    @property
    def unparsed(self) -> bool:
        """Whether there was an answer in which the rule found none."""
        return self.answer.error is None and self.mark.read is None


Rule = Callable[[str, Task], Mark]
Names = Callable[[Task], str | Sequence[str] | None]
Metrics = Callable[[Sequence[Result]], dict[str, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Criterion:
    """What a judge is told about answers that no rule decides: when one is right, what was asked, the reference.

    Where there is a `reading`, the judge first reads the answer as that tells it to, of its last `words` (0: of all),
    and the rule marks what it read; only what this leaves open is compared. With `every` it reads the answers that the
    rule would have decided as well, but for tasks of which the reading is "".

    >>> Criterion(prompt="Right is ...", question=lambda task: task.question).prompt
    'Right is ...'
    """

    question: Callable[[Task], str]
    prompt: str = ""
    gold: Callable[[Task], str] = lambda task: str(task.gold)
    reading: Callable[[Task], str] | None = None
    words: int = 0
    every: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """A benchmark: `read` makes a row's tasks, `metrics` are in percent, and `strata` name a task's rows per table.

    Results count by their weight in `metrics` (`mean`). `counts` holds how many tasks a whole copy has, per stratum
    where that is published. `hub` is the data set's name on the Hugging Face hub, `patterns` the files of its split
    there, the preferred ones first. Tasks of one `unit` aren't independent of each other: those about one video, or the
    variants of one problem; intervals are over units. Tasks that `metrics` read `together`, such as the variants of a
    question, are asked together or not at all. `ordered` says why options must keep their published order, where they
    must. Of the archives `packed` everything is wanted, though rows don't name it: subtitles, which `subtitled` videos
    of a whole copy have.
    """

    name: str
    hub: str
    patterns: tuple[str, ...]
    count: int
    read: Callable[[Row, Copy], Iterable[Task]]
    official: Rule
    tolerant: Rule
    headline: str
    metrics: Metrics
    strata: Mapping[str, Names] = field(default_factory=dict)
    counts: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    unit: Callable[[Task], str] = same_media
    together: Callable[[Task], str] = lambda task: task.id
    ordered: str = ""
    packed: tuple[str, ...] = ()
    subtitled: int | None = None
    criterion: Criterion | None = None  # where rules leave answers to a judge

    def stream(self, root: Path) -> Iterator[Task]:
        """The tasks of a local copy one at a time, nothing checked but each row by itself."""
        copy = Copy(root=root)
        for row in copy.rows(*self.patterns):
            yield from self.read(row, copy)

    def tasks(self, root: Path, *, subset: bool = False) -> list[Task]:
        """The tasks of a local copy, a folder or one file of rows; media needn't be there yet (`missing_media`).

        Raises DataError for a missing split, a bad row, a repeated id and, but for a `subset`, a wrong count.
        """
        found = list(self.stream(root))
        twice = [name for name, times in Counter(task.id for task in found).items() if times > 1]
        if twice:
            raise DataError(f"{root}: {self.name} holds the id {twice[0]} twice; download the data set again")
        if not found:
            raise DataError(f"{root}: {self.name} holds no question; download the data set again")
        # A copy that lacks rows would be compared with published numbers as if it were whole.
        if not subset:
            self._check_counts(found, root)
        return found

    def rule(self, extractor: Extractor) -> Rule:
        """One of the two rules by its name."""
        return self.official if extractor == "official" else self.tolerant

    def _check_counts(self, tasks: Sequence[Task], root: Path) -> None:
        mend = "complete the copy, or take it for a subset with --subset"
        if len(tasks) != self.count:
            raise DataError(f"{root}: {self.name} has {self.count} questions, this copy holds {len(tasks)}; {mend}")
        for stratum, wanted in self.counts.items():
            held = Counter(name for task in tasks for name in names_of(self.strata[stratum], task))
            wrong = next((name for name in sorted({*wanted, *held}) if wanted.get(name, 0) != held[name]), None)
            if wrong is not None:
                known = f"{wanted.get(wrong, 0)} questions of {stratum} {wrong!r}"
                raise DataError(f"{root}: {self.name} has {known}, this copy holds {held[wrong]}; {mend}")


def names_of(names: Names, task: Task) -> tuple[str, ...]:
    """The rows of one table that a task belongs to."""
    found = names(task)
    return () if found is None else (found,) if isinstance(found, str) else tuple(found)


def extra(name: str) -> Callable[[Task], str]:
    """A stratum, or a unit, that a task's `extras` name."""
    return lambda task: str(task.extras[name])


def missing_media(tasks: Iterable[Task]) -> dict[str, list[str]]:
    """By id, of each task of which a file is not there, the paths of such files; subtitles are files as well."""
    found: dict[str, list[str]] = {}
    for task in tasks:
        said = subtitles_path(task)
        paths = [*(media.path for media in task.media), *([said] if said else [])]
        lacking = [path for path in paths if not Path(path).is_file()]
        found |= {task.id: lacking} if lacking else {}
    return found


def check_subtitles(benchmark: Benchmark, tasks: Iterable[Task], asked: Iterable[Task], root: Path) -> None:
    """Raises DataError where subtitles that the tasks `asked` name are not in the copy, or where, of all `tasks`, fewer
    or more videos have some than published.
    """
    mend = "unpack the data set's archive of subtitles there (with --subset such questions are asked without, or fail)"
    said = [path for path in map(subtitles_path, asked) if path and not Path(path).is_file()]
    if said:
        raise DataError(
            f"{root}: {benchmark.name} lacks the subtitles of {len(said)} questions, first {said[0]}; {mend}"
        )
    videos = {benchmark.unit(task) for task in tasks if subtitles_path(task)}
    if benchmark.subtitled not in (None, len(videos)):
        known = f"has subtitles of {benchmark.subtitled} videos, this copy of {len(videos)}"
        raise DataError(f"{root}: {benchmark.name} {known}; {mend}")


# ---- marking -------------------------------------------------------------------------------------------------------


def grade(
    benchmark: Benchmark,
    tasks: Sequence[Task],
    answers: Mapping[str, Answer],
    *,
    extractor: Extractor = "official",
) -> list[Result]:
    """Every task with its mark, in order; no answer, and a blank one, is an error and never marked."""
    rule = benchmark.rule(extractor)
    return [marked(task, answers.get(task.id), rule) for task in tasks]


def marked(task: Task, answer: Answer | None, rule: Rule) -> Result:
    """A task with its mark; see `grade`."""
    answer = answer or Answer(text="", error="there is no answer")
    if answer.error is None and not answer.text.strip():
        answer = replace(answer, error="the answer is blank")
    if answer.error is not None:
        return Result(task=task, answer=answer, mark=UNPARSED)
    final = final_answer(answer.text)
    # Where reasoning is all that there is, there is nothing for a rule to read, nor for a judge to decide.
    return Result(task=task, answer=answer, mark=rule(final, task) if final else UNPARSED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A row of a table: how many tasks, and the mean of their values in percent.

    >>> Cell(n=900, value=61.5).n
    900
    """

    n: int
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A benchmark's numbers over its `n` tasks; with `undecided` ones `metrics` holds the least that they can be, and
    `at_most` the most (else the same). Of several attempts at each task they are the means over the attempts, errors
    and the like are counted over all of them, and `at_k` holds avg@k and pass@k of the tasks' values.

    >>> Report.__dataclass_fields__["errors"].type
    <class 'int'>
    """

    benchmark: str
    extractor: str
    n: int
    errors: int
    unparsed: int
    undecided: int
    headline: str
    metrics: Mapping[str, float]
    at_most: Mapping[str, float]
    strata: Mapping[str, Mapping[str, Cell]]
    at_k: Mapping[str, float] = field(default_factory=dict)
    judge: str = ""  # the model that decided what no rule did
    reason: str = ""  # of the first error

    @property
    def score(self) -> float:
        """The number that the benchmark is known by."""
        return self.metrics[self.headline]


def report(
    benchmark: Benchmark, results: Sequence[Result], *, extractor: Extractor = "official", judge: str = ""
) -> Report:
    """The benchmark's metric and tables over all results, those of one task being attempts at it, in order.

    `judge` is the model that decided what no rule did. DataError where there is no result.
    """
    if not results:
        raise DataError(f"{benchmark.name}: there is no result to report")
    attempts = _by_task(results)
    values = [[one.value for one in each] for each in attempts.values()]
    # The most that it can be: every open one decided in the model's favour.
    best = [replace(each, mark=Mark(read=each.mark.read, value=1.0)) if each.open else each for each in results]
    return Report(
        benchmark=benchmark.name,
        extractor=extractor,
        n=len(attempts),
        errors=sum(each.answer.error is not None for each in results),
        unparsed=sum(each.unparsed for each in results),
        undecided=sum(each.open for each in results),
        headline=benchmark.headline,
        metrics=averaged(benchmark.metrics, results),
        at_most=averaged(benchmark.metrics, best),
        strata={name: table(results, names) for name, names in benchmark.strata.items()},
        at_k={name: 100 * rate for name, rate in rates_at_k(values).items()},
        judge=judge,
        reason=next((each.answer.error for each in results if each.answer.error is not None), ""),
    )


def averaged(
    metrics: Metrics, results: Sequence[Result], *, turn: Callable[[Result], int] = lambda result: result.attempt
) -> dict[str, float]:
    """The metrics over the first attempts at all tasks, over the second ones and so on, averaged.

    So a rate over what was answered, or mastered, is a mean of the rates that single evaluations would have had.
    `turn` says which attempt a result is.
    """
    turns: defaultdict[int, list[Result]] = defaultdict(list)
    for each in results:
        turns[turn(each)].append(each)
    found: defaultdict[str, list[float]] = defaultdict(list)
    for some in turns.values():
        for name, value in metrics(some).items():
            found[name].append(value)
    return {name: fmean(values) for name, values in found.items()}


def _by_task(results: Sequence[Result]) -> dict[str, list[Result]]:
    """The attempts at each task, in order."""
    found: defaultdict[str, list[Result]] = defaultdict(list)
    for each in results:
        found[each.task.id].append(each)
    return found


def table(results: Sequence[Result], names: Names) -> dict[str, Cell]:
    """The mean per name, names in order; a task of several names counts in each."""
    rows: defaultdict[str, list[Result]] = defaultdict(list)
    for each in results:
        for name in names_of(names, each.task):
            rows[name].append(each)
    return {name: _cell(rows[name]) for name in sorted(rows)}


def _cell(results: Sequence[Result]) -> Cell:
    return Cell(n=len({each.task.id for each in results}), value=100 * mean(results))


def accuracy(results: Sequence[Result]) -> dict[str, float]:
    """The mean over all tasks."""
    return {"accuracy": 100 * mean(results)}


def mean(results: Sequence[Result], of: Callable[[Result], float] = lambda result: result.value) -> float:
    """The mean of what results are worth, or of something else of theirs, each as often as it counts."""
    return fsum(each.weight * of(each) for each in results) / fsum(each.weight for each in results)
