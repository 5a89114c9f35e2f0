"""Draw a contact sheet of a dataset: clips as frames with their times, or images with their cards; with the labels."""

import os
from pathlib import Path

from PIL import Image, ImageDraw

from saccade.data.synthetic.events import PALETTE, Labels
from saccade.data.synthetic.generate import VideoDataset
from saccade.data.synthetic.image.generate import ImageDataset
from saccade.data.synthetic.image.text_templates import format_symbol
from saccade.media import image, video
from saccade.media.frame_sampling import sample_uniform_times

CELL, GAP, LINE_HEIGHT = 72, 6, 14  # pixels
IMAGE_SIZE, OBJECT_SIZE = 240, 48  # pixels, of an image and of a card


def draw_video_contact_sheet(
    folder: str | os.PathLike[str],
    out_path: str | os.PathLike[str],
    *,
    split: str = "train",
    num_clips: int = 6,
    frames_per_clip: int = 12,
) -> None:
    """Draw a row per clip: evenly spaced frames, and a frame from the middle of each event, in temporal order."""
    labels = list(VideoDataset.read_labels(folder, split).items())[:num_clips]
    rows = [_draw_row(Path(folder) / split / "clips" / name, clip, frames_per_clip) for name, (_, clip) in labels]
    width = max((row.width for row in rows), default=CELL)
    sheet = Image.new("RGB", (width, max(1, len(rows)) * (CELL + 3 * LINE_HEIGHT)), "white")
    draw = ImageDraw.Draw(sheet)
    for i, (row, (name, (_, clip))) in enumerate(zip(rows, labels, strict=True)):
        top = i * (CELL + 3 * LINE_HEIGHT)
        caption = ", ".join(f"{event.color} {event.shape} {event.start:g}-{event.end:g}" for event in clip.events)
        draw.text((GAP, top), f"{name}: {caption}", fill="black")
        sheet.paste(row, (0, top + LINE_HEIGHT))
    sheet.save(out_path)


def _draw_row(path: Path, labels: Labels, frames_per_clip: int) -> Image.Image:
    all_events = (*labels.events, *labels.distractors)
    times = sorted(
        {
            *sample_uniform_times(labels.seconds, frames_per_clip),
            *((event.start + event.end) / 2 for event in all_events),
        }
    )
    row = Image.new("RGB", (len(times) * (CELL + GAP) + GAP, CELL + LINE_HEIGHT + GAP), "white")
    draw = ImageDraw.Draw(row)
    for i, (time, frame) in enumerate(
        zip(times, video.decode_frames(video.index_video(str(path)), times), strict=True)
    ):
        left = GAP + i * (CELL + GAP)
        row.paste(Image.fromarray(frame.pixels).resize((CELL, CELL)), (left, 0))
        # At most one event is visible at a time.
        event = next((event for event in all_events if event.is_visible_at(time)), None)
        if event:
            color = PALETTE.get(event.color, (0, 0, 0))
            draw.rectangle((left - 2, 0, left + CELL + 1, CELL - 1), outline=color, width=3)
        draw.text((left, CELL), f"{time:g} s", fill="black")
    return row


def draw_image_contact_sheet(
    folder: str | os.PathLike[str],
    out_path: str | os.PathLike[str],
    *,
    split: str = "train",
    num_images: int = 6,
    overview_pixels: int = 64,
) -> None:
    """Draw a row per image: the image, its overview of `overview_pixels` x `overview_pixels`, and each card alone."""
    scenes = list(ImageDataset.read_labels(folder, split).items())[:num_images]
    max_cards = max((len(scene.objects) + len(scene.distractors) for _, (_, scene) in scenes), default=0)
    row_height = IMAGE_SIZE + LINE_HEIGHT + GAP
    sheet = Image.new(
        "RGB", (2 * (IMAGE_SIZE + GAP) + max_cards * (OBJECT_SIZE + GAP), max(1, len(scenes)) * row_height), "white"
    )
    draw = ImageDraw.Draw(sheet)
    for row, (name, (_, scene)) in enumerate(scenes):
        top = row * row_height
        pixels = image.read_image(str(Path(folder) / split / "pictures" / name))
        caption = ", ".join(f"{card.color} {format_symbol(card)} {list(card.box)}" for card in scene.objects)
        draw.text((GAP, top), f"{name}: {caption}", fill="black")
        overview = pixels.resize((overview_pixels, overview_pixels), Image.Resampling.BICUBIC)
        sheet.paste(pixels.resize((IMAGE_SIZE, IMAGE_SIZE)), (0, top + LINE_HEIGHT))
        sheet.paste(
            overview.resize((IMAGE_SIZE, IMAGE_SIZE), Image.Resampling.NEAREST),
            (IMAGE_SIZE + GAP, top + LINE_HEIGHT),
        )
        for index, card in enumerate((*scene.objects, *scene.distractors)):
            left = 2 * (IMAGE_SIZE + GAP) + index * (OBJECT_SIZE + GAP)
            sheet.paste(pixels.crop(card.box).resize((OBJECT_SIZE, OBJECT_SIZE)), (left, top + LINE_HEIGHT))
    sheet.save(out_path)
