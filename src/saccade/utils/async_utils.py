"""Async helpers: gathering with cancellation, background threads, and timeouts by a clock that can be paused."""

import asyncio
import contextlib
import gc
import inspect
import threading
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")


async def gather_or_cancel(awaitables: Sequence[Awaitable[T]]) -> list[T]:
    """Await all concurrently; return results in order. The first failure cancels the others and is raised
    when all have ended.
    """
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:  # `asyncio.gather` alone would leave the others running
            if (
                not isinstance(task, asyncio.Task) or not task.cancelling()
            ):  # a second cancellation would interrupt a task's cleanup
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def run_until(stop_event: asyncio.Event, coroutine: Coroutine[Any, Any, T]) -> T | None:
    """Run a coroutine to its end, or until `stop_event` is set: then cancel it, wait for its end and return None."""
    running, signal = asyncio.ensure_future(coroutine), asyncio.ensure_future(stop_event.wait())
    try:
        await asyncio.wait((running, signal), return_when=asyncio.FIRST_COMPLETED)
        return await running if running.done() else None
    finally:
        running.cancel()
        signal.cancel()
        await asyncio.gather(running, signal, return_exceptions=True)


def run_in_daemon_thread(function: Callable[[], T], name: str) -> asyncio.Future[T]:
    """Run a function in a new daemon thread, which Python doesn't join at exit; return a future of its result.

    The function, and what only it or its locals refer to, is freed before the future is done.
    """
    future = Future[T]()
    future.set_running_or_notify_cancel()  # from here on only the thread sets its result
    functions = [function]
    del function

    def run() -> None:
        try:
            # A thread that frees a tensor while the interpreter exits aborts the process (std::terminate).
            result = functions.pop()()
        except BaseException as error:  # noqa: BLE001 (raised where the future is awaited)
            traceback.clear_frames(error.__traceback__)
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, name=name, daemon=True).start()
    return asyncio.wrap_future(future)


def hide_interrupted_tasks() -> None:
    """Let the running loop log no task that a second Ctrl-C has ended: the command says that it was interrupted."""

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if not isinstance(context.get("exception"), KeyboardInterrupt):
            loop.default_exception_handler(context)

    asyncio.get_running_loop().set_exception_handler(handle)


_turns: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()


@contextlib.contextmanager
def keep_collections_short() -> Iterator[None]:
    """Inside the block, let garbage collections skip the objects that exist now.

    A full collection stops the event loop for a quarter of a second if it looks at everything that torch and
    transformers have created at their import.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


async def yield_to_loop() -> None:
    """Wait for a turn of the event loop: one caller returns per iteration, in the order of the calls.

    Called before a step of some milliseconds, such as parsing a response: a hundred that become ready at once would
    else run in one iteration, in which no timer fires and no socket is read.
    """
    async with _turns.setdefault(asyncio.get_running_loop(), asyncio.Lock()):
        await asyncio.sleep(0)


async def maybe_await(value: T | Awaitable[T]) -> T:
    """Return a value, awaiting it first if it is awaitable."""
    if inspect.isawaitable(value):
        return await value
    return value


@dataclass(slots=True, eq=False)
class _Limit:
    """A timeout by a clock, and the pauses of this timeout alone."""

    timeout: asyncio.Timeout
    when: float  # when it expires, by the clock
    num_pauses: int = 0  # pauses may be nested or overlap
    paused_since: float = 0.0  # by the clock


class PausableClock:
    """The event loop's clock minus the time in which it was paused; paused time doesn't count toward its timeouts."""

    def __init__(self) -> None:
        self._limits: set[_Limit] = set()
        self._paused_seconds, self._paused_since = 0.0, 0.0
        self._num_pauses = 0  # pauses may be nested or overlap

    def time(self) -> float:
        """Return the seconds of the running loop's clock, minus paused time."""
        return (self._paused_since if self._num_pauses else asyncio.get_running_loop().time()) - self._paused_seconds

    @contextlib.asynccontextmanager
    async def timeout_at(self, when: float | None) -> AsyncIterator[asyncio.Timeout]:
        """Bound the block like `asyncio.timeout_at`, by this clock; None means no timeout."""
        async with asyncio.timeout(None) as timeout:
            if when is None:
                yield timeout
                return
            limit = _Limit(timeout, when)
            self._limits.add(limit)
            self._reschedule(limit)
            token = _ACTIVE_LIMITS.set((*_ACTIVE_LIMITS.get(), (self, limit)))
            try:
                yield timeout
            finally:
                _ACTIVE_LIMITS.reset(token)
                self._limits.remove(limit)

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Pause the clock inside the block; none of its timeouts expires meanwhile."""
        self._paused_since = self._paused_since if self._num_pauses else asyncio.get_running_loop().time()
        self._num_pauses += 1
        self._reschedule(*self._limits)
        try:
            yield
        finally:
            self._num_pauses -= 1
            self._paused_seconds += 0.0 if self._num_pauses else asyncio.get_running_loop().time() - self._paused_since
            self._reschedule(*self._limits)

    @contextlib.contextmanager
    def pause_limit(self, limit: _Limit) -> Iterator[None]:
        """Pause one of the clock's timeouts inside the block; the others continue."""
        limit.paused_since = limit.paused_since if limit.num_pauses else self.time()
        limit.num_pauses += 1
        self._reschedule(limit)
        try:
            yield
        finally:
            limit.num_pauses -= 1
            limit.when += 0.0 if limit.num_pauses else self.time() - limit.paused_since
            self._reschedule(limit)

    def _reschedule(self, *limits: _Limit) -> None:
        for limit in limits:
            if limit in self._limits and not limit.timeout.expired():
                is_paused = self._num_pauses or limit.num_pauses
                limit.timeout.reschedule(None if is_paused else limit.when + self._paused_seconds)


# The timeouts that bound the running task, the outermost first, each with its clock.
_ACTIVE_LIMITS: ContextVar[tuple[tuple[PausableClock, _Limit], ...]] = ContextVar("active_limits", default=())


@contextlib.contextmanager
def pause_active_timeouts() -> Iterator[None]:
    """Pause the timeouts of pausable clocks that bound the caller inside the block; those of other tasks continue."""
    with contextlib.ExitStack() as stack:
        for clock, limit in _ACTIVE_LIMITS.get():
            stack.enter_context(clock.pause_limit(limit))
        yield
