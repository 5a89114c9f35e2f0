"""A needle world on disk: clips with events at known times, tasks with exact labels, traces to learn from.

```
folder/world.json                     settings, seed, frame budgets of the traces, the haystack's files, versions
folder/{train,validation,test}/
    clips/00000.mp4 …                 the videos
    events.json                       per clip: digest of the file, what stands behind it, what is shown when
    tasks.jsonl                       `Task` rows (see questions.py for their extras)
    traces.jsonl                      train alone: `Demo` rows, one per task and frame budget
```
"""

import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from saccade.config import World
from saccade.data.world.events import Event, Labels, draw_labels
from saccade.data.world.film import write_clip
from saccade.data.world.folder import SPLITS as SPLITS
from saccade.data.world.folder import claim, read_json
from saccade.data.world.hay import Source, Stretch, chosen, divided, frames_of, hay, shown
from saccade.data.world.oracle import coded, demo, drilled, practice, seen, trace
from saccade.data.world.paint import BLOCK, Frames, draw, drifting
from saccade.data.world.questions import Balance, draw_tasks
from saccade.data.world.splits import draw_splits, write_split
from saccade.errors import ConfigError
from saccade.media import files
from saccade.media.picks import uniform_times
from saccade.types import Demo, Task, digest_of, seed_of

FRAME_BUDGETS = (4, 8, 16, 32)  # of the overviews in traces.jsonl, where nobody says others
DIRECT = 0.4  # share of the traces whose overview is enough that answer at once

Progress = Callable[[str, int, int], None]


def make_world(
    folder: str | os.PathLike[str],
    world: World,
    *,
    seed: int,
    budgets: Sequence[int] = FRAME_BUDGETS,
    progress: Progress | None = None,
) -> None:
    """Make the world in `folder`, or go on where an interrupted one stopped.

    The same settings and seed give the same files. `budgets` are those of the overviews in its traces.
    `progress(split, done, total)` is told of every clip. Raises ConfigError for settings that can't be met, DataError
    for a folder that holds another world, or for a haystack that can't be divided among the splits.
    """
    root = Path(folder)
    if world.pixels % 2 or world.pixels < 16:
        raise ConfigError(f"world.pixels {world.pixels}: the video needs an even number of at least 16")
    drawn = draw_world(world, seed=seed)
    tasks = {split: tasks_of(world, drawn[split], seed=seed, split=split) for split in SPLITS}
    for split in SPLITS:  # before anything is written: a world with a mistake in it could only be deleted
        if not tasks[split]:
            asked = f"world.questions {list(world.questions)} can't be asked of any clip of the split {split}"
            raise ConfigError(f"{asked}; give other questions, or world.events more")
    sources = divided(hay(world.haystack) if world.haystack else [])
    budgets = tuple(dict.fromkeys(budgets))
    known = {source.path.name: source.digest for split in SPLITS for source in sources[split]}
    settings = world.model_dump(mode="json", exclude={"media", "image"})
    given = {"seed": seed, "settings": settings, "budgets": list(budgets), "sources": known}
    claim(root, given, packages=("av", "numpy"))
    for split in SPLITS:
        clips = root / split / "clips"
        clips.mkdir(parents=True, exist_ok=True)
        behind = {}
        for index, labels in enumerate(drawn[split]):
            path, pixels = clips / f"{index:05d}.mp4", seed_of("pixels", seed, split, index)
            times = _behind(world, labels, pixels, sources[split])
            if not path.exists():
                write_clip(path, film(world, labels, pixels, times), world.fps)
            behind[path.name] = shown(*times) if times else None
            if progress:
                progress(split, index + 1, len(drawn[split]))
        traces = demos_of(tasks[split], world, seed=seed, budgets=budgets) if split == "train" else []
        _write_rows(root / split, drawn[split], behind, tasks[split], traces)


