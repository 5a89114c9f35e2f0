"""One rollout as a story: a real clip, a tiny tokenizer, and an engine whose replies we wrote.

A task -> an overview of K frames -> three calls, one of them malformed -> two sub-agents answer, the third is an error
result -> only the results are rendered -> an answer -> rewards -> a group -> samples, whose sampled tokens are the
engine's own, in order.
"""

import asyncio

import numpy as np
import pytest

from saccade.agents.parallel import parallel
from saccade.config import Term
from saccade.data.world.film import write_clip
from saccade.engines.scripted import scripted
from saccade.ledger import Origin
from saccade.media.cache import Library
from saccade.protocols import Context
from saccade.rewards._compose import compose
from saccade.rollouts.collect import collect
from saccade.training.credit import samples_of
from saccade.types import End, Kind, Media, Sampling, Task

FRAMES = 8
REPLIES = (
    "Something is at second 10. I look at three windows.</think>"
    '<tool_call>{"name": "crop_video", "arguments": {"start_time": 8, "end_time": 12, "question": "?"}}</tool_call>'
    '<tool_call>{"name": "crop_video", "arguments": {"start_time": 3</tool_call>'
    '<tool_call>{"name": "crop_video", "arguments": {"start_time": 14, "end_time": 99}}</tool_call>',
    "red at 10",
    "nothing",
    "The first window shows it.</think><answer>red</answer>",
)


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Task:
    """16 seconds at 4 frames per second, grey, and red from second 10 to 12."""
    film = np.full((64, 64, 64, 3), 128, dtype=np.uint8)
    film[40:48] = (255, 0, 0)
    path = tmp_path_factory.mktemp("film") / "clip.mp4"
    write_clip(path, film, 4.0)
    return Task(id="story", question="What colour flashes?", media=(Media(path=str(path)),), kind=Kind.OPEN, gold="red")


@pytest.fixture(scope="module")
def told(task, renderer):
    """The group, the engine, and the library that decoded the frames."""
    engine, media = scripted(renderer, replies=REPLIES), Library()
    sampling = Sampling(max_tokens=400)
    ctx = Context(engine=engine, renderer=renderer, media=media, sampling=sampling, seed=1)
    score = compose({"accuracy": Term(), "format": Term(weight=0.5), "tools": Term(weight=0.5)})
    (group,) = asyncio.run(collect([task], parallel, ctx, size=1, score=score, frames=lambda task: FRAMES))
    return group, engine, media


def test_the_overview_shows_k_frames_with_their_true_times(told, renderer):
    group, _, media = told
    prompt = group.members[0].episode.ledger.segments[0]
    assert len(prompt.slots) == FRAMES
    shown = renderer.decode(prompt.tokens)
    for slot in prompt.slots:
        assert f"<{slot.picture.time:.1f} seconds>" in shown
    reds = [slot.picture.time for slot in prompt.slots if media.pixels(slot.picture)[..., 0].mean() > 200]
    assert reds == [11.0]


def test_two_calls_are_answered_by_children_and_one_is_an_error(told, renderer):
    episode = told[0].members[0].episode
    first, malformed, third = episode.turns[0].results
    assert (first.text, first.ok, first.child) == ("red at 10", True, 0)
    assert (malformed.ok, malformed.child) == (False, None)
    assert (third.text, third.ok, third.child) == ("nothing", True, 1)
    crop, clamped = episode.children
    assert [picture.time for picture in crop.ledger.pictures()] == [8.5, 9.5, 10.5, 11.5]
    assert [picture.time for picture in clamped.ledger.pictures()] == [14.5, 15.5]
    (results,) = [segment for segment in episode.ledger.segments if segment.origin is Origin.TOOL]
    said = renderer.decode(results.tokens)
    assert said.count("<tool_response>") == said.count("</tool_response>") == 3
    assert said.index("red at 10") < said.index("Error: the call can't be read") < said.index("nothing")


def test_it_ends_with_an_answer_that_is_rewarded(told):
    member = told[0].members[0]
    assert (member.episode.end, member.episode.answer) == (End.ANSWERED, "red")
    assert member.score.parts["accuracy"] == 1.0
    assert member.score.value > 1.5


def test_every_sampled_token_is_the_engines_own_in_order(told):
    group, engine, _ = told
    samples = samples_of([group], [np.array([1.0])], "shared")
    assert len(samples) == 3
    main, *children = [sample.ledger for sample in samples]
    served = [completion for _, completion in engine.served]
    assert main.sampled_tokens() == served[0].tokens + served[3].tokens
    assert [child.sampled_tokens() for child in children] == [served[1].tokens, served[2].tokens]
    for sample in samples:
        paid = [value != 0.0 for value in sample.advantages]
        assert tuple(paid) == sample.ledger.mask()
    logprobs = [segment.logprobs for segment in main.segments if segment.sampled]
    assert logprobs == [served[0].logprobs, served[3].logprobs]


def test_each_prompt_extends_the_ledger_of_the_turn_before(told):
    group, engine, _ = told
    first, second = engine.served[0], engine.served[3]
    after = (*first[0].expanded(), *first[1].tokens)
    assert second[0].expanded()[: len(after)] == after
    assert second[0].segments[: len(first[0].segments)] == first[0].segments
    final = group.members[0].episode.ledger.expanded()
    assert final == (*second[0].expanded(), *second[1].tokens)
