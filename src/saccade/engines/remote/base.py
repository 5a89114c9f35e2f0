"""What engines with servers share: requests that find a server, and new weights that find all of them.

    rollouts ──generate──> a server of the pool ──> reply ──compared with the ledger──> Completion
    trainer ───publish───> every server of the pool, in one transaction

A request waits for its server, or for one to be up (`pool.py` draws who wakes whom); publishing waits for the servers,
while new requests wait for it and replies under way end, or stand still (`weights.py`). A server that comes back is
greeted and given the published weights before anybody asks it for anything.
"""

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from saccade.engines._distribution import check_neutral
from saccade.engines._served import files, greeting, wire
from saccade.engines._served.pool import Pool
from saccade.engines._served.server import Busy, Cut, Dialect, Orders, Pause, Server, Trouble, check_servers
from saccade.engines._served.transfer import Sender, Transfer, orders_for
from saccade.engines._served.visit import visit
from saccade.engines._served.weights import Make, Weights
from saccade.engines._urls import Urls
from saccade.errors import ConfigError, EngineError
from saccade.ledger import Ledger
from saccade.model.backbone import Backbone
from saccade.protocols import MediaLibrary, Needs
from saccade.sections import Positive, Share, Whole
from saccade.types import Completion, Sampling

_logger = logging.getLogger("saccade")


class Served:
    """Samples from servers that hold the weights of `backbone`, in conversations of up to `context` tokens.

    `seconds` bound one attempt at a request, `retries` how often it is tried again, `patience` (seconds) how long
    no server may be up before the run stops, `wait` the first pause before a server is asked again. `transfer` is
    how new weights are handed over: as "files", in a `folder` that the servers see, too ("": memory), or from GPU to
    GPU ("nccl"; not run on GPUs yet; "gloo" is the same between CPUs, for servers of one's own that know it). `pause`
    is what replies under way do then: "wait": end first, or begin anew with the new weights where they would take
    longer than `drain` seconds; "keep": go on with the new weights. `top_p`, `top_k` (0: all) and
    `repetition_penalty` are for evaluation: publishing, and so training, refuses them. `parity` compares a server's
    weights with the backbone's when it is first met; after new weights that is always done.
    """

    own_weights = True
    dialect: Dialect  # of the class
    orders: Orders | None = None  # of the class: how its servers take weights that are no files, if they do

    @classmethod
    async def visit(
        cls, needs: Needs, /, *, servers: Sequence[str], transfer: Transfer = "files", **_: Any
    ) -> Mapping[str, str | Exception]:
        """What each server is, or why it can't be used; see protocols.Remote. Raises ConfigError without any."""
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return await visit(cls.dialect, needs, servers, orders_for(transfer, cls.orders, cls.dialect.WORDS, device))

    def __init__(
        self,
        backbone: Backbone,
        media: MediaLibrary,
        context: int = 0,
        *,
        servers: tuple[str, ...] = ("http://127.0.0.1:8000",),
        seconds: Positive = 900.0,
        retries: Whole = 4,
        patience: Positive = 900.0,
        wait: Positive = 0.5,
        transfer: Transfer = "files",
        folder: str = "",
        pause: Pause = "wait",
        drain: Positive = 60.0,
        top_p: Share = 1.0,
        top_k: Whole = 0,
        repetition_penalty: Positive = 1.0,
        parity: bool = True,
    ) -> None:
        check_servers(servers, self.dialect.WORDS)
        self._backbone, self._renderer = backbone, backbone.renderer
        self._context, self._retries, self._wait, self._meets = context, retries, wait, parity
        self._filters = {"top_p": top_p, "top_k": top_k, "repetition_penalty": repetition_penalty}
        self._urls = Urls(media)
        self._parity = greeting.Parity(backbone)
        orders = orders_for(transfer, self.orders, self.dialect.WORDS, backbone.device)
        if orders is not None and folder:
            raise ConfigError("engine.settings.folder is for transfer=files; leave out one of the two")
        self._sender = Sender(backbone, orders, transfer, pause, seconds) if orders and transfer != "files" else None
        make: Make = self._sender.edition if self._sender else files.Writer(backbone, folder, pause).write
        self._weights = Weights(make, self._parity, pause, drain)
        found = [Server(url, seconds, self.dialect) for url in dict.fromkeys(each.rstrip("/") for each in servers)]
        self._pool = Pool(found, self._greet, patience=patience, wait=wait)

    @property
    def version(self) -> int:
        """The version that was published last; 0 before."""
        return self._weights.version

    async def generate(self, ledger: Ledger, sampling: Sampling) -> Completion:
        """Sample a continuation; see protocols.Engine.

        Raises BrokenEngineError, which stops a run, where server and ledger disagree or no server can be used.
        """
        if not ledger.segments:
            raise EngineError("an empty ledger can't be continued; render a prompt first")
        forbidden = [self._renderer.decode([each]) for each in sampling.forbidden_ids]
        urls = [self._urls(picture) for picture in ledger.pictures()]
        body = self.dialect.request(ledger, sampling, urls=urls, forbidden=forbidden, filters=self._filters)
        group, started = ledger.fork(1).keys()[0], time.perf_counter()
        failed = 0
        while True:
            try:
                async with self._pool.lend(group) as server:
                    server.check_room(len(ledger) + sampling.max_tokens)
                    said = await server.post(self.dialect.GENERATE, body)
                    return wire.completion(said, ledger, sampling, server=server, seconds=time.perf_counter() - started)
            except Cut:  # at most once for each new version
                continue
            except Trouble as error:
                failed += 1
                # A proxy says that it is busy where there is no server behind it.
                if failed > self._retries and (not isinstance(error, Busy) or await self._pool.well(server)):
                    raise EngineError(f"{error} ({failed} attempts)") from error
            await asyncio.sleep(self._wait * 2 ** min(failed - 1, self._retries))

    async def _greet(self, server: Server) -> None:
        await greeting.look(server, self._renderer)
        server.check_room(self._context)
        while True:
            edition = await self._weights.give(server)
            label = await greeting.listen(server, self._renderer)
            if edition is None:
                server.versions = {label: self.version}
            if edition is not self._weights.current:
                continue  # there are newer ones already
            if self._meets or edition is not None:
                await self._parity.check(server, edition.label if edition else "")
            if edition is self._weights.current:
                break
        if not server.greeted and (caution := greeting.seeds(server)):
            _logger.warning("%s: %s", server.url, caution)
        # And the server is up before anything else happens.

    async def publish(self, weights: Mapping[str, Any] | None, version: int) -> None:
        """Hand the backbone's weights to the servers, after these were loaded into it (None: it has them already).

        See `weights.Weights.publish`; ConfigError for settings that training can't account for.
        """
        check_neutral(self._filters)
        if weights is not None:
            self._backbone.model.load_state_dict(weights)
        await self._weights.publish(self._pool, version)

    async def close(self) -> None:
        """Stop; what is in flight fails. The servers go on, with the weights that they have."""
        await self._pool.close()
        self._weights.drop()
        if self._sender is not None:
            self._sender.close()
