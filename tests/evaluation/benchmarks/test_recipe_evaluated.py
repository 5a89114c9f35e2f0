"""`saccade eval RECIPE --model`: evaluate a checkpoint without a run, on a benchmark and on tasks."""

import json

import numpy as np
import pytest
from commands import bad, fail, good
from PIL import Image
from toy_rows import MAKERS, write_copy

from saccade.errors import ConfigError, DataError, RunError

SMALL = ["sampling.max_tokens=4", "environment.settings.num_frames=2"]


@pytest.mark.slow
def test_recipe_is_evaluated_and_resumed(tmp_path, tiny_folder):
    rows = list(MAKERS["vstar"]())[:2]
    for row in rows:
        file = tmp_path / "copies" / "vstar" / row["image"]
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((40, 40, 3), 90, np.uint8)).save(file)
    write_copy("vstar", tmp_path / "copies" / "vstar", rows)
    home = tmp_path / "home"
    words = [
        "eval",
        "tiny/para_grpo",
        *SMALL,
        "--benchmarks",
        "vstar",
        "--benchmark-data",
        tmp_path / "copies",
        "--allow-incomplete",
        "--out",
        home,
    ]
    fail(RunError, *words, key="model.path")
    assert not home.exists()
    bad(*words, "--model", tmp_path)
    assert not home.exists()
    assert "vstar (strict)" in good(*words, "--model", tiny_folder)
    before = (home / "evaluations" / "vstar.jsonl").read_bytes()
    good(*words, "--model", tiny_folder)  # again: everything is finished
    assert (home / "evaluations" / "vstar.jsonl").read_bytes() == before
    output = good(*words, "--model", tiny_folder, "--use-tools", "off", "--name", "no_tools", "--num-tasks", 1)
    assert "vstar_no_tools (strict" in " ".join(output.split())
    result = json.loads((home / "evaluations" / "vstar_no_tools.benchmark_result.json").read_text())
    assert "a limited sample" in result["conditions"]
    assert result["full_set"]["num_questions"] > result["num_tasks"] == 1
    assert "vstar (strict)" in good("eval", home, *words[2:-2])  # the folder is an ordinary run
    fail(DataError, "eval", *words[1:4], "--out", home, "--model", tiny_folder, key="data.test")


def test_unknown_run_or_recipe_suggests_the_nearest(tmp_path):
    line = fail(RunError, "eval", "tiny/para_grop", "--out", tmp_path / "home", key="tiny/para_grop")
    assert "'tiny/para_grpo'" in line
    fail(ConfigError, "eval", _run(tmp_path), "--benchmarks", "hrbench_4", key="--benchmarks", value="hrbench_4")


def _run(folder):
    (folder / "recipe.yaml").write_text("extends: tiny/para_grpo\n")
    return folder
