"""The command line in this process, and settings so small that a whole run takes seconds."""

import contextlib
import itertools
import os
import re
import socket
import subprocess
import sys

from error_cases import ANY
from typer.testing import CliRunner

from saccade.cli.app import app
from saccade.errors import SaccadeError

SYNTHETIC = ["synthetic.train=4", "synthetic.validation=1", "synthetic.test=2", "synthetic.tasks_per_video=2"]
SFT = ["sft.steps=4", "sft.save_every=2", "sft.tokens_per_step=600", "sft.optim.warmup_steps=1"]
RL = ["rl.steps=4", "rl.save_every=2", "rl.prompts_per_step=2", "rl.group_size=2"]
SMALL = [*SYNTHETIC, *SFT, *RL, "sampling.max_tokens=16", "evaluation.num_tasks=4"]


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def good(*arguments):
    done = run(*arguments)
    assert done.exit_code == 0, done.output + repr(done.exception)
    return done.output


def bad(*arguments):
    """Run a command that fails; return its one line of stderr."""
    done = run(*arguments)
    assert done.exit_code == 1, done.output + repr(done.exception)
    assert done.stderr.count("\n") == 1, done.stderr
    assert "Traceback" not in done.output
    return done.stderr


def count_visual_tokens(output):
    """Return the number of visual tokens of the prompt that `saccade ask` printed."""
    return int(re.search(r"\+ ([\d,]+) visual", output)[1].replace(",", ""))


def fail(error_type, *arguments, key, value=ANY):
    """Run a command that ends with one line and an error of this type, key and value; return the line."""
    done = run(*arguments)
    assert done.exit_code == 1, done.output + repr(done.exception)
    assert done.stderr.count("\n") == 1, done.stderr
    error = done.exception  # SystemExit, raised while the error was handled
    while not isinstance(error, SaccadeError):
        assert error is not None, done.stderr
        error = error.__context__
    assert type(error) is error_type, repr(error)
    assert error.key == str(key), f"key {error.key!r}: {error}"
    if value is not ANY:
        assert error.value == value, f"value {error.value!r}: {error}"
    assert str(error) in done.stderr
    return done.stderr


LOCK_HOLDER = """
import sys
from pathlib import Path
from saccade.runs.run_lock import hold_lock
with hold_lock(Path(sys.argv[1]), sys.argv[2]):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def lock_elsewhere(folder, name):
    """Hold a lock of a folder in another process, which is yielded and killed at the end."""
    command = [sys.executable, "-c", LOCK_HOLDER, str(folder), name]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout.readline() == "held\n"
            yield holder
        finally:
            holder.kill()


# Below the range from which the kernel takes ports of clients and of servers at port 0. Workers have disjoint shares.
_MAX_WORKERS, _WORKER = 64, int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_SHARE = range(20_000 + _WORKER % _MAX_WORKERS, 32_000, _MAX_WORKERS)
_PORTS = itertools.islice(itertools.cycle(_SHARE), os.getpid() % len(_SHARE), None)


def free_port():
    """Return an unused port of 127.0.0.1, which no other test receives until this process has used its share."""
    return next(filter(_is_free, _PORTS))


def _is_free(port):
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


@contextlib.contextmanager
def reserve_refusing_port():
    """Yield a port of 127.0.0.1 that refuses connections: it is bound, and nothing listens."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]
