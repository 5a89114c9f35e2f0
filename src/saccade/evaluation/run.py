"""Evaluation: the rollout path of training, with another beginning and end.

    tasks ── deal K ──> what the file lacks ──> collect ──> done(group) ──> append lines ──> read the file back
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
from saccade.evaluation.metrics import BROKEN
from saccade.media import files
from saccade.protocols import Agent, Context, Scorer
from saccade.rollouts.collect import collect
from saccade.runlog import writing
from saccade.types import Episode, Group, Sampling, Scored, Task, Unscored, digest_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A line of a results file: one attempt at a task.

    `task` is a digest of the task and of what its media hold, `frames` the frame budget K, `repeat` the attempt's
    index. `under` says what else the result depends on: a name and a digest per part, such as "seed=1f…, weights=c0…".
    """

    task: str
    frames: int | None
    repeat: int
    under: str
    scored: Scored | Unscored

    @property
    def key(self) -> tuple[str, int | None, int]:
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
    at_once: int = 512,
    on_done: Callable[[int, int], None] | None = None,
) -> list[Scored]:
    """`settings.repeat` scored attempts at each task, in the order of tasks and attempts; the lines are in `path`.

    `base.seed` is the evaluation's seed; `settings` replace the temperature and the frame budget of `base` and can take
    the agent's tools away. `identity` holds whatever else the results depend on, such as the weights, by name:
    RunError where `path` holds results of another identity, seed or settings. `on_done(finished, all)` counts tasks. An
    episode that broke is among the results, with its error; its accuracy counts as 0 (`metrics.accuracy_of`), and a
    rerun tries it again. One that could not be graded is tried again, too; until then it is left out of the results
    (see `read_ungraded`). Media below the folder `root` are written down as seen from `path`, so that both may move.
    """
    chosen = choose(tasks, settings.limit)
    budgets = deal(tasks, settings.frames)  # over all tasks, so that a limit changes nobody's budget
    sampling = replace(base.sampling, temperature=settings.temperature)
    under = _under(settings, replace(sampling, seed=base.seed), identity or {})
    known = {record.key for record in read_records(path, under) if not record.broken}
    marks = {task.id: digest_of(task.digest, [_content(media.path) for media in task.media]) for task in chosen}
    wanted = {task.id: [(marks[task.id], budgets[task.id], i) for i in range(settings.repeat)] for task in chosen}
    missing = [task for task in chosen if not known.issuperset(wanted[task.id])]
    finished = len(chosen) - len(missing)

    def keep(place: int, group: Group) -> None:
        nonlocal finished
        with writing(path):
            for key, attempt in zip(wanted[group.task.id], _attempts(group), strict=True):
                if key not in known:  # of a group that was half written, the rest
                    scored = relocated(attempt, lambda file: seen_from(path.parent, file, root))
                    append(path, Record(task=key[0], frames=key[1], repeat=key[2], under=under, scored=scored))
        finished += 1
        if on_done is not None:
            on_done(finished, len(chosen))

    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    await collect(
        missing,
        agent if settings.tools else without_tools(agent),
        replace(base, sampling=sampling),
        size=settings.repeat,
        score=score,
        frames=lambda task: budgets[task.id],
        at_once=at_once,
        done=keep,
    )
    # Everything is read back, so that a rerun and a first run return the very same values.
    found = {record.key: record.scored for record in read_records(path, under)}
    every = [found[key] for task in chosen for key in wanted[task.id]]
    return [each for each in every if isinstance(each, Scored)]


def _attempts(group: Group) -> list[Scored | Unscored]:
    """Every attempt of a group, in order."""
    graded, lost = iter(group.members), {each.index: each for each in group.ungraded}
    return [lost[i] if i in lost else next(graded) for i in range(len(group.members) + len(lost))]


def _under(settings: Evaluation, sampling: Sampling, identity: Mapping[str, Any]) -> str:
    """What one attempt depends on besides its task, and nothing else."""
    # A larger limit or more repeats go on in the same file; a judge is asked about answers that are there.
    fixed = settings.model_dump(exclude={"limit", "repeat", "judge"})
    drawn = {key: value for key, value in asdict(sampling).items() if key != "seed"}
    parts = {"seed": sampling.seed, "settings": (fixed, drawn), **identity}
    return ", ".join(f"{name}={digest_of(value)[:16]}" for name, value in parts.items())


def _content(path: str) -> str:
    """A digest of a file; "" where it can't be read, which is said when it is needed."""
    try:
        return files.digest(path)
    except MediaError:
        return ""


def choose(tasks: Sequence[Task], limit: int) -> list[Task]:
    """At most `limit` tasks (0: all), the same ones on every machine, in their order in the file."""
    if not limit:
        return list(tasks)
    # By digest and not from the top of the file, where a few clips have all the tasks.
    taken = sorted(tasks, key=lambda task: digest_of("limit", task.id))[:limit]
    kept = {task.id for task in taken}
    return [task for task in tasks if task.id in kept]


def deal(tasks: Sequence[Task], frames: Sequence[int]) -> dict[str, int | None]:
    """A frame budget per task id, dealt in turn over the tasks of each question kind in a stable order.

    The order comes from a digest of the id, not from the file, where neighbours share a clip and kinds alternate.

    >>> from saccade.types import Kind
    >>> tasks = [Task(id=f"w-{i}", question="?", media=(), kind=Kind.OPEN, gold="red") for i in range(4)]
    >>> sorted(deal(tasks, (4, 8)).values())
    [4, 4, 8, 8]
    """
    order = sorted(tasks, key=lambda task: (str(task.extras.get("question", task.kind)), digest_of("deal", task.id)))
    return {task.id: frames[i % len(frames)] if frames else None for i, task in enumerate(order)}


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
    if not path.exists():
        return []
    records = read_jsonl(path, Record, torn_end=True)
    for record in records:
        if under is not None and record.under != under:
            there = set(record.under.split(", "))
            changed = [part.partition("=")[0] for part in under.split(", ") if part not in there]
            mend = "delete it or give this evaluation another name"
            raise RunError(f"{path} holds results of other {' and '.join(changed)}; {mend}")
    newest = {record.place: record for record in records}
    return [relocated(record, lambda file: os.path.normpath(path.parent / file)) for record in newest.values()]


def read_results(path: Path) -> list[Scored]:
    """The scored episodes of a results file, one per attempt, in the order in which they first ended."""
    return [record.scored for record in read_records(path) if isinstance(record.scored, Scored)]


def read_ungraded(path: Path) -> list[Unscored]:
    """The attempts of a results file that nobody could grade yet."""
    return [record.scored for record in read_records(path) if isinstance(record.scored, Unscored)]
