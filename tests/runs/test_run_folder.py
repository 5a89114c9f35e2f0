"""A run folder survives a kill, and says in one sentence what is wrong with it."""

import errno
import json
import os
from pathlib import Path

import pytest

from saccade import config, runlog
from saccade.errors import RunError
from saccade.runlog import Run


@pytest.fixture
def recipe():
    return config.load_recipe("tiny/base")


@pytest.fixture
def run(tmp_path, recipe):
    return Run.create(tmp_path / "run", recipe)


def test_a_run_keeps_its_recipe_seed_and_versions(run, recipe):
    assert Run.open(run.path).recipe == recipe
    (start,) = json.loads((run.path / "versions.json").read_text())
    assert start["seed"] == 0
    assert start["saccade"]
    assert start["torch"]
    assert start["platform"]


def test_lines_survive_a_kill_and_the_torn_one_is_dropped(run, recipe):
    run.log("rl", 1, {"loss": 0.5, "gap": float("nan"), "by": {"K": [float("inf"), 1.0]}})
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('{"stage": "rl", "st')
    assert run.metrics("rl") == [{"stage": "rl", "step": 1, "loss": 0.5, "gap": None, "by": {"K": [None, 1.0]}}]
    again = Run.create(run.path, recipe, resume=True)
    again.log("rl", 2, {"loss": 0.4})
    again.log("rl", 1, {"loss": 0.6})
    again.log("sft", 1, {"loss": 9.0})
    assert [line["loss"] for line in again.metrics("rl")] == [0.6, 0.4]
    assert len(json.loads((run.path / "versions.json").read_text())) == 2


def test_a_broken_line_in_the_middle_is_named(run):
    (run.path / "metrics.jsonl").write_text("nonsense\n{}\n")
    with pytest.raises(RunError, match=r"metrics\.jsonl holds a line that isn't JSON"):
        run.metrics("rl")


def test_marks(run):
    assert not run.is_done("sft")
    run.mark_done("sft", {"checkpoint": "sft/480"})
    assert run.is_done("sft")
    assert run.read_json("done/sft.json") == {"checkpoint": "sft/480"}


def test_an_existing_run_needs_resume(run, recipe):
    with pytest.raises(RunError, match="already exists; go on with --resume"):
        Run.create(run.path, recipe)


def test_resume_wants_a_run_and_the_same_recipe(run, tmp_path):
    other = config.load_recipe("tiny/base", ["rl.optim.lr=1e-3"])
    with pytest.raises(RunError, match=r"was started with rl\.optim\.lr=0\.00015, not 0\.001"):
        Run.create(run.path, other, resume=True)
    with pytest.raises(RunError, match="there is no run at"):
        Run.create(tmp_path / "none", other, resume=True)


def test_what_may_change_does_and_is_written_down(run):
    more = config.load_recipe("tiny/base", ["rl.steps=7", "rl.select.oversample=3", "track=[tensorboard]"])
    assert Run.create(run.path, more, resume=True).recipe == Run.open(run.path).recipe == more
    changed = json.loads((run.path / "versions.json").read_text())[1]["changed"]
    assert changed == {"track": [[], ["tensorboard"]], "rl.steps": [100, 7], "rl.select.oversample": [1.5, 3.0]}
    with pytest.raises(RunError, match=r"was started with rl\.steps=7, not 8"):
        Run.create(run.path, config.load_recipe("tiny/base", ["rl.steps=8"]), resume=True, may_change=["track"])


FIXED = {
    "rl.max_staleness=1": "rl.max_staleness=0, not 1",
    "rl.staleness=1": "rl.staleness=0, not 1",
    "rl.select.overlaunch=1.25": "rl.select.overlaunch=1.0, not 1.25",
    "rl.select.rank=std": "rl.select.rank=none, not std",
    "rl.select.min_spread=0.1": "rl.select.min_spread=1e-06, not 0.1",
    "rl.group=4": "rl.group=8, not 4",
    "model.device=cuda": "model.device=cpu, not cuda",
}


@pytest.mark.parametrize("setting", FIXED)
def test_what_is_learned_from_may_not_change_when_a_run_goes_on(run, setting):
    with pytest.raises(RunError) as caught:
        Run.create(run.path, config.load_recipe("tiny/base", [setting]), resume=True)
    assert f"was started with {FIXED[setting]}" in str(caught.value)


FREE = ["engine.name=vllm", "engine.settings.rows=8", "rl.select.max_rounds=3", "rl.select.on_short=stop"]
FREE += [
    "rl.select.spare=requeue",
    "rl.select.oversample=2",
    "evaluation.limit=3",
    "rl.save_every=7",
    "model.threads=1",
]


@pytest.mark.parametrize("setting", FREE)
def test_how_a_run_goes_about_it_may(run, setting):
    assert (
        Run.create(run.path, config.load_recipe("tiny/base", [setting]), resume=True).recipe
        == Run.open(run.path).recipe
    )


def test_every_key_that_may_change_is_one(recipe):
    for key in runlog.MAY_CHANGE:
        value = recipe.model_dump()
        for part in key.split("."):
            assert part in value, key
            value = value[part]


def test_folder_that_cannot_be_made(tmp_path, recipe, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"can't be written: .*directory.*; a part of the path is a file"):
        Run.create(tmp_path / "file" / "run", recipe)

    def refuse(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(RunError, match="read-only file system; choose another folder"):
        Run.create(tmp_path / "run", recipe)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_one_sentence(run):
    (run.path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(RunError, match=r"metrics\.jsonl can't be written: no space left.*; free some space"):
        run.log("rl", 1, {})


def test_a_failed_write_leaves_the_old_file(run, monkeypatch):
    run.write_json("report.json", {"old": 1})

    def fail(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(RunError, match=r"report\.json can't be written"):
        run.write_json("report.json", {"new": 1})
    assert run.read_json("report.json") == {"old": 1}
    assert [path.name for path in run.path.iterdir() if "draft" in path.name] == []


def test_versions_of_packages_that_are_not_there():
    assert runlog.version_of("a-package-that-is-not-there") is None
