"""Rollouts in processes of this machine: the trainer's policy, reproducible, and safe when a process is killed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from commands import RL, fail, good
from error_cases import raises
from polling import block_until, is_alive

from saccade.config.load import load_recipe
from saccade.errors import BrokenEngineError, ConfigError
from saccade.rollouts.executors import check_executor
from saccade.runs import evaluation, pipeline
from saccade.runs.run_folder import Run

pytestmark = pytest.mark.slow  # every test starts processes

# Differs within a group, and writes down its process.
SPREAD = """
import os

def spread(episode, *, log: str) -> float:
    with open(log, "a") as file:
        file.write(f"{os.getpid()}\\n")
    return sum(episode.ledger.sampled_tokens()) % 11
"""
# Raises an error that can't be unpickled.
REFUSING = """
from saccade.errors import ConfigError

class Refused(ConfigError):
    def __init__(self, task, reason):
        super().__init__(f"{task}: {reason}", key="rewards.refusing", value=task)

def refusing(episode) -> float:
    raise Refused(episode.task.id, "no")
"""
# Kills its process once.
FATAL = """
import os, signal
from pathlib import Path

def fatal(episode, *, mark: str) -> float:
    try:
        Path(mark).touch(exist_ok=False)
    except FileExistsError:
        return 0.0
    os.kill(os.getpid(), signal.SIGKILL)
"""
ENDLESS = """
import os, time

def endless(episode, *, log: str) -> float:
    with open(log, "a") as file:
        file.write(f"{os.getpid()}\\n")
    time.sleep(10**6)
"""
FILTERS = "rl.filters={reward_std: null, statuses: null}"
PROCESSES = [*RL, "rl.steps=2", "rollouts.executor=processes", "sampling.max_tokens=16", FILTERS]


def write_reward(folder, code, **settings):
    """Write a reward's file; return the setting that adds it to a recipe."""
    name = code.rsplit("def ", 1)[1].split("(")[0]
    (path := folder / f"{name}.py").write_text(code)
    own = ", ".join(f"{key}: {value}" for key, value in settings.items())
    return f"rewards={{{path}: {{settings: {{{own}}}}}}}"


def read_processes(log):
    return [int(line) for line in log.read_text().split()]


def read_numbers(folder):
    """Return the metrics of a run without times, memory, and the workers' counts, which include validations."""
    rows = Run.open(folder).read_metrics("rl")
    assert all(row["updates"] == 1 for row in rows)
    return [
        {key: value for key, value in row.items() if "second" not in key and not key.startswith(("memory", "workers/"))}
        for row in rows
    ]


def test_processes_sample_from_the_trained_policy_and_a_run_is_reproducible(tmp_path, tiny_folder, dataset_folder):
    start = ["tiny/para_grpo", *PROCESSES, "rl.selection.oversample=1.5", "--model", tiny_folder]
    runs, processes = [tmp_path / "first", tmp_path / "second"], []
    for number, folder in enumerate(runs):  # a validation after each step changes no number of the training
        log = tmp_path / f"{folder.name}.log"
        settings = [write_reward(tmp_path, SPREAD, log=log), f"validation.every={number}"]
        good("rl", *start, *settings, "--data", dataset_folder, "--out", folder)
        processes.append(read_processes(log))
    for pids in processes:
        assert len(set(pids)) == 2
        assert os.getpid() not in pids
        assert not any(map(is_alive, pids))
    first, second = map(read_numbers, runs)
    assert first == second
    assert len(first) == 2
    # Each step is sampled from the weights of the one before.
    assert all(0 < row["engine_trainer_logprob_diff_max"] <= 1e-4 for row in first)
    assert len({row["grad_norm"] for row in first}) == 2


def test_a_killed_process_ends_a_run_of_overlapping_steps_which_resumes(tmp_path, tiny_folder, dataset_folder):
    rewards = (
        write_reward(tmp_path, SPREAD, log=tmp_path / "log"),
        write_reward(tmp_path, FATAL, mark=tmp_path / "mark"),
    )
    settings = [*PROCESSES, *rewards, "rl.steps=5", "rl.max_staleness=1", "rollouts.num_processes=1"]
    start = ["tiny/para_grpo", *settings, "--model", tiny_folder, "--data", dataset_folder, "--out", tmp_path / "run"]
    fail(ConfigError, "rl", *start, "rollouts.executor=local", key="rl.max_staleness")
    fail(BrokenEngineError, "rl", *start, key="rollouts.executor", value="processes")
    good("rl", *start, "--resume")
    rows = read_numbers(tmp_path / "run")
    assert len(rows) == 5
    assert {row["staleness_max"] for row in rows} <= {0.0, 1.0}
    assert any(row["staleness_mean"] > 0 for row in rows)


def test_an_error_in_a_process_is_the_runs(tmp_path, tiny_folder, dataset_folder):
    settings = [*PROCESSES, write_reward(tmp_path, REFUSING), "rollouts.num_processes=1"]
    start = ["tiny/para_grpo", *settings, "--model", tiny_folder, "--data", dataset_folder, "--out", tmp_path / "run"]
    fail(ConfigError, "rl", *start, key="rewards.refusing")


def test_processes_end_with_a_killed_trainer(tmp_path, tiny_folder, dataset_folder):
    log = tmp_path / "log"
    settings = [*PROCESSES, write_reward(tmp_path, ENDLESS, log=log), "rollouts.num_processes=1"]
    start = ["tiny/para_grpo", *settings, "--model", tiny_folder, "--data", dataset_folder, "--out", tmp_path / "run"]
    trainer = subprocess.Popen([sys.executable, "-m", "saccade", "rl", *map(str, start)])
    block_until(lambda: log.exists() and read_processes(log))
    trainer.send_signal(signal.SIGKILL)
    trainer.wait()
    block_until(lambda: not any(map(is_alive, read_processes(log))))


def test_an_evaluation_in_processes_has_the_same_results(tmp_path, tiny_folder, dataset_folder):
    results = []
    for executor in ("local", "processes"):
        settings = [f"rollouts.executor={executor}", "sampling.max_tokens=16"]
        recipe = load_recipe("tiny/para_grpo", [*settings, f"model.path={tiny_folder}"])
        recipe = pipeline.with_paths(recipe, model=Path(tiny_folder), data=dataset_folder)
        scored = evaluation.evaluate(tmp_path / executor, recipe, name="all", on_progress=lambda progress: None)
        results.append([(item.episode.task.id, item.episode.status, item.score.total) for item in scored])
    assert results[0] == results[1]
    assert results[0]


def test_a_chat_server_samples_without_processes():
    recipe = load_recipe("tiny/para_grpo", ["rollouts.executor=processes"])
    assert pipeline.resolve_target(recipe, "http://127.0.0.1:1")[0].rollouts.executor == "local"
    assert pipeline.resolve_target(recipe, None)[0].rollouts.executor == "processes"


def test_an_engine_with_servers_is_refused():
    with raises(ConfigError, key="rollouts.executor", value="vllm"):
        check_executor(load_recipe("tiny/para_grpo", ["engine.name=vllm", "rollouts.executor=processes"]))
