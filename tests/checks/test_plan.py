"""Plans: against values computed by hand, and against the real environment, packing and commands."""

import asyncio
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from commands import bad, good, run
from error_cases import raises
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.checks.estimates import (
    ConversationSize,
    PlanAssumptions,
    TrainingCost,
    estimate_environment,
    estimate_episode,
    estimate_memory,
    estimate_micro_steps,
    estimate_rl_training,
    estimate_rollouts,
    estimate_sft_training,
    estimate_tokens,
    plan_trees,
    resolve_model_sizes,
)
from saccade.checks.plan import build_plan, format_bytes
from saccade.config.load import load_recipe
from saccade.config.schema import ModelConfig
from saccade.errors import ConfigError
from saccade.ledger import ImageRef, Ledger
from saccade.media.cache import CachingMediaLoader
from saccade.models.tiny import make_tiny_model
from saccade.models.vlm import VisionLanguageModel
from saccade.rollouts.components import TrainingComponents, resolve_settings
from saccade.rollouts.runner import run_episode
from saccade.testing import FakeMediaLoader
from saccade.training.packing import build_prefix_trees, pack
from saccade.training.train_step import forward
from saccade.types import AnswerType, Media, Message, Task, TrainingSample

GIB = 2**30


def estimate_recipe(name, *overrides, **assumed):
    recipe = load_recipe(name, overrides)
    sizes = resolve_model_sizes(recipe)
    return recipe, sizes, estimate_episode(recipe, sizes, PlanAssumptions(**assumed))


# ---- one conversation ----------------------------------------------------------------------------------------------


def test_visual_tokens_of_published_models():
    # 1920x1080 within 50,176 pixels: 288x160 at 32 pixels a token, 280x168 at 28.
    _, _, eight = estimate_recipe("paravt/para_grpo")
    assert [(conversation.num_frames, conversation.visual_tokens) for conversation in eight.conversations] == [
        (K, K * 9 * 5) for K in (4, 8, 16, 32, 64)
    ]
    seven = ("model.memory_plan_model=Qwen2.5-VL-7B-Instruct", "model.family=qwen2_5_vl")
    _, _, other = estimate_recipe("paravt/para_grpo", *seven)
    assert other.longest.visual_tokens == 64 * 10 * 6
    assert other.sub_agent.visual_tokens == 16 * 10 * 6
    _, _, square = estimate_recipe("paravt/para_grpo", video_size=(224, 224))
    assert square.longest.visual_tokens == 64 * 7 * 7


