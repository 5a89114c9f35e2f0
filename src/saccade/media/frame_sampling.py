"""Choose frame times, in seconds. Each time is the middle of the interval that its frame represents."""

import math
from collections.abc import Sequence
from dataclasses import replace

from saccade.errors import MediaError
from saccade.ledger import ImageRef


def sample_uniform_times(duration: float, count: int, *, start: float = 0.0) -> tuple[float, ...]:
    """Return the middles of `count` equal parts of `duration` seconds. Raises MediaError if either is not positive.

    >>> sample_uniform_times(64.0, 4)
    (8.0, 24.0, 40.0, 56.0)
    """
    if count < 1 or not (math.isfinite(duration) and duration > 0):
        message = f"count={count} and duration={duration:g}: both must be positive"
        raise MediaError(message, key="count", value=(count, duration))
    step = duration / count
    return tuple(start + (index + 0.5) * step for index in range(count))


def sample_window_times(
    start: float, end: float, *, fps: float = 1.0, min_frames: int = 1, max_frames: int = 16
) -> tuple[float, ...]:
    """Return times in [start, end) (seconds): the middles of steps of 1/fps.

    If these are fewer than `min_frames` or more than `max_frames`, that many times are spread evenly instead. Raises
    MediaError for an empty window and for arguments out of range.

    >>> sample_window_times(14.0, 17.0)
    (14.5, 15.5, 16.5)
    >>> sample_window_times(0.0, 100.0, max_frames=4)
    (12.5, 37.5, 62.5, 87.5)
    >>> sample_window_times(3.0, 3.25, min_frames=2)
    (3.0625, 3.1875)
    """
    if not (fps > 0 and math.isfinite(fps) and 1 <= min_frames <= max_frames):
        given = f"fps={fps:g}, min_frames={min_frames} and max_frames={max_frames}"
        message = f"{given}: need fps > 0 and 1 <= min_frames <= max_frames"
        raise MediaError(message, key="fps", value=(fps, min_frames, max_frames))
    if not (math.isfinite(start) and math.isfinite(end) and start < end):
        message = f"the window from {start} to {end} seconds is empty; its end must come after its start"
        raise MediaError(message, key="end", value=(start, end))
    count = math.ceil((end - start) * fps - 0.5 - 1e-9)  # number of middles before the end
    if count < min_frames or count > max_frames:
        return sample_uniform_times(end - start, min(max(count, min_frames), max_frames), start=start)
    return tuple(start + (index + 0.5) / fps for index in range(count))


def pair_frames(frames: Sequence[ImageRef]) -> list[ImageRef]:
    """Return each two consecutive frames as a pair; the last of an odd number is paired with itself.

    As in the video processors of transformers, which repeat the last frame.
    """
    seconds = [*frames[1::2], *frames[-1:]]
    return [replace(first, second_time=second.time) for first, second in zip(frames[::2], seconds, strict=False)]


# The text before a frame, as in Qwen3-VL's prompts (Qwen3-VL technical report, section 2).
TIMESTAMP_FORMAT = "<{seconds:.1f} seconds>"


def format_timestamp(seconds: float, number: int = 0, timestamp_format: str = TIMESTAMP_FORMAT) -> str:
    """Return the text before a frame; a format may include the frame's `number`.

    >>> format_timestamp(12.46), format_timestamp(12.46, 3, "frame {number} at {seconds:.2f} s")
    ('<12.5 seconds>', 'frame 3 at 12.46 s')
    """
    return timestamp_format.format(seconds=seconds, number=number)


def interleave_timestamps(images: Sequence[ImageRef], timestamp_format: str = TIMESTAMP_FORMAT) -> list[str | ImageRef]:
    """Return message parts with each frame preceded by its time: `<12.5 seconds>`; a pair by its mean time."""
    return [part for number, image in enumerate(images) for part in prepend_timestamp(image, number, timestamp_format)]


def prepend_timestamp(image: ImageRef, number: int, timestamp_format: str = TIMESTAMP_FORMAT) -> list[str | ImageRef]:
    """Return a frame preceded by its time; a still image, or an empty format, gives the image alone."""
    if image.mean_time is None or not timestamp_format:
        return [image]
    return [format_timestamp(image.mean_time, number, timestamp_format), image]
