"""New weights without files: layer by layer, through a group of processes, into the memory of servers.

    trainer ──copied──> Copy ──a layer: broadcast──────────────> the server's processes ──> loaded
                         └────the same: "expect these" (HTTP)───────┘

A server has a group of its own: the trainer, and those of its processes that hold weights. So one that dies in the
middle holds up nobody else, and one that comes back needs nobody else. Its group is made when it is first given
weights, and anew after a failure or where its label says that it isn't as we left it. Sender and server wait for each
other; whichever fails ends the other's waiting, and so does the clock.

What was published is kept as a copy in this machine's memory, since the trainer's own weights move on: it is what a
server gets that comes back, and what all get again where new weights are taken back. While new weights are published
there are two.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from saccade.engines._served.groups import Group, open_group
from saccade.engines._served.server import Orders, Pause, Server, Trouble, Words
from saccade.errors import ConfigError, EngineError, boundary
from saccade.model import layerwise
from saccade.model.backbone import Backbone
from saccade.waiting import apart, together

Transfer = Literal["files", "nccl", "gloo"]
_logger = logging.getLogger("saccade")


def orders_for(transfer: Transfer, orders: Orders | None, words: Words, device: torch.device) -> Orders | None:
    """The orders by which weights are transferred to servers; None for files. `device` is the trainer's.

    Raises ConfigError where such servers, or this trainer, can't do it.
    """
    if transfer == "files":
        return None
    setting = f"engine.settings.transfer={transfer}"
    if orders is None:
        raise ConfigError(f"the engine {words.name.lower()} takes new weights as files alone, and not by {setting}")
    if transfer == "nccl" and device.type != "cuda":
        raise ConfigError(f"{setting} takes a trainer on a GPU: set model.device=cuda, or leave transfer at files")
    return orders


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """An edition of the weights in memory, by the names of a checkpoint; see weights.Edition."""

    version: int
    label: str
    layers: tuple[Mapping[str, Tensor], ...]
    sender: "Sender"

    async def load(self, server: Server) -> None:
        """See weights.Edition."""
        await self.sender.send(server, self)

    def drop(self) -> None:
        """Nothing: the memory is free when nobody holds it."""


class Sender:
    """Gives copies of a backbone's weights to servers; `seconds` bound each layer's way, and the making of a group."""

    def __init__(
        self, backbone: Backbone, orders: Orders, kind: Literal["nccl", "gloo"], pause: Pause, seconds: float
    ) -> None:
        self._backbone, self._orders, self._pause, self._seconds = backbone, orders, pause, seconds
        self._open = partial(open_group, kind, seconds=seconds, device=backbone.device)
        self._groups: dict[Server, tuple[Group, str]] = {}  # and the label that the server was left with

    def edition(self, version: int, label: str) -> Copy:
        """The backbone's weights as they are now. Raises EngineError where there is no room for them."""
        with boundary(EngineError, "the weights can't be copied for the servers"):
            layers = layerwise.copied(self._backbone.model)
        return Copy(version=version, label=label, layers=layers, sender=self)

    async def send(self, server: Server, edition: Copy) -> None:
        """Let a server take a copy. Raises Trouble or EngineError; ConfigError where the transport is missing.

        Cancelled, it goes on until that has ended well or badly: a server with a part of the weights would be lost.
        """
        sending = asyncio.ensure_future(self._send(server, edition))
        try:
            await asyncio.shield(sending)
        except asyncio.CancelledError:
            if not sending.done():
                _logger.warning("Stopping: waiting until %s has taken all of the weights", server.url)
                await asyncio.wait((sending,))
            raise

    def close(self) -> None:
        """Leave all groups."""
        for group, _ in self._groups.values():
            group.leave()
        self._groups.clear()

    async def _send(self, server: Server, edition: Copy) -> None:
        group = await self._group(server, await self._orders.label(server))
        sends = partial(self._layers, server, group, edition.layers)
        try:
            await self._orders.load(server, edition.label, self._pause, sends)
        except BaseException:
            group.leave()
            raise
        self._groups[server] = group, edition.label

    async def _group(self, server: Server, label: str) -> Group:
        """The server's group, which is ours until it is put back; another one where its label has changed."""
        if server in self._groups:
            group, known = self._groups.pop(server)
            if label == known:
                return group
            group.leave()
        await self._orders.check(server)
        size = 1 + await self._orders.processes(server)
        group = self._open(size)
        try:
            await self._meet(server, self._orders.join(server, group.invitation, size), group.join)
        except BaseException:
            group.leave()
            raise
        return group

    async def _layers(self, server: Server, group: Group, layers: tuple[Mapping[str, Tensor], ...]) -> None:
        for values in layers:
            sends = partial(group.send, tuple(values.values()))
            await self._meet(server, self._orders.expect(server, values), sends)

    async def _meet(self, server: Server, asked: Awaitable[None], work: Callable[[], None]) -> None:
        """A server's part and ours, each of which waits for the other."""

        async def theirs() -> None:
            await asked

        async def ours() -> None:
            await apart(work, "saccade-transfer")

        try:
            async with asyncio.timeout(self._seconds):
                await together((theirs(), ours()))
        except TimeoutError:
            raise Trouble(f"{server.url} took no new weights within {self._seconds:g} seconds") from None
        except RuntimeError as error:
            raise Trouble(f"{server.url} can't be sent new weights: {' '.join(str(error).split())}"[:300]) from error
