"""A picture of a world for people: frames of some clips with their times, events framed in their colours."""

import os
from pathlib import Path

from PIL import Image, ImageDraw

from saccade.data.world.events import PALETTE, Event, Labels
from saccade.data.world.make import read_labels
from saccade.media import video
from saccade.media.picks import uniform_times

CELL, GAP, LINE = 72, 6, 14  # pixels


def contact_sheet(
    folder: str | os.PathLike[str],
    out_png: str | os.PathLike[str],
    *,
    split: str = "train",
    clips: int = 6,
    columns: int = 12,
) -> None:
    """Draw a row per clip: frames evenly over its length and one from the middle of each event, in order of time."""
    labels = list(read_labels(folder, split).items())[:clips]
    rows = [_row(Path(folder) / split / "clips" / name, shown, columns) for name, (_, shown) in labels]
    wide = max((row.width for row in rows), default=CELL)
    sheet = Image.new("RGB", (wide, max(1, len(rows)) * (CELL + 3 * LINE)), "white")
    pen = ImageDraw.Draw(sheet)
    for i, (row, (name, (_, shown))) in enumerate(zip(rows, labels, strict=True)):
        top = i * (CELL + 3 * LINE)
        listed = ", ".join(f"{event.colour} {event.shape} {event.start:g}-{event.end:g}" for event in shown.events)
        pen.text((GAP, top), f"{name}: {listed}", fill="black")
        sheet.paste(row, (0, top + LINE))
    sheet.save(out_png)


def _row(path: Path, labels: Labels, columns: int) -> Image.Image:
    everything = (*labels.events, *labels.distractors)
    times = sorted({*uniform_times(labels.seconds, columns), *((event.start + event.end) / 2 for event in everything)})
    row = Image.new("RGB", (len(times) * (CELL + GAP) + GAP, CELL + LINE + GAP), "white")
    pen = ImageDraw.Draw(row)
    for i, (time, frame) in enumerate(zip(times, video.decode(video.survey(str(path)), times), strict=True)):
        left = GAP + i * (CELL + GAP)
        row.paste(Image.fromarray(frame.pixels).resize((CELL, CELL)), (left, 0))
        # At most one event is ever shown at a time.
        shown = next((event for event in everything if event.holds(time)), None)
        if shown:
            pen.rectangle((left - 2, 0, left + CELL + 1, CELL - 1), outline=_frame(shown), width=3)
        pen.text((left, CELL), f"{time:g} s", fill="black")
    return row


def _frame(event: Event) -> tuple[int, int, int]:
    return PALETTE.get(event.colour, (0, 0, 0))
