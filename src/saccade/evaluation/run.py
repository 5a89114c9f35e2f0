"""Evaluation: the rollout path of training, with another beginning and end.

    tasks ── deal K ──> what the file lacks ──> collect ──> done(group) ──> append lines ──> read the file back
                              ▲                                                  │
                              └────────── a rerun starts here <── a kill ────────┘

Every finished group of attempts is appended to a JSONL file at once. A rerun with the same file runs only what is
missing there and returns the same results as an undisturbed run, since an attempt's seed depends on nothing but the
run's seed, the task and the attempt's index.
"""

import functools
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from saccade.config import Evaluation
from saccade.data.record import append, read_jsonl
from saccade.errors import ConfigError, RunError
from saccade.protocols import Agent, Context
from saccade.rollouts.collect import collect
from saccade.runlog import writing
from saccade.types import Episode, Group, Score, Scored, Task, digest_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A line of a results file: which attempt it is (task's digest, frame budget K, index), under which settings.

    >>> Record.__slots__
    ('task', 'frames', 'repeat', 'under', 'scored')
    """

    task: str
    frames: int | None
    repeat: int
    under: str
    scored: Scored

    @property
    def key(self) -> tuple[str, int | None, int]:
        """The identity of the attempt."""
        return (self.task, self.frames, self.repeat)


async def evaluate(
    tasks: Sequence[Task],
    *,
    agent: Agent,
    base: Context,
    score: Callable[[Episode, Task], Score],
    settings: Evaluation,
    path: Path,
    identity: Mapping[str, Any] | None = None,
    at_once: int = 512,
    on_done: Callable[[int, int], None] | None = None,
) -> list[Scored]:
    """`settings.repeat` scored attempts at each task, in the order of tasks and attempts; the lines are in `path`.

    `base.seed` is the evaluation's seed; `settings` replace the temperature and the frame budget of `base` and can take
    the agent's tools away. `identity` names whatever else the results depend on, such as the weights: RunError where
    `path` holds results of another identity, seed or settings. `on_done(finished, all)` counts tasks. An episode that
    broke is among the results, with its error; its accuracy counts as 0 (`metrics.accuracy_of`).
    """
    chosen = choose(tasks, settings.limit)
    budgets = deal(tasks, settings.frames)  # over all tasks, so that a limit changes nobody's budget
    # What one attempt depends on, and nothing else: a larger limit or more repeats go on in the same file.
    fixed = settings.model_dump(exclude={"limit", "repeat"})
    under = digest_of(base.seed, fixed, base.sampling.max_tokens, dict(identity or {}))[:16]
    known = {record.key for record in read_records(path, under)}
    wanted = {task.id: [(task.digest, budgets[task.id], i) for i in range(settings.repeat)] for task in chosen}
    missing = [task for task in chosen if not known.issuperset(wanted[task.id])]
    finished = len(chosen) - len(missing)

    def keep(place: int, group: Group) -> None:
        nonlocal finished
        with writing(path):
            for key, scored in zip(wanted[group.task.id], group.members, strict=True):
                if key not in known:  # of a group that was half written, the rest
                    append(path, Record(task=key[0], frames=key[1], repeat=key[2], under=under, scored=scored))
        finished += 1
        if on_done is not None:
            on_done(finished, len(chosen))

    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    await collect(
        missing,
        agent if settings.tools else without_tools(agent),
        replace(base, sampling=replace(base.sampling, temperature=settings.temperature)),
        size=settings.repeat,
        score=score,
        frames=lambda task: budgets[task.id],
        at_once=at_once,
        done=keep,
    )
    # Everything is read back, so that a rerun and a first run return the very same values.
    results = {record.key: record.scored for record in read_records(path, under)}
    return [results[key] for task in chosen for key in wanted[task.id]]


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


def without_tools(agent: Agent) -> Agent:
    """The same agent with its tools off: the no-tool control. ConfigError where it has no setting `tools`."""
    if "tools" not in inspect.signature(agent).parameters:
        raise ConfigError("evaluation.tools=false needs an agent with a setting `tools`, such as parallel")
    bare: Callable[..., Awaitable[Episode]] = agent
    return functools.partial(bare, tools=())


def read_records(path: Path, under: str | None = None) -> list[Record]:
    """The lines of a results file ([] where there is none); a line torn by a kill at its end is passed over.

    RunError where a line was written under other settings than `under`.
    """
    if not path.exists():
        return []
    records = read_jsonl(path, Record, torn_end=True)
    if under is not None and any(record.under != under for record in records):
        mend = "delete it or give this evaluation another name"
        raise RunError(f"{path} holds results of other settings, weights or seed; {mend}")
    return records


def read_results(path: Path) -> list[Scored]:
    """The scored episodes of a results file, in the order in which they ended."""
    return [record.scored for record in read_records(path)]
