"""Every tiny recipe on the tiling videos makes an RL step with a model that was trained to call tools."""

import math

import pytest

from saccade.config.load import list_recipes, load_recipe
from saccade.runs import pipeline
from saccade.runs.run_folder import Run

TINY_RECIPES = {name: load_recipe(name).synthetic for name in list_recipes() if name.startswith("tiny/")}
VIDEO_RECIPES = [name for name, data in TINY_RECIPES.items() if (data.media, data.tasks) == ("video", "tiling")]
ONE_STEP = (
    "seed=5",
    "model.num_threads=1",
    "sampling.max_tokens=64",
    "rl={steps: 1, prompts_per_step: 2, group_size: 4, optim: {lr: 1e-3, warmup_steps: 0}}",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", VIDEO_RECIPES)
def test_a_step(workspace, trained_weights, tmp_path, name):
    recipe = load_recipe(name, ONE_STEP)
    recipe = pipeline.with_paths(recipe, model=trained_weights, data=workspace.root / "data")
    steps = []
    weights = pipeline.run_rl(tmp_path / "run", recipe, on_step=lambda step, values: steps.append(values))
    assert (weights / "config.json").is_file()
    (row,) = Run.open(tmp_path / "run").read_metrics("rl")
    assert row["step"] == 1
    assert math.isfinite(row["reward"])
    assert len(steps) == 1
    # All groups are counted, whether or not a filter dropped them.
    num_groups = sum(row[key] for key in row if key == "groups/kept" or key.startswith("groups/dropped/"))
    assert num_groups == round(2 * recipe.rl.selection.oversample)
    assert ("loss" in row) is (row["updates"] == 1)
    parts = {key.removeprefix("reward/") for key in row if key.startswith("reward/")}
    assert set(recipe.rewards) <= parts
