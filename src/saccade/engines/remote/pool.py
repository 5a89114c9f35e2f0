"""The server pool: route requests sticky by group, else to the least loaded server, never to one that is down.

    rollouts ──generate──> acquire ──┬── a server is up ──> request ── reply ──> rollout
                              ▲      │                        └── ServerError ──> mark_down ──> acquire again (retries)
                              │      └── none is up: wait, at most `down_timeout` seconds, then BrokenEngineError
                              │                                                   ▲
                              └── _state_changed <── _reconnect: one task per down server: handshake, back off, retry …

- A rollout waits for its reply, or in `acquire` for a state change and for the end of a pause (`pause_new`). A weight
  sync pauses new requests; `drain` also waits for unfinished ones and aborts those that take too long. A request that
  holds a server never waits for the end of a pause, so there is no deadlock. Waiting for a server pauses the episode's
  timeout.
- The health monitor checks servers that are up; one that hangs is marked down, and its requests fail.
- Only a reconnect task signals a state change: its server is up, its handshake failed, or a fatal error (it serves
  another model). It waits for its server and the clock, never for rollouts, and ends when its server is up, on a fatal
  error, or on close.
- Every server starts as down, so that none is used before its handshake. If none could ever be reached, it seems that
  none was started: then requests wait only `FIRST_CONNECTION_TIMEOUT` seconds.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence

from saccade.engines.remote.server import (
    SERVERS_KEY,
    RequestAborted,
    Server,
    ServerBusy,
    ServerError,
    ServerTimeout,
    ServerUnreachable,
)
from saccade.errors import BrokenEngineError, EngineError, SaccadeError, convert_errors
from saccade.media.cache import LRUCache
from saccade.utils.async_utils import pause_active_timeouts
from saccade.utils.http_client import compute_backoff

MAX_BACKOFF = 15.0  # seconds between two tries
FIRST_CONNECTION_TIMEOUT = 60.0  # seconds, as long as no server could ever be reached
_HEALTH_CHECK_INTERVAL = 30.0  # seconds between two health checks of a server, and the timeout of each
_MAX_STICKY_GROUPS = 65536  # groups whose server is remembered
_logger = logging.getLogger("saccade")


class Pool:
    """The servers of an engine, and which of them are up.

    `handshake` checks a server before it is used: after a ServerError it is retried, any other error is fatal for the
    pool. `retry_backoff` (seconds) is the first pause between two handshakes, doubled each time.
    """

    def __init__(
        self,
        servers: Sequence[Server],
        handshake: Callable[[Server], Awaitable[None]],
        *,
        down_timeout: float,
        retry_backoff: float,
    ) -> None:
        self.servers, self._handshake = tuple(servers), handshake
        self._down_timeout, self._retry_backoff = down_timeout, retry_backoff
        self._sticky_servers: LRUCache[str, Server] = LRUCache(_MAX_STICKY_GROUPS)
        self._reconnect_tasks: dict[Server, asyncio.Task[None]] = {}
        self._state_changed, self._accepting_requests, self._idle = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._accepting_requests.set()
        self._fatal_error: BrokenEngineError | None = None
        self._all_down_since: float | None = None
        self._outage_reported = False
        self._reported_down: set[Server] = set()
        self._request_timeouts: dict[asyncio.Timeout, Server] = {}  # of the unfinished requests
        self._health_task: asyncio.Task[None] | None = None
        self.num_pauses = 0  # so far
        self._messages = self.servers[0].api.MESSAGES

    @property
    def servers_up(self) -> list[Server]:
        """Return the servers that are up, in order."""
        return [server for server in self.servers if server.is_up]

    @property
    def down_timeout(self) -> float:
        """Return for how many seconds requests wait while no server is up: less if none could ever be reached."""
        if all(server.was_reached is False for server in self.servers):
            return min(self._down_timeout, FIRST_CONNECTION_TIMEOUT)
        return self._down_timeout

    @contextlib.asynccontextmanager
    async def acquire(self, group_key: str, avoid: Collection[Server] = ()) -> AsyncIterator[Server]:
        """Choose a server for a request of the group and count it in the server's load; a ServerError marks it down.

        The servers `avoid`, at which the request has failed before, are chosen only if no other is up.

        A failure of a request that started before the server's last handshake is ignored. Raises BrokenEngineError if
        no server was up for `down_timeout` seconds or one is unusable; RequestAborted if a weight sync aborts it.
        """
        server = await self._choose_server(group_key, avoid)
        server.num_in_flight += 1
        incarnation = server.incarnation
        try:
            async with asyncio.timeout(None) as limit:
                self._request_timeouts[limit] = server
                try:
                    yield server
                finally:
                    del self._request_timeouts[limit]
        except TimeoutError:
            if not limit.expired():
                raise
            raise (RequestAborted() if server.is_up else ServerError(server.down_reason)) from None
        except (ServerBusy, ServerTimeout):  # a timeout may be ours, or that of one long reply: see `check_response`
            raise
        except ServerError as error:
            if server.incarnation == incarnation:
                self.mark_down(server, str(error))
            raise
        finally:
            server.num_in_flight -= 1
            if not self._num_in_flight:
                self._idle.set()

    @contextlib.asynccontextmanager
    async def pause_new(self) -> AsyncIterator[None]:
        """Hold back new requests until the block ends; unfinished ones continue."""
        self._accepting_requests.clear()
        self.num_pauses += 1
        try:
            yield
        finally:
            self._accepting_requests.set()

    @contextlib.asynccontextmanager
    async def drain(self, drain_timeout: float) -> AsyncIterator[None]:
        """Hold back new requests and wait for the unfinished ones, which are aborted after `drain_timeout` seconds."""
        async with self.pause_new():
            timer = asyncio.get_running_loop().call_later(drain_timeout, self._abort_stragglers, drain_timeout)
            try:
                while self._num_in_flight:
                    self._idle.clear()
                    await self._idle.wait()
            finally:
                timer.cancel()
            yield

    def _abort_stragglers(self, drain_timeout: float) -> None:
        count = len(self._request_timeouts)
        _logger.warning(
            "%d replies were unfinished after %g seconds; they are restarted with the new weights", count, drain_timeout
        )
        self._abort_requests(self.servers)

    def _abort_requests(self, servers: Sequence[Server]) -> None:
        now = asyncio.get_running_loop().time()
        for limit, server in self._request_timeouts.items():
            if server in servers and not limit.expired():
                limit.reschedule(now)

    @property
    def _num_in_flight(self) -> int:
        return sum(server.num_in_flight for server in self.servers)

    def mark_down(self, server: Server, reason: str) -> None:
        """Don't use a server until its next handshake; requests in progress there are not aborted."""
        was_up, server.is_up, server.down_reason = server.is_up, False, reason
        if self._fatal_error is not None:
            return
        if was_up and self.servers_up:  # if no server is up, `_report_outage` logs it
            self._reported_down.add(server)
            _logger.warning(
                "%s is down (%s); %d of %d servers are up", server.url, reason, len(self.servers_up), len(self.servers)
            )
        task = self._reconnect_tasks.get(server)
        if task is None or task.done():
            self._reconnect_tasks[server] = asyncio.create_task(self._reconnect(server))

    async def close(self) -> None:
        """Stop reconnecting, close the connections, and fail all waiting requests."""
        self._fail_permanently(BrokenEngineError("the engine is closed"))
        tasks = [*self._reconnect_tasks.values(), *([self._health_task] if self._health_task else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(server.close() for server in self.servers))

    # ---- choosing --------------------------------------------------------------------------------------------------

    async def wait_for_servers(self) -> list[Server]:
        """Wait until a server is up; return all that are. Raises BrokenEngineError; see `acquire`."""
        if self._health_task is None and self._fatal_error is None:
            self._health_task = asyncio.create_task(self._monitor_health())
            for server in self.servers:
                self.mark_down(server, server.down_reason)
        while True:
            if self._fatal_error is not None:
                error = self._fatal_error  # a new one each time: every waiting request raises it
                raise BrokenEngineError(str(error), key=error.key, value=error.value)
            if up := self.servers_up:
                return up
            await self._wait_for_state_change()

    async def _choose_server(self, group_key: str, avoid: Collection[Server]) -> Server:
        up = await self.wait_for_servers()
        while not self._accepting_requests.is_set():  # the next pause may begin before this task resumes
            await self._accepting_requests.wait()
            up = await self.wait_for_servers()
        sticky = self._sticky_servers.get(group_key)
        candidates = [server for server in up if server not in avoid] or up
        if sticky not in candidates:  # the group's prefix cache is lost with its server
            sticky = min(candidates, key=lambda server: server.num_in_flight)
            self._sticky_servers.put(group_key, sticky)
        return sticky

    async def _wait_for_state_change(self) -> None:
        clock, state_changed = asyncio.get_running_loop().time, self._state_changed
        if self._all_down_since is None:
            self._all_down_since = clock()
        remaining = self._all_down_since + self.down_timeout - clock()
        try:
            with pause_active_timeouts():
                async with asyncio.timeout(max(remaining, 0.0)):
                    await state_changed.wait()
        except TimeoutError:
            raise BrokenEngineError(
                f"no {self._messages.name} server was up for {self.down_timeout:g} seconds "
                f"({self._format_down_reasons()}); {self._messages.unreachable_hint}",
                key=SERVERS_KEY,
                value=[server.url for server in self.servers],
            ) from None

    def _format_down_reasons(self) -> str:
        return "; ".join(server.down_reason for server in self.servers if not server.is_up)

    # ---- health ----------------------------------------------------------------------------------------------------

    async def _monitor_health(self) -> None:
        # Two checks must fail: the first may time out because our own loop was blocked.
        silent_before: set[Server] = set()
        while True:
            await asyncio.sleep(_HEALTH_CHECK_INTERVAL)
            await self._accepting_requests.wait()  # a server that loads new weights may not respond meanwhile
            up = self.servers_up
            results = await asyncio.gather(*(self.check_health(server) for server in up))
            silent = {server for server, is_healthy in zip(up, results, strict=True) if is_healthy is None}
            for server in silent & silent_before if self._accepting_requests.is_set() else ():
                seconds = 2 * _HEALTH_CHECK_INTERVAL
                self.mark_down(server, f"{server.url} hangs: no response to health checks for {seconds:g} seconds")
                self._abort_requests([server])
            silent_before = silent

    async def check_response(self, server: Server) -> None:
        """Mark a server down if it doesn't respond to two health checks, after a request that took too long."""
        incarnation = server.incarnation
        for _ in range(2):
            if await self.check_health(server) is not None:
                return
        if server.incarnation == incarnation:
            self.mark_down(server, f"{server.url} hangs: a request and two health checks took too long")

    async def check_health(self, server: Server) -> bool | None:
        """Return whether a server is healthy, None if it doesn't respond; mark it down if it is not healthy."""
        incarnation = server.incarnation
        try:
            async with asyncio.timeout(_HEALTH_CHECK_INTERVAL):
                await server.check_path("/health")
        except TimeoutError:
            return None
        except EngineError:  # the server has no such path
            return True
        except ServerError as error:
            if server.incarnation == incarnation:
                self.mark_down(server, str(error))
            return False
        return True

    # ---- reconnecting ----------------------------------------------------------------------------------------------

    async def _reconnect(self, server: Server) -> None:
        num_failures = 0
        try:
            with convert_errors(BrokenEngineError, f"the handshake with {server.url} failed"):
                while not await self._try_handshake(server):
                    self._report_outage()
                    self._notify_waiters()  # `down_timeout` may have changed
                    num_failures += 1
                    await asyncio.sleep(compute_backoff(self._retry_backoff, num_failures, at_most=MAX_BACKOFF))
        except SaccadeError as error:
            # EngineError included: a server that refuses the handshake (4xx) will refuse it again.
            if not isinstance(error, BrokenEngineError):
                error = BrokenEngineError(str(error), key=error.key, value=error.value)
            self._fail_permanently(error)
            return
        server.is_up, server.incarnation, self._all_down_since = True, server.incarnation + 1, None
        if self._outage_reported or server in self._reported_down:
            _logger.warning("%s is up again; the run continues", server.url)
            self._outage_reported = False
            self._reported_down.discard(server)
        self._notify_waiters()

    async def _try_handshake(self, server: Server) -> bool:
        try:
            await self._handshake(server)
        except ServerError as error:
            server.down_reason = str(error)
            server.was_reached = bool(server.was_reached) or not isinstance(error, ServerUnreachable)
            return False
        server.was_reached = True
        return True

    def _report_outage(self) -> None:
        """Log once that the run waits, if no server is up and a request waits for one."""
        if not self._outage_reported and self._all_down_since is not None and not self.servers_up:
            self._outage_reported = True
            name, reasons = self._messages.name, self._format_down_reasons()
            _logger.warning("no %s server is up (%s); the run waits up to %g seconds", name, reasons, self.down_timeout)

    def _fail_permanently(self, error: BrokenEngineError) -> None:
        self._fatal_error = self._fatal_error or error
        self._notify_waiters()

    def _notify_waiters(self) -> None:
        state_changed, self._state_changed = self._state_changed, asyncio.Event()
        state_changed.set()
