"""Weight sync without files: broadcast layer by layer, through a process group, into the servers' memory.

    trainer ──copy──> MemoryWeightVersion ──one layer: broadcast────────> the server's workers ──> loaded
                        └───its names and shapes: receive_tensors (HTTP)────┘

Each server has its own group: the trainer and the server's workers. A server that dies midway therefore blocks no other
server, and one that reconnects needs no other. The group is created at the first weight sync, and again after a failure
or if the server's label differs from the one it was left with. Trainer and server wait for each other; a failure of
either side, or the timeout, ends the wait.

The current version is kept as a copy in this machine's memory, because training changes the original: servers that
reconnect receive the copy, and so do all servers on a rollback. During a weight sync there are two copies.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from saccade.engines.remote.server import InFlightPolicy, Server, ServerError, ServerMessages, WeightTransferApi
from saccade.errors import ConfigError, EngineError, boundary
from saccade.protocols import WeightSource
from saccade.utils.async_utils import gather_or_cancel, run_in_daemon_thread

WeightSyncMode = Literal["files", "nccl", "gloo"]
_logger = logging.getLogger("saccade")


def resolve_transfer_api(
    weight_sync: WeightSyncMode, transfer_api: WeightTransferApi | None, messages: ServerMessages
) -> WeightTransferApi | None:
    """Return the server API for broadcasting weights; None for files.

    Raises ConfigError if the servers or this machine don't support it.
    """
    if weight_sync == "files":
        return None
    key = "engine.settings.weight_sync"
    if transfer_api is None:
        raise ConfigError(
            f"{key}={weight_sync} is not supported by the engine {messages.name.lower()}; set {key}=files",
            key=key,
            value=weight_sync,
        )
    if weight_sync == "nccl" and not torch.cuda.is_available():
        raise ConfigError(
            f"{key}={weight_sync} needs a trainer on a GPU, but torch finds none here; set {key}=files",
            key=key,
            value=weight_sync,
        )
    return transfer_api


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryWeightVersion:
    """A weight version in memory, by the tensor names of a checkpoint; see weight_sync.WeightVersion."""

    version: int
    label: str
    layers: tuple[Mapping[str, Tensor], ...]
    device: torch.device  # of the trainer
    transport: "BroadcastTransport"

    async def load_into(self, server: Server) -> None:
        """See weight_sync.WeightVersion."""
        await self.transport.send(server, self)

    def release(self) -> None:
        """Do nothing: the memory is freed with the last reference."""


class BroadcastTransport:
    """Broadcasts copies of a trainer's weights to servers; `timeout` (seconds) bounds each layer and each join."""

    def __init__(
        self,
        transfer_api: WeightTransferApi,
        backend: Literal["nccl", "gloo"],
        in_flight: InFlightPolicy,
        timeout: float,
    ) -> None:
        self._transfer_api, self._in_flight, self._timeout = transfer_api, in_flight, timeout
        self._open_group = partial(_open_group, backend, timeout=timeout)
        self._groups: dict[Server, tuple[BroadcastGroup, str]] = {}  # with the label that the server was left with

    def create_version(self, source: WeightSource, version: int, label: str) -> MemoryWeightVersion:
        """Copy the source's current weights to the CPU. Raises EngineError if there is no room for them."""
        with boundary(EngineError, "the weights can't be copied for the servers"):
            layers = source.copy_layers_to_cpu()
        return MemoryWeightVersion(version=version, label=label, layers=layers, device=source.device, transport=self)

    async def send(self, server: Server, weight_version: MemoryWeightVersion) -> None:
        """Send a weight version to a server. Raises ServerError or EngineError; ConfigError if NCCL is missing.

        When cancelled, wait for the transfer to end first: a server with partial weights would have to be restarted.
        """
        transfer = asyncio.ensure_future(self._send(server, weight_version))
        try:
            await asyncio.shield(transfer)
        except asyncio.CancelledError:
            if not transfer.done():
                _logger.warning("Stopping: waiting until %s has received all weights", server.url)
                await asyncio.wait((transfer,))
            raise

    def close(self) -> None:
        """Abort all groups."""
        for group, _ in self._groups.values():
            group.abort()
        self._groups.clear()

    async def _send(self, server: Server, weight_version: MemoryWeightVersion) -> None:
        label = await self._transfer_api.fetch_label(server)
        group = await self._acquire_group(server, label, weight_version.device)
        broadcast = partial(self._broadcast_layers, server, group, weight_version.layers)
        try:
            await self._transfer_api.receive_weights(server, weight_version.label, self._in_flight, broadcast)
        except BaseException:
            group.abort()
            raise
        self._groups[server] = group, weight_version.label

    async def _acquire_group(self, server: Server, label: str, device: torch.device) -> "BroadcastGroup":
        """Take the server's group out of `_groups`; create a new one if there is none or the label has changed."""
        if server in self._groups:
            group, last_label = self._groups.pop(server)
            if label == last_label:
                return group
            group.abort()
        await self._transfer_api.check_transfer_support(server)
        size = 1 + await self._transfer_api.count_workers(server)
        group = self._open_group(size, device=device)
        try:
            await self._run_both(server, self._transfer_api.join_group(server, group.init_info, size), group.join)
        except BaseException:
            group.abort()
            raise
        return group

    async def _broadcast_layers(
        self, server: Server, group: "BroadcastGroup", layers: tuple[Mapping[str, Tensor], ...]
    ) -> None:
        for tensors in layers:
            broadcast = partial(group.broadcast, tuple(tensors.values()))
            await self._run_both(server, self._transfer_api.receive_tensors(server, tensors), broadcast)

    async def _run_both(self, server: Server, server_part: Awaitable[None], trainer_part: Callable[[], None]) -> None:
        """Run the server's part (HTTP) and the trainer's part (blocking) of a collective operation concurrently."""

        async def run_server_part() -> None:
            await server_part

        async def run_trainer_part() -> None:
            await run_in_daemon_thread(trainer_part, "saccade-transfer")

        try:
            async with asyncio.timeout(self._timeout):
                await gather_or_cancel((run_server_part(), run_trainer_part()))
        except TimeoutError:
            raise ServerError(f"{server.url} received no weights within {self._timeout:g} seconds") from None
        except RuntimeError as error:
            reason = " ".join(str(error).split())
            raise ServerError(f"weights can't be sent to {server.url}: {reason}"[:300]) from error


