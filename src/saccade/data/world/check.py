"""Is a needle world sound? Nothing leaks between its splits, and every answer follows from the labels."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from saccade.data.rows import read_tasks
from saccade.data.world.events import Labels
from saccade.data.world.floors import blind_floor
from saccade.data.world.folder import SPLITS
from saccade.data.world.hay import overlaps
from saccade.data.world.make import read_labels, read_sources, signature
from saccade.data.world.questions import gold_of
from saccade.media import files
from saccade.types import Task

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldReport:
    """What a check found. `problems` is empty where the world is sound."""

    clips: dict[str, int]  # per split; or pictures
    tasks: dict[str, int]
    floors: dict[str, dict[str, float]]  # per split and kind of question: the best constant answer's score
    problems: tuple[str, ...] = field(default=())


def check_world(folder: str | os.PathLike[str]) -> WorldReport:
    """Check the world in `folder`: digests, leaks between splits (of clips, of events, of what stands behind them),
    answers. Raises DataError for missing files.
    """
    root = Path(folder)
    return checked(
        root,
        "clips",
        {split: read_labels(root, split) for split in SPLITS},
        says=lambda shown: f"events {signature(shown.events)}",
        wrong=_wrong,
        others=overlaps({split: read_sources(root, split) for split in SPLITS}),
    )


def checked(
    root: Path,
    kind: str,
    labels: Mapping[str, Mapping[str, tuple[str, T]]],
    *,
    says: Callable[[T], str],
    wrong: Callable[[Task, Mapping[str, tuple[str, T]]], list[str]],
    others: Sequence[str] = (),
) -> WorldReport:
    """The check of a world of either medium, whose files lie in the folder `kind` of each split.

    `labels` are, per split and file, its digest and what it shows; `says` puts that into words, such as "events 1f3a",
    that no other split may hold; `wrong` says what is wrong with a task. `others` are problems found before.
    """
    tasks = {split: read_tasks(root / split / "tasks.jsonl") for split in SPLITS}
    held = {
        f"{split}/{kind}/{name}": (f"file {digest}", says(shown))
        for split, entries in labels.items()
        for name, (digest, shown) in entries.items()
    }
    problems = [*leaks(held), *others]
    for split in SPLITS:
        for name, (digest, _) in labels[split].items():
            path = root / split / kind / name
            if not path.is_file() or files.digest(str(path)) != digest:
                problems.append(f"{split}/{kind}/{name}: missing, or not the file that the labels were made for")
        problems += [problem for task in tasks[split] for problem in wrong(task, labels[split])]
    return WorldReport(
        clips={split: len(labels[split]) for split in SPLITS},
        tasks={split: len(tasks[split]) for split in SPLITS},
        floors={split: blind_floor(tasks[split]) for split in SPLITS},
        problems=tuple(problems),
    )


def leaks(shown: Mapping[str, Sequence[str]]) -> list[str]:
    """What stands in more than one split: `shown` says of each file (split/folder/name) what is in it, in words."""
    places: dict[str, list[str]] = {}
    for place, keys in shown.items():
        for key in keys:
            places.setdefault(key, []).append(place)
    # Equal within a split is a repetition, not a leak.
    shared = {key: names for key, names in places.items() if len({name.split("/")[0] for name in names}) > 1}
    return [f"{', '.join(names)}: the same {key.split()[0]} in more than one split" for key, names in shared.items()]


def _wrong(task: Task, labels: Mapping[str, tuple[str, Labels]]) -> list[str]:
    """What is wrong with a task, by the labels of its clip."""
    name = Path(task.media[0].path).name
    if name not in labels:
        return [f"task {task.id}: its clip {name} has no labels"]
    events = labels[name][1].events
    found = []
    if [(event.start, event.end, event.colour) for event in events] != [
        tuple(event) for event in task.extras["events"]
    ]:
        found.append(f"task {task.id}: its events are not those of its clip")
    gold = gold_of(task, events)
    if gold != task.gold:
        found.append(f"task {task.id}: gold {task.gold!r}, but the labels say {gold!r}")
    return found
