"""Schedule cells on short and long slots, so that runaway cells don't delay all others.

    CpuSlot.__aenter__ ──first come, first served──> short slot ──end_time_slice──> long slot ──end_time_slice──> paused
                                                                                      └<──────── oldest first ─────┘

How long a cell will run is unknown. Each cell starts in a short slot; after a time slice it moves to a long slot, and
its short slot goes to the next waiting cell. If there are more long cells than long slots, they take turns and are
paused in between. So short cells never wait for long ones, and no more cells run at a time than there are slots.
"""

import asyncio
import os
from collections import deque
from typing import Protocol

_cpu_limit: int | None = None


def limit_cpus(count: int) -> None:
    """Let the fork servers of this process run as many cells, and decode on as many threads, as fit `count` CPUs.

    Call it before the first cell.
    """
    global _cpu_limit  # a property of the process, like its affinity
    _cpu_limit = count


def count_cpus() -> int:
    """Return the number of CPUs of the process's affinity, or the limit if it is lower."""
    available = len(os.sched_getaffinity(0))
    return available if _cpu_limit is None else min(available, _cpu_limit)


class PausableCell(Protocol):
    """A cell that the scheduler can pause."""

    def pause(self) -> None:
        """Stop running until `resume`."""

    def resume(self) -> None:
        """Continue running."""


class Scheduler:
    """The short and long slots of one event loop."""

    def __init__(self, num_short: int, num_long: int) -> None:
        self._num_free_short, self._max_long = num_short, num_long
        self._short_waiters: deque[asyncio.Future[None]] = deque()
        self._long_cells: dict[CpuSlot, PausableCell] = {}
        self._paused_cells: dict[CpuSlot, PausableCell] = {}

    async def acquire(self) -> None:
        """Wait for a short slot."""
        if self._num_free_short:
            self._num_free_short -= 1
            return
        waiter = asyncio.get_running_loop().create_future()
        self._short_waiters.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():  # it received a slot just before the cancellation
                self._release_short_slot()
            raise

    def end_time_slice(self, slot: "CpuSlot", cell: PausableCell) -> None:
        """Move the cell to a long slot, or pause it until one is free."""
        if slot in self._long_cells and not self._paused_cells:
            return  # no other cell waits for the long slot
        is_full = bool(self._paused_cells) or len(self._long_cells) == self._max_long
        if is_full:
            cell.pause()  # first, so that a failure leaves all slots unchanged
        if self._long_cells.pop(slot, None) is None:
            self._release_short_slot()
        (self._paused_cells if is_full else self._long_cells)[slot] = cell
        self._resume_paused()

    def release(self, slot: "CpuSlot") -> None:
        """Free the slot, short, long or paused."""
        if self._long_cells.pop(slot, None) is None and self._paused_cells.pop(slot, None) is None:
            self._release_short_slot()
        self._resume_paused()

    def _release_short_slot(self) -> None:
        """Pass a short slot to the next waiter, or free it."""
        while self._short_waiters:
            waiter = self._short_waiters.popleft()
            if not waiter.done():  # a done waiter was cancelled
                waiter.set_result(None)
                return
        self._num_free_short += 1

    def _resume_paused(self) -> None:
        while self._paused_cells and len(self._long_cells) < self._max_long:
            slot = next(iter(self._paused_cells))
            self._long_cells[slot] = self._paused_cells.pop(slot)
            self._long_cells[slot].resume()


class CpuSlot:
    """The slot of one cell; acquire it with `async with`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    async def __aenter__(self) -> "CpuSlot":
        await self._scheduler.acquire()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._scheduler.release(self)

    def end_time_slice(self, cell: PausableCell) -> None:
        """Report that the cell has used up its time slice."""
        self._scheduler.end_time_slice(self, cell)
