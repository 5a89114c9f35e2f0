"""Weight sync: publish weight versions to running servers, in one transaction that ends in a logprob comparison.

    trainer ──sync_weights──> create a version (in a thread; rollouts continue)
                                 │
                              pause new requests ──> all servers that are up, at once: pause, load, label,
                                                       │           empty caches, resume, compare logprobs
    a server that reconnects ──load_current──> the same ──> is it still the current version? if not, again ──> up

A weight sync waits for the servers that are up and, if none of them loaded the weights, until one does. It ends with
all usable servers on one version:

- A request of the update that fails is retried where that costs no second load (`Server.post_again`).
- A server that still fails (5xx, timeout) is marked down. When it reconnects it loads the current version, unless its
  label shows that it has it already; then at most the rest of the update is repeated.
- If a server refuses the weights (4xx) or samples from other weights than the trainer's, if no server loads them in
  time, or if the run is cancelled, all servers are rolled back to the previous version, and the error is raised. A
  server that can't be rolled back is marked down. Without a previous version, a server that holds the new one stays
  down until it is restarted.
- A server whose handshake overlaps with a weight sync compares versions at its end and loads the newer one; nothing
  is awaited between that comparison and its being up.

An unfinished reply finishes first ("drain"; one that takes too long restarts with the new weights), or the server
pauses it ("continue"), loads the weights, empties its caches, and recomputes the reply so far: later tokens are sampled
as if the new weights had read all of it, and each token carries the label of its own version. Or the server aborts it
("abort") and returns the tokens so far, with which the engine continues in a new request after the sync. A reply with
tokens of a version that was rolled back is discarded: its label is unknown.
"""

import asyncio
import logging
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import Tensor

from saccade.engines.remote import checksums, vllm_api
from saccade.engines.remote.handshake import LogprobCheck
from saccade.engines.remote.pool import Pool
from saccade.engines.remote.server import LoraSync, RepliesOnSync, Server, ServerError
from saccade.errors import EngineError, SaccadeError, convert_errors
from saccade.models.checkpoint_io import read_tensors
from saccade.protocols import WeightSource
from saccade.utils.async_utils import gather_or_cancel, run_in_daemon_thread
from saccade.utils.scratch import make_scratch_dir, remove_abandoned, remove_scratch_dir


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightVersion:
    """A snapshot of the weights, kept as long as servers may need it; servers report it by its `label`.

    `adapter` names the LoRA adapter that it is, "" for whole weights. `load_into` makes a server load it (see
    ServerApi.load_weights), and raises ServerError or EngineError. `release` deletes its files; memory is freed with
    the last reference.
    """

    version: int
    label: str
    adapter: str = ""
    load_into: Callable[[Server], Awaitable[None]]
    read_tensors: Callable[[], Mapping[str, Tensor]]  # those of `checksums.select_names`; none of adapters
    release: Callable[[], None] = lambda: None


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncState:
    """What clients in other processes need to know of the weight syncs of a run."""

    version: int  # the current one
    version_by_label: Mapping[str, int]  # of the newest versions: servers may report them
    adapter: str = ""  # the LoRA adapter that samples; "": the weights themselves


_SHARED_MEMORY = Path("/dev/shm")
_logger = logging.getLogger("saccade")
_MAX_LABELS = 256  # weight versions within one reply that are recognized; an engine of other processes receives all
_ROLLBACK_TIMEOUT = 60.0  # seconds for a server that is down to load the previous version


