"""Pixels of a picture: a dim, smooth background, cards on it, and the same bytes of PNG for the same picture."""

import io
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from saccade.data.world.events import PALETTE
from saccade.data.world.paint import DIGITS, INK, WHITE, background
from saccade.data.world.still.cards import DIGIT, DOT, LETTER, NOBODY, Card, Scene

Pixels = NDArray[np.uint8]
Mask = NDArray[np.bool_]

LETTERS = {  # rows of three bits, top to bottom; no two of these and the digits look the same
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
GLYPHS = {DIGIT: DIGITS, LETTER: LETTERS}
COARSE = 4  # pixels per side of one pixel of the background, which is then smoothed
WIDE, ROUND = 0.7, 0.7  # of a mark's height: a glyph's width, a dot's diameter


def painted(scene: Scene, seed: int) -> Pixels:
    """The picture, uint8 RGB [pixels, pixels, 3]."""
    side = scene.pixels
    coarse = background(1, max(16, side // COARSE), 1.0, seed)[0]
    picture = np.array(Image.fromarray(coarse).resize((side, side), Image.Resampling.BILINEAR))
    for card in (*scene.cards, *scene.distractors):
        left, top, right, bottom = card.box
        _draw(picture[top:bottom, left:right], card)
    return picture


def _draw(place: Pixels, card: Card) -> None:
    """Draw a card into the pixels of its box."""
    axis = (np.arange(card.side) + 0.5) / card.side - 0.5
    right, down = axis[None, :], axis[:, None]
    everything = np.ones((card.side, card.side), dtype=np.bool_)
    if card.colour == NOBODY:
        place[right**2 + down**2 <= 0.25] = WHITE
    else:
        place[everything] = PALETTE[card.colour]
    if card.mark == DOT:
        place[right**2 + down**2 <= (ROUND * card.size / 2) ** 2] = PALETTE[card.sign]
    else:
        place[_glyph(GLYPHS[card.mark][card.sign], axis / card.size)] = INK


def _glyph(rows: tuple[int, ...], axis: NDArray[np.float64]) -> Mask:
    """Which pixels [height, width] a glyph of 3 x 5 bits inks; it is as high as `axis` goes from -0.5 to 0.5."""
    bits = np.array([[row >> (2 - i) & 1 for i in range(3)] for row in rows], dtype=np.bool_)
    column = np.floor((axis / WIDE + 0.5) * 3).astype(int)
    row = np.floor((axis + 0.5) * 5).astype(int)
    inside = ((row >= 0) & (row < 5))[:, None] & ((column >= 0) & (column < 3))[None, :]
    found: Mask = bits[row.clip(0, 4)][:, column.clip(0, 2)] & inside
    return found


def write_picture(path: Path, pixels: Pixels) -> None:
    """Write a PNG; the file appears complete or not at all."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="PNG", compress_level=6)
    partial = path.with_name(path.name + ".part")
    partial.write_bytes(buffer.getvalue())
    os.replace(partial, path)
