"""What a prompt shows: videos and still pictures, one or several, for models of both families."""

import asyncio
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from PIL import Image

from saccade.config.load import load_recipe
from saccade.data.synthetic.video_writer import write_video
from saccade.engines.scripted import Scripted
from saccade.environments.single_turn import SingleTurn
from saccade.environments.tool_calling import ToolCalling
from saccade.ledger import ImageRef
from saccade.media.cache import CachingMediaLoader
from saccade.models.tiny import make_tiny_model
from saccade.protocols import Context
from saccade.rollouts.components import TrainingComponents
from saccade.rollouts.runner import run_episode
from saccade.testing import FakeMediaLoader
from saccade.types import AnswerType, EpisodeStatus, Media, MediaKind, SamplingParams, Task

CALL = '</think><tool_call>{"name":"crop_video","arguments":{"start_time":2,"end_time":6}}</tool_call>'
ANSWER = "</think><answer>red</answer>"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("media")
    Image.new("RGB", (300, 120), "red").save(folder / "wide.jpg")
    Image.new("RGB", (40, 90), "blue").save(folder / "tall.png")
    Image.new("RGBA", (64, 64), (0, 255, 0, 128)).save(folder / "clear.png")
    for name, seconds in (("a.mp4", 8), ("b.mp4", 8), ("short.mp4", 1)):
        write_video(folder / name, np.full((seconds * 4, 32, 32, 3), 90, np.uint8), 4.0)
    return folder


def task(folder, *names):
    media = tuple(Media(path=str(folder / name), kind=kind_of(name)) for name in names)
    return Task(id="t", question="What is it?", media=media, answer_type=AnswerType.OPEN, ground_truth="red")


def kind_of(name):
    return MediaKind.VIDEO if name.endswith(".mp4") else MediaKind.IMAGE


def run(renderer, of, *replies, environment=SingleTurn, media=None, frame_budget=None, **settings):
    engine = Scripted(renderer, replies=replies or (ANSWER,))
    given = {
        "engine": engine,
        "renderer": renderer,
        "media": media or CachingMediaLoader(),
        "sampling": SamplingParams(),
    }
    ctx = Context(**given, seed=5, frame_budget=frame_budget)
    return asyncio.run(run_episode(of, partial(environment, **settings), ctx))


def list_shown_images(episode):
    """The prompt's pictures: the file's name, and its time or its size."""
    pictures = episode.ledger.segments[0].slots
    return [(slot.image.path.rpartition("/")[2], slot.image.time) for slot in pictures]


@pytest.fixture(scope="module", params=["qwen3_vl", "qwen2_5_vl"])
def stage(request, tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("tiny") / request.param)
    make_tiny_model(folder, family=request.param)
    settings = [
        "model.num_threads=1",
        "environment.name=single_turn",
        "environment.settings=null",
        "sampling.max_tokens=4",
    ]
    return TrainingComponents.from_recipe(load_recipe("tiny/base", [*settings, f"model.path={folder}"]))


