"""Waiting: for several at once, for what may or may not have to be waited for, for a thread, and only so long."""

import asyncio
import contextlib
import inspect
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextvars import ContextVar
from typing import Any, Optional, TypeVar

T = TypeVar("T")


async def together(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run all at once, results in order; the first failure is raised and cancels the rest."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:  # `gather` alone would let the others run on
            task.cancel()


async def until(enough: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """Work until it is done, or until `enough` is set: then it is cancelled, has ended on return, and gives None."""
    running, signal = asyncio.ensure_future(work), asyncio.ensure_future(enough.wait())
    try:
        await asyncio.wait((running, signal), return_when=asyncio.FIRST_COMPLETED)
        return await running if running.done() else None
    finally:
        for each in (running, signal):
            each.cancel()
        await asyncio.gather(running, signal, return_exceptions=True)


def apart(work: Callable[[], T], name: str) -> asyncio.Future[T]:
    """The result of work in a thread of its own, a daemon: nobody has to wait for it, nor does Python at its end."""
    future = Future[T]()
    future.set_running_or_notify_cancel()  # from here on nobody but the thread settles it

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 (it is raised where it is waited for)
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return asyncio.wrap_future(future)


async def settled(value: T | Awaitable[T]) -> T:
    """A value, waited for where it has to be."""
    if inspect.isawaitable(value):
        return await value
    return value


class PausableClock:
    """The event loop's clock, less the time in which it was paused; what it bounds isn't charged for that time."""

    def __init__(self) -> None:
        self._limits: dict[asyncio.Timeout, float] = {}  # when each passes, by this clock
        self._paused, self._since = 0.0, 0.0
        self._pauses = 0  # that are open

    def time(self) -> float:
        """Seconds, as of the running loop."""
        return (self._since if self._pauses else asyncio.get_running_loop().time()) - self._paused

    @contextlib.asynccontextmanager
    async def timeout_at(self, when: float | None) -> AsyncIterator[asyncio.Timeout]:
        """As `asyncio.timeout_at`, by this clock; None is never."""
        async with asyncio.timeout(None) as limit:
            if when is not None:
                self._limits[limit] = when
                self._schedule(limit)
            known = _BOUNDING.set(self)
            try:
                yield limit
            finally:
                _BOUNDING.reset(known)
                self._limits.pop(limit, None)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """The clock stands still inside, where no limit passes."""
        self._since = self._since if self._pauses else asyncio.get_running_loop().time()
        self._pauses += 1
        self._schedule(*self._limits)
        try:
            yield
        finally:
            self._pauses -= 1
            self._paused += 0.0 if self._pauses else asyncio.get_running_loop().time() - self._since
            self._schedule(*self._limits)

    def _schedule(self, *limits: asyncio.Timeout) -> None:
        for limit in limits:
            if not limit.expired():
                limit.reschedule(None if self._pauses else self._limits[limit] + self._paused)


_BOUNDING: ContextVar[Optional["PausableClock"]] = ContextVar("bounding", default=None)


@contextlib.contextmanager
def uncharged() -> Iterator[None]:
    """Inside, the clock that bounds whoever is here stands still, if there is one."""
    clock = _BOUNDING.get()
    with clock.paused() if clock else contextlib.nullcontext():
        yield
