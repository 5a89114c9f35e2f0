"""An evaluation that is killed at random moments, or runs out of disk, resumes and ends with the same results."""

import json
import multiprocessing
import os
import random
import resource
import signal
import sys
import time

import pytest
from commands import SFT, good

NUM_EPISODES = 16
SYNTHETIC = ["synthetic.train=2", "synthetic.validation=1", "synthetic.test=2", "synthetic.tasks_per_video=4"]
# Two rows at a time, so that episodes end one after the other.
SETTINGS = [
    "evaluation.temperature=1",
    "evaluation.num_samples=2",
    "sampling.max_tokens=16",
    "engine.settings.max_num_seqs=2",
]
SETTINGS += ["model.num_threads=1"]


def main(words, output, bytes_at_most=None):
    """Run the command line in its own process, optionally with a limit on file sizes."""
    from saccade.cli.app import main as command

    if bytes_at_most is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_at_most, bytes_at_most))
    file = os.open(output, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(file, 1), os.dup2(file, 2)
    sys.argv = ["saccade", *words]
    command()


@pytest.fixture(scope="module")
def start():
    """Return a function that starts a command in a process with slow imports preloaded."""
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(
        ["saccade.cli.app", "saccade.runs.evaluation", "saccade.reporting.run_report", "transformers"]
    )

    def start_run(words, output, **more):
        process = processes.Process(target=main, args=([*map(str, words)], str(output)), kwargs=more)
        process.start()
        return process

    return start_run


@pytest.fixture(scope="module")
def run(tmp_path_factory, tiny_folder):
    place = tmp_path_factory.mktemp("killed")
    good("data", "synth", place / "dataset", *SYNTHETIC)
    arguments = ["tiny/para_grpo", *SFT, "sft.steps=1", "--model", tiny_folder, "--data", place / "dataset"]
    good("sft", *arguments, "--out", place / "run")
    return place / "run"


def records(path):
    """Return the newest records of a results file in order of tasks and samples, without durations."""
    newest = {}
    for line in path.read_text().splitlines():
        record = json.loads(line)
        newest[record["outcome"]["episode"]["task"]["id"], record["sample_index"]] = timeless(record)
    return [newest[key] for key in sorted(newest)]


class Logprobs(list):
    """Logprobs of tokens, equal up to rounding, which depends on the batch."""

    __hash__ = None

    def __eq__(self, other):
        return list(self) == pytest.approx(list(other), abs=1e-4)


def timeless(value):
    if isinstance(value, dict):
        return {
            key: Logprobs(item) if key == "logprobs" else timeless(item)
            for key, item in value.items()
            if key != "seconds"
        }
    return [timeless(item) for item in value] if isinstance(value, list) else value


@pytest.fixture(scope="module")
def evaluation(start, run, tmp_path_factory):
    """Return a function that starts a named evaluation, and the file with the output of the last one."""
    output = tmp_path_factory.mktemp("output") / "output"
    return lambda name, **more: start(["eval", run, *SETTINGS, "--name", name], output, **more), output


@pytest.fixture(scope="module")
def whole(evaluation, run):
    """Return the records of an uninterrupted evaluation, and its duration in seconds."""
    start_run, output = evaluation
    start_time, process = time.monotonic(), start_run("whole")
    process.join()
    assert process.exitcode == 0, output.read_text()
    found = records(run / "evaluations" / "whole.jsonl")
    assert len(found) == NUM_EPISODES
    return found, time.monotonic() - start_time


@pytest.mark.slow
@pytest.mark.parametrize("num_kills", [3, pytest.param(10, marks=pytest.mark.soak)])
def test_killed_evaluation_ends_with_the_same_results(evaluation, whole, run, num_kills):
    (start_run, output), (results, seconds) = evaluation, whole
    chance, kills, halves, number = random.Random(7), 0, 0, 0

    def path():
        return run / "evaluations" / f"killed_{num_kills}_{number}.jsonl"

    def lines():
        return len(path().read_bytes().splitlines()) if path().exists() else 0

    while kills < num_kills:
        num_lines, process = lines(), start_run(path().stem)
        if kills % 2:  # startup may be slow: every other kill waits for a finished episode
            while process.is_alive() and lines() == num_lines:
                time.sleep(0.01)
            process.join(chance.uniform(0, seconds / NUM_EPISODES))
        else:
            process.join(chance.uniform(0, seconds))
        process.kill()
        process.join()
        if process.exitcode == -signal.SIGKILL:
            kills += 1
            halves += 0 < lines() < NUM_EPISODES
        else:  # it finished before the kill: the next one starts another file
            assert process.exitcode == 0, output.read_text()
            assert records(path()) == results
            number += 1
    last = start_run(path().stem)
    last.join()
    assert last.exitcode == 0, output.read_text()
    assert records(path()) == results
    assert halves > 0


@pytest.mark.slow
def test_full_disk_is_one_error_and_loses_nothing(evaluation, whole, run):
    """The system rejects writes beyond a file size in the middle of a line, as a full disk does."""
    start_run, output = evaluation
    size = (run / "evaluations" / "whole.jsonl").stat().st_size
    full = start_run("full", bytes_at_most=int(0.6 * size))
    full.join()
    assert full.exitcode == 1
    path = run / "evaluations" / "full.jsonl"
    (error,) = [line for line in output.read_text().splitlines() if str(path) in line]
    assert "--resume" in error
    assert "Traceback" not in output.read_text()
    kept = path.read_bytes()[: path.read_bytes().rindex(b"\n") + 1]
    assert 0 < len(kept.splitlines()) < NUM_EPISODES
    again = start_run("full")
    again.join()
    assert again.exitcode == 0, output.read_text()
    assert path.read_bytes().startswith(kept)
    assert records(path) == whole[0]
