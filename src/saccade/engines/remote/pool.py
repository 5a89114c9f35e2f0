"""Servers, and who asks which: sticky by group, else the least loaded, never one that is down.

    agents ──generate──> lend ──┬── a server is up ──> request ── reply ──> agent
                          ▲     │                        └── Trouble ──> lose(server) ──> lend again, `retries` times
                          │     └── none is up: waits, at most `patience` seconds, then BrokenEngineError
                          │                                                   ▲
                          └── news <── revive: one task per server that is down: greet it, wait, greet it again …

Who waits for whom: an agent waits for its reply, or in `lend` for news and for open doors. New weights shut them;
whoever wants it `quiet` waits for the replies under way besides, and gives those up that take too long. Nobody who has
a server waits for doors, so all end. What waits for news isn't charged for it: an attempt has as long as before.
A watch looks at the health of the servers that are up: one that hangs is lost, and the requests that it has fail.
Only a revive task makes news: a server that is up again, or a reason why none ever will be (it serves another model).
Revive tasks wait for servers and for the clock, never for agents; they end when their server is up, when the pool is
broken and when it is closed. Every server begins as one that is down, so that none is used before it was greeted.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from saccade.engines._served.server import Busy, Cut, Server, Trouble
from saccade.errors import BrokenEngineError, EngineError, SaccadeError, boundary
from saccade.media.cache import Lru
from saccade.waiting import uncharged

_LONGEST = 15.0  # seconds between two greetings
_LOOK = 30.0  # seconds between two looks at a server's health, and for its answer
_STICKY = 65536  # groups whose server is remembered
_logger = logging.getLogger("saccade")


class Pool:
    """`greet` makes sure of a server: Trouble lets it try again, any other error breaks the pool for good.

    `wait` is the first pause between two greetings (seconds); each is twice as long as the one before.
    """

    def __init__(
        self, servers: Sequence[Server], greet: Callable[[Server], Awaitable[None]], *, patience: float, wait: float
    ) -> None:
        self.servers, self._greet, self._patience, self._wait = tuple(servers), greet, patience, wait
        self._homes: Lru[str, Server] = Lru(_STICKY)
        self._tasks: dict[Server, asyncio.Task[None]] = {}
        self._news, self._doors, self._idle = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._doors.set()
        self._broken: BrokenEngineError | None = None
        self._dark_since: float | None = None
        self._told = False
        self._missed: set[Server] = set()
        self._limits: dict[asyncio.Timeout, Server] = {}  # of the requests under way
        self._watching: asyncio.Task[None] | None = None
        self._words = self.servers[0].dialect.WORDS

    @property
    def up(self) -> list[Server]:
        """The servers that are up, in order."""
        return [server for server in self.servers if server.up]

    @contextlib.asynccontextmanager
    async def lend(self, key: str) -> AsyncIterator[Server]:
        """A server for a request of the group `key`, counted against its load inside; with Trouble it is lost.

        A request that began before the server was greeted anew says nothing of how it is now. Raises BrokenEngineError
        where no server was up for `patience` seconds, or one can't be used at all, Cut where others want it `quiet`.
        """
        server = await self._choose(key)
        server.load += 1
        known = server.greeted
        try:
            async with asyncio.timeout(None) as limit:
                self._limits[limit] = server
                try:
                    yield server
                finally:
                    del self._limits[limit]
        except TimeoutError:
            if not limit.expired():
                raise
            raise (Cut() if server.up else Trouble(server.reason)) from None
        except Busy:
            raise
        except Trouble as error:
            if server.greeted == known:
                self.lose(server, str(error))
            raise
        finally:
            server.load -= 1
            if not self._load:
                self._idle.set()

    @contextlib.asynccontextmanager
    async def shut(self) -> AsyncIterator[None]:
        """No request begins inside: new ones wait until the block ends, those under way go on."""
        self._doors.clear()
        try:
            yield
        finally:
            self._doors.set()

    @contextlib.asynccontextmanager
    async def quiet(self, seconds: float) -> AsyncIterator[None]:
        """No request is under way inside: those that were have ended, or were cut after so many seconds; new ones wait
        until the block ends.
        """
        async with self.shut():
            late = asyncio.get_running_loop().call_later(seconds, self._drained, seconds)
            try:
                while self._load:
                    self._idle.clear()
                    await self._idle.wait()
            finally:
                late.cancel()
            yield

    def _drained(self, seconds: float) -> None:
        count = len(self._limits)
        _logger.warning("%d replies had not ended %g seconds later; they begin anew with new weights", count, seconds)
        self._cut(self.servers)

    def _cut(self, servers: Sequence[Server]) -> None:
        now = asyncio.get_running_loop().time()
        for limit, server in self._limits.items():
            if server in servers and not limit.expired():
                limit.reschedule(now)

    @property
    def _load(self) -> int:
        return sum(server.load for server in self.servers)

    def lose(self, server: Server, why: str) -> None:
        """Use a server no more until it was greeted anew; whoever is in the middle of a request there finds out."""
        known, server.up, server.reason = server.up, False, why
        if self._broken is not None:
            return
        if known and self.up:  # where none is, `_tell` says so
            self._missed.add(server)
            _logger.warning("%s is out (%s); %d of %d go on", server.url, why, len(self.up), len(self.servers))
        task = self._tasks.get(server)
        if task is None or task.done():
            self._tasks[server] = asyncio.create_task(self._revive(server))

    async def close(self) -> None:
        """Stop greeting, let go of the servers, and fail whoever waits."""
        self._break(BrokenEngineError("the engine is closed"))
        tasks = [*self._tasks.values(), *([self._watching] if self._watching else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(server.close() for server in self.servers))

    # ---- choosing --------------------------------------------------------------------------------------------------

    async def any_up(self) -> list[Server]:
        """The servers that are up, of which there is one at least. Raises BrokenEngineError; see `lend`."""
        if self._watching is None and self._broken is None:
            self._watching = asyncio.create_task(self._watch())
            for server in self.servers:
                self.lose(server, server.reason)
        while True:
            if self._broken is not None:
                raise type(self._broken)(str(self._broken))
            if up := self.up:
                return up
            await self._wait_for_news()

    async def _choose(self, key: str) -> Server:
        up = await self.any_up()
        while not self._doors.is_set():  # they may be shut again before whoever was woken goes on
            await self._doors.wait()
            up = await self.any_up()
        home = self._homes.get(key)
        if home is None or not home.up:  # the prefix cache of its home is gone with it
            home = min(up, key=lambda server: server.load)
            self._homes.put(key, home)
        return home

    async def _wait_for_news(self) -> None:
        clock, news = asyncio.get_running_loop().time, self._news
        if self._dark_since is None:
            self._dark_since = clock()
        left = self._dark_since + self._patience - clock()
        try:
            with uncharged():
                async with asyncio.timeout(max(left, 0.0)):
                    await news.wait()
        except TimeoutError:
            raise BrokenEngineError(
                f"no {self._words.name} server could be used for {self._patience:g} seconds ({self._reasons()}); "
                f"{self._words.mend}"
            ) from None

    def _reasons(self) -> str:
        return "; ".join(server.reason for server in self.servers if not server.up)

    # ---- going away ------------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        silent: set[Server] = set()  # at the last look: a loop that stood still takes its servers for hanging once
        while True:
            await asyncio.sleep(_LOOK)
            await self._doors.wait()  # who takes new weights may say nothing else meanwhile
            up = self.up
            said = await asyncio.gather(*(self.well(server) for server in up))
            now = {server for server, each in zip(up, said, strict=True) if each is None}
            for server in now & silent if self._doors.is_set() else ():
                self.lose(server, f"{server.url} hangs: it said nothing of its health for {2 * _LOOK:g} seconds")
                self._cut([server])
            silent = now

    async def well(self, server: Server) -> bool | None:
        """Whether a server that is up says that it is well, None where it says nothing; one that isn't is lost."""
        known = server.greeted
        try:
            async with asyncio.timeout(_LOOK):
                await server.check_path("/health")
        except TimeoutError:
            return None
        except EngineError:  # it doesn't know that path
            return True
        except Trouble as error:
            if server.greeted == known:
                self.lose(server, str(error))
            return False
        return True

    # ---- coming back -----------------------------------------------------------------------------------------------

    async def _revive(self, server: Server) -> None:
        pause = self._wait
        try:
            with boundary(BrokenEngineError, f"{server.url} can't be greeted"):
                while not await self._greeted(server):
                    self._tell()
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, _LONGEST)
        except SaccadeError as error:
            # EngineError included: a server that refuses to be greeted will do so the next time.
            self._break(error if isinstance(error, BrokenEngineError) else BrokenEngineError(str(error)))
            return
        server.up, server.greeted, self._dark_since = True, server.greeted + 1, None
        if self._told or server in self._missed:
            _logger.warning("%s answers again; the run goes on", server.url)
            self._told = False
            self._missed.discard(server)
        self._spread()

    async def _greeted(self, server: Server) -> bool:
        try:
            await self._greet(server)
        except Trouble as error:
            server.reason = str(error)
            return False
        return True

    def _tell(self) -> None:
        """Say once that nothing goes on, where no server is up and somebody waits for one."""
        if not self._told and self._dark_since is not None and not self.up:
            self._told = True
            name, waits = self._words.name, self._patience
            _logger.warning("no %s server answers (%s); the run waits up to %g seconds", name, self._reasons(), waits)

    def _break(self, error: BrokenEngineError) -> None:
        self._broken = self._broken or error
        self._spread()

    def _spread(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()
