"""Recipes: what is packaged loads, what is wrong is named in one sentence."""

import pytest

from saccade import config, plugins
from saccade.errors import ConfigError
from saccade.rewards._compose import compose


@pytest.mark.parametrize("name", config.recipe_names())
def test_packaged_recipes_load_and_survive_a_round_trip(name, tmp_path):
    recipe = config.load_recipe(name)
    path = tmp_path / "recipe.yaml"
    path.write_text(config.dump(recipe))
    assert config.load_recipe(str(path)) == recipe


@pytest.mark.parametrize("name", config.recipe_names())
def test_packaged_recipes_name_plugins_and_settings_that_exist(name):
    recipe = config.load_recipe(name)
    plugins.bind("agents", recipe.agent.name, recipe.agent.settings)
    compose(recipe.rewards)
    assert recipe.engine.name in plugins.names("engines")


def test_vanilla_is_para_without_its_two_ideas():
    para, vanilla = config.load_recipe("tiny/para_grpo"), config.load_recipe("tiny/vanilla_grpo")
    assert para.gating.frames == (4, 8, 16, 32)
    assert vanilla.gating.frames == ()
    assert vanilla.rewards["format"].settings["lam"] == 0.0
    assert vanilla.agent.settings["think_prefix"] is False
    assert vanilla.rl == para.rl
    assert vanilla.sft == para.sft


def test_overrides_are_yaml_and_come_last():
    recipe = config.load_recipe(
        "tiny/para_grpo", ["rl.optim.lr=1e-6", "rl.optim.lr=2e-6", "gating.frames=[2]", "rl.loss.dual_clip=3"]
    )
    assert recipe.rl.optim.lr == 2e-6
    assert recipe.gating.frames == (2,)
    assert recipe.rl.loss.dual_clip == 3.0
    assert recipe.rl.optim.warmup == 10


SERVERS, NAME = "engine.settings.servers=[http://a:1]", "engine.name=vllm"


@pytest.mark.parametrize(
    "order", [[SERVERS, NAME], [NAME, SERVERS], [SERVERS, "seed=3", NAME], ["seed=3", NAME, SERVERS]]
)
def test_settings_are_those_of_the_name_beside_them_in_whatever_order(order):
    recipe = config.load_recipe("tiny/para_grpo", order)
    assert (recipe.engine.name, recipe.engine.settings) == ("vllm", {"servers": ["http://a:1"]})


def test_another_name_drops_what_was_written_for_the_one_before():
    engine = config.load_recipe("tiny/para_grpo", [NAME, SERVERS, "engine.name=local"]).engine
    assert (engine.name, engine.settings) == ("local", {})
    whole = "engine={name: vllm, settings: {retries: 2}}"
    assert config.load_recipe("tiny/para_grpo", [whole, "engine.name=sglang"]).engine.settings == {}


def test_null_drops_a_reward_term():
    assert set(config.load_recipe("tiny/para_grpo", ["rewards.tools=null"]).rewards) == {"accuracy", "format"}


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("rl.optim.lrr=1", ["'rl.optim.lrr'", "did you mean rl.optim.lr?"]),
        ("optim.lr=1", ["'optim.lr'", "rl.optim.lr or sft.optim.lr"]),
        ("rewards.format.lam=1", ["'rewards.format.lam'", "weight, settings"]),
        ("rl.optim.lr=fast", ["rl.optim.lr", "'fast'", "number"]),
        ("rl.group=1", ["rl.group", "greater than or equal to 2"]),
        ("rl.steps=0", ["rl.steps", "greater than or equal to 1"]),
        ("agent=parallel", ["agent", "a mapping of keys"]),
        ("gating.frames=[1, x]", ["gating.frames.1", "'x'", "integer"]),
        ("gating.frames=[8, 0]", ["gating.frames.1", "0", "greater than or equal to 1"]),
        ("evaluation.frames=[-4]", ["evaluation.frames.0", "greater than or equal to 1"]),
        ("sft.optim.betas=[0.9, 1]", ["sft.optim.betas.1", "less than 1"]),
        ("rl.select.drop_ends=[lenght]", ["rl.select.drop_ends.0", "'lenght'", "'length'"]),
        ("rl.steps", ["key=value"]),
        ("world={traces: code, fps: 2.5}", ["world", "traces=code", "world.fps", "whole number"]),
        ("world={traces: code, event_seconds: 0.5}", ["world.event_seconds", "whole number"]),
        ("world={traces: code, haystack: clips}", ["traces=code", "haystack"]),
        ("rl.optim.lr=[", ["valid YAML"]),
        ("model.path=", ["model.path", "None", "string"]),
    ],
)
def test_wrong_overrides_are_one_sentence(override, words):
    with pytest.raises(ConfigError) as caught:
        config.load_recipe("tiny/para_grpo", [override])
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value)


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
    recipe = config.load_recipe(path)
    assert (recipe.seed, recipe.rl.steps, recipe.rl.optim.lr) == (3, 7, 1.5e-4)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("extends: ./mine.yaml\n", "extends itself"),
        ("extends: ./none.yaml\n", "no recipe file"),
        ("extends: tiny/bsae\n", "did you mean 'tiny/base'"),
        ("seed: 1\nseed: 2\n", "'seed' stands twice"),
        ("- 1\n", "must be a mapping"),
        ("rl:\n  step: 1\n", "did you mean rl.steps"),
        ("extends: 3\n", "extends"),
    ],
)
def test_wrong_files_are_one_sentence(tmp_path, text, words):
    with pytest.raises(ConfigError, match=words):
        config.load_recipe(write(tmp_path, mine=text))


def test_unknown_recipe_and_missing_file(tmp_path):
    with pytest.raises(ConfigError, match="did you mean 'tiny/para_grpo'"):
        config.load_recipe("tiny/paragrpo")
    with pytest.raises(ConfigError, match="no recipe file"):
        config.load_recipe(str(tmp_path / "none.yaml"))


def test_another_plugin_does_not_inherit_settings():
    recipe = config.load_recipe("tiny/para_grpo", ["agent.name=direct", "agent.settings.overview_frames=3"])
    assert (recipe.agent.name, recipe.agent.settings) == ("direct", {"overview_frames": 3})
    same = config.load_recipe("tiny/para_grpo", ["agent.name=parallel", "agent.settings.max_turns=1"])
    assert same.agent.settings == {**config.load_recipe("tiny/para_grpo").agent.settings, "max_turns": 1}
    assert (
        config.load_recipe("tiny/para_grpo", ["sft.optim.name=adamw"]).sft.optim.lr == 3e-3
    )  # optimisers share theirs
