"""The published settings in effect: what the packaged recipes' own values do, on numbers worked out by hand."""

import asyncio
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from saccade import plugins
from saccade.algorithms.group_advantages import resolve_estimator, shape_rewards
from saccade.algorithms.group_filter import select_groups
from saccade.algorithms.policy_loss import compute_policy_loss
from saccade.config.load import load_recipe
from saccade.data.synthetic.video_writer import write_video
from saccade.engines.scripted import Scripted
from saccade.ledger import Ledger, Origin
from saccade.media.cache import CachingMediaLoader
from saccade.protocols import Context
from saccade.rewards.format_reward import format_reward
from saccade.rollouts.components import apply_evaluation_settings
from saccade.rollouts.runner import run_episode
from saccade.training.optimizer import Optimizer
from saccade.types import (
    AnswerType,
    Block,
    BlockKind,
    Episode,
    EpisodeStatus,
    Group,
    Media,
    MediaKind,
    Reply,
    SamplingParams,
    Score,
    ScoredEpisode,
    Task,
    Turn,
)

ROOT = Path(__file__).parents[1]
CROP = '<tool_call>{"name": "crop_video", "arguments": %s}</tool_call>'


# ---- optimizers, advantages, losses, filters -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "stage", "lr"),
    [("paravt/sft", "sft", 2e-5), ("paravt/para_grpo", "rl", 2e-6), ("pyvision/image_rl", "rl", 1e-6)],
)
def test_the_optimizer_has_the_published_constants(name, stage, lr):
    settings = getattr(load_recipe(name), stage).optim
    optimizer = Optimizer(torch.nn.Linear(2, 2), settings, 1000)
    optimizer.start_step(settings.warmup_steps)
    [state] = optimizer.state_dict()["optimizers"]
    for group in state["param_groups"]:
        assert (group["betas"], group["weight_decay"]) == ((0.9, 0.999), 0.01)
        assert group["lr"] == pytest.approx(lr, rel=0.02)  # a cosine falls a little in the first steps


def test_paravt_divides_by_the_sample_std():
    """1, 0, 0, 0 minus 0.2 and times 10 is 8, -2, -2, -2: the mean is 0.5 and the sample std 5."""
    settings = load_recipe("paravt/para_grpo").rl.advantage
    estimate = resolve_estimator(settings.estimator, settings.settings)
    shaped = shape_rewards([1, 0, 0, 0], scale=settings.reward_scale, bias=settings.reward_bias)
    assert shaped.tolist() == [8.0, -2.0, -2.0, -2.0]
    assert estimate(shaped).tolist() == pytest.approx([7.5 / (5 + 1e-5), *[-2.5 / (5 + 1e-5)] * 3])


def test_pyvision_subtracts_the_mean_alone():
    settings = load_recipe("pyvision/image_rl").rl.advantage
    estimate = resolve_estimator(settings.estimator, settings.settings)
    assert estimate([1.3, 1.0, 0.0, 0.0]).tolist() == pytest.approx([0.725, 0.425, -0.575, -0.575])


def compute_loss_of(name, ratio, *, is_stale=False, advantage=1.0, old_ratio=1.0):
    """Return loss and gradient of one token: trainer / engine is `ratio`, now / before the update is `old_ratio`."""
    logp = torch.tensor([math.log(old_ratio)], requires_grad=True)
    loss, _ = compute_policy_loss(
        logp,
        torch.tensor([0.0]),
        torch.tensor([advantage]),
        torch.ones(1),
        settings=load_recipe(name).rl.loss,
        engine_logp_N=torch.tensor([-math.log(ratio)]),
        stale_N=torch.tensor([is_stale]),
    )
    loss.backward()
    return loss.item(), logp.grad.item()


@pytest.mark.parametrize("is_stale", [False, True])
def test_paravt_drops_tokens_above_the_cap_of_5(is_stale):
    assert compute_loss_of("paravt/para_grpo", 4.9, is_stale=is_stale) == pytest.approx((-4.9, -4.9))
    assert compute_loss_of("paravt/para_grpo", 5.1, is_stale=is_stale) == (0.0, 0.0)