def test_pairs_of_frames_have_half_the_visual_tokens():
    pairs = "media.frame_pairs=true"
    _, _, single = estimate_recipe("paravt/para_grpo")
    _, _, paired = estimate_recipe("paravt/para_grpo", pairs)
    for one, two in zip(
        (*single.conversations, single.sub_agent), (*paired.conversations, paired.sub_agent), strict=True
    ):
        assert (two.num_frames, two.visual_tokens) == (one.num_frames, one.visual_tokens / 2)
        assert two.prompt_tokens < one.prompt_tokens - one.visual_tokens / 2  # half as many timestamps, too
    show = "environment.settings.tools={show_frames: {max_frames: 5, frame_pixels: [784, 50176]}}"
    turns = []
    for more in ([], [pairs]):
        _, sizes, episode = estimate_recipe("paravt/para_grpo", show, *more)
        turns.append(episode.longest.total_tokens - episode.longest.prompt_tokens)
    assert turns[0] - turns[1] == episode.max_tool_turns * episode.calls_per_turn * 2 * (50176 // sizes.factor**2)
    # Images stay images.
    _, _, image = estimate_recipe("pyvision/image_rl")
    assert estimate_recipe("pyvision/image_rl", pairs)[2] == image


def test_a_tool_of_another_name_may_run_a_sub_agent(tmp_path):
    (tmp_path / "ask.py").write_text(
        "import saccade\n\n\n@saccade.tool\nasync def ask(*, ctx: saccade.ToolContext, "
        "frame_range: tuple[int, int] = (1, 4)) -> tuple[str, saccade.Episode]:\n    'Ask.'\n"
    )
    tools = f"environment.settings.tools={{crop_video: null, {tmp_path}/ask.py: {{}}}}"
    _, _, episode_size = estimate_recipe("paravt/para_grpo", tools)
    assert episode_size.sub_agent.visual_tokens == 4 * 9 * 5


def test_conversation_lengths():
    _, _, episode_size = estimate_recipe("paravt/para_grpo", question_tokens=100)
    conversation, shorter = episode_size.longest, episode_size.conversations[0]
    # A frame is its stamp (7: < 1 2 3 . 4 seconds > with three digits is 8), two marks and 45 visual tokens.
    assert conversation.prompt_tokens - shorter.prompt_tokens == 60 * (45 + 2 + 8)
    # Four replies of 2048, and three tool turns: five results of 512 with their marks, the turn's marks, <think>.
    assert conversation.completion_tokens == 4 * 2048 + 3 * (5 * (512 + 8) + 8 + 2)
    assert (conversation.sampled_tokens, episode_size.num_sub_agents) == (4 * 2048, 15)
    assert episode_size.sub_agent.completion_tokens == episode_size.sub_agent.sampled_tokens == 2048


def test_assumed_reply_and_sequential_dispatch():
    _, _, episode_size = estimate_recipe("paravt/ablations/sequential", reply_tokens=300, calls_per_turn=4)
    assert (episode_size.calls_per_turn, episode_size.max_tool_turns, episode_size.longest.sampled_tokens) == (
        1,
        3,
        1200,
    )
    assert episode_size.longest.completion_tokens == 4 * 300 + 3 * (300 + 8 + 8 + 2)


def test_context_limits_a_conversation():
    _, _, episode_size = estimate_recipe("paravt/para_grpo", "environment.settings.max_context_tokens=5000")
    assert episode_size.longest.total_tokens == 5000
    assert episode_size.longest.sampled_tokens == 5000 - episode_size.longest.prompt_tokens
    with raises(ConfigError, key="environment.settings.max_context_tokens", value=3000):
        estimate_recipe("paravt/para_grpo", "environment.settings.max_context_tokens=3000")


def test_image_recipe_shows_one_image_and_its_crops():
    recipe, _, episode_size = estimate_recipe(
        "tiny/zoom_image", "environment.settings.max_context_tokens=4096", video_size=(320, 320)
    )
    (conversation,) = episode_size.conversations
    assert (
        conversation.num_frames,
        conversation.visual_tokens,
        episode_size.sub_agent,
        episode_size.num_sub_agents,
    ) == (
        1,
        4096 // 256,
        None,
        0,
    )
    # Three replies of 96, and two tool turns: five results of 64 with 4 visual tokens and marks, marks, <think>.
    assert conversation.completion_tokens == 3 * 96 + 2 * (5 * (64 + 4 + 8) + 8 + 2) == 1068
    (table, *_) = build_plan("tiny/zoom_image", recipe, PlanAssumptions(), gpus=1)
    assert any("image 320x320" in cell for row in table.rows for cell in row)


def test_frames_of_tool_results_count():
    settings = "environment.settings.tools={crop_video: null, show_frames: {max_frames: 8}}"
    _, _, few = estimate_recipe("paravt/para_grpo", settings)
    _, _, many = estimate_recipe("paravt/para_grpo", settings.replace("8", "16"))
    shown = 50176 // 32**2  # visual tokens of a frame, at most
    assert many.longest.total_tokens - few.longest.total_tokens == 3 * 5 * 8 * shown


def test_environment_without_tools_has_one_reply():
    recipe, _, episode_size = estimate_recipe("paravt/para_grpo", "environment={name: single_turn, settings: null}")
    assert (
        episode_size.max_tool_turns,
        episode_size.sub_agent,
        episode_size.num_sub_agents,
        episode_size.longest.sampled_tokens,
    ) == (0, None, 0, 2048)
    assert estimate_rollouts(recipe, episode_size).sub_agent_sampled_tokens == 0


@given(st.text())
def test_estimate_of_any_text(text):
    assert 0 <= estimate_tokens(text) <= len(text)


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    """A real video of 64 frames, 96x64."""
    import numpy as np

    from saccade.data.synthetic.video_writer import write_video

    path = tmp_path_factory.mktemp("clip") / "clip.mp4"
    write_video(path, np.random.default_rng(0).integers(0, 256, (64, 64, 96, 3)).astype(np.uint8), 8.0)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl"])
@pytest.mark.parametrize(("frames", "pairs"), [(1, False), (8, False), (64, False), (1, True), (7, True)])
def test_prompt_length_matches_the_real_environment(tmp_path, clip, family, frames, pairs):
    make_tiny_model(str(tmp_path), family=family, num_layers=1, hidden_size=64)
    pixels = ["environment.settings.frame_pixels=[784, 5000]", "environment.settings.show_tool_schemas=true"]
    overrides = [
        f"model.path={tmp_path}",
        *pixels,
        f"frame_budgets=[{frames}]",
        f"media.frame_pairs={str(pairs).lower()}",
        "environment.settings.max_context_tokens=9999",
    ]
    question = "When is red shown?"
    recipe = load_recipe("tiny/para_grpo", ["engine={name: local, settings: {}}", "sampling.max_tokens=1", *overrides])
    stage = TrainingComponents.from_recipe(recipe)
    task = Task(id="t", question=question, media=(Media(path=str(clip)),), answer_type=AnswerType.OPEN, ground_truth="")
    episode = asyncio.run(run_episode(task, stage.environments(task), stage.build_context(seed=0, frame_budget=frames)))
    prompt = Ledger(segments=episode.ledger.segments[:2])
    asked = len(stage.vlm.renderer.encode(question))
    conversation = estimate_episode(
        recipe, resolve_model_sizes(recipe), PlanAssumptions(video_size=(96, 64), question_tokens=asked)
    ).longest
    assert conversation.visual_tokens == sum(slot.num_tokens for slot in prompt.slots()) == episode.usage.visual_tokens
    # Times have three digits in a plan; of a clip of eight seconds they have one.
    assert conversation.prompt_tokens == pytest.approx(len(prompt), rel=0.15)
    assert conversation.prompt_tokens >= len(prompt)
    assert isinstance(stage.media, CachingMediaLoader)


# ---- a step --------------------------------------------------------------------------------------------------------


def test_rl_step():
    recipe, _, episode_size = estimate_recipe(
        "paravt/para_grpo", "rl.selection.oversample=2", reply_tokens=100, calls_per_turn=1
    )
    rolled, trained = estimate_rollouts(recipe, episode_size), estimate_rl_training(recipe, episode_size)
    assert (rolled.num_groups, rolled.num_episodes) == (14, 112)
    # Budgets from the largest: 64 32 16 8 4, twice, then 64 32 16 8; three windows of 16 frames in every episode_size.
    assert rolled.num_images == 2 * 124 + 120 + 112 * 3 * 16
    assert (rolled.sampled_tokens, rolled.sub_agent_sampled_tokens) == (112 * 400, 112 * 3 * 100)
    # Seven prompts are trained: 64 32 16 8 4 64 32; each prompt once, its eight replies and 56 * 3 sub-agents whole.
    conversations = {conversation.num_frames: conversation for conversation in episode_size.conversations}
    once = sum(conversations[K].prompt_tokens for K in (64, 32, 16, 8, 4, 64, 32))
    rest = 7 * 8 * episode_size.longest.completion_tokens + 168 * episode_size.sub_agent.total_tokens
    assert (trained.packed_tokens, trained.unpacked_tokens) == (once + rest, 8 * once + rest)
    assert trained.max_row_tokens <= recipe.rl.pack_length
    assert trained.num_rows == trained.num_micro_batches >= trained.packed_tokens / recipe.rl.pack_length


def test_sub_agents_are_trained_with_shared_credit():
    recipe, _, episode_size = estimate_recipe("paravt/para_grpo", "rl.advantage.sub_agent_advantage=none")
    assert estimate_rl_training(recipe, episode_size).unpacked_tokens == 8 * sum(
        conversation.total_tokens for conversation in episode_size.assign_frame_budgets(7)
    )


def test_sft_step():
    recipe, _, episode_size = estimate_recipe("paravt/sft")
    trained = estimate_sft_training(recipe, episode_size)
    assert (trained.packed_tokens, trained.num_rows, trained.num_micro_batches, trained.max_row_tokens) == (
        262144,
        32,
        32,
        8192,
    )
    assert trained.max_row_visual_tokens == pytest.approx(8192 * 2880 / episode_size.longest.prompt_tokens, abs=1)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(1, 30), st.integers(1, 9), st.integers(1, 150))
