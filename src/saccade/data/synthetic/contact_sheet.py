"""Draw a contact sheet of a dataset: clips as frames with their times, or images with their cards; with the labels."""

import os
from itertools import islice
from pathlib import Path

from PIL import Image, ImageDraw, ImageOps

from saccade.data.synthetic.dataset import read_media_kind
from saccade.data.synthetic.events import PALETTE
from saccade.data.synthetic.generate import VideoDataset
from saccade.data.synthetic.image.generate import ImageDataset
from saccade.data.synthetic.image.text_templates import format_symbol
from saccade.media import image, video
from saccade.media.frame_sampling import sample_uniform_times

NUM_ROWS, FRAMES_PER_CLIP = 6, 12
FRAME_SIZE, IMAGE_SIZE, OVERVIEW_SIZE, CARD_SIZE = 72, 240, 64, 48  # pixels
BORDER, GAP, LINE_HEIGHT = 3, 6, 14  # pixels

Row = tuple[str, list[tuple[Image.Image, str]]]  # a title, and tiles with the text below them


def draw_contact_sheet(folder: str | os.PathLike[str], out_path: str | os.PathLike[str]) -> None:
    """Draw the first files of a dataset's training split, a row each, with their labels."""
    rows = (_list_image_rows if read_media_kind(folder) == "image" else _list_video_rows)(Path(folder))
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


def _list_video_rows(root: Path) -> list[Row]:
    """List, per clip, evenly spaced frames and one from the middle of each event, framed in the event's color."""
    rows = []
    for name, (_, labels) in islice(VideoDataset.read_labels(root, "train").items(), NUM_ROWS):
        title = ", ".join(f"{event.color} {event.shape} {event.start:g}-{event.end:g}" for event in labels.events)
        events = (*labels.events, *labels.distractors)
        middles = ((event.start + event.end) / 2 for event in events)
        times = sorted({*sample_uniform_times(labels.seconds, FRAMES_PER_CLIP), *middles})
        frames = video.decode_frames(video.index_video(str(root / "train" / "clips" / name)), times)
        tiles = []
        for time, frame in zip(times, frames, strict=True):
            # At most one event is visible at a time.
            color = next((PALETTE.get(event.color, "black") for event in events if event.is_visible_at(time)), "white")
            picture = Image.fromarray(frame.pixels).resize((FRAME_SIZE, FRAME_SIZE))
            tiles.append((ImageOps.expand(picture, BORDER, color), f"{time:g} s"))
        rows.append((f"{name}: {title}", tiles))
    return rows


def _list_image_rows(root: Path) -> list[Row]:
    """List, per image, the image, its overview, and each card alone."""
    rows = []
    for name, (_, scene) in islice(ImageDataset.read_labels(root, "train").items(), NUM_ROWS):
        title = ", ".join(f"{card.color} {format_symbol(card)} {list(card.box)}" for card in scene.objects)
        pixels = image.read_image(str(root / "train" / "pictures" / name))
        overview = pixels.resize((OVERVIEW_SIZE, OVERVIEW_SIZE), Image.Resampling.BICUBIC)
        tiles = [
            pixels.resize((IMAGE_SIZE, IMAGE_SIZE)),
            overview.resize((IMAGE_SIZE, IMAGE_SIZE), Image.Resampling.NEAREST),
            *(pixels.crop(card.box).resize((CARD_SIZE, CARD_SIZE)) for card in (*scene.objects, *scene.distractors)),
        ]
        rows.append((f"{name}: {title}", [(tile, "") for tile in tiles]))
    return rows
