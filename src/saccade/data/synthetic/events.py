"""Sample the needles of one clip: short visual events at known times."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from saccade.config.schema import SyntheticConfig
from saccade.errors import ConfigError
from saccade.utils.hashing import compute_digest

# Far apart in RGB, so that they survive compression and very small frames.
PALETTE = {
    "red": (226, 38, 40),
    "green": (40, 186, 52),
    "blue": (44, 66, 232),
    "yellow": (242, 222, 32),
    "purple": (186, 46, 214),
    "cyan": (44, 216, 222),
}
COLORS = tuple(PALETTE)
SHAPES = ("disc", "square", "card")
REPEATED_COLOR_SHARE = 0.6  # of the clips with three or more events, in which one color repeats


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """An event: visible in [start, end) seconds; center and size are fractions of the frame."""

    start: float
    end: float
    color: str  # of a distractor: "white"
    shape: str = "disc"  # of a distractor: the digit on its card
    x: float = 0.5
    y: float = 0.5
    size: float = 0.6

    def is_visible_at(self, time: float) -> bool:
        """Return whether the event is visible at a time (seconds)."""
        return self.start <= time < self.end


@dataclass(frozen=True, slots=True, kw_only=True)
class Labels:
    """The events and distractors of one clip, both in order of time."""

    seconds: float
    events: tuple[Event, ...]
    distractors: tuple[Event, ...] = ()

    @property
    def signature(self) -> str:
        """A digest of times and colors, without shapes and background: equal for clips with the same answers."""
        return compute_digest([(event.start, event.color) for event in self.events])

    @property
    def extras(self) -> dict[str, Any]:
        """The labels in the extras of tasks."""
        return {"events": [[event.start, event.end, event.color] for event in self.events]}


def sample_labels(config: SyntheticConfig, rng: random.Random) -> Labels:
    """Sample the events of one clip.

    Starts are multiples of the event length and at least two event lengths apart, distractors included, so that no
    frame shows two events. Raises ConfigError if the events don't fit.
    """
    # An event between two frames would be in the labels but in no frame.
    if config.event_seconds * config.fps < 1 - 1e-9:
        problem = f"synthetic.event_seconds={config.event_seconds:g}: at {config.fps:g} fps an event can fall between"
        message = f"{problem} two frames; increase synthetic.event_seconds or synthetic.fps"
        raise ConfigError(message, key="synthetic.event_seconds", value=config.event_seconds)
    count = rng.randint(*config.events)
    # Events and distractors share one set of starts, so that they never overlap.
    starts = _sample_starts(config, count + config.distractors, rng)
    event_indices = sorted(rng.sample(range(len(starts)), count))
    colors = iter(_sample_colors(count, rng))
    length = config.event_seconds

    def build_event(start: float, color: str, shape: str) -> Event:
        center_x, center_y = (round(rng.uniform(0.38, 0.62), 3) for _ in range(2))
        size = round(rng.uniform(0.55, 0.75), 3)
        return Event(start=start, end=start + length, color=color, shape=shape, x=center_x, y=center_y, size=size)

    events = tuple(build_event(starts[i], next(colors), rng.choice(SHAPES)) for i in event_indices)
    others = (start for i, start in enumerate(starts) if i not in event_indices)
    distractors = tuple(build_event(start, "white", str(rng.randint(0, 9))) for start in others)
    return Labels(seconds=config.clip_seconds, events=events, distractors=distractors)


def _sample_starts(config: SyntheticConfig, count: int, rng: random.Random) -> list[float]:
    """Draw start times (seconds) on a grid of event lengths, no two of them in adjacent slots."""
    # Adding 0, 1, 2, ... to `count` sorted slots out of slots - count + 1 leaves a free slot between any two.
    slots = int(config.clip_seconds / config.event_seconds + 1e-9)
    if slots < 2 * count - 1:
        problem = f"{count} events of {config.event_seconds:g} s don't fit; increase synthetic.clip_seconds"
        message = f"synthetic.clip_seconds={config.clip_seconds:g}: {problem}"
        raise ConfigError(message, key="synthetic.clip_seconds", value=config.clip_seconds)
    chosen = sorted(rng.sample(range(slots - count + 1), count))
    return [(slot + i) * config.event_seconds for i, slot in enumerate(chosen)]


def _sample_colors(count: int, rng: random.Random) -> list[str]:
    """Draw mostly distinct colors; often one repeats, but three or more events never all have the same color."""
    repetitions = 1
    if count >= 3 and rng.random() < REPEATED_COLOR_SHARE:
        repetitions = rng.choices(range(2, count), weights=range(2, count))[0]
    first, *others = rng.sample(COLORS, len(COLORS))
    rest = [others[i % len(others)] for i in range(count - repetitions)]
    colors = [first] * repetitions + rest
    rng.shuffle(colors)
    return colors


def find_events_within(events: Sequence[Event], start: float, end: float) -> Iterator[Event]:
    """Yield the events that are visible within [start, end) seconds."""
    return (event for event in events if event.start < end and event.end > start)
