"""The tool show_frames: shows frames of a window of the video to the caller, where crop_video runs a sub-agent."""

from typing import Annotated, Literal

from saccade.config.schema import IntRange, NonNegativeInt, PositiveFloat, PositiveInt
from saccade.errors import ToolError
from saccade.tools.base import Range, ToolContext, tool
from saccade.tools.video_window import EndTime, StartTime, VideoPath, load_window, select_video
from saccade.types import ToolResult


@tool
async def show_frames(
    start_time: StartTime,
    end_time: EndTime,
    fps: Annotated[float, "frames per second; 0 is the usual rate", Range(minimum=0, maximum=120)] = 0.0,
    video_path: VideoPath = "",
    *,
    ctx: ToolContext,
    default_fps: PositiveFloat = 1.0,  # sampling rate of a call without `fps`, frames per second
    max_frames: PositiveInt = 16,  # maximum number of frames of a call
    # with more frames than that: spread as many evenly, or refuse the call
    on_overflow: Literal["spread", "refuse"] = "spread",
    frame_pixels: IntRange = (784, 50176),  # minimum and maximum pixels per frame
    max_subtitle_tokens: NonNegativeInt = 512,  # maximum tokens of the window's subtitles
) -> ToolResult:
    """Show frames of a window of the video, each after its time.

    The window is in the task's first video, or in the one that `video_path` names, and is clamped to it. It is sampled
    at `fps` (`default_fps` if 0), with the pixels of each frame within `frame_pixels`. If there would be more than
    `max_frames`, `on_overflow` decides: spread that many evenly, or refuse the call. The result's text is the window's
    subtitles, at most `max_subtitle_tokens`.
    """
    ctx, fps = select_video(video_path, ctx=ctx), fps or default_fps
    num_frames = (end_time - start_time) * fps
    if on_overflow == "refuse" and num_frames >= max_frames + 1:
        problem = f"{num_frames:.0f} frames are asked for, and {max_frames} can be shown"
        raise ToolError(f"{problem}; take a shorter window or a lower fps")
    window = await load_window(
        start_time,
        end_time,
        ctx=ctx,
        fps=fps,
        frame_range=(1, max_frames),
        frame_pixels=frame_pixels,
        max_subtitle_tokens=max_subtitle_tokens,
    )
    text = "".join(cue.line for cue in window.cues)
    return ToolResult(text=text, images=tuple(window.frames))
