"""One server: its client, validation of its completions, and what each kind of server (vLLM, SGLang) must implement."""

import asyncio
import contextlib
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

from saccade.engines.image_urls import join_json
from saccade.errors import BrokenEngineError, ConfigError, EngineError
from saccade.media.cache import LRUCache
from saccade.protocols import Renderer
from saccade.types import Completion, FinishReason, GenerationRequest, SamplingParams
from saccade.utils.async_utils import yield_to_loop
from saccade.utils.http_client import HttpClient, RequestFailed, is_server_address

# What happens to unfinished replies during a weight sync: they finish first, or continue with the new weights, in the
# server or as a new request.
RepliesOnSync = Literal["drain", "continue", "abort"]
# How servers receive LoRA adapters: merged into the weights, or as adapters beside the base weights.
LoraSync = Literal["merged", "adapters"]
WeightSyncMode = Literal["files", "nccl", "gloo"]  # how servers receive weights: see `weight_sync.py`, `broadcast.py`
_BUSY_STATUS_CODES = frozenset({408, 425, 429, 503})
SERVERS_KEY = "engine.settings.servers"  # of errors about a server
_METADATA_TIMEOUT = 20.0  # seconds for what a server has at hand: its model, its label, whether a path exists
_MAX_RESPONSE_BYTES = 32 * 2**20  # of a completion with logprobs: about 150 bytes per token
_RETRY_PAUSES = (0.1, 0.5)  # seconds before each retry of a request of a weight update
# Seconds between the tries of a request whose images another request sends: the server takes a while to read them.
_UPLOAD_PAUSES = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6)
_MAX_SENT_IMAGES = 2**17  # images per server that are remembered as sent
_NUM_SHOWN_IDS = 8  # on either side of the first difference of two prompts


class ServerError(Exception):
    """The server failed, not the request: a retry, there or at another server, may succeed."""


class ServerBusy(ServerError):
    """The server is healthy but overloaded."""


class ServerTimeout(ServerError):
    """The request took too long: the server may hang, or be healthy and slow."""


class ServerUnreachable(ServerError):
    """There is no connection to the server: nothing listens at its address, for example."""


class RequestAborted(Exception):
    """The request was aborted for a weight sync; it may be retried with the new weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerMessages:
    """Texts about one kind of server for error messages.

    `missing_path_hints` holds the fix for each missing path, `deterministic_flag` the flag that makes seeds effective.
    A conversation of n tokens needs `context_flag` n + `reserved_tokens`.
    """

    name: str
    description: str
    start_hint: str
    context_flag: str
    missing_path_hints: Mapping[str, str]
    reserved_tokens: int = 0
    deterministic_flag: str = ""

    @property
    def unreachable_hint(self) -> str:
        """Return what to do if a server is unreachable."""
        return f"{self.start_hint}, or set engine.settings.servers"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerRequest(GenerationRequest):
    """A request in a format common to all servers: the data URLs of its images, the texts of `sampling.forbidden_ids`.

    `image_urls` are by the images' keys. `filters` change the distribution beyond the temperature, such as top_p.
    """

    image_urls: Mapping[str, bytes] = field(default_factory=dict)
    forbidden_texts: Sequence[str] = ()
    filters: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerReply:
    """A completion in a format common to all servers: prompt ids, sampled ids, and one logprob per sampled id.

    `prompt_token_ids` are expanded: one placeholder per visual token, as in `Ledger.input_ids`.
    `version_spans` are (label of the weights, first token, one past the last).
    """

    prompt_token_ids: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    version_spans: tuple[tuple[str, int, int], ...]
    finish_reason: str


class ServerApi(Protocol):
    """The API of one kind of server; a module with these names implements it."""

    MESSAGES: ServerMessages
    GENERATE_PATH: str  # the path that samples
    TEXT_PATHS: Collection[str]  # whose responses are texts, which `post` drops
    KEEPS_IMAGES: bool  # the server keeps images by their keys, so that later requests may omit their data

    def build_request(self, request: ServerRequest, omitted: Collection[str] = ()) -> dict[str, Any]:
        """Build the body of a generate request: unexpanded ids, images, sampling parameters.

        Images appear as `mark_image`, or by their keys alone if those are in `omitted`.
        """

    def parse_reply(self, response: Any) -> ServerReply:
        """Parse a generate response. Raises LookupError, TypeError or ValueError if it is malformed."""

    async def describe(self, server: "Server") -> str:
        """Return the served checkpoint; set the server's `max_model_len` and `is_seeded`.

        Raises LookupError, TypeError or ValueError for a malformed response, ServerError or EngineError.
        """

    async def detokenize(self, server: "Server", ids: Sequence[int]) -> str:
        """Return the text of ids with special tokens. Raises LookupError, TypeError, ServerError or EngineError."""

    async def check_logprobs(self, server: "Server", renderer: Renderer) -> str:
        """Check that logprobs are those of the sampling distribution; return the label of the server's weights.

        Raises BrokenEngineError if they are not or a required field is missing; LookupError, TypeError or ValueError
        for a malformed response; ServerError or EngineError.
        """

    async def check_weight_updates(self, server: "Server", *, by_broadcast: bool) -> None:
        """Check that the server accepts new weights, without changing it. Raises ServerError or EngineError."""

    async def load_weights(self, server: "Server", folder: Path, label: str, replies_on_sync: RepliesOnSync) -> None:
        """Load weights from a folder, label them, and empty the caches computed with the old weights.

        With `replies_on_sync="drain"` all unfinished replies end first, those of other clients included; with "abort"
        they are aborted, and the server returns the tokens sampled so far. Raises ServerError or EngineError; the
        server then never samples from a mixture of old and new weights.
        """

    async def fetch_digests(self, server: "Server") -> Mapping[str, str]:
        """Return the SHA-256 of each tensor that the server holds, by its name there; empty if it offers none.

        Raises ServerError or EngineError.
        """

    async def fetch_label(self, server: "Server") -> str:
        """Return the label of the server's weights. Raises ServerError, also if they are a mixture; EngineError."""

    async def finish_update(self, server: "Server", replies_on_sync: RepliesOnSync) -> None:
        """Do what follows the label in `load_weights`: empty the caches and resume. Raises ServerError or EngineError.

        It may be repeated.
        """


