"""`saccade lab` with what it can't use: one sentence each, and nothing is made."""

import pytest
from commands import bad, good

from saccade.lab.design import set_names


@pytest.mark.slow
def test_without_a_set_the_sets_are_listed():
    output = good("lab")
    for name in set_names():
        assert name in output


def test_a_plan_makes_nothing(tmp_path):
    output = good("lab", "anchoring", "--plan", "--out", tmp_path / "out")
    assert "about" in output
    assert "minutes" in output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["anchorin"], "did you mean 'anchoring'"),
        (["nowhere.yaml"], "there is no set file"),
        (["gating", "--seeds", 0], "--seeds can't be 0"),
        (["gating", "--condition", "usal"], "did you mean 'usual'"),
        (["gating", "rl.stepz=3"], "rl.steps"),
        (["gating", "rl.steps=many"], "rl.steps can't be 'many'"),
        (["gating", "agent.settings.max_turn=3"], "max_turns"),
    ],
)
def test_what_can_not_be_used_is_named(words, said, tmp_path):
    assert said in bad("lab", *words, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_with_something_else_in_it_is_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    for more in ([], ["--resume"]):
        assert "is not empty and holds no lab" in bad("lab", "gating", "--out", tmp_path, *more)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
