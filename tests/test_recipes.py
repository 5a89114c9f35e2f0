"""The packaged recipes: usable, planned, equal to the published settings, and different as their names say."""

import re
from pathlib import Path

import pytest
from commands import bad
from error_cases import raises

from saccade import plugins
from saccade.checks.estimates import PlanAssumptions
from saccade.checks.plan import build_plan
from saccade.checks.run_checks import check_recipe
from saccade.config.load import RECIPES_DIR, find_recipe, list_recipes, load_recipe
from saccade.data.dataset import write_items
from saccade.errors import ConfigError
from saccade.rollouts.components import apply_evaluation_settings
from saccade.types import AnswerType, Task

NAMES = list_recipes()
EVALUATIONS = ("pyvision/video_baseline",)  # recipes without a training


def flat(value, prefix=""):
    """Flatten a nested mapping to dotted keys; an empty one is a value."""
    if not isinstance(value, dict) or not value:
        return {prefix.removesuffix("."): value}
    return {key: leaf for name, inner in value.items() for key, leaf in flat(inner, f"{prefix}{name}.").items()}


def settings(name):
    return flat(load_recipe(name).model_dump(mode="json"))


def find_changes(base, name):
    """Return the values that differ from the base recipe's; None for a key that the recipe lacks."""
    old, new = settings(base), settings(name)
    return {key: new.get(key) for key in sorted({*old, *new}) if old.get(key) != new.get(key)}


@pytest.mark.parametrize("name", NAMES)
def test_recipe_is_usable_and_planned(name):
    recipe = load_recipe(name)
    check_recipe(recipe)
    assert recipe.environment.name in plugins.list_plugins("environments")
    tables = build_plan(name, recipe, PlanAssumptions(), gpus=2)
    is_trained = name not in EVALUATIONS
    assert tables[-1].title.startswith("Estimated training memory") == is_trained


@pytest.mark.parametrize("name", NAMES)
def test_first_line_describes_the_recipe(name):
    first = find_recipe(name).read_text().splitlines()[0]
    assert first.startswith("# ")
    assert first.endswith(".")
    assert len(first) < 130


def test_every_file_is_a_recipe():
    assert {path.suffix for path in RECIPES_DIR.rglob("*") if path.is_file()} == {".yaml"}
    names = {"sft", "para_grpo", "vanilla_grpo"}
    ablations = {"anchoring_only", "gating_only", "no_tool_reward", "no_gamma", "sequential"}
    for place in ("paravt", "tiny"):
        assert {f"{place}/{name}" for name in names} | {f"{place}/ablations/{name}" for name in ablations} <= {*NAMES}


# ---- what was published --------------------------------------------------------------------------------------------

