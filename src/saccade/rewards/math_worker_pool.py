"""Formulas are compared by processes that may hang or crash without anybody else's noticing.

    same(gold, answer) ── a thread of the pool ── {"gold", "answer", "seconds"} ──> its own process (`_symbolic`)
                                               <────────── {"same"} ────────────

Each thread owns one process and waits for it alone; the event loop waits for the thread. A process that used up its
processor time is killed by the system, whatever it is at, and the thread starts another for its next question.
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

from saccade.rewards import _symbolic

_START = 120.0  # seconds on the clock until a process must have imported math-verify
_IDLE = (60.0, 20.0)  # seconds on the clock for a question, and more per second of processor time that it may use
_KEPT = 4096  # answers that are remembered

Process = subprocess.Popen[str]


class CheckerError(Exception):
    """No process could be asked, which says nothing of the answer."""


class Checker:
    """Compares formulas, `processes` of them at a time, for at most `seconds` of processor time each."""

    def __init__(self, *, seconds: int, processes: int) -> None:
        self._seconds = seconds
        self._threads = ThreadPoolExecutor(processes, thread_name_prefix="saccade-math")
        self._own = threading.local()
        self._alive: set[Process] = set()
        self._known: dict[tuple[str, str], bool] = {}
        weakref.finalize(self, _stop, self._threads, self._alive)

    async def same(self, gold: str, answer: str) -> bool:
        """Whether two formulas are equal; False where that can't be found out in the time or memory there is.

        Raises CheckerError where no process can be started, or one gets no processor time at all.
        """
        known = self._known.get((gold, answer))
        if known is None:
            known = await asyncio.get_running_loop().run_in_executor(self._threads, self._ask, gold, answer)
            self._known[gold, answer] = known
            if len(self._known) > _KEPT:
                del self._known[next(iter(self._known))]
        return known

    def _ask(self, gold: str, answer: str) -> bool:
        question = json.dumps({"gold": gold, "answer": answer, "seconds": self._seconds}) + "\n"
        for _ in range(2):  # a process that died by another hand says nothing of the answer, the first time
            process = self._process()
            said = self._exchange(process, question)
            if said is not None:
                return bool(said["same"])
            if process.returncode == -signal.SIGXCPU:
                break
        return False

    def _exchange(self, process: Process, question: str) -> dict[str, Any] | None:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(question)
            process.stdin.flush()
        # the limit is on processor time: this one is for a machine that gives it none
        return self._line(process, _IDLE[0] + _IDLE[1] * self._seconds)

    def _process(self) -> Process:
        """The process of this thread, a new one where there is none."""
        process: Process | None = vars(self._own).get("process")
        if process is None or process.poll() is not None:
            if process is not None:
                self._end(process)
            # -P, since beside that file lies one called math.py, which is not Python's
            command = [sys.executable, "-P", _symbolic.__file__]
            # a session of its own: Ctrl-C is for this process to act on, and it is the one that ends the others
            process = subprocess.Popen(
                command, stdin=-1, stdout=-1, stderr=subprocess.DEVNULL, text=True, start_new_session=True
            )
            self._own.process = process
            self._alive.add(process)
            ready = self._line(process, _START) or {"error": "its process died"}
            if "error" in ready:
                self._end(process)
                raise CheckerError(f"math-verify can't be started: {ready['error']}")
        return process

    def _line(self, process: Process, seconds: float) -> dict[str, Any] | None:
        """The next line of a process, or None where it died. Raises CheckerError where nothing happens at all."""
        assert process.stdout is not None
        readable, _, _ = select.select([process.stdout], [], [], seconds)
        line = process.stdout.readline() if readable else ""
        if not line.endswith("\n"):
            self._end(process)
            if not readable:
                raise CheckerError(f"the process that compares formulas did nothing for {seconds:.0f} seconds")
            return None
        found: dict[str, Any] = json.loads(line)
        return found

    def _end(self, process: Process) -> None:
        self._alive.discard(process)
        _kill(process)


def _kill(process: Process) -> None:
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with contextlib.suppress(OSError):  # what was not yet written can't be
            pipe.close()
    try:
        process.wait(0.5)  # dead already, as a rule
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _stop(threads: ThreadPoolExecutor, alive: set[Process]) -> None:
    threads.shutdown(wait=False, cancel_futures=True)
    for process in tuple(alive):
        process.kill()
        _kill(process)