def test_tree_sizes_match_packing(prompt, branch, count, row):
    start = Ledger().observe(tuple(range(10, 10 + prompt)))
    ledgers = [start.append_completion((7,) * branch, logprobs=(-1.0,) * branch, version=0) for _ in range(count)]
    samples = [TrainingSample(ledger=ledger, advantages=(0.0,) * len(ledger)) for ledger in ledgers]
    conversation = ConversationSize(
        num_frames=0, prompt_tokens=prompt, visual_tokens=0, sampled_tokens=branch, total_tokens=prompt + branch
    )
    assert [tree.num_tokens for tree in plan_trees(conversation, count, row)] == [
        tree.num_tokens for tree in build_prefix_trees(samples, row)
    ]


@pytest.mark.parametrize(
    ("rows", "micro_batch_size", "num_mini_batches", "num_ranks", "num_micro_steps", "busy", "longest"),
    [
        ((8, 8, 8, 8), 1, 1, 2, 2, 32, 16),
        ((8, 4, 4), 1, 1, 2, 2, 16, 12),  # the second micro-step has one micro-batch
        ((8, 4, 4), 1, 1, 16, 1, 16, 8),  # and thirteen ranks have none
        ((8, 7, 6, 5, 4), 2, 1, 2, 2, 8 + 7 + 6 + 2 * 5, 10 + 7),  # 1 + 1 + 1 + 2 rows, padded to the longer
        ((8, 7, 6, 5), 1, 2, 4, 2, 26, 8 + 7),  # a micro-step for each of two mini-batches
    ],
)
def test_micro_steps_of_a_step(rows, micro_batch_size, num_mini_batches, num_ranks, num_micro_steps, busy, longest):
    training = TrainingCost(
        unpacked_tokens=99,
        visual_tokens=9,
        trained_tokens=9,
        row_lengths=rows,
        micro_batch_size=min(micro_batch_size, len(rows)),
        num_mini_batches=num_mini_batches,
    )
    micro_steps, idle_share = estimate_micro_steps(training, num_ranks)
    assert micro_steps == num_micro_steps
    assert idle_share == pytest.approx(1 - busy / (num_ranks * longest))