# Recipe, key, published value. The values are those of the publications' own configuration files.
PUBLISHED = [
    ("paravt/sft", "model.memory_plan_model", "Qwen3-VL-8B-Instruct"),
    ("paravt/sft", "model.trained_weights", "all"),
    ("paravt/sft", "sft.optim.lr", 2e-5),
    ("paravt/sft", "sft.optim.betas", [0.9, 0.999]),
    ("paravt/sft", "sft.optim.schedule", "cosine"),
    ("paravt/sft", "sft.optim.warmup_steps", 0.05 * 1500),
    ("paravt/sft", "sft.optim.weight_decay", 0.01),
    ("paravt/sft", "sft.optim.max_grad_norm", 1.0),
    ("paravt/sft", "sft.pack_length", 8192),
    ("paravt/sft", "sft.tokens_per_step", 4 * 8 * 8192),  # rows per GPU, GPUs, tokens per row
    ("paravt/sft", "sft.order", "shuffled_epochs"),
    ("paravt/sft", "sft.demonstrations_per_prefix", 1),
    ("paravt/sft", "sft.steps", 1500),
    ("paravt/sft", "sft.save_every", 100),
    ("paravt/sft", "sft.checkpoints.keep_steps", [500]),  # where the published RL starts
    ("paravt/sft", "environment.settings.frame_pixels", [784, 50176]),
    ("paravt/sft", "environment.settings.num_frames", 64),
    ("paravt/sft", "environment.settings.overview_fps", 1.0),
    ("paravt/sft", "environment.settings.system_prompt_source", "row"),
    ("paravt/sft", "environment.settings.final_answer_prompt", ""),  # a forced answer in evaluation alone
    ("paravt/sft", "evaluation.frame_budgets", [64]),
    ("paravt/sft", "evaluation.environment_settings.overview_fps", None),
    ("paravt/sft", "evaluation.temperature", 0.0),
    ("paravt/sft", "evaluation.environment_settings.max_final_answer_tokens", 128),
    ("paravt/sft", "evaluation.environment_settings.max_final_choice_tokens", 64),
    ("paravt/sft", "environment.settings.tools.crop_video.default_question", ""),
    ("paravt/sft", "validation.every", 0),
    ("paravt/para_grpo", "model.trained_weights", "language_model"),
    ("paravt/para_grpo", "rl.optim.lr", 2e-6),
    ("paravt/para_grpo", "rl.optim.betas", [0.9, 0.999]),
    ("paravt/para_grpo", "rl.optim.weight_decay", 0.01),
    ("paravt/para_grpo", "rl.optim.schedule", "constant"),
    ("paravt/para_grpo", "rl.optim.warmup_steps", 0),
    ("paravt/para_grpo", "rl.optim.max_grad_norm", 1.0),
    ("paravt/para_grpo", "rl.steps", 54),
    ("paravt/para_grpo", "rl.save_every", 5),
    ("paravt/para_grpo", "rl.prompts_per_step", 7),
    ("paravt/para_grpo", "rl.group_size", 8),
    ("paravt/para_grpo", "rl.epochs_per_batch", 1),
    ("paravt/para_grpo", "rl.num_mini_batches", 1),
    ("paravt/para_grpo", "rl.max_staleness", 2),
    ("paravt/para_grpo", "rl.filters.reward_std", None),
    ("paravt/para_grpo", "rl.selection.oversample", 1.0),
    ("paravt/para_grpo", "rl.advantage.estimator", "grpo"),
    ("paravt/para_grpo", "rl.advantage.settings.std", "sample"),
    ("paravt/para_grpo", "rl.advantage.settings.epsilon", 1e-5),
    ("paravt/para_grpo", "rl.advantage.whiten", "tokens"),
    ("paravt/para_grpo", "rl.advantage.reward_scale", 10.0),
    ("paravt/para_grpo", "rl.advantage.reward_bias", -0.2),
    ("paravt/para_grpo", "rl.loss.name", "ppo_clip"),
    ("paravt/para_grpo", "rl.loss.old_logprobs", "trainer"),
    ("paravt/para_grpo", "rl.loss.settings.clip_low", 0.2),
    ("paravt/para_grpo", "rl.loss.settings.clip_high", 0.2),
    ("paravt/para_grpo", "rl.loss.tis_cap", 5.0),
    ("paravt/para_grpo", "rl.loss.stale_tis_cap", 5.0),
    ("paravt/para_grpo", "rl.loss.above_tis_cap", "mask"),
    ("paravt/para_grpo", "rl.loss.above_stale_tis_cap", "mask"),
    ("paravt/para_grpo", "rl.loss.aggregation", "token_mean"),
    ("paravt/para_grpo", "rl.kl.advantage_coef", 0.01),
    ("paravt/para_grpo", "rl.kl.penalty_estimator", "k1"),
    ("paravt/para_grpo", "rl.kl.loss_coef", 0.0),
    ("paravt/para_grpo", "sampling.temperature", 0.7),
    ("paravt/para_grpo", "sampling.max_tokens", 2048),
    ("paravt/para_grpo", "environment.settings.max_tool_turns", 3),
    ("paravt/para_grpo", "environment.settings.max_calls_per_turn", 5),
    ("paravt/para_grpo", "environment.settings.force_think", True),
    ("paravt/para_grpo", "environment.settings.tools.crop_video.fps", 1.0),
    ("paravt/para_grpo", "environment.settings.tools.crop_video.frame_range", [1, 16]),
    ("paravt/para_grpo", "environment.settings.tools.crop_video.frame_pixels", [784, 50176]),
    ("paravt/para_grpo", "environment.settings.max_tool_result_tokens", 512),
    ("paravt/para_grpo", "frame_budgets", [4, 8, 16, 32, 64]),
    ("paravt/para_grpo", "rewards.accuracy.weight", 1.0),
    ("paravt/para_grpo", "rewards.accuracy.settings.answer_types.open.mode", "f1"),
    ("paravt/para_grpo", "rewards.format_reward.weight", 1.0),
    ("paravt/para_grpo", "rewards.format_reward.settings.anchor_weight", 0.5),
    ("paravt/para_grpo", "rewards.tool_use.weight", 1.0),
    ("paravt/para_grpo", "rewards.tool_use.settings.mode", "graded"),
    ("paravt/vanilla_grpo", "environment.settings.force_think", False),
    ("paravt/vanilla_grpo", "frame_budgets", []),
    ("paravt/vanilla_grpo", "rewards.format_reward.weight", 1.0),
    ("paravt/vanilla_grpo", "rewards.format_reward.settings.anchor_weight", 0.0),
    ("paravt/vanilla_grpo", "rewards.format_reward.settings.answer_suffix", False),
    ("paravt/vanilla_grpo", "rl.prompts_per_step", 7),
    ("pyvision/sft", "sft.order", "shuffled_epochs"),
    ("pyvision/image_rl", "model.memory_plan_model", "Qwen2.5-VL-7B-Instruct"),
    ("pyvision/video_rl", "rewards.accuracy.settings.judge.model", "Qwen2.5-72B-Instruct"),
    ("pyvision/image_rl", "model.trained_weights", "language_model"),
    ("pyvision/image_rl", "engine.name", "vllm"),
    ("pyvision/image_rl", "environment.name", "python"),
    ("pyvision/image_rl", "environment.settings.max_tool_turns", 4),
    ("pyvision/image_rl", "environment.settings.image_pixels", [3136, 2000000]),
    ("pyvision/image_rl", "environment.settings.tools.python.max_images", 32),
    ("pyvision/image_rl", "sampling.temperature", 1.0),
    ("pyvision/image_rl", "sampling.max_tokens", 10240),
    ("pyvision/image_rl", "rl.steps", 700),
    ("pyvision/image_rl", "rl.save_every", 10),
    ("pyvision/image_rl", "rl.optim.lr", 1e-6),
    ("pyvision/image_rl", "rl.optim.betas", [0.9, 0.999]),
    ("pyvision/image_rl", "rl.optim.weight_decay", 0.01),
    ("pyvision/image_rl", "rl.optim.schedule", "constant"),
    ("pyvision/image_rl", "rl.filters.statuses.drop", ["environment_error", "aborted", "length", "context_full"]),
    ("pyvision/image_rl", "rl.filters.require_tool_image", {}),
    ("pyvision/image_rl", "rl.filters.reward_std", {}),
    ("pyvision/image_rl", "rl.prompts_per_step", 64),
    ("pyvision/image_rl", "rl.num_mini_batches", 4),  # updates on 16 prompts each
    ("pyvision/image_rl", "rl.epochs_per_batch", 1),
    ("pyvision/image_rl", "rl.loss.old_logprobs", "trainer"),
    ("pyvision/image_rl", "rl.loss.aggregation", "token_mean"),
    ("pyvision/image_rl", "rl.group_size", 8),
    ("pyvision/image_rl", "rl.kl.loss_coef", 0.0),
    ("pyvision/image_rl", "rl.kl.advantage_coef", 0.0),
    ("pyvision/image_rl", "rl.advantage.estimator", "dr_grpo"),
    ("pyvision/image_rl", "rl.advantage.whiten", "none"),
    ("pyvision/image_rl", "rl.loss.settings.dual_clip", 3.0),
    ("pyvision/image_rl", "rl.selection.round_size", 32),
    ("pyvision/image_rl", "rl.selection.oversample", 1.0),
    ("pyvision/image_rl", "rl.selection.rank_by", "reward_std"),
    ("pyvision/image_rl", "rl.selection.max_sampling_rounds", None),
    ("pyvision/image_rl", "rewards.tool_use.settings.mode", "accumulative"),
    ("pyvision/image_rl", "rewards.tool_use.settings.bonus", 0.1),
    ("pyvision/image_rl", "rewards.accuracy.settings.judge.model", "Qwen2.5-72B-Instruct"),
    ("pyvision/image_rl", "validation.every", 20),
    ("pyvision/image_rl", "rewards.accuracy.settings.judge.max_answer_chars", 999),
    ("pyvision/image_rl", "validation.num_tasks", 0),  # all
    ("pyvision/image_rl", "validation.modes", ["greedy"]),
    ("pyvision/image_rl", "validation.environment_settings.max_tool_turns", 29),  # 30 replies
    ("pyvision/image_rl", "environment.settings.system_prompt_source", "row"),
    ("pyvision/image_rl", "environment.settings.final_answer_prompt", ""),
    ("pyvision/image_rl", "rl.max_staleness", 0),
    ("pyvision/sft", "model.memory_plan_model", "Qwen2.5-VL-7B-Instruct"),
    ("pyvision/sft", "environment.settings.system_prompt_source", "row"),
    ("pyvision/video_baseline", "environment.name", "single_turn"),
    ("pyvision/video_baseline", "environment.settings.overview_fps", 1.0),
    ("pyvision/video_baseline", "evaluation.temperature", 0.01),
    ("pyvision/mixed_rl", "environments.pyvision_gym_wo_video_hint.settings.video_in_prompt", False),
    ("pyvision/mixed_rl", "environments.pyvision_gym_wo_image_hint.settings.image_in_prompt", False),
    ("pyvision/mixed_rl", "environments.pyvision_gym_w_image_hint.settings.max_tool_turns", 4),
    ("pyvision/image_rl", "evaluation.temperature", 0.01),
    ("pyvision/image_rl", "evaluation.benchmarks.vstar", ["evaluation.num_samples=32"]),
    ("pyvision/image_rl", "evaluation.environment_settings.max_tool_turns", 30),
    ("pyvision/mixed_rl", "rl.selection.round_size", 32),
    ("pyvision/mixed_rl", "rl.selection.max_video_share", 16 / 32),
    ("pyvision/video_rl", "rl.selection.round_size", 16),  # the most videos of a round
    ("pyvision/video_rl", "environment.settings.video_in_prompt", False),
    ("pyvision/video_rl", "environment.settings.max_tool_turns", 4),
    ("pyvision/video_rl", "evaluation.environment_settings.max_tool_turns", 30),
    ("tiny/pyvision_crop", "rl.selection.oversample", 2.0),
    ("tiny/pyvision_crop", "rl.selection.rank_by", "reward_std"),
    ("tiny/pyvision_crop", "rl.advantage.estimator", "dr_grpo"),
    ("tiny/pyvision_crop", "rl.advantage.whiten", "none"),
    ("tiny/pyvision_crop", "environment.settings.max_tool_turns", 4),
    ("tiny/pyvision_crop", "rewards.tool_use.settings.mode", "accumulative"),
    ("tiny/pyvision_crop", "rewards.tool_use.settings.bonus", 0.1),
    ("tiny/pyvision_crop", "rewards.tool_use.settings.cap", 4),
    ("tiny/pyvision_crop", "sampling.temperature", 1.0),
]
# Recipe, key, our value, and a part of the comment beside its line, which states what was published instead.
DEVIATIONS = [
    ("paravt/sft", "sft.environment_settings.max_tool_turns", 30, "published SFT has no limit of turns"),
    ("paravt/sft", "sft.checkpoints.last", 2, "all 15 were kept as published"),
    ("paravt/sft", "sft.pack_length", 8192, "published SFT drops it"),
    ("paravt/para_grpo", "engine.name", "vllm", "SGLang was published"),
    ("paravt/para_grpo", "rl.filters.statuses.drop", ["environment_error", "aborted"], "none was published"),
    ("paravt/para_grpo", "rewards.tool_use.settings.threshold", 0.5, "any accuracy above 0 was published"),
    ("paravt/para_grpo", "rl.advantage.sub_agent_advantage", "shared", "published code trains no sub-agent"),
    ("paravt/para_grpo", "rl.advantage.reward_clip", 40.0, "20 was published"),
    ("pyvision/image_rl", "rewards.accuracy.settings.skip_judge_if_equal", True, "ours: a rule decides equal answers"),
    ("pyvision/image_rl", "rewards.accuracy.settings.threshold", 0.5, "the published code rewards these"),
    ("pyvision/image_rl", "rewards.tool_use.settings.count", "informative", "executed was published"),
    ("pyvision/image_rl", "validation.every", 20, "ours: the first precedes the first step"),
    ("pyvision/image_rl", "rl.loss.tis_cap", 2.0, "none was published"),
    ("pyvision/image_rl", "rl.selection.max_sampling_rounds", None, "at most about one pass over the tasks"),
    (
        "pyvision/image_rl",
        "environment.settings.max_context_tokens",
        52480,
        "32,000 tokens of prompt and 20,480 of response were published",
    ),
]


