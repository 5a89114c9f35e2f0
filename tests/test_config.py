"""Recipes: the packaged ones load; each error has the key and the rejected value."""

import pytest
from error_cases import raises

from saccade import plugins
from saccade.config import load
from saccade.errors import ConfigError
from saccade.rewards.compose import compose_rewards


@pytest.mark.parametrize("name", load.list_recipes())
def test_packaged_recipes_load_and_survive_a_round_trip(name, tmp_path):
    recipe = load.load_recipe(name)
    path = tmp_path / "recipe.yaml"
    path.write_text(load.dump_recipe(recipe))
    assert load.load_recipe(str(path)) == recipe


@pytest.mark.parametrize("name", load.list_recipes())
def test_packaged_recipes_name_plugins_and_settings_that_exist(name):
    recipe = load.load_recipe(name)
    plugins.resolve("environments", recipe.environment.name, recipe.environment.settings)
    compose_rewards(recipe.rewards)
    assert recipe.engine.name in plugins.list_plugins("engines")


def test_vanilla_grpo_is_para_grpo_without_gating_and_anchoring():
    para, vanilla = load.load_recipe("tiny/para_grpo"), load.load_recipe("tiny/vanilla_grpo")
    assert para.frame_budgets == (4, 8, 16, 32)
    assert vanilla.frame_budgets == ()
    assert vanilla.rewards["format_reward"].settings["anchor_weight"] == 0.0
    assert vanilla.environment.settings["force_think"] is False
    assert vanilla.rl == para.rl
    assert vanilla.sft == para.sft


def test_overrides_are_yaml_and_apply_last():
    recipe = load.load_recipe(
        "tiny/para_grpo", ["rl.optim.lr=1e-6", "rl.optim.lr=2e-6", "frame_budgets=[2]", "rl.loss.settings.dual_clip=3"]
    )
    assert recipe.rl.optim.lr == 2e-6
    assert recipe.frame_budgets == (2,)
    assert recipe.rl.loss.settings["dual_clip"] == 3
    assert recipe.rl.optim.warmup_steps == 10


SERVERS, NAME = "engine.settings.servers=[http://a:1]", "engine.name=vllm"


@pytest.mark.parametrize(
    "order", [[SERVERS, NAME], [NAME, SERVERS], [SERVERS, "seed=3", NAME], ["seed=3", NAME, SERVERS]]
)
def test_settings_belong_to_the_final_plugin_in_any_order_of_overrides(order):
    recipe = load.load_recipe("tiny/para_grpo", order)
    assert (recipe.engine.name, recipe.engine.settings) == ("vllm", {"servers": ["http://a:1"]})


def test_another_plugin_name_drops_the_settings_of_the_previous_one():
    engine = load.load_recipe("tiny/para_grpo", [NAME, SERVERS, "engine.name=local"]).engine
    assert (engine.name, engine.settings) == ("local", {})
    whole = "engine={name: vllm, settings: {max_retries: 2}}"
    assert load.load_recipe("tiny/para_grpo", [whole, "engine.name=sglang"]).engine.settings == {}


def test_null_drops_a_reward_term():
    assert set(load.load_recipe("tiny/para_grpo", ["rewards.tool_use=null"]).rewards) == {"accuracy", "format_reward"}


def test_packaged_recipes_and_overrides_are_parsed_once(monkeypatch):
    """A list of the ablation sets loads 145 recipes, most of them with the same bases and overrides."""
    overrides = ["rl.group_size=3", "environment.settings.crop_sizes=[7, 9]"]
    load.load_recipe("tiny/para_grpo", overrides)
    monkeypatch.setattr(load, "parse_yaml", None)
    assert load.load_recipe("tiny/para_grpo", overrides[:1]).rl.group_size == 3
    load.load_recipe("tiny/para_grpo", overrides).environment.settings["crop_sizes"].append(11)
    assert load.load_recipe("tiny/para_grpo", overrides).environment.settings["crop_sizes"] == [7, 9]


