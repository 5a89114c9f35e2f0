"""Subtitles reach the model: beside the frames of every agent, and in what its tools show."""

import asyncio
import json
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from saccade import plugins
from saccade.data.synthetic.video_writer import write_video
from saccade.engines.scripted import Scripted
from saccade.ledger import Ledger
from saccade.media.cache import CachingMediaLoader
from saccade.media.subtitles import SUBTITLES_INTRO
from saccade.protocols import Context
from saccade.rollouts.runner import run_episode
from saccade.types import AnswerType, Media, MediaKind, SamplingParams, Task

ANSWER = "</think><answer>red</answer>"
SRT = "\n".join(f"{at}\n00:00:{at:02},000 --> 00:00:{at + 4:02},000\nline {at}\n" for at in range(0, 16, 4))


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """16 seconds of video with four lines of subtitles, in a copy of a benchmark."""
    copy = tmp_path_factory.mktemp("copy")
    for folder in ("data", "subtitle"):
        (copy / folder).mkdir()
    write_video(copy / "data" / "a.mp4", np.full((64, 32, 32, 3), 90, np.uint8), 4.0)
    (copy / "subtitle" / "a.srt").write_text(SRT)
    (copy / "subtitle" / "a.json").write_text(json.dumps([{"timestamp": [100, 104], "text": "later"}]))
    media = (Media(path=str(copy / "data" / "a.mp4")),)
    extras = {"subtitles": "../subtitle/a.srt"}
    return Task(id="t", question="What?", media=media, answer_type=AnswerType.OPEN, ground_truth="red", extras=extras)


def run(renderer, task, *replies, environment="single_turn", frame_budget=2, check=True, **settings):
    engine = Scripted(renderer, replies=replies or (ANSWER,))
    ctx = Context(
        engine=engine,
        renderer=renderer,
        media=CachingMediaLoader(),
        sampling=SamplingParams(max_tokens=300),
        seed=1,
        frame_budget=frame_budget,
    )
    episode = asyncio.run(run_episode(task, plugins.resolve("environments", environment, settings), ctx))
    assert episode.error is None or not check
    return episode, renderer.decode(episode.ledger.unexpanded_ids()) if not check else renderer.decode(
        episode.ledger.segments[0].tokens
    )


@pytest.mark.parametrize("environment", ["single_turn", "tool_calling", "third_party_format"])
def test_the_lines_of_the_frames_stand_between_them(renderer, task, environment):
    _, prompt = run(renderer, task, environment=environment)
    frame = "<|vision_start|><|image_pad|><|vision_end|>"
    # The frames are at 4 and 12 seconds: between lines. A line's own times are open at both ends.
    assert SUBTITLES_INTRO not in prompt
    _, prompt = run(renderer, task, environment=environment, frame_budget=3)  # at about 2.7, 8 and 13.3 seconds
    times = [f"<{time:.1f} seconds>" for time in (2.5, 8.0, 13.25)]  # of the frames that are there
    first, middle, last = (f"{time}{frame}" for time in times)
    assert (
        f"{SUBTITLES_INTRO}<0.0-4.0 seconds> line 0\n{first}{middle}{last}<12.0-16.0 seconds> line 12\nWhat?" in prompt
    )


def test_of_a_task_without_subtitles_nothing_changes(renderer, task):
    bare = run(renderer, replace(task, extras={}), frame_budget=3)[0]
    for extras in ({"subtitles": ""}, {"subtitles": None}):
        assert run(renderer, replace(task, extras=extras), frame_budget=3)[0].ledger == bare.ledger
    assert run(renderer, task, frame_budget=3, max_subtitle_tokens=0)[0].ledger == bare.ledger


def test_lines_are_bounded_over_the_whole_video(renderer, task):
    whole, prompt = run(renderer, task, frame_budget=8)
    assert [f"line {at}\n" in prompt for at in (0, 4, 8, 12)] == [True] * 4
    one = len(renderer.encode("<12.0-16.0 seconds> line 12\n"))
    episode, prompt = run(renderer, task, frame_budget=8, max_subtitle_tokens=2 * one)
    assert [f"line {at}\n" in prompt for at in (0, 4, 8, 12)] == [True, False, True, False]
    assert len(episode.ledger) < len(whole.ledger)


@pytest.mark.parametrize("video_in_prompt", [False, True])
def test_python_has_them_too(renderer, task, video_in_prompt):
    _, prompt = run(
        renderer, task, "<answer>red</answer>", environment="python", frame_budget=3, video_in_prompt=video_in_prompt
    )
    shown = [f"line {at}\n" in prompt for at in (0, 4, 8, 12)]
    # Without frames to choose by, every cue.
    assert shown == ([True] * 4 if not video_in_prompt else [True, False, False, True])


def test_a_sub_agent_reads_those_of_its_window(renderer, task):
    call = '</think><tool_call>{"name": "crop_video", "arguments": {"start_time": 5, "end_time": 7}}</tool_call>'

    def say(ledger: Ledger) -> str:
        text = renderer.decode(ledger.segments[0].tokens)
        if "What?" not in text:
            return text.partition("> line")[2].partition("\n")[0]
        return ANSWER if any(segment.is_sampled for segment in ledger.segments) else call

    engine = Scripted(renderer, replies=say)
    ctx = Context(
        engine=engine,
        renderer=renderer,
        media=CachingMediaLoader(),
        sampling=SamplingParams(max_tokens=300),
        seed=1,
        frame_budget=2,
    )
    episode = asyncio.run(run_episode(task, plugins.load("environments", "tool_calling"), ctx))
    assert episode.results[0].text == "4"
    child = renderer.decode(episode.children[0].ledger.segments[0].tokens)
    assert child.count("> line ") == 1


def test_an_offset_is_taken_off(renderer, task):
    extras = {"subtitles": "../subtitle/a.json", "subtitles_offset": 98}
    _, prompt = run(renderer, replace(task, extras=extras), frame_budget=3)
    assert "<2.0-6.0 seconds> later\n<8.0 seconds>" in prompt


def test_subtitles_precede_the_first_of_several_videos(renderer, task):
    still = Media(path=task.media[0].path.replace("a.mp4", "b.png"), kind=MediaKind.IMAGE)
    Image.new("RGB", (32, 32)).save(still.path)
    several = replace(task, media=(still, *task.media, *(replace(one) for one in task.media)))
    _, prompt = run(renderer, several, frame_budget=6)  # three of each video
    assert prompt.count(SUBTITLES_INTRO) == 1
    assert prompt.index(SUBTITLES_INTRO) < prompt.index("<2.5 seconds>")


@pytest.mark.parametrize(
    ("extras", "value"),
    [
        ({"subtitles": "../subtitle/none.srt"}, "none.srt"),
        ({"subtitles": "a.mp4"}, "a.mp4"),
        ({"subtitles": "../subtitle/a.srt", "subtitles_offset": "1"}, "'1'"),
    ],
)
def test_subtitles_that_cannot_be_read_are_named(renderer, task, extras, value):
    episode, _ = run(renderer, replace(task, extras=extras), check=False)
    assert value in episode.error
