"""Trainings that one process and several do alike.

A script under torchrun, `sharded_cases.py ACTION WORK OUT`, runs one of ACTIONS with the `workspace.pickle` in WORK.
`sharded_cases.py jobs WORK JOBS` runs several jobs, one after another, each in processes that it forks through
torchrun's API: modules are imported once. JOBS is a JSON list of [nodes, processes of each, [[ACTION, OUT], ...]];
several nodes are simulated by the environment of their processes.
"""

import errno
import importlib.util
import json
import os
import pickle
import shutil
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import distributed
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from training_cases import with_reward
from transformers import AutoModelForImageTextToText

from saccade.config.schema import ModelConfig
from saccade.errors import MediaError, RunError
from saccade.ledger import Ledger
from saccade.rollouts.executors import connect_executor
from saccade.runs import pipeline
from saccade.training import checkpoint, rl
from saccade.training.distributed import worker
from saccade.training.distributed.launch import count_processes, join_training_processes
from saccade.training.distributed.vlm import ShardedOptimizer, ShardedVisionLanguageModel, create_optimizer
from saccade.training.optimizer import STATE_FOLDER, Optimizer
from saccade.training.policy_update import update_policy
from saccade.training.train_step import pack_samples, train_step
from saccade.types import TrainingSample
from saccade.utils.rank_exit import exit_rank

STEPS = 3
NUM_DEMONSTRATIONS = 24  # a training replays them all before its first step
HAS_TORCHAO = importlib.util.find_spec("torchao") is not None
ADAMW = ("sft.optim.name=adamw", "rl.optim.name=adamw", "sft.optim.lr=1e-4", "rl.optim.lr=1e-4")
# One row per micro-batch: they outnumber the ranks, and their number isn't always a multiple.
SMALL_ROWS = ("sft.pack_length=64", "sft.micro_batch_size=1", "rl.pack_length=64", "rl.micro_batch_size=1")
SFT = (f"sft.steps={STEPS}", f"sft.save_every={STEPS}", "sft.tokens_per_step=300")


@dataclass(frozen=True)
class Case:
    """A training, and how far several processes may be from one, relatively."""

    stage: str
    overrides: tuple[str, ...]
    tolerance: float = 1e-5
    model: str = "model"
    change_samples: Callable = lambda samples: samples  # of RL, one batch per step
    overrides_alone: tuple[str, ...] = ()  # of the training in one process


def make_text_sample(num_tokens: int) -> TrainingSample:
    """Make a sample without images."""
    tokens = [(7 * index + num_tokens) % 250 for index in range(num_tokens)]
    ledger = Ledger().observe(tokens).append_completion(tokens, logprobs=[-2.0] * num_tokens, version=0)
    return TrainingSample(ledger=ledger, advantages=(0.0,) * num_tokens + (1.0 - num_tokens % 3,) * num_tokens)


def replace_by_texts(batches):
    """Replace most samples of each batch by ones without images, and all those of the second."""
    texts = [make_text_sample(num_tokens) for num_tokens in range(20, 29)]
    return [[*(samples[step : step + 2] if step != 1 else ()), *texts] for step, samples in enumerate(batches)]


CASES = {
    "sft tied": Case("sft", ADAMW),
    "sft untied": Case("sft", ADAMW, model="untied"),  # of the family Qwen2.5-VL
    "sft frozen tower": Case(
        "sft", (*ADAMW, "model.trained_weights=language_model", "model.activation_checkpointing=true")
    ),
    # Gradients are clipped to the size of AdamW's epsilon, so the updates depend on their norm.
    "sft clipped": Case("sft", (*ADAMW, "sft.optim.max_grad_norm=1e-6", "sft.optim.lr=1e-3")),
    "sft lora": Case("sft", (*ADAMW, "model.lora_rank=2")),
    # Newton-Schulz iterates in bfloat16, which makes rounding differences of a gradient visible.
    "sft muon": Case("sft", ("sft.optim.name=muon", "sft.optim.lr=1e-4"), 1e-3),
    # Blocks of 256 values begin elsewhere in a part of a weight than in the whole.
    **({"sft 8-bit": Case("sft", ("sft.optim.name=adamw_8bit", "sft.optim.lr=1e-4"), 1e-3)} if HAS_TORCHAO else {}),
    "sft offloaded": Case("sft", (*ADAMW, "model.cpu_offload=true")),
    "sft bfloat16": Case("sft", (*ADAMW, "model.dtype=bfloat16"), 5e-2),
    "rl": Case("rl", (*ADAMW, "rl.num_mini_batches=2")),
    "rl texts": Case("rl", ADAMW, change_samples=replace_by_texts),
    # Its second layer of deepstack features is read by none of the language model.
    "rl texts, one layer": Case("rl", ADAMW, model="shallow", change_samples=replace_by_texts),
    "rl kl": Case("rl", (*ADAMW, "rl.kl.loss_coef=0.5", "rl.epochs_per_batch=2", "rl.loss.entropy_coef=0.1")),
    "rl in a rollout process": Case(
        "rollouts",
        (*ADAMW, f"rl.steps={STEPS}", "sampling.max_tokens=8", "rollouts={executor: processes, num_processes: 1}"),
        overrides_alone=("rollouts.executor=local",),  # the same policy, without the start of another process
    ),
    "rl kl lora": Case("rl", (*ADAMW, "rl.optim.lr=1e-3", "rl.kl.advantage_coef=0.5", "model.lora_rank=2")),
}