def test_settings_that_a_plugin_changes_stay_in_its_recipe():
    """Packaged recipes are cached."""
    pixels = load.load_recipe("paravt/ablations/anchoring_only").environment.settings["frame_pixels"]
    before = tuple(pixels)
    pixels.clear()
    assert tuple(load.load_recipe("paravt/ablations/anchoring_only").environment.settings["frame_pixels"]) == before


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("rl.optim.lrr=1", "rl.optim.lrr", 1),
        ("optim.lr=1", "optim.lr", 1),
        ("rewards.format_reward.anchor_weight=1", "rewards.format_reward.anchor_weight", 1),
        ("rl.optim.lr=fast", "rl.optim.lr", "fast"),
        ("rl.group_size=1", "rl.group_size", 1),
        ("rl.steps=0", "rl.steps", 0),
        ("rollouts.ray.address=head", "rollouts.ray.address", "head"),
        ("rollouts.ray.address='http://head:6379'", "rollouts.ray.address", "http://head:6379"),
        ("environment=tool_calling", "environment", "tool_calling"),
        ("frame_budgets=[1, x]", "frame_budgets.1", "x"),
        ("frame_budgets=[8, 0]", "frame_budgets.1", 0),
        ("evaluation.frame_budgets=[-4]", "evaluation.frame_budgets.0", -4),
        ("sft.optim.betas=[0.9, 1]", "sft.optim.betas.1", 1),
        ("rl.selection.rank_by=lenght", "rl.selection.rank_by", "lenght"),
        ("rl.steps", "rl.steps", None),
        ("synthetic={demonstrations: python, fps: 2.5}", "synthetic.fps", 2.5),
        ("synthetic={demonstrations: python, event_seconds: 0.5}", "synthetic.event_seconds", 0.5),
        ("synthetic={demonstrations: python, haystack: /clips}", "synthetic.haystack", "/clips"),
        ("synthetic.model.hidden_size=100", "synthetic.model.hidden_size", 100),
        ("synthetic.model={num_layers: 0}", "synthetic.model.num_layers", 0),
        ("rl.optim.lr=[", "rl.optim.lr", None),
        ("model.path=", "model.path", None),
    ],
)
def test_wrong_override_raises_config_error(override, key, value):
    with raises(ConfigError, key=key, value=value):
        load.load_recipe("tiny/para_grpo", [override])


@pytest.mark.parametrize(
    ("override", "key", "suggestions"),
    [
        ("rl.optim.lrr=1", "rl.optim.lrr", ["rl.optim.lr?"]),
        ("optim.lr=1", "optim.lr", ["rl.optim.lr ", "sft.optim.lr?"]),
        ("rewards.format_reward.lam=1", "rewards.format_reward.lam", ["weight", "settings"]),
    ],
)
def test_unknown_key_suggests_the_nearest_keys(override, key, suggestions):
    with raises(ConfigError, key=key, value=1) as caught:
        load.load_recipe("tiny/para_grpo", [override])
    assert all(suggestion in str(caught.value) for suggestion in suggestions)


def write(folder, **files):
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text)
    return str(folder / f"{next(iter(files))}.yaml")


def test_extends_by_relative_path_list_and_name(tmp_path):
    path = write(
        tmp_path,
        mine="extends: [tiny/base, ./more.yaml]\nseed: 3\n",
        more="seed: 2\nrl: {steps: 7}\n",
    )
    recipe = load.load_recipe(path)
    assert (recipe.seed, recipe.rl.steps, recipe.rl.optim.lr) == (3, 7, 1.5e-4)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("extends: ./mine.yaml\n", "extends"),
        ("extends: ./none.yaml\n", "{folder}/none.yaml"),
        ("extends: tiny/bsae\n", "recipe"),
        ("seed: 1\nseed: 2\n", "{folder}/mine.yaml"),
        ("- 1\n", "{folder}/mine.yaml"),
        ("rl:\n  step: 1\n", "rl.step"),
        ("extends: 3\n", "extends"),
    ],
)
def test_wrong_file_raises_config_error(tmp_path, text, key):
    with raises(ConfigError, key=key.format(folder=tmp_path)):
        load.load_recipe(write(tmp_path, mine=text))