def test_nodes_have_copies_of_the_weights_and_share_the_micro_batches():
    recipe, sizes, episode_size = estimate_recipe("paravt/para_grpo")
    training = estimate_rl_training(recipe, episode_size)
    one, four = (estimate_memory(recipe, sizes, recipe.rl.optim, training, gpus=8, nodes=nodes) for nodes in (1, 4))
    assert one == four
    alone = estimate_memory(recipe, sizes, recipe.rl.optim, training, nodes=2)
    assert alone.master_weights == 0  # weights are stored in float32, as in every sharded training
    counts = [estimate_micro_steps(training, 8 * nodes)[0] for nodes in (1, 2, 4, 128)]
    assert counts == [math.ceil(training.num_rows / (8 * nodes)) for nodes in (1, 2, 4, 128)]


def test_micro_steps_in_the_docs_are_todays():
    header, _, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in (Path(__file__).parents[2] / "docs/scaling.md").read_text().split("\n## ")[1].splitlines()
        if line.startswith("|")
    ]
    for name, num_rows, *cells in rows:
        recipe_name, *options = name.strip("`").split()
        values = dict(zip(options[::2], map(int, options[1::2]), strict=True))
        assumptions = {"reply_tokens": values.get("--reply-tokens"), "calls_per_turn": values.get("--calls-per-turn")}
        recipe, _, episode_size = estimate_recipe(recipe_name, **assumptions)
        estimate = estimate_sft_training if recipe_name.endswith("/sft") else estimate_rl_training
        training = estimate(recipe, episode_size)
        assert int(num_rows) == training.num_rows
        for num_ranks, cell in zip(header[2:], cells, strict=True):
            num_micro_steps, idle_share = estimate_micro_steps(training, int(num_ranks.replace(",", "")))
            assert cell == f"{num_micro_steps} ({idle_share:.0%})", (name, num_ranks)


