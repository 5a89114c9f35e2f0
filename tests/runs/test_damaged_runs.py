"""Every file of a run damaged in every way: each command uses what is left, or refuses it in one sentence."""

import contextlib
import os
import random
import shutil
import socket

import pytest
from commands import SFT, run

from saccade.reporting.viewer.library import Library

NAME = "test_sft_step-000001"  # the evaluation that `saccade train` wrote
NAMES = (
    *("recipe.yaml", "invocations.json", "metrics.jsonl", "data_digests.json", "demonstration_check.json"),
    *("finished_stages/sft.json", "finished_stages", f"evaluations/{NAME}.jsonl", "evaluations"),
    *(f"sft/step-000001/{name}" for name in ("config.json", "model.safetensors", "checksums.json", "tokenizer.json")),
)


@pytest.fixture(scope="module")
def trained_run(tmp_path_factory, tiny_folder, dataset_folder):
    """A run of SFT with its evaluation."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    settings = [*SFT, "sft.steps=1", "sampling.max_tokens=8", "evaluation.num_tasks=1"]
    given = ["--model", tiny_folder, "--data", dataset_folder, "--out", folder, "--stage", "sft,eval"]
    done = run("train", "tiny/para_grpo", *settings, *given)
    assert done.exit_code == 0, done.output
    assert all((folder / name).exists() for name in NAMES)
    return folder


def garble(data):
    rng, garbled = random.Random(0), bytearray(data)
    for _ in range(3 + len(garbled) // 200):
        garbled[rng.randrange(len(garbled))] = rng.randrange(256)
    return bytes(garbled)


def make_socket(path):
    with socket.socket(socket.AF_UNIX) as server, contextlib.chdir(path.parent):  # the path may be too long
        server.bind(path.name)


DAMAGES = {
    "deleted": lambda path, data: None,
    "folder": lambda path, data: path.mkdir(),
    "empty": lambda path, data: path.touch(),
    "cut off": lambda path, data: path.write_bytes(data[: len(data) // 2]),
    "pipe": lambda path, data: os.mkfifo(path),  # without a writer: opening it would block
    "dangling link": lambda path, data: path.symlink_to("nowhere"),
    "link to itself": lambda path, data: path.symlink_to(path.name),
    "socket": lambda path, data: make_socket(path),
    "garbled": lambda path, data: path.write_bytes(garble(data)),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "damage", [pytest.param(name, marks=[pytest.mark.soak] * (name not in ("folder", "pipe"))) for name in DAMAGES]
)
def test_a_damaged_file_is_left_out_or_refused_in_one_sentence(trained_run, tmp_path, damage):
    for name in NAMES:
        folder = tmp_path / "runs" / "run"
        shutil.copytree(trained_run, folder)
        path = folder / name
        if path.is_dir():
            shutil.rmtree(path)
            if damage != "deleted":
                path.touch()
        else:
            data = path.read_bytes()
            path.unlink()
            DAMAGES[damage](path, data)
        commands = [
            ["runs", folder.parent],
            ["export", folder, tmp_path / "exported"],
            ["eval", folder, "--name", NAME],
            ["view", folder, "--export", tmp_path / "page.html"],
        ]
        for command in commands:
            done = run(*command)
            case = f"{command[0]} with {name} {damage}: {done.output}{done.exception!r}"
            assert done.exit_code in (0, 1), case
            assert done.exception is None or isinstance(done.exception, SystemExit), case
            lines = [line for line in done.stderr.splitlines() if "Loading weights" not in line]
            assert len(lines) == done.exit_code, case
        Library([folder]).refresh()
        shutil.rmtree(folder)
        shutil.rmtree(tmp_path / "exported", ignore_errors=True)
