"""The run folder: survives kills, and names what is wrong with it."""

import errno
import json
import os
from pathlib import Path

import pytest
from error_cases import raises

from saccade.config import load
from saccade.errors import RunError
from saccade.runs import run_folder
from saccade.runs.run_folder import Run
from saccade.utils.versions import find_package_version


@pytest.fixture
def recipe():
    return load.load_recipe("tiny/base")


@pytest.fixture
def run(tmp_path, recipe):
    return Run.create(tmp_path / "run", recipe)


def test_run_stores_recipe_seed_and_versions(run, recipe):
    assert Run.open(run.path).recipe == recipe
    (invocation,) = json.loads((run.path / "invocations.json").read_text())
    assert invocation["seed"] == 0
    assert invocation["saccade"]
    assert invocation["torch"]
    assert invocation["platform"]


def test_truncated_line_is_dropped(run, recipe):
    run.log("rl", 1, {"loss": 0.5, "gap": float("nan"), "by": {"K": [float("inf"), 1.0]}})
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('{"stage": "rl", "st')
    assert run.read_metrics("rl") == [{"stage": "rl", "step": 1, "loss": 0.5, "gap": None, "by": {"K": [None, 1.0]}}]
    again = Run.create(run.path, recipe, resume=True)
    again.log("rl", 2, {"loss": 0.4})
    again.log("rl", 1, {"loss": 0.6})
    again.log("sft", 1, {"loss": 9.0})
    assert [line["loss"] for line in again.read_metrics("rl")] == [0.6, 0.4]
    assert len(json.loads((run.path / "invocations.json").read_text())) == 2


def test_invalid_line_is_named(run):
    (run.path / "metrics.jsonl").write_text("nonsense\n{}\n")
    with raises(RunError, key=str(run.path / "metrics.jsonl")):
        run.read_metrics("rl")


def test_stage_status(run):
    assert not run.is_done("sft")
    run.mark_done("sft", {"checkpoint": "sft/480"})
    assert run.is_done("sft")
    assert run.read_json("finished_stages/sft.json") == {"checkpoint": "sft/480"}


def test_existing_run_needs_resume(run, recipe):
    with raises(RunError, key=str(run.path)):
        Run.create(run.path, recipe)


def test_resume_needs_a_run_with_the_same_recipe(run, tmp_path):
    other = load.load_recipe("tiny/base", ["rl.optim.lr=1e-3"])
    with raises(RunError, key="rl.optim.lr", value=0.001):
        Run.create(run.path, other, resume=True)
    with raises(RunError, key=str(tmp_path / "none")):
        Run.create(tmp_path / "none", other, resume=True)


def test_resumable_changes_are_recorded(run):
    more = load.load_recipe("tiny/base", ["rl.steps=7", "rl.selection.oversample=3", "loggers=[tensorboard]"])
    assert Run.create(run.path, more, resume=True).recipe == Run.open(run.path).recipe == more
    changed = json.loads((run.path / "invocations.json").read_text())[1]["changed"]
    assert changed == {"loggers": [[], ["tensorboard"]], "rl.steps": [100, 7], "rl.selection.oversample": [1.5, 3.0]}
    with raises(RunError, key="rl.steps", value=8):
        Run.create(run.path, load.load_recipe("tiny/base", ["rl.steps=8"]), resume=True, resumable_keys=["loggers"])


FIXED = {
    "rl.max_staleness=1": 1,
    "rl.simulated_staleness=1": 1,
    "rl.selection.over_provision=1.25": 1.25,
    "rl.selection.rank_by=reward_std": "reward_std",
    "rl.filters.reward_std.above=0.1": 0.1,
    "rl.group_size=4": 4,
    "model.device=cuda": "cuda",
}


@pytest.mark.parametrize("setting", FIXED)
def test_fixed_keys_may_not_change_on_resume(run, setting):
    with raises(RunError, key=setting.partition("=")[0], value=FIXED[setting]):
        Run.create(run.path, load.load_recipe("tiny/base", [setting]), resume=True)


RESUMABLE = [
    "engine.name=vllm",
    "engine.settings.max_num_seqs=8",
    "rl.selection.max_sampling_rounds=3",
    "rl.selection.on_underfilled=stop",
]
RESUMABLE += [
    "rl.selection.surplus=requeue",
    "rl.selection.oversample=2",
    "evaluation.num_tasks=3",
    "rl.save_every=7",
    "model.num_threads=1",
]


@pytest.mark.slow
@pytest.mark.parametrize("setting", RESUMABLE)
def test_resumable_keys_may_change_on_resume(run, setting):
    assert (
        Run.create(run.path, load.load_recipe("tiny/base", [setting]), resume=True).recipe == Run.open(run.path).recipe
    )


def test_resumable_keys_exist(recipe):
    for key in run_folder.RESUMABLE_KEYS:
        value = recipe.model_dump()
        for part in key.split("."):
            assert part in value, key
            value = value[part]


def test_folder_that_cannot_be_created(tmp_path, recipe, monkeypatch):
    (tmp_path / "file").write_text("")
    with raises(RunError, key=str(tmp_path / "file" / "run")):
        Run.create(tmp_path / "file" / "run", recipe)

    def refuse(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with raises(RunError, key=str(tmp_path / "run")):
        Run.create(tmp_path / "run", recipe)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_full_disk(run):
    (run.path / "metrics.jsonl").symlink_to("/dev/full")
    with raises(RunError, key=str(run.path / "metrics.jsonl")):
        run.log("rl", 1, {})


def test_failed_write_keeps_the_old_file(run, monkeypatch):
    run.write_json("report.json", {"old": 1})

    def fail(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", fail)
    with raises(RunError, key=str(run.path / "report.json")):
        run.write_json("report.json", {"new": 1})
    assert run.read_json("report.json") == {"old": 1}
    assert [path.name for path in run.path.iterdir() if "draft" in path.name] == []


def test_the_record_of_invocations_is_replaceable(run, recipe):
    """No result depends on it: without it a run resumes, and a damaged one is named with the fix."""
    path = run.path / "invocations.json"
    for content in (b"", b"{}", path.read_bytes()[:-9]):
        path.write_bytes(content)
        with raises(RunError, key=str(path)):
            Run.create(run.path, recipe, resume=True)
    path.unlink()
    Run.create(run.path, recipe, resume=True)
    assert len(run.read_invocations()) == 1


def test_steps_after_a_checkpoint_are_removed(run):
    for stage in ("sft", "rl", "rl_validation"):
        for step in (1, 2, 3):
            run.log(stage, step, {"loss": 0.5})
    run.cut_metrics(("rl", "rl_validation"), 2)
    steps = {stage: [row["step"] for row in run.read_metrics(stage)] for stage in ("sft", "rl", "rl_validation")}
    assert steps == {"sft": [1, 2, 3], "rl": [1, 2], "rl_validation": [1, 2]}


def test_of_several_lines_of_a_step_the_last_one_stays(run):
    for step, loss in ((1, 0.75), (2, 0.5), (1, 0.25), (2, 0.5)):
        run.log("rl", step, {"loss": loss})
    run.cut_metrics(("rl",), 2)
    assert [(row["step"], row["loss"]) for row in run.read_metrics("rl")] == [(1, 0.25), (2, 0.5)]


def test_version_of_a_missing_package():
    assert find_package_version("a-missing-package") is None