@contextlib.contextmanager
def convert_parse_errors(problem: str) -> Iterator[None]:
    """Convert an error in the reading of a malformed response into a ServerError."""
    try:
        yield
    except (LookupError, TypeError, ValueError, ArithmeticError):
        raise ServerError(problem) from None


def require_servers(servers: Sequence[str], messages: ServerMessages) -> None:
    """Raise ConfigError if no server is configured."""
    if not servers:
        raise ConfigError(
            f"engine.settings.servers is empty, and the engine {messages.name.lower()} needs a server; "
            f"{messages.start_hint} and add its address",
            key=SERVERS_KEY,
            value=servers,
        )


class Server:
    """A server at `url`, such as http://127.0.0.1:8000; each HTTP request is bounded by `timeout` seconds.

    At most `max_concurrency` replies are requested at a time (0: no limit).

    `num_in_flight` counts our unfinished requests, `incarnation` how often the server came up, `max_model_len` is its
    context in tokens, `vocab_size` the bound of its token ids, `is_seeded` whether seeds determine its samples,
    `was_reached` whether any handshake had a connection (None: not tried yet), `version_by_label` the weight version of
    each label that it may report. `sent_label` is the label of the last weight update, `loaded_label` the same if the
    update succeeded, else ""; `adapter` names the LoRA adapter that samples. A reply is read once `can_read` is set,
    if there is one. The pool, the handshake, the engine and the weight sync set them.
    """

    def __init__(self, url: str, timeout: float, api: ServerApi, max_concurrency: int = 0) -> None:
        if not is_server_address(url):
            raise ConfigError(
                f"engine.settings.servers contains {url!r}, which is not the address of a {api.MESSAGES.name} server; "
                "give one such as http://127.0.0.1:8000",
                key=SERVERS_KEY,
                value=url,
            )
        self.url, self.api = url.rstrip("/"), api
        create_client = partial(
            HttpClient,
            base_url=self.url,
            timeout=timeout,
            keeps_connections=True,
            max_response_bytes=_MAX_RESPONSE_BYTES,
        )
        # Requests beyond the limit wait here, without a connection. Requests of weight syncs don't wait for them.
        self._client, self._control_client = create_client(max_concurrency=max_concurrency), create_client()
        self._sent_images = SentImages()
        self.is_up, self.num_in_flight, self.incarnation = False, 0, 0
        self.max_model_len, self.vocab_size = 0, 0
        self.down_reason, self.is_seeded = "no handshake yet", True
        self.was_reached: bool | None = None
        self.version_by_label: dict[str, int] = {}
        self.num_compared_tensors = 0  # in the last comparison of checksums
        self.sent_label = self.loaded_label = self.adapter = ""
        self.can_read: asyncio.Event | None = None

    def check_context_length(self, num_tokens: int) -> None:
        """Raise BrokenEngineError if a conversation of so many tokens exceeds the server's context."""
        if num_tokens > self.max_model_len:
            messages = self.api.MESSAGES
            flag = f"{messages.context_flag} {num_tokens + messages.reserved_tokens}"
            raise BrokenEngineError(
                f"{self.url} has a context of {self.max_model_len} tokens, but a conversation may have {num_tokens}; "
                f"start it with {flag}, or lower environment.settings.max_context_tokens",
                key="environment.settings.max_context_tokens",
                value=num_tokens,
            )

    def build_fatal_error(self, problem: str) -> BrokenEngineError:
        """Return an error about this server that stops the run."""
        return BrokenEngineError(f"{self.url} {problem}", key=SERVERS_KEY, value=self.url)

    async def generate(
        self, request: ServerRequest, *, allows_abort: bool = False
    ) -> tuple[Completion, frozenset[str]]:
        """Sample a continuation; return it, and the labels of the weights that sampled it.

        With `allows_abort` the completion of a request that the server aborts has the tokens sampled so far, if any.
        Raises ServerError for a malformed completion or one sampled from weights of an unknown label; BrokenEngineError
        if the server's prompt differs from the ledger; what `post` raises.
        """
        sampling = request.sampling
        response = await self._post_request(request)
        if self.can_read is not None:
            await self.can_read.wait()
        with convert_parse_errors(f"{self.url} returned a malformed completion"):
            reply = self.api.parse_reply(response)
        _check_prompt_token_ids(reply.prompt_token_ids, request.ledger.input_ids(), self.url)
        has_stop_id = bool(reply.tokens) and reply.tokens[-1] in sampling.stop_ids
        is_aborted = reply.finish_reason == "abort"
        if is_aborted and not allows_abort:
            raise ServerError(f"{self.url} aborted a request")
        # It may have sampled the last token before it aborted the request.
        is_aborted = is_aborted and not has_stop_id and len(reply.tokens) < sampling.max_tokens
        if problem := _find_problem(reply, sampling, self.vocab_size, has_stop_id, is_aborted):
            raise ServerError(f"{self.url} returned a malformed completion: {problem}")
        versions = (
            _compute_token_versions(reply.version_spans, len(reply.tokens), self.version_by_label, self.url)
            if reply.tokens
            else ()
        )
        ended = FinishReason.STOP if has_stop_id else FinishReason.LENGTH
        completion = Completion(
            tokens=reply.tokens,
            logprobs=tuple(min(value, 0.0) for value in reply.logprobs),  # rounding may give slightly more than 0
            version=versions[-1] if versions else None,
            token_versions=versions if len(set(versions)) > 1 else (),
            finish_reason=FinishReason.ABORTED if is_aborted else ended,
        )
        return completion, frozenset(label for label, _, _ in reply.version_spans)

    async def _post_request(self, request: ServerRequest) -> Any:
        """Post a generate request, without the images that the server has, and with them if it has lost them."""
        keys = {image.key for image in request.ledger.images()}
        pauses = iter(_UPLOAD_PAUSES)
        while True:
            await yield_to_loop()
            omitted = self._sent_images.find_omitted(keys) if self.api.KEEPS_IMAGES else set[str]()
            body = self.api.build_request(request, omitted) | ({"model": self.adapter} if self.adapter else {})
            try:
                with self._sent_images.record_upload(keys - omitted):
                    return await self.post(self.api.GENERATE_PATH, join_json(body, request.image_urls))
            except EngineError:
                if not omitted:
                    raise
                # The server has dropped images, or doesn't have those yet that another request sends.
                is_uploading = self._sent_images.is_uploading(omitted)
                self._sent_images.forget(omitted)
                if is_uploading and (pause := next(pauses, None)) is not None:
                    await asyncio.sleep(pause)
                else:
                    self._sent_images.forget(omitted, with_uploads=True)

    def forget_images(self) -> None:
        """Send every image again: the server has emptied its cache of images."""
        self._sent_images = SentImages()

    async def get(self, path: str) -> Any:
        """Return the JSON at a path, which the server has at hand; errors are those of `post`."""
        return await self._request("GET", path, total_timeout=_METADATA_TIMEOUT)

    async def post(self, path: str, body: Any = None, **query: str) -> Any:
        """Post a request and return the JSON of the response, None if it is empty.

        Raises ServerError if the server times out, fails (5xx) or returns no JSON; ServerUnreachable without a
        connection, ServerBusy if it is overloaded; EngineError if it refuses the request (4xx). Cancelling makes the
        server abort the request.
        """
        return await self._request("POST", path, body, query)

    async def post_again(self, path: str, body: Any = None, **query: str) -> Any:
        """Post a request that may be repeated: as `post`, but retry up to two failures, except of the connecting."""
        for pause in _RETRY_PAUSES:
            try:
                return await self.post(path, body, **query)
            except ServerUnreachable:
                raise  # nothing listens there: other servers don't wait for it
            except ServerError:
                await asyncio.sleep(pause)
        return await self.post(path, body, **query)

    async def check_path(self, path: str) -> None:
        """Check that a POST path exists: a GET returns 405 there, and 404 at a missing path.

        Raises ServerError or EngineError.
        """
        try:
            await self._control_client.request("GET", path, parse=lambda content: None, total_timeout=_METADATA_TIMEOUT)
        except RequestFailed as error:
            if error.status != 405:
                raise self._convert_error(path, error) from error

    async def _request(
        self,
        method: str,
        path: str,
        body: Any = None,
        query: Mapping[str, str] | None = None,
        total_timeout: float | None = None,
    ) -> Any:
        client = self._client if path == self.api.GENERATE_PATH else self._control_client
        try:
            return await client.request(
                method,
                path,
                body,
                query=query,
                parse=lambda content: content,
                is_json=path not in self.api.TEXT_PATHS,
                total_timeout=total_timeout,
            )
        except RequestFailed as error:
            raise self._convert_error(path, error) from error

    def _convert_error(self, path: str, error: RequestFailed) -> Exception:
        status, message = error.status, f": {error.server_message}" if error.server_message else ""
        if status in _BUSY_STATUS_CODES:
            return ServerBusy(f"{self.url} is overloaded ({status}{message})")
        if status == 404 and self.adapter and path == self.api.GENERATE_PATH:
            return ServerError(f"{self.url} doesn't have the adapter {self.adapter}: it was restarted")
        if status in (404, 405):
            messages = self.api.MESSAGES
            hint = messages.missing_path_hints.get(path, f"give the address of {messages.description}")
            return EngineError(f"{self.url} has no {path}; {hint}", key=SERVERS_KEY, value=self.url)
        if 400 <= status < 500:
            refusal = f"{self.url} refused a request to {path} with {status}{message}"
            return EngineError(refusal, key=SERVERS_KEY, value=self.url)
        if status == 200 and not error.is_retryable:  # too large: the same request would have the same response
            return EngineError(f"{self.url} {error}", key=SERVERS_KEY, value=self.url)
        if status >= 500:
            return ServerError(f"{self.url} failed: {path} returned {status}{message}")
        if error.is_local:
            hint = "run fewer rollouts at a time, or raise the limit of open files (ulimit -n)"
            return ServerBusy(f"{self.url} {error}; {hint}")
        kind = ServerTimeout if error.is_timeout else ServerUnreachable if error.is_unreachable else ServerError
        return kind(f"{self.url} {error}")

    async def close(self) -> None:
        """Close the connections; unfinished requests fail."""
        await self._client.close()
        await self._control_client.close()