def test_pyvision_bounds_the_loss_of_a_bad_action_at_3():
    """The ratios of the later mini-batches differ from 1: above 3, a negative advantage has no gradient."""
    name = "pyvision/image_rl"
    assert compute_loss_of(name, 1.0, advantage=-1.0, old_ratio=2.5) == pytest.approx((2.5, 2.5))
    assert compute_loss_of(name, 1.0, advantage=-1.0, old_ratio=3.5) == pytest.approx((3.0, 0.0))
    assert compute_loss_of(name, 1.0, old_ratio=1.1) == pytest.approx((-1.1, -1.1))
    assert compute_loss_of(name, 1.0, old_ratio=1.3) == pytest.approx((-1.2, 0.0))


def make_scored(reward, status=EpisodeStatus.ANSWERED):
    task = Task(id="t", question="?", media=(), answer_type=AnswerType.OPEN, ground_truth="red")
    episode = Episode(task=task, environment="test", ledger=Ledger(), turns=(), status=status)
    return ScoredEpisode(episode=episode, score=Score(value=reward))


def select_statuses(name, *members):
    """Return the statuses of the episodes that the recipe's filters keep of one group."""
    scored = tuple(make_scored(*member) for member in members)
    group = Group(task=scored[0].episode.task, scored_episodes=scored)
    kept = select_groups([group], load_recipe(name).rl.active_filters, target=1).kept_groups
    return [member.episode.status.value for group in kept for member in group.scored_episodes]


def test_paravt_trains_on_groups_with_equal_rewards_and_on_truncated_replies():
    members = [(1.0,), (1.0, EpisodeStatus.LENGTH), (1.0, EpisodeStatus.ABORTED)]
    assert select_statuses("paravt/para_grpo", *members) == ["answered", "length"]


def test_pyvision_drops_what_was_published():
    """Of three episodes one is truncated; the other two have no image of a tool."""
    assert select_statuses("pyvision/image_rl", (1.0,), (0.0,), (0.0, EpisodeStatus.LENGTH)) == []


def test_an_answer_that_is_never_closed_earns_nothing():
    settings = load_recipe("paravt/para_grpo").rewards["format_reward"].settings
    block = Block(kind=BlockKind.ANSWER, body="red", is_closed=False)
    turn = Turn(reply=Reply(text="", blocks=(block,)))
    assert format_reward(replace(make_scored(0.0).episode, turns=(turn,)), **settings).value == 0.0


def test_paravt_scores_open_answers_by_token_f1():
    """One of three words is right, the only one that is wanted: precision 1/3, recall 1."""
    settings = load_recipe("paravt/para_grpo").rewards["accuracy"].settings
    block = Block(kind=BlockKind.ANSWER, body="red, green, blue", is_closed=True)
    turn = Turn(reply=Reply(text="<answer>red, green, blue</answer>", blocks=(block,)))
    episode = replace(make_scored(0.0).episode, turns=(turn,))
    assert plugins.resolve("rewards", "accuracy", settings)()(episode).value == pytest.approx(0.5)


# ---- prompts ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def media(tmp_path_factory):
    folder = tmp_path_factory.mktemp("media")
    Image.new("RGB", (300, 120), "red").save(folder / "wide.png")
    for name, seconds in (("short.mp4", 5), ("long.mp4", 100)):
        write_video(folder / name, np.full((seconds * 2, 32, 32, 3), 90, np.uint8), 2.0)
    return folder


def run(renderer, recipe, path, *replies, options=(), **extras):
    """Run an episode of a recipe's environment on one file; the scripted engine writes these replies."""
    kind = MediaKind.IMAGE if path.suffix == ".png" else MediaKind.VIDEO
    task = Task(
        id="t",
        question="Which?",
        media=(Media(path=str(path), kind=kind),),
        answer_type=AnswerType.CHOICE if options else AnswerType.OPEN,
        ground_truth="A" if options else "red",
        options=options,
        extras=extras,
    )
    ctx = Context(
        engine=Scripted(renderer, replies=replies or ("</think><answer>red</answer>",)),
        renderer=renderer,
        media=CachingMediaLoader(),
        sampling=SamplingParams(max_tokens=200),
        seed=1,
    )
    environment = plugins.resolve("environments", recipe.environment.name, recipe.environment.settings)
    return asyncio.run(run_episode(task, environment, ctx))


