"""A needle world on disk: clips with events at known times, tasks with exact labels, traces to learn from.

```
folder/world.json                     settings, seed, versions
folder/{train,validation,test}/
    clips/00000.mp4 …                 the videos
    events.json                       per clip: digest of the file, what is shown when
    tasks.jsonl                       `Task` rows (see questions.py for their extras)
    traces.jsonl                      train alone: `Demo` rows, one per task and frame budget
```
"""

import json
import os
import random
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import av
import numpy as np

import saccade
from saccade.config import World
from saccade.data.record import write_jsonl
from saccade.data.rows import write_tasks
from saccade.data.world.events import Event, Labels, draw_labels
from saccade.data.world.film import hay, stretch, write_clip
from saccade.data.world.oracle import demo, overview, practice, trace
from saccade.data.world.paint import Frames, background, draw
from saccade.data.world.questions import Balance, draw_tasks
from saccade.errors import ConfigError, DataError
from saccade.media import files
from saccade.types import Demo, Task, digest_of, seed_of

SPLITS = ("train", "validation", "test")
FRAME_BUDGETS = (4, 8, 16, 32)  # of the overviews in traces.jsonl
FORMAT = 1
DIRECT = 0.4  # share of the traces whose overview is enough that answer at once
ATTEMPTS = 200  # to draw a clip that shows something no other clip shows

Progress = Callable[[str, int, int], None]


def make_world(folder: str | os.PathLike[str], world: World, *, seed: int, progress: Progress | None = None) -> None:
    """Make the world in `folder`, or go on where an interrupted one stopped.

    The same settings and seed give the same files. `progress(split, done, total)` is told of every clip. Raises
    ConfigError for settings that can't be met and DataError for a folder that holds another world.
    """
    root = Path(folder)
    if world.pixels % 2 or world.pixels < 16:
        raise ConfigError(f"world.pixels {world.pixels}: the video needs an even number of at least 16")
    drawn = draw_world(world, seed=seed)
    sources = _sources(world)
    _claim(root, world, seed)
    for split in SPLITS:
        clips = root / split / "clips"
        clips.mkdir(parents=True, exist_ok=True)
        for index, labels in enumerate(drawn[split]):
            path = clips / f"{index:05d}.mp4"
            if not path.exists():
                write_clip(path, film(world, labels, seed_of("pixels", seed, split, index), sources[split]), world.fps)
            if progress:
                progress(split, index + 1, len(drawn[split]))
        _write_rows(root / split, drawn[split], world, seed, split)


def draw_world(world: World, *, seed: int) -> dict[str, list[Labels]]:
    """What every clip of every split shows; no two clips show the same colours at the same times."""
    sizes = {"train": world.train, "validation": world.validation, "test": world.test}
    known: set[str] = set()
    drawn = {}
    for split in reversed(SPLITS):  # so that more training clips leave the test as it is
        rngs = [random.Random(seed_of("labels", seed, split, index)) for index in range(sizes[split])]
        drawn[split] = [_new(world, rng, known) for rng in rngs]
    return drawn


def _new(world: World, rng: random.Random, known: set[str]) -> Labels:
    for _ in range(ATTEMPTS):
        labels = draw_labels(world, rng)
        key = signature(labels.events)
        if key not in known:
            known.add(key)
            return labels
    raise ConfigError("so few events fit the clips that they would repeat; give world.seconds or world.events more")


def signature(events: tuple[Event, ...]) -> str:
    """What a clip shows, whatever the shapes and the background: equal for clips that have the same answers."""
    return digest_of([(event.start, event.colour) for event in events])


def tasks_of(world: World, drawn: list[Labels], *, seed: int, split: str) -> list[Task]:
    """The tasks of a split, answers balanced over all its clips."""
    rng = random.Random(seed_of("questions", seed, split))
    balance = Balance(rng)
    tasks: list[Task] = []
    for index, labels in enumerate(drawn):
        name = f"{split}-{index:05d}"
        tasks += draw_tasks(world, labels, balance, rng, clip=f"clips/{index:05d}.mp4", name=name)
    return tasks