class WeightSync:
    """The current weight version, and how servers load it.

    `create_version` makes a snapshot of a source's weights, given a version number and a label; it raises EngineError
    if that fails. With `replies_on_sync="drain"` replies have `drain_timeout` seconds to finish. The first sync, every
    `checksum_interval`-th one, and a server that reconnects compare tensors with those that were sent (0: none do).
    """

    def __init__(
        self,
        create_version: Callable[[WeightSource, int, str], WeightVersion],
        logprob_check: LogprobCheck,
        replies_on_sync: RepliesOnSync,
        drain_timeout: float,
        checksum_interval: int,
    ) -> None:
        self._create_version, self._logprob_check = create_version, logprob_check
        self._replies_on_sync, self._drain_timeout = replies_on_sync, drain_timeout
        self._checksum_interval, self._num_syncs = checksum_interval, 0  # syncs of this process
        self._server_locks: dict[Server, asyncio.Lock] = {}
        self._version_by_label: dict[str, int] = {}  # of the newest versions: a reply may have started long ago
        self._revoked_labels: set[str] = set()
        self._followed: SyncState | None = None  # of the process that syncs the weights, if it isn't this one
        self.outdated_servers: set[str] = set()  # that have other weights than `_followed` says
        self.guard_switch: Callable[[], AbstractAsyncContextManager[None]] = nullcontext  # e.g. pauses other clients
        self.current: WeightVersion | None = None

    @property
    def version(self) -> int:
        """Return the current version number; 0 before the first weight sync."""
        if self._followed is not None:
            return self._followed.version
        return self.current.version if self.current else 0

    @property
    def state(self) -> SyncState | None:
        """Return what other clients of the servers must know; None before the first weight sync."""
        if self.current is None:
            return None
        return SyncState(
            version=self.version, version_by_label=dict(self._version_by_label), adapter=self.current.adapter
        )

    def follow(self, pool: Pool, state: SyncState | None) -> None:
        """Accept the weights that another process has loaded into the servers."""
        self._followed = state
        for server in pool.servers if state else ():
            server.version_by_label = dict(state.version_by_label) if state else {}
            server.adapter = state.adapter if state else ""

    def identify_versions(self, server: Server, label: str) -> dict[str, int]:
        """Return the version of each label that a server may report, into which this process loaded no weights.

        Raises ServerError if it holds rolled-back weights, or others than the process that syncs them has loaded.
        """
        if any(label.startswith(revoked) for revoked in self._revoked_labels):
            raise ServerError(f"{server.url} holds weights that were rolled back, and must be restarted")
        if self._followed is None:
            return {label: self.version}
        if label not in self._followed.version_by_label:
            self.outdated_servers.add(server.url)
            raise ServerError(f"{server.url} doesn't have the run's weights; the trainer loads them again")
        self.outdated_servers.discard(server.url)
        return dict(self._followed.version_by_label)

    def pause(self, pool: Pool) -> AbstractAsyncContextManager[None]:
        """Hold back new requests; unfinished ones are handled by the setting `replies_on_sync`."""
        return pool.drain(self._drain_timeout) if self._replies_on_sync == "drain" else pool.pause_new()

    async def sync_weights(self, pool: Pool, source: WeightSource, version: int) -> dict[str, float]:
        """Load the source's weights into every server that is up, or into none; at least one has them on return.

        Return metrics: the seconds of the copy, of the wait for unfinished replies, and in which new requests waited.
        Raises EngineError or BrokenEngineError after a rollback (see the module's docstring). New requests wait while
        servers load; unfinished replies are handled by the setting `replies_on_sync`.
        """
        started = time.perf_counter()
        # A random label: no other run uses it, so weights that another run loaded into the server are recognized.
        new = await self._copy_weights(source, version, f"saccade-{version}-{secrets.token_hex(4)}")
        try:
            is_compared = self._checksum_interval > 0 and self._num_syncs % self._checksum_interval == 0
            tensors = await run_in_daemon_thread(new.read_tensors, "saccade-weights") if is_compared else {}
            copied = time.perf_counter()
            async with self.guard_switch(), self.pause(pool):
                drained = time.perf_counter()
                await self._publish(pool, source, new, tensors)
        except BaseException:
            new.release()
            raise
        num_compared = min(server.num_compared_tensors for server in pool.servers_up)
        return {
            "weight_sync/copy_seconds": copied - started,
            "weight_sync/drain_seconds": drained - copied,
            "weight_sync/pause_seconds": time.perf_counter() - copied,
            **({"weight_sync/compared_tensors": float(num_compared)} if is_compared else {}),
        }

    async def _copy_weights(self, source: WeightSource, version: int, label: str) -> WeightVersion:
        """Make the snapshot in a thread: rollouts continue. When cancelled, wait for its end: training may go on."""
        future = run_in_daemon_thread(lambda: self._create_version(source, version, label), "saccade-weights")
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            if not future.done():
                _logger.warning("Stopping: waiting until the weights of version %d are copied", version)
                await asyncio.wait((future,))
            if not future.cancelled() and future.exception() is None:
                future.result().release()
            raise

    async def _publish(
        self, pool: Pool, source: WeightSource, new: WeightVersion, tensors: Mapping[str, Tensor]
    ) -> None:
        old, version = self.current, new.version
        self.current, self._version_by_label[new.label] = new, version
        servers = pool.servers_up

        async def update(server: Server) -> None:
            try:
                await self._load_into(server, new)
                if server.is_up:
                    await self._logprob_check.check(server, source, new.label)
                    if tensors:
                        server.num_compared_tensors = await checksums.compare(server, tensors)
            except ServerError as error:
                pool.mark_down(server, str(error))

        try:
            # All end, also after a failure: a server stopped within its update might have weights without their label.
            results = await asyncio.gather(*(update(server) for server in servers), return_exceptions=True)
            for failure in filter(None, results):
                raise failure
            await pool.wait_for_servers()
        except BaseException as error:  # cancellation, too: no server may keep weights that the others don't have
            self.current = old
            del self._version_by_label[new.label]
            self._revoked_labels.add(new.label)
            affected = list(dict.fromkeys((*pool.servers_up, *servers)))
            await gather_or_cancel([self._roll_back(pool, server, old) for server in affected])
            if isinstance(error, SaccadeError):
                outcome = "there is no previous version, so the servers that loaded it must be restarted"
                if old is not None:
                    states = {
                        server.url: f"on version {old.version}" if server.is_up else "down" for server in affected
                    }
                    outcome = "; ".join(f"{url} is {state}" for url, state in states.items())
                message = f"weight version {version} was rolled back ({outcome}): {error}"
                raise type(error)(message, key=error.key, value=error.value) from error
            raise
        if old is not None:
            old.release()
        for label in [*self._version_by_label][:-_MAX_LABELS]:
            del self._version_by_label[label]
        self._num_syncs += 1

    async def load_current(self, server: Server) -> WeightVersion | None:
        """Load the current version, if there is one, into a server that reconnects; return it."""
        current = self.current
        if current is not None:
            await self._load_into(server, current)
        return current

    async def compare_tensors(self, server: Server, loaded: WeightVersion) -> None:
        """Compare tensors of a server that has reconnected with those that it was sent. Raises BrokenEngineError."""
        if self._checksum_interval:
            tensors = await run_in_daemon_thread(loaded.read_tensors, "saccade-weights")
            server.num_compared_tensors = await checksums.compare(server, tensors)

    async def _load_into(self, server: Server, weight_version: WeightVersion) -> None:
        label = weight_version.label
        async with self._server_locks.setdefault(server, asyncio.Lock()):
            server.version_by_label = self._version_by_label
            was_sent, was_loaded = server.sent_label == label, server.loaded_label == label
            server.sent_label, server.loaded_label = label, ""
            # The server was down meanwhile. A restarted one has another label.
            if was_sent and await server.api.fetch_label(server) == label:
                if not was_loaded:
                    await server.api.finish_update(server, self._replies_on_sync)
            else:
                await weight_version.load_into(server)
            server.loaded_label = label

    async def _roll_back(self, pool: Pool, server: Server, previous: WeightVersion | None) -> None:
        """Load the previous version into a server; mark the server down if that fails or is cancelled."""
        if previous is None:
            pool.mark_down(server, f"{server.url} may hold weights that were rolled back")
            return
        message = f"{server.url} could not be rolled back to version {previous.version}"
        try:
            # A server that is down may hang. If not, it must neither stay paused nor keep the new weights.
            async with asyncio.timeout(None if server.is_up else _ROLLBACK_TIMEOUT):
                with convert_errors(EngineError, message):
                    await self._load_into(server, previous)
        except SaccadeError as error:
            pool.mark_down(server, str(error))
        except TimeoutError:
            pool.mark_down(server, f"{message} within {_ROLLBACK_TIMEOUT:g} seconds")
        except asyncio.CancelledError:
            pool.mark_down(server, f"{message}: cancelled")
            raise

    def release(self) -> None:
        """Free the current version; servers keep it in their memory."""
        if self.current is not None:
            self.current.release()


