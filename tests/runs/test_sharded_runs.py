"""`saccade sft` and `saccade rl` in several processes: through `--nproc` and through torchrun."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from commands import fail
from polling import block_until

import saccade
from saccade.config.load import load_recipe
from saccade.errors import RunError
from saccade.runs import pipeline
from saccade.training.checkpoint import find_newest_checkpoint
from saccade.training.train_step import LIMIT_FILE

SMALL = [
    "model.num_threads=1",
    "sft.tokens_per_step=600",
    "sft.optim.warmup_steps=1",
    "rl.prompts_per_step=2",
    "rl.group_size=2",
    "sampling.max_tokens=16",
]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "saccade"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a dataset and a tiny model."""
    root = tmp_path_factory.mktemp("processes")
    overrides = ["synthetic={train: 3, validation: 1, test: 1, clip_seconds: 16, events: [1, 2], frame_size: 32}"]
    recipe = load_recipe("tiny/para_grpo", overrides)
    pipeline.generate_data(root / "data", recipe, on_progress=lambda *_: None)
    pipeline.create_tiny_model(root / "model", recipe, demonstrations=root / "data/train/demonstrations.jsonl")
    return root


def start(program, folder, *arguments):
    source = str(Path(saccade.__file__).parents[1])
    return subprocess.Popen(
        [*program, *map(str, arguments), *SMALL],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process, returncode=0):
    """Wait for a command; return its stderr."""
    try:
        stdout, stderr = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == returncode, stdout + stderr
    return stderr


def read_steps(run, stage):
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [row["step"] for row in rows if row["stage"] == stage]


@pytest.mark.slow
def test_rl_after_sft_samples_from_the_sharded_weights(folder):
    model = ("--model", folder / "model", "--data", folder / "data", "--out", folder / "rl", "--stage", "sft,rl")
    steps = ("sft.steps=1", "rl.steps=2", "rl.save_every=1", "rl.kl.loss_coef=0.1")
    finish(start(TORCHRUN, folder, "train", "tiny/para_grpo", *model, *steps))
    assert [read_steps(folder / "rl", stage) for stage in ("sft", "rl")] == [[1], [1, 2]]
    rows = [json.loads(line) for line in (folder / "rl" / "metrics.jsonl").read_text().splitlines()]
    # The engine's copy has the weights of the version: the trainer finds the logprobs that the engine reported.
    updated = [row for row in rows if row["stage"] == "rl" and row["updates"]]
    assert all(row["engine_trainer_logprob_diff_max"] < 1e-3 for row in updated)
    assert find_newest_checkpoint(folder / "rl" / "rl").step == 2


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="finds the rank in /proc")
@pytest.mark.parametrize(
    ("rank", "num_processes"),
    [(1, 2), *(pytest.param(rank, 4, marks=pytest.mark.soak) for rank in range(4))],
)
def test_a_killed_rank_ends_the_job_with_one_sentence(folder, rank, num_processes):
    program, run = [sys.executable, "-m", "saccade"], folder / f"killed-{rank}-{num_processes}"
    model = ("--model", folder / "model", "--data", folder / "data", "--out", run, "--nproc", num_processes)
    process = start(program, folder, "sft", "tiny/para_grpo", *model, "sft.steps=5000", "sft.save_every=2")
    saved = run / "sft"
    block_until(lambda: find_newest_checkpoint(saved) is not None or process.poll() is not None)
    os.kill(find_rank(process.pid, rank), signal.SIGKILL)
    [line] = finish(process, returncode=1).splitlines()
    assert "rank" in line
    assert "--resume" in line
    assert ".cc" not in line  # a source file of gloo
    newest = find_newest_checkpoint(saved)
    assert read_steps(run, "sft")[: newest.step] == list(range(1, newest.step + 1))
    arguments = ("sft", "tiny/para_grpo", *model[:-2], "sft.steps=5000", "sft.save_every=2", *SMALL, "--resume")
    assert "--nproc" in fail(RunError, *arguments, key=newest.folder)


@pytest.mark.soak  # if the rank is stopped before rank 0 has its last answer, rank 0 waits
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="finds the rank in /proc")
def test_a_rank_killed_at_its_end_while_rank_0_evaluates_ends_the_job_with_one_sentence(folder):
    run = folder / "evaluated"
    model = ("--model", folder / "model", "--data", folder / "data", "--out", run, "--nproc", 2)
    steps = ("--stage", "sft,eval", "sft.steps=1", "evaluation.num_samples=100")
    process = start([sys.executable, "-m", "saccade"], folder, "train", "tiny/para_grpo", *model, *steps)
    block_until(lambda: (run / "recipe.yaml").exists() or process.poll() is not None)
    rank = find_rank(process.pid, 1)
    block_until(lambda: (run / "finished_stages" / "sft.json").exists() or process.poll() is not None)
    os.kill(rank, signal.SIGSTOP)  # a rank that is slow to end
    block_until(lambda: any((run / "evaluations").glob("*.jsonl")) or process.poll() is not None)
    os.kill(rank, signal.SIGKILL)
    [line] = finish(process, returncode=1).splitlines()
    assert "rank 1 was ended by signal 9" in line


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="finds the rank in /proc")
@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.soak)])
def test_a_rank_killed_while_modules_are_imported_ends_the_job_with_one_sentence(folder, rank):
    model = ("--model", folder / "model", "--data", folder / "data", "--out", folder / "early", "--nproc", 2)
    process = start([sys.executable, "-m", "saccade"], folder, "sft", "tiny/para_grpo", *model)
    started = []
    block_until(lambda: started.append(find_rank(process.pid, rank)) or started[-1] or process.poll() is not None)
    os.kill(started[-1], signal.SIGKILL)
    [line] = finish(process, returncode=1).splitlines()
    assert f"rank {rank} was ended by signal 9" in line
    assert "--resume" in line


