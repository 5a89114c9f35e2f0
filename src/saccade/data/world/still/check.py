"""Is a world of pictures sound? And a picture of it for people."""

import os
from collections.abc import Mapping
from pathlib import Path

from PIL import Image, ImageDraw

from saccade.data.world.check import WorldReport, checked
from saccade.data.world.folder import SPLITS
from saccade.data.world.still import phrases
from saccade.data.world.still.cards import Scene
from saccade.data.world.still.make import read_scenes, signature
from saccade.data.world.still.questions import cards_of, gold_of
from saccade.media import image
from saccade.types import Task

SHOWN, ZOOM, GAP, LINE = 240, 48, 6, 14  # pixels: a picture, a card, between them, a line of text


def check_stills(folder: str | os.PathLike[str]) -> WorldReport:
    """Check the world in `folder`: digests, leaks between splits (of files, of cards), answers.

    Raises DataError for missing files.
    """
    root = Path(folder)
    scenes = {split: read_scenes(root, split) for split in SPLITS}
    return checked(root, "pictures", scenes, says=lambda scene: f"cards {signature(scene)}", wrong=_wrong)


def _wrong(task: Task, scenes: Mapping[str, tuple[str, Scene]]) -> list[str]:
    """What is wrong with a task, by the labels of its picture."""
    name = Path(task.media[0].path).name
    if name not in scenes:
        return [f"task {task.id}: its picture {name} has no labels"]
    scene = scenes[name][1]
    found = []
    if [(card.box, card.colour, card.mark, card.sign) for card in scene.cards] != [
        (card.box, card.colour, card.mark, card.sign) for card in cards_of(task)
    ]:
        found.append(f"task {task.id}: its cards are not those of its picture")
    gold = gold_of(task, scene.cards)
    if gold != task.gold:
        found.append(f"task {task.id}: gold {task.gold!r}, but the labels say {gold!r}")
    return found


def still_sheet(
    folder: str | os.PathLike[str],
    out_png: str | os.PathLike[str],
    *,
    split: str = "train",
    pictures: int = 6,
    overview: int = 64,
) -> None:
    """Draw a row per picture: the whole, the whole as `overview` x `overview` pixels show it, and each card alone."""
    scenes = list(read_scenes(folder, split).items())[:pictures]
    widest = max((len(scene.cards) + len(scene.distractors) for _, (_, scene) in scenes), default=0)
    tall = SHOWN + LINE + GAP
    sheet = Image.new("RGB", (2 * (SHOWN + GAP) + widest * (ZOOM + GAP), max(1, len(scenes)) * tall), "white")
    pen = ImageDraw.Draw(sheet)
    for row, (name, (_, scene)) in enumerate(scenes):
        whole = image.read(str(Path(folder) / split / "pictures" / name))
        listed = ", ".join(f"{card.colour} {phrases.mark(card)} {list(card.box)}" for card in scene.cards)
        pen.text((GAP, row * tall), f"{name}: {listed}", fill="black")
        small = whole.resize((overview, overview), Image.Resampling.BICUBIC)
        sheet.paste(whole.resize((SHOWN, SHOWN)), (0, row * tall + LINE))
        sheet.paste(small.resize((SHOWN, SHOWN), Image.Resampling.NEAREST), (SHOWN + GAP, row * tall + LINE))
        for place, card in enumerate((*scene.cards, *scene.distractors)):
            left = 2 * (SHOWN + GAP) + place * (ZOOM + GAP)
            sheet.paste(whole.crop(card.box).resize((ZOOM, ZOOM)), (left, row * tall + LINE))
    sheet.save(out_png)
