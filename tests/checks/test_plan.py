"""Plans: worked out by hand, and beside what the real agent, packing and commands do."""

import asyncio

import pytest
import torch
from commands import bad, good, run
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.config import Model, load_recipe
from saccade.errors import ConfigError
from saccade.ledger import Ledger, Picture
from saccade.media.cache import Library
from saccade.model.backbone import Backbone
from saccade.model.tiny import make_tiny
from saccade.planning.steps import Training, memory, rl_training, rollouts, sft_training, trees
from saccade.planning.tables import amount, plan
from saccade.planning.talks import Assumed, Talk, attempt_of, estimate, settings_of, sizes_of
from saccade.rollouts.stage import Stage
from saccade.testing import PaintedMedia
from saccade.training.pack import pack, plant
from saccade.training.step import forward
from saccade.types import Kind, Media, Message, Sample, Task

GIB = 2**30


def planned(name, *overrides, **assumed):
    recipe = load_recipe(name, overrides)
    sizes = sizes_of(recipe)
    return recipe, sizes, attempt_of(recipe, sizes, Assumed(**assumed))


# ---- one conversation ----------------------------------------------------------------------------------------------


def test_visual_tokens_of_published_models_by_hand():
    # 1920x1080 within 50,176 pixels: 288x160 at 32 pixels a token, 280x168 at 28.
    _, _, eight = planned("paravt/para_grpo")
    assert [(talk.frames, talk.visual) for talk in eight.talks] == [(K, K * 9 * 5) for K in (4, 8, 16, 32, 64)]
    seven = ("model.published=Qwen2.5-VL-7B-Instruct", "model.family=qwen2_5_vl")
    _, _, other = planned("paravt/para_grpo", *seven)
    assert other.largest.visual == 64 * 10 * 6
    assert other.sub.visual == 16 * 10 * 6
    _, _, square = planned("paravt/para_grpo", video=(224, 224))
    assert square.largest.visual == 64 * 7 * 7


def test_lengths_by_hand():
    _, _, attempt = planned("paravt/para_grpo", question=100)
    talk, shorter = attempt.largest, attempt.talks[0]
    # A frame is its stamp (7: < 1 2 3 . 4 seconds > with three digits is 8), two marks and 45 visual tokens.
    assert talk.prompt - shorter.prompt == 60 * (45 + 2 + 8)
    # Four replies of 2048, and three tool turns: five results of 512 with their marks, the turn's marks, <think>.
    assert talk.rest == 4 * 2048 + 3 * (5 * (512 + 8) + 8 + 2)
    assert (talk.sampled, attempt.subs) == (4 * 2048, 15)
    assert attempt.sub.rest == attempt.sub.sampled == 2048


def test_a_usual_reply_and_a_sequential_agent():
    _, _, attempt = planned("paravt/ablations/sequential", reply=300, calls=4)
    assert (attempt.calls, attempt.turns, attempt.largest.sampled) == (1, 3, 1200)
    assert attempt.largest.rest == 4 * 300 + 3 * (300 + 8 + 8 + 2)


def test_the_context_bounds_a_conversation():
    _, _, attempt = planned("paravt/para_grpo", "agent.settings.context_tokens=5000")
    assert attempt.largest.length == 5000
    assert attempt.largest.sampled == 5000 - attempt.largest.prompt
    with pytest.raises(ConfigError, match=r"64 frames takes 39\d\d tokens, and the context ends at 3000; show"):
        planned("paravt/para_grpo", "agent.settings.context_tokens=3000")


