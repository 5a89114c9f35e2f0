"""The packaged recipes: each can be used and planned, holds what was published, and differs as its name says."""

import pytest
from commands import bad

from saccade import plugins, preflight
from saccade.config import PACKAGED, load_recipe, recipe_names, recipe_path
from saccade.data.rows import write_tasks
from saccade.errors import ConfigError
from saccade.planning.tables import plan
from saccade.planning.talks import Assumed
from saccade.rollouts.stage import examined
from saccade.types import Kind, Task

NAMES = recipe_names()


def flat(value, prefix=""):
    """A nested mapping as dotted keys."""
    if not isinstance(value, dict):
        return {prefix.removesuffix("."): value}
    return {key: each for name, inner in value.items() for key, each in flat(inner, f"{prefix}{name}.").items()}


def settings(name):
    return flat(load_recipe(name).model_dump(mode="json"))


def changed(base, name):
    """What a recipe has that its base has otherwise or not at all; None where it lacks a key."""
    old, new = settings(base), settings(name)
    return {key: new.get(key) for key in sorted({*old, *new}) if old.get(key) != new.get(key)}


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_can_be_used_and_planned(name):
    recipe = load_recipe(name)
    preflight.check(recipe)
    assert recipe.agent.name in plugins.names("agents")
    grids = plan(name, recipe, Assumed(), gpus=2)
    assert grids[-1].title.startswith("Memory")


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_says_what_it_is_in_its_first_line(name):
    first = recipe_path(name).read_text().splitlines()[0]
    assert first.startswith("# ")
    assert first.endswith(".")
    assert len(first) < 130


def test_every_file_is_a_recipe():
    assert {path.suffix for path in PACKAGED.rglob("*") if path.is_file()} == {".yaml"}
    wanted = {"sft", "para_grpo", "vanilla_grpo"}
    ablations = {"anchoring_only", "gating_only", "no_tool_reward", "no_gamma", "sequential"}
    for place in ("paravt", "tiny"):
        assert {f"{place}/{name}" for name in wanted} | {f"{place}/ablations/{name}" for name in ablations} <= {*NAMES}


# ---- what was published --------------------------------------------------------------------------------------------

