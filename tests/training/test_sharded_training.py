"""Several processes that shard a model train like one: losses, gradient norms and weights agree."""

import functools
import json
import os
import pickle
import shutil
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import sharded_cases
import torch
from sharded_cases import CASES
from torch.utils._pytree import tree_flatten
from training_cases import alternate, with_reward
from transformers import AutoConfig, AutoModelForImageTextToText

from saccade import models
from saccade.models.tiny import make_tiny_model
from saccade.training import rl
from saccade.training.checkpoint import list_checkpoints

COMPARED = ("reward", "loss", "grad_norm", "entropy", "packed_tokens", "trained_tokens", "kl")


def run_processes(action, work, out, *, num_processes=2, num_nodes=1):
    """Run an action of `sharded_cases` through torchrun, with so many processes on each of so many nodes."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={num_processes}"]
    script = [sharded_cases.__file__, action, str(work), str(out)]
    if num_nodes == 1:
        commands = [[*torchrun, "--standalone", *script]]
    else:
        with socket.create_server(("127.0.0.1", 0)) as server:
            address = ("--master-addr=127.0.0.1", f"--master-port={server.getsockname()[1]}")
        nodes = (f"--nnodes={num_nodes}", *address)
        commands = [[*torchrun, *nodes, f"--node-rank={rank}", *script] for rank in range(num_nodes)]
    environment = {**os.environ, "PYTHONPATH": str(Path(models.__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    launched = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for command in commands
    ]
    try:
        outputs = [process.communicate(timeout=600)[0] for process in launched]
    finally:
        for process in launched:
            process.kill()
    assert [process.returncode for process in launched] == [0] * num_nodes, "\n".join(outputs)


def fork_processes(work, jobs):
    """Run jobs of `sharded_cases`: nodes, processes of each, actions with folders; modules are imported once."""
    command = [sys.executable, sharded_cases.__file__, "jobs", str(work), json.dumps(jobs, default=str)]
    environment = {**os.environ, "PYTHONPATH": str(Path(models.__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def record_samples(workspace, monkeypatch, folder):
    """Run RL in this process; return the samples of each of its steps."""
    recorded, update = [], rl.run_policy_update

    async def record(components, samples, *args):
        recorded.append(samples)
        return await update(components, samples, *args)

    with monkeypatch.context() as patch:
        patch.setattr(rl, "run_policy_update", record)
        components = with_reward(workspace.load_components(f"rl.steps={sharded_cases.STEPS}"), alternate)
        workspace.run_rl(components, folder)
    return recorded


@pytest.fixture(scope="module")
def prepared(workspace, tmp_path_factory):
    """The workspace, samples of RL and the folder of what two processes trained."""
    work = tmp_path_factory.mktemp("sharded")
    make_tiny_model(
        str(workspace.root / "untied"),
        family="qwen2_5_vl",
        hidden_size=64,
        num_layers=2,
        tie_word_embeddings=False,
    )
    config = AutoConfig.from_pretrained(workspace.root / "model")
    config.text_config.num_hidden_layers = 1
    shutil.copytree(workspace.root / "model", workspace.root / "shallow")
    shallow = AutoModelForImageTextToText.from_pretrained(workspace.root / "model", config=config)
    shallow.save_pretrained(workspace.root / "shallow")
    samples = record_samples(workspace, pytest.MonkeyPatch(), work / "rl")
    (work / "workspace.pickle").write_bytes(pickle.dumps((workspace, samples)))
    return workspace, samples, work


SHAPES = [(1, 2), (1, 4), (2, 2)]


@pytest.fixture(scope="module", params=SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def trained(request, prepared, tmp_path_factory):
    """What that many nodes and processes of each trained; several nodes replicate the weights (HSDP)."""
    workspace, samples, work = prepared
    out = tmp_path_factory.mktemp("out")
    num_nodes, num_processes = request.param
    run_processes("cases", work, out, num_nodes=num_nodes, num_processes=num_processes)
    return workspace, samples, out, num_nodes * num_processes


@pytest.fixture(scope="module")
def forked(prepared, tmp_path_factory):
    """What processes give that need no torchrun of their own."""
    *_, work = prepared
    out = tmp_path_factory.mktemp("forked")
    resumed = (("continue", "sharded"), ("continue copy", "resumed"), ("continue uninterrupted", "whole"))
    jobs = [
        (1, 2, [("few", out / "few-1-2"), *((action, out / name) for action, name in resumed)]),
        (1, 1, [("continue", out / "sharded")]),
        (1, 4, [("continue", out / "sharded")]),
        (2, 2, [("few", out / "few-2-2")]),
        *([(1, 2, [("8-bit", out / "8-bit")])] if sharded_cases.HAS_TORCHAO else []),
        *((1, 2, [(action, out / action)]) for action in sharded_cases.FAILING),
    ]
    for action in sharded_cases.FAILING:
        (out / action).mkdir()
    fork_processes(work, jobs)
    return out


@pytest.fixture(scope="module")
def expect(prepared, tmp_path_factory):
    """Return a function that trains a case in this process, once: the metrics of its steps and its folder."""
    workspace, samples, _ = prepared

    @functools.cache
    def train(name):
        folder, case = tmp_path_factory.mktemp("alone"), CASES[name]
        case = replace(case, overrides=(*case.overrides, *case.overrides_alone))
        return sharded_cases.train(workspace, case, folder, samples)["rows"], folder

    return train


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_nodes", "num_processes", "name"),
    [(*shape, name) for shape, names in sharded_cases.FEW_CASES.items() for name in names],
)
def test_two_and_four_processes_train_like_one(forked, expect, num_nodes, num_processes, name):
    check_training(expect, forked / f"few-{num_nodes}-{num_processes}", name)


@pytest.mark.soak
@pytest.mark.parametrize("name", CASES)
def test_several_processes_train_like_one(trained, expect, name):
    *_, out, _ = trained
    check_training(expect, out, name)


def check_training(expect, out, name):
    """What several processes wrote to `out` must equal what this one trains."""
    case, (expected, alone) = CASES[name], expect(name)
    result = json.loads((out / name / "result.json").read_text())
    assert len(result["rows"]) == len(expected) == sharded_cases.STEPS
    for row, expected_row in zip(result["rows"], expected, strict=True):
        for metric in COMPARED:
            if metric in expected_row:
                assert row[metric] == pytest.approx(expected_row[metric], rel=case.tolerance, abs=1e-7), metric
    if "kl" in expected[-1]:
        assert expected[-1]["kl"] > 1e-6  # the reference isn't the current policy
    ours, theirs = (sharded_cases.read_weights(folder / "final") for folder in (alone, out / name))
    assert ours.keys() == theirs.keys()
    distance = torch.stack([(ours[key] - theirs[key]).norm() for key in ours]).norm()
    assert distance <= 10 * case.tolerance * torch.stack([value.norm() for value in ours.values()]).norm()


@pytest.mark.soak
@pytest.mark.parametrize("stage", ["sft", "rl"])
def test_ranks_have_different_numbers_of_micro_batches(trained, stage):
    *_, out, num_ranks = trained
    counts = [
        count
        for name in CASES
        if name.startswith(stage)
        for count in json.loads((out / name / "result.json").read_text())["counts"]
    ]
    assert max(counts) > num_ranks
    assert any(count % num_ranks for count in counts)  # the last ranks had an empty one, without images


@pytest.mark.slow
def test_a_resumed_training_equals_an_uninterrupted_one_bit_for_bit(forked):
    check_equal_checkpoints(forked, "step-000004")


@pytest.mark.slow
@pytest.mark.skipif(not sharded_cases.HAS_TORCHAO, reason="needs torchao")
def test_a_resumed_training_with_8_bits_equals_an_uninterrupted_one_bit_for_bit(forked):
    check_equal_checkpoints(forked / "8-bit", "step-000004")


@pytest.mark.soak
def test_a_resumed_training_of_any_shape_equals_an_uninterrupted_one_bit_for_bit(trained):
    *_, out, _ = trained
    check_equal_checkpoints(out, "step-000006")


def check_equal_checkpoints(out, step):
    whole, resumed = (sharded_cases.read_weights(out / name / step) for name in ("whole", "resumed"))
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(whole[key], resumed[key]) for key in whole)


@pytest.mark.soak
def test_an_order_that_rank_0_aborts_leaves_the_others_ready(trained):
    *_, out, _ = trained
    aborted = json.loads((out / "aborted.json").read_text())
    result = json.loads((out / "rl" / "result.json").read_text())
    assert aborted["key"] == "pixels"
    for metric in COMPARED[:2]:
        assert aborted["rows"][0][metric] == pytest.approx(result["rows"][0][metric], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("action", "reason"), [("fail", "a loss that fails"), ("memory", "rl.micro_batch_size")])
def test_a_failure_of_another_rank_is_one_sentence_on_rank_0(forked, action, reason):
    first, second = json.loads((forked / action / "errors.json").read_text())
    assert "rank 1" in first
    assert reason in first
    assert "rank" in second or action == "memory"  # after which the next call splits the micro-batch
    assert "\n" not in first + second


@pytest.mark.soak
def test_a_nan_on_another_rank_stops_all_ranks_after_a_checkpoint_of_the_step_before(prepared, tmp_path):
    *_, work = prepared
    run_processes("nan", work, tmp_path)
    key, message = json.loads((tmp_path / "errors.json").read_text())
    assert key == "optim.lr"
    assert message.startswith(f"step 3: the gradient of {sharded_cases.NAN_WEIGHT} ")
    assert [saved.step for saved in list_checkpoints(tmp_path)] == [2]


@pytest.mark.slow
def test_a_checkpoint_is_sharded_anew_over_other_numbers_of_processes(prepared, forked, tmp_path):
    """Two, then one, then four."""
    workspace, *_ = prepared
    sharded_cases.continue_training(workspace, tmp_path)
    ours, theirs = (sharded_cases.read_weights(folder / "step-000006") for folder in (tmp_path, forked / "sharded"))
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        assert (value - theirs[key]).norm() <= 1e-4 * max(1.0, float(value.norm())), key


@pytest.mark.soak
def test_training_continues_while_all_ranks_write_a_checkpoint(prepared, tmp_path):
    *_, work = prepared
    run_processes("beside", work, tmp_path)
    assert json.loads((tmp_path / "seen.json").read_text()) == []  # when the fourth step had begun
    for step in (2, 4):
        beside, waiting = (torch.load(tmp_path / f"{name}-{step}.pt") for name in ("beside", "waiting"))
        assert tree_flatten(beside)[1] == tree_flatten(waiting)[1]
        for ours, theirs in zip(tree_flatten(beside)[0], tree_flatten(waiting)[0], strict=True):
            assert torch.equal(ours, theirs) if isinstance(ours, torch.Tensor) else ours == theirs


@pytest.mark.soak
def test_a_rank_that_cannot_write_is_one_sentence_on_rank_0(prepared, tmp_path):
    *_, work = prepared
    run_processes("full", work, tmp_path)
    errors = json.loads((tmp_path / "errors.json").read_text())
    assert len(errors) == 2
    assert all("no space left on device; free some space" in error and "\n" not in error for error in errors)
    assert not list_checkpoints(tmp_path / "true") + list_checkpoints(tmp_path / "false")


RANK_THAT_EXITS = """
import atexit
from saccade.utils.rank_exit import exit_rank

class Finalized:
    def __del__(self, print=print):
        print("finalized")

kept = Finalized()
atexit.register(print, "at exit")
exit_rank(3)
"""


@pytest.mark.slow
def test_a_rank_exits_without_finalizing_the_interpreter():
    """Or else a thread of gloo may abort it."""
    done = subprocess.run([sys.executable, "-c", RANK_THAT_EXITS], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split("\n")) == (3, ["at exit", ""]), done.stderr
    environment = {**os.environ, "TORCHELASTIC_RUN_ID": "none"}
    for argument, returncode in (("--version", 0), ("--no-such-option", 2)):
        command = [sys.executable, "-m", "saccade", argument]
        assert subprocess.run(command, env=environment, capture_output=True, check=False).returncode == returncode