def test_a_recipe_about_pictures_shows_one_and_parts_of_it():
    recipe, _, attempt = planned("tiny/zoom_image", "agent.settings.context_tokens=4096", video=(320, 320))
    (talk,) = attempt.talks
    assert (talk.frames, talk.visual, attempt.sub, attempt.subs) == (1, 4096 // 256, None, 0)
    # Three replies of 96, and two tool turns: five results of 64 with 4 visual tokens and marks, marks, <think>.
    assert talk.rest == 3 * 96 + 2 * (5 * (64 + 4 + 8) + 8 + 2) == 1068
    (grid, *_) = plan("tiny/zoom_image", recipe, Assumed(), gpus=1)
    assert any("picture 320x320" in cell for row in grid.rows for cell in row)


def test_frames_that_a_tool_shows_to_its_caller_count():
    settings = "agent.settings.tools={crop_video: null, show_frames: {most_frames: 8}}"
    _, _, few = planned("paravt/para_grpo", settings)
    _, _, many = planned("paravt/para_grpo", settings.replace("8", "16"))
    shown = 50176 // 32**2  # visual tokens of a frame, at most
    assert many.largest.length - few.largest.length == 3 * 5 * 8 * shown


def test_agents_without_tools_reply_once():
    recipe, _, attempt = planned("paravt/para_grpo", "agent={name: direct, settings: null}")
    assert (attempt.turns, attempt.sub, attempt.subs, attempt.largest.sampled) == (0, None, 0, 2048)
    assert rollouts(recipe, attempt).sub_sampled == 0


@given(st.text())
def test_any_text_can_be_estimated(text):
    assert 0 <= estimate(text) <= len(text)


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    """A real video of 64 frames, 96x64."""
    import numpy as np

    from saccade.data.world.film import write_clip

    path = tmp_path_factory.mktemp("clip") / "clip.mp4"
    write_clip(path, np.random.default_rng(0).integers(0, 256, (64, 64, 96, 3)).astype(np.uint8), 8.0)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl"])
@pytest.mark.parametrize("frames", [1, 8, 64])
def test_a_prompt_is_as_long_as_the_real_agents(tmp_path, clip, family, frames):
    make_tiny(str(tmp_path), family=family, layers=1, hidden=64)
    pixels = ["agent.settings.overview_pixels=[784, 5000]", "agent.settings.tool_schemas=true"]
    overrides = [f"model.path={tmp_path}", *pixels, f"gating.frames=[{frames}]", "agent.settings.context_tokens=9999"]
    question = "When is red shown?"
    recipe = load_recipe("tiny/para_grpo", ["engine={name: local, settings: {}}", "sampling.max_tokens=1", *overrides])
    stage = Stage.of(recipe)
    task = Task(id="t", question=question, media=(Media(path=str(clip)),), kind=Kind.OPEN, gold="")
    episode = asyncio.run(stage.agent(task, stage.context(seed=0, frames=frames)))
    prompt = Ledger(segments=episode.ledger.segments[:2])
    asked = len(stage.backbone.renderer.encode(question))
    talk = attempt_of(recipe, sizes_of(recipe), Assumed(video=(96, 64), question=asked)).largest
    assert talk.visual == sum(slot.tokens for slot in prompt.slots()) == episode.usage.visual_tokens
    # Times have three digits in a plan; of a clip of eight seconds they have one.
    assert talk.prompt == pytest.approx(len(prompt), rel=0.15)
    assert talk.prompt >= len(prompt)
    assert isinstance(stage.media, Library)


# ---- a step --------------------------------------------------------------------------------------------------------


def test_a_step_of_rl_by_hand():
    recipe, _, attempt = planned("paravt/para_grpo", "rl.select.oversample=2", reply=100, calls=1)
    rolled, trained = rollouts(recipe, attempt), rl_training(recipe, attempt)
    assert (rolled.groups, rolled.attempts) == (14, 112)
    # Budgets from the largest: 64 32 16 8 4, twice, then 64 32 16 8; three windows of 16 frames in every attempt.
    assert rolled.pictures == 2 * 124 + 120 + 112 * 3 * 16
    assert (rolled.sampled, rolled.sub_sampled) == (112 * 400, 112 * 3 * 100)
    # Seven prompts are trained: 64 32 16 8 4 64 32; each prompt once, its eight replies and 56 * 3 sub-agents whole.
    talks = {talk.frames: talk for talk in attempt.talks}
    once = sum(talks[K].prompt for K in (64, 32, 16, 8, 4, 64, 32))
    rest = 7 * 8 * attempt.largest.rest + 168 * attempt.sub.length
    assert (trained.packed, trained.apart) == (once + rest, 8 * once + rest)
    assert trained.row <= recipe.rl.row_tokens
    assert trained.rows == trained.passes >= trained.packed / recipe.rl.row_tokens


def test_sub_agents_are_trained_where_the_recipe_says_so():
    recipe, _, attempt = planned("paravt/para_grpo", "rl.advantage.children=none")
    assert rl_training(recipe, attempt).apart == 8 * sum(talk.length for talk in attempt.dealt(7))


def test_a_step_of_sft_by_hand():
    recipe, _, attempt = planned("paravt/sft")
    trained = sft_training(recipe, attempt)
    assert (trained.packed, trained.rows, trained.passes, trained.row) == (65536, 8, 8, 8192)
    assert trained.row_visual == pytest.approx(8192 * 2880 / attempt.largest.prompt, abs=1)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(1, 30), st.integers(1, 9), st.integers(1, 150))
