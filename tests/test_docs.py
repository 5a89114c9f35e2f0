"""The README's commands work and its files exist."""

import re
import shlex
import stat
from pathlib import Path

import pytest
from commands import SMALL, good
from test_shape import PACKAGE, PLUGIN_FOLDERS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
COMMANDS = [line.split(" #")[0] for line in README.splitlines() if line.startswith("saccade ")]
TAKES_SETTINGS = ("data", "sft", "train", "eval", "demo")


def small(line):
    """A command's words, with settings that make it quick."""
    words = shlex.split(line)[1:]
    if words[0] not in TAKES_SETTINGS or words[1] in ("compare", "merge"):
        return words
    # A run is resumed with the settings that it was started with.
    return [*words, *SMALL, *(["evaluation.limit=2"] if words[0] == "eval" else [])]


def test_there_are_commands():
    assert {line.split()[1] for line in COMMANDS} >= {"doctor", "recipes", "model", "ask", *TAKES_SETTINGS}


@pytest.mark.slow
def test_every_command_works_one_after_the_other(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for line in COMMANDS:
        good(*small(line))


def test_every_setting_in_the_text_exists():
    named = re.findall(r"`([a-z]+(?:\.[a-z_]+)+=[^`]+)`", README)
    assert len(named) >= 6
    for group in named:
        good("recipes", "show", "tiny/para_grpo", *group.split())


def test_the_tree_holds_every_file_and_nothing_else():
    tree = README.split("<!-- files: begin -->")[1].split("<!-- files: end -->")[0]
    folders, told = [], set()
    for line in tree.splitlines():
        if not line.strip() or line.startswith("```"):
            continue
        depth = (len(line) - len(line.lstrip())) // 2
        name, *comment = line.split(maxsplit=1)
        folders[depth:] = [name]
        path = ROOT / "".join(folders)
        assert path.exists(), f"the README names {path}"
        assert comment or path.is_dir(), f"the README says nothing about {path}"
        told.add(path)
    files = {path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py"}
    # A plugin is one new file, and nothing else is edited: the README need not name it.
    files -= {path for folder in PLUGIN_FOLDERS for path in (PACKAGE / folder).glob("[!_]*.py")}
    missing = sorted(str(path.relative_to(ROOT)) for path in files - told)
    assert not missing, f"the README's tree doesn't name {missing}"


@pytest.mark.parametrize("name", ["bootstrap", "check", "demo", "test"])
def test_scripts_can_be_run(name):
    assert (ROOT / "scripts" / name).stat().st_mode & stat.S_IXUSR
