"""docs/experiments: has a section for every packaged ablation; results only with their report."""

import json
import re
from pathlib import Path

import pytest

from saccade.runs.ablations.spec import list_spec_names

DOCS = Path(__file__).parents[3] / "docs" / "experiments"
SECTIONS = dict(re.findall(r"^## (\w+): [^\n]*\n(.*?)(?=^## |\Z)", (DOCS / "README.md").read_text(), re.M | re.S))


@pytest.mark.parametrize("name", list_spec_names())
def test_ablation_has_expectation_and_result(name):
    text = " ".join(SECTIONS[name].split())
    assert "Expected:" in text
    if (DOCS / name).exists():
        assert f"({name}/report.md)" in text
        assert re.search(r"\d seeds?", text)
        assert "{" in text or "no interval over seeds" in text
    else:
        assert "Seen: not run yet." in text


@pytest.mark.parametrize("folder", sorted(path for path in DOCS.iterdir() if path.is_dir()), ids=lambda path: path.name)
def test_committed_report_is_complete_and_small(folder):
    text = (folder / "report.md").read_text()
    linked = set(re.findall(r"\(plots/([\w.-]+)\)", text))
    stored = {path.name for path in (folder / "plots").iterdir()}
    assert linked == stored
    for plot in (folder / "plots").iterdir():
        assert plot.stat().st_size < 75_000, plot
    assert ("QUICK" in text) == ("no interval over seeds" in " ".join(SECTIONS[folder.name].split())), (
        "a quick run must be labeled as one"
    )
    assert json.loads((folder / "results.json").read_text())["ablation"]["name"] == folder.name