# ---- through files ---------------------------------------------------------------------------------------------------


class DiskTransport:
    """Writes weights as safetensors, each version into a new folder inside `weight_dir`.

    With `lora="adapters"` it writes LoRA adapters alone, which servers load beside the base weights. An empty
    `weight_dir` means shared memory if it has room for two versions (the old one is kept until the servers
    loaded the new one), else the folder for temporary files; the first version decides.
    """

    def __init__(self, weight_dir: str, replies_on_sync: RepliesOnSync, lora: LoraSync = "merged") -> None:
        self._weight_dir, self._replies_on_sync, self._lora = weight_dir, replies_on_sync, lora

    def create_version(self, source: WeightSource, version: int, label: str) -> WeightVersion:
        """Write the source's current weights. Raises EngineError if there is no room for them."""
        with convert_errors(
            EngineError, "the weights can't be written for the servers; set engine.settings.weight_dir to a larger disk"
        ):
            # The nodes of a cluster may share `weight_dir`, and not all file systems show locks to all nodes.
            prefix = f"saccade-weights-{socket.gethostname()}-"
            if not self._weight_dir:
                remove_abandoned(prefix, str(_SHARED_MEMORY))
                free = shutil.disk_usage(_SHARED_MEMORY).free if _SHARED_MEMORY.is_dir() else 0
                self._weight_dir = str(_SHARED_MEMORY if free > 2 * source.num_bytes else tempfile.gettempdir())
            folder = Path(make_scratch_dir(prefix, self._weight_dir))
            release = partial(remove_scratch_dir, str(folder))
            try:
                if self._lora == "adapters":
                    source.export_adapters(folder)
                else:
                    source.save(folder)
            except BaseException:
                release()
                raise

        def load_into(server: Server) -> Awaitable[None]:
            load = vllm_api.load_adapter if self._lora == "adapters" else server.api.load_weights
            return load(server, folder, label, self._replies_on_sync)

        return WeightVersion(
            version=version,
            label=label,
            adapter=label if self._lora == "adapters" else "",
            load_into=load_into,
            read_tensors=partial(read_tensors, folder, checksums.select_names) if self._lora == "merged" else dict,
            release=release,
        )
