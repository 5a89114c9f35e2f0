"""The files of docs/cluster: the Slurm script runs with stand-ins for Slurm's commands, the manifest is consistent."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import saccade
from saccade.config.load import load_recipe
from saccade.runs import pipeline
from saccade.training.checkpoint import find_newest_checkpoint

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "docs/cluster"
SETTINGS = ["model.num_threads=1", "sft.tokens_per_step=600", "sft.optim.warmup_steps=1", "sft.save_every=1"]
# Runs the command once for each node, like Slurm, but on this machine.
SRUN = """#!/usr/bin/env bash
trap 'kill "${pids[@]}"' TERM
while [[ $1 == --* ]]; do [[ $1 == --nodes=* ]] && count=${1#--nodes=}; shift; done
for ((i = 0; i < count; i++)); do SLURM_PROCID=$i "$@" & pids+=($!); done
for pid in "${pids[@]}"; do wait "$pid" || exit 1; done
"""
# Writes the program that torchrun starts, or the server's command; a server runs until it is ended.
RECORDING_PYTHON = """#!/usr/bin/env bash
[[ $3 == serve ]] && { printf '%s\\n' "$CUDA_VISIBLE_DEVICES $*" >> "$RECORDS/servers"; exec sleep 60; }
printf '%s\\n' "$@" > "$RECORDS/torchrun-$SLURM_PROCID"
"""


def write_programs(folder, **programs):
    folder.mkdir()
    for name, text in programs.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)


def run_script(folder, nodes, *arguments, **environment):
    return subprocess.run(
        ["bash", CLUSTER / "train.slurm", *map(str, arguments)],
        cwd=folder,
        env={
            **os.environ,
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            "PYTHONPATH": str(Path(saccade.__file__).parents[1]),
            "SLURM_JOB_NODELIST": " ".join(nodes),
            "SLURM_JOB_ID": "7",
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=500,
    )


def test_the_slurm_script_passes_the_addresses_of_its_servers_to_torchrun(tmp_path):
    scontrol = "#!/usr/bin/env bash\nprintf '%s\\n' $3\n"
    curl = '#!/bin/sh\nuntil [ "$(wc -l < "$RECORDS/servers")" -eq 2 ]; do sleep 0.05; done\n'  # both have started
    write_programs(tmp_path / "bin", srun=SRUN, scontrol=scontrol, curl=curl, python=RECORDING_PYTHON)
    done = run_script(
        tmp_path,
        ("a", "b", "c"),
        *("rl", "paravt/para_grpo", "model", "runs/a", "rl.steps=3"),
        TRAIN_NODES="2",
        GPUS_PER_NODE="2",
        PYTHON="python",
        RECORDS=str(tmp_path),
    )
    assert done.returncode == 0, done.stderr
    commands = [(tmp_path / f"torchrun-{rank}").read_text().splitlines() for rank in range(2)]
    assert {argument for argument in commands[0] if argument not in commands[1]} == {"--node-rank=0"}
    assert {"--nnodes=2", "--nproc-per-node=2", "--master-addr=a"} <= set(commands[0])
    program = commands[0][commands[0].index("saccade") + 1 :]
    assert program[:2] == ["rl", "paravt/para_grpo"]
    assert "--resume" not in program
    recipe = load_recipe(program[1], [argument for argument in program[2:] if "=" in argument])
    assert recipe.engine.settings["servers"] == ["http://c:8000", "http://c:8001"]
    assert Path(recipe.engine.settings["weight_dir"]).is_dir()
    assert recipe.rl.steps == 3
    servers = (tmp_path / "servers").read_text().splitlines()
    assert [line.split()[0] for line in sorted(servers)] == ["0", "1"]
    assert all("--python" in line and "model" in line for line in servers)


@pytest.mark.soak
def test_the_slurm_script_trains_on_two_nodes_and_continues(tmp_path):
    overrides = ["synthetic={train: 3, validation: 1, test: 1, clip_seconds: 16, events: [1, 2], frame_size: 32}"]
    recipe = load_recipe("tiny/para_grpo", overrides)
    pipeline.generate_data(tmp_path / "data", recipe, on_progress=lambda *_: None)
    pipeline.create_tiny_model(tmp_path / "model", recipe, demonstrations=tmp_path / "data/train/demonstrations.jsonl")
    scontrol = "#!/usr/bin/env bash\nprintf '%s\\n' $3\n"
    write_programs(tmp_path / "bin", srun=SRUN, scontrol=scontrol)
    for steps in (1, 2):
        done = run_script(
            tmp_path,
            ("localhost", "localhost"),
            *("sft", "tiny/para_grpo", tmp_path / "model", "run", "--data", tmp_path / "data"),
            *SETTINGS,
            f"sft.steps={steps}",
            GPUS_PER_NODE="1",
            PYTHON=sys.executable,
            OMP_NUM_THREADS="1",
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert find_newest_checkpoint(tmp_path / "run/sft").step == steps
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row["stage"] == "sft"] == [1, 2]


def test_the_manifest_connects_its_trainers_to_its_servers():
    parts = {
        (part["kind"], part["metadata"]["name"]): part["spec"]
        for part in yaml.safe_load_all((CLUSTER / "kubernetes.yaml").read_text())
    }
    job, servers = parts["Job", "saccade-trainer"], parts["StatefulSet", "saccade-server"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    arguments = container["args"]
    assert f"--nnodes={job['completions']}" in arguments
    assert job["parallelism"] == job["completions"]
    assert f"--nproc-per-node={container['resources']['limits']['nvidia.com/gpu']}" in arguments
    assert ("Service", pod["subdomain"]) in parts
    assert f"--master-addr=saccade-trainer-0.{pod['subdomain']}" in arguments
    stage, name, *settings = arguments[arguments.index("saccade") + 1 :]
    assert stage == "rl"
    recipe = load_recipe(name, [setting for setting in settings if not setting.startswith("--")])
    addresses = [f"http://saccade-server-{i}.saccade-server:8000" for i in range(servers["replicas"])]
    assert recipe.engine.settings["servers"] == addresses
    assert f"in {' '.join(map(str, range(servers['replicas'])))};" in pod["initContainers"][0]["args"][0]


def test_the_dockerfile_copies_files_that_exist():
    lines = (CLUSTER / "Dockerfile").read_text().splitlines()
    copied = [source for line in lines if line.startswith("COPY") for source in line.split()[1:-1]]
    assert copied
    assert all((ROOT / source).exists() for source in copied)
