"""Compare formulas in worker processes, which may hang or crash without affecting the rest of the run.

    are_equal(ground_truth, answer) ── thread ── {"ground_truth", "answer", ...} ──> its process (`math_worker`)
                                                   <────────── {"same"} ────────────

Each thread owns one process and waits only for it; the event loop waits for the thread. The system kills a process that
has used up its processor time, and the thread starts another for its next comparison.
"""

import asyncio
import contextlib
import json
import select
import signal
import subprocess
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from saccade.rewards import math_worker

_STARTUP_TIMEOUT = 120.0  # wall-clock seconds for a process to import math-verify
_RESPONSE_TIMEOUT = (60.0, 20.0)  # wall-clock seconds per comparison, plus so many per second of allowed processor time
_CACHE_SIZE = 4096  # comparisons

Process = subprocess.Popen[str]


class MathWorkerError(Exception):
    """Raised if no worker process responds, which implies nothing about the answer."""


class MathWorkerPool:
    """Compare formulas in at most `num_workers` processes, each for at most `cpu_seconds` of processor time."""

    def __init__(self, *, cpu_seconds: int, num_workers: int) -> None:
        self._cpu_seconds = cpu_seconds
        self._executor = ThreadPoolExecutor(num_workers, thread_name_prefix="saccade-math")
        self._thread_local = threading.local()
        self._processes: set[Process] = set()
        self._cache: dict[tuple[str, str], bool] = {}
        weakref.finalize(self, _shut_down, self._executor, self._processes)

    async def are_equal(self, ground_truth: str, answer: str) -> bool:
        """Return whether formulas are equal; False beyond time or memory. Raises MathWorkerError without a response."""
        is_equal = self._cache.get((ground_truth, answer))
        if is_equal is None:
            is_equal = await asyncio.get_running_loop().run_in_executor(
                self._executor, self._compare, ground_truth, answer
            )
            self._cache[ground_truth, answer] = is_equal
            if len(self._cache) > _CACHE_SIZE:
                del self._cache[next(iter(self._cache))]
        return is_equal

    def verify_texts(self, ground_truth: str, answer: str) -> bool:
        """Return whether math-verify finds the same in two texts, with its default settings; blocks this thread.

        False beyond time or memory. Raises MathWorkerError without a response.
        """
        return self._compare(ground_truth, answer, is_text=True)

    def _compare(self, ground_truth: str, answer: str, is_text: bool = False) -> bool:
        fields = {"ground_truth": ground_truth, "answer": answer, "seconds": self._cpu_seconds, "is_text": is_text}
        request = json.dumps(fields) + "\n"
        # The worker limits processor time; this timeout covers a machine that grants it none.
        timeout = _RESPONSE_TIMEOUT[0] + _RESPONSE_TIMEOUT[1] * self._cpu_seconds
        for _ in range(2):  # retry once if the process was killed for another reason than its time limit
            process = self._get_process()
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(request)
                process.stdin.flush()
            response = self._read_response(process, timeout)
            if response is not None:
                return bool(response["same"])
            if process.returncode == -signal.SIGXCPU:
                break
        return False

    def _get_process(self) -> Process:
        """Return the process of this thread; start one if there is none."""
        process: Process | None = vars(self._thread_local).get("process")
        if process is None or process.poll() is not None:
            if process is not None:
                self._stop_process(process)
            # -P keeps this folder off sys.path, where a plugin's file name may shadow a module of the standard library.
            command = [sys.executable, "-P", math_worker.__file__]
            # A separate session: Ctrl-C reaches only this process, which stops its workers itself.
            process = subprocess.Popen(
                command, stdin=-1, stdout=-1, stderr=subprocess.DEVNULL, text=True, start_new_session=True
            )
            self._thread_local.process = process
            self._processes.add(process)
            ready = self._read_response(process, _STARTUP_TIMEOUT) or {"error": "its process ended"}
            if "error" in ready:
                self._stop_process(process)
                raise MathWorkerError(f"math-verify can't be started: {ready['error']}")
        return process

    def _read_response(self, process: Process, timeout: float) -> dict[str, Any] | None:
        """Return the next line of a process, or None if it died. Raises MathWorkerError after `timeout` seconds."""
        assert process.stdout is not None
        readable, _, _ = select.select([process.stdout], [], [], timeout)
        line = process.stdout.readline() if readable else ""
        if not line.endswith("\n"):
            self._stop_process(process)
            if not readable:
                raise MathWorkerError(f"the math-verify process did not respond within {timeout:.0f} seconds")
            return None
        return json.loads(line)

    def _stop_process(self, process: Process) -> None:
        self._processes.discard(process)
        _kill_process(process)


def _kill_process(process: Process) -> None:
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with contextlib.suppress(OSError):  # closing flushes, which fails on a broken pipe
            pipe.close()
    try:
        process.wait(0.5)  # usually dead already
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _shut_down(executor: ThreadPoolExecutor, processes: set[Process]) -> None:
    executor.shutdown(wait=False, cancel_futures=True)
    for process in tuple(processes):
        process.kill()
        _kill_process(process)
