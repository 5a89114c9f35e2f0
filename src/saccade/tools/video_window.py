"""The frames and subtitles of a window of the task's first video, for tools."""

from saccade.errors import ToolError
from saccade.ledger import ImageRef
from saccade.media.frame_sampling import sample_window_times
from saccade.media.subtitles import Cue, select_cues_between, subsample_cues
from saccade.protocols import PixelBudget
from saccade.tools.base import ToolContext


async def load_window_frames(
    start_time: float,
    end_time: float,
    *,
    ctx: ToolContext,
    fps: float,
    frame_range: tuple[int, int],
    frame_pixels: tuple[int, int],
) -> tuple[list[ImageRef], tuple[float, float]]:
    """Load the frames of a window clamped to the video; return them and that window, seconds. Raises ToolError."""
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
    budget = PixelBudget(min_pixels=frame_pixels[0], max_pixels=frame_pixels[1])
    return await ctx.media.load_frames(ctx.video_path, times, factor=ctx.renderer.factor, budget=budget), (start, end)


def select_window_subtitles(window: tuple[float, float], max_tokens: int, *, ctx: ToolContext) -> list[Cue]:
    """Select the subtitle lines within a window (start, end) in seconds, at most `max_tokens` tokens in all."""
    return subsample_cues(
        select_cues_between(ctx.subtitles, *window), max_tokens, lambda line: len(ctx.renderer.encode(line))
    )
