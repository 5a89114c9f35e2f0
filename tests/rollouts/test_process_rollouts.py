"""Rollouts in processes of this machine: the trainer's policy, reproducible, and safe when a process is killed."""

import os
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from commands import RL, fail, good
from error_cases import raises
from polling import block_until, is_alive

from saccade.config.load import load_recipe
from saccade.data.dataset import load_tasks
from saccade.errors import BrokenEngineError, ConfigError
from saccade.rollouts.collect import collect
from saccade.rollouts.components import RolloutComponents
from saccade.rollouts.executors import check_executor, connect_executor
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
# Raises an error that can't be unpickled, at a question that begins with "Refused".
REFUSING = """
from saccade.errors import ConfigError

class Refused(ConfigError):
    def __init__(self, task, reason):
        super().__init__(f"{task}: {reason}", key="rewards.refusing", value=task)

def refusing(episode) -> float:
    if episode.task.question.startswith("Refused"):
        raise Refused(episode.task.id, "no")
    return 0.0
"""
# Writes down its task, and kills its process at one of its calls.
FATAL = """
import os, signal
from pathlib import Path

def fatal(episode, *, log: str, call: int) -> float:
    with open(log, "a") as file:
        file.write(f"{episode.task.id}\\n")
    if len(Path(log).read_text().splitlines()) == call:
        os.kill(os.getpid(), signal.SIGKILL)
    return 0.0
"""
# Of the episodes of a question that begins with "Endless" every second one waits for its cancellation; those of another
# question wait until two episodes have ended. All write down their start and end.
WAITING = """
import asyncio, os
from collections import Counter
from pathlib import Path
from saccade.environments.single_turn import SingleTurn

LOG, num_endless = Path(__file__).with_suffix(".log"), Counter()

class Waiting(SingleTurn):
    async def reset(self, task, ctx):
        is_endless = task.question.startswith("Endless")
        num_endless[task.id] += is_endless
        self.write("endless" if is_endless else "usual")
        if is_endless and num_endless[task.id] % 2 == 0:
            await asyncio.Event().wait()
        while not is_endless and LOG.read_text().count("closed") < 2:
            await asyncio.sleep(0.01)
        return await super().reset(task, ctx)

    async def close(self):
        self.write("closed")

    def write(self, event):
        with LOG.open("a") as file:
            file.write(f"{event} {os.getpid()}\\n")
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
        write_reward(tmp_path, FATAL, log=tmp_path / "fatal.log", call=1),
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


def test_processes_end_with_a_killed_trainer(tmp_path, tiny_folder, dataset_folder):
    log = tmp_path / "log"
    settings = [*PROCESSES, write_reward(tmp_path, ENDLESS, log=log), "rollouts.num_processes=1"]
    start = ["tiny/para_grpo", *settings, "--model", tiny_folder, "--data", dataset_folder, "--out", tmp_path / "run"]
    trainer = subprocess.Popen([sys.executable, "-m", "saccade", "rl", *map(str, start)])
    block_until(lambda: log.exists() and read_processes(log))
    trainer.send_signal(signal.SIGKILL)
    trainer.wait()
    block_until(lambda: not any(map(is_alive, read_processes(log))))


def test_a_killed_process_ends_an_evaluation_whose_rerun_has_the_same_results(tmp_path, tiny_folder, dataset_folder):
    def evaluate(executor, *, call, **options):
        log = tmp_path / f"{executor}.log"
        settings = [write_reward(tmp_path, FATAL, log=log, call=call), f"rollouts.executor={executor}"]
        settings += ["rollouts.num_processes=1", "sampling.max_tokens=16", f"model.path={tiny_folder}"]
        recipe = pipeline.with_paths(
            load_recipe("tiny/para_grpo", settings), model=Path(tiny_folder), data=dataset_folder
        )
        options |= {"name": "all", "on_progress": lambda progress: None}
        scored = evaluation.evaluate(tmp_path / executor, recipe, **options)
        results = [(item.episode.task.id, item.episode.status, item.score.total) for item in scored]
        return results, log.read_text().split()

    with raises(BrokenEngineError, key="rollouts.executor", value="processes"):
        evaluate("processes", call=3, max_concurrency=1)  # one task after the other
    results, scored_tasks = evaluate("processes", call=3)
    expected, _ = evaluate("local", call=0)
    assert results == expected
    tasks = [task for task, *_ in results]
    assert len(tasks) >= 3
    assert sorted(scored_tasks) == sorted([*tasks, scored_tasks[2]])  # only the third one ran again


def test_a_cancelled_group_ends_its_episodes_in_the_process_and_an_error_there_is_raised(
    tmp_path, tiny_folder, dataset_folder
):
    (tmp_path / "waiting.py").write_text(WAITING)
    environment = f"environment={{name: {tmp_path}/waiting.py, settings: null}}"
    settings = [environment, "rollouts.executor=processes", "rollouts.num_processes=1", "sampling.max_tokens=16"]
    settings += [write_reward(tmp_path, REFUSING), f"model.path={tiny_folder}"]
    recipe = load_recipe("tiny/para_grpo", settings)
    components = connect_executor(RolloutComponents.from_recipe(recipe), tmp_path)
    usual, *others = load_tasks(dataset_folder / "train/tasks.jsonl")[:3]
    endless = [replace(task, question=f"Endless: {task.question}") for task in others]
    discarded = []

    def read_events():
        lines = (tmp_path / "waiting.log").read_text().splitlines()
        return Counter(line.split()[0] for line in lines), {int(line.split()[1]) for line in lines}

    async def collect_groups():
        options = {
            "group_size": 2,
            "score_fn": components.score_fn,
            "executor": components.executor,
            "on_discarded": discarded.append,
        }
        given = components.environments, components.build_context(seed=0)
        groups = await collect([*endless, usual], *given, **options, num_required=1)
        events = read_events()  # at once: a cancelled group is waited for
        again = await collect([usual], *given, **options)
        with raises(ConfigError, key="rewards.refusing", value=usual.id):
            await collect([replace(usual, question="Refused")], *given, **options)
        return groups, events, again

    groups, (events, pids), again = pipeline.run_and_close(components, collect_groups())
    assert [group.task.id for group in groups] == [usual.id]
    assert events == {"endless": 4, "usual": 2, "closed": 6}
    assert sorted(episode.task.id for episode in discarded) == sorted(task.id for task in endless)
    assert all(episode.ledger.num_sampled_tokens for episode in discarded)
    # The process samples on, and ends with the executor.
    assert [len(group.scored_episodes) for group in again] == [2]
    assert read_events() == ({"endless": 4, "usual": 6, "closed": 10}, pids)
    assert len(pids) == 1
    assert os.getpid() not in pids
    assert not any(map(is_alive, pids))


def test_a_chat_server_samples_without_processes():
    recipe = load_recipe("tiny/para_grpo", ["rollouts.executor=processes"])
    assert pipeline.resolve_target(recipe, "http://127.0.0.1:1")[0].rollouts.executor == "local"
    assert pipeline.resolve_target(recipe, None)[0].rollouts.executor == "processes"


def test_an_engine_with_servers_is_refused():
    with raises(ConfigError, key="rollouts.executor", value="vllm"):
        check_executor(load_recipe("tiny/para_grpo", ["engine.name=vllm", "rollouts.executor=processes"]))