@pytest.mark.parametrize("name", sorted({recipe for recipe, _, _ in PUBLISHED}))
def test_published_settings(name):
    values = settings(name)
    published = {key: value for recipe, key, value in PUBLISHED if recipe == name}
    assert {key: values[key] for key in published} == published


@pytest.mark.parametrize(("name", "key", "value", "comment"), DEVIATIONS, ids=lambda value: str(value)[:40])
def test_deviations_are_named_beside_their_lines(name, key, value, comment):
    assert settings(name)[key] == value
    *_, section, leaf = key.split(".")
    lines = [line for line in find_recipe(name).read_text().splitlines() if f"{leaf}:" in line or f"{section}:" in line]
    assert any(comment in line.partition("#")[2] for line in lines)


def test_no_reachable_reward_is_clipped():
    advantage, rewards = load_recipe("paravt/para_grpo").rl.advantage, load_recipe("paravt/para_grpo").rewards
    # accuracy 1, format 1, tools at most 0.3 + 0.5
    most = rewards["accuracy"].weight + rewards["format_reward"].weight + 0.8 * rewards["tool_use"].weight
    assert advantage.reward_scale * (most + advantage.reward_bias) < advantage.reward_clip


# ---- what ablations change -----------------------------------------------------------------------------------------

FRAMES = {"paravt": [4, 8, 16, 32, 64], "tiny": [4, 8, 16, 32]}


