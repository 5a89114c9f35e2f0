"""Evaluation: the rollout path of training, with another beginning and end.

    tasks ── plan ────> what the file lacks ──> collect ──> done(group) ──> append lines ──> read the file back
                              ▲                                                  │
                              └────────── a rerun starts here <── a kill ────────┘

Every finished group of attempts is appended to a JSONL file at once. A rerun with the same file runs only what is
missing or broken there and returns the same results as an undisturbed run, since an attempt's seed depends on nothing
but the run's seed, the task and the attempt's index. An attempt that is made again is a new line, and of its lines the
newest counts.
"""

import functools
import inspect
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from saccade.config import Evaluation
from saccade.data.record import append, read_jsonl, relocated, seen_from
from saccade.errors import ConfigError, MediaError, RunError
from saccade.evaluation.expansion import EXPANSION
from saccade.evaluation.metrics import BROKEN, accuracy_of
from saccade.evaluation.options import shuffled
from saccade.evaluation.portions import EVERYTHING, Portion, deal
from saccade.evaluation.shards import Cut, Key, Shard
from saccade.media import files
from saccade.media.subtitles import subtitles_path
from saccade.protocols import Agent, Context, Scorer
from saccade.rollouts.collect import collect
from saccade.runlog import writing
from saccade.types import Episode, Group, Sampling, Scored, Task, Unscored, digest_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """How far an evaluation is: attempts that are done, of all; the accuracy of those so far, None before the first.

    >>> Tally(done=3, total=8, accuracy=2 / 3).remark
    'accuracy 0.667'
    """

    done: int
    total: int
    accuracy: float | None

    @property
    def remark(self) -> str:
        """The accuracy as text."""
        return "" if self.accuracy is None else f"accuracy {self.accuracy:.3f}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Attempts at a task that are made together, and the keys of their lines."""

    task: Task
    keys: tuple[Key, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A line of a results file: one attempt at a task.

    `task` is a digest of the task and of what its media and subtitles hold, `frames` the frame budget K, `repeat` the
    attempt's index. `under` says what else the result depends on: a name and a digest per part, such as "seed=1f…,
    weights=c0…".
    """

    task: str
    frames: int | None
    repeat: int
    under: str
    scored: Scored | Unscored

    @property
    def key(self) -> Key:
        """What was attempted: where two lines agree in this, one is as good as the other."""
        return (self.task, self.frames, self.repeat)

    @property
    def place(self) -> tuple[str, int]:
        """Whose attempt it is; of two lines of one place, as of a task whose video was mended, the newer counts."""
        return (self.scored.episode.task.id, self.repeat)

    @property
    def broken(self) -> bool:
        """Whether it ended, or has no score, for a reason that is not the model's: it is worth another try."""
        return isinstance(self.scored, Unscored) or self.scored.episode.end in BROKEN


async def evaluate(
    tasks: Sequence[Task],
    *,
    agent: Agent,
    base: Context,
    score: Scorer,
    settings: Evaluation,
    path: Path,
    root: Path | None = None,
    identity: Mapping[str, Any] | None = None,
    portion: Portion = EVERYTHING,
    at_once: int = 512,
    on_done: Callable[[Tally], None] | None = None,
) -> list[Scored]:
    """`settings.repeat` scored attempts at each task, in the order of tasks and attempts; the lines are in `path`.

    Attempted are the tasks of the `portion`, with `settings.limit` as its limit; of a shard, what it is of is written
    beside `path`. `base.seed` is the evaluation's seed; `settings` replace the temperature and the frame budget of
    `base` and can take the agent's tools away. `identity` holds whatever else the results depend on, such as the
    weights, by name: RunError where `path` holds results of another identity, seed or settings. `on_done` is told at
    the beginning and with every finished group. An episode that broke is among the results, with its error; its
    accuracy counts as 0 (`metrics.accuracy_of`). One that could not be graded is left out (see `read_ungraded`). A
    rerun tries both again. Media below `root` are written down as seen from `path`, so that both may move.
    """
    sampling = replace(base.sampling, temperature=settings.temperature)
    under = _under(settings, replace(sampling, seed=base.seed), identity or {})
    portion = replace(portion, limit=settings.limit)
    wanted = _plan(tasks, settings, portion, base.seed)
    known = {record.key: record.scored for record in read_records(path, under) if not record.broken}
    missing = [each for each in wanted if not known.keys() >= {*each.keys}]
    told = _Telling([known.get(key) for each in wanted for key in each.keys], on_done)

    def keep(place: int, group: Group) -> None:
        with writing(path):
            for key, attempt in zip(missing[place].keys, _in_order(group), strict=True):
                if key not in known:  # of a group that was half written, the rest
                    scored = relocated(attempt, lambda file: seen_from(path.parent, file, root))
                    append(path, Record(task=key[0], frames=key[1], repeat=key[2], under=under, scored=scored))
                    told.add(attempt)
        told()

    _prepare(path, tasks, wanted, settings, portion=portion, under=under)
    told()
    budgets = {each.task.id: each.keys[0][1] for each in wanted}
    await collect(
        [each.task for each in missing],
        agent if settings.tools else without_tools(agent),
        replace(base, sampling=sampling),
        size=1 if settings.shuffle_options else settings.repeat,
        score=score,
        frames=lambda task: budgets[task.id],
        at_once=at_once,
        done=keep,
    )
    # Everything is read back, so that a rerun and a first run return the very same values.
    found = {record.key: record.scored for record in read_records(path, under)}
    return [each for one in wanted for key in one.keys if isinstance(each := found[key], Scored)]


def _plan(tasks: Sequence[Task], settings: Evaluation, portion: Portion, seed: int) -> list[Wanted]:
    """What is to be attempted, in the order of tasks and attempts."""
    budgets = deal(tasks, settings.frames)  # over all tasks, so that a limit changes nobody's budget
    found = []
    for task in portion.of(tasks):
        said = subtitles_path(task)
        shown = [media.path for media in task.media] + ([said] if said else [])
        mark = digest_of(task.digest, [_content(path) for path in shown])
        keys = tuple((mark, budgets[task.id], i) for i in range(settings.repeat))
        # Attempts with other orders of the options have other prompts, and so are groups of their own.
        if settings.shuffle_options:
            variants = [shuffled(task, seed=seed, attempt=i) for i in range(settings.repeat)]
            found += [Wanted(task=each, keys=(key,)) for each, key in zip(variants, keys, strict=True)]
        else:
            found.append(Wanted(task=task, keys=keys))
    return found


def _prepare(
    path: Path,
    tasks: Sequence[Task],
    wanted: Sequence[Wanted],
    settings: Evaluation,
    *,
    portion: Portion,
    under: str,
) -> None:
    """Make the folder of the results, and write beside them what a limit and a shard are of."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        if expansion := portion.expansion(tasks):
            expansion.keep(path)
        else:
            path.with_suffix(EXPANSION).unlink(missing_ok=True)
    # Before the first attempt: a shard that was killed must not pass for a whole one.
    if portion.shard is not None:
        _cut(portion.limited(tasks), wanted, settings, shard=portion.shard, under=under).write(path)


def _cut(every: Sequence[Task], wanted: Sequence[Wanted], settings: Evaluation, *, shard: Shard, under: str) -> Cut:
    """What a shard is of: the attempts at `every` task."""
    places = {task.id: place * settings.repeat for place, task in enumerate(every)}
    keys = [(places[each.task.id] + key[2], key) for each in wanted for key in each.keys]
    # What media hold is no part of it: a machine may lack those of the other shards.
    return Cut(
        shard=shard,
        whole=digest_of([task.digest for task in every], settings.repeat),
        under=under,
        places=tuple(place for place, _ in keys),
        keys=tuple(key for _, key in keys),
    )


class _Telling:
    """Counts attempts as they end, and tells whoever watches."""

    def __init__(self, known: Sequence[Scored | Unscored | None], on_done: Callable[[Tally], None] | None) -> None:
        self._total, self._done, self._right, self._graded = len(known), 0, 0.0, 0
        self._on_done = on_done
        for each in known:
            if each is not None:
                self.add(each)

    def add(self, attempt: Scored | Unscored) -> None:
        """Count an attempt; one without a score is none for or against."""
        self._done += 1
        if isinstance(attempt, Scored):
            self._right += accuracy_of(attempt)
            self._graded += 1

    def __call__(self) -> None:
        """Tell how far it is."""
        if self._on_done is not None:
            accuracy = self._right / self._graded if self._graded else None
            self._on_done(Tally(done=self._done, total=self._total, accuracy=accuracy))


def _in_order(group: Group) -> list[Scored | Unscored]:
    """Every attempt of a group, as they were begun."""
    graded, lost = iter(group.members), {each.index: each for each in group.ungraded}
    return [lost[i] if i in lost else next(graded) for i in range(len(group.members) + len(lost))]


def _under(settings: Evaluation, sampling: Sampling, identity: Mapping[str, Any]) -> str:
    """What one attempt depends on besides its task, and nothing else."""
    # A larger limit or more repeats go on in the same file; a judge is asked about answers that are there.
    fixed = settings.model_dump(exclude={"limit", "repeat", "judge"})
    if not settings.shuffle_options:  # files that were begun before there was this setting go on
        del fixed["shuffle_options"]
    drawn = {key: value for key, value in asdict(sampling).items() if key != "seed"}
    parts = {"seed": sampling.seed, "settings": (fixed, drawn), **identity}
    return ", ".join(f"{name}={digest_of(value)[:16]}" for name, value in parts.items())


def _content(path: str) -> str:
    """A digest of a file; "" where it can't be read, which is said when it is needed."""
    try:
        return files.digest(path)
    except MediaError:
        return ""


def has_tools(agent: Callable[..., Any]) -> bool:
    """Whether an agent has a setting `tools`, which can be turned off."""
    return "tools" in inspect.signature(agent).parameters


def without_tools(agent: Agent) -> Agent:
    """The same agent with its tools off: the no-tool control. ConfigError where it has no setting `tools`."""
    if not has_tools(agent):
        raise ConfigError("evaluation.tools=false needs an agent with a setting `tools`, such as parallel")
    bare: Callable[..., Awaitable[Episode]] = agent
    return functools.partial(bare, tools={})


def read_records(path: Path, under: str | None = None) -> list[Record]:
    """The newest line of each attempt in a results file ([] where there is none), in the order of the first ones.

    A line torn by a kill at its end is passed over. RunError, naming what differs, where a line was written under other
    settings than `under`.
    """
    records = newest_records(path)
    for record in records:
        if under is not None and record.under != under:
            changed = differences(record.under, under)
            mend = "delete it or give this evaluation another name"
            raise RunError(f"{path} holds results of other {' and '.join(changed)}; {mend}")
    return [relocated(record, lambda file: os.path.normpath(path.parent / file)) for record in records]


def newest_records(path: Path) -> list[Record]:
    """The newest line of each attempt as it stands in the file, paths of media included."""
    records = read_jsonl(path, Record, torn_end=True) if path.exists() else []
    return list({record.place: record for record in records}.values())


def differences(one: str, other: str) -> list[str]:
    """What two records' `under` disagree on, by name.

    >>> differences("seed=1, weights=a", "seed=1, weights=b")
    ['weights']
    """
    there = {*one.split(", ")}
    return [part.partition("=")[0] for part in other.split(", ") if part not in there]


def read_results(path: Path) -> list[Scored]:
    """The scored episodes of a results file, one per attempt, in the order in which they first ended."""
    return [record.scored for record in read_records(path) if isinstance(record.scored, Scored)]


def read_ungraded(path: Path) -> list[Unscored]:
    """The attempts of a results file that nobody could grade yet."""
    return [record.scored for record in read_records(path) if isinstance(record.scored, Unscored)]
