"""Training over NCCL on one GPU: FSDP2 beside one process, and weights that one process sends to another.

    python benchmarks/gpu_distributed.py
    python benchmarks/gpu_distributed.py --device cpu     a dry run: gloo, and no weights are sent

`saccade sft` and `saccade rl` train a model of random weights with the same seed and data in float32, alone, as one
process of torchrun and as two. A row holds the largest differences of loss and gradient norm from the training alone,
relatively, over the steps of SFT and in the first step of RL: later ones sample from weights that differ by rounding.
Below 0.001, where positive and negative terms cancel, a difference is relative to 0.001.

NCCL doesn't let two processes share a GPU. Here they do: each has a name of its own for the host (NCCL_HOSTID), so that
they exchange data through a socket of this machine. This tests what is sent; its speed says nothing about several GPUs.

The weights are sent as a weight sync with `engine.settings.weight_sync: nccl` does: by `NcclGroup`, to a process that
joins as a worker of vLLM joins, with the same all-reduce first.
"""

import argparse
import base64
import ctypes
import json
import os
import runpy
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from _common import describe_machine, parser, show

import saccade
from saccade.config.load import load_recipe
from saccade.engines.remote import nccl_group
from saccade.runs import pipeline

SYNTHETIC = "synthetic={train: 16, validation: 2, test: 2, clip_seconds: 16, events: [1, 2], frame_size: 32, fps: 2}"
COMPARED, SMALLEST = ("loss", "grad_norm"), 1e-3
MAX_SECONDS = 600  # of one training
DTYPES = (torch.bfloat16, torch.float32, torch.float16)


def build_environment(**values: str) -> dict[str, str]:
    """Return the environment of a process that trains or sends."""
    source = str(Path(saccade.__file__).parents[1])
    paths = [source, str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "NCCL_SOCKET_IFNAME": "lo", **values}


# ---- training --------------------------------------------------------------------------------------------------------


def run_as_rank(arguments: Sequence[str]) -> None:
    """Run the command line as a rank that shares the first GPU with the others."""
    os.environ |= {"LOCAL_RANK": "0", "NCCL_HOSTID": f"rank-{os.environ['RANK']}"}
    sys.argv[1:] = arguments
    runpy.run_module("saccade", run_name="__main__")


