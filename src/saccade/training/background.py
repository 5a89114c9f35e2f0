"""Run a blocking update in a background thread; on cancellation wait at most `_GRACE_SECONDS` for it.

    run ──function(check_cancelled)──> thread ── result ──> run
     │ cancelled (Ctrl-C)                │
     └──set event, log a warning────────>│ `check_cancelled()` raises `Cancelled` before the next micro-batch

The thread is a daemon, so that the interpreter can exit without it. An update in the main thread can't be interrupted;
`defer_interrupt` logs that Ctrl-C takes effect when it has finished.
"""

import asyncio
import contextlib
import logging
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TypeVar

from saccade.utils.async_utils import run_in_daemon_thread

T = TypeVar("T")
CheckCancelled = Callable[[], None]  # raises Cancelled if the run is being stopped
_GRACE_SECONDS = 30.0
_logger = logging.getLogger("saccade")


class Cancelled(Exception):
    """The run is being stopped; the result is discarded."""


async def run_in_thread(function: Callable[[CheckCancelled], T], description: str) -> T:
    """Return the function's result; it must call its argument regularly. `description` names it in the log."""
    is_cancelled = threading.Event()

    def check_cancelled() -> None:
        if is_cancelled.is_set():
            raise Cancelled

    future = run_in_daemon_thread(lambda: function(check_cancelled), "saccade-update")
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        is_cancelled.set()
        message = "Stopping: %s finishes its micro-batch first (at most %g seconds); press Ctrl-C again to stop at once"
        _logger.warning(message, description, _GRACE_SECONDS)
        await asyncio.wait((future,), timeout=_GRACE_SECONDS)
        if not future.cancel():  # it has finished
            future.exception()  # retrieved, so that asyncio doesn't log it
        raise


@contextlib.contextmanager
def defer_interrupt(description: str) -> Iterator[None]:
    """Log, on Ctrl-C inside the block, that the run stops when the block has finished."""
    current_handler = signal.getsignal(signal.SIGINT)
    if not callable(current_handler) or threading.current_thread() is not threading.main_thread():
        yield
        return
    previous_handler = current_handler

    def handle_interrupt(signal_number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, previous_handler)
        _logger.warning("Stopping: %s finishes first; press Ctrl-C again to stop at once", description)
        previous_handler(signal_number, frame)

    signal.signal(signal.SIGINT, handle_interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous_handler)