@pytest.mark.parametrize("place", ["paravt", "tiny"])
def test_para_grpo_ablations_match_their_names(place):
    base = f"{place}/para_grpo"
    gone = dict.fromkeys(key for key in settings(base) if key.startswith("rewards.tool_use."))
    assert find_changes(base, f"{place}/ablations/anchoring_only") == {"frame_budgets": []}
    assert find_changes(base, f"{place}/ablations/no_gamma") == {"rewards.format_reward.settings.gamma": 0.0}
    assert find_changes(base, f"{place}/ablations/sequential") == {"environment.settings.parallel_tool_calls": False}
    assert find_changes(base, f"{place}/ablations/no_tool_reward") == gone
    assert find_changes(f"{place}/vanilla_grpo", f"{place}/ablations/gating_only") == {"frame_budgets": FRAMES[place]}
    assert find_changes(base, f"{place}/vanilla_grpo") == {
        "environment.settings.force_think": False,
        "frame_budgets": [],
        "rewards.format_reward.settings.answer_suffix": False,
        "rewards.format_reward.settings.anchor_weight": 0.0,
    }


@pytest.mark.parametrize(
    ("base", "folder"),
    [("tiny/pyvision_crop", "tiny/pyvision_crop"), ("pyvision/image_rl", "pyvision/ablations")],
)
def test_collapse_free_ablations_match_their_names(base, folder):
    gone = dict.fromkeys(key for key in settings(base) if key.startswith("rewards.tool_use."))
    assert find_changes(base, f"{folder}/no_accumulative") == gone
    assert find_changes(base, f"{folder}/no_ranking") == {"rl.selection.rank_by": "none"}
    # The published code of PyVision-RL divides by the std of a sample.
    std = {} if base == folder else {"rl.advantage.settings": None, "rl.advantage.settings.std": "sample"}
    assert find_changes(base, f"{folder}/std_normalization") == {"rl.advantage.estimator": "grpo", **std}
    assert find_changes(base, f"{folder}/turns_2") == {
        "environment.settings.max_tool_turns": 2,
        "rewards.tool_use.settings.cap": 2,
    }


