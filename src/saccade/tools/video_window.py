"""A window of the task's first video, as tools look at it: its frames, and what is said in it."""

from saccade.errors import ToolError
from saccade.ledger import Picture
from saccade.media.picks import window_times
from saccade.media.subtitles import Cue, during, thinned
from saccade.protocols import Budget
from saccade.tools._tool import ToolContext


async def look(
    start_time: float,
    end_time: float,
    *,
    ctx: ToolContext,
    fps: float,
    frames: tuple[int, int],
    pixels: tuple[int, int],
) -> tuple[list[Picture], tuple[float, float]]:
    """The frames of a window, and the window (seconds) as it was clamped to the video.

    Raises ToolError where there is no video, or nothing of it between the two times.
    """
    if not ctx.path:
        raise ToolError("there is no video to look at, only what you were shown; answer from that")
    clip = await ctx.media.probe(ctx.path)
    if end_time <= start_time:
        raise ToolError(f"end_time {end_time:g} must be after start_time {start_time:g}")
    # Half of a window is still worth a look; a window elsewhere is a mistake to be told of.
    start, end = max(start_time, 0.0), min(end_time, clip.duration)
    if end <= start:
        asked = f"the window from {start_time:g} to {end_time:g}"
        raise ToolError(f"{asked} lies outside the video, which lasts {clip.duration:g} seconds")
    times = window_times(start, end, fps=fps, least=frames[0], most=frames[1])
    budget = Budget(min_pixels=pixels[0], max_pixels=pixels[1])
    return await ctx.media.frames(ctx.path, times, factor=ctx.renderer.factor, budget=budget), (start, end)


def lines(span: tuple[float, float], tokens: int, *, ctx: ToolContext) -> list[Cue]:
    """The lines of subtitles that are said within a window, of at most so many tokens in all."""
    return thinned(during(ctx.subtitles, *span), tokens, lambda line: len(ctx.renderer.encode(line)))