# ---- memory --------------------------------------------------------------------------------------------------------


def needs(name, *overrides, gpus=1):
    recipe, sizes, episode_size = estimate_recipe(name, *overrides)
    return estimate_memory(
        recipe, sizes, recipe.rl.optim, estimate_rl_training(recipe, episode_size), gpus=gpus, kl=recipe.rl.kl
    )


def test_a_gpu_copies_the_prompt_for_each_reply():
    """For attention without a mask; a CPU's kernel reads it in place."""
    recipe, sizes, episode_size = estimate_recipe("paravt/para_grpo", "model.activation_checkpointing=false")
    training = estimate_rl_training(recipe, episode_size)
    trees = [tree for prompt in episode_size.assign_frame_budgets(1) for tree in plan_trees(prompt, 8, 10**6)]
    (tree,) = trees
    prefix = tree.prefix_length * 8
    row = replace(training, row_lengths=(tree.num_tokens,), micro_batch_size=1)
    whole = replace(row, max_row_prefix_tokens_of_branches=prefix)
    for device, attention, width in (("cpu", "branchwise", 0), ("cuda", "branchwise", 4096), ("cuda", "varlen", 1024)):
        placed = recipe.with_values({"model.device": device, "model.attention": attention})
        one, other = (estimate_memory(placed, sizes, recipe.rl.optim, cost).activations for cost in (row, whole))
        assert other - one == 36 * 2 * 2 * width * prefix  # layers, keys and values, bytes


def test_the_row_with_the_most_branches_decides():
    recipe, _, episode_size = estimate_recipe("paravt/para_grpo", reply_tokens=256, calls_per_turn=2)
    prompts = episode_size.assign_frame_budgets(recipe.rl.prompts_per_step)
    trees = [tree for prompt in prompts for tree in plan_trees(prompt, recipe.rl.group_size, recipe.rl.pack_length)]
    most = max(tree.prefix_length * len(tree.sample_indices) for tree in trees)
    assert estimate_rl_training(recipe, episode_size).max_row_prefix_tokens_of_branches >= most > 0
    (alone,) = plan_trees(prompts[0], 1, recipe.rl.pack_length)
    assert alone.prefix_length == 0  # one conversation has nothing to share