class SentImages:
    """Which images one server has by their keys, by what was sent, and which are being sent."""

    def __init__(self) -> None:
        self._sent: LRUCache[str, None] = LRUCache(_MAX_SENT_IMAGES)
        self._num_uploads: Counter[str] = Counter()

    def find_omitted(self, keys: Collection[str]) -> set[str]:
        """Return the keys of images that needn't be sent: the server has them, or another request sends them."""
        return {key for key in keys if self._num_uploads[key] or key in self._sent}

    @contextlib.contextmanager
    def record_upload(self, keys: Collection[str]) -> Iterator[None]:
        """Count images as being sent inside the block, and as sent if it succeeds."""
        self._num_uploads.update(keys)
        try:
            yield
            for key in keys:
                self._sent.put(key, None)
        finally:
            self._num_uploads.subtract(keys)
            self._num_uploads = +self._num_uploads  # without zeros

    def is_uploading(self, keys: Collection[str]) -> bool:
        """Return whether another request sends one of these images."""
        return any(self._num_uploads[key] for key in keys)

    def forget(self, keys: Collection[str], *, with_uploads: bool = False) -> None:
        """Send these images again, and, `with_uploads`, also those that another request sends."""
        for key in keys:
            self._sent.remove(key)
            if with_uploads:
                self._num_uploads.pop(key, None)