def draw_world(world: World, *, seed: int) -> dict[str, list[Labels]]:
    """What every clip of every split shows; no two clips show the same colours at the same times."""
    return draw_splits(
        world,
        lambda rng: draw_labels(world, rng),
        signature=lambda labels: signature(labels.events),
        name="labels",
        seed=seed,
        mend="so few events fit the clips that they would repeat; give world.seconds or world.events more",
    )


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


def demos_of(tasks: list[Task], world: World, *, seed: int, budgets: Sequence[int]) -> list[Demo]:
    """The demonstrations of a split, in the language of the world's traces."""
    if world.traces == "calls":
        return traces_of(tasks, seed=seed, budgets=budgets)
    code = world.traces == "code"
    whole = [coded(task, world.fps) if code else seen(task) for task in tasks]
    # As many questions that only ask what is there: a model learns from them to see.
    fps = world.fps if code else None
    drills = [drilled(task, random.Random(seed_of("drill", seed, task.id)), fps) for task in tasks]
    return [each for pair in zip(whole, drills, strict=True) for each in pair]


def traces_of(
    tasks: list[Task], *, seed: int, budgets: Sequence[int] = FRAME_BUDGETS, direct: float = DIRECT
) -> list[Demo]:
    """One demonstration per task and frame budget, and as many of sub-agents alone.

    Where the overview is enough, a share `direct` answers at once.
    """
    found = []
    for task in tasks:
        for frames in budgets:
            rng = random.Random(seed_of("trace", seed, task.id, frames))
            found.append(demo(task, trace(task, uniform_times(task.extras["seconds"], frames), rng, direct=direct)))
            found.append(practice(task, rng))
    return found


Background = tuple[Source, tuple[float, ...]]  # a file of the haystack, and the times of its frames


def film(world: World, labels: Labels, seed: int, behind: Background | None) -> Iterator[Frames]:
    """The frames of a clip, uint8 RGB [pixels, pixels, 3] each, before a painted background or the haystack's."""
    if behind:
        source, times = behind
        blocks: Iterator[Frames] = (
            frames_of(source, times[at : at + BLOCK], world.pixels) for at in range(0, len(times), BLOCK)
        )
    else:
        blocks = drifting(_count(world, labels), world.pixels, world.fps, seed)
    start = 0
    for frames in blocks:
        draw(frames, (*labels.events, *labels.distractors), world.fps, start=start)
        yield from frames
        start += len(frames)


def _behind(world: World, labels: Labels, seed: int, sources: Sequence[Source]) -> Background | None:
    return chosen(sources, seed, count=_count(world, labels), fps=world.fps) if sources else None


def _count(world: World, labels: Labels) -> int:
    return max(1, round(labels.seconds * world.fps))


# ---- files ---------------------------------------------------------------------------------------------------------


def _write_rows(
    folder: Path, drawn: list[Labels], behind: Mapping[str, Stretch | None], tasks: list[Task], traces: list[Demo]
) -> None:
    entries = {}
    for labels, (name, source) in zip(drawn, behind.items(), strict=True):
        digest = files.digest(str(folder / "clips" / name))
        entries[name] = {"digest": digest, "source": asdict(source) if source else None, **asdict(labels)}
    write_split(folder, "events.json", entries, tasks, traces)


def read_labels(folder: str | os.PathLike[str], split: str) -> dict[str, tuple[str, Labels]]:
    """Per clip of a split, by file name: the digest of its file and what it shows."""
    found = {}
    for name, entry in read_json(Path(folder) / split / "events.json").items():
        events, distractors = (tuple(Event(**event) for event in entry[key]) for key in ("events", "distractors"))
        found[name] = entry["digest"], Labels(seconds=entry["seconds"], events=events, distractors=distractors)
    return found


def read_sources(folder: str | os.PathLike[str], split: str) -> dict[str, Stretch]:
    """Per clip of a split that has a file of the haystack behind it: which, and what of it."""
    entries = read_json(Path(folder) / split / "events.json").items()
    return {name: Stretch(**entry["source"]) for name, entry in entries if entry.get("source")}
