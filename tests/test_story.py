"""One rollout as a story: a real clip, a tiny tokenizer, and an engine whose replies are scripted.

A task -> an overview of K frames -> three calls, one of them malformed -> two sub-agents answer, the third is an error
result -> the results are rendered -> an answer -> rewards -> a group -> samples, whose sampled tokens are the
engine's own, in order.
"""

import asyncio

import numpy as np
import pytest

from saccade.algorithms.group_advantages import GroupAdvantages
from saccade.config.schema import RewardTerm
from saccade.data.synthetic.video_writer import write_video
from saccade.engines.scripted import Scripted
from saccade.environments.tool_calling import ToolCalling
from saccade.ledger import Origin
from saccade.media.cache import CachingMediaLoader
from saccade.protocols import Context
from saccade.rewards.compose import compose_rewards
from saccade.rollouts.collect import collect
from saccade.training.training_samples import build_samples
from saccade.types import AnswerType, EpisodeStatus, Media, SamplingParams, Task

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
    frames = np.full((64, 64, 64, 3), 128, dtype=np.uint8)
    frames[40:48] = (255, 0, 0)
    path = tmp_path_factory.mktemp("videos") / "clip.mp4"
    write_video(path, frames, 4.0)
    return Task(
        id="story",
        question="What colour flashes?",
        media=(Media(path=str(path)),),
        answer_type=AnswerType.OPEN,
        ground_truth="red",
    )


@pytest.fixture(scope="module")
def rollout(task, renderer):
    """The group, the engine, and the library that decoded the frames."""
    engine, media = Scripted(renderer, replies=REPLIES), CachingMediaLoader()
    sampling = SamplingParams(max_tokens=400)
    ctx = Context(engine=engine, renderer=renderer, media=media, sampling=sampling, seed=1)
    score = compose_rewards(
        {
            "accuracy": RewardTerm(is_accuracy=True),
            "format_reward": RewardTerm(weight=0.5),
            "tool_use": RewardTerm(weight=0.5),
        }
    )
    (group,) = asyncio.run(
        collect(
            [task],
            lambda task: ToolCalling,
            ctx,
            group_size=1,
            score_fn=score,
            frame_budgets=[FRAMES],
        )
    )
    return group, engine, media


def test_the_overview_shows_k_frames_with_their_true_times(rollout, renderer):
    group, _, media = rollout
    prompt = group.scored_episodes[0].episode.ledger.segments[0]
    assert len(prompt.slots) == FRAMES
    shown = renderer.decode(prompt.tokens)
    for slot in prompt.slots:
        assert f"<{slot.image.time:.1f} seconds>" in shown
    red_times = [slot.image.time for slot in prompt.slots if media.load_pixels(slot.image)[..., 0].mean() > 200]
    assert red_times == [11.0]


def test_two_calls_are_answered_by_children_and_one_is_an_error(rollout, renderer):
    episode = rollout[0].scored_episodes[0].episode
    first, malformed, third = episode.turns[0].results
    assert (first.text, first.ok, first.child_index) == ("red at 10", True, 0)
    assert (malformed.ok, malformed.child_index) == (False, None)
    assert (third.text, third.ok, third.child_index) == ("nothing", True, 1)
    crop, clamped = episode.children
    assert [picture.time for picture in crop.ledger.images()] == [8.5, 9.5, 10.5, 11.5]
    assert [picture.time for picture in clamped.ledger.images()] == [14.5, 15.5]
    (results,) = [segment for segment in episode.ledger.segments if segment.origin is Origin.OBSERVATION]
    text = renderer.decode(results.tokens)
    assert text.count("<tool_response>") == text.count("</tool_response>") == 3
    assert text.index("red at 10") < text.index("Error: ") < text.index("nothing")


def test_it_ends_with_an_answer_that_is_rewarded(rollout):
    member = rollout[0].scored_episodes[0]
    assert (member.episode.status, member.episode.answer) == (EpisodeStatus.ANSWERED, "red")
    assert member.score.parts["accuracy"] == 1.0
    assert member.score.value > 1.5


def test_every_sampled_token_is_the_engines_own_in_order(rollout):
    group, engine, _ = rollout
    samples = build_samples([group], [GroupAdvantages(every_token_G=np.array([1.0]), by_span={})], "shared")
    assert len(samples) == 3
    main, *children = [sample.ledger for sample in samples]
    completions = [completion for _, completion in engine.history]
    assert main.sampled_tokens() == completions[0].tokens + completions[3].tokens
    assert [child.sampled_tokens() for child in children] == [completions[1].tokens, completions[2].tokens]
    for sample in samples:
        trained = [value != 0.0 for value in sample.advantages]
        assert tuple(trained) == sample.ledger.loss_mask()
    logprobs = [segment.logprobs for segment in main.segments if segment.is_sampled]
    assert logprobs == [completions[0].logprobs, completions[3].logprobs]


def test_each_prompt_extends_the_ledger_of_the_turn_before(rollout):
    group, engine, _ = rollout
    first, second = engine.history[0], engine.history[3]
    after = (*first[0].input_ids(), *first[1].tokens)
    assert second[0].input_ids()[: len(after)] == after
    assert second[0].segments[: len(first[0].segments)] == first[0].segments
    final = group.scored_episodes[0].episode.ledger.input_ids()
    assert final == (*second[0].input_ids(), *second[1].tokens)
