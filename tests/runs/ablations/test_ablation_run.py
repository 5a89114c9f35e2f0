"""`saccade ablate` end to end: real processes and runs; interrupted, killed, resumed."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from ablation_cases import SET, SMALL
from commands import bad, fail, good, lock_elsewhere, run
from polling import block_until

import saccade
from saccade.errors import RunError
from saccade.runs.ablations.schedule import Ablation
from saccade.runs.ablations.worker import lock_file
from saccade.runs.run_folder import Run
from saccade.runs.run_lock import ABLATION

pytestmark = [pytest.mark.slow, pytest.mark.soak]


@pytest.fixture(scope="module", params=[1, 2], ids="{}_seeds".format)
def num_seeds(request):
    return request.param


@pytest.fixture(scope="module")
def folder(num_seeds, tmp_path_factory):
    return tmp_path_factory.mktemp("lab") / "out"


@pytest.fixture(scope="module")
def path(folder):
    (folder.parent / "mine.yaml").write_text(SET)
    return folder.parent / "mine.yaml"


@pytest.fixture(scope="module", autouse=True)
def first(path, folder, num_seeds):
    """Everything once; one variant fails with each seed."""
    return run("ablate", path, *SMALL, "--seeds", num_seeds, "--out", folder)


def read_yaml(file):
    return yaml.safe_load(file.read_text())


def numbers(folder):
    return json.loads((folder / "results.json").read_text())["tables"]


def test_the_plan_is_printed_first_and_a_failed_run_last(first, folder, num_seeds):
    assert first.exit_code == 1
    numbers = [int(number) for number in re.findall(r"\d+", first.output.splitlines()[0])]
    assert numbers[:5] == [3, num_seeds, 3 * num_seeds, 4, 2 * num_seeds]  # variants, seeds, runs, steps, checkpoints
    assert "seed-0/two/stuck: FAILED" in first.output
    assert first.stderr.startswith(f"{num_seeds} ")
    assert str(folder) in first.stderr
    assert f"seed-{num_seeds - 1}/one/hot: done" in first.output
    assert "Traceback" not in first.output


def test_variants_share_dataset_weights_and_tasks(folder, num_seeds):
    for seed in range(num_seeds):
        runs = {arm: Run.open(folder / f"seed-{seed}/one/{arm}") for arm in ("plain", "hot")}
        recipes = [run.recipe for run in runs.values()]
        stored = [read_yaml(run.path / "recipe.yaml")["model"]["path"] for run in runs.values()]
        assert stored[0] == stored[1] == "../../initial_checkpoints/base_sft/sft/step-000004"
        assert recipes[0].model.path == recipes[1].model.path
        assert recipes[0].data == recipes[1].data
        assert recipes[0].seed == seed
        other = read_yaml(folder / f"seed-{seed}/two/stuck/recipe.yaml")
        assert other["model"]["path"] == "../../initial_checkpoints/other/sft/step-000002"
        facts = [json.loads((folder / f"seed-{seed}/one/{arm}/results.json").read_text()) for arm in runs]
        assert facts[0]["greedy"]["task"] == facts[1]["greedy"]["task"] == facts[0]["tools_off"]["task"]
        assert facts[0]["greedy"]["frame_budget"] == facts[1]["greedy"]["frame_budget"]
    tasks = {(folder / f"seed-{seed}/data/test/tasks.jsonl").read_text() for seed in range(num_seeds)}
    assert len(tasks) == num_seeds


def test_variants_with_equal_weights_sample_equal_rollouts(folder):
    plain, hot = (saccade.read_episodes(folder / f"seed-0/one/{variant}", step=1) for variant in ("plain", "hot"))
    assert [record.episode.ledger for record in plain] == [record.episode.ledger for record in hot]
    assert plain


def test_the_report_lists_results_and_failures(folder):
    text, page = ((folder / f"report.{end}").read_text().replace("\\", "") for end in ("md", "html"))
    for words in (
        "nothing is claimed",  # of the spec, as the next one
        "whether an ablation works",
        "seed-0/two/stuck",
        "after − before",
    ):
        assert words in text
        assert words in page
    assert "stuck in two (0)" in text
    assert "<b>a fast one</b>" not in page
    assert "&lt;b&gt;a fast one" in page
    assert "<script" not in page
    loaded = re.findall(r"""(?:\b(?:src|href)=|url\()["']?([^"')>]+)""", page)
    assert all(link.startswith(("#", "data:")) for link in loaded), "the page needs nothing but itself"
    for picture in (folder / "plots").glob("*.png"):
        assert picture.name in text
        assert picture.read_bytes().startswith(b"\x89PNG")
    assert len(list((folder / "plots").glob("*.png"))) == 4


def test_every_number_has_its_seeds_and_tasks(folder, num_seeds):
    rows = [row for row in numbers(folder) if "slice" not in row and row["variant"] != "stuck"]
    assert len(rows) == 2 * 2
    for row in rows:
        for when in ("before", "after", "gain"):
            assert len(row[when]["seed_means"]) == num_seeds
            assert row[when]["num_tasks"] == 4 * num_seeds
            assert (row[when]["seed_interval"] is None) == (num_seeds == 1)
    lengths = [row["after"]["mean"] for row in rows if row["table"].startswith("Tokens")]
    assert all(length > 0 for length in lengths)


def test_finished_runs_are_not_repeated(path, folder, num_seeds):
    before = {file: file.stat().st_mtime_ns for file in folder.rglob("*.safetensors")}
    output = good("ablate", path, *SMALL, "--out", folder, "--resume", "--seeds", num_seeds, "--condition", "one")
    assert "stuck" not in output
    assert before == {file: file.stat().st_mtime_ns for file in folder.rglob("*.safetensors")}
    assert {row["condition"] for row in numbers(folder)} == {"one"}
    assert "stuck" not in (folder / "report.md").read_text()


def test_a_folder_of_another_lab_is_refused(path, folder, tmp_path):
    assert str(folder) in bad("ablate", path, *SMALL, "--out", folder)
    assert "anchoring" in bad("ablate", "anchoring", "--out", folder, "--resume")
    assert 'settings=["synthetic' in bad("ablate", path, *SMALL[1:], "--out", folder, "--resume")
    assert "quick=false" in bad("ablate", path, *SMALL, "--quick", "--out", folder, "--resume")
    (tmp_path / "mine.yaml").write_text(SET.replace("steps: 4\nbaseline", "steps: 5\nbaseline"))
    assert "spec.steps=4" in bad("ablate", tmp_path / "mine.yaml", *SMALL, "--out", folder, "--resume")
    with lock_elsewhere(folder, ABLATION):
        fail(RunError, "ablate", path, *SMALL, "--out", folder, "--resume", key=folder)


def test_a_job_runs_in_one_process_and_ends_with_its_parent(path, folder):
    """A worker outlives its killed parent by a step: a resumed run must not work beside it."""
    name = "seed-0/one/plain"
    mark = folder / "jobs" / f"{name}.done.json"
    kept = mark.read_text()
    mark.unlink()
    try:
        with lock_file(folder / "jobs" / f"{name}.lock"):
            waiting_worker = worker(folder, name, os.getpid())
            wait_for(lambda: is_waiting_for_a_lock(waiting_worker.pid), waiting_worker)
            assert not mark.exists()
        assert waiting_worker.wait(60) == 0
        assert mark.exists()
        mark.unlink()
        assert worker(folder, name, 1 << 30).wait(60) == 130  # no parent of that number: it is gone
        assert not mark.exists()
    finally:
        mark.write_text(kept)


def is_waiting_for_a_lock(pid):
    lines = Path("/proc/locks").read_text().splitlines()
    return any("->" in line and str(pid) in line.split() for line in lines)


def worker(folder, name, parent):
    return subprocess.Popen([sys.executable, "-m", "saccade.runs.ablations.worker", str(folder), name, str(parent)])


# ---- stopped and killed ----------------------------------------------------------------------------------------------


def start_ablation(path, out, *more):
    command = [sys.executable, "-c", "from saccade.cli.app import main; main()", "ablate", str(path), *SMALL]
    return subprocess.Popen(
        [*command, "--out", str(out), "--seeds", "1", *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for(found, process):
    block_until(lambda: process.poll() is not None or found())
    assert process.poll() is None, process.communicate()[0]


def workers(out):
    """The processes that work in a folder."""
    found = []
    for line in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = line.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"saccade.runs.ablations.worker" in words and str(out).encode() in words:
            found.append(int(line.parent.name))
    return found


@pytest.mark.soak
@pytest.mark.parametrize("is_interrupted", [False, True])
def test_an_interrupted_and_killed_ablation_resumes_to_the_same_results(path, folder, tmp_path, is_interrupted):
    """A run that is killed, or first interrupted and then killed."""
    out, more = tmp_path / "out", ["--condition", "one"]
    ablation = Ablation.from_spec(str(path), settings=SMALL, seeds=1, conditions=["one"])
    if is_interrupted:
        stopped = start_ablation(path, out, *more)
        wait_for(lambda: (out / "seed-0/initial_checkpoints/base_sft/metrics.jsonl").exists(), stopped)
        stopped.send_signal(signal.SIGINT)
        output = stopped.communicate()[0]
        assert stopped.returncode == 130
        assert "--resume" in output
        assert workers(out) == []
        more.append("--resume")

    killed = start_ablation(path, out, *more)
    wait_for(lambda: (out / "seed-0/one/plain/metrics.jsonl").exists(), killed)
    os.kill(killed.pid, signal.SIGKILL)
    killed.communicate()
    block_until(lambda: not workers(out))  # no worker outlives its parent
    assert not all((out / "jobs" / f"{job.name}.done.json").exists() for job in ablation.build_jobs())

    good("ablate", path, *SMALL, "--out", out, "--resume", "--seeds", 1, "--condition", "one")
    good("ablate", path, *SMALL, "--out", folder, "--resume", "--seeds", 1, "--condition", "one")
    assert numbers(out) == numbers(folder)
    rows = [Run.open(out_folder / "seed-0/one/hot").read_metrics("rl") for out_folder in (out, folder)]
    assert [row["accuracy"] for row in rows[0]] == [row["accuracy"] for row in rows[1]]
    assert [row.get("entropy") for row in rows[0]] == [row.get("entropy") for row in rows[1]]
