"""The local engine in a separate process with separate weights, like a server, behind a pipe.

    rollouts ──generate────────> pipe ──> local engine ──reply──> reader thread ──> the request's future
    trainer ───sync_weights────> pipe ──> waits for unfinished replies; later requests wait for it

A cancelled request is sampled to its end, and its reply is discarded.
"""

import asyncio
import contextlib
import io
import itertools
import multiprocessing
import threading
from concurrent.futures import Future
from multiprocessing.connection import Connection
from typing import Any

import torch

from saccade.config.schema import ModelConfig
from saccade.engines.local import Local
from saccade.errors import EngineError, SaccadeError
from saccade.media.cache import CachingMediaLoader
from saccade.models.backbone import Backbone
from saccade.protocols import WeightSource
from saccade.types import Completion, GenerationRequest


class SubprocessEngine:
    """Samples from a copy of `backbone` in another process; every reply is delayed by `wait` seconds.

    The process has as many threads of torch as the backbone's settings name.
    """

    has_separate_weights = True

    def __init__(self, backbone: Backbone, wait: float = 0.0) -> None:
        self.version = 0
        self._wait = wait
        self._pending: dict[int, Future[Any]] = {}
        self._numbers = itertools.count()
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, backbone.settings), daemon=True)
        self._process.start()
        theirs.close()
        self._reader = threading.Thread(target=self._read_replies, daemon=True)
        self._reader.start()

    async def generate(self, request: GenerationRequest) -> Completion:
        """Sample a continuation; see protocols.Engine."""
        completion: Completion = await self._request("generate", request)
        await asyncio.sleep(self._wait)
        return completion

    async def sync_weights(self, source: WeightSource, version: int) -> None:
        """Send a copy of the weights."""
        buffer = io.BytesIO()
        torch.save(dict(source.state_dict()), buffer)
        await self._request("sync_weights", buffer.getvalue(), version)
        self.version = version

    async def close(self) -> None:
        """End the process; unfinished requests fail."""
        with contextlib.suppress(OSError):
            self._pipe.send(None)
        await asyncio.to_thread(self._reader.join)
        self._process.join()
        self._pipe.close()

    async def _request(self, what: str, *given: Any) -> Any:
        number, future = next(self._numbers), Future[Any]()
        self._pending[number] = future
        try:
            self._pipe.send((number, what, given))
        except OSError:
            raise EngineError("the sampling process has exited") from None
        return await asyncio.wrap_future(future)

    def _read_replies(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                number, result = self._pipe.recv()
                _settle(self._pending.pop(number), result)
        for future in self._pending.values():
            _settle(future, EngineError("the sampling process has exited"))


def _settle(future: "Future[Any]", result: Any) -> None:
    if not future.set_running_or_notify_cancel():
        return
    if isinstance(result, SaccadeError):
        future.set_exception(result)
    else:
        future.set_result(result)


# ---- in the other process --------------------------------------------------------------------------------------------


def _serve(pipe: Connection, settings: ModelConfig) -> None:
    torch.set_num_threads(settings.num_threads)
    asyncio.run(_answer(pipe, Backbone(settings)))


async def _answer(pipe: Connection, backbone: Backbone) -> None:
    """Handle requests in order until the pipe closes; replies are sampled concurrently."""
    engine, requests = Local(backbone, CachingMediaLoader()), asyncio.Queue[Any]()
    in_flight: set[asyncio.Task[None]] = set()
    reading = threading.Thread(target=_read, args=(pipe, asyncio.get_running_loop(), requests), daemon=True)
    reading.start()
    while (message := await requests.get()) is not None:
        number, what, given = message
        if what == "generate":
            task = asyncio.create_task(_reply(pipe, engine, number, *given))
            in_flight.add(task)
            task.add_done_callback(in_flight.discard)
            continue
        await asyncio.gather(*in_flight)
        weights, version = given
        backbone.model.load_state_dict(torch.load(io.BytesIO(weights), map_location=backbone.device))
        await engine.sync_weights(backbone, version)
        pipe.send((number, None))
    await engine.close()
    pipe.close()


def _read(pipe: Connection, loop: asyncio.AbstractEventLoop, requests: "asyncio.Queue[Any]") -> None:
    message: Any = ()
    while message is not None:
        try:
            message = pipe.recv()
        except (EOFError, OSError):
            message = None
        loop.call_soon_threadsafe(requests.put_nowait, message)


async def _reply(pipe: Connection, engine: Local, number: int, request: GenerationRequest) -> None:
    try:
        result: Completion | SaccadeError = await engine.generate(request)
    except SaccadeError as error:
        result = error
    pipe.send((number, result))
