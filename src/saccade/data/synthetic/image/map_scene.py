"""Sample maps: a label, and a legend elsewhere whose entries are too small to read in the overview.

.1      .6            The label's look, or its letter, names the entry that explains it: the legend's order is the
|  label             same in every picture. That entry has a digit, all others have letters.
[E]     [7]   .3
[H]     [C]   .4
"""

import random
from dataclasses import dataclass, replace
from typing import Any

from saccade.config.schema import SyntheticConfig
from saccade.data.synthetic.events import COLORS
from saccade.data.synthetic.image.objects import (
    DIGIT,
    DISTRACTOR_COLOR,
    LETTER,
    SYMBOLS,
    PixelBox,
    SceneObject,
    compute_object_side,
)
from saccade.data.synthetic.needles.clip import LABELS
from saccade.errors import ConfigError
from saccade.utils.hashing import compute_digest

NUM_COLUMNS, COLUMN_STEP = 2, 5  # of the legend; cells of a card's side between columns
FIRST_ROW, FIRST_COLUMN = 3, 1  # cells above and left of the legend
SHOWN_LABEL_BOX = (0.275, 0.025, 0.475, 0.225)  # fractions of the picture; one visual token of an overview of 4 x 4
SMALL_LABEL_CELL = (3, 1)  # column and row


@dataclass(frozen=True, slots=True, kw_only=True)
class MapScene:
    """What one picture shows: a label and the entries of the legend."""

    pixels: int  # side of the image
    place: int  # index of the entry that explains the label
    entries: tuple[SceneObject, ...]
    # the label: a color and a shape that the overview shows, or a card with a letter that it doesn't
    look: tuple[str, str] | None = None
    card: SceneObject | None = None

    @property
    def label_box(self) -> PixelBox:
        """Return the box of the label, in pixels."""
        if self.card is not None:
            return self.card.box
        left, top, right, bottom = (round(side * self.pixels) for side in SHOWN_LABEL_BOX)
        return left, top, right, bottom

    @property
    def signature(self) -> str:
        """A digest of the label and the symbols, without the background."""
        return compute_digest([self.place, [entry.symbol for entry in self.entries], self.card is None])

    @property
    def extras(self) -> dict[str, Any]:
        """The labels in the extras of tasks."""
        evidence = [*([self.card.box] if self.card else []), self.entries[self.place].box]
        return {
            "evidence": [list(box) for box in evidence],
            "place": self.place,
            "num_places": len(self.entries),
            "width": self.pixels,
            "height": self.pixels,
        }


def sample_map(config: SyntheticConfig, rng: random.Random, index: int) -> MapScene:
    """Sample the picture with this number in its split; places, and the digits in each place, are balanced."""
    settings, image = config.needles, config.image
    side, place = compute_object_side(image), index % settings.num_places
    digit = str((3 * (index // settings.num_places) + place) % 10)
    entries = []
    for number in range(settings.num_places):
        row, column = divmod(number, NUM_COLUMNS)
        cell = FIRST_COLUMN + COLUMN_STEP * column, FIRST_ROW + row
        symbol_class, symbol = (DIGIT, digit) if number == place else (LETTER, rng.choice(SYMBOLS[LETTER]))
        entries.append(_build_card(cell, side, symbol_class, symbol, image.symbol_scale))
    if max(entry.left for entry in entries) + side > image.image_size or entries[-1].top + side > image.image_size:
        message = (
            f"synthetic.needles.num_places={settings.num_places}: the legend doesn't fit into the picture; decrease it "
            "or synthetic.image.object_scale"
        )
        raise ConfigError(message, key="synthetic.needles.num_places", value=settings.num_places)
    if settings.label == "shown":
        return MapScene(pixels=image.image_size, place=place, entries=tuple(entries), look=LABELS[place])
    if settings.num_places > len(SYMBOLS[LETTER]):
        problem = f"synthetic.needles.num_places={settings.num_places}: there are {len(SYMBOLS[LETTER])} letters"
        message = f"{problem}; decrease it, or set synthetic.needles.label=shown"
        raise ConfigError(message, key="synthetic.needles.num_places", value=settings.num_places)
    card = _build_card(SMALL_LABEL_CELL, side, LETTER, SYMBOLS[LETTER][place], image.symbol_scale)
    return MapScene(pixels=image.image_size, place=place, entries=tuple(entries), card=card)


def sample_grid_map(config: SyntheticConfig, rng: random.Random) -> MapScene:
    """Sample a picture that `image.grid_size` rows of as many colored entries fill, without a label.

    Colors are learned first, and with them which entry comes when. Half of the symbols are digits. White entries look
    as in the legend: symbols that were learned in color alone aren't always recognized there.
    """
    image, side = config.image, compute_object_side(config.image)
    entries = []
    for index in range(image.grid_size**2):
        row, column = divmod(index, image.grid_size)
        symbol_class = rng.choice((DIGIT, LETTER))
        symbol = rng.choice(SYMBOLS[symbol_class])
        card = _build_card((column, row), side, symbol_class, symbol, image.symbol_scale)
        is_white = image.white_grid_entries > 0 and rng.random() < image.white_grid_entries
        entries.append(card if is_white else replace(card, color=rng.choice(COLORS)))
    return MapScene(pixels=image.grid_size * side, place=0, entries=tuple(entries))


def _build_card(cell: tuple[int, int], side: int, symbol_class: str, symbol: str, symbol_scale: float) -> SceneObject:
    """Build a white card at a cell (column, row) of the lattice of cards."""
    return SceneObject(
        left=cell[0] * side,
        top=cell[1] * side,
        side=side,
        color=DISTRACTOR_COLOR,
        symbol_class=symbol_class,
        symbol=symbol,
        symbol_scale=symbol_scale,
    )