def decode(renderer, episode, origin=Origin.PROMPT):
    return "".join(renderer.decode(segment.tokens) for segment in episode.ledger.segments if segment.origin is origin)


def count_frames(episode):
    return len(episode.ledger.segments[0].slots)


def test_paravts_overview_has_a_frame_per_second_and_64_at_most(renderer, media):
    recipe = load_recipe("paravt/para_grpo")
    assert count_frames(run(renderer, recipe, media / "short.mp4")) == 5
    assert count_frames(run(renderer, recipe, media / "long.mp4")) == 64


def test_paravts_sub_agent_reads_range_duration_and_task(renderer, media):
    """A published call names the video and has no question of its own."""
    arguments = json.dumps({"video_path": "long.mp4", "start_time": 61, "end_time": 75})
    replies = (f"Look.</think>{CROP % arguments}", "First, then.", "</think><answer>red</answer>")
    episode = run(renderer, load_recipe("paravt/para_grpo"), media / "long.mp4", *replies)
    shown = decode(renderer, episode.children[0])
    assert "from 01:01 to 01:15" in shown
    assert "(14.0 seconds)" in shown
    assert "in temporal order" in shown
    assert 1 <= count_frames(episode.children[0]) <= 16
    assert "Which?" not in shown


def test_paravt_requests_an_answer_in_evaluation_alone(renderer, media):
    """A letter may take 64 tokens, any other answer 128."""
    call = f"Look.</think>{CROP % json.dumps({'start_time': 1, 'end_time': 2})}"
    replies = [part for _ in range(3) for part in (call, "Red.")]
    recipe = load_recipe("paravt/para_grpo")
    long_answer = "It is red. " * 60
    episode = run(renderer, recipe, media / "short.mp4", *replies, long_answer)
    assert "No more calls" not in decode(renderer, episode, Origin.OBSERVATION)
    for options, limit in (((), 128), (("red", "blue"), 64)):
        episode = run(
            renderer, apply_evaluation_settings(recipe), media / "short.mp4", *replies, long_answer, options=options
        )
        assert "No more calls" in "".join(renderer.decode(segment.tokens) for segment in episode.ledger.segments)
        assert (episode.status, len(episode.ledger.segments[-1].tokens)) == (EpisodeStatus.LENGTH, limit)


@pytest.mark.parametrize("name", ["pyvision/image_rl", "pyvision/mixed_rl"])
def test_pyvisions_prompt_has_the_images_size(renderer, media, name):
    answer = "<answer>\\boxed{red}</answer>"
    shown = decode(renderer, run(renderer, load_recipe(name), media / "wide.png", answer))
    assert "image_clue_0 is 300 pixels wide and 120 pixels high." in shown
    shown = decode(renderer, run(renderer, load_recipe(name), media / "wide.png", answer, system="Theirs."))
    assert ("Theirs." in shown, "pixels wide" in shown, "You answer questions" in shown) == (True, False, False)


def test_pyvisions_video_is_in_the_interpreter_alone(renderer, media):
    episode = run(renderer, load_recipe("pyvision/video_rl"), media / "short.mp4", "<answer>\\boxed{red}</answer>")
    assert count_frames(episode) == 0
    assert "video_clue_0: 32x32 pixels, 10 frames, 2.00 per second, 5.0 s" in decode(renderer, episode)


def test_the_baseline_of_videos_shows_a_frame_per_second(renderer, media):
    episode = run(renderer, load_recipe("pyvision/video_baseline"), media / "long.mp4", "<answer>red</answer>")
    assert count_frames(episode) == 100


@pytest.mark.parametrize(
    ("name", "num_turns"), [("pyvision/image_rl", 30), ("pyvision/video_rl", 30), ("pyvision/mixed_rl", 30)]
)
def test_pyvision_evaluates_with_30_turns(name, num_turns):
    assert load_recipe(name).environment.settings["max_tool_turns"] == 4
    evaluated = apply_evaluation_settings(load_recipe(name))
    used = [evaluated.environment, *evaluated.environments.values()]
    assert [config.settings["max_tool_turns"] for config in used] == [num_turns] * len(used)
