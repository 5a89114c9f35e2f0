"""Every tiny recipe about videos makes a step of RL for real, with a model that has learned to call."""

import math

import pytest

from saccade import stages
from saccade.config import load_recipe, recipe_names
from saccade.runlog import Run

TINY = [name for name in recipe_names() if name.startswith("tiny/") and load_recipe(name).world.media == "video"]
ONE_STEP = (
    "seed=5",
    "model.threads=1",
    "sampling.max_tokens=64",
    "rl={steps: 1, prompts: 2, group: 4, optim: {lr: 1e-3, warmup: 0}}",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
def test_a_step(home, schooled, tmp_path, name):
    recipe = stages.with_paths(load_recipe(name, ONE_STEP), model=schooled, world=home.root / "world")
    told = []
    weights = stages.rl(tmp_path / "run", recipe, on_step=lambda step, values: told.append(values))
    assert (weights / "config.json").is_file()
    (row,) = Run.open(tmp_path / "run").metrics("rl")
    assert row["step"] == 1
    assert math.isfinite(row["reward"])
    # What was rolled out is what the recipe asks for, whatever of it taught anything.
    assert len(told) == 1
    kept = sum(row[key] for key in row if key == "groups/kept" or key.startswith("groups/dropped/"))
    assert kept == round(2 * recipe.rl.select.oversample)
    assert ("loss" in row) is (row["updates"] == 1)
    parts = {key.removeprefix("reward/") for key in row if key.startswith("reward/")}
    assert set(recipe.rewards) <= parts, parts