def test_trees_are_those_of_packing(prompt, branch, count, row):
    start = Ledger().observe(tuple(range(10, 10 + prompt)))
    ledgers = [start.act((7,) * branch, logprobs=(-1.0,) * branch, version=0) for _ in range(count)]
    samples = [Sample(ledger=ledger, advantages=(0.0,) * len(ledger)) for ledger in ledgers]
    talk = Talk(frames=0, prompt=prompt, visual=0, sampled=branch, length=prompt + branch)
    assert trees(talk, count, row) == [tree.tokens for tree in plant(samples, row)]


# ---- memory --------------------------------------------------------------------------------------------------------


def needs(name, *overrides, gpus=1):
    recipe, sizes, attempt = planned(name, *overrides)
    return memory(recipe, sizes, recipe.rl.optim, rl_training(recipe, attempt), gpus=gpus, kl=recipe.rl.kl)


def test_memory_of_8b_by_hand():
    P = 8_767_123_696
    found = needs("paravt/para_grpo", gpus=8)
    # bfloat16 weights; float32 gradients, two moments and copies: 2 + 4 + 8 + 4 bytes a parameter.
    held = (found.weights, found.gradients, found.moments, found.copies)
    assert held == (2 * P // 8, 4 * P // 8, 8 * P // 8, 4 * P // 8)
    assert found.logits == 5 * 4 * 2**27
    assert found.checkpointed < found.kept / 10
    assert found.peak(checkpointing=True) == sum(held) + found.logits + found.checkpointed
    alone = needs("paravt/para_grpo")
    assert alone.checkpointed == found.checkpointed  # every GPU makes passes of its own
    assert alone.peak(checkpointing=True) - alone.checkpointed - alone.logits == 18 * P


def test_float32_needs_no_copies_and_adapters_need_little():
    assert needs("tiny/para_grpo").copies == 0
    whole, thin = needs("paravt/para_grpo"), needs("paravt/para_grpo", "model.lora_rank=64")
    assert thin.gradients == 4 * sizes_of(load_recipe("paravt/para_grpo")).adapters(64)
    assert thin.weights > whole.weights
    assert thin.kept < whole.kept  # nothing is kept of a frozen tower


def test_first_weights_wait_where_the_recipe_says():
    none, there = (needs("paravt/para_grpo", f"rl.kl={{reward: 0.01, keep: {place}}}") for place in ("cpu", "device"))
    assert (none.reference, there.reference) == (0, 2 * 8_767_123_696)
    assert needs("paravt/para_grpo", "rl.kl={reward: 0, keep: device}").reference == 0


def test_longer_rows_keep_more():
    small, large = (needs("paravt/para_grpo", f"rl.row_tokens={row}", "rl.prompts=1") for row in (4096, 32768))
    assert small.checkpointed < large.checkpointed
    assert small.weights == large.weights


def attempts(renderer, count):
    """Conversations that share nothing: 16 frames of 16 visual tokens, 100 sampled tokens."""
    side = 4 * renderer.factor
    for number in range(count):
        times = [16.0 * number + at for at in range(16)]
        frames = [Picture(path="v", digest="d", time=time, width=side, height=side) for time in times]
        prompt = renderer.render(Ledger(), [Message(role="user", parts=(*frames, "What is it?"))])
        ledger = Ledger(segments=(prompt,)).act(range(100, 200), logprobs=(-1.0,) * 100, version=0)
        yield Sample(ledger=ledger, advantages=tuple(float(sampled) for sampled in ledger.mask()))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_real_pass_keeps_about_what_is_planned(tmp_path, family, checkpointing):
    make_tiny(str(tmp_path), family=family, hidden=256, layers=6)
    backbone = Backbone(Model(path=str(tmp_path), activation_checkpointing=checkpointing))
    samples = list(attempts(backbone.renderer, 2))
    T = len(samples[0].ledger)
    (batch,) = pack(samples, positions=backbone.renderer.positions, row_tokens=T, rows_per_pass=2)
    held = {}

    def keep(tensor):
        held[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    backbone.model.train()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        forward(backbone, batch, pixels=PaintedMedia().pixels, temperature=1.0)
    weights = {parameter.untyped_storage().data_ptr() for parameter in backbone.model.parameters()}
    found = sum(tensor.untyped_storage().nbytes() for place, tensor in held.items() if place not in weights)
    passed = Training(apart=2 * T, packed=2 * T, visual=2 * 256, rows=2, at_once=2, passes=1, row=T)
    recipe = load_recipe("tiny/para_grpo", [f"model.path={tmp_path}"])
    told = memory(recipe, sizes_of(recipe), recipe.rl.optim, passed)
    if checkpointing:  # the layer that is computed again comes in the backward pass
        assert found < told.checkpointed + told.logits < found * 4
    else:
        assert told.kept + told.logits == pytest.approx(found, rel=0.15)


# ---- the command ---------------------------------------------------------------------------------------------------


def test_settings_of_a_plugin_are_its_defaults_and_what_is_given():
    found = settings_of("agents", load_recipe("tiny/base").agent)
    assert (found["max_turns"], found["dispatch"], found["result_tokens"]) == (2, "parallel", 64)


def test_amounts():
    assert [amount(n) for n in (0, 2000, 3 * 2**20, 512 * GIB)] == ["0 bytes", "2.0 KiB", "3.0 MiB", "512 GiB"]


def test_a_plan_shows_the_stages_that_a_recipe_sets():
    titles = [grid.title for grid in plan("paravt/sft", load_recipe("paravt/sft"), Assumed())]
    assert titles == ["paravt/sft", "One step of SFT", "Memory of one GPU in training, about"]
    shown = plan("paravt/para_grpo", load_recipe("paravt/para_grpo"), Assumed(), gpus=4)
    assert [grid.title for grid in shown][1] == "One step of RL, at most"
    assert shown[-1].header == ("", "RL", "SFT")
    assert all(len(row) == len(grid.header) for grid in shown for row in grid.rows)


def test_all_recipes_are_checked_and_bad_ones_named(tmp_path):
    (tmp_path / "good.yaml").write_text("extends: tiny/para_grpo\n")
    (tmp_path / "typo.yaml").write_text("extends: tiny/para_grpo\nrewards: {format: {settings: {lamda: 1}}}\n")
    (tmp_path / "large.yaml").write_text("extends: paravt/para_grpo\nagent: {settings: {context_tokens: 1000}}\n")
    done = run("recipes", "check", tmp_path / "typo.yaml", tmp_path / "good.yaml", tmp_path / "large.yaml", "tiny/non")
    assert done.exit_code == 1
    first, second, third = done.stderr.splitlines()
    assert "typo.yaml: rewards/format has no setting 'lamda'; did you mean 'lam'" in first
    assert "large.yaml: a prompt of 16 frames takes" in second
    assert "there is no recipe 'tiny/non'" in third
    assert "good.yaml" in done.stdout
    assert "one token per word" in done.stdout


def test_check_takes_settings_and_what_a_recipe_does_not_say():
    said = good("recipes", "check", "paravt/para_grpo", "rl.group=4", "--gpus", 8, "--video", "640x360", "--reply", 9)
    assert "28" in said
    assert "each of 8 GPUs" in said
    assert "640x360" in said
    assert "--video can't be 'wide'" in bad("recipes", "check", "--video", "wide")


def test_a_runs_own_recipe_is_planned_with_its_own_model(tmp_path):
    make_tiny(str(tmp_path / "model"), hidden=64, layers=1)
    (tmp_path / "recipe.yaml").write_text("extends: tiny/para_grpo\nmodel: {path: model}\n")
    said = "".join(good("recipes", "check", tmp_path / "recipe.yaml").split())
    assert f"{tmp_path / 'model'}:".replace(" ", "") in said
    (tmp_path / "model" / "config.json").unlink()
    assert "can't be read as a model's folder" in bad("recipes", "check", tmp_path / "recipe.yaml")
