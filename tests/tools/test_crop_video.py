"""The crop tool: what the sub-agent is shown, clamping, and errors the model can read."""

import asyncio

import pytest

from saccade.ledger import Ledger, Picture
from saccade.testing import PaintedMedia
from saccade.tools._tool import ToolContext
from saccade.tools.crop_video import crop_video
from saccade.types import End, Episode, Kind, Reply, Task, Turn


def crop(arguments, renderer, **settings):
    """The result, and the message that the sub-agent was sent."""
    asked = []

    async def ask(messages):
        asked.extend(messages)
        task = Task(id="c", question="?", media=(), kind=Kind.OPEN, gold="")
        turn = Turn(reply=Reply(text=" red at 4.5 "))
        return Episode(task=task, agent="sub", ledger=Ledger(), turns=(turn,), end=End.ANSWERED)

    async def body():
        path = settings.pop("path", "clip.mp4")
        ctx = ToolContext(media=PaintedMedia(), renderer=renderer, ask=ask, path=path, seed=0, settings=settings)
        return await crop_video(arguments, ctx=ctx)

    result, child = asyncio.run(body())
    return result, child, asked


def times(message):
    return [part.time for part in message.parts if isinstance(part, Picture)]


def test_a_window_is_shown_with_times_then_the_question(renderer):
    result, child, (message,) = crop({"start_time": 4, "end_time": 7, "question": "Which colour?"}, renderer)
    assert (result.text, result.ok, child.agent) == ("red at 4.5", True, "sub")
    assert times(message) == [4.5, 5.5, 6.5]
    assert message.parts[0] == "<4.5 seconds>"
    assert isinstance(message.parts[1], Picture)
    assert message.parts[-1] == "Which colour?"


@pytest.mark.parametrize(
    ("window", "shown"),
    [
        ((-3, 2), [0.5, 1.5]),
        ((62, 99), [62.5, 63.5]),
        ((10, 10.2), [10.1]),
    ],
)
def test_windows_are_clamped(renderer, window, shown):
    _, _, (message,) = crop({"0": window[0], "1": window[1]}, renderer)
    assert times(message) == pytest.approx(shown)


def test_frames_are_bounded(renderer):
    _, _, (message,) = crop({"start_time": 0, "end_time": 64}, renderer)
    assert len(times(message)) == 16
    _, _, (message,) = crop({"start_time": 0, "end_time": 64}, renderer, fps=0.25, frames=(2, 64))
    assert len(times(message)) == 16
    _, _, (message,) = crop({"start_time": 0, "end_time": 1}, renderer, frames=(3, 8), unasked="What?")
    assert len(times(message)) == 3
    assert message.parts[-1] == "What?"


@pytest.mark.parametrize(
    ("window", "error"),
    [
        ((9, 3), "end_time 3 must be after start_time 9"),
        ((5, 5), "end_time 5 must be after start_time 5"),
        ((70, 80), "the window from 70 to 80 lies outside the video, which lasts 64 seconds"),
        ((-9, -3), "lies outside the video"),
        ((64, 65), "lies outside the video"),
    ],
)
def test_impossible_windows_are_errors_to_read(renderer, window, error):
    result, child, asked = crop({"start_time": window[0], "end_time": window[1]}, renderer)
    assert error in result.error
    assert (child, asked, result.executed) == (None, [], False)


def test_a_missing_file_is_an_error_to_read(renderer):
    result, _, _ = crop({"start_time": 0, "end_time": 4}, renderer, path="missing.mp4")
    assert "missing.mp4" in result.error
