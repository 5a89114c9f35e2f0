"""The tool crop_video: a sub-agent of the same weights sees a window of the video and answers a question."""

from typing import Annotated

from saccade.config.schema import IntRange, NonNegativeInt, PositiveFloat
from saccade.media.subtitles import interleave_cues
from saccade.tools.base import ToolContext, tool
from saccade.tools.video_window import load_window_frames, select_window_subtitles
from saccade.types import Episode, Message, ToolResult

DEFAULT_QUESTION = "Say briefly what these frames show, and when."


@tool
async def crop_video(
    start_time: Annotated[float, "where the window begins, in seconds"],
    end_time: Annotated[float, "where the window ends, in seconds"],
    question: Annotated[str, "what to find out about the window"] = "",
    *,
    ctx: ToolContext,
    fps: PositiveFloat = 1.0,  # sampling rate within the window, frames per second
    frame_range: IntRange = (1, 16),  # minimum and maximum number of frames that the sub-agent sees
    frame_pixels: IntRange = (784, 50176),  # minimum and maximum pixels per frame
    default_question: str = DEFAULT_QUESTION,  # question of a call that has none
    max_subtitle_tokens: NonNegativeInt = 512,  # maximum tokens of the window's subtitles
) -> tuple[ToolResult, Episode]:
    """Look closely at a window of the video and answer a question about it.

    The window is in the task's first video, and is clamped to it. The sub-agent sees `fps` frames per second, their
    number within `frame_range` and their pixels within `frame_pixels`, each preceded by its time; then the question, or
    `default_question` if it is empty. It also reads the window's subtitles, at most `max_subtitle_tokens` of them.
    """
    frames, window = await load_window_frames(
        start_time, end_time, ctx=ctx, fps=fps, frame_range=frame_range, frame_pixels=frame_pixels
    )
    parts = interleave_cues(frames, select_window_subtitles(window, max_subtitle_tokens, ctx=ctx))
    child = await ctx.ask((Message(role="user", parts=(*parts, question.strip() or default_question)),))
    return ToolResult(text=child.turns[-1].reply.text.strip(), was_executed=True), child
