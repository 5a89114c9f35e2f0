"""`saccade bench` on a folder with a fake script: the list, the file, and the comparison with an earlier file."""

import importlib
import json
import sys
from pathlib import Path

import pytest
from commands import fail, good, run

from saccade.cli.bench import find_slower_rows
from saccade.errors import ConfigError, DataError, RunError

COMMON = """
import argparse, json, pathlib
def parser(text):
    options = argparse.ArgumentParser()
    for name in ("--rounds", "--threads", "--seconds"):
        options.add_argument(name, type=float, default=2)
    options.add_argument("--out", type=pathlib.Path)
    return options
"""
SCRIPT = '''"""Rest for some time.

More about it.
"""
import json
from _common import parser
given = parser(__doc__).parse_args()
row = {"case": "rest", "ours s": 9.0, "ours CPU s": given.seconds, "baseline CPU s": 1.0, "rounds": given.rounds}
given.out.write_text(json.dumps({"title": "Rest", "machine": {}, "rows": [row]}))
'''


@pytest.fixture
def folder(tmp_path):
    scripts = tmp_path / "benchmarks"
    scripts.mkdir()
    (scripts / "_common.py").write_text(COMMON)
    (scripts / "rest.py").write_text(SCRIPT)
    (scripts / "helper.py").write_text("'''No benchmark.'''\n")
    return scripts


def measure(call, folder, file, *arguments):
    return call("bench", "--folder", folder, "--out", file, *arguments)


def test_the_list_has_scripts_with_the_common_options(folder):
    listing = good("bench", "--folder", folder)
    assert "Rest for some time." in listing
    assert "helper" not in listing
    assert "_common" not in listing


def test_every_script_of_this_checkout_is_listed():
    names = {line.split()[0] for line in good("bench").splitlines()}
    assert {"grpo_step", "local_engine", "media", "packing"} <= names
    assert "_common" not in names


def test_the_file_holds_figures_versions_and_machine(folder, tmp_path):
    file = tmp_path / "out" / "new.json"
    measure(good, folder, file, "--rounds", "3", "rest", "--", "--seconds", "4")
    written = json.loads(file.read_text())
    assert {"python", "torch", "commit"} <= written["versions"].keys()
    assert written["cpu"].endswith("cores")
    figures = written["benchmarks"]["rest"]
    assert figures["arguments"] == ["--rounds", "3", "--seconds", "4"]
    assert len(figures["load_average"]) == 3
    assert (figures["rows"][0]["ours CPU s"], figures["rows"][0]["rounds"]) == (4.0, 3.0)


def test_a_comparison_repeats_the_measurements_of_the_old_file(folder, tmp_path):
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    measure(good, folder, old, "rest", "--", "--seconds", "4")
    measure(good, folder, new, "--compare", old)
    assert json.loads(new.read_text())["benchmarks"]["rest"]["rows"][0]["ours CPU s"] == 4.0
    slower = measure(run, folder, new, "--compare", old, "rest", "--", "--seconds", "5")
    assert slower.exit_code == 1
    assert slower.stderr == "rest: rest took 5 CPU s, 25% more than 4; the limit is 15%\n"


def test_another_machine_is_reported(folder, tmp_path):
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    measure(good, folder, old, "rest")
    old.write_text(json.dumps({**json.loads(old.read_text()), "cpu": "abacus"}))
    done = measure(run, folder, new, "--compare", old)
    assert done.exit_code == 0
    assert "abacus" in done.stderr


def test_a_row_is_found_by_its_first_column():
    def build(**cpu_seconds):
        rows = [{"case": case, "a s": 1.0, "a CPU s": value, "b CPU s": 9.0} for case, value in cpu_seconds.items()]
        return {"script": {"rows": rows}}

    assert find_slower_rows(build(x=1.0, y=2.0), build(y=2.2, x=1.1, z=50.0)) == []
    [slower, missing] = find_slower_rows(build(x=1.0, y=2.0), build(x=1.2))
    assert "'y'" in missing
    assert "x" in slower
    with pytest.raises(RunError):
        find_slower_rows({"script": {"rows": [{"case": "x", "seconds": 1.0}]}}, build(x=1.0))


def test_errors_are_one_sentence(folder, tmp_path):
    new = tmp_path / "new.json"
    options = ("--folder", folder, "--out", new)
    fail(ConfigError, "bench", *options, "rst", key="NAME", value="rst")
    fail(ConfigError, "bench", *options, "--compare", new, key="--out", value=new)
    fail(RunError, "bench", "--folder", tmp_path / "none", key=tmp_path / "none")
    other = tmp_path / "other.json"
    other.write_text("{}")
    fail(DataError, "bench", *options, "--compare", other, key=other)
    (folder / "rest.py").write_text("from _common import parser\nraise SystemExit(3)\n")
    fail(RunError, "bench", *options, "rest", key="rest")
    assert not new.exists()


def test_the_spread_is_that_of_the_ratios_by_round(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    build = importlib.import_module("_common").build_comparison_row
    del sys.modules["_common"]
    seconds = {"saccade": [(1.0, 0.5), (2.0, 1.0), (4.0, 1.0)], "other": [(2.0, 2.0), (2.0, 3.0), (16.0, 2.0)]}
    row = build("case", seconds, tokens=100)
    assert row == {
        "case": "case",
        "saccade s": 2.0,
        "other s": 2.0,
        "times faster": 1.0,
        "times faster, spread": "1.00–4.00",
        "saccade CPU s": 1.0,
        "other CPU s": 2.0,
        "times less CPU": 2.0,
        "times less CPU, spread": "2.00–4.00",
        "saccade tokens/CPU s": 100.0,
        "other tokens/CPU s": 50.0,
        "rounds": 3,
    }