# ---- parsing and validating completions ------------------------------------------------------------------------------


def parse_ids(value: Any) -> tuple[int, ...]:
    """Parse a JSON list of token ids. Raises TypeError if it is not one."""
    if not isinstance(value, list) or not {*map(type, value)} <= {int}:
        raise TypeError
    return tuple(value)


def parse_logprob(value: Any) -> float:
    """Parse a logprob of a JSON response. Raises TypeError if it is no number."""
    if type(value) not in (int, float):
        raise TypeError
    return float(value)


def parse_version_spans(value: Any) -> tuple[tuple[str, int, int], ...]:
    """Parse weight version spans, which vLLM and SGLang write alike. Raises LookupError, TypeError or ValueError."""
    return tuple((str(span["version"]), int(span["start"]), int(span["end"])) for span in value)


def _find_problem(
    reply: ServerReply, sampling: SamplingParams, vocab_size: int, has_stop_id: bool, is_aborted: bool
) -> str | None:
    """Return what is wrong with a sampled sequence, None if it is valid."""
    tokens, logprobs = reply.tokens, reply.logprobs
    if not (0 if is_aborted else 1) <= len(tokens) <= sampling.max_tokens:
        return f"it has {len(tokens)} tokens, not 1 to {sampling.max_tokens}"
    if len(logprobs) != len(tokens) or not all(-9999 < value <= 1e-4 for value in logprobs if not math.isnan(value)):
        return "it must have one finite logprob of at most 0 per token"
    if any(map(math.isnan, logprobs)):
        return "a logprob is NaN"
    if not all(0 <= token < vocab_size for token in tokens):
        return f"it contains an id outside of the vocabulary of {vocab_size}"
    if not set(sampling.forbidden_ids).isdisjoint(tokens):
        return "it contains a forbidden id"
    if not set(sampling.stop_ids).isdisjoint(tokens[:-1]):
        return "it continues after a stop id"
    if not has_stop_id and not is_aborted and len(tokens) < sampling.max_tokens:
        return f"it ends ({reply.finish_reason}) after {len(tokens)} tokens, without a stop id"
    return None


