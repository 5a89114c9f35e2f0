"""Render images: a dim, smooth background with cards; the same scene gives the same PNG bytes."""

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from saccade.data.synthetic.events import PALETTE
from saccade.data.synthetic.image.objects import DIGIT, DISTRACTOR_COLOR, DOT, LETTER, ImageScene, SceneObject
from saccade.data.synthetic.render import DIGIT_GLYPHS, INK, WHITE, render_background

Pixels = NDArray[np.uint8]
Mask = NDArray[np.bool_]

LETTER_GLYPHS = {  # rows of three bits, top to bottom; no two of these and the digits look the same
    "C": (7, 4, 4, 4, 7),
    "E": (7, 4, 6, 4, 7),
    "F": (7, 4, 6, 4, 4),
    "H": (5, 5, 7, 5, 5),
    "J": (1, 1, 1, 5, 7),
    "L": (4, 4, 4, 4, 7),
    "P": (7, 5, 7, 4, 4),
    "T": (7, 2, 2, 2, 2),
    "U": (5, 5, 5, 5, 7),
    "X": (5, 5, 2, 5, 5),
}
GLYPHS = {DIGIT: DIGIT_GLYPHS, LETTER: LETTER_GLYPHS}
BACKGROUND_DOWNSCALE = 4  # the background is rendered at this fraction of the size, then upsampled
GLYPH_WIDTH, DOT_DIAMETER = 0.7, 0.7  # fractions of a symbol's height


def render_image(scene: ImageScene, seed: int) -> Pixels:
    """Render a scene: uint8 RGB [pixels, pixels, 3]."""
    pixels = render_backdrop(scene.pixels, seed)
    for card in (*scene.objects, *scene.distractors):
        left, top, right, bottom = card.box
        _draw_object(pixels[top:bottom, left:right], card)
    return pixels


def render_backdrop(side: int, seed: int) -> Pixels:
    """Render a dim, smooth background: uint8 RGB [side, side, 3]."""
    coarse = next(render_background(1, max(16, side // BACKGROUND_DOWNSCALE), 1.0, seed))[0]
    return np.array(Image.fromarray(coarse).resize((side, side), Image.Resampling.BILINEAR))


def _draw_object(region: Pixels, scene_object: SceneObject) -> None:
    axis = (np.arange(scene_object.side) + 0.5) / scene_object.side - 0.5
    right, down = axis[None, :], axis[:, None]
    if scene_object.color == DISTRACTOR_COLOR:
        region[right**2 + down**2 <= 0.25] = WHITE
    else:
        region[:] = PALETTE[scene_object.color]
    if scene_object.symbol_class == DOT:
        region[right**2 + down**2 <= (DOT_DIAMETER * scene_object.symbol_scale / 2) ** 2] = PALETTE[scene_object.symbol]
    else:
        rows = GLYPHS[scene_object.symbol_class][scene_object.symbol]
        region[compute_glyph_mask(rows, axis / scene_object.symbol_scale)] = INK


def compute_glyph_mask(rows: tuple[int, ...], axis: NDArray[np.float64]) -> Mask:
    """Return the mask [height, width] of the pixels that a glyph of 3 x 5 bits; its height is [-0.5, 0.5] on `axis`."""
    bits = np.array([[row >> (2 - i) & 1 for i in range(3)] for row in rows], dtype=np.bool_)
    column = np.floor((axis / GLYPH_WIDTH + 0.5) * 3).astype(int)
    row = np.floor((axis + 0.5) * 5).astype(int)
    inside = ((row >= 0) & (row < 5))[:, None] & ((column >= 0) & (column < 3))[None, :]
    return bits[row.clip(0, 4)][:, column.clip(0, 2)] & inside
