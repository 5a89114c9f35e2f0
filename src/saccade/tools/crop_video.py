"""Look again at a window of the video, through the eyes of a sub-agent with the same weights."""

from typing import Annotated

from saccade.media.subtitles import woven
from saccade.sections import Positive, Span, Whole
from saccade.tools._tool import ToolContext, tool
from saccade.tools._window import lines, look
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
    subtitle_tokens: Whole = 512,
) -> tuple[ToolResult, Episode]:
    """Look closely at a window of the video and answer a question about it.

    Of several videos it is the first. A window that leaves the video at one end is clamped. The sub-agent sees
    `fps` frames per second, at least and at most `frames` of them, of at least and at most `pixels` each, each preceded
    by its time; then the question, or `unasked` where there is none. Of a video with subtitles it reads those of the
    window, `subtitle_tokens` at most.
    """
    pictures, span = await look(start_time, end_time, ctx=ctx, fps=fps, frames=frames, pixels=pixels)
    parts = woven(pictures, lines(span, subtitle_tokens, ctx=ctx))
    child = await ctx.ask((Message(role="user", parts=(*parts, question.strip() or unasked)),))
    return ToolResult(text=child.turns[-1].reply.text.strip(), executed=True), child
