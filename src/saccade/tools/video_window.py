"""The frames and subtitles of a window of one of the task's videos, for tools."""

import itertools
import re
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Annotated

from saccade.chat.tool_formats.base import parse_seconds
from saccade.errors import ToolError
from saccade.ledger import ImageRef
from saccade.media.frame_sampling import sample_window_times
from saccade.media.subtitles import Cue, select_cues_between, subsample_cues
from saccade.protocols import PixelBudget
from saccade.tools.base import ArgumentForm, ToolContext

StartTime = Annotated[
    float, "where the window begins, in seconds", ArgumentForm(aliases=("start",), parse=parse_seconds)
]
EndTime = Annotated[float, "where the window ends, in seconds", ArgumentForm(aliases=("end",), parse=parse_seconds)]
# ParaVT's and LongVT's calls name the video, and their prompts end with its path.
VideoPath = Annotated[str, "the video", ArgumentForm(aliases=("video",), is_listed=False)]
# Stops at the next "video path": else each of many would scan the rest of the line.
_SHOWN_PATH_PATTERN = re.compile(
    r"\bvideo path\b(?:(?!\bvideo path\b)[^:\n])*+:\s*+[\"'`]?+([^\s\"'`]++)", re.IGNORECASE
)


def select_video(video_path: str, *, ctx: ToolContext) -> ToolContext:
    """Return the context with the video that a call names as its first; an empty name is the first one.

    A name is a path, a file name, the path that the question shows, or `video_clue_k`. Raises ToolError, which names
    the videos that there are.
    """
    name = video_path.strip().removeprefix("file://")
    paths = ctx.video_paths or tuple(filter(None, [ctx.video_path]))
    if not name or not paths:
        return ctx
    exact = [path for index, path in enumerate(paths) if name in (path, f"video_clue_{index}")]
    # Folders differ between machines; files of one name are distinguished by the folders that they share with the call.
    counts = {path: _count_common_parts(name, path) for path in paths}
    path = exact[0] if exact else max(counts, key=lambda path: counts[path])
    if exact or counts[path]:
        # The subtitles belong to the first video.
        return replace(ctx, video_path=path, subtitles=ctx.subtitles if path == ctx.video_path else ())
    shown = [match.rstrip(".,;") for match in _SHOWN_PATH_PATTERN.findall(ctx.question)]
    if any(PurePath(name).name == PurePath(path).name for path in shown):
        return ctx
    names = ", ".join(PurePath(path).name for path in paths)
    raise ToolError(f"there is no video {name!r:.80}; there is {names}")


def _count_common_parts(name: str, path: str) -> int:
    """Return how many parts two paths have in common at their ends: 0 if the files' names differ."""
    pairs = zip(reversed(PurePath(name).parts), reversed(PurePath(path).parts), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoWindow:
    """What a window of a video shows."""

    start: float  # seconds
    end: float  # seconds
    frames: list[ImageRef]  # in order
    cues: list[Cue]  # subtitle lines


async def load_window(
    start_time: float,
    end_time: float,
    *,
    ctx: ToolContext,
    fps: float,
    frame_range: tuple[int, int],
    frame_pixels: tuple[int, int],
    max_subtitle_tokens: int,
) -> VideoWindow:
    """Load a window of the context's video, clamped to it, with at most `max_subtitle_tokens` tokens of subtitles.

    `frame_range` and `frame_pixels` are the minimum and maximum number of frames and of pixels per frame. Raises
    ToolError without a video, and for a window that is empty or outside of the video.
    """
    if not ctx.video_path:
        raise ToolError("there is no video to look at, only what you were shown; answer from that")
    info = await ctx.media.probe(ctx.video_path)
    if end_time <= start_time:
        raise ToolError(f"end_time {end_time:g} must be after start_time {start_time:g}")
    # A window that partly overlaps the video is useful; one outside of it is a mistake the model should read about.
    start, end = max(start_time, 0.0), min(end_time, info.duration)
    if end <= start:
        window = f"the window from {start_time:g} to {end_time:g}"
        raise ToolError(f"{window} lies outside the video, which lasts {info.duration:g} seconds")
    times = sample_window_times(start, end, fps=fps, min_frames=frame_range[0], max_frames=frame_range[1])
    budget = PixelBudget(*frame_pixels)
    frames = await ctx.media.load_frames(ctx.video_path, times, factor=ctx.renderer.factor, budget=budget)
    cues = select_cues_between(ctx.subtitles, start, end)
    cues = subsample_cues(cues, max_subtitle_tokens, lambda line: len(ctx.renderer.encode(line)))
    return VideoWindow(start=start, end=end, frames=frames, cues=cues)
