"""Sample clips with one needle: a clip is divided into places, and the needle is in the window that begins one.

    place 0          place 1          place 2
    |window|         |window|         |window|         a window is as long as a call; the needle is within one
           |---mark--|      |---mark--|      |---mark--|   cues are outside of all windows

The overview shows the middle of each place if it has as many frames as there are places.
"""

import math
import random
from dataclasses import dataclass
from typing import Any

from saccade.config.schema import SyntheticConfig
from saccade.data.synthetic.events import COLORS, Event
from saccade.errors import ConfigError
from saccade.utils.hashing import compute_digest

SHAPES = ("disc", "square")  # of needles, labels and openings; distinct in 16 pixels
LABELS = tuple((color, shape) for shape in SHAPES for color in COLORS)  # of openings and maps, in order of the places
MARKER = "card"  # white


@dataclass(frozen=True, slots=True, kw_only=True)
class NeedleClip:
    """What one clip shows: the needle, cues, and the level of a gauge in each place's window."""

    seconds: float
    place: int  # of the needle, from 0; for a needle that the overview shows, the place whose middle shows it
    num_places: int
    needle: Event
    marks: tuple[Event, ...] = ()  # cues
    levels: tuple[float, ...] = ()  # of the gauge per place, 0 to 1; empty = no gauge
    is_shown: bool = False  # whether the overview shows the needle

    @property
    def place_seconds(self) -> float:
        """Return the length of a place, in seconds."""
        return self.seconds / self.num_places

    @property
    def signature(self) -> str:
        """A digest of the needle's time and look and of cues and levels, without the background."""
        marks = [(mark.start, mark.color, mark.shape) for mark in self.marks]
        needle = self.needle
        return compute_digest([needle.start, needle.color, needle.shape, needle.x, needle.y, marks, self.levels])

    @property
    def extras(self) -> dict[str, Any]:
        """The labels in the extras of tasks."""
        needle = self.needle
        return {
            "events": [[needle.start, needle.end, needle.color, needle.shape]],
            "seconds": self.seconds,
            "event_seconds": needle.end - needle.start,
            "evidence": [[needle.start, needle.end]],
            "cover": [0.0, 0.0],
            "place": self.place,
            "num_places": self.num_places,
            "is_shown": self.is_shown,
        }


def require_places(config: SyntheticConfig) -> None:
    """Raise ConfigError for settings with which a policy needn't decide, or can't."""
    settings = config.needles
    place_seconds = config.clip_seconds / settings.num_places
    if place_seconds < 2 * settings.window_seconds:
        problem = f"{settings.num_places} places in {config.clip_seconds:g} s begin every {place_seconds:g} s"
        fix = "which calls can nearly cover; raise synthetic.clip_seconds or lower synthetic.needles.window_seconds"
        message = f"synthetic.needles.window_seconds={settings.window_seconds:g}: {problem}, {fix}"
        raise ConfigError(message, key="synthetic.needles.window_seconds", value=settings.window_seconds)
    if not config.event_seconds * config.fps >= 1 or config.event_seconds > settings.window_seconds:
        message = (
            f"synthetic.event_seconds={config.event_seconds:g} must be at least one frame (1/synthetic.fps) and at "
            f"most a call, synthetic.needles.window_seconds={settings.window_seconds:g}"
        )
        raise ConfigError(message, key="synthetic.event_seconds", value=config.event_seconds)


def require_few_calls(config: SyntheticConfig) -> None:
    """Raise ConfigError if the calls of an episode can look at every place, or a cue can't name so many."""
    settings = config.needles
    if settings.num_calls >= settings.num_places:
        message = (
            f"synthetic.needles.num_places={settings.num_places}: {settings.num_calls} calls look at all of them; "
            "increase it, or decrease calls_per_turn or turns"
        )
        raise ConfigError(message, key="synthetic.needles.num_places", value=settings.num_places)
    has_looks = config.tasks == "map" or (config.tasks == "cue" and settings.cue == "opening")
    if has_looks and settings.num_places > len(LABELS):
        message = f"synthetic.needles.num_places={settings.num_places}: there are {len(LABELS)} different labels"
        raise ConfigError(f"{message}; decrease it", key="synthetic.needles.num_places", value=settings.num_places)


def sample_clip(config: SyntheticConfig, rng: random.Random, index: int) -> NeedleClip:
    """Sample the clip with this number in its split; places, and the colors of needles in each, are balanced."""
    settings = config.needles
    place, round_ = index % settings.num_places, index // settings.num_places
    color, shape = COLORS[(5 * round_ + place) % len(COLORS)], rng.choice(SHAPES)
    place_seconds, is_shown = config.clip_seconds / settings.num_places, False
    offset = round(rng.uniform(0, settings.window_seconds - config.event_seconds) * config.fps) / config.fps
    marks: tuple[Event, ...] = ()
    levels: tuple[float, ...] = ()
    if config.tasks == "cue":
        # A marker and a jump are before the needle, so that there is none for the first place.
        place = place if settings.cue == "opening" else 1 + index % (settings.num_places - 1)
        marks = build_marks(config, place, rng)
    elif config.tasks == "search":
        levels = sample_levels(place, settings.num_places, rng)
    elif config.tasks == "cost":
        is_shown = math.floor((index + 1) * settings.shown_share) > math.floor(index * settings.shown_share)
        if is_shown:  # around the middle of its place
            offset = place_seconds / 2 - round(config.event_seconds * config.fps / 2) / config.fps
        else:
            place = 0
    start = round(place * place_seconds + offset, 6)
    needle = _build_event(start, config.event_seconds, color, shape, rng)
    return NeedleClip(
        seconds=config.clip_seconds,
        place=place,
        num_places=settings.num_places,
        needle=needle,
        marks=marks,
        levels=levels,
        is_shown=is_shown,
    )


def build_marks(config: SyntheticConfig, place: int, rng: random.Random) -> tuple[Event, ...]:
    """Build the cues for a needle in a place; each is shown from the end of a window to the end of its place.

    opening  one in place 0, whose color and shape name the place: label `n` of LABELS names place `n`
    marker   a white card one place before the needle
    counter  in every place a digit: the number of places before it, plus one from the needle's place on, modulo 10
    """
    settings = config.needles
    place_seconds = config.clip_seconds / settings.num_places

    def build_mark(index: int, color: str, shape: str) -> Event:
        start = index * place_seconds + settings.window_seconds
        return _build_event(start, place_seconds - settings.window_seconds, color, shape, rng)

    if settings.cue == "opening":
        return (build_mark(0, *LABELS[place]),)
    if settings.cue == "marker":
        return (build_mark(place - 1, "white", MARKER),)
    first = rng.randrange(10)
    return tuple(
        build_mark(index, "white", str((first + index + (index >= place)) % 10)) for index in range(settings.num_places)
    )


def sample_levels(place: int, num_places: int, rng: random.Random) -> tuple[float, ...]:
    """Sample the rising levels of a gauge, one per place: below 0.45 before `place`, 0.5 in it, above 0.55 after it."""
    low = sorted(rng.uniform(0.0, 0.45) for _ in range(place))
    high = sorted(rng.uniform(0.55, 1.0) for _ in range(num_places - place - 1))
    return tuple(round(level, 3) for level in (*low, 0.5, *high))


def _build_event(start: float, length: float, color: str, shape: str, rng: random.Random) -> Event:
    x, y = (round(rng.uniform(0.42, 0.58), 3) for _ in range(2))
    return Event(
        start=start, end=start + length, color=color, shape=shape, x=x, y=y, size=round(rng.uniform(0.6, 0.75), 3)
    )
