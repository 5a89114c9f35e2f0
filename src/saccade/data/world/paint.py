"""Pixels: backgrounds that drift slowly, and needles drawn on frames. uint8 RGB [time, height, width, 3] throughout."""

import functools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from saccade.data.world.events import PALETTE, Event

Frames = NDArray[np.uint8]
Mask = NDArray[np.bool_]

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
    rng = np.random.default_rng(seed)
    level, tint = rng.uniform(50, 120), rng.uniform(-12, 12, 3).astype(np.float32)
    shade = _clouds(count, pixels, fps, rng) if rng.random() < 0.5 else _gradient(count, pixels, fps, rng)
    grain = rng.normal(0, 3, (pixels, pixels))
    grey = (level + 35 * shade + grain).astype(np.float32)
    # Channel by channel: a third of the memory, and no broadcast over the last, short axis.
    return np.stack([np.clip(grey + channel, 0, 255).astype(np.uint8) for channel in tint], axis=-1)


def _clouds(count: int, pixels: int, fps: float, rng: np.random.Generator) -> NDArray[np.float64]:
    """Smooth noise in [-1, 1] that slides by a pixel or so per second."""
    # Noise at a few knots, blended by cosines in between, wraps around: the picture can slide for ever.
    cells = int(rng.integers(3, 6))
    knots = rng.uniform(-1, 1, (cells, cells))
    place = np.arange(pixels) * cells / pixels
    low = place.astype(int)
    share = (1 - np.cos(np.pi * (place - low))) / 2
    rows = knots[low] * (1 - share)[:, None] + knots[(low + 1) % cells] * share[:, None]
    field = rows[:, low] * (1 - share) + rows[:, (low + 1) % cells] * share
    speed = rng.uniform(-1.5, 1.5, 2) * pixels / 64
    moves = (np.arange(count)[:, None] / fps * speed).astype(int)
    return np.stack([np.roll(field, (int(dy), int(dx)), axis=(0, 1)) for dy, dx in moves])


def _gradient(count: int, pixels: int, fps: float, rng: np.random.Generator) -> NDArray[np.float64]:
    """A slope in [-1, 1] that turns by a few degrees per second."""
    angle = rng.uniform(0, 2 * np.pi) + rng.uniform(-0.1, 0.1) * np.arange(count) / fps
    axis = np.linspace(-1, 1, pixels)
    x, y = np.cos(angle)[:, None, None] * axis, np.sin(angle)[:, None, None] * axis[:, None]
    slope: NDArray[np.float64] = (x + y) / np.sqrt(2)
    return slope


def draw(frames: Frames, events: Sequence[Event], fps: float) -> None:
    """Draw each event, in place, on the frames whose times i/fps it holds."""
    pixels = frames.shape[1]
    for event in events:
        # A frame i/fps shows the event if start <= i/fps < end; the small number is for times that aren't exact.
        body, ink = _stamp(event.shape, pixels, event.x, event.y, event.size)
        first = int(np.ceil(event.start * fps - 1e-9))
        last = int(np.ceil(event.end * fps - 1e-9))
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
