"""Weight sync without files: broadcast layer by layer, through a process group, into the servers' memory.

    trainer ──copy──> WeightVersion ──one layer: broadcast──────────> the server's workers ──> loaded
                        └───its names and shapes: receive_tensors (HTTP)──┘

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
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, distributed

from saccade.engines.remote import checksums, vllm_api
from saccade.engines.remote.nccl_group import NcclGroup
from saccade.engines.remote.server import RepliesOnSync, Server, ServerError, ServerMessages, WeightSyncMode
from saccade.engines.remote.weight_sync import WeightVersion
from saccade.errors import ConfigError, EngineError, convert_errors
from saccade.protocols import WeightSource
from saccade.utils.async_utils import gather_or_cancel, run_in_daemon_thread

Layers = tuple[Mapping[str, Tensor], ...]  # by their names in a checkpoint
_logger = logging.getLogger("saccade")


def check_weight_sync(weight_sync: WeightSyncMode, supports_broadcast: bool, messages: ServerMessages) -> None:
    """Raise ConfigError if the servers or this machine don't support a mode."""
    key, problem = "engine.settings.weight_sync", ""
    if weight_sync != "files" and not supports_broadcast:
        problem = f"is not supported by the engine {messages.name.lower()}"
    elif weight_sync == "nccl" and not torch.cuda.is_available():
        problem = "needs a trainer on a GPU, but torch finds none here"
    if problem:
        raise ConfigError(f"{key}={weight_sync} {problem}; set {key}=files", key=key, value=weight_sync)


# ---- process groups, independent of torch's default group, which the trainer may use for itself ----------------------


class GlooGroup:
    """A group on one machine's CPUs: this process (rank 0) and a server's workers; each wait is bounded by `timeout`.

    Blocking methods raise RuntimeError on failure.
    """

    def __init__(self, world_size: int, timeout: float) -> None:
        self._world_size, self._timeout = world_size, timedelta(seconds=timeout)
        store_type = distributed.TCPStore  # type: ignore[attr-defined]
        self._store = store_type("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=self._timeout)
        self._group: Any = None

    @property
    def init_info(self) -> Mapping[str, Any]:
        """Return what the other processes need to join."""
        return {"master_address": "127.0.0.1", "master_port": self._store.port}

    def join(self) -> None:
        """Join the group; block until all processes have joined."""
        self._group = distributed.ProcessGroupGloo(self._store, 0, self._world_size, self._timeout)

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Broadcast tensors in order; block until all are sent."""
        options = distributed.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        for tensor in tensors:
            self._group.broadcast([tensor], options).wait()

    def abort(self) -> None:
        """Abort the group. The other processes' connections close; a broadcast in progress runs into its timeout."""
        if self._group is not None:
            self._group.abort()


BroadcastGroup = GlooGroup | NcclGroup


# ---- transport -------------------------------------------------------------------------------------------------------


class BroadcastTransport:
    """Broadcasts copies of a trainer's weights to servers; `timeout` (seconds) bounds each layer and each join."""

    def __init__(self, backend: Literal["nccl", "gloo"], replies_on_sync: RepliesOnSync, timeout: float) -> None:
        self._backend, self._replies_on_sync, self._timeout = backend, replies_on_sync, timeout
        self._groups: dict[Server, tuple[BroadcastGroup, str]] = {}  # with the label that the server was left with

    def create_version(self, source: WeightSource, version: int, label: str) -> WeightVersion:
        """Copy the source's current weights to the CPU. Raises EngineError if there is no room for them."""
        with convert_errors(EngineError, "the weights can't be copied for the servers"):
            layers = source.copy_layers_to_cpu()
        load_into = partial(self._send_to_end, label, layers, source.device)

        def read_tensors() -> Mapping[str, Tensor]:
            tensors = {name: tensor for layer in layers for name, tensor in layer.items()}
            return {name: tensors[name] for name in checksums.select_names(tensors)}

        return WeightVersion(version=version, label=label, load_into=load_into, read_tensors=read_tensors)

    async def _send_to_end(self, label: str, layers: Layers, device: torch.device, server: Server) -> None:
        """Send weights to a server. Raises ServerError or EngineError; ConfigError if NCCL is missing.

        When cancelled, wait for the transfer to end first: a server with partial weights would have to be restarted.
        """
        transfer = asyncio.create_task(self._send(label, layers, device, server))
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

    async def _send(self, label: str, layers: Layers, device: torch.device, server: Server) -> None:
        group = await self._acquire_group(server, await vllm_api.fetch_label(server), device)
        broadcast = partial(self._broadcast_layers, server, group, layers)
        try:
            await vllm_api.receive_weights(server, label, self._replies_on_sync, broadcast)
        except BaseException:
            group.abort()
            raise
        self._groups[server] = group, label

    async def _acquire_group(self, server: Server, label: str, device: torch.device) -> BroadcastGroup:
        """Take the server's group out of `_groups`; create a new one if there is none or the label has changed."""
        if server in self._groups:
            group, last_label = self._groups.pop(server)
            if label == last_label:
                return group
            group.abort()
        await vllm_api.check_transfer_support(server)
        size = 1 + await vllm_api.count_workers(server)
        group = NcclGroup(size, device) if self._backend == "nccl" else GlooGroup(size, self._timeout)
        try:
            await self._run_both(server, vllm_api.join_group(server, group.init_info, size), group.join)
        except BaseException:
            group.abort()
            raise
        return group

    async def _broadcast_layers(self, server: Server, group: BroadcastGroup, layers: Layers) -> None:
        for tensors in layers:
            broadcast = partial(group.broadcast, tuple(tensors.values()))
            await self._run_both(server, vllm_api.receive_tensors(server, tensors), broadcast)

    async def _run_both(self, server: Server, server_part: Awaitable[None], trainer_part: Callable[[], None]) -> None:
        """Run the server's part (HTTP) and the trainer's part (blocking) of a collective operation concurrently."""
        try:
            async with asyncio.timeout(self._timeout):
                await gather_or_cancel((server_part, run_in_daemon_thread(trainer_part, "saccade-transfer")))
        except TimeoutError:
            raise ServerError(f"{server.url} received no weights within {self._timeout:g} seconds") from None
        except RuntimeError as error:
            reason = " ".join(str(error).split())
            raise ServerError(f"weights can't be sent to {server.url}: {reason}"[:300]) from error
