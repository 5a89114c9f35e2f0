"""Demonstrations that use Python are replayed with the real sandbox: its output matches what the replies expect."""

import asyncio

import numpy as np
import pytest

from saccade import plugins, sandbox
from saccade.config.load import load_recipe
from saccade.data.dataset import load_demonstrations
from saccade.data.synthetic import generate_dataset, validate_dataset
from saccade.data.synthetic.demonstrations import find_event_onsets
from saccade.data.synthetic.events import PALETTE
from saccade.data.synthetic.image.questions import parse_objects
from saccade.data.synthetic.questions import parse_events
from saccade.engines.scripted import Scripted
from saccade.media.cache import CachingMediaLoader
from saccade.protocols import Context
from saccade.rewards.compose import compose_rewards
from saccade.rollouts.runner import run_episode
from saccade.types import EpisodeStatus, SamplingParams

SIZES = "synthetic={train: 3, validation: 1, test: 1}"


@pytest.fixture(scope="module", autouse=True)
def close_servers():
    yield
    sandbox.close_shared_servers()


def replay(name, root, renderer, *changes):
    """Replay a recipe's demonstrations in its environment with real media; return episodes, scores, media loader."""
    recipe = load_recipe(name, [SIZES, *changes])
    generate_dataset(root, recipe.synthetic, seed=3)
    assert validate_dataset(root).problems == ()
    settings = {**recipe.environment.settings, "force_think": False}  # the scripted replies contain the tag
    environment = plugins.resolve("environments", recipe.environment.name, settings)
    score, replays = compose_rewards(recipe.rewards), []

    async def body():
        loader = CachingMediaLoader()
        for demo in load_demonstrations(root / "train/demonstrations.jsonl"):
            engine = Scripted(renderer, replies=demo.replies)
            ctx = Context(
                engine=engine,
                renderer=renderer,
                media=loader,
                sampling=SamplingParams(max_tokens=900),
                seed=1,
                frame_budget=None,
            )
            episode = await run_episode(demo.task, environment, ctx)
            replays.append((episode, (await score([episode]))[0], loader))

    asyncio.run(body())
    return replays


def find_color(pixels):
    """Return the event color with the most pixels."""
    counts = {name: (np.abs(pixels.astype(int) - rgb).max(axis=-1) < 70).sum() for name, rgb in PALETTE.items()}
    return max(counts, key=counts.get)


@pytest.mark.slow
def test_videos_are_scanned_coarsely_then_inspected(tmp_path, renderer):
    replays = replay("tiny/pyvision_video", tmp_path / "w", renderer, "environment.settings.max_context_tokens=4096")
    kinds = [episode.task.extras.get("question", "drill") for episode, *_ in replays]
    assert {*kinds} >= {"at", "count", "when", "drill"}
    assert kinds.count("drill") == len(kinds) / 2
    for episode, score, loader in replays:
        assert episode.status is EpisodeStatus.ANSWERED
        assert score.parts["accuracy"] == score.parts["format_compliance"] == 1.0
        assert all(result.ok for result in episode.results)
        shown = [loader.load_pixels(image) for result in episode.results for image in result.images]
        assert episode.usage.visual_tokens == len(shown)  # none in the prompt, one per shown frame
        expected = find_expected_colors(episode)
        assert len(shown) == len(expected)
        assert all(find_color(pixels) == name for pixels, name in zip(shown, expected, strict=True) if name)


@pytest.mark.slow
def test_dense_overview_needs_no_calls(tmp_path, renderer):
    replays = replay("tiny/dense_overview", tmp_path / "w", renderer, "environment.settings.max_context_tokens=4096")
    kinds = [episode.task.extras.get("question", "drill") for episode, *_ in replays]
    assert kinds.count("drill") == len(kinds) / 2
    for episode, score, loader in replays:
        assert episode.status is EpisodeStatus.ANSWERED
        assert score.parts["accuracy"] == score.parts["format_compliance"] == 1.0
        assert not episode.results
        assert episode.usage.visual_tokens == len(episode.ledger.images()) == 64
        if not episode.task.extras:
            seconds = [int(word) for word in episode.task.question.removesuffix("?").split()[3:]]
            frames = [loader.load_pixels(episode.ledger.images()[second]) for second in seconds]
            expected = [None if word == "none" else word for word in episode.task.ground_truth.split()]
            assert len(frames) == len(expected)
            assert all(find_color(pixels) == name for pixels, name in zip(frames, expected, strict=True) if name)


def find_expected_colors(episode):
    """Return the color of each inspected frame (or None) from the labels."""
    task = episode.task
    if not task.extras:
        return [None if word == "none" else word for word in task.ground_truth.split()]
    events, starts = parse_events(task), [task.extras["second"]]
    if task.extras["second"] is None:
        starts = find_event_onsets(events, 64)
        assert episode.results[0].text == " ".join(f"{t:g}" for t in starts)
    return [next((event.color for event in events if event.is_visible_at(t)), None) for t in starts]


@pytest.mark.slow
def test_images_are_cropped_by_code(tmp_path, renderer):
    replays = replay("tiny/pyvision_image", tmp_path / "w", renderer, "environment.settings.max_context_tokens=4096")
    assert any(episode.results for episode, *_ in replays)
    for episode, score, loader in replays:
        assert episode.status is EpisodeStatus.ANSWERED
        assert score.parts["accuracy"] == score.parts["format_compliance"] == 1.0
        assert all(result.ok for result in episode.results)
        extras = episode.task.extras  # empty for a grid image, which is read without calls
        cards = [parse_objects(episode.task)[index] for index in extras["looks"]] if extras else []
        shown = [loader.load_pixels(image) for result in episode.results for image in result.images]
        assert [find_color(pixels) for pixels in shown] == [card.color for card in cards]


@pytest.mark.slow
def test_sharp_image_needs_no_calls(tmp_path, renderer):
    overrides = [
        "synthetic.demonstrations=direct",
        "environment.settings.image_pixels=[25600, 25600]",
        "environment.settings.tools=[]",
    ]
    replays = replay(
        "tiny/pyvision_image", tmp_path / "w", renderer, "environment.settings.max_context_tokens=4096", *overrides
    )
    assert {bool(episode.task.extras) for episode, *_ in replays} == {True, False}  # tasks, grid images
    for episode, score, _ in replays:
        assert episode.status is EpisodeStatus.ANSWERED
        assert score.parts["accuracy"] == score.parts["format_compliance"] == 1.0
        assert (episode.results, episode.usage.visual_tokens) == ((), 100)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny/pyvision_video", "tiny/pyvision_image"])
def test_direct_answers_earn_no_tool_bonus(tmp_path, renderer, name):
    replays = replay(
        name, tmp_path / "w", renderer, "environment.settings.max_context_tokens=4096", "environment.settings.tools=[]"
    )
    for episode, score, _ in replays:
        assert score.parts["tool_use"] == 0.0
        assert not any(result.was_executed for result in episode.results)