def test_unknown_recipe_and_missing_file_raise(tmp_path):
    with raises(ConfigError, key="recipe", value="tiny/paragrpo") as caught:
        load.load_recipe("tiny/paragrpo")
    assert "'tiny/para_grpo'" in str(caught.value)
    with raises(ConfigError, key=str(tmp_path / "none.yaml")):
        load.load_recipe(str(tmp_path / "none.yaml"))


@pytest.mark.parametrize(
    ("overrides", "key", "value"),
    [
        (["rl.loss.old_logprobs=engine"], "rl.loss.old_logprobs", "engine"),
        (["rl.kl.loss_coef=0.1", "rl.kl.advantage_coef=0.2"], "rl.kl.loss_coef", 0.1),
        (["rl.kl.loss_coef=0.1", "rl.kl.penalty_estimator=k3"], "rl.kl.penalty_estimator", "k3"),
        (["rl={prompts_per_step: 4, num_mini_batches: 5}"], "rl.num_mini_batches", 5),
        (["rl.simulated_staleness=1", "rl.max_staleness=2"], "rl.simulated_staleness", 1),
    ],
)
def test_contradicting_settings_name_a_key(overrides, key, value):
    with raises(ConfigError, key=key, value=value):
        load.load_recipe("tiny/base", overrides)


def test_another_plugin_does_not_inherit_settings():
    recipe = load.load_recipe("tiny/para_grpo", ["environment.name=single_turn", "environment.settings.num_frames=3"])
    assert (recipe.environment.name, recipe.environment.settings) == ("single_turn", {"num_frames": 3})
    same = load.load_recipe(
        "tiny/para_grpo", ["environment.name=tool_calling", "environment.settings.max_tool_turns=1"]
    )
    assert same.environment.settings == {**load.load_recipe("tiny/para_grpo").environment.settings, "max_tool_turns": 1}
    assert (
        load.load_recipe("tiny/para_grpo", ["sft.optim.name=adamw"]).sft.optim.lr == 3e-3
    )  # optimizers share their settings


@pytest.mark.parametrize("name", load.list_recipes())
def test_a_filter_is_added_to_the_default_ones(name):
    assert {"statuses", "reward_std", "length"} <= load.load_recipe(
        name, ["rl.filters.length.max_tokens=9"]
    ).rl.filters.keys()
    before, off = load.load_recipe(name).rl, load.load_recipe(name, ["rl.filters.statuses=null"]).rl
    assert "statuses" in before.active_filters
    assert off.active_filters.keys() == before.active_filters.keys() - {"statuses"}


def test_a_filter_stays_off_in_a_run_folder_and_in_recipes_that_extend_it(tmp_path):
    (tmp_path / "off.yaml").write_text("extends: tiny/base\nrl: {filters: {statuses: null}}\n")
    (tmp_path / "own.yaml").write_text("extends: off.yaml\nseed: 3\n")
    recipe = load.load_recipe(str(tmp_path / "own.yaml"))
    assert recipe.rl.active_filters.keys() == {"reward_std"}
    (tmp_path / "run.yaml").write_text(load.dump_recipe(recipe))
    assert load.load_recipe(str(tmp_path / "run.yaml")) == recipe
    assert "statuses" in load.load_recipe(str(tmp_path / "own.yaml"), ["rl.filters.statuses={}"]).rl.active_filters


def test_settings_of_an_estimator_belong_to_the_final_one_in_any_order(tmp_path):
    (tmp_path / "median.py").write_text("def median(rewards_G, total_rewards_G, *, scale: float = 1.0): ...\n")
    overrides = ["rl.advantage.settings.scale=2.0", f"rl.advantage.estimator={tmp_path / 'median.py'}"]
    for order in (overrides, overrides[::-1]):
        assert load.load_recipe("tiny/base", order).rl.advantage.settings == {"scale": 2.0}


@pytest.mark.parametrize("key", ["gating.frame_budgets", "environments.a.b.name", "agent.name"])
def test_hints_name_keys_that_exist(key):
    with raises(ConfigError, key=key) as error:
        load.load_recipe("tiny/base", [f"{key}=1"])
    hint = str(error.value).partition("did you mean ")[2].partition("? The")[0]
    assert hint != key
    assert "gating." not in hint
