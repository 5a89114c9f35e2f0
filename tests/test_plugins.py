"""Plugins are found by file name, and their settings are validated when they are resolved."""

import ast
import inspect
import pickle
import sys
import tomllib
from pathlib import Path

import pytest
from error_cases import raises

from saccade import plugins
from saccade.config.reference import list_settings
from saccade.environments.tool_environment import ToolEnvironment
from saccade.errors import ConfigError
from saccade.protocols import ChatEngine

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ENTRY_POINTS = [
    *PROJECT["scripts"].values(),
    *(target for group in PROJECT["entry-points"].values() for target in group.values()),
]
MINE = '''
"""A plugin for tests."""

def mine(episode, task, *, ctx=None, power: float = 1.0, modes: tuple[str, ...] = (), model=None, must: int):
    """Return the settings."""
    return {"power": power, "modes": modes, "model": model, "must": must}
'''


@pytest.fixture
def mine(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return str(path)


def test_a_file_may_define_a_class_in_camel_case(tmp_path):
    (tmp_path / "tic_tac_toe.py").write_text("class TicTacToe:\n    pass\n")
    assert plugins.load("environments", str(tmp_path / "tic_tac_toe.py")).__name__ == "TicTacToe"


def test_suggestion_without_a_near_name_lists_all():
    assert plugins.suggest("zzz", ["choice"]) == "found: choice"
    assert plugins.suggest("zzz", []) == "found: none"


def test_path_plugin_is_bound_to_settings_and_dependencies(mine):
    bound = plugins.resolve("rewards", mine, {"power": "2", "modes": ["a"], "must": 3}, model="m", other=1)
    assert bound("episode", "task", ctx=object()) == {"power": 2.0, "modes": ("a",), "model": "m", "must": 3}


@pytest.mark.parametrize(
    ("settings", "setting", "value"),
    [
        ({"powr": 1.0, "must": 1}, "powr", 1.0),
        ({"power": "high", "must": 1}, "power", "high"),
        ({"power": "inf", "must": 1}, "power", "inf"),
        ({}, "must", None),
        ({"ctx": 1, "must": 1}, "ctx", 1),
        ({"model": 1, "must": 1}, "model", 1),
    ],
)
def test_wrong_setting_raises_config_error(mine, settings, setting, value):
    with raises(ConfigError, key=f"rewards.{mine}.settings.{setting}", value=value):
        plugins.resolve("rewards", mine, settings, model="m")


def test_unknown_setting_suggests_the_nearest(mine):
    with raises(ConfigError, key=f"rewards.{mine}.settings.powr") as caught:
        plugins.resolve("rewards", mine, {"powr": 1.0, "must": 1})
    assert "'power'" in str(caught.value)


def test_setting_keys_are_those_of_a_recipe():
    with raises(ConfigError, key="environment.settings.max_tool_turn", value=1):
        plugins.resolve("environments", "tool_calling", {"max_tool_turn": 1})
    with raises(ConfigError, key="engine.settings.server", value=[]):
        plugins.resolve("engines", "vllm", {"server": []})
    with raises(ConfigError, key="llava.nothing", value=1):
        plugins.resolve("data.importers", "llava", {"nothing": 1})


def test_unknown_folder_name_and_file_raise(tmp_path):
    with raises(ConfigError, key="rewrds"):
        plugins.list_plugins("rewrds")
    for folder, key in [
        ("rewards", "rewards.unknown"),
        ("engines", "engine.name"),
        ("tools", "environment.settings.tools"),
    ]:
        with raises(ConfigError, key=key, value="unknown"):
            plugins.load(folder, "unknown")
    with raises(ConfigError, key=str(tmp_path / "none.py")):
        plugins.load("rewards", str(tmp_path / "none.py"))


def test_broken_file_and_missing_object_raise(tmp_path):
    (tmp_path / "bad.py").write_text("import a_package_that_is_not_there")
    (tmp_path / "empty.py").write_text("x = 1")
    with raises(ConfigError, key=str(tmp_path / "bad.py")):
        plugins.load("rewards", str(tmp_path / "bad.py"))
    with raises(ConfigError, key=str(tmp_path / "empty.py"), value="empty"):
        plugins.load("rewards", str(tmp_path / "empty.py"))


@pytest.mark.parametrize("text", ["raise SystemExit(7)", "import sys; sys.exit()", "exit('no')"])
def test_a_file_that_exits_ends_no_process(tmp_path, text):
    (tmp_path / "bad.py").write_text(text)
    with raises(ConfigError, key=str(tmp_path / "bad.py")) as caught:
        plugins.load("rewards", str(tmp_path / "bad.py"))
    assert "it tried to exit" in str(caught.value)


def test_a_file_that_loads_itself_raises(tmp_path):
    path = tmp_path / "bad.py"
    path.write_text(f"from saccade import plugins; plugins.load('rewards', {str(path)!r})")
    with raises(ConfigError, key=str(path)) as caught:
        plugins.load("rewards", str(path))
    assert "recursion" in str(caught.value)


SETTINGS_FILE = """
from __future__ import annotations

from dataclasses import dataclass

from saccade.environments.base import EnvironmentSettings
from saccade.environments.tool_calling import ToolCalling


class MineSettings(EnvironmentSettings):
    size: int = 3


@dataclass
class Point:
    x: float = 0.0


class Mine(ToolCalling):
    settings: MineSettings
"""


def test_a_file_may_have_dataclasses_and_string_annotations_and_its_objects_can_be_pickled(tmp_path):
    (tmp_path / "mine.py").write_text(SETTINGS_FILE)
    plugin = plugins.load("environments", str(tmp_path / "mine.py"))
    assert plugin.settings_type.__name__ == "MineSettings"
    point = plugins.load("rewards", f"{tmp_path}/mine.py:Point")(x=2.0)
    assert pickle.loads(pickle.dumps(point)) == point


def test_a_file_is_executed_again_only_once_it_has_changed(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("class Mine: value = 1\n")
    first = plugins.load("rewards", str(path))
    assert plugins.load("rewards", str(path)) is first
    path.write_text("class Mine: value = 2\n")
    second = plugins.load("rewards", str(path))
    assert (first.value, second.value) == (1, 2)
    path.write_text("class Mine: value = 1 / 0\n")
    for _ in range(2):
        with raises(ConfigError, key=str(path)):
            plugins.load("rewards", str(path))
    assert first.__module__ not in sys.modules
    path.write_text("class Mine: value = 2\n")
    assert plugins.load("rewards", str(path)).value == 2


FOLDERS = ["environments", "chat.families", "engines", "rewards", "tools"]


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_file_of_a_plugin_folder_loads(folder):
    for name in plugins.list_plugins(folder):
        assert plugins.load(folder, name) is not None


@pytest.mark.parametrize("entry_point", ENTRY_POINTS)
def test_every_entry_point_is_defined(entry_point):
    # Read, not imported: some modules need a third-party package.
    module, name = entry_point.split(":")
    source = (ROOT / "src" / module.replace(".", "/")).with_suffix(".py").read_text()
    definitions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    assert name in {node.name for node in definitions}


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["engines", "environments", "rewards"])
@pytest.mark.parametrize("base", [ChatEngine, ToolEnvironment])
def test_the_kind_of_a_packaged_plugin_is_that_of_its_object(folder, base):
    for name in plugins.list_plugins(folder):
        plugin = plugins.load(folder, name)
        expected = inspect.isclass(plugin) and issubclass(plugin, base)
        assert plugins.is_subclass(folder, name, base) is expected, name


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["engines", "algorithms.losses"])
def test_a_plugin_that_is_read_has_the_settings_of_its_object(folder):
    for name in plugins.list_plugins(folder):
        plugin, signature = plugins.load(folder, name), plugins.get_signature(folder, name)
        parameters = inspect.signature(plugin, eval_str=True).parameters
        assert list(signature.parameters) == list(parameters)
        assert {key: item for key, item in signature.parameters.items() if item.kind is item.KEYWORD_ONLY} == {
            key: item for key, item in parameters.items() if item.kind is item.KEYWORD_ONLY
        }
        assert signature.doc == inspect.getdoc(plugin)
        assert all(comment for _, comment in list_settings(signature).values()), name
        if folder == "engines":
            read = plugins.get_attribute(folder, name, "has_separate_weights")
            assert read is plugin.has_separate_weights


