"""Needles in a picture: coloured cards on a lattice, each with a mark, drawn for one picture."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from saccade.data.world.events import COLOURS
from saccade.errors import ConfigError
from saccade.sections import Pictures

DOT, DIGIT, LETTER = "dot", "digit", "letter"
SIGNS = {DOT: COLOURS, DIGIT: tuple("0123456789"), LETTER: tuple("CEFHJLPTUX")}
NOBODY = "white"  # the colour of a distractor
LEAST_MARK = 5  # pixels: a digit has five rows
ATTEMPTS = 1000  # to lay out a picture

Sides = tuple[int, int, int, int]  # left, top, right, bottom, in pixels


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A card: its place and side in pixels, its colour, and the mark on it, of a class and with a sign.

    >>> Card(left=96, top=32, side=32, colour="red", mark="digit", sign="7").box
    (96, 32, 128, 64)
    """

    left: int
    top: int
    side: int
    colour: str  # a distractor: "white"
    mark: str  # dot, digit or letter
    sign: str  # the dot's colour, the digit, the letter
    size: float = 0.4  # height of the mark, as a part of the card's

    @property
    def box(self) -> Sides:
        """Left, top, right and bottom, in pixels."""
        return self.left, self.top, self.left + self.side, self.top + self.side


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What one picture shows: its cards and its distractors, both in the order of reading."""

    pixels: int  # sides of the picture
    cards: tuple[Card, ...]
    distractors: tuple[Card, ...] = ()


def side_of(dials: Pictures) -> int:
    """The side of a card in pixels. Raises ConfigError unless it is a whole number that can show a mark."""
    side = dials.pixels * dials.target
    if abs(side - round(side)) > 1e-6:
        raise ConfigError(
            f"world.image: cards of {dials.target:g} of {dials.pixels} pixels need a whole number of them"
        )
    if side * dials.mark < LEAST_MARK:
        small = f"a mark of {side * dials.mark:g} pixels can't be read; it needs {LEAST_MARK} at least"
        raise ConfigError(f"world.image: {small}: give pixels, target or mark more")
    return round(side)


def draw_scene(dials: Pictures, rng: random.Random) -> Scene:
    """Draw what one picture shows.

    Cards stand on a lattice of their own size, off the border, and no two of them touch, so that a box of few digits
    holds one card, whole and alone. Colours are distinct as long as there are enough; classes of marks come at random,
    and so do signs. Raises ConfigError for dials that can't be met.
    """
    least, most = dials.cards
    if not 1 <= least <= most:
        raise ConfigError(f"world.image.cards {list(dials.cards)}: give least and most cards per picture, at least one")
    side, count = side_of(dials), rng.randint(least, most)
    places = _places(dials, side, count + dials.distractors, rng)
    chosen = set(rng.sample(range(len(places)), count))
    colours = iter(_colours(count, rng))
    found: dict[bool, list[Card]] = {True: [], False: []}
    for index, (left, top) in enumerate(places):
        mine = index in chosen
        found[mine].append(_card((left, top), side, next(colours) if mine else NOBODY, dials, rng))
    return Scene(pixels=dials.pixels, cards=tuple(found[True]), distractors=tuple(found[False]))


def draw_chart(dials: Pictures, rng: random.Random) -> Scene:
    """A picture without a background: `dials.chart_side` rows of as many cards."""
    side, count = side_of(dials), dials.chart_side
    cards = (
        _card((column * side, row * side), side, rng.choice(COLOURS), dials, rng)
        for row in range(count)
        for column in range(count)
    )
    return Scene(pixels=count * side, cards=tuple(cards))


def _card(place: tuple[int, int], side: int, colour: str, dials: Pictures, rng: random.Random) -> Card:
    """A card of a colour with any mark that can be told from it; `place` is its left and top."""
    mark = rng.choice((DOT, DIGIT, LETTER))
    sign = rng.choice([each for each in SIGNS[mark] if each != colour])
    left, top = place
    return Card(left=left, top=top, side=side, colour=colour, mark=mark, sign=sign, size=dials.mark)


def _places(dials: Pictures, side: int, count: int, rng: random.Random) -> list[tuple[int, int]]:
    """Left and top of so many cards, in the order of reading."""
    steps = range(1, math.floor(dials.pixels / side) - 1)
    free = [(row, column) for row in steps for column in steps]
    for _ in range(ATTEMPTS):
        taken: list[tuple[int, int]] = []
        for row, column in rng.sample(free, len(free)):
            # A neighbour would be taken for the same blot where the picture is seen small.
            if all(max(abs(row - r), abs(column - c)) > 1 for r, c in taken):
                taken.append((row, column))
            if len(taken) == count:
                return [(column * side, row * side) for row, column in sorted(taken)]
    raise ConfigError(
        f"{count} cards of {side} pixels don't fit a picture of {dials.pixels}; give world.image.pixels more, or a "
        "smaller world.image.target"
    )


def _colours(count: int, rng: random.Random) -> list[str]:
    shuffled = rng.sample(COLOURS, len(COLOURS))
    return [shuffled[i % len(shuffled)] for i in range(count)]


def unique(cards: Sequence[Card]) -> list[Card]:
    """The cards whose colour no other card has."""
    colours = [card.colour for card in cards]
    return [card for card in cards if colours.count(card.colour) == 1]


def shown_once(cards: Sequence[Card]) -> list[Card]:
    """The cards whose mark no other card has."""
    marks = [(card.mark, card.sign) for card in cards]
    return [card for card in cards if marks.count((card.mark, card.sign)) == 1]
