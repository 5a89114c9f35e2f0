"""Look again at a window of the video, through the eyes of a sub-agent with the same weights."""

from typing import Annotated

from saccade.errors import ToolError
from saccade.media.picks import timed, window_times
from saccade.protocols import Budget
from saccade.sections import Positive, Span
from saccade.tools._tool import ToolContext, tool
from saccade.types import Episode, Message, ToolResult

QUESTION = "Say briefly what these frames show, and when."


@tool
async def crop_video(
    start_time: Annotated[float, "where the window begins, in seconds"],
    end_time: Annotated[float, "where the window ends, in seconds"],
    question: Annotated[str, "what to find out about the window"] = "",
    *,
    ctx: ToolContext,
    fps: Positive = 1.0,
    frames: Span = (1, 16),
    pixels: Span = (784, 50176),
    unasked: str = QUESTION,
) -> tuple[ToolResult, Episode]:
    """Look closely at a window of the video and answer a question about it.

    Of several videos it is the first. A window that leaves the video at one end is clamped. The sub-agent sees
    `fps` frames per second, at least and at most `frames` of them, of at least and at most `pixels` each, each preceded
    by its time; then the question, or `unasked` where there is none.
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
    pictures = await ctx.media.frames(ctx.path, times, factor=ctx.renderer.factor, budget=budget)
    child = await ctx.ask((Message(role="user", parts=(*timed(pictures), question.strip() or unasked)),))
    return ToolResult(text=child.turns[-1].reply.text.strip(), executed=True), child
