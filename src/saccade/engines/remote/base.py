"""The base of engines with servers: route each request to one server, and each weight sync to all of them.

    rollouts ──generate────────> a server of the pool ──> reply ──compared with the ledger──> Completion
    trainer ───sync_weights────> every server of the pool, in one transaction

A request waits for its server, or until any server is up (drawn in `pool.py`). A weight sync waits for the servers; new
requests wait for it, and unfinished replies finish first or are paused (`weight_sync.py`). A server that reconnects
passes the handshake and loads the current weights before it receives a request.
"""

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any

from saccade.config.schema import Fraction, NonNegativeInt, PositiveFloat
from saccade.engines.image_urls import ImageUrls
from saccade.engines.remote import handshake
from saccade.engines.remote.broadcast import BroadcastTransport, check_weight_sync
from saccade.engines.remote.pool import MAX_BACKOFF, Pool
from saccade.engines.remote.server import (
    SERVERS_KEY,
    LoraSync,
    RepliesOnSync,
    RequestAborted,
    Server,
    ServerApi,
    ServerBusy,
    ServerError,
    ServerRequest,
    ServerTimeout,
    WeightSyncMode,
    require_servers,
)
from saccade.engines.remote.weight_sync import DiskTransport, SyncState, WeightSync
from saccade.engines.sampling_filters import check_neutral
from saccade.errors import ConfigError, EngineError
from saccade.protocols import EngineRequirements, MediaLoader, Renderer, WeightSource
from saccade.sandbox import plan_connections
from saccade.types import Completion, FinishReason, GenerationRequest
from saccade.utils.hashing import derive_seed
from saccade.utils.http_client import compute_backoff

_logger = logging.getLogger("saccade")


