"""Render slowly drifting backgrounds, and draw events on frames: uint8 RGB [time, height, width, 3]."""

import functools
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from saccade.data.synthetic.events import PALETTE, Event

Frames = NDArray[np.uint8]
Mask = NDArray[np.bool_]
# From frame numbers [N] to shades [N, pixels, pixels] in [-1, 1].
Shader = Callable[[NDArray[np.int64]], NDArray[np.float64]]
FRAMES_PER_BLOCK = 256  # in memory at a time, also of a long clip

DIGIT_GLYPHS = {  # rows of three bits, top to bottom
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


def render_background(num_frames: int, pixels: int, fps: float, seed: int) -> Iterator[Frames]:
    """Yield blocks of a dim, nearly gray background that drifts slowly: clouds or a rotating gradient, by the seed."""
    rng = np.random.default_rng(seed)
    level, tint = rng.uniform(50, 120), rng.uniform(-12, 12, 3).astype(np.float32)
    shade = _build_cloud_shader(pixels, fps, rng) if rng.random() < 0.5 else _build_gradient_shader(pixels, fps, rng)
    grain = rng.normal(0, 3, (pixels, pixels))
    for start in range(0, num_frames, FRAMES_PER_BLOCK):
        shades = shade(np.arange(start, min(start + FRAMES_PER_BLOCK, num_frames)))
        gray = (level + 35 * shades + grain).astype(np.float32)
        # Channel by channel: a third of the memory, and no broadcast over the last, short axis.
        yield np.stack([np.clip(gray + channel, 0, 255).astype(np.uint8) for channel in tint], axis=-1)


def _build_cloud_shader(pixels: int, fps: float, rng: np.random.Generator) -> Shader:
    """Return a shader of smooth noise that slides by about a pixel per second."""
    # Noise at a few knots, interpolated by cosines, is periodic: the image can slide without an edge.
    cells = int(rng.integers(3, 6))
    knots = rng.uniform(-1, 1, (cells, cells))
    position = np.arange(pixels) * cells / pixels
    low = position.astype(int)
    share = (1 - np.cos(np.pi * (position - low))) / 2
    rows = knots[low] * (1 - share)[:, None] + knots[(low + 1) % cells] * share[:, None]
    field = rows[:, low] * (1 - share) + rows[:, (low + 1) % cells] * share
    speed = rng.uniform(-1.5, 1.5, 2) * pixels / 64

    def compute_shades(numbers: NDArray[np.int64]) -> NDArray[np.float64]:
        shifts = (numbers[:, None] / fps * speed).astype(int)
        return np.stack([np.roll(field, (int(dy), int(dx)), axis=(0, 1)) for dy, dx in shifts])

    return compute_shades


def _build_gradient_shader(pixels: int, fps: float, rng: np.random.Generator) -> Shader:
    """Return a shader of a gradient that rotates by a few degrees per second."""
    begin, turn = rng.uniform(0, 2 * np.pi), rng.uniform(-0.1, 0.1)
    axis = np.linspace(-1, 1, pixels)

    def compute_shades(numbers: NDArray[np.int64]) -> NDArray[np.float64]:
        angle = begin + turn * numbers / fps
        x, y = np.cos(angle)[:, None, None] * axis, np.sin(angle)[:, None, None] * axis[:, None]
        return (x + y) / np.sqrt(2)

    return compute_shades


def draw_events(frames: Frames, events: Sequence[Event], fps: float, *, first_frame: int = 0) -> None:
    """Draw events, in place, on frames of a clip from number `first_frame` on; frame i has the time i/fps (s)."""
    pixels = frames.shape[1]
    for event in events:
        # Frame i shows the event if start <= i/fps < end; 1e-9 allows for rounding.
        body, ink = _compute_shape_masks(event.shape, pixels, event.x, event.y, event.size)
        first = max(0, int(np.ceil(event.start * fps - 1e-9)) - first_frame)
        last = max(0, int(np.ceil(event.end * fps - 1e-9)) - first_frame)
        frames[first:last, body] = PALETTE.get(event.color, WHITE)
        frames[first:last, ink] = INK


def draw_gauge(
    frames: Frames, kind: str, level: float, span: tuple[float, float], fps: float, *, first_frame: int = 0
) -> None:
    """Draw a gauge at a level (0 to 1), in place, on the frames of a clip within a span (seconds).

    `bar` fills from the left, the `brightness` of a large square grows, the hand of a `clock` turns once around.
    """
    pixels = frames.shape[1]
    first, last = (max(0, int(np.ceil(time * fps - 1e-9)) - first_frame) for time in span)
    axis = (np.arange(pixels) + 0.5) / pixels
    right, down = axis[None, :], axis[:, None]
    if kind == "bar":
        body = (np.abs(right - 0.5) <= 0.44) & (np.abs(down - 0.5) <= 0.22)
        ink = body & (right > 0.06 + 0.88 * level)
    elif kind == "clock":
        body = (right - 0.5) ** 2 + (down - 0.5) ** 2 <= 0.44**2
        angle = np.arctan2(right - 0.5, 0.5 - down) / (2 * np.pi) % 1.0
        ink = body & (np.abs(angle - level) <= 0.06)
    else:
        body = np.broadcast_to((np.abs(right - 0.5) <= 0.44) & (np.abs(down - 0.5) <= 0.44), (pixels, pixels))
        ink = np.zeros_like(body)
    frames[first:last, body] = WHITE if kind != "brightness" else (round(15 + 225 * level),) * 3
    frames[first:last, ink] = INK


@functools.lru_cache(maxsize=256)
def _compute_shape_masks(shape: str, pixels: int, x: float, y: float, size: float) -> tuple[Mask, Mask]:
    """Return the masks [height, width] of the pixels that a shape fills with its color, and with ink."""
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
    bits = np.array([[row >> (2 - i) & 1 for i in range(3)] for row in DIGIT_GLYPHS[shape]], dtype=np.bool_)
    column = np.clip(((right + 0.45) / 0.9 * 3).astype(int), 0, 2)
    row = np.clip(((down[:, 0] + 0.6) / 1.2 * 5).astype(int), 0, 4)
    ink = bits[row][:, column] & (np.abs(right) <= 0.45) & (np.abs(down) <= 0.6)
    return card, ink
