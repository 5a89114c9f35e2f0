"""An evaluation that is killed at random moments, or runs out of disk, goes on and ends with the same results."""

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

KILLS = 10
ATTEMPTS = 16
WORLD = ["world.train=2", "world.validation=1", "world.test=2", "world.tasks_per_video=4"]
# Two rows at a time: attempts end one after the other, and not all at once.
SETTINGS = ["evaluation.temperature=1", "evaluation.repeat=2", "sampling.max_tokens=16", "engine.settings.rows=2"]
SETTINGS += ["model.threads=1"]


def main(words, output, bytes_at_most=None):
    """The command line in a process of its own, which may be refused files beyond a size."""
    from saccade.cli import main as command

    if bytes_at_most is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_at_most, bytes_at_most))
    file = os.open(output, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(file, 1), os.dup2(file, 2)
    sys.argv = ["saccade", *words]
    command()


@pytest.fixture(scope="module")
def start():
    """Starts a command; whatever is slow to import is there already."""
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["saccade.cli", "saccade.exams", "saccade.evaluation.report", "transformers"])

    def begin(words, output, **more):
        process = processes.Process(target=main, args=([*map(str, words)], str(output)), kwargs=more)
        process.start()
        return process

    return begin


@pytest.fixture(scope="module")
def run(tmp_path_factory, tiny_folder):
    place = tmp_path_factory.mktemp("killed")
    good("data", "world", place / "world", *WORLD)
    begin = ["tiny/para_grpo", *SFT, "sft.steps=1", "--model", tiny_folder, "--world", place / "world"]
    good("sft", *begin, "--out", place / "run")
    return place / "run"


def records(path):
    """What a results file says, in order of tasks and attempts, without how long it took."""
    newest = {}
    for line in path.read_text().splitlines():
        record = json.loads(line)
        newest[record["scored"]["episode"]["task"]["id"], record["repeat"]] = timeless(record)
    return [newest[key] for key in sorted(newest)]


def timeless(value):
    if isinstance(value, dict):
        # What a token's probability is differs in its last digits with what else is in the batch.
        return {
            key: [round(one, 4) for one in each] if key == "logprobs" else timeless(each)
            for key, each in value.items()
            if key != "seconds"
        }
    return [timeless(each) for each in value] if isinstance(value, list) else value


@pytest.fixture(scope="module")
def evaluation(start, run, tmp_path_factory):
    """Starts an evaluation of a name; and a file that holds what the last one said."""
    said = tmp_path_factory.mktemp("said") / "output"
    return lambda name, **more: start(["eval", run, *SETTINGS, "--name", name], said, **more), said


@pytest.fixture(scope="module")
def whole(evaluation, run):
    """An evaluation that nobody disturbed, and its seconds."""
    begin, said = evaluation
    begun, process = time.monotonic(), begin("whole")
    process.join()
    assert process.exitcode == 0, said.read_text()
    found = records(run / "evaluations" / "whole.jsonl")
    assert len(found) == ATTEMPTS
    return found, time.monotonic() - begun


@pytest.mark.slow
def test_killed_at_ten_random_moments_it_ends_with_the_same_results(evaluation, whole, run):
    (begin, said), (results, seconds) = evaluation, whole
    chance, kills, halves, number = random.Random(7), 0, 0, 0

    def path():
        return run / "evaluations" / f"killed {number}.jsonl"

    def lines():
        return len(path().read_bytes().splitlines()) if path().exists() else 0

    while kills < KILLS:
        had, process = lines(), begin(path().stem)
        if kills % 2:  # a machine may be slow to start it: every other time it is killed with something done
            while process.is_alive() and lines() == had:
                time.sleep(0.01)
            process.join(chance.uniform(0, seconds / ATTEMPTS))
        else:
            process.join(chance.uniform(0, seconds))
        process.kill()
        process.join()
        if process.exitcode == -signal.SIGKILL:
            kills += 1
            halves += 0 < lines() < ATTEMPTS
        else:  # it was done before it could be killed: the next one begins anew
            assert process.exitcode == 0, said.read_text()
            assert records(path()) == results
            number += 1
    last = begin(path().stem)
    last.join()
    assert last.exitcode == 0, said.read_text()
    assert records(path()) == results
    assert halves > 0


@pytest.mark.slow
def test_a_disk_that_runs_full_is_one_sentence_and_nothing_is_lost(evaluation, whole, run):
    """The system refuses a file beyond a size in the middle of a line, as a full disk does."""
    begin, said = evaluation
    size = (run / "evaluations" / "whole.jsonl").stat().st_size
    full = begin("full", bytes_at_most=int(0.6 * size))
    full.join()
    assert full.exitcode == 1
    sentences = [line for line in said.read_text().splitlines() if "can't be written" in line]
    assert len(sentences) == 1
    assert "full.jsonl can't be written: " in sentences[0]
    assert sentences[0].endswith("then go on with --resume, or with the same command where there is none")
    assert "Traceback" not in said.read_text()
    path = run / "evaluations" / "full.jsonl"
    kept = path.read_bytes()[: path.read_bytes().rindex(b"\n") + 1]
    assert 0 < len(kept.splitlines()) < ATTEMPTS
    again = begin("full")
    again.join()
    assert again.exitcode == 0, said.read_text()
    assert path.read_bytes().startswith(kept)
    assert records(path) == whole[0]
