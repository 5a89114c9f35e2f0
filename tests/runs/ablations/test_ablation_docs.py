"""docs/lab: every set stands there; figures stand there only with the report that they come from."""

import json
import re
from pathlib import Path

import pytest

from saccade.lab.design import set_names

DOCS = Path(__file__).parents[2] / "docs" / "lab"
SECTIONS = dict(re.findall(r"^## (\w+): [^\n]*\n(.*?)(?=^## |\Z)", (DOCS / "README.md").read_text(), re.M | re.S))


@pytest.mark.parametrize("name", set_names())
def test_a_set_is_expected_and_seen_or_not_run_yet(name):
    text = SECTIONS[name]
    assert "Expected:" in text
    if (DOCS / name).exists():
        assert f"({name}/report.md)" in text
        assert re.search(r"\d seeds?", text)
        assert "{" in text or "no interval over seeds" in text
    else:
        assert "Seen: not run yet." in text


@pytest.mark.parametrize("folder", sorted(path for path in DOCS.iterdir() if path.is_dir()), ids=lambda path: path.name)
def test_a_committed_report_is_whole_and_small(folder):
    text = (folder / "report.md").read_text()
    named = set(re.findall(r"\(plots/([\w.-]+)\)", text))
    there = {path.name for path in (folder / "plots").iterdir()}
    assert named == there
    for picture in (folder / "plots").iterdir():
        assert picture.stat().st_size < 60_000, picture
    assert ("QUICK" in text) == ("evidence of nothing" in " ".join(SECTIONS[folder.name].split())), (
        "a quick run is called one"
    )
    assert json.loads((folder / "results.json").read_text())["lab"]["name"] == folder.name
