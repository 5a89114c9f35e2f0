"""Settings of the prompt: the rate of the overview, templates, a row's system turn, images in the interpreter alone."""

import asyncio
import json
from dataclasses import replace

import numpy as np
import pytest
from error_cases import raises
from PIL import Image

from saccade import plugins
from saccade.data.synthetic.video_writer import write_video
from saccade.engines.scripted import Scripted
from saccade.errors import ConfigError
from saccade.ledger import Origin
from saccade.media.cache import CachingMediaLoader
from saccade.protocols import Context
from saccade.rollouts.runner import run_episode
from saccade.types import AnswerType, EpisodeStatus, Media, MediaKind, SamplingParams, Task

ANSWER = "</think><answer>red</answer>"
PIXELS = {"image_pixels": [256, 1024]}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("media")
    Image.new("RGB", (300, 120), "red").save(folder / "wide.png")
    for name, seconds in (("short.mp4", 5), ("long.mp4", 40)):
        write_video(folder / name, np.full((seconds * 2, 32, 32, 3), 90, np.uint8), 2.0)
    return folder


def build_task(files, *names, **extras):
    kinds = {".mp4": MediaKind.VIDEO, ".png": MediaKind.IMAGE}
    media = tuple(Media(path=str(files / name), kind=kinds[name[-4:]]) for name in names)
    return Task(
        id="t", question="Which {width}?", media=media, answer_type=AnswerType.OPEN, ground_truth="red", extras=extras
    )


def run(renderer, task, *replies, environment="single_turn", frame_budget=None, max_tokens=200, **settings):
    engine = Scripted(renderer, replies=replies or (ANSWER,))
    ctx = Context(
        engine=engine,
        renderer=renderer,
        media=CachingMediaLoader(),
        sampling=SamplingParams(max_tokens=max_tokens),
        seed=1,
        frame_budget=frame_budget,
    )
    return asyncio.run(run_episode(task, plugins.resolve("environments", environment, settings), ctx))


def decode(renderer, episode, origin=Origin.PROMPT):
    return "".join(renderer.decode(segment.tokens) for segment in episode.ledger.segments if segment.origin is origin)


def list_times(episode):
    return [slot.image.time for slot in episode.ledger.segments[0].slots]


@pytest.mark.parametrize(
    ("name", "frame_budget", "settings", "times"),
    [
        ("short.mp4", None, {"overview_fps": 1.0, "num_frames": 64}, [0.5, 1.5, 2.5, 3.5, 4.5]),
        ("short.mp4", None, {"num_frames": 2}, [1.0, 3.5]),
        ("short.mp4", 2, {"overview_fps": 1.0}, [1.0, 3.5]),
        ("long.mp4", None, {"overview_fps": 1.0, "num_frames": 4}, [5.0, 15.0, 25.0, 35.0]),
        ("long.mp4", None, {"overview_fps": 0.1, "num_frames": 64}, [5.0, 15.0, 25.0, 35.0]),
        ("long.mp4", 8, {"overview_fps": 0.1}, [5.0, 15.0, 25.0, 35.0]),
    ],
)
def test_the_overview_has_a_rate_up_to_a_number_of_frames(renderer, files, name, frame_budget, settings, times):
    episode = run(renderer, build_task(files, name), frame_budget=frame_budget, **settings)
    assert list_times(episode) == pytest.approx(times, abs=0.26)  # a frame's own time; the clips have two per second
    assert episode.frame_budget == len(times)


def test_templates_hold_facts_about_the_first_image_or_video(renderer, files):
    template = "{width}x{height}, {num_frames} frames, {duration} s at {fps}, {file}: {question}"
    shown = decode(renderer, run(renderer, build_task(files, "wide.png"), question_template=template))
    assert "300x120,  frames,  s at , wide.png: Which {width}?" in shown
    shown = decode(renderer, run(renderer, build_task(files, "short.mp4"), question_template=template))
    assert "32x32, 10 frames, 5.0 s at 2.00, short.mp4: Which {width}?" in shown
    assert "Which {width}?" in decode(renderer, run(renderer, build_task(files), question_template=template))


def test_a_template_without_the_question_is_refused():
    with raises(ConfigError, key="environment.settings.question_template", value="{width}"):
        plugins.resolve("environments", "single_turn", {"question_template": "{width}"})


