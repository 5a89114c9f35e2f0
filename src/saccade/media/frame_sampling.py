"""Which times to look at: pure functions of seconds. Every pick is the middle of the stretch that it stands for."""

import math
from collections.abc import Sequence

from saccade.errors import MediaError
from saccade.ledger import Picture


def uniform_times(duration: float, count: int) -> tuple[float, ...]:
    """`count` times spread over `duration` seconds: the middles of equal parts.

    >>> uniform_times(64.0, 4)
    (8.0, 24.0, 40.0, 56.0)
    """
    return _middles(0.0, duration, count)


def window_times(start: float, end: float, *, fps: float = 1.0, least: int = 1, most: int = 16) -> tuple[float, ...]:
    """Times in [start, end) (seconds): the middles of steps of 1/fps, where `least` to `most` of them fit.

    Where fewer or more would fit, `least` or `most` times are spread evenly instead.

    >>> window_times(14.0, 17.0)
    (14.5, 15.5, 16.5)
    >>> window_times(0.0, 100.0, most=4)
    (12.5, 37.5, 62.5, 87.5)
    >>> window_times(3.0, 3.25, least=2)
    (3.0625, 3.1875)
    """
    if not (fps > 0 and math.isfinite(fps) and 1 <= least <= most):
        raise MediaError(f"fps {fps} and {least} to {most} frames can't be; give fps > 0 and 1 <= least <= most")
    if not (math.isfinite(start) and math.isfinite(end) and start < end):
        raise MediaError(f"the window from {start} to {end} seconds is empty; its end must come after its start")
    count = math.ceil((end - start) * fps - 0.5 - 1e-9)  # middles that lie before the end
    if count < least or count > most:
        return _middles(start, end, min(max(count, least), most))
    return tuple(start + (index + 0.5) / fps for index in range(count))


# What goes before a frame, as in Qwen3-VL's prompts (Qwen3-VL technical report, section 2).
STAMP = "<{seconds:.1f} seconds>"


def stamp(seconds: float, number: int = 0, pattern: str = STAMP) -> str:
    """The text that goes before a frame; a pattern may tell its `number` as well.

    >>> stamp(12.46), stamp(12.46, 3, "frame {number} at {seconds:.2f} s")
    ('<12.5 seconds>', 'frame 3 at 12.46 s')
    """
    return pattern.format(seconds=seconds, number=number)


def timed(pictures: Sequence[Picture], pattern: str = STAMP) -> list[str | Picture]:
    """Parts of a message that show frames, each preceded by its time: `<12.5 seconds>`."""
    return [part for number, picture in enumerate(pictures) for part in stamped(picture, number, pattern)]


def stamped(picture: Picture, number: int, pattern: str = STAMP) -> list[str | Picture]:
    """A frame after its time; a still picture, and one without a pattern, stands alone."""
    if picture.time is None or not pattern:
        return [picture]
    return [stamp(picture.time, number, pattern), picture]


def _middles(start: float, end: float, count: int) -> tuple[float, ...]:
    if count < 1 or not (math.isfinite(end) and end > start):
        raise MediaError(f"{count} times in {end - start} seconds can't be picked; both must be more than nothing")
    step = (end - start) / count
    return tuple(start + (index + 0.5) * step for index in range(count))
