"""The tool show_frames, and the subtitles of a window that it and crop_video's sub-agent receive."""

import asyncio

import pytest

from saccade.ledger import ImageRef, Ledger
from saccade.media.subtitles import SUBTITLES_INTRO, Cue
from saccade.testing import FakeMediaLoader
from saccade.tools.base import ToolContext
from saccade.tools.crop_video import crop_video
from saccade.tools.show_frames import show_frames
from saccade.types import AnswerType, Episode, EpisodeStatus, Reply, Task, Turn

CUES = tuple(Cue(start=at, end=at + 2.0, text=f"line {at}") for at in range(0, 64, 2))


def call_tool(tool, arguments, renderer, path="clip.mp4", subtitles=(), **settings):
    """Call a tool; return its result, and the parts of the message that a sub-agent received."""
    received = []

    async def ask(messages):
        received.extend(messages[0].parts)
        task = Task(id="c", question="?", media=(), answer_type=AnswerType.OPEN, ground_truth="")
        turn = Turn(reply=Reply(text="red"))
        return Episode(
            task=task, environment="sub_agent", ledger=Ledger(), turns=(turn,), status=EpisodeStatus.ANSWERED
        )

    ctx = ToolContext(
        media=FakeMediaLoader(),
        renderer=renderer,
        ask=ask,
        video_path=path,
        seed=0,
        subtitles=subtitles,
        settings=settings,
    )
    result, _ = asyncio.run(tool(arguments, ctx=ctx))
    return result, received


def show_window(start, end, renderer, fps=None, **settings):
    arguments = {"start_time": start, "end_time": end, **({} if fps is None else {"fps": fps})}
    return call_tool(show_frames, arguments, renderer, **settings)[0]


@pytest.mark.parametrize(
    ("window", "fps", "times"),
    [
        ((4, 7), None, [4.5, 5.5, 6.5]),
        ((4, 6), 2, [4.25, 4.75, 5.25, 5.75]),
        ((4, 8), 0.5, [5.0, 7.0]),
        ((10, 10.2), 1, [10.1]),
        ((-3, 2), None, [0.5, 1.5]),
        ((62, 99), 0, [62.5, 63.5]),
    ],
)
def test_frames_of_a_window(renderer, window, fps, times):
    result = show_window(*window, renderer, fps)
    assert [image.time for image in result.images] == pytest.approx(times)
    assert (result.ok, result.text) == (True, "")


def test_the_number_of_frames_is_bounded(renderer):
    assert len(show_window(0, 64, renderer, 4).images) == 16
    assert len(show_window(0, 64, renderer, 1, max_frames=3).images) == 3
    assert len(show_window(0, 4, renderer, default_fps=0.5).images) == 2


def test_too_many_frames_may_be_refused(renderer):
    assert len(show_window(0, 16, renderer, 1, on_overflow="refuse").images) == 16
    result = show_window(0, 20, renderer, 2, on_overflow="refuse")
    assert {"40", "16"} <= {*result.error.split()}
    assert "64" in show_window(1e9, 2e9, renderer, on_overflow="spread").error.split()
    assert "16" in show_window(-1e308, 1e308, renderer, 120, on_overflow="refuse").error.split()


@pytest.mark.parametrize(
    ("window", "fps", "values"),
    [
        ((9, 3), None, ("end_time 3", "start_time 9")),
        ((70, 80), None, ("70", "80", "64")),
        ((0, 4), -1, ("fps", "0", "120")),
        ((0, 4), 1e300, ("fps", "0", "120")),
    ],
)
def test_impossible_windows_are_readable_errors(renderer, window, fps, values):
    result = show_window(*window, renderer, fps)
    assert all(value in result.error for value in values)
    assert result.images == ()


def test_a_missing_video_is_a_readable_error(renderer):
    assert show_window(0, 4, renderer, path="").error
    error = show_window(0, 4, renderer, path="missing.mp4").error
    assert "the video" in error
    assert "missing" not in error


# ---- subtitles -----------------------------------------------------------------------------------------------------


def test_only_subtitles_of_the_window_are_included(renderer):
    result = show_window(4, 8, renderer, subtitles=CUES)
    assert result.text == "<4.0-6.0 seconds> line 4\n<6.0-8.0 seconds> line 6\n"
    _, received = call_tool(crop_video, {"start_time": 4, "end_time": 8, "question": "Who?"}, renderer, subtitles=CUES)
    texts = [part for part in received if not isinstance(part, ImageRef)]
    assert texts == [
        *(SUBTITLES_INTRO, "<4.5 seconds>", "<4.0-6.0 seconds> line 4\n", "<5.5 seconds>", "<6.5 seconds>"),
        *("<6.0-8.0 seconds> line 6\n", "<7.5 seconds>", "Who?"),
    ]


def test_subtitles_are_bounded(renderer):
    long = show_window(0, 64, renderer, subtitles=CUES, max_subtitle_tokens=100).text
    assert 0 < len(renderer.encode(long)) <= 100
    assert "line 0\n" in long
    assert int(long.splitlines()[-1].split()[-1]) > 40  # lines of the whole window, not only of its beginning
    assert show_window(0, 64, renderer, subtitles=CUES, max_subtitle_tokens=0).text == ""
    _, received = call_tool(
        crop_video, {"start_time": 0, "end_time": 64}, renderer, subtitles=CUES, max_subtitle_tokens=0
    )
    assert SUBTITLES_INTRO not in received