def load_components(workspace, case: Case, weights: Path | None = None):
    recipe = workspace.load_recipe(*SFT, *SMALL_ROWS, *case.overrides)
    return pipeline.load_training_components(recipe, weights or workspace.root / case.model)


def train(workspace, case: Case, folder: Path, batches_of_samples=()) -> dict:
    """Train; return the metrics of each step and the numbers of micro-batches."""
    components, counts = load_components(workspace, case), []
    vlm = components.vlm
    if isinstance(vlm, ShardedVisionLanguageModel):
        accumulate = vlm.accumulate_gradients
        vlm.accumulate_gradients = lambda batches, *args, **kwargs: (
            counts.append(len(batches)) or accumulate(batches, *args, **kwargs)
        )
    if case.stage == "sft":
        rows = run_sft(workspace, components, folder)
    elif case.stage == "rollouts":
        rows = run_rollouts(workspace, components, folder)
    else:
        rows = update_repeatedly(components, folder, case.change_samples(batches_of_samples))
    vlm.save(folder / "final")
    return {"rows": rows, "counts": counts}


def run_sft(workspace, components, folder, **more) -> list[dict]:
    """Train on a part of the demonstrations; return the metrics of each step."""
    few = workspace.demonstrations[:: len(workspace.demonstrations) // NUM_DEMONSTRATIONS]
    return workspace.run_sft(components, folder, demonstrations=few, **more)


def run_rollouts(workspace, components, folder) -> list[dict]:
    """Train by RL on episodes that the recipe's executor runs; return the metrics of each step."""
    components = with_reward(components, lambda episode, _: sum(episode.ledger.sampled_tokens()) % 11)
    components, rows = connect_executor(components, folder, has_rewards=False), []
    work = rl.train(components, workspace.tasks, folder=folder / "rl", log_step=rows.append)
    pipeline.run_and_close(components, work)
    assert all(row["updates"] and row["engine_trainer_logprob_diff_max"] < 1e-4 for row in rows)
    return rows


def update_repeatedly(components, folder, batches_of_samples):
    """Update the policy on each batch of samples in turn; return the metrics."""
    settings = components.recipe.rl
    optimizer = create_optimizer(components.vlm, settings.optim, len(batches_of_samples))
    state = rl.load_trainer_state(components, None, optimizer)
    reference, rows = rl.load_reference(components, state), []
    for step, samples in enumerate(batches_of_samples):
        optimizer.start_step(step)
        rows.append(update_policy(components, samples[step:], settings, optimizer, reference).as_metrics())
    return rows


def read_weights(folder: Path):
    return {name: value.float() for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


RESUMED = Case("sft", (*ADAMW, "sft.steps=6", "sft.save_every=2", "sft.checkpoints.last=9"))


def continue_training(workspace, folder: Path, kill_at: int = 0, case: Case = RESUMED) -> list[dict]:
    """Train from the newest checkpoint of a folder, if it has one, to the end or to a kill; return the metrics."""
    newest = checkpoint.find_newest_checkpoint(folder)
    components = load_components(workspace, case, newest and newest.folder)
    return run_sft(workspace, components, folder, kill_at=kill_at)


def continue_uninterrupted(workspace, samples, out: Path) -> None:
    """Train four steps."""
    continue_training(workspace, out, kill_at=5)


def continue_copy(workspace, samples, out: Path) -> None:
    """Train two more steps from the checkpoint of a job before, which stays as it is."""
    shutil.copytree(out.parent / "sharded", out, dirs_exist_ok=True)
    continue_once(workspace, samples, out)


def resume_with_8_bits(workspace, samples, out: Path) -> None:
    """Train with 8-bit moments, once without an interruption and once with one."""
    case = Case("sft", (*RESUMED.overrides, "sft.optim.name=adamw_8bit", "sft.steps=4"))
    continue_training(workspace, out / "whole", case=case)
    continue_training(workspace, out / "resumed", kill_at=3, case=case)
    continue_training(workspace, out / "resumed", case=case)


# By numbers of nodes and of processes of each. All cases of all shapes are among the soaks.
FEW_CASES = {
    (1, 2): tuple(name for name in CASES if name != "rl kl lora"),
    (2, 2): ("rl kl lora",),
}


def run_few_cases(workspace, samples, out: Path, names=()) -> None:
    """Train some cases."""
    num_processes, num_nodes = count_processes()
    for name in names or FEW_CASES[num_nodes, num_processes]:
        result = train(workspace, CASES[name], out / name, samples)
        (out / name / "result.json").write_text(json.dumps(result))


def run_cases(workspace, samples, out: Path) -> None:
    """Train all cases; then train one with an interruption and one without."""
    run_few_cases(workspace, samples, out, CASES)
    continue_training(workspace, out / "whole")
    continue_training(workspace, out / "resumed", kill_at=3)
    continue_training(workspace, out / "resumed")
    abort_an_order(workspace, samples, out)


def abort_an_order(workspace, samples, out: Path) -> None:
    """Fail on rank 0 while it prepares a micro-step, then update the policy: the other ranks must drop the command."""
    case = CASES["rl"]
    components = load_components(workspace, case)
    load_all_pixels, calls = components.media.load_all_pixels, []

    def fail(images):
        calls.append(images)
        if len(calls) == 3:
            raise MediaError("no such file", key="pixels")
        return load_all_pixels(images)

    components.media.load_all_pixels = fail
    try:
        update_repeatedly(components, out, samples[:1])
    except MediaError as error:
        components.media.load_all_pixels = load_all_pixels
        rows = update_repeatedly(components, out, samples[:1])
        (out / "aborted.json").write_text(json.dumps({"key": error.key, "rows": rows}))


def continue_once(workspace, samples, out: Path) -> None:
    """Train two more steps."""
    newest = checkpoint.find_newest_checkpoint(out)
    step = newest.step if newest else 0
    continue_training(workspace, out, kill_at=step + 3 if step < 4 else 0)


class FailOnRankOne:
    """A loss that only rank 1 can't compute."""

    def __init__(self, error=ValueError("a loss that fails\nin two lines")):  # noqa: B008 (raised once)
        self.error = error

    def __call__(self, batch, logp_N):
        if distributed.get_rank() == 1:
            raise self.error
        return logp_N.sum(), {}


def exceed_memory_on_rank_one(workspace, samples, out: Path) -> None:
    """Write the error that rank 0 raises when another rank's memory is full, and what the next call raises."""
    fail_on_rank_one(workspace, samples, out, FailOnRankOne(torch.OutOfMemoryError("CUDA out of memory")))


def fail_on_rank_one(workspace, samples, out: Path, loss_fn=FailOnRankOne()) -> None:  # noqa: B008 (has no state)
    """Write the error that rank 0 raises when another rank fails, and what the next call raises."""
    components, errors = load_components(workspace, CASES["sft tied"]), []
    settings = components.recipe.sft
    batches = pack_samples(components.vlm, samples[0], settings)
    optimizer = create_optimizer(components.vlm, settings.optim, 1)
    for _ in range(2):
        try:
            train_step(
                components.vlm,
                optimizer,
                batches,
                loss_fn,
                load_all_pixels=components.media.load_all_pixels,
            )
        except RunError as error:
            errors.append(str(error))
    (out / "errors.json").write_text(json.dumps(errors))


NAN_WEIGHT = "model.language_model.layers.1.mlp.up_proj.weight"


def make_a_gradient_nan(workspace, samples, out: Path) -> None:
    """Train until rank 1 has a NaN in its part of a gradient; write the error of rank 0."""
    components = load_components(workspace, Case("sft", (*ADAMW, "sft.steps=4", "sft.save_every=100")))
    try:
        run_sft(workspace, components, out)
    except RunError as error:
        (out / "errors.json").write_text(json.dumps([error.key, str(error)]))


def plant_nan(self, step=Optimizer.step):
    """Take an optimizer step; on rank 1, and in step 3, with a NaN."""
    if distributed.get_rank() == 1 and self.current_step == 3:
        self._trainable[NAN_WEIGHT].grad.to_local()[0, 0] = float("nan")
    return step(self)


def train_beside_a_write(workspace, samples, out: Path) -> None:
    """Train four steps; the checkpoint of the second is written once the fourth has begun. Then without a thread."""
    has_begun, seen, write, start_step = threading.Event(), [], worker._write_state, ShardedOptimizer.start_step

    def start(self, step):
        start_step(self, step)
        if step == 3:
            seen.extend(saved.step for saved in checkpoint.list_checkpoints(out / "beside"))
            has_begun.set()

    def wait_and_write(*args):
        assert has_begun.wait(300), "the training waits for the checkpoint"
        return write(*args)

    overrides = (*ADAMW, "sft.steps=4", "sft.save_every=2", "sft.checkpoints.last=9")
    ShardedOptimizer.start_step, worker._write_state = start, wait_and_write
    run_sft(workspace, load_components(workspace, Case("sft", overrides)), out / "beside")
    ShardedOptimizer.start_step, worker._write_state = start_step, write
    waiting = Case("sft", (*overrides, "sft.checkpoints.background=false"))
    run_sft(workspace, load_components(workspace, waiting), out / "waiting")
    for name in ("beside", "waiting"):
        for step in (2, 4):
            dcp_to_torch_save(out / name / f"step-{step:06d}" / STATE_FOLDER, out / f"{name}-{step}.pt")
    (out / "seen.json").write_text(json.dumps(seen))


def write_to_a_full_disk(workspace, samples, out: Path) -> None:
    """Write the errors of two saves that rank 1 can't write, in a thread and without, and the metrics of a step."""
    errors = []
    for background in ("true", "false"):
        overrides = (*ADAMW, "sft.steps=2", "sft.save_every=1", f"sft.checkpoints.background={background}")
        components = load_components(workspace, Case("sft", overrides))
        try:
            run_sft(workspace, components, out / background)
        except RunError as error:
            errors.append(str(error))
    (out / "errors.json").write_text(json.dumps(errors))


def fail_to_write(self, plan, planner):
    if distributed.get_rank() == 1:
        raise OSError(errno.ENOSPC, "No space left on device")
    return WRITE_DATA(self, plan, planner)


WRITE_DATA = FileSystemWriter.write_data
ACTIONS = {
    "beside": train_beside_a_write,
    "full": write_to_a_full_disk,
    "few": run_few_cases,
    "cases": run_cases,
    "continue": continue_once,
    "continue copy": continue_copy,
    "continue uninterrupted": continue_uninterrupted,
    "fail": fail_on_rank_one,
    "memory": exceed_memory_on_rank_one,
    "nan": make_a_gradient_nan,
    "8-bit": resume_with_8_bits,
}
FAILING = ("fail", "memory")


def fail_to_read(*args, **kwargs):
    raise AssertionError("only rank 0 reads weights")


def main(work: Path, actions: list[tuple[str, str]]) -> None:
    if os.environ["RANK"] != "0":
        AutoModelForImageTextToText.from_pretrained = fail_to_read
    names = [name for name, _ in actions]
    if "full" in names:
        FileSystemWriter.write_data = fail_to_write
    if "nan" in names:
        Optimizer.step = plant_nan
    with join_training_processes(ModelConfig(collective_timeout=120)) as is_leader:
        if is_leader:
            workspace, samples = pickle.loads((work / "workspace.pickle").read_bytes())
            for name, out in actions:
                ACTIONS[name](workspace, samples, Path(out))


def run_on_node(work: Path, actions: list[tuple[str, str]], num_processes: int) -> None:
    """Run a job as one of so many processes of a node."""
    os.environ |= {"LOCAL_WORLD_SIZE": str(num_processes), "LOCAL_RANK": str(int(os.environ["RANK"]) % num_processes)}
    main(work, actions)


def fork_jobs(work: Path, jobs: list[tuple[int, int, list[tuple[str, str]]]]) -> None:
    """Run jobs one after another; each must end well, unless its last action is one of FAILING."""
    for number, (num_nodes, num_processes, actions) in enumerate(jobs):
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=num_nodes * num_processes,
            run_id=str(number),
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=0,
            start_method="fork",
        )
        must_fail = actions[-1][0] in FAILING
        try:
            elastic_launch(config, run_on_node)(work, actions, num_processes)
        except ChildFailedError:
            if not must_fail:
                raise
        else:
            assert not must_fail


if __name__ == "__main__":
    if sys.argv[1] == "jobs":
        fork_jobs(Path(sys.argv[2]), json.loads(sys.argv[3]))
    else:
        main(Path(sys.argv[2]), [(sys.argv[1], sys.argv[3])])
        exit_rank(0)
