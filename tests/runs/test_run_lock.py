"""Two processes never write the same files of a run; a process that ends, however, leaves nothing locked."""

import contextlib
import os
import signal
import socket
import subprocess
import sys

import pytest
from commands import LOCK_HOLDER, bad, good, lock_elsewhere
from error_cases import raises

import saccade
from saccade.checks import run_checks
from saccade.config.load import load_recipe
from saccade.errors import RunError
from saccade.runs import pipeline, stages
from saccade.runs.demo import run_demo
from saccade.runs.run_folder import Run
from saccade.runs.run_lock import RunLock


@pytest.fixture
def folder(tmp_path):
    Run.create(tmp_path / "run", load_recipe("tiny/base"))
    return tmp_path / "run"


@pytest.fixture
def hold(folder):
    """Return a function that holds a lock of the run in another process, and returns the process."""
    with contextlib.ExitStack() as stack:
        yield lambda name: stack.enter_context(lock_elsewhere(folder, name))


def test_a_lock_that_another_process_holds_is_refused(folder, hold):
    holder = hold("training")
    with raises(RunError, key=str(folder), value=holder.pid), RunLock(folder, "training"):
        pass
    with RunLock(folder, "report"):
        pass
    assert socket.gethostname() in bad("rl", "tiny/base", "--out", folder, "--resume", *data_settings(folder))


def data_settings(folder):
    task = '{"id": "1", "question": "What?", "answer_type": "open", "ground_truth": "red", "media": []}\n'
    (folder.parent / "tasks.jsonl").write_text(task)
    return [f"data.train={folder.parent / 'tasks.jsonl'}"]


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_a_process_that_is_killed_releases_its_lock(folder, hold, signum):
    holder = hold("training")
    holder.send_signal(signum)
    holder.wait()
    with RunLock(folder, "training"):
        assert (folder / ".locks" / "training.lock").is_file()


@pytest.mark.parametrize("name", ["run", "link"])
def test_a_process_may_hold_a_lock_twice(folder, hold, name):
    (folder.parent / "link").symlink_to(folder)
    with RunLock(folder, "training"):
        with RunLock(folder.parent / name, "training"):
            pass
        command = [sys.executable, "-c", LOCK_HOLDER, str(folder), "training"]
        second = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert second.returncode != 0
    assert f"process {os.getpid()} " in second.stderr
    hold("training")


def test_a_folder_that_does_not_exist_yet_is_locked_when_it_does(tmp_path):
    with RunLock(tmp_path / "new", "training") as lock:
        assert not (tmp_path / "new").exists()
        lock.acquire()
        assert (tmp_path / "new" / ".locks" / "training.lock").is_file()


@pytest.mark.slow
def test_a_report_waits_for_no_training_but_is_refused_beside_another(folder, hold):
    hold("training")
    good("report", folder)
    hold("report")
    assert str(folder) in bad("report", folder)
    good("report", folder, "--out", folder.parent / "page.html")


def test_an_evaluation_is_refused_beside_one_of_its_name(folder, hold, tiny_folder):
    holder = hold("eval-test")
    task = saccade.Task(id="a", question="?", media=(), answer_type=saccade.AnswerType.OPEN, ground_truth="red")
    with raises(RunError, key=str(folder), value=holder.pid):
        saccade.evaluate(folder, model=tiny_folder, tasks=[task])


def test_all_stages_beside_another_training_change_nothing(folder, hold):
    holder = hold("training")
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    recipe = load_recipe("tiny/base", ["rl.steps=7", *data_settings(folder)])
    with raises(RunError, key=str(folder), value=holder.pid):
        stages.run_stages(folder, recipe, ["sft", "rl"], resume=True, start_stage=lambda *_: None)
    with raises(RunError, key=str(folder), value=holder.pid):
        run_demo(folder, recipe, resume=True, add_task=lambda *_: None)
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before


def test_a_training_beside_another_changes_nothing(folder, hold):
    hold("training")
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    recipe = load_recipe("tiny/base", ["rl.steps=7", *data_settings(folder)])
    with pytest.raises(RunError):
        pipeline.run_rl(folder, recipe, resume=True, on_step=lambda *_: None)
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before


def test_of_two_trainings_that_start_a_run_the_second_writes_nothing(tmp_path, monkeypatch):
    with contextlib.ExitStack() as stack:

        def start_another(*recipes):
            stack.enter_context(lock_elsewhere(tmp_path / "new", "training"))
            return {}

        monkeypatch.setattr(run_checks, "require_checks", lambda planned_run: None)
        monkeypatch.setattr(run_checks, "start_sandboxes", start_another)
        recipe = load_recipe("tiny/base", data_settings(tmp_path / "new"))
        with raises(RunError, key=str(tmp_path / "new")):
            stages.run_stages(tmp_path / "new", recipe, ["rl"], start_stage=lambda *_: None)
    assert [path.name for path in (tmp_path / "new").iterdir()] == [".locks"]


@pytest.mark.slow
def test_two_evaluations_may_start_a_run_at_once(tmp_path, tiny_folder, dataset_folder, monkeypatch):
    recipe, out = tmp_path / "recipe.yaml", tmp_path / "run"
    tasks = dataset_folder / "test" / "tasks.jsonl"
    recipe.write_text(f"extends: tiny/para_grpo\nmodel: {{path: {tiny_folder}}}\ndata: {{test: {tasks}}}\n")

    def start_another(*recipes):
        Run.create(out, pipeline.with_paths(load_recipe(str(recipe)), folder=out))
        monkeypatch.undo()
        return {}

    monkeypatch.setattr(run_checks, "start_sandboxes", start_another)
    good("eval", recipe, "--out", out, "--shard", "1/2", "evaluation.num_tasks=2", "sampling.max_tokens=4")
    assert len(Run.open(out).read_invocations()) == 2
