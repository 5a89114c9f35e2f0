"""New weights for running servers: a folder on disk, then one transaction per server that ends in a comparison.

    trainer ──publish──> write a folder ──> every server that is up: pause, reload, label, empty caches, resume, compare
                                               │
    a server that comes back ──give──> the same ──> is the edition still the current one? if not, again ──> up

Publishing waits for the servers that are up and for nobody else. A server that is being greeted meanwhile finds at the
end that its edition is no longer the current one, and takes that: nothing happens between this look and its being up.

A reply under way ends first ("wait"), or is kept by its server ("keep"), which stands still while it takes the weights,
empties its caches, and then reads the reply so far anew: what comes next is sampled as if the new weights had read all
of it, and each token has the label of its own. A reply with tokens of an edition that was taken back is thrown away:
its label is unknown.
"""

import secrets
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from saccade.engines._served.greeting import Parity
from saccade.engines._served.pool import Pool
from saccade.engines._served.server import Pause, Server, Trouble
from saccade.errors import BrokenEngineError, EngineError, boundary
from saccade.model.backbone import Backbone

_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Edition:
    """Weights that were written: their version, the label that servers know them by, and where they lie."""

    version: int
    label: str
    folder: Path

    def drop(self) -> None:
        """Delete the files."""
        shutil.rmtree(self.folder, ignore_errors=True)


def write(backbone: Backbone, version: int, place: str) -> Edition:
    """Write the backbone's weights as safetensors into a folder of their own in `place`.

    "" is memory where the system offers some that has room for them twice (the old ones stay until the new are taken),
    else the folder for temporary files. Raises EngineError where there is no room.
    """
    size = sum(each.nbytes for each in backbone.model.state_dict().values())
    # A label that no other run has: whoever else publishes to the server is found out.
    label = f"saccade-{version}-{secrets.token_hex(4)}"
    with boundary(EngineError, "the weights can't be written for the servers; name a folder with room for them"):
        folder = Path(tempfile.mkdtemp(prefix=f"{label}-", dir=place or _roomy(2 * size)))
        edition = Edition(version=version, label=label, folder=folder)
        try:
            backbone.save(folder)
        except BaseException:
            edition.drop()
            raise
    return edition


def _roomy(size: int) -> Path | None:
    return _MEMORY if _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free > size else None


class Weights:
    """What is published: the current edition, and how servers come by it. `place` is the folder for editions."""

    def __init__(self, backbone: Backbone, parity: Parity, place: str, pause: Pause) -> None:
        self._backbone, self._parity, self._place, self._pause = backbone, parity, place, pause
        self._versions: dict[str, int] = {}  # of every label that was published: a reply may have begun long ago
        self.current: Edition | None = None

    @property
    def version(self) -> int:
        """The version that was published last; 0 before."""
        return self.current.version if self.current else 0

    async def publish(self, pool: Pool, version: int) -> None:
        """Give every server that is up the backbone's weights, or none of them.

        Where a server samples from others than the trainer's afterwards, all go back to those of before, and
        BrokenEngineError is raised; without any before they are used no more. New requests wait meanwhile. Replies
        under way go on afterwards, each token with its version, or end first, by the setting `pause`.
        """
        async with pool.shut() if self._pause == "keep" else pool.quiet():
            await self._publish(pool, version)

    async def _publish(self, pool: Pool, version: int) -> None:
        old, new = self.current, write(self._backbone, version, self._place)
        self.current, self._versions[new.label] = new, version
        try:
            for server in pool.up:
                await self._take(pool, server, new)
                if server.up:
                    await self._compare(pool, server, new)
        except BaseException:  # cancelled halfway, too: no server may keep what others don't have
            self.current = old
            del self._versions[new.label]
            new.drop()
            for server in pool.up:
                await self._go_back(pool, server, old)
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
        server.versions = self._versions
        await server.dialect.load(server, edition.folder, edition.label, self._pause)

    async def _take(self, pool: Pool, server: Server, edition: Edition) -> None:
        try:
            await self._load(server, edition)
        except Trouble as error:
            pool.lose(server, str(error))

    async def _go_back(self, pool: Pool, server: Server, old: Edition | None) -> None:
        try:
            if old is None:
                raise Trouble("it has weights that were taken back")
            await self._load(server, old)
        except (Trouble, EngineError) as error:
            pool.lose(server, str(error))

    async def _compare(self, pool: Pool, server: Server, edition: Edition) -> None:
        try:
            await self._parity.check(server, edition.label)
        except Trouble as error:
            pool.lose(server, str(error))
        except BrokenEngineError as error:
            raise BrokenEngineError(f"new weights were not taken: {error}") from error

    def drop(self) -> None:
        """Delete what is published; servers keep it in their memory."""
        if self.current is not None:
            self.current.drop()
