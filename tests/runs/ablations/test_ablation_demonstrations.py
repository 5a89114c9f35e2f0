"""Cold starts: traces rewritten to other habits, and still exact."""

import asyncio
import random
from dataclasses import replace

import pytest

from saccade.chat.parser import parse_reply
from saccade.config.schema import ModelConfig, SyntheticConfig
from saccade.data.dataset import load_demonstrations, load_tasks
from saccade.data.synthetic import generate_dataset
from saccade.data.synthetic.demonstrations import build_demonstration
from saccade.media.frame_sampling import sample_uniform_times
from saccade.rewards.format_compliance import format_compliance
from saccade.rollouts.components import TrainingComponents
from saccade.rollouts.runner import run_episode
from saccade.runs.ablations.demonstrations import (
    build_demonstrations,
    rewrite_demonstration,
    split_calls_into_turns,
    to_python_style,
)
from saccade.runs.ablations.schedule import Ablation
from saccade.runs.ablations.spec import InitialCheckpoint
from saccade.training.demonstrations import ReplayEngine, replay_demonstration
from saccade.types import BlockKind, CallFormat
from saccade.utils.hashing import derive_seed


@pytest.fixture(scope="module")
def seed_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("seed")
    generate_dataset(folder / "dataset", SyntheticConfig(train=3, validation=1, test=1, tasks_per_video=6), seed=0)
    return folder


@pytest.fixture(scope="module")
def demo(seed_folder):
    task = next(
        task for task in load_tasks(seed_folder / "dataset/train/tasks.jsonl") if task.extras["question"] == "when"
    )
    return build_demonstration(task, sample_uniform_times(64, 4), random.Random(0), direct_share=0.4)


def test_the_python_style_has_the_same_calls(demo):
    trained, other = parse_reply(demo.replies[0]), parse_reply(to_python_style(demo.replies[0]))
    assert len(trained.calls) == 4
    assert {call.call_format for call in trained.calls} == {CallFormat.NATIVE}
    assert {call.call_format for call in other.calls} == {CallFormat.PYTHON_STYLE}
    assert [(call.name, call.arguments) for call in other.calls] == [
        (call.name, call.arguments) for call in trained.calls
    ]
    assert to_python_style(demo.replies[-1]) == demo.replies[-1]


def test_one_call_per_turn_keeps_calls_answers_and_their_order(demo):
    turns = split_calls_into_turns(demo)
    assert len(turns.replies) == 5
    assert [len(parse_reply(reply).calls) for reply in turns.replies] == [1, 1, 1, 1, 0]
    calls = [call for reply in turns.replies for call in parse_reply(reply).calls]
    assert calls == list(parse_reply(demo.replies[0]).calls)
    assert [call for turn in turns.children for call in turn] == list(demo.children[0])
    assert all(reply.startswith("<think>") for reply in turns.replies)


def test_an_open_think_is_open_in_every_turn(demo):
    for reply in rewrite_demonstration(demo, InitialCheckpoint(unclosed_think_fraction=1.0), 0).replies:
        (think,) = parse_reply(reply).find_blocks(BlockKind.THINK)
        assert not think.is_closed
        assert think.body.strip()
    assert (
        parse_reply(rewrite_demonstration(demo, InitialCheckpoint(unclosed_think_fraction=1.0), 0).replies[-1]).answer
        is not None
    )


def test_habits_are_drawn_for_a_share_and_are_the_same_every_time(seed_folder):
    plain = [
        demonstration
        for demonstration in load_demonstrations(seed_folder / "dataset/train/demonstrations.jsonl")
        if not demonstration.is_auxiliary and demonstration.children
    ]
    half = [
        rewrite_demonstration(demonstration, InitialCheckpoint(python_style_fraction=0.5), 0) for demonstration in plain
    ]
    share = sum("<tool_code>" in demonstration.replies[0] for demonstration in half) / len(half)
    assert 0.25 < share < 0.75
    assert half == [
        rewrite_demonstration(demonstration, InitialCheckpoint(python_style_fraction=0.5), 0) for demonstration in plain
    ]
    assert half != [
        rewrite_demonstration(demonstration, InitialCheckpoint(python_style_fraction=0.5), 1) for demonstration in plain
    ]
    assert plain == [rewrite_demonstration(demonstration, InitialCheckpoint(), 0) for demonstration in plain]


