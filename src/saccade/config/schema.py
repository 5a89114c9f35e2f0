"""What recipes are made of: the base of sections, kinds of numbers, which groups are learned from, needle worlds."""

import math
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from saccade.errors import ConfigError
from saccade.plugins import nearest
from saccade.types import End


def _rising(span: tuple[int, int]) -> tuple[int, int]:
    if span[0] > span[1]:
        raise ValueError(f"the least, {span[0]}, is more than the most, {span[1]}")
    return span


Count = Annotated[int, Field(ge=1)]
Whole = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Span = Annotated[tuple[Count, Count], AfterValidator(_rising)]  # least and most


class Section(BaseModel):
    """A part of a recipe: frozen, and closed to unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


S = TypeVar("S", bound=Section)


def made(kind: type[S], values: Any, place: str) -> S:
    """A section from plain values. Raises ConfigError with one sentence that names the place and the key."""
    if not isinstance(values, dict):
        raise ConfigError(f"{place} must be a mapping of keys")
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        # A key that is spelled wrong is missing, too: the wrong spelling says more.
        first = min(error.errors(), key=lambda each: each["type"] != "extra_forbidden")
        key = ".".join(str(part) for part in first["loc"])
        if first["type"] == "value_error":
            raise ConfigError(f"{place}: {first['ctx']['error']}") from error
        if first["type"] == "extra_forbidden":
            known = f"; {nearest(key, kind.model_fields)}" if len(first["loc"]) == 1 else ""
            raise ConfigError(f"{place}: there is no key {key!r}{known}") from error
        if first["type"] == "missing":
            raise ConfigError(f"{place}: the key {key!r} is missing") from error
        raise ConfigError(f"{place}: {key} can't be used: {first['msg'].lower()}") from error


class Select(Section):
    """Which groups are learned from."""

    oversample: Annotated[float, Field(ge=1)] = 1.0
    overlaunch: Annotated[float, Field(ge=1)] = 1.0  # groups begun per group wanted: the last to end are cancelled
    drop_ends: tuple[End, ...] = (End.TOOL_BROKEN, End.ABORTED, End.LENGTH)
    must_show_image: bool = False  # drops episodes in which no tool showed a picture, to the model or to a sub-agent
    max_tokens: Whole = 0  # drops episodes with a longer conversation, in expanded tokens; 0 = none
    min_spread: float = 1e-6  # groups whose rewards spread no wider are dropped; below 0 = none is
    correct_with_negative_advantage: bool = False  # drops such episodes; the others keep their advantages
    rank: Literal["none", "std"] = "none"
    max_rounds: Count = 1  # of rolling out, while groups are missing
    on_short: Literal["go_on", "stop"] = "go_on"  # where groups are still missing after the last round
    spare: Literal["discard", "requeue"] = "discard"  # groups beyond what is wanted; requeue = their prompts come next

    def launched(self, wanted: int) -> tuple[int, int]:
        """How many groups a round waits for where `wanted` are missing, and how many it begins.

        >>> Select(oversample=1.5, overlaunch=1.25).launched(2)
        (3, 4)
        """
        awaited = round(wanted * self.oversample)
        # Upwards: else an overlaunch of few groups would begin none more. 10 times 1.1 is a little more than 11.
        return awaited, math.ceil(round(awaited * self.overlaunch, 6))


class Pictures(Section):
    """The dials of a world of still pictures: cards, each with a mark that an overview is too small for."""

    pixels: Count = 320  # sides of the picture
    target: Annotated[float, Field(gt=0, lt=1)] = 0.1  # side of a card, as a part of the picture's
    mark: Annotated[float, Field(gt=0, lt=1)] = 0.4  # height of a mark, as a part of its card's
    cards: tuple[int, int] = (2, 4)  # least and most per picture
    distractors: Whole = 0  # white discs with marks that no question asks for
    tasks_per_picture: Count = 8
    charts: NotNegative = 0.0  # more pictures, per training picture: full of cards, to practise seeing
    chart_side: Annotated[int, Field(ge=1, le=20)] = 5  # cards; an overview should show one as large as a look does
    questions: tuple[str, ...] = ("colour", "digit", "letter", "which", "count", "where")


class World(Section):
    """A needle world (`saccade data world`): the dials of difficulty."""

    media: Literal["video", "image"] = "video"
    image: Pictures = Pictures()  # where media is image; all else but traces and the splits' sizes is for videos
    train: Count = 256  # videos or pictures per split
    validation: Count = 48
    test: Count = 48
    seconds: Positive = 64.0  # length of a clip
    event_seconds: Positive = 2.0
    events: tuple[int, int] = (2, 4)  # least and most needles per clip
    distractors: Whole = 0  # needles of another shape family that no question asks for
    pixels: Count = 64  # sides of the video
    fps: Positive = 4.0
    tasks_per_video: Count = 8
    questions: tuple[str, ...] = ("at", "after", "before", "count", "order", "when")
    traces: Literal["calls", "code", "answers"] = "calls"  # how they look: by tools, by Python, or not, all being shown
    haystack: str | None = None  # a folder of clips to hide the needles in

    @property
    def files(self) -> int:
        """How many clips or pictures it has, in all splits."""
        return self.train + self.charts + self.validation + self.test

    @property
    def charts(self) -> int:
        """How many of them are charts."""
        return round(self.train * self.image.charts)

    @model_validator(mode="after")
    def _of_one_medium(self) -> "World":
        if self.media == "video" and self.image != Pictures():
            raise ValueError("world.image has settings, but the world is of videos: set world.media=image too")
        if self.media == "image" and self.haystack is not None:
            raise ValueError("world.haystack hides needles in clips: leave it out where world.media=image")
        return self

    @model_validator(mode="after")
    def _seen_by_code(self) -> "World":
        """The code of traces reads a frame of every whole second, and tells needles by their colours from grey."""
        if self.media == "image" or self.traces != "code":
            return self
        for name, value in (("fps", self.fps), ("event_seconds", self.event_seconds)):
            if value != int(value):
                raise ValueError(f"world.traces=code counts whole seconds: give world.{name} a whole number")
        if self.haystack is not None:
            raise ValueError("world.traces=code finds colours on grey: leave world.haystack out, or set traces=calls")
        return self
