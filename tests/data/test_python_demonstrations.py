"""Traces by code, run for real: what the code prints and shows is what the trace goes on with."""

import asyncio

import numpy as np
import pytest

from saccade import plugins
from saccade.config import load_recipe
from saccade.data.rows import read_demos
from saccade.data.world import check_world, make_world
from saccade.data.world.events import PALETTE
from saccade.data.world.oracle import begins
from saccade.data.world.questions import events_of
from saccade.data.world.still.questions import cards_of
from saccade.engines.scripted import scripted
from saccade.media.cache import Library
from saccade.protocols import Context
from saccade.rewards._compose import compose
from saccade.rollouts.run import run_episode
from saccade.tools._sandbox import server
from saccade.types import End, Sampling
from saccade.waiting import settled

FEW = "world={train: 3, validation: 1, test: 1}"


@pytest.fixture(scope="module", autouse=True)
def closed_at_the_end():
    yield
    server.close_shared()


def played(name, root, renderer, *changes):
    """The recipe's traces as episodes, each run by its agent over real media; and the scores of its rewards."""
    recipe = load_recipe(name, [FEW, *changes])
    make_world(root, recipe.world, seed=3)
    assert check_world(root).problems == ()
    settings = {**recipe.agent.settings, "think_prefix": False}  # the scripted replies hold their own
    agent = plugins.bind("agents", recipe.agent.name, settings)
    score, found = compose(recipe.rewards), []

    async def body():
        library = Library()
        for demo in read_demos(root / "train/traces.jsonl"):
            engine = scripted(renderer, replies=demo.replies)
            ctx = Context(
                engine=engine, renderer=renderer, media=library, sampling=Sampling(max_tokens=900), seed=1, frames=None
            )
            episode = await run_episode(demo.task, agent, ctx)
            found.append((episode, await settled(score(episode, demo.task)), library))

    asyncio.run(body())
    return found


def colour_in(pixels):
    """The name of the needle's colour whose pixels are most common."""
    near = {name: (np.abs(pixels.astype(int) - rgb).max(axis=-1) < 70).sum() for name, rgb in PALETTE.items()}
    return max(near, key=near.get)


@pytest.mark.slow
def test_videos_are_searched_coarsely_then_finely(tmp_path, renderer):
    found = played("tiny/pyvision_video", tmp_path / "w", renderer, "agent.settings.context_tokens=4096")
    asked = [episode.task.extras.get("question", "drill") for episode, *_ in found]
    assert {*asked} >= {"at", "count", "when", "drill"}
    assert asked.count("drill") == len(asked) / 2
    for episode, score, library in found:
        assert episode.end is End.ANSWERED
        assert score.parts["accuracy"] == score.parts["compliance"] == 1.0
        assert all(result.ok for result in episode.results)
        shown = [library.pixels(picture) for result in episode.results for picture in result.pictures]
        assert episode.usage.visual_tokens == len(shown)  # none in the prompt, one per frame that was shown
        wanted = colours_of(episode)
        assert len(shown) == len(wanted)
        assert all(colour_in(pixels) == name for pixels, name in zip(shown, wanted, strict=True) if name)


@pytest.mark.slow
def test_a_dense_overview_is_only_read(tmp_path, renderer):
    found = played("tiny/dense_overview", tmp_path / "w", renderer, "agent.settings.context_tokens=4096")
    asked = [episode.task.extras.get("question", "drill") for episode, *_ in found]
    assert asked.count("drill") == len(asked) / 2
    for episode, score, library in found:
        assert episode.end is End.ANSWERED
        assert score.parts["accuracy"] == score.parts["compliance"] == 1.0
        assert not episode.results
        assert episode.usage.visual_tokens == len(episode.ledger.pictures()) == 64
        if not episode.task.extras:
            seconds = [int(word) for word in episode.task.question.removesuffix("?").split()[3:]]
            frames = [library.pixels(episode.ledger.pictures()[second]) for second in seconds]
            wanted = [None if word == "none" else word for word in episode.task.gold.split()]
            assert len(frames) == len(wanted)
            assert all(colour_in(pixels) == name for pixels, name in zip(frames, wanted, strict=True) if name)


def colours_of(episode):
    """What each frame shows that the trace looks at: a colour, or None; by the labels alone."""
    task = episode.task
    if not task.extras:
        return [None if word == "none" else word for word in task.gold.split()]
    events, starts = events_of(task), [task.extras["second"]]
    if task.extras["second"] is None:
        starts = begins(events, 64)
        assert episode.results[0].text == " ".join(f"{t:g}" for t in starts)
    return [next((event.colour for event in events if event.holds(t)), None) for t in starts]


@pytest.mark.slow
def test_pictures_are_cut_by_code(tmp_path, renderer):
    found = played("tiny/pyvision_image", tmp_path / "w", renderer, "agent.settings.context_tokens=4096")
    assert any(episode.results for episode, *_ in found)
    for episode, score, library in found:
        assert episode.end is End.ANSWERED
        assert score.parts["accuracy"] == score.parts["compliance"] == 1.0
        assert all(result.ok for result in episode.results)
        extras = episode.task.extras  # a chart, which is read without a look at parts of it, has none
        cards = [cards_of(episode.task)[place] for place in extras["looks"]] if extras else []
        shown = [library.pixels(picture) for result in episode.results for picture in result.pictures]
        assert [colour_in(pixels) for pixels in shown] == [card.colour for card in cards]


@pytest.mark.slow
def test_a_sharp_picture_may_be_read_at_once(tmp_path, renderer):
    sharp = ["world.traces=answers", "agent.settings.image_pixels=[25600, 25600]", "agent.settings.tools=[]"]
    found = played("tiny/pyvision_image", tmp_path / "w", renderer, "agent.settings.context_tokens=4096", *sharp)
    assert {bool(episode.task.extras) for episode, *_ in found} == {True, False}  # tasks, charts
    for episode, score, _ in found:
        assert episode.end is End.ANSWERED
        assert score.parts["accuracy"] == score.parts["compliance"] == 1.0
        assert (episode.results, episode.usage.visual_tokens) == ((), 100)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny/pyvision_video", "tiny/pyvision_image"])
def test_a_direct_attempt_earns_no_bonus(tmp_path, renderer, name):
    found = played(name, tmp_path / "w", renderer, "agent.settings.context_tokens=4096", "agent.settings.tools=[]")
    for episode, score, _ in found:
        assert score.parts["tools"] == 0.0
        assert not any(result.executed for result in episode.results)
