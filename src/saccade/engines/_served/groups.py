"""Groups of processes that share tensors, of which this one is the first: gloo between CPUs, NCCL between GPUs.

A group stands alone: torch's own process groups, which the trainer may have for itself, are neither used nor made.
"""

from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

Kind = Literal["gloo", "nccl"]


class Group(Protocol):
    """We, and whoever was invited. What blocks here raises RuntimeError where it fails."""

    @property
    def invitation(self) -> Mapping[str, Any]:
        """What the others must know to join."""

    def join(self) -> None:
        """Come together with the others; blocks until all are there."""

    def send(self, values: Iterable[Tensor]) -> None:
        """Broadcast tensors one after the other; blocks until all have left this process."""

    def leave(self) -> None:
        """Use it no more. What blocks here ends, as far as the transport can be told to; what others do is theirs."""


def open_group(kind: Kind, size: int, *, seconds: float, device: torch.device) -> Group:
    """A group of `size` processes, this one included; `device` is this one's, `seconds` bound each wait where they can.

    Raises ConfigError where this machine lacks the transport.
    """
    if kind == "nccl":
        from saccade.engines._served.nccl import Nccl

        return Nccl(size, device)
    return Gloo(size, seconds)


class Gloo:
    """A group on one machine's CPUs."""

    def __init__(self, size: int, seconds: float) -> None:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        self._size, self._wait = size, timedelta(seconds=seconds)
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=self._wait)
        self._group: Any = None

    @property
    def invitation(self) -> Mapping[str, Any]:
        """See Group."""
        return {"master_address": "127.0.0.1", "master_port": self._store.port}

    def join(self) -> None:
        """See Group."""
        from torch.distributed import ProcessGroupGloo

        self._group = ProcessGroupGloo(self._store, 0, self._size, self._wait)

    def send(self, values: Iterable[Tensor]) -> None:
        """See Group."""
        from torch.distributed import BroadcastOptions

        options = BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        for value in values:
            self._group.broadcast([value], options).wait()

    def leave(self) -> None:
        """See Group. The others find their connections closed; a tensor under way waits out its time."""
        if self._group is not None:
            self._group.abort()
