"""Plugins are found by their file names, and their settings are checked before anything runs."""

import pytest

from saccade import plugins
from saccade.errors import ConfigError

MINE = '''
"""A plugin for tests."""

def mine(episode, task, *, ctx=None, power: float = 1.0, modes: tuple[str, ...] = (), model=None, must: int):
    """Return what it was given."""
    return {"power": power, "modes": modes, "model": model, "must": must}
'''


@pytest.fixture
def mine(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return str(path)


def test_nearest_and_listing():
    assert plugins.nearest("zzz", ["choice"]) == "found: choice"
    assert plugins.nearest("zzz", []) == "found: none"


def test_path_plugin_is_bound_with_settings_and_given(mine):
    bound = plugins.bind("rewards", mine, {"power": "2", "modes": ["a"], "must": 3}, model="m", other=1)
    assert bound("episode", "task", ctx=object()) == {"power": 2.0, "modes": ("a",), "model": "m", "must": 3}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"powr": 1.0, "must": 1}, ["powr", "did you mean 'power'", "modes"]),
        ({"power": "high", "must": 1}, ["power", "high", "number"]),
        ({}, ["needs the setting 'must'"]),
        ({"ctx": 1, "must": 1}, ["no setting 'ctx'"]),
        ({"model": 1, "must": 1}, ["no setting 'model'"]),
    ],
)
def test_wrong_settings_are_one_sentence(mine, settings, words):
    with pytest.raises(ConfigError) as caught:
        plugins.bind("rewards", mine, settings, model="m")
    assert all(word in str(caught.value) for word in words)
    assert "\n" not in str(caught.value)


def test_unknown_folder_name_and_file(tmp_path):
    with pytest.raises(ConfigError, match="no plugin folder 'rewrds'"):
        plugins.names("rewrds")
    with pytest.raises(ConfigError, match="no 'nothing_like_it' among the rewards; "):
        plugins.load("rewards", "nothing_like_it")
    with pytest.raises(ConfigError, match="no plugin file"):
        plugins.load("rewards", str(tmp_path / "none.py"))


def test_a_broken_file_and_a_missing_object(tmp_path):
    (tmp_path / "bad.py").write_text("import a_package_that_is_not_there")
    (tmp_path / "empty.py").write_text("x = 1")
    with pytest.raises(ConfigError, match=r"bad\.py can't be imported: No module named"):
        plugins.load("rewards", str(tmp_path / "bad.py"))
    with pytest.raises(ConfigError, match="must define one public object called 'empty'"):
        plugins.load("rewards", str(tmp_path / "empty.py"))


FOLDERS = ["agents", "chat.families", "engines", "rewards", "tools"]


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_file_of_a_plugin_folder_loads(folder):
    for name in plugins.names(folder):
        assert plugins.load(folder, name) is not None