def test_memory_of_8b():
    P = 8_767_123_696
    found = needs("paravt/para_grpo", "model.trained_weights=all", gpus=8)
    # Sharded: float32 weights, gradients and two moments; gathered in bfloat16: the root unit and two of 36 layers of
    # 192,946,432 parameters, and the gradients of the root unit and of one layer.
    layer = 192_946_432
    root = P - 36 * layer
    held = (found.weights, found.gradients, found.optimizer_state, found.master_weights)
    assert held == (4 * P // 8 + 2 * (root + 2 * layer), 4 * P // 8 + 2 * (root + layer), 8 * P // 8, 0)
    assert found.logits == 5 * 4 * 2**27
    assert found.checkpointed_activations < found.activations / 10
    in_a_step = found.peak - sum(held)
    assert found.checkpointed_activations < in_a_step < found.checkpointed_activations + found.logits
    alone = needs("paravt/para_grpo", "model.trained_weights=all")
    # bfloat16 weights; float32 gradients, two moments and copies: 2 + 4 + 8 + 4 bytes a parameter.
    assert (alone.weights, alone.gradients) == (2 * P, 4 * P)
    assert (alone.optimizer_state, alone.master_weights) == (8 * P, 4 * P)
    assert alone.checkpointed_activations == found.checkpointed_activations  # every GPU makes passes of its own
    assert alone.peak == 18 * P + 2 * 2**25  # in the update: gradients in bfloat16 and activations need less


def test_a_frozen_vision_tower_needs_only_its_weights():
    P = 8_767_123_696
    T = P - count_vision_parameters()
    frozen, whole = needs("paravt/para_grpo"), needs("paravt/para_grpo", "model.trained_weights=all")
    held = (frozen.weights, frozen.gradients, frozen.optimizer_state, frozen.master_weights)
    assert held == (2 * P, 4 * T, 8 * T, 4 * T)
    assert frozen.checkpointed_activations < whole.checkpointed_activations
    muon = needs("tiny/base", "model.trained_weights=language_model", "rl.optim.name=muon")
    assert muon.optimizer_state < needs("tiny/base", "model.trained_weights=language_model").optimizer_state


def test_memory_of_8b_with_8_bit_moments_and_offloaded():
    P = 8_767_123_696
    whole = ("paravt/para_grpo", "model.trained_weights=all")
    assert needs(*whole, "rl.optim.name=adamw_8bit").optimizer_state == 2 * P + 2 * P // 64
    gpu = (*whole, "model.device=cuda")
    alone = needs(*gpu, "model.cpu_offload=true")
    held = (alone.weights, alone.gradients, alone.optimizer_state, alone.master_weights)
    assert held == (2 * P, 2 * P, 0, 0)
    assert 0 < alone.peak - 4 * P < 2 * P  # activations
    assert needs(*gpu).peak == 18 * P + 2 * 2**25  # in the update, with the workspaces of cuBLAS
    sharded, offloaded = needs(*gpu, gpus=8), needs(*gpu, "model.cpu_offload=true", gpus=8)
    assert sharded.peak - offloaded.peak == 2 * (4 * P // 8) + 8 * P // 8
    on_cpu = needs(*whole, "model.cpu_offload=true", "model.device=cpu")
    assert (on_cpu.optimizer_state, on_cpu.master_weights) == (8 * P, 4 * P)


def test_a_greedy_episode_is_planned_for_each_group():
    recipe, _, episode_size = estimate_recipe("paravt/para_grpo", "rl.advantage={estimator: remax}")
    rolled, trained = estimate_rollouts(recipe, episode_size), estimate_rl_training(recipe, episode_size)
    other, _, _ = estimate_recipe("paravt/para_grpo")
    assert (rolled.num_groups, rolled.num_episodes) == (7, 7 * 9)
    assert trained == estimate_rl_training(other, episode_size)


def test_float32_has_no_master_weights_and_adapters_are_small():
    assert needs("tiny/para_grpo").master_weights == 0
    whole, thin = (needs("paravt/para_grpo", f"model.{key}") for key in ("trained_weights=all", "lora_rank=64"))
    assert thin.gradients == 4 * resolve_model_sizes(load_recipe("paravt/para_grpo")).count_adapter_parameters(64)
    assert thin.weights > whole.weights
    assert thin.activations < whole.activations  # a frozen tower saves no activations


def count_vision_parameters():
    shapes = resolve_model_sizes(load_recipe("paravt/para_grpo")).shapes
    return sum(math.prod(shape) for name, shape in shapes.items() if ".visual." in name)


def test_reference_weights_follow_the_recipes_device():
    none, there = (
        needs("paravt/para_grpo", f"rl.kl={{advantage_coef: 0.01, reference_device: {place}}}")
        for place in ("cpu", "device")
    )
    assert (none.reference_weights, there.reference_weights) == (0, there.weights - 2 * count_vision_parameters())
    assert needs("paravt/para_grpo", "rl.kl={advantage_coef: 0, reference_device: device}").reference_weights == 0


def test_rollout_processes_have_models_and_kv_caches_beside_the_training():
    P = 8_767_123_696
    engine = "engine={name: local, settings: {kv_cache_tokens: 1000, prefix_cache_tokens: 500}}"
    whole, thin = ("model.trained_weights=all",), ("model.lora_rank=64",)
    num_adapters = resolve_model_sizes(load_recipe("paravt/para_grpo")).count_adapter_parameters(64)
    # Weights in bfloat16; keys and values of 8 heads with 128 numbers, in 36 layers.
    kv_cache = 1500 * 2 * 2 * 8 * 128 * 36
    cases = ((whole, "cpu", 1, P), (whole, "cuda", 1, P), (whole, "cuda", 8, P), (thin, "cuda", 1, P + num_adapters))
    for trained, device, gpus, num_weights in cases:
        overrides = (*trained, engine, "rl.max_staleness=0", f"model.device={device}", "rollouts.num_processes=3")
        alone = needs("paravt/para_grpo", *overrides, gpus=gpus)
        beside = needs("paravt/para_grpo", *overrides, "rollouts.executor=processes", gpus=gpus)
        processes = 3 * (2 * num_weights + kv_cache)
        assert (alone.rollout_processes, beside.rollout_processes) == (0, processes)
        assert beside == replace(alone, rollout_processes=processes, peak=alone.peak + processes)


def test_a_plan_has_a_line_for_rollout_processes_in_the_stages_that_sample():
    def get_labels(*overrides):
        table = build_plan("mine", load_recipe("tiny/para_grpo", overrides), PlanAssumptions())[-1]
        return table.header[1:], {label: cells for label, *cells in table.rows}

    processes = ("rollouts.executor=processes", "rollouts.num_processes=5")
    stages, labels = get_labels("validation.every=0")
    assert stages == ("RL", "SFT")
    _, validated = get_labels(*processes, "validation.every=1")
    _, unvalidated = get_labels(*processes, "validation.every=0")
    [line] = validated.keys() - labels.keys()
    assert "5" in line.split()
    amount = validated[line][0]
    assert (validated[line], unvalidated[line]) == ([amount, amount], [amount, format_bytes(0)])


def test_longer_rows_need_more_activations():
    small, large = (
        needs("paravt/para_grpo", f"rl.pack_length={row}", "rl.prompts_per_step=1") for row in (4096, 32768)
    )
    assert small.checkpointed_activations < large.checkpointed_activations
    assert small.weights == large.weights


def build_samples(renderer, count):
    """Yield conversations without shared prefixes: 16 frames of 16 visual tokens, 100 sampled tokens."""
    side = 4 * renderer.factor
    for number in range(count):
        times = [16.0 * number + at for at in range(16)]
        frames = [ImageRef(path="v", digest="d", time=time, width=side, height=side) for time in times]
        prompt = renderer.render(Ledger(), [Message(role="user", parts=(*frames, "What is it?"))])
        ledger = Ledger(segments=(prompt,)).append_completion(range(100, 200), logprobs=(-1.0,) * 100, version=0)
        yield TrainingSample(ledger=ledger, advantages=tuple(float(sampled) for sampled in ledger.loss_mask()))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_activations_match_a_real_forward_pass(tmp_path, family, checkpointing):
    make_tiny_model(str(tmp_path), family=family, hidden_size=256, num_layers=6)
    vlm = VisionLanguageModel(ModelConfig(path=str(tmp_path), activation_checkpointing=checkpointing))
    samples = list(build_samples(vlm.renderer, 2))
    T = len(samples[0].ledger)
    (batch,) = pack(samples, compute_positions=vlm.renderer.compute_position_ids, pack_length=T, micro_batch_size=2)
    held = {}

    def keep(tensor):
        held[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    vlm.model.train()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        forward(vlm, batch, load_pixels=FakeMediaLoader().load_pixels, temperature=1.0)
    weights = {parameter.untyped_storage().data_ptr() for parameter in vlm.model.parameters()}
    found = sum(tensor.untyped_storage().nbytes() for place, tensor in held.items() if place not in weights)
    passed = TrainingCost(
        unpacked_tokens=2 * T, visual_tokens=2 * 256, trained_tokens=2 * 100, row_lengths=(T, T), micro_batch_size=2
    )
    recipe = load_recipe("tiny/para_grpo", [f"model.path={tmp_path}"])
    estimate = estimate_memory(recipe, resolve_model_sizes(recipe), recipe.rl.optim, passed)
    if checkpointing:  # the layer that is computed again comes in the backward pass
        assert found < estimate.checkpointed_activations + estimate.logits < found * 4
    else:
        assert estimate.activations + estimate.logits == pytest.approx(found, rel=0.15)


# ---- the command ---------------------------------------------------------------------------------------------------


def test_resolved_settings_are_defaults_and_given_values():
    found = resolve_settings("environments", load_recipe("tiny/base").environment)
    assert (found["max_tool_turns"], found["parallel_tool_calls"], found["max_tool_result_tokens"]) == (2, True, 64)


def test_format_bytes():
    assert [format_bytes(n) for n in (0, 2000, 3 * 2**20, 512 * GIB)] == ["0 bytes", "2.0 KiB", "3.0 MiB", "512 GiB"]


def test_plan_has_a_table_per_configured_stage():
    recipe, sft, memory = build_plan("paravt/sft", load_recipe("paravt/sft"), PlanAssumptions())
    assert (recipe.title, memory.header) == ("paravt/sft", ("", "SFT"))
    assert ["SFT" in sft.title.split(), "RL" in sft.title.split()] == [True, False]
    tables = build_plan("paravt/para_grpo", load_recipe("paravt/para_grpo"), PlanAssumptions(), gpus=4)
    assert "RL" in tables[1].title.split()
    assert tables[-1].header == ("", "RL", "SFT")
    assert all(len(row) == len(table.header) for table in tables for row in table.rows)


IMAGES = "environments={image: {name: python, settings: {image_pixels: [1024, 262144], max_context_tokens: 3000}}}"


def test_every_environment_is_planned():
    recipe, sizes, _ = estimate_recipe("tiny/para_grpo", IMAGES)
    assumptions = PlanAssumptions(video_size=(512, 512))
    default, image = (estimate_environment(recipe, sizes, assumptions, name) for name in ("", "image"))
    assert default == estimate_episode(recipe, sizes, assumptions)
    # Without an overview a video has no visual tokens; an image of 512x512 has 32 x 32 tokens of 16x16 pixels.
    assert {(longest.num_frames, longest.visual_tokens) for longest in image.conversations} == {(0, 0), (1, 1024)}
    _, first, second, *_, largest = build_plan("mine", recipe, PlanAssumptions())
    assert ["RL" in table.title.split() for table in (first, second)] == [True, True]
    assert ["image" in table.title.split() for table in (first, second)] == [False, True]
    alone = build_plan("mine", load_recipe("tiny/para_grpo"), PlanAssumptions())[-1]
    assert largest.header == alone.header
    with raises(ConfigError, key="environments.image.settings.max_context_tokens", value=20):
        tight, sizes, _ = estimate_recipe("tiny/para_grpo", IMAGES.replace("3000", "20"))
        estimate_environment(tight, sizes, PlanAssumptions(), "image")


def test_check_names_every_bad_recipe(tmp_path):
    (tmp_path / "good.yaml").write_text("extends: tiny/para_grpo\n")
    (tmp_path / "typo.yaml").write_text(
        "extends: tiny/para_grpo\nrewards: {format_reward: {settings: {anchor_wieght: 1}}}\n"
    )
    (tmp_path / "large.yaml").write_text(
        "extends: paravt/para_grpo\nenvironment: {settings: {max_context_tokens: 1000}}\n"
    )
    done = run("recipes", "plan", tmp_path / "typo.yaml", tmp_path / "good.yaml", tmp_path / "large.yaml", "tiny/non")
    assert done.exit_code == 1
    unknown, typo, large = done.stderr.splitlines()  # what can't be loaded comes first
    assert "tiny/non" in unknown
    assert "typo.yaml: " in typo
    assert "anchor_wieght" in typo
    assert "large.yaml: " in large
    assert "environment.settings.max_context_tokens" in large
    assert "good.yaml" in done.stdout


def test_plan_takes_settings_and_assumptions():
    output = good(
        "recipes",
        "plan",
        "paravt/para_grpo",
        "rl.group_size=4",
        "--gpus",
        8,
        "--nodes",
        3,
        "--video-size",
        "640x360",
        "--reply-tokens",
        9,
    )
    assert {"28", "8", "3", "24", "640x360"} <= {*output.replace(",", " ").split()}


def test_run_recipe_is_planned_with_the_runs_model(tmp_path):
    make_tiny_model(str(tmp_path / "model"), hidden_size=64, num_layers=1)
    (tmp_path / "recipe.yaml").write_text("extends: tiny/para_grpo\nmodel: {path: model}\n")
    output = "".join(good("recipes", "plan", tmp_path / "recipe.yaml").split())
    assert f"{tmp_path / 'model'}:".replace(" ", "") in output
    (tmp_path / "model" / "config.json").unlink()
    assert str(tmp_path / "model") in bad("recipes", "plan", tmp_path / "recipe.yaml")
