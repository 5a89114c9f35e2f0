"""The page about tasks that need a decision holds the numbers of its result file, and claims what they show."""

import importlib
import json
import re
from pathlib import Path

import pytest

from saccade.config.load import load_recipe

ROOT = Path(__file__).parents[1]
ENTRIES = json.loads((ROOT / "docs" / "results" / "deciding.json").read_text())
PAGE = (ROOT / "docs" / "experiments" / "deciding.md").read_text()
RECIPES = {
    "cue": "tiny/cue",
    "search": "tiny/search",
    "cost": "tiny/cost",
    "map": "tiny/map",
    "map, Python": "tiny/map_python",
}


def test_the_table_is_that_of_the_results(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    deciding = importlib.import_module("deciding")
    table = PAGE.partition("<!-- results: begin -->\n")[2].partition("\n<!-- results: end -->")[0]
    assert table == deciding.format_table(ENTRIES)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: f"{entry['task']}-{entry['seed']}")
def test_an_entry_is_of_its_recipe_and_within_its_bounds(entry):
    recipe = load_recipe(RECIPES[entry["task"]])
    assert entry["settings"] == {
        "sft.steps": recipe.sft.steps,
        "rl.steps": recipe.rl.steps,
        "rl.prompts_per_step": recipe.rl.prompts_per_step,
    }
    assert entry["tasks"] == entry["clips"] == recipe.synthetic.test
    before, after = (entry[name]["accuracy"] for name in ("before", "after"))
    assert entry["difference"][0] == pytest.approx(after[0] - before[0])
    assert all(low <= mean <= high for mean, low, high in (before, after, entry["difference"]))


def find_claims():
    """Return each claim `task: N of M seeds gain at least P points` of the page."""
    return re.findall(r"^- `([\w, ]+)`: (\d) of (\d) seeds gain at least (\d+) points", PAGE, re.M)


def test_claims_follow_from_the_results():
    claims = find_claims()
    assert {task for task, *_ in claims} == {entry["task"] for entry in ENTRIES}
    for task, gained, seeds, points in claims:
        entries = [entry for entry in ENTRIES if entry["task"] == task]
        assert len(entries) == int(seeds)
        assert sum(entry["difference"][0] >= int(points) / 100 for entry in entries) == int(gained)
