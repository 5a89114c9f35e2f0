"""Draw a contact sheet of a dataset: clips as frames with their times, or images with their cards; with the labels."""

import os
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageOps

from saccade.data.synthetic import DATASETS
from saccade.data.synthetic.dataset import read_dataset_kind
from saccade.data.synthetic.events import PALETTE, Event, Labels
from saccade.data.synthetic.image.map_scene import MapScene
from saccade.data.synthetic.image.objects import ImageScene, PixelBox
from saccade.data.synthetic.image.text_templates import format_symbol
from saccade.data.synthetic.needles.clip import NeedleClip
from saccade.media import image, video
from saccade.media.frame_sampling import sample_uniform_times

NUM_ROWS, FRAMES_PER_CLIP = 6, 12
FRAME_SIZE, IMAGE_SIZE, OVERVIEW_SIZE, CARD_SIZE = 72, 240, 64, 48  # pixels
BORDER, GAP, LINE_HEIGHT = 3, 6, 14  # pixels

Row = tuple[str, list[tuple[Image.Image, str]]]  # a title, and tiles with the text below them


def draw_contact_sheet(folder: str | os.PathLike[str], out_path: str | os.PathLike[str]) -> None:
    """Draw the first files of a dataset's training split, a row each, with their labels."""
    row_builders: dict[str, Callable[[Path, Any], Row]] = {
        "image": _build_image_row,
        "map": _build_map_row,
        "needles": _build_needle_row,
        "video": _build_video_row,
    }
    kind = read_dataset_kind(folder)
    dataset, build_row = DATASETS[kind], row_builders[kind]
    files = Path(folder) / "train" / dataset.media_folder
    labels = islice(dataset.read_labels(folder, "train").items(), NUM_ROWS)
    rows = [build_row(files / name, content) for name, (_, content) in labels]
    height = max(tile.height for _, tiles in rows for tile, _ in tiles) + 2 * LINE_HEIGHT
    width = max(sum(tile.width + GAP for tile, _ in tiles) for _, tiles in rows)
    sheet = Image.new("RGB", (width, len(rows) * height), "white")
    draw = ImageDraw.Draw(sheet)
    for index, (title, tiles) in enumerate(rows):
        left, top = 0, index * height + LINE_HEIGHT
        draw.text((GAP, index * height), title, fill="black")
        for tile, text in tiles:
            sheet.paste(tile, (left, top))
            draw.text((left, top + tile.height), text, fill="black")
            left += tile.width + GAP
    sheet.save(out_path)


def _build_video_row(path: Path, labels: Labels) -> Row:
    """Show evenly spaced frames and one from the middle of each event, framed in the event's color."""
    title = ", ".join(f"{event.color} {event.shape} {event.start:g}-{event.end:g}" for event in labels.events)
    events = (*labels.events, *labels.distractors)
    return f"{path.name}: {title}", _list_tiles(path, labels.seconds, events)


def _build_needle_row(path: Path, clip: NeedleClip) -> Row:
    """Show evenly spaced frames, the first cue and the needle; frames of the needle have its color."""
    needle = clip.needle
    title = f"{path.name}: {needle.color} {needle.shape} {needle.start:g}-{needle.end:g}, place {clip.place}"
    return title, _list_tiles(path, clip.seconds, (*clip.marks[:1], needle))


def _list_tiles(path: Path, seconds: float, events: Sequence[Event]) -> list[tuple[Image.Image, str]]:
    """Return evenly spaced frames of a clip and one from the middle of each event, framed in the event's color."""
    middles = ((event.start + event.end) / 2 for event in events)
    times = sorted({*sample_uniform_times(seconds, FRAMES_PER_CLIP), *middles})
    frames = video.decode_frames(video.index_video(str(path)), times)
    tiles = []
    for time, frame in zip(times, frames, strict=True):
        # At most one event is visible at a time.
        color = next((PALETTE.get(event.color, "black") for event in events if event.is_visible_at(time)), "white")
        picture = Image.fromarray(frame.pixels).resize((FRAME_SIZE, FRAME_SIZE))
        tiles.append((ImageOps.expand(picture, BORDER, color), f"{time:g} s"))
    return tiles


def _build_image_row(path: Path, scene: ImageScene) -> Row:
    """Show the image, its overview, and each card alone."""
    title = ", ".join(f"{card.color} {format_symbol(card)} {list(card.box)}" for card in scene.objects)
    return f"{path.name}: {title}", _cut_tiles(path, [card.box for card in (*scene.objects, *scene.distractors)])


def _build_map_row(path: Path, scene: MapScene) -> Row:
    """Show the picture, its overview, the label, and the entry that explains it."""
    entry = scene.entries[scene.place]
    title = f"{path.name}: {' '.join(scene.look or ())} entry {scene.place} {list(entry.box)}: {entry.symbol}"
    return title, _cut_tiles(path, [scene.label_box, entry.box])


def _cut_tiles(path: Path, boxes: Sequence[PixelBox]) -> list[tuple[Image.Image, str]]:
    """Return the image, its overview, and each box of it (pixels)."""
    pixels = image.read_image(str(path))
    overview = pixels.resize((OVERVIEW_SIZE, OVERVIEW_SIZE), Image.Resampling.BICUBIC)
    tiles = [
        pixels.resize((IMAGE_SIZE, IMAGE_SIZE)),
        overview.resize((IMAGE_SIZE, IMAGE_SIZE), Image.Resampling.NEAREST),
        *(pixels.crop(box).resize((CARD_SIZE, CARD_SIZE)) for box in boxes),
    ]
    return [(tile, "") for tile in tiles]
