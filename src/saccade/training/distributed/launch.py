"""Start training processes: `--nproc` through torchrun's API, and what each process does when it has started."""

import contextlib
import logging
import os
import signal
import sys
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import rendezvous

from saccade.config.schema import ModelConfig
from saccade.errors import ConfigError, RunError, convert_errors
from saccade.training.distributed.active_controller import get_controller, handle_sigterm, set_controller
from saccade.training.distributed.controller import Controller, create_control_group, serve_commands
from saccade.training.distributed.failure_report import (
    FailureReport,
    announce_launcher,
    explain_exits,
    read_sentence,
)
from saccade.training.distributed.worker import TrainingWorker
from saccade.training.train_step import read_token_limit

MAX_PROCESSES_PER_CORE = 4  # more only wait for each other, and fill the memory


def is_launched() -> bool:
    """Return whether torchrun started this process."""
    return distributed.is_torchelastic_launched()


def count_processes() -> tuple[int, int]:
    """Return how many processes train together on this node, and on how many nodes."""
    if get_controller() is None:
        return 1, 1
    num_processes = int(os.environ["LOCAL_WORLD_SIZE"])
    return num_processes, distributed.get_world_size() // num_processes


@contextlib.contextmanager
def join_training_processes(settings: ModelConfig) -> Iterator[bool]:
    """Connect the processes that torchrun started; yield whether this one runs the training's loop.

    On rank 0 the block runs with a controller; the other ranks have followed it to its end when the block begins. A
    process that torchrun didn't start runs the block alone. Raises RunError if another rank is lost.
    """
    if not is_launched():
        yield True
        return
    connecting = partial(convert_errors, RunError, "the training processes can't connect", key="torchrun")
    with connecting():
        store, rank, world_size = next(rendezvous("env://"))
    report = FailureReport(store, rank, is_first_of_node=os.environ["LOCAL_RANK"] == "0")
    with report.raise_on_one_rank(), connecting():
        device_type, timeout = torch.device(settings.device).type, timedelta(seconds=settings.collective_timeout)
        if device_type == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        distributed.init_process_group(
            "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo",
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timeout,
        )
        control_group = create_control_group(timeout)
        worker = TrainingWorker(_create_mesh(device_type), timeout)
        report.watch()
    with report.raise_on_one_rank():
        if rank:
            for number in (signal.SIGINT, signal.SIGTERM):  # rank 0 stops the others, after a checkpoint
                signal.signal(number, signal.SIG_IGN)
            serve_commands(worker, control_group, report)
            yield False
        else:
            controller = Controller(worker, control_group, report)
            set_controller(controller)
            previous = signal.signal(signal.SIGTERM, handle_sigterm)
            try:
                with report.raise_on_one_rank():  # before the other ranks are stopped, which may take long
                    yield True
            finally:
                controller.stop()
                signal.signal(signal.SIGTERM, previous)
                set_controller(None)
    # Not after a failure: it would wait for operations with ranks that wait for this one's end.
    if distributed.is_initialized():
        distributed.destroy_process_group()


def end_other_ranks() -> None:
    """End the other ranks before rank 0 leaves the block of `join_training_processes`, which it continues alone.

    Rank 0's part of the model is freed. It still reports the loss of a rank that is slow to end.
    """
    if (controller := get_controller()) is not None:
        controller.stop()
        controller.call_on_rank_zero("free")
        distributed.destroy_process_group()


def _create_mesh(device_type: str) -> DeviceMesh:
    """Return the mesh of all ranks: weights are sharded within a node and replicated over nodes (HSDP).

    Raises RunError if the nodes have different numbers of processes.
    """
    world_size, local_size = distributed.get_world_size(), int(os.environ["LOCAL_WORLD_SIZE"])
    local_sizes: list[Any] = [None] * world_size
    distributed.all_gather_object(local_sizes, local_size)
    if len(set(local_sizes)) > 1:
        raise RunError(
            f"the nodes have {sorted(set(local_sizes))} processes, and all need as many; start torchrun with the same "
            "--nproc-per-node on each",
            key="--nproc-per-node",
        )
    if world_size == local_size:
        return init_device_mesh(device_type, (world_size,))
    return init_device_mesh(device_type, (world_size // local_size, local_size), mesh_dim_names=("node", "local"))


def launch_processes(
    num_processes: int, settings: ModelConfig, folder: Path, *, on_restart: Callable[[str], None]
) -> None:
    """Run this command in `num_processes` processes of this machine.

    If a micro-batch doesn't fit in the memory of one, the run in `folder` is resumed and splits those as large;
    `on_restart` receives the reason. Raises a SaccadeError if a process fails, with the sentence of the ranks, and
    SystemExit if a rank has printed it. Raises ConfigError for more processes than GPUs, or than
    MAX_PROCESSES_PER_CORE on each core.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    if settings.device.partition(":")[0] == "cuda":
        limit, devices = torch.cuda.device_count(), f"{torch.cuda.device_count()} GPUs, one for each process"
    else:
        limit = MAX_PROCESSES_PER_CORE * (os.cpu_count() or 1)
        devices = f"{os.cpu_count()} cores, for at most {MAX_PROCESSES_PER_CORE} processes each"
    if num_processes > limit:
        raise ConfigError(
            f"--nproc {num_processes} is too many: this machine has {devices}; lower it",
            key="--nproc",
            value=num_processes,
        )
    # torch's log of a failure would surround the sentence.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    arguments = sys.argv[1:]
    while True:
        limit = read_token_limit(folder)
        store_type = distributed.TCPStore  # type: ignore[attr-defined]
        store = store_type("127.0.0.1", 0, is_master=True, multi_tenant=True)
        announce_launcher(store)
        config = LaunchConfig(
            run_id=uuid.uuid4().hex,
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=num_processes,
            rdzv_backend="static",
            rdzv_endpoint=f"127.0.0.1:{store.port}",  # the processes use this process's store
            rdzv_configs={"rank": 0},
            max_restarts=0,
        )
        try:
            elastic_launch(config, sys.executable)("-m", "saccade", *arguments)
            return
        except SignalException as error:  # the processes have ended: rank 0 has written a checkpoint
            sentence = read_sentence(store)
            if sentence is None:
                raise SystemExit(128 + error.sigval) from None
            sentence.exit_code = 128 + error.sigval
            raise sentence from None
        except ChildFailedError as error:
            failures = sorted(error.failures.items(), key=lambda item: item[1].timestamp)
            exit_codes = {rank: failure.exitcode for rank, failure in failures}
            advice = f"run the command again, with --resume if {folder} is a run already"
            reason = explain_exits(store, exit_codes, advice)
        if read_token_limit(folder) >= limit:
            if reason is None:
                raise SystemExit(max(1, *exit_codes.values()))
            raise reason
        if reason is not None:
            on_restart(str(reason))
        arguments += [] if "--resume" in arguments else ["--resume"]
