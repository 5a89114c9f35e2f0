"""Answer types as plugins: a type from a file in a dataset, in a reward and in the contract; unknown types."""

import asyncio
import json
from dataclasses import replace

import pytest
from error_cases import raises
from reward_cases import answer_episode, task

from saccade import plugins
from saccade.data.dataset import load_tasks
from saccade.errors import ConfigError, DataError
from saccade.rewards.accuracy import Accuracy
from saccade.rewards.answer_types.base import find_plugin, list_answer_types, parse_numbers, register_file
from saccade.testing import check_answer_type
from saccade.types import AnswerType

ANGLE = """
from saccade.rewards.answer_types.base import BaseAnswerType


class Angle(BaseAnswerType):
    names = ("angle",)
    expected = "an angle in degrees"
    example = (90.0, "450")

    def __init__(self, *, turn: float = 360.0):
        self.turn = turn

    def __call__(self, episode):
        self.require_valid(episode.task)
        try:
            return float((float(episode.answer) - episode.task.ground_truth) % self.turn == 0)
        except (TypeError, ValueError):
            return 0.0

    @classmethod
    def is_valid(cls, ground_truth):
        return isinstance(ground_truth, float)

    @classmethod
    def parse_ground_truth(cls, value):
        return float(value)


angle = Angle
"""


@pytest.fixture
def angle(tmp_path):
    file = tmp_path / "angle.py"
    file.write_text(ANGLE)
    return str(file)


def test_every_packaged_type_is_an_enum_member_and_their_names_are_distinct():
    packaged = plugins.list_plugins("rewards.answer_types")
    types = [plugin for name, plugin in list_answer_types().items() if name in packaged]
    assert {plugin.names[0] for plugin in types} == set(AnswerType)
    names = [name for plugin in types for name in plugin.names]
    assert len(names) == len(set(names))


def test_a_type_from_a_file(tmp_path, angle):
    row = {"id": "a", "question": "?", "media": [], "answer_type": "angle", "ground_truth": 90.0}
    path = tmp_path / "tasks.jsonl"
    path.write_text(json.dumps(row) + "\n")
    asyncio.run(check_answer_type(angle))
    [loaded] = load_tasks(path)
    assert Accuracy()(replace(answer_episode("450", ground_truth=90.0), task=loaded)).value == 1.0
    strict = Accuracy(answer_types={angle: {"turn": 1000.0}})
    attempts = [replace(answer_episode(body, ground_truth=90.0), task=loaded) for body in ("450", "1090", "?")]
    assert [strict(attempt).value for attempt in attempts] == [0.0, 1.0, 0.0]
    assert strict(attempts[0]).reason == "answer '450', ground truth 90.0"
    path.write_text(json.dumps({**row, "ground_truth": "steep"}) + "\n")
    with raises(DataError, key="ground_truth", value="steep"):
        load_tasks(path)


def test_a_dataset_names_no_file(tmp_path):
    """Loading a dataset executes no code of it."""
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')")
    row = {"id": "a", "question": "?", "media": [], "answer_type": str(tmp_path / "evil.py"), "ground_truth": "x"}
    path = tmp_path / "tasks.jsonl"
    path.write_text(json.dumps(row) + "\n")
    with raises(DataError, key="answer_type", value=str(tmp_path / "evil.py")):
        load_tasks(path)
    assert not (tmp_path / "executed").exists()


def test_unknown_types_raise(tmp_path):
    path = tmp_path / "tasks.jsonl"
    path.write_text(json.dumps({"id": "a", "question": "?", "media": [], "answer_type": "opn", "ground_truth": "x"}))
    with raises(DataError, key="answer_type", value="opn"):
        load_tasks(path)
    with raises(DataError, key="answer_type", value="opn"):
        Accuracy()(replace(answer_episode("x", ground_truth="x"), task=replace(task("x"), answer_type="opn")))
    with raises(ConfigError, key=str(tmp_path / "none.py")):
        register_file(str(tmp_path / "none.py"))
    (tmp_path / "none.py").write_text("none = 1")
    with raises(ConfigError, key=str(tmp_path / "none.py"), value=1):
        register_file(str(tmp_path / "none.py"))
    assert find_plugin(AnswerType.MATH) == "math"


@pytest.mark.parametrize(("name", "answer_type"), [("formula", "math"), ("open_ended", "open"), ("bbox", "box")])
def test_published_names_are_refused_with_the_right_one(name, answer_type):
    with raises(DataError, key="answer_type", value=name) as error:
        find_plugin(name)
    assert f"write {answer_type!r}" in str(error.value)


def test_a_number_beyond_all_floats_is_no_ground_truth():
    assert parse_numbers(10**400) == parse_numbers("1" * 400) == ()
    assert parse_numbers([10**400, 3]) == (3.0,)