def _compute_token_versions(
    spans: Sequence[tuple[str, int, int]], length: int, version_by_label: Mapping[str, int], url: str
) -> tuple[int, ...]:
    """Return the version of every token, from contiguous spans [start, end) that must cover all tokens."""
    unknown = [label for label, _, _ in spans if label not in version_by_label]
    if unknown:
        # ServerError: in the next handshake the server loads this run's weights again.
        raise ServerError(
            f"{url} sampled from the weights {unknown[0]!r}: it was restarted, or another run updates its weights"
        )
    starts, ends = [start for _, start, _ in spans], [end for _, _, end in spans]
    if not spans or [*starts, length] != [0, *ends] or sorted([0, *ends]) != [0, *ends]:
        raise ServerError(f"{url} returned a malformed completion: its weight versions don't cover the tokens")
    return tuple(version_by_label[label] for label, start, end in spans for _ in range(start, end))


def _check_prompt_token_ids(server_ids: Sequence[int], ledger_ids: Sequence[int], url: str) -> None:
    """Raise BrokenEngineError if the server's prompt differs from the ledger; show both around the first difference."""
    if tuple(server_ids) == tuple(ledger_ids):
        return
    pairs = zip(server_ids, ledger_ids, strict=False)
    shorter = min(len(server_ids), len(ledger_ids))
    index = next((i for i, (server_id, ledger_id) in enumerate(pairs) if server_id != ledger_id), shorter)
    window = slice(max(index - _NUM_SHOWN_IDS, 0), index + _NUM_SHOWN_IDS)
    raise BrokenEngineError(
        f"the prompt of {url} differs from the ledger from token {index} on: the server has {len(server_ids)} tokens, "
        f"…{list(server_ids[window])}…, the ledger {len(ledger_ids)}, …{list(ledger_ids[window])}…; training on this "
        "would be wrong. Serve the checkpoint that is trained, with its own processor, and keep images within its "
        "pixel bounds",
        key=SERVERS_KEY,
        value=url,
    )
