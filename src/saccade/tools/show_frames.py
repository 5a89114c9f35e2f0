"""Look again at a window of the video oneself: the caller sees its frames, where crop_video asks a sub-agent."""

from typing import Annotated, Literal

from saccade.errors import ToolError
from saccade.sections import Count, Positive, Span, Whole
from saccade.tools._tool import Between, ToolContext, tool
from saccade.tools._window import lines, look
from saccade.types import ToolResult


@tool
async def show_frames(
    start_time: Annotated[float, "where the window begins, in seconds"],
    end_time: Annotated[float, "where the window ends, in seconds"],
    fps: Annotated[float, "frames per second; 0 is the usual rate", Between(least=0, most=120)] = 0.0,
    *,
    ctx: ToolContext,
    usual_fps: Positive = 1.0,
    most_frames: Count = 16,
    beyond: Literal["spread", "refuse"] = "spread",
    pixels: Span = (784, 50176),
    subtitle_tokens: Whole = 512,
) -> ToolResult:
    """Show frames of a window of the video, each after its time.

    Of several videos it is the first. A window that leaves the video at one end is clamped. Shown are `fps` frames per
    second, `usual_fps` where the caller names none, and `most_frames` at most: where there would be more (`beyond`),
    they are spread evenly, or the call is refused. Each has at least and at most `pixels`. The result's text is what
    subtitles say in the window, `subtitle_tokens` at most.
    """
    rate = fps or usual_fps
    asked = (end_time - start_time) * rate
    if beyond == "refuse" and asked >= most_frames + 1:
        raise ToolError(
            f"{asked:.0f} frames are asked for, and {most_frames} can be shown; take a shorter window or a lower fps"
        )
    shown, span = await look(start_time, end_time, ctx=ctx, fps=rate, frames=(1, most_frames), pixels=pixels)
    said = "".join(cue.line for cue in lines(span, subtitle_tokens, ctx=ctx))
    return ToolResult(text=said, pictures=tuple(shown), executed=True)