@pytest.mark.parametrize("environment", ["single_turn", "tool_calling", "python"])
def test_a_rows_system_turn_replaces_the_environments(renderer, files, environment):
    settings = {"environment": environment, "question_template": "In {file}: {question}", "system_prompt": "Ours."}
    settings |= PIXELS
    task = build_task(files, "wide.png", system="Theirs. <tools>\n{}\n</tools>")
    shown = decode(renderer, run(renderer, task, **settings))
    assert ("Ours." in shown, "Theirs." in shown, "In wide.png" in shown) == (True, False, True)
    shown = decode(renderer, run(renderer, task, **settings, system_prompt_source="row"))
    assert ("Ours." in shown, "Theirs." in shown, "In wide.png" in shown) == (False, True, False)
    assert shown.count("<tools>") == 1
    no_system = replace(task, extras={"system": ""})
    shown = decode(renderer, run(renderer, no_system, **settings, system_prompt_source="row"))
    assert ("Ours." in shown, "In wide.png" in shown) == (False, False)
    shown = decode(renderer, run(renderer, replace(task, extras={}), **settings, system_prompt_source="row"))
    assert ("Ours." in shown, "In wide.png" in shown) == (True, True)


def test_the_answer_that_is_requested_has_its_own_limit(renderer, files):
    call = json.dumps({"name": "crop_video", "arguments": {"start_time": 0, "end_time": 2}})
    replies = (f"Look.</think><tool_call>{call}</tool_call>", "red", "It is red, I think, " * 9 + ANSWER)
    settings = {"environment": "tool_calling", "max_tool_turns": 1, "final_answer_prompt": "Answer now."}
    task = build_task(files, "short.mp4")
    assert run(renderer, task, *replies, **settings).status is EpisodeStatus.ANSWERED
    episode = run(renderer, task, *replies, **settings, max_final_answer_tokens=10)
    assert episode.status is EpisodeStatus.LENGTH
    assert len(episode.ledger.segments[-1].tokens) == 10
    choice = replace(task, answer_type=AnswerType.CHOICE, options=("red", "blue"), ground_truth="A")
    for asked, num_tokens in ((choice, 4), (task, 10)):  # a letter has its own limit
        episode = run(renderer, asked, *replies, **settings, max_final_answer_tokens=10, max_final_choice_tokens=4)
        assert len(episode.ledger.segments[-1].tokens) == num_tokens
    episode = run(renderer, choice, *replies, **settings, max_final_answer_tokens=10)
    assert len(episode.ledger.segments[-1].tokens) == 10
    # Without a request the limit doesn't apply.
    settings["final_answer_prompt"] = ""
    assert run(renderer, task, *replies, **settings, max_final_answer_tokens=10).status is EpisodeStatus.ANSWERED


def test_a_sub_agent_reads_its_window(renderer, files):
    call = json.dumps({"name": "crop_video", "arguments": {"start_time": 1, "end_time": 90, "question": "Who {end}?"}})
    template = "From {start} to {end}, {duration} s. {question}"
    settings = {"tools": {"crop_video": {"prompt_template": template}}, "max_tool_turns": 1}
    replies = (f"Look.</think><tool_call>{call}</tool_call>", "red", ANSWER)
    episode = run(renderer, build_task(files, "long.mp4"), *replies, environment="tool_calling", **settings)
    assert "From 00:01 to 00:40, 39.0 s. Who {end}?" in decode(renderer, episode.children[0])


@pytest.mark.slow
def test_images_may_be_in_the_interpreter_alone(renderer, files):
    """Code sees the image under its name at full size; a figure is the next image."""
    code = "print(image_clue_0.size)\nimage_clue_0.crop((0, 0, 64, 64)).show()"
    replies = (f"<code>\n```python\n{code}\n```\n</code>", "<answer>\\boxed{red}</answer>")
    settings = {"environment": "python", "image_in_prompt": False, "tools": {"python": {"timeout": 60.0, **PIXELS}}}
    episode = run(renderer, build_task(files, "wide.png"), *replies, **settings, **PIXELS)
    assert "image_clue_0: 300x120 pixels" in decode(renderer, episode)
    assert episode.ledger.segments[0].slots == ()
    (result,) = episode.results
    assert (result.text, len(result.images), result.error) == ("(300, 120)", 1, None)
    assert "<image_clue_1>" in decode(renderer, episode, Origin.OBSERVATION)
