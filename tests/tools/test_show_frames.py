"""The tool that shows frames to its caller, and what subtitles say in a window, to it and to crop_video's sub-agent."""

import asyncio

import pytest

from saccade.ledger import Ledger, Picture
from saccade.media.subtitles import LEAD, Cue
from saccade.testing import PaintedMedia
from saccade.tools._tool import ToolContext
from saccade.tools.crop_video import crop_video
from saccade.tools.show_frames import show_frames
from saccade.types import End, Episode, Kind, Reply, Task, Turn

CUES = tuple(Cue(start=at, end=at + 2.0, text=f"line {at}") for at in range(0, 64, 2))


def served(tool, arguments, renderer, path="clip.mp4", subtitles=(), **settings):
    """The result, and the parts of the message that a sub-agent was sent."""
    asked = []

    async def ask(messages):
        asked.extend(messages[0].parts)
        task = Task(id="c", question="?", media=(), kind=Kind.OPEN, gold="")
        turn = Turn(reply=Reply(text="red"))
        return Episode(task=task, agent="sub", ledger=Ledger(), turns=(turn,), end=End.ANSWERED)

    given = {"media": PaintedMedia(), "renderer": renderer, "ask": ask, "path": path, "seed": 0}
    ctx = ToolContext(**given, subtitles=subtitles, settings=settings)
    result, _ = asyncio.run(tool(arguments, ctx=ctx))
    return result, asked


def shown(start, end, renderer, fps=None, **settings):
    arguments = {"start_time": start, "end_time": end, **({} if fps is None else {"fps": fps})}
    return served(show_frames, arguments, renderer, **settings)[0]


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
    result = shown(*window, renderer, fps)
    assert [picture.time for picture in result.pictures] == pytest.approx(times)
    assert (result.ok, result.text) == (True, "")


def test_there_are_most_frames_at_most(renderer):
    assert len(shown(0, 64, renderer, 4).pictures) == 16
    assert len(shown(0, 64, renderer, 1, most_frames=3).pictures) == 3
    assert len(shown(0, 4, renderer, usual_fps=0.5).pictures) == 2


def test_more_may_be_refused(renderer):
    assert len(shown(0, 16, renderer, 1, beyond="refuse").pictures) == 16
    result = shown(0, 20, renderer, 2, beyond="refuse")
    assert result.error == "40 frames are asked for, and 16 can be shown; take a shorter window or a lower fps"
    assert "outside" in shown(1e9, 2e9, renderer, beyond="spread").error
    assert "frames are asked for" in shown(-1e308, 1e308, renderer, 120, beyond="refuse").error


@pytest.mark.parametrize(
    ("window", "fps", "words"),
    [
        ((9, 3), None, "end_time 3 must be after start_time 9"),
        ((70, 80), None, "lies outside the video, which lasts 64 seconds"),
        ((0, 4), -1, "fps must lie between 0 and 120"),
        ((0, 4), 1e300, "fps must lie between 0 and 120"),
    ],
)
def test_what_cannot_be_shown(renderer, window, fps, words):
    result = shown(*window, renderer, fps)
    assert words in result.error
    assert result.pictures == ()


def test_without_a_video_and_with_a_missing_one(renderer):
    assert "there is no video" in shown(0, 4, renderer, path="").error
    assert "missing.mp4" in shown(0, 4, renderer, path="missing.mp4").error


# ---- subtitles -----------------------------------------------------------------------------------------------------


def test_the_lines_of_the_window_alone(renderer):
    result = shown(4, 8, renderer, subtitles=CUES)
    assert result.text == "<4.0-6.0 seconds> line 4\n<6.0-8.0 seconds> line 6\n"
    _, asked = served(crop_video, {"start_time": 4, "end_time": 8, "question": "Who?"}, renderer, subtitles=CUES)
    said = [part for part in asked if not isinstance(part, Picture)]
    assert said == [
        *(LEAD, "<4.5 seconds>", "<4.0-6.0 seconds> line 4\n", "<5.5 seconds>", "<6.5 seconds>"),
        *("<6.0-8.0 seconds> line 6\n", "<7.5 seconds>", "Who?"),
    ]


def test_lines_are_bounded(renderer):
    long = shown(0, 64, renderer, subtitles=CUES, subtitle_tokens=100).text
    assert 0 < len(renderer.encode(long)) <= 100
    assert "line 0\n" in long
    assert int(long.splitlines()[-1].split()[-1]) > 40  # to the end of the window, not only of its beginning
    assert shown(0, 64, renderer, subtitles=CUES, subtitle_tokens=0).text == ""
    _, asked = served(crop_video, {"start_time": 0, "end_time": 64}, renderer, subtitles=CUES, subtitle_tokens=0)
    assert LEAD not in asked