def traces_of(tasks: list[Task], *, seed: int, direct: float = DIRECT) -> list[Demo]:
    """One demonstration per task and frame budget, and as many of sub-agents alone.

    Where the overview is enough, a share `direct` answers at once.
    """
    found = []
    for task in tasks:
        for frames in FRAME_BUDGETS:
            rng = random.Random(seed_of("trace", seed, task.id, frames))
            found.append(demo(task, trace(task, overview(task.extras["seconds"], frames), rng, direct=direct)))
            found.append(practice(task, rng))
    return found


def film(world: World, labels: Labels, seed: int, sources: list[Path]) -> Frames:
    """The frames of a clip, uint8 RGB [time, pixels, pixels, 3]; `sources` are the haystack's clips, if any."""
    count = max(1, round(labels.seconds * world.fps))
    if sources:
        rng = random.Random(seed)
        frames = stretch(rng.choice(sources), rng.random(), count=count, pixels=world.pixels, fps=world.fps)
    else:
        frames = background(count, world.pixels, world.fps, seed)
    draw(frames, (*labels.events, *labels.distractors), world.fps)
    return frames


def _sources(world: World) -> dict[str, list[Path]]:
    """The haystack's clips per split: apart from each other where there are at least three."""
    found = hay(world.haystack) if world.haystack else []
    if len(found) < len(SPLITS):
        return dict.fromkeys(SPLITS, found)
    # About a sixth of the sources each for test and validation.
    part = max(1, len(found) // 6)
    return {"train": found[2 * part :], "validation": found[part : 2 * part], "test": found[:part]}


# ---- files ---------------------------------------------------------------------------------------------------------


def _claim(root: Path, world: World, seed: int) -> None:
    """Write world.json, or make sure that the one there is this world's."""
    identity = {"format": FORMAT, "seed": seed, "settings": world.model_dump(mode="json")}
    path = root / "world.json"
    if path.exists():
        there = _read_json(path)
        changed = [key for key, value in identity.items() if there.get(key) != value]
        if changed:
            raise DataError(f"{root} holds another world (its {', '.join(changed)} differ); give a new folder")
        return
    # Never write into a folder that is something else.
    if root.exists() and any(root.iterdir()):
        raise DataError(f"{root} is not empty and holds no world; give a new folder")
    root.mkdir(parents=True, exist_ok=True)
    versions = {"saccade": saccade.__version__, "av": av.__version__, "numpy": np.__version__}
    _write_json(path, {**identity, "versions": versions})


def _write_rows(folder: Path, drawn: list[Labels], world: World, seed: int, split: str) -> None:
    tasks = tasks_of(world, drawn, seed=seed, split=split)
    # Rows are cheap and follow from the seed: they are written anew on every call.
    entries = {}
    for index, labels in enumerate(drawn):
        name = f"{index:05d}.mp4"
        entries[name] = {"digest": files.digest(str(folder / "clips" / name)), **asdict(labels)}
    _write_json(folder / "events.json", entries)
    if split == "train":
        write_jsonl(folder / "traces.jsonl", traces_of(tasks, seed=seed))
    write_tasks(folder / "tasks.jsonl", tasks)  # last: a split with tasks is complete


def read_labels(folder: str | os.PathLike[str], split: str) -> dict[str, tuple[str, Labels]]:
    """Per clip of a split, by file name: the digest of its file and what it shows."""
    found = {}
    for name, entry in _read_json(Path(folder) / split / "events.json").items():
        events, distractors = (tuple(Event(**event) for event in entry[key]) for key in ("events", "distractors"))
        found[name] = entry["digest"], Labels(seconds=entry["seconds"], events=events, distractors=distractors)
    return found


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    partial = path.with_name(path.name + ".part")
    partial.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    os.replace(partial, path)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} can't be read; is the world complete? Make it again in the same folder") from error
    if not isinstance(value, dict):
        raise DataError(f"{path} is not a JSON object")
    return value
