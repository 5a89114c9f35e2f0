"""Sample the scene of one image: colored cards on a lattice, each with a symbol."""

import itertools
import math
import random
from dataclasses import asdict, dataclass
from typing import Any

from saccade.config.schema import SyntheticImageConfig
from saccade.data.synthetic.events import COLORS
from saccade.errors import ConfigError
from saccade.utils.hashing import compute_digest

DOT, DIGIT, LETTER = "dot", "digit", "letter"
SYMBOLS = {DOT: COLORS, DIGIT: tuple("0123456789"), LETTER: tuple("CEFHJLPTUX")}
DISTRACTOR_COLOR = "white"
MIN_SYMBOL_PIXELS = 5  # a glyph has five rows
MAX_LAYOUT_DRAWS = 1000

PixelBox = tuple[int, int, int, int]  # left, top, right, bottom, in pixels


@dataclass(frozen=True, slots=True, kw_only=True)
class SceneObject:
    """A card: its position and side in pixels, its color, and the symbol on it.

    >>> SceneObject(left=96, top=32, side=32, color="red", symbol_class="digit", symbol="7").box
    (96, 32, 128, 64)
    """

    left: int
    top: int
    side: int
    color: str  # "white" for a distractor
    symbol_class: str  # dot, digit or letter
    symbol: str  # the color of the dot, the digit, or the letter
    symbol_scale: float = 0.4  # height of the symbol as a fraction of the card's

    @property
    def box(self) -> PixelBox:
        """Left, top, right and bottom, in pixels."""
        return self.left, self.top, self.left + self.side, self.top + self.side


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageScene:
    """The cards and distractors of one image, both in reading order."""

    pixels: int  # side of the image
    objects: tuple[SceneObject, ...]
    distractors: tuple[SceneObject, ...] = ()

    @property
    def signature(self) -> str:
        """A digest of the cards, without background and distractors: equal for images with the same answers."""
        return compute_digest([asdict(card) for card in self.objects])

    @property
    def extras(self) -> dict[str, Any]:
        """The labels in the extras of tasks."""
        cards = [[card.left, card.top, card.side, card.color, card.symbol_class, card.symbol] for card in self.objects]
        return {"cards": cards}


def compute_object_side(config: SyntheticImageConfig) -> int:
    """Return the side of a card in pixels. Raises ConfigError unless it is an integer and symbols are readable."""
    side = config.image_size * config.object_scale
    if abs(side - round(side)) > 1e-6:
        problem = f"{config.object_scale:g} of {config.image_size} pixels should be an integer"
        message = f"synthetic.image.object_scale={problem}"
        raise ConfigError(message, key="synthetic.image.object_scale", value=config.object_scale)
    if side * config.symbol_scale < MIN_SYMBOL_PIXELS:
        problem = f"a symbol of {side * config.symbol_scale:g} pixels is unreadable, it needs at least"
        fix = f"{MIN_SYMBOL_PIXELS}; increase image_size, object_scale or symbol_scale"
        message = f"synthetic.image.symbol_scale={config.symbol_scale:g}: {problem} {fix}"
        raise ConfigError(message, key="synthetic.image.symbol_scale", value=config.symbol_scale)
    return round(side)


def sample_scene(config: SyntheticImageConfig, rng: random.Random) -> ImageScene:
    """Sample the scene of one image.

    Cards are on a lattice of their own size, away from the border, and don't touch, so that a box with few digits
    contains exactly one card. Colors are distinct while there are enough; classes of symbols and symbols are random.
    Raises ConfigError for impossible settings.
    """
    side, count = compute_object_side(config), rng.randint(*config.objects)
    positions = _sample_positions(config, side, count + config.distractors, rng)
    card_indices = set(rng.sample(range(len(positions)), count))
    colors = itertools.cycle(rng.sample(COLORS, len(COLORS)))
    cards, distractors = [], []
    for index, position in enumerate(positions):
        if index in card_indices:
            cards.append(_sample_object(position, side, next(colors), config, rng))
        else:
            distractors.append(_sample_object(position, side, DISTRACTOR_COLOR, config, rng))
    return ImageScene(pixels=config.image_size, objects=tuple(cards), distractors=tuple(distractors))


def sample_grid_scene(config: SyntheticImageConfig, rng: random.Random) -> ImageScene:
    """Sample a grid image without background: `config.grid_size` rows of as many cards."""
    side, count = compute_object_side(config), config.grid_size
    cards = (
        _sample_object((column * side, row * side), side, rng.choice(COLORS), config, rng)
        for row in range(count)
        for column in range(count)
    )
    return ImageScene(pixels=count * side, objects=tuple(cards))


def _sample_object(
    position: tuple[int, int], side: int, color: str, config: SyntheticImageConfig, rng: random.Random
) -> SceneObject:
    """Sample the symbol of a card with a given position (left, top) and color; a dot has another color."""
    kind = rng.choice((DOT, DIGIT, LETTER))
    symbol = rng.choice([symbol for symbol in SYMBOLS[kind] if symbol != color])
    left, top = position
    return SceneObject(
        left=left, top=top, side=side, color=color, symbol_class=kind, symbol=symbol, symbol_scale=config.symbol_scale
    )


def _sample_positions(config: SyntheticImageConfig, side: int, count: int, rng: random.Random) -> list[tuple[int, int]]:
    """Sample left and top of `count` cards, in reading order."""
    steps = range(1, math.floor(config.image_size / side) - 1)
    free = [(row, column) for row in steps for column in steps]
    for _ in range(MAX_LAYOUT_DRAWS):
        taken: list[tuple[int, int]] = []
        for row, column in rng.sample(free, len(free)):
            # In a small overview, two adjacent cards would merge.
            if all(max(abs(row - r), abs(column - c)) > 1 for r, c in taken):
                taken.append((row, column))
            if len(taken) == count:
                return [(column * side, row * side) for row, column in sorted(taken)]
    problem = f"{count} cards of {side} pixels (with distractors) don't fit into {config.image_size} pixels"
    fix = "increase synthetic.image.image_size or decrease synthetic.image.object_scale"
    message = f"synthetic.image.objects={list(config.objects)}: {problem}; {fix}"
    raise ConfigError(message, key="synthetic.image.objects", value=config.objects)
