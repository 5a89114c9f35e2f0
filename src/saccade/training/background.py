"""Work in a thread of its own, for which nobody who stops the run waits longer than they are told.

    run ──work(going)──> thread ── result ──> run
     │ cancelled (Ctrl-C)   │
     └──halt, says so──────>│ `going()` raises at the next micro-batch; after `_PATIENCE` seconds nobody waits for it

The thread is a daemon: Python doesn't wait for it either. Work in the run's own thread can't be left before it ends; it
is `announced`, so that whoever stops the run is told.
"""

import asyncio
import contextlib
import logging
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TypeVar

from saccade.waiting import apart

T = TypeVar("T")
Going = Callable[[], None]  # raises Halted where the run is being stopped
_PATIENCE = 30.0  # seconds
_logger = logging.getLogger("saccade")


class Halted(Exception):
    """The run is being stopped, and nobody waits for the result."""


async def aside(work: Callable[[Going], T], what: str) -> T:
    """What the work gives; it calls `going` now and then. `what` it is, in words, for whoever has to wait for it."""
    halt = threading.Event()

    def going() -> None:
        if halt.is_set():
            raise Halted

    waiting = apart(lambda: work(going), "saccade-aside")
    try:
        return await asyncio.shield(waiting)
    except asyncio.CancelledError:
        halt.set()
        told = "Stopping: waiting at most %g seconds for %s to end with its micro-batch; Ctrl-C again doesn't wait"
        _logger.warning(told, _PATIENCE, what)
        await asyncio.wait((waiting,), timeout=_PATIENCE)
        if not waiting.cancel():  # it has ended
            waiting.exception()  # which nobody wants to hear of
        raise


@contextlib.contextmanager
def announced(what: str) -> Iterator[None]:
    """Inside, whoever presses Ctrl-C is told that it is heard when the block has ended. `what` that is, in words."""
    before = signal.getsignal(signal.SIGINT)
    if not callable(before) or threading.current_thread() is not threading.main_thread():
        yield
        return
    heard = before

    def told(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, heard)
        _logger.warning("Stopping: waiting for %s to end; Ctrl-C again doesn't wait", what)
        heard(number, frame)

    signal.signal(signal.SIGINT, told)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, heard)