def test_what_sub_agents_practice_stays(seed_folder):
    drill = next(
        demonstration
        for demonstration in load_demonstrations(seed_folder / "dataset/train/demonstrations.jsonl")
        if demonstration.is_auxiliary
    )
    assert (
        rewrite_demonstration(
            drill, InitialCheckpoint(python_style_fraction=1.0, unclosed_think_fraction=1.0, one_call_per_turn=True), 0
        )
        == drill
    )


@pytest.mark.slow
def test_demonstrations_are_those_of_the_dataset_rewritten(tmp_path):
    recipe = Ablation.from_spec("claims").build_initial_checkpoint_recipe("unclosed_think")
    config = recipe.synthetic.model_copy(update={"train": 6, "validation": 1, "test": 1})
    generate_dataset(tmp_path / "data", config, seed=0)
    dataset, folder = tmp_path / "data/train/demonstrations.jsonl", tmp_path / "initial_checkpoints" / "one"

    def build(**settings):
        return build_demonstrations(dataset, folder, recipe.seed, InitialCheckpoint(**settings))

    plain, rewritten = build(), build(unclosed_think_fraction=1.0)
    stored = load_demonstrations(dataset)
    assert [item.replies for item in plain] == [item.replies for item in stored]
    assert {item.task.media[0].path.split("/clips")[0] for item in plain} == {"../../data/train"}
    for before, after in zip(plain, rewritten, strict=True):
        opened = tuple(reply.replace("</think>", "", 1) for reply in before.replies)
        assert after.replies == (before.replies if before.is_auxiliary else opened)


def test_rewritten_traces_are_learned_token_for_token(demo, tiny_folder):
    recipe = Ablation.from_spec("turns").build_initial_checkpoint_recipe("one_call_per_turn")
    stage = TrainingComponents.from_recipe(
        recipe.model_copy(update={"model": ModelConfig(path=tiny_folder, num_threads=1)})
    )
    context = stage.build_context(seed=0)
    for start, num_sampled in (
        (InitialCheckpoint(one_call_per_turn=True), 5),
        (InitialCheckpoint(python_style_fraction=1.0), 2),
        (InitialCheckpoint(unclosed_think_fraction=1.0), 2),
    ):
        rewritten = rewrite_demonstration(demo, start, 0)
        environment = stage.environments(demo.task)
        own, *children = asyncio.run(replay_demonstration(rewritten, environment, context))
        sampled = [segment for segment in own.ledger.segments if segment.is_sampled]
        assert len(sampled) == num_sampled
        assert len(children) == 4
        text = "".join(stage.vlm.renderer.decode(segment.tokens) for segment in sampled)
        assert text.replace("<|im_end|>", "") == "".join(rewrite_demonstration(demo, start, 0).replies)


def test_only_the_trained_form_with_closed_thinking_is_compliant(demo, tiny_folder):
    recipe = Ablation.from_spec("turns").build_initial_checkpoint_recipe("one_call_per_turn")
    stage = TrainingComponents.from_recipe(
        recipe.model_copy(update={"model": ModelConfig(path=tiny_folder, num_threads=1)})
    )

    def compliant(start):
        own = rewrite_demonstration(demo, start, 0)
        replies = {derive_seed(1, turn): text for turn, text in enumerate(own.replies)}
        replies |= {derive_seed(1, "child", t, i): x for t, row in enumerate(own.children) for i, x in enumerate(row)}
        context = stage.build_context(seed=1)
        engine = ReplayEngine(renderer=context.renderer, replies_by_seed=replies)
        context = replace(context, engine=engine, frame_budget=4)
        episode = asyncio.run(run_episode(own.task, stage.environments(own.task), context))
        return format_compliance(episode).value

    assert compliant(InitialCheckpoint()) == 1.0
    assert compliant(InitialCheckpoint(one_call_per_turn=True)) == 1.0
    assert compliant(InitialCheckpoint(python_style_fraction=1.0)) == 0.0
    assert compliant(InitialCheckpoint(unclosed_think_fraction=1.0)) == 0.0
