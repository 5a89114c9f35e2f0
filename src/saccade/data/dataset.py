"""Tasks and demonstrations on disk: JSONL or Parquet of `Task` and of `Demo`, media paths relative to their folder."""

import itertools
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from saccade.data import native
from saccade.data.record import relocated
from saccade.errors import DataError
from saccade.types import Demo, Kind, Media, Task


def write_tasks(path: str | os.PathLike[str], tasks: Iterable[Task]) -> None:
    """Write tasks as they are: give media paths relative to the folder of `path`, or absolute."""
    native.write(path, tasks)


def read_tasks(path: str | os.PathLike[str], *, most: int | None = None) -> list[Task]:
    """Every task of the file, or the first so many, media paths joined to its folder.

    Raises DataError for an empty file, a bad row, two tasks of one id, a missing media file, a gold answer that doesn't
    fit the kind.
    """
    source = Path(path)
    tasks = list(itertools.islice(native.iterate(source, Task), most))
    known: set[str] = set()
    for task in tasks:
        problem = problem_of(task)
        if task.id in known:
            problem = "the id was used before"
        if problem:
            raise DataError(f"{source}, task {task.id}: {problem}")
        known.add(task.id)
    return _found(tasks, source)


def read_demos(path: str | os.PathLike[str], *, most: int | None = None) -> list[Demo]:
    """Every demonstration of the file, or the first so many, media paths joined to its folder.

    Raises DataError for an empty file, a bad row, a missing media file.
    """
    source = Path(path)
    demos = list(itertools.islice(native.iterate(source, Demo), most))
    tasks = _found([demo.task for demo in demos], source)
    return [replace(demo, task=task) for demo, task in zip(demos, tasks, strict=True)]


def located(item: Task | Demo, source: Path) -> Task | Demo:
    """A row of a file with the paths of its media joined to the file's folder; none of them is looked for."""
    return relocated(item, lambda path: str(source.parent / path))


def problem_of(task: Task) -> str | None:
    """Why a task can't be graded, if it can't."""
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"[: len(task.choices)]
    if task.kind is Kind.CHOICE and not 2 <= len(task.choices) <= 10:
        return f"{len(task.choices)} choices; a choice needs 2 to 10"
    if task.kind is Kind.CHOICE and (not isinstance(task.gold, str) or len(task.gold) != 1 or task.gold not in letters):
        return f"gold {task.gold!r} is not one of the letters {letters}"
    if task.kind is Kind.OPEN and not isinstance(task.gold, str):
        return f"gold {task.gold!r} is not a text"
    if task.kind is Kind.NUMBER and not (isinstance(task.gold, float) and math.isfinite(task.gold)):
        return f"gold {task.gold!r} is not a number"
    if task.kind is Kind.MATH and not (isinstance(task.gold, str | float) and str(task.gold).strip()):
        return f"gold {task.gold!r} is not a formula"
    if task.kind is Kind.GROUNDING and not _ordered(task.gold, 1):
        return f"gold {task.gold!r} is not a span of seconds (start, end)"
    if task.kind in (Kind.BOX, Kind.POINT) and not _ordered(task.gold, 2):
        return f"gold {task.gold!r} is not a box (left, top, right, bottom)"
    return None


def _ordered(gold: object, axes: int) -> bool:
    """Whether the gold is a start per axis and then an end per axis, each end after its start."""
    return isinstance(gold, tuple) and len(gold) == 2 * axes and all(gold[i] < gold[i + axes] for i in range(axes))


def _found(tasks: Sequence[Task], source: Path) -> list[Task]:
    # Many tasks share a file: each is looked for once.
    found: dict[str, bool] = {}
    joined = []
    for task in tasks:
        media = tuple(Media(path=str(source.parent / item.path), kind=item.kind) for item in task.media)
        for item in media:
            if not found.setdefault(item.path, Path(item.path).is_file()):
                raise DataError(f"{source}, task {task.id}: media file {item.path} is missing")
        joined.append(replace(task, media=media))
    return joined
