"""Which tasks an evaluation attempts, and with how many frames: the same ones on every machine.

A limit is spread evenly over strata, which are tables in order: the rows of the first table get equally many tasks,
within each of them so do the rows of the second, and so on; a row that has no more leaves its share to the others. The
mean over a limited evaluation therefore weighs rows alike, whatever their sizes are in the whole; an `Expansion` says
how each task counts where the whole is meant.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from saccade.errors import ConfigError
from saccade.evaluation.benchmarks._benchmark import Names, names_of
from saccade.evaluation.expansion import Expansion, weigh
from saccade.evaluation.shards import Shard
from saccade.types import Task, digest_of


def asked(task: Task) -> str:
    """The kind of question as the data set names it, else the kind of answer."""
    return str(task.extras.get("question", task.kind))


def itself(task: Task) -> str:
    """The unit of a task that is read by itself."""
    return task.id


@dataclass(frozen=True, slots=True, kw_only=True)
class Portion:
    """A part of some tasks: of at most `limit` of them (0: all), spread over `strata`, one `shard` or all.

    Tasks with one `unit` are taken together or not at all, since a metric reads them together; of a limit below the
    size of a unit the first unit is left. A larger limit holds all that a smaller one does. The shards of an evaluation
    hold every task once, and of each stratum equally many units, give or take one.

    >>> from saccade.types import Kind
    >>> tasks = [Task(id=f"w-{i}", question="?", media=(), kind=Kind.OPEN, gold="red") for i in range(4)]
    >>> len(Portion(limit=3).of(tasks)), len(Portion().of(tasks))
    (3, 4)
    """

    limit: int = 0
    shard: Shard | None = None
    strata: tuple[Names, ...] = (asked,)
    unit: Callable[[Task], str] = itself

    def of(self, tasks: Sequence[Task]) -> list[Task]:
        """The tasks of this part, in the order of `tasks`. Raises ConfigError for more shards than tasks."""
        return self._sharded(self.limited(tasks))

    def _sharded(self, tasks: list[Task]) -> list[Task]:
        if self.shard is None:
            return tasks
        units = self._units(tasks)
        if len(units) < self.shard.of:
            whole = "" if len(units) == len(tasks) else f", in {len(units)} units that are read together,"
            raise ConfigError(f"{len(tasks)} tasks{whole} are too few for {self.shard.of} shards; cut them into fewer")
        # Dealt in turn, as frame budgets are: in this order the units of a row are neighbours, in every table.
        order = sorted(
            units, key=lambda name: ([_rows(units[name], names) for names in self.strata], digest_of("shard", name))
        )
        kept = {task.id for name in order[self.shard.index - 1 :: self.shard.of] for task in units[name]}
        return [task for task in tasks if task.id in kept]

    def _units(self, tasks: Sequence[Task]) -> dict[str, list[Task]]:
        """The tasks by their units."""
        units: defaultdict[str, list[Task]] = defaultdict(list)
        for task in tasks:
            units[self.unit(task)].append(task)
        return units

    def limited(self, tasks: Sequence[Task]) -> list[Task]:
        """The tasks of all shards together."""
        if not self.limit:
            return list(tasks)
        units = self._units(tasks)
        # By digest and not from the top of the file, where a few clips have all the tasks.
        drawn = sorted(units, key=lambda name: digest_of("limit", name))
        kept: set[str] = set()
        for unit in _spread([units[name] for name in drawn], self.strata):
            # Stopping here, and not passing over it, is what makes a smaller limit a part of a larger one.
            if kept and len(kept) + len(unit) > self.limit:
                break
            kept.update(task.id for task in unit)
        return [task for task in tasks if task.id in kept]

    def expansion(self, tasks: Sequence[Task]) -> Expansion | None:
        """How those of the limit, of all shards, stand for all tasks; None where they are all."""
        units, asked = self._units(tasks), {self.unit(task) for task in self.limited(tasks)}
        if len(asked) == len(units):
            return None
        rows = {name: tuple(tuple(_rows(unit, names)) for names in self.strata) for name, unit in units.items()}
        weights, unseen = weigh(rows, asked)
        return Expansion(
            whole=len(tasks),
            weights={task.id: weight for name, weight in weights.items() for task in units[name]},
            unseen=sum(len(units[name]) for name in unseen) / len(tasks),
        )


EVERYTHING = Portion()


def _spread(units: Sequence[list[Task]], strata: Sequence[Names], place: tuple[str, ...] = ()) -> list[list[Task]]:
    """The units in an order of which every beginning is even over the strata; `place` are the rows that led here."""
    if not strata:
        return list(units)
    rows: defaultdict[str, list[list[Task]]] = defaultdict(list)
    for unit in units:
        for name in _rows(unit, strata[0]):
            rows[name].append(unit)
    queues = {name: iter(_spread(members, strata[1:], (*place, name))) for name, members in rows.items()}
    # Ties are broken otherwise in every place, so that no row is the first to get one everywhere.
    ties = {name: digest_of("limit", *place, name) for name in rows}
    counts, taken = dict.fromkeys(rows, 0), set[str]()
    order: list[list[Task]] = []
    while queues:
        name = min(queues, key=lambda name: (counts[name], ties[name]))
        found = next((each for each in queues[name] if each[0].id not in taken), None)  # of several rows: once
        if found is None:
            del queues[name]
            continue
        order.append(found)
        taken.add(found[0].id)
        for each in _rows(found, strata[0]):
            counts[each] += 1
    return order


def _rows(unit: Sequence[Task], names: Names) -> list[str]:
    """The rows of a table that a unit's tasks belong to; "" for those that belong to none."""
    return sorted({name for task in unit for name in names_of(names, task) or ("",)})


def deal(tasks: Sequence[Task], frames: Sequence[int]) -> dict[str, int | None]:
    """A frame budget per task id, dealt in turn over the tasks of each question kind in a stable order.

    The order comes from a digest of the id, not from the file, where neighbours share a clip and kinds alternate.

    >>> from saccade.types import Kind
    >>> tasks = [Task(id=f"w-{i}", question="?", media=(), kind=Kind.OPEN, gold="red") for i in range(4)]
    >>> sorted(deal(tasks, (4, 8)).values())
    [4, 4, 8, 8]
    """
    order = sorted(tasks, key=lambda task: (asked(task), digest_of("deal", task.id)))
    return {task.id: frames[i % len(frames)] if frames else None for i, task in enumerate(order)}
