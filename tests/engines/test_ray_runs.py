"""`saccade rl` with workers of a Ray cluster: the numbers of a run without them, and no process left behind."""

import contextlib
import json
import math
import os
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import good
from polling import block_until
from ray_cluster import RayCluster
from sglang_server import server
from small_rl import small_rl

from saccade.config.load import dump_recipe
from saccade.rollouts.ray.executor import LOG_FILE

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]
MARK = "SACCADE_TEST_MARK"
SMALL = ["rl.steps=2", "rl.save_every=2", "rl.prompts_per_step=2", "sampling.max_tokens=8"]
RAY = ["rollouts.executor=ray", "rollouts.ray.workers=2", 'media.folder=""']

LOG = """
import logging
logging.getLogger("mine").warning("a reward was loaded")
"""


class Command:
    """`saccade rl` in a process of its own; its descendants are recognized by a variable of their environment."""

    def __init__(self, folder, model, url, *overrides, engine="sglang", **environment):
        recipe = small_rl(folder, model, url, *SMALL, *overrides, engine=engine)
        with (folder / "variety.py").open("a") as file:
            file.write(LOG)
        (folder / "recipe.yaml").write_text(dump_recipe(recipe))
        self.folder, self.mark = folder / "run", secrets.token_hex(8)
        command = [sys.executable, "-m", "saccade", "rl", str(folder / "recipe.yaml"), "--model", str(model)]
        self.process = subprocess.Popen(
            [*command, "--data", str(folder / "synthetic"), "--out", str(self.folder)],
            env={**os.environ, **environment, MARK: self.mark},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def wait(self, returncode=0):
        output, _ = self.process.communicate(timeout=600)
        assert self.process.returncode == returncode, output
        return output

    def list_processes(self):
        """Return the command line of each of its processes that run, by pid."""
        variable, lines = f"{MARK}={self.mark}".encode(), {}
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if variable in (folder / "environ").read_bytes().split(b"\0"):
                    lines[int(folder.name)] = (folder / "cmdline").read_bytes()
        return lines

    def wait_for_last_process(self):
        while self.list_processes():
            time.sleep(0.2)

    def wait_for_rollouts(self, served):
        """Wait until a request follows the start of the driver: it is a worker's."""
        block_until(lambda: (self.folder / LOG_FILE).exists() or self.process.poll() is not None)
        number = len(served.bodies)
        block_until(lambda: len(served.bodies) > number or self.process.poll() is not None)

    def find_driver(self):
        (pid,) = [pid for pid, line in self.list_processes().items() if b"saccade.rollouts.ray.driver" in line]
        return pid

    def read_rows(self):
        """Return the numbers of its steps that don't depend on time."""
        rows = [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]
        timed = (
            "seconds",
            "sampled_tokens_per_second",
            "packed_tokens_per_second",
            "memory",
            "workers/",
            "weight_sync/",
            "mfu",
            "time",
            "stage",
        )
        return [{key: value for key, value in row.items() if not any(part in key for part in timed)} for row in rows]


@pytest.fixture(scope="module", autouse=True)
def has_ray():
    pytest.importorskip("ray", reason="the package ray is not installed: scripts/bootstrap --dev")


@pytest.fixture(scope="module")
def rows_without_ray(tiny_folder, tmp_path_factory):
    with server(tiny_folder) as served:
        command = Command(tmp_path_factory.mktemp("local"), Path(tiny_folder), served.url)
        command.wait()
    return command.read_rows()


def assert_equal_rows(rows, expected):
    assert len(rows) == len(expected) == 2
    for row, expected_row in zip(rows, expected, strict=True):
        assert row == pytest.approx(expected_row, rel=1e-4, abs=1e-6)
    assert all(math.isfinite(row["loss"]) and row["grad_norm"] > 0 for row in rows)


def test_a_cluster_of_its_own_is_brought_down_with_the_run(tiny_folder, tmp_path, rows_without_ray):
    with server(tiny_folder) as served:
        command = Command(tmp_path, Path(tiny_folder), served.url, *RAY)
        command.wait()
    assert_equal_rows(command.read_rows(), rows_without_ray)
    metrics = [json.loads(line) for line in (command.folder / "metrics.jsonl").read_text().splitlines()]
    # The run starts with the first worker; on a busy machine it may end before the second one is up.
    num_up = max(row["workers/up"] for row in metrics)
    assert 1 <= num_up <= 2
    num_loaded = (command.folder / LOG_FILE).read_text().count("mine WARNING a reward was loaded")
    assert num_up <= num_loaded <= 2  # once per worker
    command.wait_for_last_process()


def test_a_running_cluster_is_left_running(tiny_folder, tmp_path, rows_without_ray):
    with RayCluster(nodes=1, num_cpus=2) as cluster:
        with server(tiny_folder) as served:
            overrides = [*RAY, "rollouts.ray.address=auto"]
            command = Command(tmp_path, Path(tiny_folder), served.url, *overrides, RAY_ADDRESS=cluster.address)
            command.wait()
        assert_equal_rows(command.read_rows(), rows_without_ray)
        status = good("cluster", "status", "--address", cluster.address)
        assert "no rollout worker" in status
        command.wait_for_last_process()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_stopped_run_leaves_no_process(tiny_folder, tmp_path, number):
    with server(tiny_folder) as served:
        command = Command(tmp_path, Path(tiny_folder), served.url, *RAY)
        command.wait_for_rollouts(served)
        assert any(b"raylet" in line for line in command.list_processes().values())
        command.process.send_signal(number)
        command.process.communicate(timeout=600)
    assert command.process.returncode != 0
    command.wait_for_last_process()


def test_a_failed_run_leaves_no_process(tiny_folder, tmp_path):
    (tmp_path / "broken.py").write_text("def broken(episode):\n    return 1 / 0\n")
    with server(tiny_folder) as served:
        rewards = f"rewards={{{tmp_path / 'broken.py'}: {{weight: 1.0}}}}"
        command = Command(tmp_path, Path(tiny_folder), served.url, *RAY, rewards)
        assert "the reward 'broken' failed" in command.wait(returncode=1).replace("\n", " ")
    command.wait_for_last_process()


def test_a_killed_driver_costs_no_episode_and_leaves_no_process(tiny_folder, tmp_path, rows_without_ray):
    with server(tiny_folder) as served:
        command = Command(tmp_path, Path(tiny_folder), served.url, *RAY)
        command.wait_for_rollouts(served)
        os.kill(command.find_driver(), signal.SIGKILL)
        command.wait()
    assert_equal_rows(command.read_rows(), rows_without_ray)
    command.wait_for_last_process()


def assert_trained_on_sampled_tokens(command):
    """Assert that the run has two steps, whose tokens have the logprobs that the servers returned."""
    rows = command.read_rows()
    assert [row["step"] for row in rows] == [1, 2]
    assert min(row["grad_norm"] for row in rows) > 0
    assert max(row["engine_trainer_logprob_diff_max"] for row in rows) <= 1e-3


def test_workers_sample_from_vllm(vllm_server, tmp_path):
    """Real weight syncs: the trainer recomputes the logprob of every token that workers sampled."""
    config = vllm_server.config
    interval = "engine.settings.checksum_interval=2"
    command = Command(tmp_path, Path(config.model), config.url, *RAY, interval, engine="vllm")
    command.wait()
    assert_trained_on_sampled_tokens(command)
    rows = [json.loads(line) for line in (command.folder / "metrics.jsonl").read_text().splitlines()]
    # Of three syncs the first, which precedes the steps, and the third compare what the build for CPUs keeps: norms.
    assert [row.get("weight_sync/compared_tensors", 0) > 0 for row in rows] == [False, True]
    command.wait_for_last_process()
