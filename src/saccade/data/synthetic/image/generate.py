"""A world of pictures on disk: pictures with small cards, tasks with exact labels, traces to learn from.

```
folder/world.json                     settings, seed, versions
folder/{train,validation,test}/
    pictures/00000.png …              the pictures
    cards.json                        per picture: digest of the file, what is shown where
    tasks.jsonl                       `Task` rows (see questions.py for their extras)
    traces.jsonl                      train alone: `Demo` rows, one per task and per chart
```
"""

import os
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from saccade.data.world.folder import SPLITS, claim, read_json
from saccade.data.world.questions import Balance
from saccade.data.world.splits import draw_splits, write_split
from saccade.data.world.still import phrases
from saccade.data.world.still.cards import Card, Scene, draw_chart, draw_scene
from saccade.data.world.still.oracle import demo, listed
from saccade.data.world.still.paint import painted, write_picture
from saccade.data.world.still.questions import draw_tasks
from saccade.media import files
from saccade.sections import Pictures, World
from saccade.types import Demo, Task, digest_of, seed_of

Progress = Callable[[str, int, int], None]


def make_stills(folder: str | os.PathLike[str], world: World, *, seed: int, progress: Progress | None = None) -> None:
    """Make the world in `folder`, or go on where an interrupted one stopped.

    The same settings and seed give the same files. `progress(split, done, total)` is told of every picture. Raises
    ConfigError for settings that can't be met, DataError for a folder that holds another world.
    """
    root = Path(folder)
    drawn = draw_stills(world, seed=seed)
    rows = {split: tasks_of(world.image, drawn[split], seed=seed, split=split) for split in SPLITS}
    traces = traces_of(rows["train"], world)
    for index in range(world.charts):  # named after the pictures, as if they were more of them
        chart = draw_chart(world.image, random.Random(seed_of("chart", seed, index)))
        place, name = _names("train", len(drawn["train"]))
        drawn["train"].append(chart)
        traces.append(listed(chart.cards, picture=place, name=name))
    settings = world.model_dump(mode="json", include={"media", "image", "traces", *SPLITS})
    claim(root, {"seed": seed, "settings": settings}, packages=("pillow", "numpy"))
    for split in SPLITS:
        pictures = root / split / "pictures"
        pictures.mkdir(parents=True, exist_ok=True)
        for index, scene in enumerate(drawn[split]):
            path = pictures / f"{index:05d}.png"
            if not path.exists():
                write_picture(path, painted(scene, seed_of("pixels", seed, split, index)))
            if progress:
                progress(split, index + 1, len(drawn[split]))
        _write_rows(root / split, drawn[split], rows[split], traces if split == "train" else [])


def draw_stills(world: World, *, seed: int) -> dict[str, list[Scene]]:
    """What every picture of every split shows; no two show the same cards in the same places."""
    return draw_splits(
        world,
        lambda rng: draw_scene(world.image, rng),
        signature=signature,
        name="cards",
        seed=seed,
        mend="so few cards fit the pictures that they would repeat; give world.image.cards more",
    )


def signature(scene: Scene) -> str:
    """What a picture shows, whatever the background and the distractors: equal for those that have the same answers."""
    return digest_of([asdict(card) for card in scene.cards])


def tasks_of(dials: Pictures, drawn: Sequence[Scene], *, seed: int, split: str) -> list[Task]:
    """The tasks of a split, answers balanced over all its pictures."""
    rng = random.Random(seed_of("questions", seed, split))
    balance = Balance(rng)
    tasks: list[Task] = []
    for index, scene in enumerate(drawn):
        place, name = _names(split, index)
        tasks += draw_tasks(dials, scene, balance, rng, picture=place, name=name)
    return tasks


def _names(split: str, index: int) -> tuple[str, str]:
    """A picture's path as tasks have it, and what their ids begin with."""
    return f"pictures/{index:05d}.png", f"{split}-{index:05d}"


def traces_of(tasks: Sequence[Task], world: World) -> list[Demo]:
    """One demonstration per task, in the language of the world's traces."""
    looks = {"calls": phrases.zooming, "code": phrases.coding, "answers": None}
    return [demo(task, look=looks[world.traces]) for task in tasks]


def _write_rows(folder: Path, drawn: Sequence[Scene], tasks: Sequence[Task], traces: Sequence[Demo]) -> None:
    names = [f"{index:05d}.png" for index in range(len(drawn))]
    digests = [files.digest(str(folder / "pictures" / name)) for name in names]
    entries = {
        name: {"digest": digest, **asdict(scene)} for name, digest, scene in zip(names, digests, drawn, strict=True)
    }
    write_split(folder, "cards.json", entries, tasks, traces)


def read_scenes(folder: str | os.PathLike[str], split: str) -> dict[str, tuple[str, Scene]]:
    """Per picture of a split, by file name: the digest of its file and what it shows. Raises DataError."""
    found = {}
    for name, entry in read_json(Path(folder) / split / "cards.json").items():
        cards, distractors = (tuple(Card(**card) for card in entry[key]) for key in ("cards", "distractors"))
        found[name] = entry["digest"], Scene(pixels=entry["pixels"], cards=cards, distractors=distractors)
    return found