PUBLISHED = {
    "paravt/sft": {
        "model.published": "Qwen3-VL-8B-Instruct",
        "sft.optim.lr": 2e-5,
        "sft.optim.schedule": "cosine",
        "sft.optim.warmup": 0.05 * 1500,
        "sft.optim.weight_decay": 0.01,
        "sft.row_tokens": 8192,
        "sft.steps": 1500,
        "sft.save_every": 100,
        "agent.settings.overview_frames": 64,
        "agent.settings.overview_pixels": [784, 50176],
    },
    "paravt/para_grpo": {
        "rl.optim.lr": 2e-6,
        "rl.optim.schedule": "constant",
        "rl.prompts": 7,
        "rl.group": 8,
        "sampling.temperature": 0.7,
        "sampling.max_tokens": 2048,
        "agent.settings.max_turns": 3,
        "agent.settings.max_calls": 5,
        "agent.settings.think_prefix": True,
        "agent.settings.tools.crop_video.fps": 1.0,
        "agent.settings.tools.crop_video.frames": [1, 16],
        "agent.settings.tools.crop_video.pixels": [784, 50176],
        "agent.settings.result_tokens": 512,
        "rl.advantage.estimator": "mean_std",
        "rl.advantage.whiten": True,
        "rl.advantage.children": "shared",
        "rl.advantage.reward_scale": 10.0,
        "rl.advantage.reward_bias": -0.2,
        "rl.loss.clip_low": 0.2,
        "rl.loss.clip_high": 0.2,
        "rl.loss.behaviour_cap": 5.0,
        "rl.max_staleness": 2,
        "engine.name": "vllm",
        "gating.frames": [4, 8, 16, 32, 64],
        "rewards.format.settings.lam": 0.5,
        "rewards.tools.settings.mode": "graded",
    },
    "paravt/vanilla_grpo": {
        "agent.settings.think_prefix": False,
        "gating.frames": [],
        "rewards.format.settings.lam": 0.0,
        "rewards.format.settings.answer_suffix": False,
        "rl.prompts": 7,
    },
    "pyvision/image_rl": {
        "model.published": "Qwen2.5-VL-7B-Instruct",
        "agent.name": "code",
        "agent.settings.max_turns": 4,
        "agent.settings.image_pixels": [3136, 2000000],
        "agent.settings.context_tokens": 32768,
        "agent.settings.tools.python.max_images": 32,
        "evaluation.agent.max_turns": 30,
        "sampling.temperature": 1.0,
        "sampling.max_tokens": 10240,
        "rl.optim.lr": 1e-6,
        "rl.optim.schedule": "constant",
        "rl.prompts": 16,
        "rl.group": 8,
        "rl.kl.loss": 0.0,
        "rl.kl.reward": 0.0,
        "rl.advantage.estimator": "mean",
        "rl.advantage.whiten": False,
        "rl.select.oversample": 2.0,
        "rl.select.rank": "std",
        "rewards.tools.settings.mode": "accumulative",
        "rewards.tools.settings.bonus": 0.1,
    },
    "pyvision/video_rl": {
        "agent.settings.video": "runtime",
        "agent.settings.max_turns": 4,
        "evaluation.agent.max_turns": 30,
        "rl.prompts": 16,
    },
    "tiny/collapse_free": {
        "rl.select.oversample": 2.0,
        "rl.select.rank": "std",
        "rl.advantage.estimator": "mean",
        "rl.advantage.whiten": False,
        "agent.settings.max_turns": 4,
        "rewards.tools.settings.mode": "accumulative",
        "rewards.tools.settings.bonus": 0.1,
        "rewards.tools.settings.cap": 4,
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
    most = rewards["accuracy"].weight + rewards["format"].weight + 0.8 * rewards["tools"].weight
    assert advantage.reward_scale * (most + advantage.reward_bias) < advantage.reward_clip


# ---- what ablations change -----------------------------------------------------------------------------------------

FRAMES = {"paravt": [4, 8, 16, 32, 64], "tiny": [4, 8, 16, 32]}


@pytest.mark.parametrize("place", ["paravt", "tiny"])
def test_ablations_of_para_grpo_change_what_their_names_say(place):
    base = f"{place}/para_grpo"
    gone = dict.fromkeys(key for key in settings(base) if key.startswith("rewards.tools."))
    assert changed(base, f"{place}/ablations/anchoring_only") == {"gating.frames": []}
    assert changed(base, f"{place}/ablations/no_gamma") == {"rewards.format.settings.gamma": 0.0}
    assert changed(base, f"{place}/ablations/sequential") == {"agent.settings.dispatch": "sequential"}
    assert changed(base, f"{place}/ablations/no_tool_reward") == gone
    assert changed(f"{place}/vanilla_grpo", f"{place}/ablations/gating_only") == {"gating.frames": FRAMES[place]}
    assert changed(base, f"{place}/vanilla_grpo") == {
        "agent.settings.think_prefix": False,
        "gating.frames": [],
        "rewards.format.settings.answer_suffix": False,
        "rewards.format.settings.lam": 0.0,
    }


@pytest.mark.parametrize(
    ("base", "folder"),
    [("tiny/collapse_free", "tiny/collapse_free"), ("pyvision/image_rl", "pyvision/ablations")],
)
def test_ablations_of_collapse_free_change_what_their_names_say(base, folder):
    gone = dict.fromkeys(key for key in settings(base) if key.startswith("rewards.tools."))
    assert changed(base, f"{folder}/no_accumulative") == gone
    assert changed(base, f"{folder}/no_ranking") == {"rl.select.rank": "none"}
    assert changed(base, f"{folder}/std_normalisation") == {"rl.advantage.estimator": "mean_std"}
    assert changed(base, f"{folder}/turns_2") == {"agent.settings.max_turns": 2, "rewards.tools.settings.cap": 2}


def test_the_tiny_cold_start_is_the_same_for_all_about_videos():
    parts = ("seed", "model", "world", "sft", "evaluation")
    bases = {key: value for key, value in settings("tiny/base").items() if key.split(".")[0] in parts}
    for name in (name for name in NAMES if name.startswith("tiny/")):
        found = settings(name)
        if (found["world.media"], found["world.traces"]) != ("video", "calls"):
            continue  # traces of another kind
        assert {key: found[key] for key in bases} == bases, name


# ---- evaluation ----------------------------------------------------------------------------------------------------


def test_an_evaluation_may_have_an_agent_with_other_settings():
    recipe = load_recipe("tiny/para_grpo", ["evaluation.agent={max_turns: 30, context_tokens: 32768}"])
    agent = examined(recipe).agent
    assert agent.settings == {**recipe.agent.settings, "max_turns": 30, "context_tokens": 32768}
    assert recipe.agent.settings["max_turns"] == 2
    assert examined(load_recipe("tiny/para_grpo")) == load_recipe("tiny/para_grpo")
    with pytest.raises(ConfigError, match="agents/parallel has no setting 'max_turn'"):
        preflight.check(load_recipe("tiny/para_grpo", ["evaluation.agent={max_turn: 30}"]))


@pytest.mark.parametrize(
    ("name", "such"),
    [("paravt/para_grpo", "a folder with Qwen3-VL-8B-Instruct"), ("tiny/para_grpo", "a folder that `saccade model")],
)
def test_a_recipe_without_a_model_says_which_it_is_for(tmp_path, name, such):
    task = Task(id="w", question="?", media=(), kind=Kind.OPEN, gold="red")
    write_tasks(tmp_path / "tasks.jsonl", [task])
    said = bad("train", name, f"data.train={tmp_path}/tasks.jsonl", "model.device=cpu", "--out", tmp_path / "run")
    assert f"the recipe names no model; give --model, such as {such}" in said
    assert not (tmp_path / "run").exists()
