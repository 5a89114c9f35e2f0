"""Select the tasks of an evaluation and their frame budgets, identically on every machine.

A limit is spread evenly over strata, which are nested: the labels of the first table get equally many tasks, within
each of them so do the labels of the second, and so on; a stratum without further tasks leaves its share to the others.
The mean over a limited evaluation therefore weights strata equally, regardless of their sizes in the full set;
`StratifiedWeights` give each task's weight in an estimate of the full set: each sampled task counts as often as there
are tasks of its stratum per sampled one (the weights of a stratified sample; Cochran 1977, Sampling Techniques, section
5.2). A stratum without a sampled task is represented by the others of its parent stratum. The file
`<results>.stratum_weights.json` stores the weights next to the results.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from saccade.data.constant_baseline import compute_wording_baselines
from saccade.errors import ConfigError
from saccade.evaluation.benchmarks.base import StratumFn, get_stratum_labels
from saccade.types import Task
from saccade.utils.hashing import compute_digest
from saccade.utils.jsonl import read_json, write_json

WEIGHTS_SUFFIX = ".stratum_weights.json"

StratumPath = tuple[tuple[str, ...], ...]  # per table, the rows that a unit belongs to


def get_question_or_answer_type(task: Task) -> str:
    """Return the question type that the dataset names, else the answer type."""
    return str(task.extras.get("question", task.answer_type))


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """Identify one of `num_shards` equal parts of an evaluation by its `index`, from 1."""

    index: int
    num_shards: int

    @classmethod
    def parse(cls, text: str) -> "Shard":
        """Parse a shard such as "2/4". Raises ConfigError."""
        match = re.fullmatch(r"\s*([0-9]{1,9})\s*/\s*([0-9]{1,9})\s*", text)
        if match is None or not 1 <= int(match[1]) <= int(match[2]):
            raise ConfigError(
                f"--shard={text!r} must be i/n with i from 1 to n, such as 2/4", key="--shard", value=text
            )
        return cls(index=int(match[1]), num_shards=int(match[2]))

    def __str__(self) -> str:
        return f"{self.index}/{self.num_shards}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StratifiedWeights:
    """Map sampled task ids to the number of tasks, out of `full_set_size`, that each represents.

    `uncovered` is the fraction of the full set in strata without a sampled task. `constant_baselines` are those of the
    sampled tasks that have one: the score of the best constant answer to the same wording over the full set.
    """

    full_set_size: int
    weights: Mapping[str, float]
    uncovered: float
    constant_baselines: Mapping[str, float] = field(default_factory=dict)

    def covers(self, tasks: set[str]) -> bool:
        """Return whether all of these task ids were sampled."""
        return tasks <= self.weights.keys()

    def write_unless_covered(self, results: Path) -> None:
        """Write the weights next to the results, unless the existing file covers all of these tasks and more."""
        existing = read_stratified_weights(results) if results.exists() else None
        if existing is None or len(existing.weights) <= len(self.weights) or not existing.covers({*self.weights}):
            self.write(results)

    def write(self, results: Path) -> None:
        """Write the weights next to the results."""
        write_json(results.with_suffix(WEIGHTS_SUFFIX), self)


def read_stratified_weights(results: Path) -> StratifiedWeights | None:
    """Return the weights next to the results of a limited evaluation, else None. Raises DataError for a bad file."""
    path = results.with_suffix(WEIGHTS_SUFFIX)
    if not path.exists():
        return None
    return read_json(path, StratifiedWeights, hint="delete it and evaluate again with the same limit")


@dataclass(frozen=True, slots=True, kw_only=True)
class Subset:
    """Select at most `limit` tasks (0: all), spread over `strata`, of one `shard` or of all.

    Tasks with the same `joint_key` form a unit and are selected together or not at all, because a metric reads them
    together; a limit below the size of a unit selects the first unit. A larger limit includes all tasks of a smaller
    one. The shards of an evaluation hold every task once, and of each row of the first table equally many units, give
    or take one.
    """

    limit: int = 0
    shard: Shard | None = None
    strata: tuple[StratumFn, ...] = (get_question_or_answer_type,)
    joint_key: Callable[[Task], str] = lambda task: task.id

    def select(self, tasks: Sequence[Task]) -> list[Task]:
        """Return the selected tasks, in the order of `tasks`. Raises ConfigError for more shards than units."""
        limited, shard = self.apply_limit(tasks), self.shard
        if shard is None:
            return limited
        units = self._group_units(limited)
        if len(units) < shard.num_shards:
            grouping = "" if len(units) == len(limited) else f" in {len(units)} units that metrics read together"
            raise ConfigError(
                f"--shard={shard}: {len(limited)} tasks{grouping} are too few for {shard.num_shards} shards; "
                "use fewer shards",
                key="--shard",
                value=str(shard),
            )

        # Assigned round-robin, like frame budgets: in this order the units of a label are adjacent in the first table.
        def get_rank(name: str) -> tuple[list[list[str]], str]:
            return [_get_unit_labels(units[name], names) for names in self.strata], compute_digest("shard", name)

        order = sorted(units, key=get_rank)
        selected = {task.id for name in order[shard.index - 1 :: shard.num_shards] for task in units[name]}
        return [task for task in limited if task.id in selected]

    def _group_units(self, tasks: Sequence[Task]) -> dict[str, list[Task]]:
        """Return the tasks by joint key."""
        units: defaultdict[str, list[Task]] = defaultdict(list)
        for task in tasks:
            units[self.joint_key(task)].append(task)
        return units

    def apply_limit(self, tasks: Sequence[Task]) -> list[Task]:
        """Return the tasks of the limit, over all shards."""
        if not self.limit:
            return list(tasks)
        units = self._group_units(tasks)
        # Ordered by digest: the first tasks of the file are about a few clips only.
        order = sorted(units, key=lambda name: compute_digest("limit", name))
        selected: set[str] = set()
        for unit in _interleave_strata([units[name] for name in order], self.strata):
            # Stop rather than skip the unit, so that a larger limit includes all tasks of a smaller one.
            if selected and len(selected) + len(unit) > self.limit:
                break
            selected.update(task.id for task in unit)
        return [task for task in tasks if task.id in selected]

    def compute_weights(self, tasks: Sequence[Task]) -> StratifiedWeights | None:
        """Return the weights of the limit's tasks, over all shards, in the full set; None if they are all tasks."""
        units, sampled = self._group_units(tasks), {self.joint_key(task) for task in self.apply_limit(tasks)}
        if len(sampled) == len(units):
            return None
        rows = {
            name: tuple(tuple(_get_unit_labels(unit, names)) for names in self.strata) for name, unit in units.items()
        }
        weights, uncovered = compute_stratified_weights(rows, sampled)
        weights_by_task = {task.id: weight for name, weight in weights.items() for task in units[name]}
        baselines = compute_wording_baselines(tasks)
        return StratifiedWeights(
            full_set_size=len(tasks),
            weights=weights_by_task,
            constant_baselines={
                task.id: baselines[task.digest]
                for task in tasks
                if task.id in weights_by_task and task.digest in baselines
            },
            uncovered=sum(len(units[name]) for name in uncovered) / len(tasks),
        )