@pytest.mark.soak
def test_sigterm_stops_all_ranks_after_a_checkpoint_of_the_last_step(folder):
    program = [sys.executable, "-m", "saccade"]
    model = ("--model", folder / "model", "--data", folder / "data", "--out", folder / "stopped", "--nproc", 2)
    process = start(program, folder, "sft", "tiny/para_grpo", *model, "sft.steps=5000", "sft.save_every=5000")
    metrics = folder / "stopped" / "metrics.jsonl"
    block_until(
        lambda: process.poll() is not None or (metrics.exists() and len(read_steps(folder / "stopped", "sft")) > 2)
    )
    process.send_signal(signal.SIGTERM)
    stderr = finish(process, returncode=128 + signal.SIGTERM)
    assert "Traceback" not in stderr
    assert "--resume" in stderr.strip().splitlines()[-1]
    steps = read_steps(folder / "stopped", "sft")
    assert steps == list(range(1, len(steps) + 1))
    assert find_newest_checkpoint(folder / "stopped" / "sft").step == len(steps)


@pytest.mark.soak
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="finds the rank in /proc")
def test_a_rank_that_hangs_ends_the_job_after_the_timeout(folder):
    program = [sys.executable, "-m", "saccade"]
    model = ("--model", folder / "model", "--data", folder / "data", "--out", folder / "hung", "--nproc", 2)
    settings = ("sft.steps=5000", "sft.save_every=2", "model.collective_timeout=20")
    process = start(program, folder, "sft", "tiny/para_grpo", *model, *settings)
    saved = folder / "hung" / "sft"
    block_until(lambda: find_newest_checkpoint(saved) is not None or process.poll() is not None)
    rank = find_rank(process.pid, 1)
    os.kill(rank, signal.SIGSTOP)
    try:
        stderr = finish(process, returncode=1)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank, signal.SIGKILL)
    assert "Traceback" not in stderr
    assert "--resume" in stderr.strip().splitlines()[-1]
    newest = find_newest_checkpoint(saved)
    assert read_steps(folder / "hung", "sft")[: newest.step] == list(range(1, newest.step + 1))


@pytest.mark.soak
def test_weights_that_rank_0_cannot_read_end_the_job_with_one_sentence(folder):
    damaged = folder / "damaged"
    shutil.copytree(folder / "model", damaged)
    for file in damaged.glob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:100])
    model = ("--model", damaged, "--data", folder / "data", "--out", folder / "unread", "--nproc", 2)
    stderr = finish(start([sys.executable, "-m", "saccade"], folder, "sft", "tiny/para_grpo", *model), returncode=1)
    assert "Traceback" not in stderr
    assert stderr.count(str(damaged)) == 1


SPREAD = "def spread(episode):\n    return float(sum(episode.ledger.input_ids()) % 7)  # sampled replies differ\n"
CROWDED = """\
'''The clipped loss, which needs too much memory for the first micro-batch of several samples.'''

from pathlib import Path

import torch
from saccade.algorithms.losses.ppo_clip import ppo_clip
from torch import distributed

MARK = Path(__file__).with_suffix(".failed")


def crowded(logp_N, old_logp_N, adv_N, seq_N):
    if len(seq_N.unique()) > 1 and distributed.get_rank() == RANK and not MARK.exists():
        MARK.touch()
        raise torch.OutOfMemoryError("out of memory")
    return ppo_clip(logp_N, old_logp_N, adv_N, seq_N)
"""


@pytest.mark.soak
@pytest.mark.parametrize("rank", [0, 1])
def test_a_micro_batch_that_does_not_fit_on_a_rank_is_split_when_the_processes_start_again(folder, rank):
    (folder / "spread.py").write_text(SPREAD)
    (folder / f"crowded_{rank}.py").write_text(
        CROWDED.replace("crowded(", f"crowded_{rank}(").replace("RANK", str(rank))
    )
    data = ("--model", folder / "model", "--data", folder / "data", "--nproc", 2)
    steps = (
        "rl.steps=2",
        "rl.save_every=1",
        "rl.group_size=4",
        "rewards={./spread.py: {weight: 10}}",
        "frame_budgets=[4]",
        "rl.pack_length=110",
        "rl.micro_batch_size=1",
    )
    rows = []
    for name, loss in ((f"whole-{rank}", "ppo_clip"), (f"split-{rank}", f"./crowded_{rank}.py")):
        arguments = ("rl", "tiny/para_grpo", *data, "--out", folder / name, *steps, f"rl.loss.name={loss}")
        stderr = finish(start([sys.executable, "-m", "saccade"], folder, *arguments))
        lines = (folder / name / "metrics.jsonl").read_text().splitlines()
        rows.append([row for row in map(json.loads, lines) if row["stage"] == "rl"])
    assert len(stderr.splitlines()) == 1, stderr
    assert f"rank {rank}" in stderr
    assert (folder / f"split-{rank}" / LIMIT_FILE).exists() > (folder / f"whole-{rank}" / LIMIT_FILE).exists()
    whole, split = rows
    assert [row["step"] for row in split] == [row["step"] for row in whole] == [1, 2]
    for metric in ("reward", "loss", "grad_norm", "trained_tokens"):
        assert [row[metric] for row in split] == pytest.approx([row[metric] for row in whole], rel=1e-3, abs=1e-6)


def find_rank(parent, rank):
    """Return the process id of a rank that a process has started, or None."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                status, environment = (folder / "stat").read_text(errors="replace"), (folder / "environ").read_bytes()
            except OSError:
                continue
            if int(status.rpartition(")")[2].split()[1]) == parent and f"\0RANK={rank}\0".encode() in environment:
                return int(folder.name)
    return None