def test_tiny_video_recipes_share_their_cold_start():
    parts = ("seed", "model", "synthetic", "sft", "evaluation")
    bases = {key: value for key, value in settings("tiny/base").items() if key.split(".")[0] in parts}
    for name in (name for name in NAMES if name.startswith("tiny/")):
        found = settings(name)
        kind = found["synthetic.media"], found["synthetic.tasks"], found["synthetic.demonstrations"]
        if kind != ("video", "tiling", "tool_calls"):
            continue  # demonstrations of another kind
        assert {key: found[key] for key in bases} == bases, name


# ---- evaluation ----------------------------------------------------------------------------------------------------


def test_evaluation_may_change_environment_settings():
    recipe = load_recipe(
        "tiny/para_grpo", ["evaluation.environment_settings={max_tool_turns: 30, max_context_tokens: 32768}"]
    )
    environment = apply_evaluation_settings(recipe).environment
    assert environment.settings == {**recipe.environment.settings, "max_tool_turns": 30, "max_context_tokens": 32768}
    assert recipe.environment.settings["max_tool_turns"] == 2
    assert apply_evaluation_settings(load_recipe("tiny/para_grpo")) == load_recipe("tiny/para_grpo")
    with raises(ConfigError, key="environment.settings.max_tool_turn"):
        check_recipe(load_recipe("tiny/para_grpo", ["evaluation.environment_settings={max_tool_turn: 30}"]))


