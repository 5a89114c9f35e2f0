"""Run blocking work in background threads, which a stop of the run doesn't leave half done.

    run ──function(check_cancelled)──> thread ── result ──> run
     │ Ctrl-C                            │
     └──set event, log a warning────────>│ `check_cancelled()` raises `Cancelled` before the next micro-batch
     <── CancelledError: nothing changed ┤ ... or the function finishes:
     <── result, then CancelledError at the caller's next await

So a caller knows what the weights are when the run stops, and can write a checkpoint. A second Ctrl-C stops at once
(`Abandoned`); the threads are daemons, so that the interpreter can exit without them. An update in the main thread
can't be interrupted; `defer_interrupt` logs that Ctrl-C takes effect when it has finished.
"""

import asyncio
import contextlib
import logging
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TypeVar

from saccade.errors import RunError
from saccade.utils.async_utils import run_in_daemon_thread

T = TypeVar("T")
CheckCancelled = Callable[[], None]  # raises Cancelled if the run is being stopped
STOPPED_BY_TORCHRUN = "stopped by torchrun"  # the message of a cancellation
_logger = logging.getLogger("saccade")


class Cancelled(Exception):
    """The run is being stopped; the function has changed nothing."""


class RankLostError(RunError):
    """A rank of a sharded training failed or was killed: its part of the weights is lost, so nothing can be saved."""


class Abandoned(asyncio.CancelledError):
    """The run is stopped at once, while the function still runs: what it changes is unknown."""


async def run_in_thread(function: Callable[[CheckCancelled], T], description: str) -> T:
    """Return the function's result; `description` names it in the log.

    The function must call its argument regularly, as long as it has changed nothing. If the caller is cancelled, and
    the function finishes nevertheless, its result is returned and the caller is cancelled at its next await. If it
    fails then, its error is logged.
    """
    is_cancelled = threading.Event()

    def check_cancelled() -> None:
        if is_cancelled.is_set():
            raise Cancelled

    future = run_in_daemon_thread(lambda: function(check_cancelled), "saccade-update")
    return await wait_for_thread(future, description, on_cancel=is_cancelled.set)


async def wait_for_thread(
    future: asyncio.Future[T], description: str, *, on_cancel: Callable[[], None] = lambda: None
) -> T:
    """Return the result of a thread's function, also if the caller is cancelled meanwhile, as `run_in_thread` does.

    `on_cancel` is called then, before the wait for the function's end.
    """
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError as cancellation:
        on_cancel()
        # torchrun may stop this process because a rank is lost: then the function's own error is the one sentence.
        if STOPPED_BY_TORCHRUN not in cancellation.args:
            _logger.warning("Stopping: %s ends first; press Ctrl-C again to stop at once", description)
        try:
            await asyncio.wait((future,))
        except asyncio.CancelledError:
            future.add_done_callback(lambda done: done.cancelled() or done.exception())  # or asyncio logs it
            raise Abandoned from None
        if (error := future.exception()) is not None:
            if isinstance(error, RankLostError):
                raise error from None  # it ends the run, whether or not it is being stopped
            if not isinstance(error, Cancelled):
                _logger.warning("Stopping: %s failed: %s", description, error)
            raise
        if (task := asyncio.current_task()) is not None:
            # Once, since `asyncio.run` counts: it reports a Ctrl-C only if it was the only cancellation.
            task.uncancel()
            task.cancel(*cancellation.args)
        return future.result()


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
