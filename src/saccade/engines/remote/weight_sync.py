"""New weights for running servers: an edition of them, then one transaction per server that ends in a comparison.

    trainer ──publish──> make an edition ──> every server that is up: pause, load, label, empty caches, resume, compare
                                               │
    a server that comes back ──give──> the same ──> is the edition still the current one? if not, again ──> up

Publishing waits for the servers that are up and, where none of them took the weights, for one that does. A server that
is being greeted meanwhile finds at the end that its edition is no longer the current one, and takes that: nothing
happens between this look and its being up.

A reply under way ends first ("wait"; one that takes too long begins anew with the new weights), or is kept by its
server ("keep"), which stands still while it takes the weights, empties its caches, and then reads the reply so far
anew: what comes next is sampled as if the new weights had read all of it, and each token has the label of its own. A
reply with tokens of an edition that was taken back is thrown away: its label is unknown.
"""

import asyncio
import secrets
from collections.abc import Callable
from typing import Protocol

from saccade.engines._served.greeting import Parity
from saccade.engines._served.pool import Pool
from saccade.engines._served.server import Pause, Server, Trouble
from saccade.errors import BrokenEngineError, EngineError
from saccade.waiting import together


class Edition(Protocol):
    """Weights as they were when they were published, for as long as servers may want them."""

    @property
    def version(self) -> int:
        """Their version."""

    @property
    def label(self) -> str:
        """What servers know them by."""

    async def load(self, server: Server) -> None:
        """Let a server take them; see Dialect.load. Raises Trouble or EngineError."""

    def drop(self) -> None:
        """Nobody will want them any more."""


Make = Callable[[int, str], Edition]
_BACK_SECONDS = 60.0  # in which a server that was lost must have taken the old weights again


class Weights:
    """What is published: the current edition, and how servers come by it.

    `make` makes an edition of a version, under a label, from the weights as they are; EngineError where it can't.
    Where replies end first they have `drain` seconds for it.
    """

    def __init__(self, make: Make, parity: Parity, pause: Pause, drain: float) -> None:
        self._make, self._parity, self._pause, self._drain = make, parity, pause, drain
        self._one_at_a_time: dict[Server, asyncio.Lock] = {}
        self._versions: dict[str, int] = {}  # of every label that was published: a reply may have begun long ago
        self.current: Edition | None = None

    @property
    def version(self) -> int:
        """The version that was published last; 0 before."""
        return self.current.version if self.current else 0

    async def publish(self, pool: Pool, version: int) -> None:
        """Give every server that is up the backbone's weights, or none of them; one has them on return.

        Where a server samples from others than the trainer's afterwards, or no server could take them while the pool
        was patient, all go back to those of before, and BrokenEngineError is raised; without any before they are used
        no more. New requests wait meanwhile. Replies under way go on afterwards, each token with its version, or end
        first, by the setting `pause`.
        """
        async with pool.shut() if self._pause == "keep" else pool.quiet(self._drain):
            await self._publish(pool, version)

    async def _publish(self, pool: Pool, version: int) -> None:
        # A label that no other run has: whoever else publishes to the server is found out.
        old, new = self.current, self._make(version, f"saccade-{version}-{secrets.token_hex(4)}")
        self.current, self._versions[new.label] = new, version
        asked = pool.up
        try:
            for server in asked:
                await self._take(pool, server, new)
                if server.up:
                    await self._compare(pool, server, new)
            await pool.any_up()
        except BaseException:  # cancelled halfway, too: no server may keep what others don't have
            self.current = old
            del self._versions[new.label]
            new.drop()
            await together([self._go_back(pool, server, old) for server in dict.fromkeys((*pool.up, *asked))])
            raise
        if old is not None:
            old.drop()

    async def give(self, server: Server) -> Edition | None:
        """Let a server that comes back take the current edition, if there is one; which it was."""
        edition = self.current
        if edition is not None:
            await self._load(server, edition)
        return edition

    async def _load(self, server: Server, edition: Edition) -> None:
        async with self._one_at_a_time.setdefault(server, asyncio.Lock()):
            server.versions = self._versions
            await edition.load(server)

    async def _take(self, pool: Pool, server: Server, edition: Edition) -> None:
        try:
            await self._load(server, edition)
        except Trouble as error:
            pool.lose(server, str(error))

    async def _go_back(self, pool: Pool, server: Server, old: Edition | None) -> None:
        try:
            if old is None:
                raise Trouble("it has weights that were taken back")
            # One that was lost may hang; if not, it shall not be left standing still, or with new weights.
            async with asyncio.timeout(None if server.up else _BACK_SECONDS):
                await self._load(server, old)
        except (Trouble, EngineError) as error:
            pool.lose(server, str(error))
        except TimeoutError:
            pool.lose(server, f"it did not take the weights of before within {_BACK_SECONDS:g} seconds")

    async def _compare(self, pool: Pool, server: Server, edition: Edition) -> None:
        try:
            await self._parity.check(server, edition.label)
        except Trouble as error:
            pool.lose(server, str(error))
        except BrokenEngineError as error:
            raise BrokenEngineError(f"new weights were not taken: {error}") from error

    def drop(self) -> None:
        """Let go of what is published; servers keep it in their memory."""
        if self.current is not None:
            self.current.drop()