@pytest.mark.parametrize(
    ("name", "example"),
    [("paravt/para_grpo", "Qwen3-VL-8B-Instruct"), ("tiny/para_grpo", "saccade model tiny")],
)
def test_recipe_without_a_model_names_an_example(tmp_path, name, example):
    task = Task(id="w", question="?", media=(), answer_type=AnswerType.OPEN, ground_truth="red")
    write_items(tmp_path / "tasks.jsonl", [task])
    error = bad("train", name, f"data.train={tmp_path}/tasks.jsonl", "model.device=cpu", "--out", tmp_path / "run")
    assert "--model" in error
    assert example in error
    assert not (tmp_path / "run").exists()


# ---- the table of the documentation ----------------------------------------------------------------------------------

TESTS = Path(__file__).parent
PAGE_LINES = (TESTS.parent / "docs" / "published.md").read_text().splitlines()
TABLE_ROWS = [line for line in PAGE_LINES if line.startswith("| ") and not re.match(r"\| (setting|function) \|", line)]


@pytest.mark.parametrize("row", TABLE_ROWS, ids=lambda row: row.split("|")[1].strip())
def test_every_published_setting_names_what_holds_it(row):
    """A key is in the named table of this file; a test, a file or a folder of tests exists."""
    cell = row.rstrip("|").rpartition("| ")[2]
    names = re.findall(r"`(.+?)`", cell)
    assert names
    keys = {"PUBLISHED": {key for _, key, _ in PUBLISHED}, "DEVIATIONS": {key for _, key, *_ in DEVIATIONS}}
    table = ""
    for name in names:
        if name in keys:
            table = name
        elif "/" in name or ".py" in name:
            path, _, function = name.partition("::")
            file = TESTS / path
            assert file.exists(), name
            assert not function or f"def {function}(" in file.read_text(), name
        else:
            assert name in keys[table], f"{name} is not in {table}"