class RemoteEngine:
    """Samples from servers in conversations of up to `context_length` tokens; needs a renderer, and no model.

    The run stops if no server is reached within 60 seconds of the start of the command. With `replies_on_sync`
    continue or abort, a reply continues with the new weights, and each token has its own version. Training refuses
    `top_p`, `top_k` and `repetition_penalty`.
    """

    has_separate_weights = True
    api: ServerApi  # set by the subclass
    supports_broadcast = False  # set by the subclass if its servers receive weights through a process group
    supports_abort = False  # set by the subclass if its servers return the tokens so far of requests that they abort
    supports_adapters = False  # set by the subclass if its servers load LoRA adapters at run time

    @classmethod
    async def probe(
        cls,
        requirements: EngineRequirements,
        /,
        *,
        servers: Sequence[str],
        weight_sync: WeightSyncMode = "files",
        lora: LoraSync = "merged",
        **_: Any,
    ) -> Mapping[str, str | Exception]:
        """Describe each server, or why it is unusable; see protocols.ProbeableEngine. Raises ConfigError if none."""
        check_weight_sync(weight_sync, cls.supports_broadcast, cls.api.MESSAGES)
        return await handshake.probe(cls.api, requirements, servers, by_broadcast=weight_sync != "files", lora=lora)

    def __init__(
        self,
        renderer: Renderer,
        media: MediaLoader,
        context_length: int = 0,
        load_weights: Callable[[], WeightSource] | None = None,
        *,
        servers: tuple[str, ...] = ("http://127.0.0.1:8000",),  # addresses of the servers
        request_timeout: PositiveFloat = 900.0,  # time limit of an HTTP request, seconds
        max_retries: NonNegativeInt = 4,  # attempts after the first
        down_timeout: PositiveFloat = 900.0,  # the run stops if no server is up for this long, seconds
        retry_backoff: PositiveFloat = 0.5,  # first pause between attempts, doubled each time, seconds
        # how servers receive weights. files = from a folder; nccl = from GPU to GPU; gloo = from CPU to CPU
        weight_sync: WeightSyncMode = "files",
        weight_dir: str = "",  # folder of weight files, readable by the servers; empty = shared memory if there is room
        # what happens to unfinished replies at a weight sync. drain = they finish before it; continue = the server
        # pauses and continues them; abort = the server ends them, and a new request continues from their tokens
        replies_on_sync: RepliesOnSync = "drain",
        # how servers receive LoRA adapters. merged = added to the weights; adapters = as they are, beside the base
        # weights
        lora: LoraSync = "merged",
        # a reply that drains for longer is restarted with the new weights, seconds
        drain_timeout: PositiveFloat = 60.0,
        # compare checksums of tensors when a server connects, and after every so many weight syncs; 0 = never. vLLM
        # then hashes all its weights
        checksum_interval: NonNegativeInt = 50,
        top_p: Fraction = 1.0,  # nucleus sampling, for evaluation only
        top_k: NonNegativeInt = 0,  # most likely tokens to sample from, for evaluation only; 0 = all
        repetition_penalty: PositiveFloat = 1.0,  # factor on repeated tokens, for evaluation only
        # compare the servers' weights with the model at the first handshake; after a weight sync they always are
        verify_weights: bool = True,
    ) -> None:
        require_servers(servers, self.api.MESSAGES)
        self._renderer, self._context_length = renderer, context_length
        self._retries, self._retry_backoff = max_retries, retry_backoff
        self._load_weights = functools.cache(load_weights) if load_weights and verify_weights else None
        self._source: WeightSource | None = None  # of the last weight sync
        self._filters = {"top_p": top_p, "top_k": top_k, "repetition_penalty": repetition_penalty}
        if replies_on_sync == "abort" and not self.supports_abort:
            raise ConfigError(
                "engine.settings.replies_on_sync=abort is not supported by the engine "
                f"{self.api.MESSAGES.name.lower()}; set engine.settings.replies_on_sync to drain or continue",
                key="engine.settings.replies_on_sync",
                value=replies_on_sync,
            )
        self._allows_abort = replies_on_sync == "abort"
        self._image_urls = ImageUrls(media)
        self._logprob_check = handshake.LogprobCheck(renderer)
        check_weight_sync(weight_sync, self.supports_broadcast, self.api.MESSAGES)
        if weight_sync != "files" and weight_dir:
            raise ConfigError(
                f"engine.settings.weight_dir={weight_dir!r} is only used with weight_sync=files, not with "
                f"weight_sync={weight_sync}; remove one of the two",
                key="engine.settings.weight_dir",
                value=weight_dir,
            )
        self._broadcaster = (
            None if weight_sync == "files" else BroadcastTransport(weight_sync, replies_on_sync, request_timeout)
        )
        if lora == "adapters":
            self._check_adapters(weight_sync, replies_on_sync)
        self._lora = lora
        transport = self._broadcaster or DiskTransport(weight_dir, replies_on_sync, lora)
        self._weight_sync = WeightSync(
            transport.create_version, self._logprob_check, replies_on_sync, drain_timeout, checksum_interval
        )
        urls = dict.fromkeys(url.rstrip("/") for url in servers)
        max_requests = max(1, plan_connections() // len(urls))
        self._pool = Pool(
            [Server(url, request_timeout, self.api, max_requests) for url in urls],
            self._handshake,
            down_timeout=down_timeout,
            retry_backoff=retry_backoff,
        )

    def _check_adapters(self, weight_sync: WeightSyncMode, replies_on_sync: RepliesOnSync) -> None:
        key, problem = "engine.settings.lora", ""
        if not self.supports_adapters:
            problem = f"is not supported by the engine {self.api.MESSAGES.name.lower()}; set {key}=merged"
        elif weight_sync != "files":
            problem = f"needs engine.settings.weight_sync=files, not {weight_sync}"
        elif replies_on_sync != "drain":  # their tokens would have the label of the new weights
            problem = (
                "needs engine.settings.replies_on_sync=drain: unfinished replies keep the adapter that they began with"
            )
        if problem:
            raise ConfigError(f"{key}=adapters {problem}", key=key, value="adapters")

    @property
    def version(self) -> int:
        """Return the current weight version; 0 before the first weight sync."""
        return self._weight_sync.version

    async def generate(self, request: GenerationRequest) -> Completion:
        """Sample a continuation; see protocols.Engine.

        Raises BrokenEngineError, which stops a run, if server and ledger disagree or no server is usable.
        """
        ledger, sampling = request.ledger, request.sampling
        if not ledger.segments:
            raise EngineError("the ledger is empty; render a prompt first")
        server_request = ServerRequest(
            ledger,
            sampling,
            image_urls=await self._image_urls.encode(ledger.images()),
            forbidden_texts=[self._renderer.decode([token]) for token in sampling.forbidden_ids],
            filters=self._filters,
        )
        group = ledger.prefix(1).prefix_hashes()[0]
        num_failures, failed_at, partial = 0, set[Server](), list[Completion]()
        while True:
            try:
                async with self._pool.acquire(group, failed_at) as server:
                    server.check_context_length(len(ledger) + sampling.max_tokens)
                    num_pauses = self._pool.num_pauses
                    completion, _ = await server.generate(server_request, allows_abort=self._allows_abort)
                    is_aborted = completion.finish_reason is FinishReason.ABORTED
                    if is_aborted and self._pool.num_pauses == num_pauses:
                        raise ServerError(f"{server.url} aborted a request, and no weight sync had begun")
                if completion.tokens:
                    partial.append(completion)
                if not is_aborted:
                    return _join_completions(partial)
                server_request = _continue_request(server_request, completion)
                continue
            except RequestAborted:  # at most once per weight sync
                continue
            except ServerError as error:
                num_failures += 1
                if isinstance(error, ServerTimeout):
                    await self._pool.check_response(server)
                if not isinstance(error, ServerBusy):
                    failed_at.add(server)  # it may pass the next handshake and fail again
                # A proxy without a server behind it reports that it is busy, too.
                if num_failures > self._retries and (
                    not isinstance(error, ServerBusy) or await self._pool.check_health(server)
                ):
                    raise EngineError(f"{error} ({num_failures} tries)", key=SERVERS_KEY, value=server.url) from error
            await asyncio.sleep(compute_backoff(self._retry_backoff, num_failures, at_most=MAX_BACKOFF))

    async def _handshake(self, server: Server) -> None:
        await handshake.check_tokenizer(server, self._renderer)
        server.check_context_length(self._context_length)
        while True:
            loaded = await self._weight_sync.load_current(server)
            label = await handshake.check_logprobs(server, self._renderer)
            if loaded is None:
                server.version_by_label = self._weight_sync.identify_versions(server, label)
            if loaded is not self._weight_sync.current:
                continue  # a newer version was created meanwhile
            if source := self._source if loaded else self._load_weights and self._load_weights():
                await self._logprob_check.check(server, source, loaded.label if loaded else "")
            if loaded:
                await self._weight_sync.compare_tensors(server, loaded)
            if loaded is self._weight_sync.current:
                break
        if not server.incarnation and (warning := handshake.check_seeds(server)):
            _logger.warning("%s: %s", server.url, warning)
        # No await from here on: the pool marks the server up before the current version can change.

    async def sync_weights(self, source: WeightSource, version: int) -> Mapping[str, float]:
        """Send the source's weights to the servers and return metrics; see `WeightSync.sync_weights`.

        Raises ConfigError for sampling filters, which training can't account for, and for adapters that the setting
        `lora` doesn't fit.
        """
        check_neutral(self._filters)
        key = "engine.settings.lora"
        if self._lora == "adapters" and not source.has_adapters:
            raise ConfigError(f"{key}=adapters needs model.lora_rank > 0; remove {key}", key=key, value=self._lora)
        if self._lora == "merged" and source.has_adapters and source.dtype == "bfloat16":
            fix = f"set {key}=adapters" if self.supports_adapters else "use the engine vllm"
            raise ConfigError(
                "adapters that are merged into bfloat16 weights are lost in rounding: most updates are smaller than "
                f"the distance of two neighboring values; {fix}, or model.dtype=float32",
                key=key,
                value=self._lora,
            )
        self._source = source
        return await self._weight_sync.sync_weights(self._pool, source, version)

    def set_switch_guard(self, guard: Callable[[], AbstractAsyncContextManager[None]]) -> None:
        """Pause other clients while servers switch weights; see protocols.SharedServersEngine."""
        self._weight_sync.guard_switch = guard

    def get_sync_state(self) -> SyncState | None:
        """Return what clients in other processes must know; see protocols.SharedServersEngine."""
        return self._weight_sync.state

    @contextlib.asynccontextmanager
    async def pause_requests(self) -> AsyncIterator[None]:
        """Hold back new requests, and replies that the servers continue, while another process syncs the weights."""
        async with self._weight_sync.pause(self._pool):
            # A reply may end with tokens of the new weights before `follow` is called with their label.
            can_read = asyncio.Event()
            for server in self._pool.servers:
                server.can_read = can_read
            try:
                yield
            finally:
                can_read.set()

    def follow(self, state: SyncState | None) -> None:
        """Accept the weights that another process has loaded into the servers."""
        self._weight_sync.follow(self._pool, state)

    def list_outdated_servers(self) -> Sequence[str]:
        """Return the servers that have other weights than the process that syncs them has loaded."""
        return sorted(self._weight_sync.outdated_servers)

    def reload_servers(self, servers: Sequence[str]) -> None:
        """Reconnect to servers in which another client found other weights; the handshake loads the current ones."""
        for server in self._pool.servers_up:
            if server.url in servers:
                self._pool.mark_down(server, f"{server.url} has other weights than the run's")

    async def close(self) -> None:
        """Stop; unfinished requests fail. The servers keep running with their weights."""
        await self._pool.close()
        self._weight_sync.release()
        if self._broadcaster is not None:
            self._broadcaster.close()


def _continue_request(request: ServerRequest, completion: Completion) -> ServerRequest:
    """Return a request for the rest of an aborted reply: the tokens so far belong to its prompt."""
    if not completion.tokens:
        return request
    sampling, num_tokens = request.sampling, len(completion.tokens)
    # With the same seed the server would repeat the random numbers of the first tokens.
    seed = derive_seed(sampling.seed, "continued", num_tokens)
    return replace(
        request,
        ledger=request.ledger.append_completion(
            completion.tokens, logprobs=completion.logprobs, version=completion.version
        ),
        sampling=replace(sampling, max_tokens=sampling.max_tokens - num_tokens, seed=seed),
    )


def _join_completions(parts: Sequence[Completion]) -> Completion:
    """Return the reply whose parts were sampled one after the other, with a version per token if they differ."""
    versions = tuple(
        version
        for part in parts
        for version in part.token_versions or (part.version,) * len(part.tokens)
        if version is not None
    )
    return replace(
        parts[-1],
        tokens=tuple(token for part in parts for token in part.tokens),
        logprobs=tuple(logprob for part in parts for logprob in part.logprobs),
        token_versions=versions if len(set(versions)) > 1 else (),
    )
