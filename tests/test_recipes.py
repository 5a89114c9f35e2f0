"""The packaged recipes: usable, planned, equal to the published settings, and different as their names say."""

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


def flat(value, prefix=""):
    """Flatten a nested mapping to dotted keys."""
    if not isinstance(value, dict):
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
    assert tables[-1].title.startswith("Estimated training memory")


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

PUBLISHED = {
    "paravt/sft": {
        "model.base_model": "Qwen3-VL-8B-Instruct",
        "sft.optim.lr": 2e-5,
        "sft.optim.schedule": "cosine",
        "sft.optim.warmup_steps": 0.05 * 1500,
        "sft.optim.weight_decay": 0.01,
        "sft.pack_length": 8192,
        "sft.steps": 1500,
        "sft.save_every": 100,
        "environment.settings.num_frames": 64,
        "environment.settings.frame_pixels": [784, 50176],
    },
    "paravt/para_grpo": {
        "rl.optim.lr": 2e-6,
        "rl.optim.schedule": "constant",
        "rl.prompts_per_step": 7,
        "rl.group_size": 8,
        "sampling.temperature": 0.7,
        "sampling.max_tokens": 2048,
        "environment.settings.max_turns": 3,
        "environment.settings.max_calls": 5,
        "environment.settings.force_think": True,
        "environment.settings.tools.crop_video.fps": 1.0,
        "environment.settings.tools.crop_video.frame_range": [1, 16],
        "environment.settings.tools.crop_video.frame_pixels": [784, 50176],
        "environment.settings.max_tool_result_tokens": 512,
        "rl.advantage.estimator": "grpo",
        "rl.advantage.whiten": True,
        "rl.advantage.sub_agent_credit": "shared",
        "rl.advantage.reward_scale": 10.0,
        "rl.advantage.reward_bias": -0.2,
        "rl.loss.settings.clip_low": 0.2,
        "rl.loss.settings.clip_high": 0.2,
        "rl.loss.stale_tis_cap": 5.0,
        "rl.max_staleness": 2,
        "engine.name": "vllm",
        "frame_budgets": [4, 8, 16, 32, 64],
        "rewards.format_reward.settings.anchor_weight": 0.5,
        "rewards.tool_use.settings.mode": "graded",
    },
    "paravt/vanilla_grpo": {
        "environment.settings.force_think": False,
        "frame_budgets": [],
        "rewards.format_reward.settings.anchor_weight": 0.0,
        "rewards.format_reward.settings.answer_suffix": False,
        "rl.prompts_per_step": 7,
    },
    "pyvision/image_rl": {
        "model.base_model": "Qwen2.5-VL-7B-Instruct",
        "environment.name": "python",
        "environment.settings.max_turns": 4,
        "environment.settings.image_pixels": [3136, 2000000],
        "environment.settings.max_context_tokens": 32768,
        "environment.settings.tools.python.max_images": 32,
        "evaluation.environment_settings.max_turns": 30,
        "sampling.temperature": 1.0,
        "sampling.max_tokens": 10240,
        "rl.optim.lr": 1e-6,
        "rl.optim.schedule": "constant",
        "rl.prompts_per_step": 16,
        "rl.group_size": 8,
        "rl.kl.loss_coef": 0.0,
        "rl.kl.reward_coef": 0.0,
        "rl.advantage.estimator": "dr_grpo",
        "rl.advantage.whiten": False,
        "rl.selection.oversample": 2.0,
        "rl.selection.rank_by": "reward_std",
        "rewards.tool_use.settings.mode": "accumulative",
        "rewards.tool_use.settings.bonus": 0.1,
    },
    "pyvision/video_rl": {
        "environment.settings.video_in_prompt": False,
        "environment.settings.max_turns": 4,
        "evaluation.environment_settings.max_turns": 30,
        "rl.prompts_per_step": 16,
    },
    "tiny/collapse_free": {
        "rl.selection.oversample": 2.0,
        "rl.selection.rank_by": "reward_std",
        "rl.advantage.estimator": "dr_grpo",
        "rl.advantage.whiten": False,
        "environment.settings.max_turns": 4,
        "rewards.tool_use.settings.mode": "accumulative",
        "rewards.tool_use.settings.bonus": 0.1,
        "rewards.tool_use.settings.cap": 4,
        "sampling.temperature": 1.0,
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_settings(name):
    found = settings(name)
    assert {key: found[key] for key in PUBLISHED[name]} == PUBLISHED[name]


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
    assert find_changes(base, f"{place}/ablations/sequential") == {"environment.settings.dispatch": "sequential"}
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
    [("tiny/collapse_free", "tiny/collapse_free"), ("pyvision/image_rl", "pyvision/ablations")],
)
def test_collapse_free_ablations_match_their_names(base, folder):
    gone = dict.fromkeys(key for key in settings(base) if key.startswith("rewards.tool_use."))
    assert find_changes(base, f"{folder}/no_accumulative") == gone
    assert find_changes(base, f"{folder}/no_ranking") == {"rl.selection.rank_by": "none"}
    assert find_changes(base, f"{folder}/std_normalization") == {"rl.advantage.estimator": "grpo"}
    assert find_changes(base, f"{folder}/turns_2") == {
        "environment.settings.max_turns": 2,
        "rewards.tool_use.settings.cap": 2,
    }


def test_tiny_video_recipes_share_their_cold_start():
    parts = ("seed", "model", "synthetic", "sft", "evaluation")
    bases = {key: value for key, value in settings("tiny/base").items() if key.split(".")[0] in parts}
    for name in (name for name in NAMES if name.startswith("tiny/")):
        found = settings(name)
        if (found["synthetic.media"], found["synthetic.demonstrations"]) != ("video", "tool_calls"):
            continue  # demonstrations of another kind
        assert {key: found[key] for key in bases} == bases, name


# ---- evaluation ----------------------------------------------------------------------------------------------------


def test_evaluation_may_change_environment_settings():
    recipe = load_recipe(
        "tiny/para_grpo", ["evaluation.environment_settings={max_turns: 30, max_context_tokens: 32768}"]
    )
    environment = apply_evaluation_settings(recipe).environment
    assert environment.settings == {**recipe.environment.settings, "max_turns": 30, "max_context_tokens": 32768}
    assert recipe.environment.settings["max_turns"] == 2
    assert apply_evaluation_settings(load_recipe("tiny/para_grpo")) == load_recipe("tiny/para_grpo")
    with raises(ConfigError, key="environment.settings.max_turn"):
        check_recipe(load_recipe("tiny/para_grpo", ["evaluation.environment_settings={max_turn: 30}"]))


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