def train(stage: str, num_processes: int, folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Train by a command, alone (0) or in the processes of torchrun; return the metrics of each step."""
    base = folder.parent
    settings = (
        "seed=3",
        f"model={{device: {options.device}, dtype: float32, num_threads: 1}}",
        f"sft={{steps: {options.steps}, tokens_per_step: 2000, optim: {{name: adamw, lr: 1e-4, warmup_steps: 1}}}}",
        f"rl={{steps: {options.steps}, prompts_per_step: 2, group_size: 4, optim: {{name: adamw, lr: 1e-4}}}}",
        "sft.micro_batch_size=4",
        "rl.micro_batch_size=4",
        "rl.selection.oversample=1",
    )
    arguments = [stage, "tiny/para_grpo", "--model", str(base / "model"), "--data", str(base / "data")]
    arguments += ["--out", str(folder), *settings]
    launcher = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={num_processes}",
        __file__,
        "--as-rank",
    ]
    command = [sys.executable, *(launcher if num_processes else ("-m", "saccade")), *arguments]
    with subprocess.Popen(
        command,
        env=build_environment(OMP_NUM_THREADS="1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=MAX_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise SystemExit(f"{stage} in {num_processes} processes takes more than {MAX_SECONDS} s") from None
    if process.returncode:
        raise SystemExit(f"{stage} in {num_processes} processes failed:\n{output[-4000:]}")
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def compare_trainings(base: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each stage and number of processes."""
    rows = []
    for stage in ("sft", "rl"):
        alone = train(stage, 0, base / f"{stage}-alone", options)
        for num_processes in (0, 1, 2):
            name = f"torchrun, {num_processes}" if num_processes else "one process"
            steps = train(stage, num_processes, base / f"{stage}-{num_processes}", options)
            counted = len(alone) if stage == "sft" else 1
            pairs = [
                (own, other)
                for own, other in zip(steps[:counted], alone[:counted], strict=True)
                if COMPARED[0] in own or COMPARED[0] in other  # a step whose groups are all dropped trains on nothing
            ]
            if not pairs:
                raise SystemExit(f"no compared step of {stage} trained; choose a larger model")
            differences = {
                metric: max(
                    abs(own[metric] - other[metric]) / max(abs(other[metric]), SMALLEST) for own, other in pairs
                )
                for metric in COMPARED
            }
            rows.append(
                {
                    "stage": stage,
                    "processes": name,
                    "steps": len(steps),
                    **{f"{metric}, largest difference": value for metric, value in differences.items()},
                    "train s a step": statistics.median(row["seconds/train"] for row in steps[1:]),
                }
            )
            print(rows[-1], file=sys.stderr, flush=True)
    return rows


# ---- weight sync -----------------------------------------------------------------------------------------------------


def make_tensors(megabytes: int) -> dict[str, torch.Tensor]:
    """Return tensors of each type, drawn from a seed; the odd sizes end within a block of NCCL."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for dtype in DTYPES:
        size = megabytes * 2**20 // 3 // dtype.itemsize
        for name, count in (("large", size), ("odd", 1 + size // 1000), ("one", 1)):
            tensors[f"{dtype}-{name}"] = torch.randn(count, generator=generator).to(dtype)
    return tensors


def receive(options: argparse.Namespace) -> None:
    """Join the group whose id comes by stdin as a worker of vLLM does; print which tensors arrived unchanged."""
    unique_id = nccl_group._UniqueId()
    ctypes.memmove(ctypes.byref(unique_id), base64.b64decode(sys.stdin.readline()), 128)
    nccl, device = nccl_group._load_library(), torch.device("cuda:0")
    torch.cuda.set_device(device)
    comm, stream = ctypes.c_void_p(), torch.cuda.current_stream(device)

    def call(name: str, *arguments: Any) -> None:
        if code := getattr(nccl, name)(*arguments):
            raise SystemExit(f"{name} failed: {nccl.ncclGetErrorString(code).decode()}")

    call("ncclCommInitRank", ctypes.byref(comm), 2, unique_id, 1)
    zero = torch.zeros(1, device=device)
    pointer = zero.data_ptr()
    call("ncclAllReduce", pointer, pointer, 1, nccl_group._to_nccl_dtype(zero), 0, comm, stream.cuda_stream)
    expected, same = make_tensors(options.megabytes), {}
    for _ in range(options.rounds + 1):
        for name, tensor in expected.items():
            got = torch.full_like(tensor, 7, device=device)
            pointer, dtype = got.data_ptr(), nccl_group._to_nccl_dtype(got)
            call("ncclBroadcast", pointer, pointer, got.numel(), dtype, 0, comm, stream.cuda_stream)
            stream.synchronize()
            same[name] = same.get(name, True) and torch.equal(got.cpu(), tensor)
    print(json.dumps(same), flush=True)


def end_with(receiver: "subprocess.Popen[str]") -> None:
    """End this process if the receiver fails: NCCL would wait for it forever."""
    if code := receiver.wait():
        print(f"the process that receives weights ended with {code}", file=sys.stderr, flush=True)
        os._exit(1)


def send_weights(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Send tensors to a process that shares the GPU; return one row."""
    os.environ |= {"NCCL_HOSTID": "sender", "NCCL_SOCKET_IFNAME": "lo"}
    device = torch.device("cuda:0")
    group = nccl_group.NcclGroup(2, device)
    receiver = subprocess.Popen(
        [sys.executable, __file__, "--receive", f"--megabytes={options.megabytes}", f"--rounds={options.rounds}"],
        env=build_environment(NCCL_HOSTID="receiver"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert receiver.stdin is not None
    threading.Thread(target=end_with, args=(receiver,), daemon=True).start()
    receiver.stdin.write(group.init_info["nccl_unique_id_b64"] + "\n")
    receiver.stdin.flush()
    begun = time.perf_counter()
    group.join()
    joined = time.perf_counter() - begun
    tensors = make_tensors(options.megabytes)
    seconds = []
    for _ in range(options.rounds + 1):
        begun = time.perf_counter()
        group.broadcast(tensors.values())
        seconds.append(time.perf_counter() - begun)
    same: Mapping[str, bool] = json.loads(receiver.communicate(timeout=120)[0])
    group.abort()
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    return [
        {
            "NCCL": ".".join(map(str, torch.cuda.nccl.version())),
            "tensors": len(tensors),
            "arrived unchanged": sum(same.values()),
            "MB": size / 1e6,
            "join s": joined,
            "send s": statistics.median(seconds[1:]),
        }
    ]


# ---- the figures -----------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> None:
    """Train and send; print both tables."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["--as-rank"]:
        run_as_rank(arguments[1:])
        return
    options = parser(__doc__)
    options.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    options.add_argument("--steps", type=int, default=5, help="of each training")
    options.add_argument("--hidden", type=int, default=512, help="hidden size of the model")
    options.add_argument("--layers", type=int, default=8)
    options.add_argument("--megabytes", type=int, default=300, help="of the weights that are sent")
    options.add_argument("--receive", action="store_true", help=argparse.SUPPRESS)
    chosen = options.parse_args(arguments)
    if chosen.steps < 2:
        options.error("--steps must be at least 2: the first step of a training warms up")
    if chosen.receive:
        receive(chosen)
        return
    about = describe_machine(chosen.device)
    if chosen.device == "cuda":
        out = chosen.out and chosen.out.with_suffix(".sync.json")
        show("Weights sent by NCCL", send_weights(chosen), about, out)
    with TemporaryDirectory() as name:
        base = Path(name)
        size = f"synthetic.model={{hidden_size: {chosen.hidden}, num_layers: {chosen.layers}}}"
        recipe = load_recipe("tiny/para_grpo", [SYNTHETIC, size])
        pipeline.generate_data(base / "data", recipe, on_progress=lambda *_: None)
        pipeline.create_tiny_model(base / "model", recipe, demonstrations=base / "data/train/demonstrations.jsonl")
        rows = compare_trainings(base, chosen)
    show("Training in several processes", rows, about, chosen.out)


if __name__ == "__main__":
    main()
