"""The tool crop_video: the sub-agent's message, clamping, and errors for the model."""

import asyncio

import pytest

from saccade.ledger import ImageRef, Ledger
from saccade.testing import FakeMediaLoader
from saccade.tools.base import ToolContext
from saccade.tools.crop_video import crop_video
from saccade.tools.video_window import select_video
from saccade.types import AnswerType, Episode, EpisodeStatus, Reply, Task, Turn


def crop(arguments, renderer, **settings):
    """Call the tool; return its result, the sub-agent's episode and the messages it received."""
    received = []

    async def ask(messages):
        received.extend(messages)
        task = Task(id="c", question="?", media=(), answer_type=AnswerType.OPEN, ground_truth="")
        turn = Turn(reply=Reply(text=" red at 4.5 "))
        return Episode(
            task=task, environment="sub_agent", ledger=Ledger(), turns=(turn,), status=EpisodeStatus.ANSWERED
        )

    async def body():
        path = settings.pop("path", "clip.mp4")
        ctx = ToolContext(
            media=FakeMediaLoader(),
            renderer=renderer,
            ask=ask,
            video_path=path,
            video_paths=settings.pop("paths", (path,)),
            question=settings.pop("question", ""),
            seed=0,
            settings=settings,
        )
        return await crop_video(arguments, ctx=ctx)

    result, child = asyncio.run(body())
    return result, child, received


def list_times(message):
    return [part.time for part in message.parts if isinstance(part, ImageRef)]


def test_frames_are_shown_with_times_then_the_question(renderer):
    result, child, (message,) = crop({"start_time": 4, "end_time": 7, "question": "Which colour?"}, renderer)
    assert (result.text, result.ok, child.environment) == ("red at 4.5", True, "sub_agent")
    assert list_times(message) == [4.5, 5.5, 6.5]
    assert message.parts[0] == "<4.5 seconds>"
    assert isinstance(message.parts[1], ImageRef)
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
    assert list_times(message) == pytest.approx(shown)


def test_frames_are_bounded(renderer):
    _, _, (message,) = crop({"start_time": 0, "end_time": 64}, renderer)
    assert len(list_times(message)) == 16
    _, _, (message,) = crop({"start_time": 0, "end_time": 64}, renderer, fps=0.25, frame_range=(2, 64))
    assert len(list_times(message)) == 16
    _, _, (message,) = crop({"start_time": 0, "end_time": 1}, renderer, frame_range=(3, 8), default_question="What?")
    assert len(list_times(message)) == 3
    assert message.parts[-1] == "What?"


@pytest.mark.parametrize(
    ("window", "values"),
    [
        ((9, 3), ("end_time 3", "start_time 9")),
        ((5, 5), ("end_time 5", "start_time 5")),
        ((70, 80), ("70", "80", "64")),
        ((-9, -3), ("-9", "-3", "64")),
        ((64, 65), ("64", "65")),
    ],
)
def test_impossible_windows_are_readable_errors(renderer, window, values):
    result, child, received = crop({"start_time": window[0], "end_time": window[1]}, renderer)
    assert all(value in result.error for value in values)
    assert (child, received, result.was_executed) == (None, [], False)


def test_a_missing_file_is_a_readable_error(renderer):
    result, _, _ = crop({"start_time": 0, "end_time": 4}, renderer, path="missing.mp4")
    assert "the video" in result.error
    assert "missing" not in result.error


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ({"video_path": "clip.mp4", "start_time": 4, "end_time": 6}, [4.5, 5.5]),
        ({"video_path": "longvt_source/a/clip.mp4", "start_time": "4", "end_time": "6.0"}, [4.5, 5.5]),
        ({"video_path": "file:///videos/clip.mp4", "start": 4.0, "end": "6s"}, [4.5, 5.5]),
        ({"video": "shown.mp4", "start_time": "00:04", "end_time": "00:00:06"}, [4.5, 5.5]),
        ({"video_path": "", "start_time": 4, "end_time": 6}, [4.5, 5.5]),
        ({"0": "clip.mp4", "1": 4, "2": 6}, [4.5, 5.5]),
        ({"0": 4, "1": "6"}, [4.5, 5.5]),
    ],
)
def test_published_forms_of_a_call_run(renderer, arguments, shown):
    question = "When? The video path for this video is: /data/shown.mp4."
    result, _, (message,) = crop(arguments, renderer, path="/root/clip.mp4", question=question)
    assert (result.ok, list_times(message)) == (True, shown)


@pytest.mark.parametrize("name", ["other.mp4", "clip", "...", "lip.mp4", "When?"])
def test_another_video_is_a_readable_error(renderer, name):
    arguments = {"video_path": name, "start_time": 4, "end_time": 6}
    result, child, received = crop(arguments, renderer, path="/root/clip.mp4", question="When? Not other.mp4.")
    assert f"{name!r}" in result.error
    assert "clip.mp4" in result.error
    assert "/root" not in result.error
    assert (child, received, result.was_executed) == (None, [], False)


def test_a_call_may_name_another_video_of_the_task(renderer):
    arguments = {"video_path": "b.mp4", "start_time": 4, "end_time": 6}
    _, _, (message,) = crop(arguments, renderer, path="a.mp4", paths=("a.mp4", "b.mp4"))
    assert {part.path for part in message.parts if isinstance(part, ImageRef)} == {"b.mp4"}


def test_the_schema_lists_the_arguments_of_the_prompt():
    assert [*crop_video.schema["function"]["parameters"]["properties"]] == ["start_time", "end_time", "question"]


def test_files_of_one_name_are_distinguished_by_their_folder(renderer):
    paths = ("a/1.mp4", "b/1.mp4", "a/2.mp4")
    ctx = ToolContext(
        media=FakeMediaLoader(), renderer=renderer, ask=None, video_path=paths[0], seed=0, video_paths=paths
    )
    for name, expected in (("b/1.mp4", 1), ("/published/b/1.mp4", 1), ("1.mp4", 0), ("2.mp4", 2), ("video_clue_1", 1)):
        assert select_video(name, ctx=ctx).video_path == paths[expected]
