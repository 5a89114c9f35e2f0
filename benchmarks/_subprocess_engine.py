"""An engine in a process of its own, as a server is: the local engine with weights of its own, behind a pipe.

    rollouts ──generate──> pipe ──> local engine ──reply──> a thread that listens ──> whoever waits for it
    trainer ───publish───> pipe ──> replies under way end first, and what is asked later waits

What nobody waits for any more is sampled to its end, and its reply is thrown away.
"""

import asyncio
import contextlib
import io
import itertools
import multiprocessing
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import torch

from saccade.config import Model
from saccade.engines.local import local
from saccade.errors import EngineError, SaccadeError
from saccade.ledger import Ledger
from saccade.media.cache import Library
from saccade.model.backbone import Backbone
from saccade.types import Completion, Sampling


class Elsewhere:
    """Samples from a copy of `backbone` that another process holds; every reply takes `wait` seconds more."""

    own_weights = True

    def __init__(self, backbone: Backbone, wait: float = 0.0) -> None:
        self.version = 0
        self._backbone, self._wait = backbone, wait
        self._asked: dict[int, Future[Any]] = {}
        self._numbers = itertools.count()
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, backbone.settings), daemon=True)
        self._process.start()
        theirs.close()
        self._listening = threading.Thread(target=self._listen, daemon=True)
        self._listening.start()

    async def generate(self, ledger: Ledger, sampling: Sampling) -> Completion:
        """Sample a continuation; see protocols.Engine."""
        started = time.perf_counter()
        completion: Completion = await self._ask("generate", ledger, sampling)
        await asyncio.sleep(self._wait)
        return replace(completion, seconds=time.perf_counter() - started)

    async def publish(self, weights: Mapping[str, Any] | None, version: int) -> None:
        """Hand over a copy of the weights, None being the backbone's."""
        held = io.BytesIO()
        torch.save(self._backbone.model.state_dict() if weights is None else weights, held)
        await self._ask("publish", held.getvalue(), version)
        self.version = version

    async def close(self) -> None:
        """End the process; what is under way there fails."""
        with contextlib.suppress(OSError):
            self._pipe.send(None)
        await asyncio.to_thread(self._listening.join)
        self._process.join()
        self._pipe.close()

    async def _ask(self, what: str, *given: Any) -> Any:
        number, future = next(self._numbers), Future[Any]()
        self._asked[number] = future
        try:
            self._pipe.send((number, what, given))
        except OSError:
            raise EngineError("the process that samples has ended") from None
        return await asyncio.wrap_future(future)

    def _listen(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                number, said = self._pipe.recv()
                _settle(self._asked.pop(number), said)
        for future in self._asked.values():
            _settle(future, EngineError("the process that samples has ended"))


def _settle(future: "Future[Any]", said: Any) -> None:
    if not future.set_running_or_notify_cancel():
        return
    if isinstance(said, SaccadeError):
        future.set_exception(said)
    else:
        future.set_result(said)


# ---- in the other process --------------------------------------------------------------------------------------------


def _serve(pipe: Connection, settings: Model) -> None:
    torch.set_num_threads(settings.threads)
    asyncio.run(_answer(pipe, Backbone(settings)))


async def _answer(pipe: Connection, backbone: Backbone) -> None:
    """Do what is asked, in order, until the pipe ends; replies are sampled side by side."""
    engine, asked = local(backbone, Library()), asyncio.Queue[Any]()
    under_way: set[asyncio.Task[None]] = set()
    reading = threading.Thread(target=_read, args=(pipe, asyncio.get_running_loop(), asked), daemon=True)
    reading.start()
    while (message := await asked.get()) is not None:
        number, what, given = message
        if what == "generate":
            task = asyncio.create_task(_reply(pipe, engine, number, *given))
            under_way.add(task)
            task.add_done_callback(under_way.discard)
            continue
        await asyncio.gather(*under_way)
        weights, version = given
        await engine.publish(torch.load(io.BytesIO(weights), map_location=backbone.device), version)
        pipe.send((number, None))
    await engine.close()
    pipe.close()


def _read(pipe: Connection, loop: asyncio.AbstractEventLoop, asked: "asyncio.Queue[Any]") -> None:
    message: Any = ()
    while message is not None:
        try:
            message = pipe.recv()
        except (EOFError, OSError):
            message = None
        loop.call_soon_threadsafe(asked.put_nowait, message)


async def _reply(pipe: Connection, engine: local, number: int, ledger: Ledger, sampling: Sampling) -> None:
    try:
        said: Completion | SaccadeError = await engine.generate(ledger, sampling)
    except SaccadeError as error:
        said = error
    pipe.send((number, said))
