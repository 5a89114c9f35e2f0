"""Start a vLLM server in its own process group, wait until it is ready, and stop the whole group.

    start ──> the server's group (API server, engine core, workers) ──stdout──> a log file
      │                                       │
      └── poll_until_ready(): polls /health and the process ── stop(): SIGTERM, then SIGKILL, to the group

The log is a file, not a pipe, so the server never blocks on it; errors are read from its end.
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

from saccade.chat.renderer import load_renderer
from saccade.errors import ConfigError, EngineError
from saccade.models.checkpoint_files import check_weights
from saccade.utils.files import convert_file_errors, open_file, read_text, resolve_path
from saccade.utils.http_client import fetch

_WEIGHT_SYNC_MODES = ("files", "nccl")
_DTYPES = ("float32", "bfloat16")  # for which the handshake has a logprob tolerance
# vLLM 0.32 rewinds the random generator of a seeded prompt that is prefilled in chunks, which a CPU generator doesn't
# support: the server would crash. So prompts are prefilled whole.
_CPU_FLAGS = ("--no-enable-chunked-prefill", "--no-async-scheduling")
_GRACE_SECONDS = 20.0  # between SIGTERM and SIGKILL
_MAX_LOG_BYTES = 2**24  # of a log that is appended to
_LOG_PREFIX = re.compile(r"^\([^)]*\)\s*|\x1b\[[0-9;]*m")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerProcessConfig:
    """What to serve and how; `kv_cache_gib` sizes the KV cache on a CPU, `vllm_options` are passed to vLLM unchanged.

    `weight_sync="nccl"` enables weight sync by NCCL in addition to files, `max_lora_rank` > 0 that of LoRA adapters.
    """

    model: Path
    python: Path
    host: str = "127.0.0.1"
    port: int = 8000
    max_model_len: int = 32768
    max_images: int = 128
    dtype: str = "float32"
    kv_cache_gib: int = 4
    weight_sync: str = "files"
    max_lora_rank: int = 0
    vllm_options: tuple[str, ...] = ()

    @property
    def url(self) -> str:
        """Return the server's address."""
        return f"http://{self.host}:{self.port}"

    def build_command(self) -> list[str]:
        """Return vLLM's command line, with the flags that the engine needs."""
        return [
            *(str(self.python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(self.model)),
            *("--host", self.host, "--port", str(self.port), "--dtype", self.dtype),
            *("--max-model-len", str(self.max_model_len)),
            *("--limit-mm-per-prompt", f'{{"image":{self.max_images},"video":0}}'),
            *("--enable-scale-out", "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"),
            *(_CPU_FLAGS if _is_cpu_build(self.python) else ()),
            *(("--enable-lora", "--max-lora-rank", str(self.max_lora_rank)) if self.max_lora_rank else ()),
            *(("--weight-transfer-config", '{"backend":"nccl"}') if self.weight_sync == "nccl" else ()),
            *self.vllm_options,
        ]

    def build_environment(self) -> dict[str, str]:
        """Return this process's environment, plus what enables weight updates and disables telemetry and downloads."""
        added = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
        if self.max_lora_rank:
            added["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
        # Passive waiting slows a server down, and PYTHONPATH points to packages of another environment.
        inherited = {key: value for key, value in os.environ.items() if key not in ("OMP_WAIT_POLICY", "PYTHONPATH")}
        return {**inherited, **added, "VLLM_CPU_KVCACHE_SPACE": str(self.kv_cache_gib)}


def _is_cpu_build(python: Path) -> bool:
    """Return whether an environment's vLLM is the CPU build, by its distribution name."""
    return any(python.parent.parent.glob("lib*/python*/site-packages/vllm_cpu-*.dist-info"))


def check_server_process_config(config: ServerProcessConfig) -> None:
    """Check a configuration before the server is started. Raises ConfigError or ModelError."""
    load_renderer(str(config.model))  # checks the tokenizer, the image processor and the model family
    check_weights(config.model)
    for flag, value, problem in _find_problems(config):
        raise ConfigError(f"{flag} {value} {problem}", key=flag, value=value)
    _check_port(config)


def _find_problems(config: ServerProcessConfig) -> Iterator[tuple[str, str | int, str]]:
    """Yield options that can't be used, their values, and why."""
    if config.dtype not in _DTYPES:
        yield "--dtype", config.dtype, f"is not supported: give the recipe's model.dtype, {' or '.join(_DTYPES)}"
    if config.weight_sync not in _WEIGHT_SYNC_MODES:
        yield "--weight-sync", config.weight_sync, f"is not supported: give {' or '.join(_WEIGHT_SYNC_MODES)}"
    if config.weight_sync == "nccl" and _is_cpu_build(config.python):
        yield "--weight-sync", "nccl", "needs GPUs, but this vLLM is built for CPUs; use --weight-sync files"
    max_positions = _load_text_config(config.model).get("max_position_embeddings") or sys.maxsize
    if config.max_model_len > max_positions:
        problem = f"exceeds the {max_positions} positions of {config.model}; give {max_positions} or less"
        yield "--max-model-len", config.max_model_len, problem
    command = [str(config.python), "-c", "import importlib.util as u, sys; sys.exit(not u.find_spec('vllm'))"]
    try:
        problem = "has no vLLM" if subprocess.run(command, capture_output=True).returncode else ""
    except OSError:
        problem = "is not a Python interpreter"
    if problem:
        hint = "`scripts/bootstrap --vllm-cpu` creates one for CPUs, or give another"
        yield "--python", str(config.python), f"{problem}; {hint}"


def list_warnings(config: ServerProcessConfig) -> Iterator[str]:
    """Yield warnings about a server: what it doesn't support, and what may break it."""
    if _load_text_config(config.model).get("tie_word_embeddings") and _is_cpu_build(config.python):
        yield (
            "This server is for evaluation only: vLLM on a CPU can't load new weights if input and output embeddings "
            "are tied (`saccade model tiny --untied` creates a model with untied ones)"
        )
    stage = resolve_path(config.model).parent
    run = stage.parent
    is_checkpoint = resolve_path(config.model).name.startswith("step-") and (run / "recipe.yaml").is_file()
    if is_checkpoint and not (run / "finished_stages" / f"{stage.name}.json").exists():  # an unfinished stage
        yield (
            f"{config.model} may be deleted by its run {run}, which keeps only its two newest checkpoints per stage; "
            f"then the server can't be restarted: serve a copy (cp -r {config.model} models/served)"
        )


def _load_text_config(model: Path) -> dict[str, Any]:
    """Return a checkpoint's config, updated by its text_config: families differ in where they keep values."""
    config: dict[str, Any] = json.loads(read_text(model / "config.json"))
    return {**config, **config.get("text_config", {})}


def _check_port(config: ServerProcessConfig) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((config.host, config.port))
        except OSError as error:
            reason, key = error.strerror or str(error), "--host"
            if error.errno == errno.EADDRINUSE:
                reason, key = "it is in use", "--port"
                with contextlib.suppress(ValueError, LookupError, TypeError, RecursionError):  # by another program
                    models = json.loads(fetch(f"{config.url}/v1/models", timeout=2) or b"")
                    reason = f"it is in use by a server of {models['data'][0]['root']}"
            raise ConfigError(
                f"the server can't listen at {config.host}:{config.port}: {reason}; give another --port or --host",
                key=key,
                value=f"{config.host}:{config.port}",
            ) from error


@contextlib.contextmanager
def _defer_signals() -> Iterator[None]:
    """Defer signals that would interrupt the block to its end."""
    received: list[int] = []
    signums = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if current_thread() is main_thread() else ()
    deferred = [signum for signum in signums if signal.getsignal(signum) is signal.default_int_handler]
    for signum in deferred:
        signal.signal(signum, lambda signum, frame: received.append(signum))
    try:
        yield
    finally:
        for signum in deferred:
            signal.signal(signum, signal.default_int_handler)
        if received:
            signal.raise_signal(received[0])


def _truncate_log(log: Path) -> None:
    """Keep only the end of a log that is too long."""
    if log.exists() and log.stat().st_size > _MAX_LOG_BYTES:
        with open_file(log) as file:
            file.seek(-_MAX_LOG_BYTES // 2, os.SEEK_END)
            end = file.read().partition(b"\n")[2]
        log.write_bytes(b"--- truncated ---\n" + end)


class ServerProcess:
    """A context manager that starts a server on entry and stops its process group on exit.

    The server's output is appended to `log`, after a header line; a long log is truncated to its end first.
    """

    def __init__(self, config: ServerProcessConfig, log: Path) -> None:
        self.config, self.log = config, log
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0  # offset of this server's output in the log

    def __enter__(self) -> "ServerProcess":
        try:
            with convert_file_errors(self.log), _defer_signals():
                self._start()
        except BaseException:  # a deferred signal, too
            self.stop()
            raise
        return self

    def _start(self) -> None:
        _truncate_log(self.log)
        with open_file(self.log, "ab") as file:
            file.write(f"--- started at {time.strftime('%Y-%m-%d %H:%M:%S')}: {self.config.model} ---\n".encode())
            file.flush()
            self._log_start = file.tell()
            self._process = subprocess.Popen(
                self.config.build_command(),
                env=self.config.build_environment(),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches only us, and we stop the whole group
                cwd=self.log.parent,
            )

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """Return the id of the process and of its group; 0 if it was not started."""
        return self._process.pid if self._process else 0

    @property
    def is_alive(self) -> bool:
        """Return whether the process runs."""
        return self._process is not None and self._process.poll() is None

    def poll_until_ready(self, timeout: float) -> Iterator[str]:
        """Yield the newest log line twice a second until the server is ready.

        Raises EngineError if it exits or isn't ready after `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while self.is_alive and time.monotonic() < deadline:
            if fetch(f"{self.config.url}/health", timeout=2) is not None:
                return
            yield self.read_last_log_line(prefer_error=False)
            time.sleep(0.5)
        problem = f"was not ready after {timeout:g} seconds" if self.is_alive else "exited during startup"
        raise EngineError(
            f"vLLM {problem}: {self.read_last_log_line() or 'no output'} (log: {self.log})", key=str(self.log)
        )

    def read_last_log_line(self, *, prefer_error: bool = True) -> str:
        """Return the first error line of this server's log if `prefer_error` and there is one, else the newest line."""
        with open_file(self.log) as file:
            file.seek(max(self._log_start, file.seek(0, os.SEEK_END) - 200_000))
            text = file.read().decode(errors="replace")
        lines = [_LOG_PREFIX.sub("", line).strip() for line in text.splitlines()]
        lines = [line for line in lines if line]
        errors = [line for line in lines if re.match(r"(ERROR .*\] )?(\w+\.)*\w*(Error|Exception): \S", line)]
        # The first error is the cause; later ones are its consequences.
        line = errors[0] if errors and prefer_error else lines[-1] if lines else ""
        return line[:300]

    def wait(self) -> int:
        """Wait until the process exits; return its exit code."""
        return self._process.wait() if self._process else 0

    def stop(self) -> None:
        """Terminate the whole group; kill it if it takes too long or this process is interrupted."""
        if self._process is None:
            return
        try:
            self._signal_group(signal.SIGTERM)
            self._wait_for_exit(_GRACE_SECONDS)
        finally:
            self._signal_group(signal.SIGKILL)
            self._wait_for_exit(_GRACE_SECONDS)

    def _wait_for_exit(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while (self.is_alive or self.list_group_pids()) and time.monotonic() < deadline:
            time.sleep(0.05)

    def list_group_pids(self) -> list[int]:
        """Return the ids of the group's running processes, without zombies."""
        pids = []
        for path in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError, ValueError):
                state, _, group = read_text(path).rpartition(")")[2].split()[:3]
                pids += [int(path.parent.name)] if int(group) == self.pid and state != "Z" else []
        return pids

    def _signal_group(self, signum: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signum)
