"""Pixels: backgrounds that drift slowly, and needles drawn on frames. uint8 RGB [time, height, width, 3] throughout."""

import functools
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from saccade.data.world.events import PALETTE, Event

Frames = NDArray[np.uint8]
Mask = NDArray[np.bool_]
Shade = Callable[[NDArray[np.int64]], NDArray[np.float64]]  # frame numbers [N] to shades [N, pixels, pixels] in [-1, 1]
BLOCK = 256  # frames that are held at once, however long a clip is

DIGITS = {  # rows of three bits, top to bottom
    "0": (7, 5, 5, 5, 7),
    "1": (2, 6, 2, 2, 7),
    "2": (7, 1, 7, 4, 7),
    "3": (7, 1, 7, 1, 7),
    "4": (5, 5, 7, 1, 1),
    "5": (7, 4, 7, 1, 7),
    "6": (7, 4, 7, 5, 7),
    "7": (7, 1, 1, 2, 2),
    "8": (7, 5, 7, 5, 7),
    "9": (7, 5, 7, 1, 7),
}
WHITE, INK = (244, 244, 240), (16, 16, 18)


def background(count: int, pixels: int, fps: float, seed: int) -> Frames:
    """A dim, nearly grey picture that drifts slowly: clouds or a turning gradient, different for every seed."""
    return np.concatenate(list(drifting(count, pixels, fps, seed)))


def drifting(count: int, pixels: int, fps: float, seed: int) -> Iterator[Frames]:
    """The same, `BLOCK` frames at a time."""
    rng = np.random.default_rng(seed)
    level, tint = rng.uniform(50, 120), rng.uniform(-12, 12, 3).astype(np.float32)
    shade = _clouds(pixels, fps, rng) if rng.random() < 0.5 else _gradient(pixels, fps, rng)
    grain = rng.normal(0, 3, (pixels, pixels))
    for start in range(0, count, BLOCK):
        grey = (level + 35 * shade(np.arange(start, min(start + BLOCK, count))) + grain).astype(np.float32)
        # Channel by channel: a third of the memory, and no broadcast over the last, short axis.
        yield np.stack([np.clip(grey + channel, 0, 255).astype(np.uint8) for channel in tint], axis=-1)


def _clouds(pixels: int, fps: float, rng: np.random.Generator) -> Shade:
    """Smooth noise that slides by a pixel or so per second."""
    # Noise at a few knots, blended by cosines in between, wraps around: the picture can slide for ever.
    cells = int(rng.integers(3, 6))
    knots = rng.uniform(-1, 1, (cells, cells))
    place = np.arange(pixels) * cells / pixels
    low = place.astype(int)
    share = (1 - np.cos(np.pi * (place - low))) / 2
    rows = knots[low] * (1 - share)[:, None] + knots[(low + 1) % cells] * share[:, None]
    field = rows[:, low] * (1 - share) + rows[:, (low + 1) % cells] * share
    speed = rng.uniform(-1.5, 1.5, 2) * pixels / 64

    def shade(numbers: NDArray[np.int64]) -> NDArray[np.float64]:
        moves = (numbers[:, None] / fps * speed).astype(int)
        return np.stack([np.roll(field, (int(dy), int(dx)), axis=(0, 1)) for dy, dx in moves])

    return shade


def _gradient(pixels: int, fps: float, rng: np.random.Generator) -> Shade:
    """A slope that turns by a few degrees per second."""
    begin, turn = rng.uniform(0, 2 * np.pi), rng.uniform(-0.1, 0.1)
    axis = np.linspace(-1, 1, pixels)

    def shade(numbers: NDArray[np.int64]) -> NDArray[np.float64]:
        angle = begin + turn * numbers / fps
        x, y = np.cos(angle)[:, None, None] * axis, np.sin(angle)[:, None, None] * axis[:, None]
        slope: NDArray[np.float64] = (x + y) / np.sqrt(2)
        return slope

    return shade


def draw(frames: Frames, events: Sequence[Event], fps: float, *, start: int = 0) -> None:
    """Draw each event, in place, on the frames whose times i/fps it holds; the first of `frames` is number `start`."""
    pixels = frames.shape[1]
    for event in events:
        # A frame i/fps shows the event if start <= i/fps < end; the small number is for times that aren't exact.
        body, ink = _stamp(event.shape, pixels, event.x, event.y, event.size)
        first = max(0, int(np.ceil(event.start * fps - 1e-9)) - start)
        last = max(0, int(np.ceil(event.end * fps - 1e-9)) - start)
        frames[first:last, body] = PALETTE.get(event.colour, WHITE)
        frames[first:last, ink] = INK


@functools.lru_cache(maxsize=256)
def _stamp(shape: str, pixels: int, x: float, y: float, size: float) -> tuple[Mask, Mask]:
    """Which pixels [height, width] a shape fills with its colour, and which with ink."""
    axis = (np.arange(pixels) + 0.5) / pixels
    right, down = (axis - x) / (size / 2), ((axis - y) / (size / 2))[:, None]
    nothing = np.zeros((pixels, pixels), dtype=np.bool_)
    if shape == "disc":
        return right**2 + down**2 <= 1, nothing
    if shape == "square":
        return (np.abs(right) <= 0.9) & (np.abs(down) <= 0.9), nothing
    card = (np.abs(right) <= 1) & (np.abs(down) <= 0.8)
    if shape == "card":
        return card, nothing
    bits = np.array([[row >> (2 - i) & 1 for i in range(3)] for row in DIGITS[shape]], dtype=np.bool_)
    column = np.clip(((right + 0.45) / 0.9 * 3).astype(int), 0, 2)
    row = np.clip(((down[:, 0] + 0.6) / 1.2 * 5).astype(int), 0, 4)
    ink = bits[row][:, column] & (np.abs(right) <= 0.45) & (np.abs(down) <= 0.6)
    return card, ink
