"""Cold starts: traces rewritten to other habits, and still exact."""

import asyncio
import random
from dataclasses import replace

import pytest

from saccade.chat.parse import parse
from saccade.config import Model, World
from saccade.data.rows import read_demos, read_tasks
from saccade.data.world import make_world
from saccade.data.world.oracle import demo as demo_of
from saccade.data.world.oracle import trace
from saccade.lab.design import Start
from saccade.lab.plan import Lab
from saccade.lab.starts import in_turns, leaked, rewritten, traces
from saccade.media.picks import uniform_times
from saccade.rewards.compliance import compliance
from saccade.rollouts.stage import Stage
from saccade.training.demos import Rehearsed, rehearse
from saccade.types import BlockKind, Form, seed_of


@pytest.fixture(scope="module")
def seed_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("seed")
    make_world(folder / "world", World(train=3, validation=1, test=1, tasks_per_video=6), seed=0)
    return folder


@pytest.fixture(scope="module")
def demo(seed_folder):
    task = next(
        task for task in read_tasks(seed_folder / "world/train/tasks.jsonl") if task.extras["question"] == "when"
    )
    return demo_of(task, trace(task, uniform_times(64, 4), random.Random(0)))


def test_the_leaked_form_says_the_same(demo):
    trained, other = parse(demo.replies[0]), parse(leaked(demo.replies[0]))
    assert len(trained.calls) == 4
    assert {call.form for call in trained.calls} == {Form.TRAINED}
    assert {call.form for call in other.calls} == {Form.LEAKED}
    assert [(call.name, call.arguments) for call in other.calls] == [
        (call.name, call.arguments) for call in trained.calls
    ]
    assert leaked(demo.replies[-1]) == demo.replies[-1]


def test_one_call_per_turn_keeps_calls_answers_and_their_order(demo):
    turns = in_turns(demo)
    assert len(turns.replies) == 5
    assert [len(parse(reply).calls) for reply in turns.replies] == [1, 1, 1, 1, 0]
    calls = [call for reply in turns.replies for call in parse(reply).calls]
    assert calls == list(parse(demo.replies[0]).calls)
    assert [each for turn in turns.children for each in turn] == list(demo.children[0])
    assert all(reply.startswith("<think>") for reply in turns.replies)


def test_an_open_think_is_open_in_every_turn(demo):
    for reply in rewritten(demo, Start(open_think=1.0), 0).replies:
        (think,) = parse(reply).of(BlockKind.THINK)
        assert not think.closed
        assert think.body.strip()
    assert parse(rewritten(demo, Start(open_think=1.0), 0).replies[-1]).answer is not None


def test_habits_are_drawn_for_a_share_and_are_the_same_every_time(seed_folder):
    plain = [each for each in read_demos(seed_folder / "world/train/traces.jsonl") if each.main and each.children]
    half = [rewritten(each, Start(leaked=0.5), 0) for each in plain]
    share = sum("<tool_code>" in each.replies[0] for each in half) / len(half)
    assert 0.25 < share < 0.75
    assert half == [rewritten(each, Start(leaked=0.5), 0) for each in plain]
    assert half != [rewritten(each, Start(leaked=0.5), 1) for each in plain]
    assert plain == [rewritten(each, Start(), 0) for each in plain]


def test_what_sub_agents_practise_stays(seed_folder):
    drill = next(each for each in read_demos(seed_folder / "world/train/traces.jsonl") if not each.main)
    assert rewritten(drill, Start(leaked=1.0, open_think=1.0, one_by_one=True), 0) == drill


def test_direct_traces_are_a_matter_of_the_start(seed_folder):
    folder = seed_folder / "starts" / "usual"
    tasks, recipe = seed_folder / "world/train/tasks.jsonl", Lab.of("gating").start_recipe("usual")
    counts = {}
    for share in (0.0, 1.0):
        found = [each for each in traces(tasks, folder, recipe, Start(direct=share)) if each.main]
        counts[share] = sum(not each.children for each in found)
        assert {each.task.media[0].path.split("/clips")[0] for each in found} == {"../../world/train"}
    assert counts[0.0] == 0
    assert counts[1.0] > 4


def test_rewritten_traces_are_learned_token_for_token(demo, tiny_folder):
    recipe = Lab.of("dispatch").start_recipe("one_by_one")
    stage = Stage.of(recipe.model_copy(update={"model": Model(path=tiny_folder, threads=1)}))
    context = stage.context(seed=0)
    for start, said in ((Start(one_by_one=True), 5), (Start(leaked=1.0), 2), (Start(open_think=1.0), 2)):
        own, *children = asyncio.run(rehearse(rewritten(demo, start, 0), stage.agent, context))
        sampled = [segment for segment in own.ledger.segments if segment.sampled]
        assert len(sampled) == said
        assert len(children) == 4
        text = "".join(stage.backbone.renderer.decode(segment.tokens) for segment in sampled)
        assert text.replace("<|im_end|>", "") == "".join(rewritten(demo, start, 0).replies)


def test_only_the_trained_form_with_closed_thinking_is_compliant(demo, tiny_folder):
    recipe = Lab.of("dispatch").start_recipe("one_by_one")
    stage = Stage.of(recipe.model_copy(update={"model": Model(path=tiny_folder, threads=1)}))

    def compliant(start):
        own = rewritten(demo, start, 0)
        replies = {seed_of(1, turn): text for turn, text in enumerate(own.replies)}
        replies |= {seed_of(1, "child", t, i): x for t, row in enumerate(own.children) for i, x in enumerate(row)}
        context = stage.context(seed=1)
        engine = Rehearsed(renderer=context.renderer, replies=replies)
        episode = asyncio.run(stage.agent(own.task, replace(context, engine=engine, frames=4)))
        return compliance(episode, own.task)

    assert compliant(Start()) == 1.0
    assert compliant(Start(one_by_one=True)) == 1.0
    assert compliant(Start(leaked=1.0)) == 0.0
    assert compliant(Start(open_think=1.0)) == 0.0
