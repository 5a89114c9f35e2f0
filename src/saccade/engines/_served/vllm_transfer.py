"""vLLM's orders for weights that come through a group of processes, as its version 0.32 takes them.

While a server takes weights its label is one that nobody publishes: should it stop halfway, it is known by that,
whoever looks and whenever, until it was started again. vLLM gives no other sign, and can't finish what failed.
"""

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from torch import Tensor

from saccade.engines._served import vllm_dialect
from saccade.engines._served.server import Pause, Server, Trouble
from saccade.errors import EngineError

_JOIN = "/init_weight_transfer_engine"
_PART = "-in-part"  # of a label
_MEND = "it has a part of new weights, and is not used before it was started again"
_logger = logging.getLogger("saccade")


async def check(server: Server) -> None:
    """See Orders. vLLM tells by what it says to an empty invitation, which no process can accept."""
    try:
        await server.post(_JOIN, {"init_info": {}})
    except Trouble as error:
        if "not configured" in str(error):
            raise EngineError(
                f"{server.url} can't take weights by engine.settings.transfer=nccl; start it with `saccade serve "
                '--transfer nccl`, or with vLLM\'s --weight-transfer-config \'{"backend":"nccl"}\', or leave transfer '
                "at files"
            ) from error


async def label(server: Server) -> str:
    """See Orders."""
    try:
        said = str((await server.get("/weight_info"))["weight_version"])
    except (LookupError, TypeError):
        raise Trouble(f"{server.url} doesn't say which weights it has") from None
    if said.endswith(_PART):
        raise Trouble(f"{server.url} can't be given weights: {_MEND}")
    return said


async def processes(server: Server) -> int:
    """See Orders."""
    try:
        return int((await server.get("/get_world_size"))["world_size"])
    except (LookupError, TypeError, ValueError):
        raise Trouble(f"{server.url} doesn't say how many processes it has") from None


async def join(server: Server, invitation: Mapping[str, Any], size: int) -> None:
    """See Orders."""
    await server.post(_JOIN, {"init_info": {**invitation, "rank_offset": 1, "world_size": size}})


async def expect(server: Server, values: Mapping[str, Tensor]) -> None:
    """See Orders."""
    update = {
        "names": list(values),
        "dtype_names": [str(value.dtype).removeprefix("torch.") for value in values.values()],
        "shapes": [list(value.shape) for value in values.values()],
    }
    await server.post("/update_weights", {"update_info": update})


async def load(server: Server, label: str, pause: Pause, send: Callable[[], Awaitable[None]]) -> None:
    """See Orders. Where it fails the server stays paused."""
    await server.post("/pause", mode=pause, empty=True)
    await server.post("/update_weight_version", {"new_version": label + _PART}, empty=True)
    try:
        await server.post("/start_weight_update")
        await send()
        await server.post("/finish_weight_update", {"weight_version": label})
    except (Trouble, EngineError) as error:
        _logger.warning("%s; %s", error, _MEND)
        raise
    await vllm_dialect.resume(server, pause)
