"""What recipes are made of: the base of every section, its kinds of numbers, and the dials of needle worlds."""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from saccade.errors import ConfigError
from saccade.plugins import nearest


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


class Pictures(Section):
    """The dials of a world of still pictures: cards, each with a mark that an overview is too small for."""

    pixels: Count = 320  # sides of the picture
    target: Annotated[float, Field(gt=0, lt=1)] = 0.1  # side of a card, as a part of the picture's
    mark: Annotated[float, Field(gt=0, lt=1)] = 0.4  # height of a mark, as a part of its card's
    cards: tuple[int, int] = (2, 4)  # least and most per picture
    distractors: Whole = 0  # white discs with marks that no question asks for
    tasks_per_picture: Count = 8
    questions: tuple[str, ...] = ("colour", "digit", "letter", "which", "count", "where")


class World(Section):
    """A needle world (`saccade data world`): the dials of difficulty."""

    media: Literal["video", "image"] = "video"
    image: Pictures = Pictures()  # where media is image; all else but the splits' sizes is for videos
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
    traces: Literal["calls", "code", "answers"] = "calls"  # how they look: by tools, by Python, or (at 64 frames) not
    haystack: str | None = None  # a folder of clips to hide the needles in

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