FULL_SET = Subset()


def _interleave_strata(
    units: Sequence[list[Task]], strata: Sequence[StratumFn], stratum_path: tuple[str, ...] = ()
) -> list[list[Task]]:
    """Order units so that every prefix is even over the strata; `stratum_path` holds the enclosing labels."""
    if not strata:
        return list(units)
    rows: defaultdict[str, list[list[Task]]] = defaultdict(list)
    for unit in units:
        for name in _get_unit_labels(unit, strata[0]):
            rows[name].append(unit)
    queues = {
        name: iter(_interleave_strata(members, strata[1:], (*stratum_path, name))) for name, members in rows.items()
    }
    # Ties break differently under each path, so that no label comes first everywhere.
    ties = {name: compute_digest("limit", *stratum_path, name) for name in rows}
    counts, taken = dict.fromkeys(rows, 0), set[str]()
    order: list[list[Task]] = []
    while queues:
        name = min(queues, key=lambda name: (counts[name], ties[name]))
        # A unit may have several labels.
        selected = next((unit for unit in queues[name] if unit[0].id not in taken), None)
        if selected is None:
            del queues[name]
            continue
        order.append(selected)
        taken.add(selected[0].id)
        for label in _get_unit_labels(selected, strata[0]):
            counts[label] += 1
    return order


def _get_unit_labels(unit: Sequence[Task], stratum_fn: StratumFn) -> list[str]:
    """Return the rows of a table that a unit's tasks belong to; "" is the row of tasks in none."""
    return sorted({name for task in unit for name in get_stratum_labels(stratum_fn, task) or ("",)})


def assign_frame_budgets(tasks: Sequence[Task], frame_budgets: Sequence[int]) -> dict[str, int | None]:
    """Assign a frame budget to each task id, round-robin over the tasks of each question type in a stable order.

    The order comes from a digest of the id: in the file, neighboring tasks share a clip and question types alternate.
    """
    order = sorted(tasks, key=lambda task: (get_question_or_answer_type(task), compute_digest("deal", task.id)))
    return {task.id: frame_budgets[i % len(frame_budgets)] if frame_budgets else None for i, task in enumerate(order)}


def compute_stratified_weights(
    stratum_paths: Mapping[str, StratumPath], sampled: set[str]
) -> tuple[dict[str, float], set[str]]:
    """Return how many units each sampled unit represents, and the units of strata without a sampled one.

    `stratum_paths` maps all units to their labels in each table, the first table first.
    """
    weights: dict[str, float] = {}
    uncovered: set[str] = set()

    def distribute(units: Sequence[str], count: float, depth: int) -> None:
        """Let the sampled ones of `units` represent `count` units, divided by their labels from table `depth` on."""
        if depth == len(stratum_paths[units[0]]):
            selected = [unit for unit in units if unit in sampled]
            weights.update(dict.fromkeys(selected, count / len(selected)))
            return
        rows: defaultdict[tuple[str, ...], list[str]] = defaultdict(list)
        for unit in units:
            rows[stratum_paths[unit][depth]].append(unit)
        covered = [members for members in rows.values() if not sampled.isdisjoint(members)]
        uncovered.update(unit for members in rows.values() if sampled.isdisjoint(members) for unit in members)
        total = sum(map(len, covered))
        for members in covered:
            distribute(members, count * len(members) / total, depth + 1)

    distribute([*stratum_paths], float(len(stratum_paths)), 0)
    return weights, uncovered
