"""Read subtitles and interleave their lines with frames.

    cues = read_cues("video.srt")                                   SubRip (.srt), WebVTT (.vtt), LongVideoBench JSON
    parts = interleave_cues(images, select_cues_at(cues, times))    frames and lines in the order of time

A line is shown if the time of a sampled frame is inside it, as in VideoMME and LongVideoBench; a line shorter than a
second is widened to a second around its middle (LongVideoBench: longvideobench_dataset.py).
"""

import functools
import json
import math
import os
import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from saccade.errors import MediaError
from saccade.ledger import ImageRef
from saccade.media.frame_sampling import TIMESTAMP_FORMAT, interleave_timestamps, prepend_timestamp
from saccade.types import MediaKind, Task
from saccade.utils.files import read_text
from saccade.utils.numbers import parse_clock

_TIME_PATTERN = r"((?:\d{1,3}:)?\d{1,3}:\d{1,2}(?:[.,]\d{1,3})?)"
_TIME_RANGE_PATTERN = re.compile(rf"{_TIME_PATTERN}[ \t]*-->[ \t]*{_TIME_PATTERN}[^\n]*\n?", re.ASCII)
_MARKUP_PATTERN = re.compile(r"<[^<>]*>|\{\\[^{}]*\}")
SUBTITLES_INTRO = "Lines of subtitles stand after the times at which they are said.\n"


def find_subtitles(task: Task) -> str | None:
    """Return the file `extras["subtitles"]` of a task, relative to its first video's folder; None if there is none."""
    video = next((media for media in task.media if media.kind is MediaKind.VIDEO), None)
    name = task.extras.get("subtitles")
    # Without resolving links: the video's folder may be a link to another disk.
    return os.path.normpath(Path(video.path).parent / str(name)) if name and video else None


def list_media_files(task: Task) -> list[str]:
    """Return the paths of a task's media and of its subtitles, if it has any."""
    subtitles = find_subtitles(task)
    return [*(media.path for media in task.media), *([subtitles] if subtitles else [])]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cue:
    """A line of subtitles from `start` to `end` (seconds; `end` may be infinite)."""

    start: float
    end: float
    text: str

    @property
    def middle(self) -> float:
        """Return the time by which the line is ordered among frames, seconds."""
        return (self.start + min(self.end, self.start + 3600)) / 2

    @property
    def line(self) -> str:
        """Return the text for the model: the times, then the line."""
        end = "" if math.isinf(self.end) else f"{self.end:.1f}"
        return f"<{self.start:.1f}-{end} seconds> {self.text}\n"

    def covers(self, time: float) -> bool:
        """Return whether a frame at that time (seconds) shows the line."""
        half = max(self.end - self.start, 1.0) / 2
        middle = (self.start + self.end) / 2
        return self.start < time if math.isinf(self.end) else middle - half < time < middle + half


@functools.lru_cache(maxsize=64)
def read_cues(path: str, offset: float = 0.0) -> tuple[Cue, ...]:
    """Read the lines of a subtitle file in the order of time, shifted by -`offset` seconds; drop those before 0.

    Raises MediaError if the file is missing or has no subtitles.
    """
    try:
        text = read_text(Path(path), encoding="utf-8-sig", errors="replace")
    except (OSError, ValueError) as error:  # such as a name with a null byte
        reason = error.strerror if isinstance(error, OSError) else error
        raise MediaError(f"the subtitles {path!r:.200} can't be read: {reason}", key=path) from error
    cues = _parse_json(text, path) if Path(path).suffix == ".json" else _parse_srt(text, path)
    shifted = [Cue(start=cue.start - offset, end=cue.end - offset, text=cue.text) for cue in cues if cue.text]
    valid = [cue for cue in shifted if math.isfinite(cue.start) and cue.end > 0]
    return tuple(sorted(valid, key=lambda cue: (cue.start, cue.end)))


