"""Work in a thread of its own, for which nobody who stops the run waits longer than they are told.

    run ──work(going)──> thread ── result ──> run
     │ cancelled (Ctrl-C)   │
     └──halt, says so──────>│ `going()` raises at the next micro-batch; after `_PATIENCE` seconds nobody waits for it

The thread is a daemon: Python doesn't wait for it either.
"""

import asyncio
import logging
import threading
from collections.abc import Callable
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
