"""The tool crop_video: a sub-agent of the same weights sees a window of the video and answers a question."""

from typing import Annotated

from saccade.config.schema import IntRange, NonNegativeInt, PositiveFloat
from saccade.media.subtitles import interleave_cues
from saccade.tools.base import ToolContext, tool
from saccade.tools.video_window import EndTime, StartTime, VideoPath, load_window, select_video
from saccade.types import Episode, Message, ToolResult
from saccade.utils.templates import fill_template

DEFAULT_QUESTION = "Say briefly what these frames show, and when."


@tool
async def crop_video(
    start_time: StartTime,
    end_time: EndTime,
    question: Annotated[str, "what to find out about the window"] = "",
    video_path: VideoPath = "",
    *,
    ctx: ToolContext,
    fps: PositiveFloat = 1.0,  # sampling rate within the window, frames per second
    frame_range: IntRange = (1, 16),  # minimum and maximum number of frames that the sub-agent sees
    frame_pixels: IntRange = (784, 50176),  # minimum and maximum pixels per frame
    default_question: str = DEFAULT_QUESTION,  # question of a call that has none
    # sub-agent's text after the frames, with {question}, and {start}, {end} (mm:ss), {duration} (seconds) of the window
    prompt_template: str = "{question}",
    max_subtitle_tokens: NonNegativeInt = 512,  # maximum tokens of the window's subtitles
) -> tuple[ToolResult, Episode]:
    """Look closely at a window of the video and answer a question about it.

    The window is in the task's first video, or in the one that `video_path` names, and is clamped to it. The sub-agent
    sees `fps` frames per second, their number within `frame_range` and their pixels within `frame_pixels`, each
    preceded by its time; then the question, or `default_question` if it is empty, in `prompt_template`. It also reads
    the window's subtitles, at most `max_subtitle_tokens` of them.
    """
    window = await load_window(
        start_time,
        end_time,
        ctx=select_video(video_path, ctx=ctx),
        fps=fps,
        frame_range=frame_range,
        frame_pixels=frame_pixels,
        max_subtitle_tokens=max_subtitle_tokens,
    )
    parts = interleave_cues(window.frames, window.cues)
    text = fill_prompt_template(prompt_template, (window.start, window.end), question.strip() or default_question)
    child = await ctx.ask((Message(role="user", parts=(*parts, text)),))
    return ToolResult(text=child.turns[-1].reply.text.strip()), child


def fill_prompt_template(template: str, window: tuple[float, float], question: str) -> str:
    """Return the text of a sub-agent's prompt; `window` is the start and end in seconds.

    >>> fill_prompt_template("{start}-{end}, {duration} s: {question}", (65.5, 130.0), "Who?")
    '01:05-02:10, 64.5 s: Who?'
    """
    start, end = (f"{int(seconds) // 60:02}:{int(seconds) % 60:02}" for seconds in window)
    duration = f"{window[1] - window[0]:.1f}"
    return fill_template(template, {"start": start, "end": end, "duration": duration, "question": question}).strip()
