"""From what the jobs left to numbers with intervals. Two kinds of 95 % interval stand side by side:

    tasks   these seeds, other questions: a bootstrap over the tasks of each seed (2000 resamples)
    seeds   other seeds (worlds, weights, training): Student's t over the means of the seeds; none with one seed

Axis letters: S seeds, N tasks of a seed, R resamples.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
from numpy.typing import NDArray

from saccade.evaluation.intervals import RESAMPLES, SEED
from saccade.lab.design import Exam
from saccade.lab.plan import Lab, arm_folder
from saccade.runlog import Run

Pair = tuple[float, float]
Columns = Mapping[str, list[Any]]  # of one exam's attempts; see work.columns
# The 97.5 % quantiles of Student's t with 1, 2, 3 … degrees of freedom; with more than these the last is close enough.
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
           2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A mean over seeds, its two intervals, the seeds' own means, and how many tasks they rest on.

    >>> Figure(mean=0.5, tasks=(0.4, 0.6), seeds=None, each=(0.5,), n=192).seeds is None
    True
    """

    mean: float
    tasks: Pair | None  # None where nothing was measured by task
    seeds: Pair | None  # None with one seed
    each: tuple[float, ...]
    n: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """An arm in a condition: by seed, the exams before and after RL, and the lines of its steps.

    >>> Cell(condition="usual", arm="vanilla", before={}, after={}, steps={}).arm
    'vanilla'
    """

    condition: str
    arm: str
    before: Mapping[int, Mapping[Exam, Columns]]
    after: Mapping[int, Mapping[Exam, Columns]]
    steps: Mapping[int, Sequence[Mapping[str, Any]]]


# ---- what is there -------------------------------------------------------------------------------------------------


def read_cells(folder: Path, lab: Lab) -> list[Cell]:
    """Every condition and arm with what its jobs have left; those that left nothing have no seeds."""
    return [_cell(folder, lab, condition, arm) for condition, arm in lab.cells()]


def _cell(folder: Path, lab: Lab, condition: str, arm: str) -> Cell:
    before, after, steps = {}, {}, {}
    recipe = lab.recipe(condition, arm)  # not that of the folder, which may be of a version before this one
    for seed in range(lab.seeds):
        place = folder / arm_folder(seed, condition, arm)
        if (place / "facts.json").exists():
            after[seed] = json.loads((place / "facts.json").read_text(encoding="utf-8"))
            steps[seed] = Run(path=place, recipe=recipe).metrics("rl")
            start = folder / lab.before(condition, arm, seed) / "facts.json"
            if start.exists():
                before[seed] = json.loads(start.read_text(encoding="utf-8"))
    return Cell(condition=condition, arm=arm, before=before, after=after, steps=steps)


# ---- numbers -------------------------------------------------------------------------------------------------------


def by_task(exam: Columns, measure: str, where: Callable[[int], bool] = lambda i: True) -> dict[str, float]:
    """The mean of a measure over each task's attempts; `where` says of an attempt's index whether it counts."""
    found: dict[str, list[float]] = {}
    for i, (task, value) in enumerate(zip(exam["task"], exam[measure], strict=True)):
        if where(i):
            found.setdefault(task, []).append(float(value))
    return {task: fmean(values) for task, values in found.items()}


def figure(seeds: Sequence[Mapping[str, float]]) -> Figure | None:
    """The mean over seeds of the means over their tasks, with both intervals; None where there is nothing.

    >>> figure([{"a": 1.0, "b": 0.0}, {"c": 1.0, "d": 1.0}]).mean
    0.75
    """
    filled = [each for each in seeds if each]
    if not filled:
        return None
    values_S = [np.array([each[task] for task in sorted(each)]) for each in filled]
    each_S = tuple(float(values_N.mean()) for values_N in values_S)
    draws = np.random.default_rng(SEED)
    resampled_R = np.mean([_resampled(values_N, draws) for values_N in values_S], axis=0)
    low, high = np.percentile(resampled_R, [2.5, 97.5])
    return Figure(
        mean=fmean(each_S),
        tasks=(float(low), float(high)),
        seeds=over_seeds(each_S),
        each=each_S,
        n=sum(len(values_N) for values_N in values_S),
    )


def _resampled(values_N: NDArray[np.float64], draws: np.random.Generator) -> NDArray[np.float64]:
    drawn_RN = draws.integers(0, len(values_N), (RESAMPLES, len(values_N)))
    means_R: NDArray[np.float64] = values_N[drawn_RN].mean(axis=1)
    return means_R


def over_seeds(each_S: Sequence[float]) -> Pair | None:
    """Student's interval of the mean over seeds; None for fewer than two.

    >>> over_seeds([0.5, 0.5, 0.5]), over_seeds([0.5])
    ((0.5, 0.5), None)
    """
    if len(each_S) < 2:
        return None
    half = STUDENT[min(len(each_S) - 1, len(STUDENT)) - 1] * stdev(each_S) / math.sqrt(len(each_S))
    return (fmean(each_S) - half, fmean(each_S) + half)


def minus(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    """One minus the other, on the tasks of both."""
    return {task: one[task] - other[task] for task in one.keys() & other.keys()}


def difference(one: Mapping[int, Mapping[str, float]], other: Mapping[int, Mapping[str, float]]) -> Figure | None:
    """One minus the other, paired by task within each seed that both have."""
    return figure([minus(one[seed], other[seed]) for seed in sorted(one.keys() & other.keys())])


def late(cell: Cell, key: str) -> Figure | None:
    """The mean of a step's metric over the last third of the steps; steps that have no such number are left out."""
    means = []
    for rows in cell.steps.values():
        last = rows[-max(1, len(rows) // 3) :]
        values = [float(row[key]) for row in last if isinstance(row.get(key), int | float)]
        means += [fmean(values)] if values else []
    if not means:
        return None
    return Figure(mean=fmean(means), tasks=None, seeds=over_seeds(means), each=tuple(means), n=0)
