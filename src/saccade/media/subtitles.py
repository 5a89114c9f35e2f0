"""What is said in a video, with its times: reading subtitles, and putting their lines between the frames.

    cues = read_cues("talk.srt")                         SubRip (.srt), WebVTT (.vtt), or LongVideoBench's JSON
    parts = woven(pictures, seen(cues, times))           frames and lines in the order of time

A line is shown where a sampled frame falls into it, as VideoMME and LongVideoBench have it; one shorter than a second
is widened to a second around its middle (LongVideoBench: longvideobench_dataset.py).
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
from saccade.ledger import Picture
from saccade.media.picks import STAMP, stamped, timed
from saccade.types import MediaKind, Task

_TIME = r"((?:\d{1,3}:)?\d{1,3}:\d{1,2}(?:[.,]\d{1,3})?)"
_SPAN = re.compile(rf"{_TIME}[ \t]*-->[ \t]*{_TIME}[^\n]*\n?", re.ASCII)
_MARKUP = re.compile(r"<[^<>]*>|\{\\[^{}]*\}")
LEAD = "Lines of subtitles stand after the times at which they are said.\n"


def subtitles_path(task: Task) -> str | None:
    """The file that a task's `extras["subtitles"]` names, from the folder of its first video; None without one."""
    video = next((media for media in task.media if media.kind is MediaKind.VIDEO), None)
    named = task.extras.get("subtitles")
    # By the words of the path alone: the video's folder may be a link to another disk.
    return os.path.normpath(Path(video.path).parent / str(named)) if named and video else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cue:
    """A line that is said from `start` to `end` (seconds), such as `Cue(start=3.0, end=4.5, text="It is red.")`."""

    start: float
    end: float
    text: str

    @property
    def middle(self) -> float:
        """Where it stands among frames."""
        return (self.start + min(self.end, self.start + 3600)) / 2

    @property
    def line(self) -> str:
        """As the model reads it: its times, then what is said."""
        end = "" if math.isinf(self.end) else f"{self.end:.1f}"
        return f"<{self.start:.1f}-{end} seconds> {self.text}\n"

    def covers(self, time: float) -> bool:
        """Whether a frame at that time (seconds) falls into it."""
        half = max(self.end - self.start, 1.0) / 2
        middle = (self.start + self.end) / 2
        return self.start < time if math.isinf(self.end) else middle - half < time < middle + half


@functools.lru_cache(maxsize=64)
def read_cues(path: str, offset: float = 0.0) -> tuple[Cue, ...]:
    """The lines of a file of subtitles in the order of time, `offset` seconds taken off; those said before 0 are left.

    Raises MediaError for a file that is missing or holds no subtitles.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig", errors="replace")
    except (OSError, ValueError) as error:  # such as a name with a null byte
        reason = error.strerror if isinstance(error, OSError) else error
        raise MediaError(f"the subtitles {path!r:.200} can't be read: {reason}") from error
    found = _from_json(text, path) if Path(path).suffix == ".json" else _from_srt(text, path)
    moved = [Cue(start=cue.start - offset, end=cue.end - offset, text=cue.text) for cue in found if cue.text]
    known = [cue for cue in moved if math.isfinite(cue.start) and cue.end > 0]
    return tuple(sorted(known, key=lambda cue: (cue.start, cue.end)))


def _from_srt(text: str, path: str) -> list[Cue]:
    """SubRip's blocks: a number, `start --> end`, lines of text, a blank line."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    spans = list(_SPAN.finditer(text))
    if not spans and text.strip():
        raise MediaError(f"{path} holds no subtitles: no line of it has times such as 00:00:01,000 --> 00:00:02,500")
    cues = []
    for index, span in enumerate(spans):
        stop = spans[index + 1].start() if index + 1 < len(spans) else len(text)
        body = text[span.end() : stop].split("\n\n")[0]
        # The number of the next block stands right before its times where no blank line parts the two.
        lines = body.split("\n")
        if index + 1 < len(spans) and len(lines) > 1 and lines[-1] == "" and lines[-2].strip().isdecimal():
            lines = lines[:-2]
        cues.append(Cue(start=_clock(span[1]), end=_clock(span[2]), text=_said(" ".join(lines))))
    return cues


def _from_json(text: str, path: str) -> list[Cue]:
    """LongVideoBench's two shapes: `timestamp` [s, e] with `text`, or `start`, `end` and `line` as clocks."""
    try:
        rows = json.loads(text)
        return [_cue(row) for row in rows]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        shape = '{"timestamp": [start, end], "text": …} or {"start": …, "end": …, "line": …}'
        raise MediaError(f"{path} holds no subtitles: it must be a list of {shape}") from error


def _cue(row: Mapping[str, Any]) -> Cue:
    if "timestamp" in row:
        start, end = row["timestamp"]
        # An end that is no number means: to the end of the video.
        known = isinstance(end, int | float) and math.isfinite(end)
        return Cue(start=float(start), end=float(end) if known else math.inf, text=_said(str(row["text"])))
    return Cue(start=_clock(str(row["start"])), end=_clock(str(row["end"])), text=_said(str(row["line"])))


def _clock(text: str) -> float:
    """`hh:mm:ss,mmm` or `mm:ss.mmm` in seconds."""
    total = 0.0
    for field in text.replace(",", ".").split(":"):
        total = total * 60 + float(field)
    return total


def _said(text: str) -> str:
    r"""One line without markup: `<i>` and `{\an8}` go; `\N` and ends of lines are spaces."""
    return " ".join(_MARKUP.sub("", text.replace("\\N", " ")).split())


# ---- what is shown -------------------------------------------------------------------------------------------------


def seen(cues: Sequence[Cue], times: Sequence[float]) -> list[Cue]:
    """The lines into which a frame falls; without frames, all of them."""
    return [cue for cue in cues if not times or any(cue.covers(time) for time in times)]


def during(cues: Sequence[Cue], start: float, end: float) -> list[Cue]:
    """The lines of which something is said between two times (seconds)."""
    return [cue for cue in cues if cue.start < end and start < cue.end]


def thinned(cues: Sequence[Cue], tokens: int, length: Callable[[str], int]) -> list[Cue]:
    """Lines of at most so many tokens in all: every second, third, ... where all are too many, so that none of the
    video is left out for another's sake.
    """
    lengths = [length(cue.line) for cue in cues]
    step = next((step for step in range(1, len(cues) + 1) if sum(lengths[::step]) <= tokens), None)
    return list(cues[::step]) if step else []


def woven(pictures: Sequence[Picture], cues: Sequence[Cue], pattern: str = STAMP) -> list[str | Picture]:
    """Frames, each after its time, and lines, each after all frames up to its middle; what they are stands before."""
    if not cues:
        return timed(pictures, pattern)
    waiting = deque(sorted(cues, key=lambda cue: cue.middle))
    parts: list[str | Picture] = [LEAD]
    for number, picture in enumerate(pictures):
        while waiting and picture.time is not None and waiting[0].middle < picture.time:
            parts.append(waiting.popleft().line)
        parts += stamped(picture, number, pattern)
    return [*parts, *(cue.line for cue in waiting)]
