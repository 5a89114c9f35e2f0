"""`saccade ablate` with invalid input: one line each, and nothing is written."""

import sys

import pytest
from commands import fail, good

from saccade.errors import ConfigError, RunError
from saccade.runs.ablations.run import JobPool
from saccade.runs.ablations.spec import list_spec_names


@pytest.mark.slow
def test_lists_the_sets_without_torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)  # an import of it would fail
    for name in [name for name in sys.modules if name.startswith(("saccade.runs.ablations", "saccade.checks.run"))]:
        monkeypatch.delitem(sys.modules, name)
    output = good("ablate")
    for name in list_spec_names():
        assert name in output


def test_plan_writes_nothing(tmp_path):
    good("ablate", "anchoring", "--plan", "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "key", "suggestion"),
    [
        (["anchorin"], "ablation", "'anchoring'"),
        (["nowhere.yaml"], "nowhere.yaml", ""),
        (["anchoring", "--seeds", 0], "--seeds", "1"),
        (["anchoring", "--condition", "well_forme"], "--condition", "'well_formed'"),
        (["anchoring", "rl.stepz=3"], "rl.stepz", "rl.steps"),
        (["anchoring", "rl.steps=many"], "rl.steps", ""),
        (
            ["anchoring", "environment.settings.max_tool_turn=3"],
            "environment.settings.max_tool_turn",
            "'max_tool_turns'",
        ),
    ],
)
def test_invalid_argument_is_named(arguments, key, suggestion, tmp_path):
    assert suggestion in fail(ConfigError, "ablate", *arguments, "--out", tmp_path / "out", key=key)
    assert not (tmp_path / "out").exists()


def test_other_folder_is_left_unchanged(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    for more in ([], ["--resume"]):
        fail(RunError, "ablate", "anchoring", "--out", tmp_path, *more, key=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_job_that_could_not_write_its_log_says_so(tmp_path):
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "a.log").touch()
    pool = JobPool(folder=tmp_path, jobs=())
    pool.record_exit("a", 1, lambda line: None)
    assert "disk may be full" in pool.failures["a"]
