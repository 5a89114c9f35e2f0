"""`saccade lab` end to end: real processes, real little runs; stopped, killed, gone on with."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import bad, good, run
from lab_cases import SET, SMALL

from saccade.lab.plan import Lab
from saccade.lab.pool import alone, held
from saccade.runlog import Run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("lab") / "out"


@pytest.fixture(scope="module")
def path(folder):
    (folder.parent / "mine.yaml").write_text(SET)
    return folder.parent / "mine.yaml"


@pytest.fixture(scope="module", autouse=True)
def first(path, folder):
    """Two seeds of everything; one arm fails in each."""
    return run("lab", path, *SMALL, "--seeds", 2, "--out", folder)


def numbers(folder):
    return json.loads((folder / "results.json").read_text())["tables"]


def test_the_plan_is_said_first_and_a_failing_arm_last(first, folder):
    assert first.exit_code == 1
    said = first.output.splitlines()
    assert "3 arms and conditions x 2 seed(s) = 6 runs of 4 RL steps after 4 cold start(s): about" in said[0]
    assert "seed-0/two/stuck: FAILED: step 1 found 0 of 2 groups to learn from" in first.output
    assert "2 of the lab's jobs failed; try them again with --resume" in first.stderr
    assert "seed-1/one/hot: done" in first.output
    assert "Traceback" not in first.output


def test_arms_share_world_weights_and_tasks(folder):
    for seed in (0, 1):
        runs = {arm: Run.open(folder / f"seed-{seed}/one/{arm}") for arm in ("plain", "hot")}
        recipes = [run.recipe for run in runs.values()]
        assert recipes[0].model.path == recipes[1].model.path == "../../starts/usual/sft/step-000004"
        assert recipes[0].data == recipes[1].data
        assert recipes[0].seed == seed
        other = Run.open(folder / f"seed-{seed}/two/stuck").recipe
        assert other.model.path == "../../starts/other/sft/step-000002"
        facts = [json.loads((folder / f"seed-{seed}/one/{arm}/facts.json").read_text()) for arm in runs]
        assert facts[0]["greedy"]["task"] == facts[1]["greedy"]["task"] == facts[0]["tools_off"]["task"]
        assert facts[0]["greedy"]["frames"] == facts[1]["greedy"]["frames"]
    tasks = [(folder / f"seed-{seed}/world/test/tasks.jsonl").read_text() for seed in (0, 1)]
    assert tasks[0] != tasks[1]


def test_a_step_shows_the_same_attempts_to_arms_that_have_the_same_weights(folder):
    one, two = (Run.open(folder / f"seed-0/one/{arm}").metrics("rl") for arm in ("plain", "hot"))
    assert one[0]["sampled_tokens"] == two[0]["sampled_tokens"]
    assert one[0]["entropy"] == two[0]["entropy"]


def test_the_report_says_what_was_done_and_what_was_not(folder):
    text, page = (folder / "report.md").read_text(), (folder / "report.html").read_text()
    for words in (
        "nothing is claimed",
        "whether a lab works",
        "seed-0/two/stuck failed: step 1 found",
        "after − before",
    ):
        assert words in text
        assert words in page
    assert "stuck in two (0)" in text
    assert "<b>a fast one</b>" not in page
    assert "&lt;b&gt;a fast one" in page
    assert "<script" not in page
    loaded = re.findall(r"""(?:\b(?:src|href)=|url\()["']?([^"')>]+)""", page)
    assert all(each.startswith(("#", "data:")) for each in loaded), "the page needs nothing but itself"
    for picture in (folder / "plots").glob("*.png"):
        assert picture.name in text
        assert picture.read_bytes().startswith(b"\x89PNG")
    assert len(list((folder / "plots").glob("*.png"))) == 4


def test_every_number_has_its_seeds_and_tasks(folder):
    rows = [row for row in numbers(folder) if "slice" not in row and row["arm"] != "stuck"]
    assert len(rows) == 2 * 2
    for row in rows:
        for when in ("before", "after", "gain"):
            assert len(row[when]["each"]) == 2
            assert row[when]["n"] == 8
            assert row[when]["seeds"] is not None
    lengths = [row["after"]["mean"] for row in rows if row["table"].startswith("Tokens")]
    assert all(length > 0 for length in lengths)


def test_what_is_done_is_not_done_again(path, folder):
    before = {each: each.stat().st_mtime_ns for each in folder.rglob("*.safetensors")}
    output = good("lab", path, *SMALL, "--out", folder, "--resume", "--seeds", 2, "--condition", "one")
    assert "stuck" not in output
    assert before == {each: each.stat().st_mtime_ns for each in folder.rglob("*.safetensors")}
    assert {row["condition"] for row in numbers(folder)} == {"one"}
    assert "stuck" not in (folder / "report.md").read_text()


def test_a_folder_of_another_lab_is_refused(path, folder, tmp_path):
    assert "holds a lab already; go on with --resume" in bad("lab", path, *SMALL, "--out", folder)
    assert "holds the lab mine, not gating" in bad("lab", "gating", "--out", folder, "--resume")
    assert 'was started with settings ["world' in bad("lab", path, *SMALL[1:], "--out", folder, "--resume")
    assert "quick false, not true" in bad("lab", path, *SMALL, "--quick", "--out", folder, "--resume")
    (tmp_path / "mine.yaml").write_text(SET.replace("steps: 4\nbaseline", "steps: 5\nbaseline"))
    assert "another steps in its set" in bad("lab", tmp_path / "mine.yaml", *SMALL, "--out", folder, "--resume")
    with alone(folder):
        said = bad("lab", path, *SMALL, "--out", folder, "--resume")
    assert "another process is at work" in said


def test_a_job_is_one_processes_work_and_without_its_parent_it_stops(path, folder):
    """A worker outlives its killed parent by a step: whoever goes on must not work beside it, nor work for nobody."""
    name = "seed-0/one/plain"
    mark = folder / "jobs" / f"{name}.done.json"
    kept = mark.read_text()
    mark.unlink()
    try:
        with held(folder / "jobs" / f"{name}.lock", wait=False):
            late = worker(folder, name, os.getpid())
            with pytest.raises(subprocess.TimeoutExpired):
                late.wait(15)
            assert not mark.exists()
        assert late.wait(60) == 0
        assert mark.exists()
        mark.unlink()
        assert worker(folder, name, 1 << 30).wait(60) == 130  # no parent of that number: it is gone
        assert not mark.exists()
    finally:
        mark.write_text(kept)


def worker(folder, name, parent):
    return subprocess.Popen([sys.executable, "-m", "saccade.lab.work", str(folder), name, str(parent)])


# ---- stopped and killed ----------------------------------------------------------------------------------------------


def started(path, out, *more):
    command = [sys.executable, "-c", "from saccade.cli import main; main()", "lab", str(path), *SMALL]
    return subprocess.Popen(
        [*command, "--out", str(out), "--seeds", "1", *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for(found, process, seconds=120):
    end = time.monotonic() + seconds
    while not found():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end
        time.sleep(0.05)


def workers(out):
    """The processes that work in a folder."""
    found = []
    for line in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = line.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"saccade.lab.work" in words and str(out).encode() in words:
            found.append(int(line.parent.name))
    return found


def test_stopped_and_killed_it_goes_on_to_the_same_numbers(path, folder, tmp_path):
    out = tmp_path / "out"
    wanted = Lab.of(str(path), settings=SMALL, seeds=1, conditions=["one"])
    stopped = started(path, out, "--condition", "one")
    wait_for(lambda: (out / "seed-0/starts/usual/metrics.jsonl").exists(), stopped)
    stopped.send_signal(signal.SIGINT)
    said = stopped.communicate(timeout=60)[0]
    assert stopped.returncode == 130
    assert "Go on with: " in said
    assert "--resume" in said
    assert workers(out) == []

    killed = started(path, out, "--condition", "one", "--resume")
    wait_for(lambda: (out / "seed-0/one/plain/metrics.jsonl").exists(), killed)
    os.kill(killed.pid, signal.SIGKILL)
    killed.communicate(timeout=60)
    wait_for_nobody = time.monotonic() + 60
    while workers(out):
        assert time.monotonic() < wait_for_nobody, "a worker outlives its parent"
        time.sleep(0.1)
    assert not all((out / "jobs" / f"{job.name}.done.json").exists() for job in wanted.jobs())

    good("lab", path, *SMALL, "--out", out, "--resume", "--seeds", 1, "--condition", "one")
    good("lab", path, *SMALL, "--out", folder, "--resume", "--seeds", 1, "--condition", "one")
    assert numbers(out) == numbers(folder)
    rows = [Run.open(each / "seed-0/one/hot").metrics("rl") for each in (out, folder)]
    assert [row["accuracy"] for row in rows[0]] == [row["accuracy"] for row in rows[1]]
    assert [row.get("entropy") for row in rows[0]] == [row.get("entropy") for row in rows[1]]