@pytest.mark.parametrize("force_think", [False, True])
def test_a_model_sees_images(stage, files, force_think, tmp_path):
    """Real files through a real model: two pictures in order, their pixels in the budget, and other pixels matter."""

    def look(folder):
        of, given = task(folder, "wide.jpg", "tall.png"), {"image_pixels": (3136, 20000), "force_think": force_think}
        return asyncio.run(run_episode(of, partial(SingleTurn, **given), stage.build_context(seed=1, temperature=0.0)))

    episode = look(files)
    assert (episode.error, episode.frame_budget) == (None, 0)
    assert list_shown_images(episode) == [("wide.jpg", None), ("tall.png", None)]
    factor = stage.vlm.renderer.factor
    for picture in episode.ledger.images():
        assert picture.width % factor == picture.height % factor == 0
        assert 3136 <= picture.width * picture.height <= 20000
    wide, tall = episode.ledger.images()
    assert wide.width > wide.height
    assert tall.height > tall.width
    slots = episode.ledger.segments[0].slots
    assert [slot.num_tokens for slot in slots] == [p.width * p.height // factor**2 for p in (wide, tall)]
    assert episode.usage.visual_tokens == sum(slot.num_tokens for slot in slots)
    Image.new("RGB", (300, 120), "black").save(tmp_path / "wide.jpg")
    Image.new("RGB", (40, 90), "blue").save(tmp_path / "tall.png")
    assert look(tmp_path).ledger.logprobs() != episode.ledger.logprobs()


def test_the_default_budget_of_a_picture(renderer, files):
    pictures = run(renderer, task(files, "tall.png")).ledger.images()
    assert 3136 <= pictures[0].width * pictures[0].height <= 2_000_000
    Image.new("RGB", (3000, 2000)).save(files / "large.png")
    (large,) = run(renderer, task(files, "large.png")).ledger.images()
    assert 1_900_000 < large.width * large.height <= 2_000_000


def test_images_have_no_times_and_keep_their_order(renderer, files):
    episode = run(renderer, task(files, "tall.png", "a.mp4", "clear.png"), frame_budget=2)
    assert list_shown_images(episode) == [("tall.png", None), ("a.mp4", 2.0), ("a.mp4", 6.0), ("clear.png", None)]
    assert episode.frame_budget == 2
    prompt = renderer.decode(episode.ledger.segments[0].tokens)
    picture = "<|vision_start|><|image_pad|><|vision_end|>"
    frames = f"<2.0 seconds>{picture}<6.0 seconds>{picture}"
    assert f"user\n{picture}{frames}{picture}What is it?" in prompt


@pytest.mark.parametrize(
    ("names", "frames", "counts"),
    [
        (("a.mp4", "b.mp4"), 8, (4, 4)),
        (("a.mp4", "b.mp4"), 5, (3, 2)),
        (("a.mp4", "b.mp4"), 1, (1, 1)),
        (("short.mp4", "b.mp4"), 16, (4, 8)),
    ],
)
def test_several_videos_share_the_budget(renderer, files, names, frames, counts):
    episode = run(renderer, task(files, *names), frame_budget=frames)
    found = [path for path, _ in list_shown_images(episode)]
    assert tuple(found.count(name) for name in names) == counts
    assert found == sorted(found, key=names.index)
    assert episode.frame_budget == sum(counts)


def test_a_task_without_media_is_prompted_with_text(renderer, files):
    episode = run(renderer, task(files))
    assert (list_shown_images(episode), episode.frame_budget, episode.status) == ([], 0, EpisodeStatus.ANSWERED)


def test_the_parallel_agent_has_no_video_to_crop_among_pictures(renderer, files):
    episode = run(renderer, task(files, "wide.jpg", "tall.png"), CALL, ANSWER, environment=ToolCalling)
    assert list_shown_images(episode) == [("wide.jpg", None), ("tall.png", None)]
    (result,) = episode.results
    assert (result.was_executed, episode.children, episode.status) == (False, (), EpisodeStatus.ANSWERED)
    assert result.error


def test_the_parallel_agent_crops_the_video_beside_a_picture(renderer, files):
    episode = run(
        renderer, task(files, "wide.jpg", "b.mp4"), CALL, "seen", ANSWER, environment=ToolCalling, frame_budget=2
    )
    assert episode.results[0].ok
    pictures = episode.children[0].ledger.images()
    assert {picture.path.rpartition("/")[2] for picture in pictures} == {"b.mp4"}
    assert [picture.time for picture in pictures] == [2.5, 3.5, 4.5, 5.5]


@pytest.mark.parametrize("kind", list(MediaKind))
def test_missing_media_and_media_of_the_other_kind_are_named(renderer, files, kind):
    (files / "notes.jpg").write_text("not a picture")
    other = "a.mp4" if kind is MediaKind.IMAGE else "wide.jpg"
    for name in ("none.jpg", "notes.jpg", other):
        of = replace(task(files), media=(Media(path=str(files / name), kind=kind),))
        episode = run(renderer, of)
        assert episode.status is EpisodeStatus.ABORTED
        assert name in episode.error


def test_painted_media_have_pictures_too(renderer):
    of = Task(
        id="t",
        question="?",
        media=(Media(path="a.png", kind=MediaKind.IMAGE),),
        answer_type=AnswerType.OPEN,
        ground_truth="red",
    )
    episode = run(renderer, of, media=FakeMediaLoader())
    assert [(p.path, p.time) for p in episode.ledger.images()] == [("a.png", None)]
    assert all(isinstance(p, ImageRef) for p in episode.ledger.images())
