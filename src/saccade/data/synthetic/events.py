"""Needles: short visual events at known times, drawn for one clip."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from saccade.config import World
from saccade.errors import ConfigError

# Far apart in RGB, so that they survive compression and very small frames.
PALETTE = {
    "red": (226, 38, 40),
    "green": (40, 186, 52),
    "blue": (44, 66, 232),
    "yellow": (242, 222, 32),
    "purple": (186, 46, 214),
    "cyan": (44, 216, 222),
}
COLOURS = tuple(PALETTE)
SHAPES = ("disc", "square", "card")
REPEATS = 0.6  # share of clips with three or more needles in which one colour comes more than once


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A needle: shown from `start` (included) to `end` (excluded), seconds; place and size are shares of the picture.

    >>> Event(start=36, end=38, colour="red").holds(37.5)
    True
    """

    start: float
    end: float
    colour: str  # a distractor: "white"
    shape: str = "disc"  # a distractor: the digit on its card
    x: float = 0.5
    y: float = 0.5
    size: float = 0.6

    def holds(self, time: float) -> bool:
        """Whether the event is shown at this time."""
        return self.start <= time < self.end


@dataclass(frozen=True, slots=True, kw_only=True)
class Labels:
    """What is shown in one clip: its needles and its distractors, both in order of time."""

    seconds: float
    events: tuple[Event, ...]
    distractors: tuple[Event, ...] = ()


def draw_labels(world: World, rng: random.Random) -> Labels:
    """Draw what one clip shows.

    Starts are multiples of the event length and at least two event lengths apart, distractors included, so that no
    look at a moment ever shows two events. Raises ConfigError where they can't all fit.
    """
    # Between two frames an event would be in the labels and in no picture.
    if world.event_seconds * world.fps < 1 - 1e-9:
        raise ConfigError(
            f"events of {world.event_seconds:g} s can fall between frames at {world.fps:g} fps and never be shown; "
            "give world.event_seconds or world.fps more"
        )
    least, most = world.events
    if not 1 <= least <= most:
        raise ConfigError(f"world.events {list(world.events)}: give least and most needles per clip, at least one")
    count = rng.randint(least, most)
    # Needles and distractors share one set of starts, so that they never meet either.
    starts = _starts(world, count + world.distractors, rng)
    needles = sorted(rng.sample(range(len(starts)), count))
    colours = iter(_colours(count, rng))
    length = world.event_seconds
    events = tuple(
        Event(start=starts[i], end=starts[i] + length, colour=next(colours), shape=rng.choice(SHAPES), **_place(rng))
        for i in needles
    )
    distractors = tuple(
        Event(start=start, end=start + length, colour="white", shape=str(rng.randint(0, 9)), **_place(rng))
        for i, start in enumerate(starts)
        if i not in needles
    )
    return Labels(seconds=world.seconds, events=events, distractors=distractors)


def _starts(world: World, count: int, rng: random.Random) -> list[float]:
    """Slots of one event length, no two of them neighbours: choose from the slots left over, then spread apart."""
    # With `count` slots chosen out of slots - count + 1, adding 0, 1, 2, ... leaves a free one between any two.
    slots = int(world.seconds / world.event_seconds + 1e-9)
    if slots < 2 * count - 1:
        raise ConfigError(
            f"{count} events of {world.event_seconds:g} s don't fit {world.seconds:g} s; give world.seconds more"
        )
    chosen = sorted(rng.sample(range(slots - count + 1), count))
    return [(slot + i) * world.event_seconds for i, slot in enumerate(chosen)]


def _colours(count: int, rng: random.Random) -> list[str]:
    """Mostly distinct colours; often one of them repeated, never all the same where there are three or more."""
    times = 1
    if count >= 3 and rng.random() < REPEATS:
        times = rng.choices(range(2, count), weights=range(2, count))[0]
    first, *others = rng.sample(COLOURS, len(COLOURS))
    rest = [others[i % len(others)] for i in range(count - times)]
    colours = [first] * times + rest
    rng.shuffle(colours)
    return colours


def _place(rng: random.Random) -> dict[str, float]:
    return {
        "x": round(rng.uniform(0.38, 0.62), 3),
        "y": round(rng.uniform(0.38, 0.62), 3),
        "size": round(rng.uniform(0.55, 0.75), 3),
    }


def within(events: Sequence[Event], start: float, end: float) -> Iterator[Event]:
    """The events of which a window [start, end) shows something."""
    return (event for event in events if event.start < end and event.end > start)
