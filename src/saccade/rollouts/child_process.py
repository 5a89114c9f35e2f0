"""A process that an executor starts, at the other end of a pipe."""

import asyncio
import contextlib
import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from queue import SimpleQueue

from saccade.errors import RunError, convert_errors
from saccade.utils.files import convert_file_errors, open_file

_JOIN_SECONDS = 5.0  # for a thread that reads or writes, once the process has ended


class ChildProcess:
    """Runs `python -m MODULE DESCRIPTOR ARGUMENTS`, whose output is appended to a file.

    `on_message` receives on the event loop what the process sends, and None when it has ended. Its end of the pipe is
    closed when this process ends. Raises RunError if it can't start.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        *,
        log_path: Path,
        on_message: Callable[[object], None],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._connection, theirs = multiprocessing.Pipe()
        with convert_file_errors(log_path):
            log_path.parent.mkdir(parents=True, exist_ok=True)
            log = open_file(log_path, "ab")
        with log, theirs, convert_errors(RunError, f"the process {module} can't start", key="rollouts.executor"):
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno()), *arguments],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **(environment or {})},
                start_new_session=True,  # Ctrl-C in a terminal reaches the trainer alone
            )
        self._loop, self._on_message = asyncio.get_running_loop(), on_message
        self._outbox: SimpleQueue[bytes | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=target, name="saccade-rollouts", daemon=True)
            for target in (self._read, self._write)
        ]
        for thread in self._threads:
            thread.start()

    def send(self, message: object) -> None:
        """Send a message, in a thread: the process may be busy. Nothing happens if it has ended."""
        self._outbox.put(bytes(ForkingPickler.dumps(message)))

    def describe_exit(self) -> str:
        """Return how the process ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self.process.wait(timeout=_JOIN_SECONDS)
            return f"killed by signal {-code}" if code < 0 else f"exit status {code}"
        return "its connection broke"

    async def end(self, timeout: float) -> None:
        """Wait `timeout` seconds for the process's end, then kill it."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self.process.wait, timeout)
        self.process.kill()
        await asyncio.to_thread(self.process.wait)
        self._outbox.put(None)
        for thread in self._threads:
            await asyncio.to_thread(thread.join, _JOIN_SECONDS)
        self._connection.close()

    def _read(self) -> None:
        try:
            with contextlib.suppress(EOFError, OSError):
                while True:
                    self._post(self._connection.recv())
        finally:
            self._post(None)

    def _write(self) -> None:
        with contextlib.suppress(OSError):  # it has ended
            while (message := self._outbox.get()) is not None:
                self._connection.send_bytes(message)

    def _post(self, message: object) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(self._on_message, message)