# ---- process groups, independent of torch's default group, which the trainer may use for itself ----------------------


class BroadcastGroup(Protocol):
    """A group of this process (rank 0) and a server's workers. Blocking methods raise RuntimeError on failure."""

    @property
    def init_info(self) -> Mapping[str, Any]:
        """Return what the other processes need to join."""

    def join(self) -> None:
        """Join the group; block until all processes have joined."""

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Broadcast tensors in order; block until all are sent."""

    def abort(self) -> None:
        """Abort the group: end blocking calls of this process, as far as the transport supports it."""


def _open_group(
    backend: Literal["gloo", "nccl"], world_size: int, *, timeout: float, device: torch.device
) -> BroadcastGroup:
    """Create a group of `world_size` processes, this one included.

    `device` is this process's; gloo bounds each wait by `timeout` seconds. Raises ConfigError if NCCL is missing.
    """
    if backend == "nccl":
        from saccade.engines.remote.nccl_group import NcclGroup

        return NcclGroup(world_size, device)
    return GlooGroup(world_size, timeout)


class GlooGroup:
    """A group on one machine's CPUs."""

    def __init__(self, world_size: int, timeout: float) -> None:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        self._world_size, self._timeout = world_size, timedelta(seconds=timeout)
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=self._timeout)
        self._group: Any = None

    @property
    def init_info(self) -> Mapping[str, Any]:
        """See BroadcastGroup."""
        return {"master_address": "127.0.0.1", "master_port": self._store.port}

    def join(self) -> None:
        """See BroadcastGroup."""
        from torch.distributed import ProcessGroupGloo

        self._group = ProcessGroupGloo(self._store, 0, self._world_size, self._timeout)

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """See BroadcastGroup."""
        from torch.distributed import BroadcastOptions

        options = BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        for tensor in tensors:
            self._group.broadcast([tensor], options).wait()

    def abort(self) -> None:
        """See BroadcastGroup. The other processes' connections close; a broadcast in progress runs into its timeout."""
        if self._group is not None:
            self._group.abort()
