"""`saccade eval RECIPE --model`: a model that was never trained here, on a benchmark and on tasks."""

import json

import numpy as np
import pytest
from commands import bad, good
from PIL import Image
from toy_rows import MAKERS, write_copy

SMALL = ["sampling.max_tokens=4", "agent.settings.overview_frames=2"]


@pytest.mark.slow
def test_a_recipe_is_evaluated_and_gone_on_with(tmp_path, tiny_folder):
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
        "--bench",
        "vstar",
        "--data",
        tmp_path / "copies",
        "--subset",
        "--out",
        home,
    ]
    assert "the recipe names no model; give --model" in bad(*words)
    assert not home.exists()
    bad(*words, "--model", tmp_path)
    assert not home.exists()
    assert "vstar (official)" in good(*words, "--model", tiny_folder)
    before = (home / "evaluations" / "vstar.jsonl").read_bytes()
    good(*words, "--model", tiny_folder)  # again: nothing is left to do
    assert (home / "evaluations" / "vstar.jsonl").read_bytes() == before
    said = good(*words, "--model", tiny_folder, "--tools", "off", "--name", "tools off", "--limit", 1)
    assert "vstar, tools off (official, a limited sample)" in " ".join(said.split())
    card = json.loads((home / "evaluations" / "vstar, tools off.report.json").read_text())
    assert "an estimate of the whole" in card["conditions"]["a limited sample"]
    assert card["whole"]["questions"] > card["n"] == 1
    assert "vstar (official)" in good("eval", home, *words[2:-2])  # a run like any other
    assert "the recipe names no data.test" in bad("eval", *words[1:4], "--out", home, "--model", tiny_folder)


def test_what_is_neither_run_nor_recipe_is_told(tmp_path):
    said = bad("eval", "tiny/para_grop", "--out", tmp_path / "home")
    assert "there is no run at tiny/para_grop, nor a recipe of that name; did you mean 'tiny/para_grpo'" in said
    assert "did you mean 'hrbench_4k'" in bad("eval", _run(tmp_path), "--bench", "hrbench_4")


def _run(folder):
    (folder / "recipe.yaml").write_text("extends: tiny/para_grpo\n")
    return folder