def test_the_kind_of_a_plugin_file_is_that_of_its_object(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("from saccade import protocols\nclass Mine(protocols.ChatEngine): ...\nclass Other: ...\n")
    assert plugins.is_subclass("engines", str(path), ChatEngine)
    assert not plugins.is_subclass("engines", f"{path}:Other", ChatEngine)


def test_a_setting_may_have_an_annotation_that_cannot_be_hashed(tmp_path):
    path = tmp_path / "unhashed.py"
    path.write_text(
        "from typing import Annotated\n"
        "def unhashed(*, values: Annotated[list[int], {'unit': []}] = []):\n"
        "    return values\n"
    )
    assert plugins.resolve("estimators", str(path), {"values": ["1", 2]})() == [1, 2]
    with pytest.raises(ConfigError) as caught:
        plugins.resolve("estimators", str(path), {"values": ["one"]})
    assert caught.value.value == ["one"]


def test_settings_are_converted_in_the_order_of_their_types(tmp_path):
    for name, types in (("first", "int | float"), ("second", "float | int")):
        (tmp_path / f"{name}.py").write_text(f"def {name}(*, value: {types}):\n    return type(value)\n")
    found = [
        plugins.resolve("estimators", str(tmp_path / f"{name}.py"), {"value": "1"})() for name in ("first", "second")
    ]
    assert found == [int, float]