def _parse_srt(text: str, path: str) -> list[Cue]:
    """Parse SubRip's blocks: a number, `start --> end`, lines of text, a blank line."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    spans = list(_TIME_RANGE_PATTERN.finditer(text))
    if not spans and text.strip():
        message = f"{path} holds no subtitles: no line of it has times such as 00:00:01,000 --> 00:00:02,500"
        raise MediaError(message, key=path)
    cues = []
    for index, span in enumerate(spans):
        stop = spans[index + 1].start() if index + 1 < len(spans) else len(text)
        body = text[span.end() : stop].split("\n\n")[0]
        # Without a blank line between blocks, the next block's number is the last line of this text.
        lines = body.split("\n")
        if index + 1 < len(spans) and len(lines) > 1 and lines[-1] == "" and lines[-2].strip().isdecimal():
            lines = lines[:-2]
        start, end = parse_clock(span[1]), parse_clock(span[2])
        cues.append(Cue(start=start, end=end, text=_strip_markup(" ".join(lines))))
    return cues


def _parse_json(text: str, path: str) -> list[Cue]:
    """Parse LongVideoBench's formats: `timestamp` [s, e] and `text`, or clock times `start` and `end`, and `line`."""
    try:
        return [_parse_json_cue(row) for row in json.loads(text)]
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        shape = '{"timestamp": [start, end], "text": …} or {"start": …, "end": …, "line": …}'
        raise MediaError(f"{path} holds no subtitles: it must be a list of {shape}", key=path) from error


def _parse_json_cue(row: Mapping[str, Any]) -> Cue:
    if "timestamp" in row:
        start, end = row["timestamp"]
        # An end that isn't a number means the end of the video.
        has_end = isinstance(end, int | float) and math.isfinite(end)
        return Cue(start=float(start), end=float(end) if has_end else math.inf, text=_strip_markup(str(row["text"])))
    start, end = (parse_clock(str(row[name])) for name in ("start", "end"))
    return Cue(start=start, end=end, text=_strip_markup(str(row["line"])))


def _strip_markup(text: str) -> str:
    r"""Remove markup such as `<i>` and `{\an8}`; replace `\N` and line ends by spaces."""
    return " ".join(_MARKUP_PATTERN.sub("", text.replace("\\N", " ")).split())


def select_cues_at(cues: Sequence[Cue], times: Sequence[float]) -> list[Cue]:
    """Return the lines that a frame at one of the times shows; all lines if there are no times."""
    return [cue for cue in cues if not times or any(cue.covers(time) for time in times)]


def select_cues_between(cues: Sequence[Cue], start: float, end: float) -> list[Cue]:
    """Return the lines that overlap the interval between two times (seconds)."""
    return [cue for cue in cues if cue.start < end and start < cue.end]


def subsample_cues(cues: Sequence[Cue], max_tokens: int, count_tokens: Callable[[str], int]) -> list[Cue]:
    """Keep at most `max_tokens` of lines: every second, third, ... line, so that the rest still covers the video."""
    lengths = [count_tokens(cue.line) for cue in cues]
    step = next((step for step in range(1, len(cues) + 1) if sum(lengths[::step]) <= max_tokens), None)
    return list(cues[::step]) if step else []


def interleave_cues(
    images: Sequence[ImageRef], cues: Sequence[Cue], timestamp_format: str = TIMESTAMP_FORMAT
) -> list[str | ImageRef]:
    """Return message parts: an introduction, frames after their times, each line after the frames up to its middle."""
    if not cues:
        return interleave_timestamps(images, timestamp_format)
    remaining = deque(sorted(cues, key=lambda cue: cue.middle))
    parts: list[str | ImageRef] = [SUBTITLES_INTRO]
    for number, image in enumerate(images):
        while remaining and image.mean_time is not None and remaining[0].middle < image.mean_time:
            parts.append(remaining.popleft().line)
        parts += prepend_timestamp(image, number, timestamp_format)
    return [*parts, *(cue.line for cue in remaining)]
