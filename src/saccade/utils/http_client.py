"""The HTTP client of judges, chat APIs and inference servers, with one retry policy.

    request ─┐                       ┌─ 200 ──────────────────────────────────────> parsed response
    request ─┼─ `max_concurrency` ───┼─ 408, 409, 425, 429, 5xx, timeout ── backoff ──┐
    request ─┘  at a time ▲          └─ 400, 401, 404 ──> RequestFailed               │
                          │                                                           │
                          └──── up to `max_retries` retries, then RequestFailed ──────┘

A request that this machine has no room for (open files, ports, memory) waits for room; its retries don't count.
Connections are divided among pools of `_POOL_SIZE`, because httpcore looks at all connections of a pool for each
request: one pool of 1,024 costs several times the CPU time of many small ones.
"""

import asyncio
import contextlib
import errno
import functools
import itertools
import json
import os
import re
import sys
import time
import zlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from importlib.util import find_spec
from typing import Any, TypeVar

import httpx

from saccade.utils.async_utils import yield_to_loop
from saccade.utils.text import escape_control_characters, redact

if find_spec("sniffio") is None:
    sys.modules["sniffio"] = None  # type: ignore[assignment]  # httpcore tries to import it several times per request
T = TypeVar("T")
_MAX_BACKOFF = 60.0  # seconds between two tries
_MAX_RESPONSE_BYTES = 8 * 2**20  # of a response; a chat completion of 100,000 tokens has less than one
_MIN_PART_BYTES = 64  # that a part of a response counts as at least: a part of one byte costs 20 µs, too
_MAX_PORT = 65535
_MAX_ERROR_BYTES = 2**16  # of a response with another status than 200
_MAX_ERROR_CHARS = 300  # of a server's error message
_POOL_SIZE = 4  # connections of one httpx client
_CHUNK_BYTES = 2**18  # of a request's body that is sent at once: other requests run in between
_LOCAL_SHORTAGES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})
_SHORTAGE_PAUSE = 0.2  # seconds between two tries of a request that this machine has no room for
_CONNECTION_ERRORS = (httpx.ConnectError, httpx.ProxyError, httpx.UnsupportedProtocol, httpx.InvalidURL)
_RETRYABLE_STATUSES = frozenset({408, 409, 425, 429, *range(500, 600)})


@dataclass(eq=False, repr=False)
class RequestFailed(Exception):
    """A request failed; the text is the reason, without the server's address."""

    reason: str
    _: KW_ONLY
    status: int = 0  # of the last response; 0: none
    server_message: str = ""  # the error text of the response
    is_timeout: bool = False  # the server is reachable but took too long
    is_local: bool = False  # this machine has no room for the request: too many open files, for example
    is_unreachable: bool = False  # no connection to the server could be opened
    is_retryable: bool = True
    retry_after: float = 0.0  # the pause in seconds that the server demands


def compute_backoff(first: float, num_failures: int, *, at_least: float = 0.0, at_most: float = _MAX_BACKOFF) -> float:
    """Return the seconds to wait after so many failures: `first`, doubled each time, within bounds."""
    return float(min(max(first * 2 ** min(num_failures - 1, 30), at_least), at_most))


def is_server_address(url: str) -> bool:
    """Return whether the URL has http or https as its scheme, a host, a possible port if any, and no white space."""
    try:
        parts = httpx.URL(url)
    except httpx.InvalidURL:
        return False
    has_port = parts.port is None or 1 <= parts.port <= _MAX_PORT
    return parts.scheme in {"http", "https"} and bool(parts.host) and has_port and not re.search(r"\s", url)


@dataclass(slots=True, kw_only=True)
class _Session:
    """The connections that concurrent requests share; `clients` holds each pool's number of requests."""

    create_client: Callable[[], httpx.AsyncClient]
    clients: dict[httpx.AsyncClient, int] = field(default_factory=dict)
    limit: contextlib.AbstractAsyncContextManager[Any]
    stopped: asyncio.Event = field(default_factory=asyncio.Event)  # no request is sent any more
    num_users: int = 0

    @contextlib.contextmanager
    def choose_client(self) -> Iterator[httpx.AsyncClient]:
        """Yield the first client with a free connection, counting the request."""
        client = next((client for client, count in self.clients.items() if count < _POOL_SIZE), None)
        client = client or self.create_client()
        self.clients[client] = self.clients.get(client, 0) + 1
        try:
            yield client
        finally:
            self.clients[client] -= 1

    async def close(self) -> None:
        """Close all connections."""
        for client in self.clients:
            await client.aclose()


@dataclass(slots=True, kw_only=True, eq=False)
class HttpClient:
    """A client of one server at `base_url`.

    A body is JSON-like, or a list of the parts of a JSON text, as bytes. `timeout` and `retry_backoff` are in seconds.
    `timeout` limits a whole request, from when it is sent, including a slowly streamed response, and
    `max_response_bytes` its size, before and after decompression. `api_key` is removed from all texts of the server.
    The n-th retry starts after `retry_backoff` * 2^(n - 1) seconds, or after the server's Retry-After if longer, but
    within a minute. At most `max_concurrency` requests run at a time (0: no limit). Proxies come from `proxy`, never
    from environment variables.

    Connections are open only while requests are pending, so that none is bound to a closed event loop and the client
    needs no explicit close; with `keeps_connections` they stay open until `close`.
    """

    base_url: str
    timeout: float
    api_key: str = ""
    max_retries: int = 0
    retry_backoff: float = 1.0
    max_concurrency: int = 0
    proxy: str = ""
    max_response_bytes: int = _MAX_RESPONSE_BYTES
    keeps_connections: bool = False
    _session: _Session | None = None

    async def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        query: Mapping[str, str] | None = None,
        parse: Callable[[Any], T],
        expected: str = "JSON",
        is_json: bool = True,
        total_timeout: float | None = None,
    ) -> T:
        """Send a request; return what `parse` makes of the response's JSON (None: it is empty). Raises RequestFailed.

        With `is_json=False` the response is a text, and `parse` receives None. `total_timeout` seconds limit all
        attempts and the pauses between them; then the last failure is raised.

        `parse` raises ValueError, LookupError, TypeError, AttributeError or ArithmeticError if the JSON is not as
        `expected`. A response that is too large isn't requested again. When cancelled, close the connection, which
        makes inference servers abort the request.
        """

        def parse_content(content: bytes) -> T:
            try:
                return parse(redact(json.loads(content), self.api_key) if content and is_json else None)
            except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError):
                raise RequestFailed(f"answered something that is no {expected}", status=200) from None

        failures: list[RequestFailed] = []
        try:
            async with asyncio.timeout(total_timeout):
                return await self._send_until_parsed(method, path, body, query, parse_content, failures)
        except TimeoutError:
            problem = f"did not answer within {total_timeout:g} seconds"
            raise failures[-1] if failures else RequestFailed(problem, is_timeout=True) from None

    async def _send_until_parsed(
        self,
        method: str,
        path: str,
        body: Any,
        query: Mapping[str, str] | None,
        parse_content: Callable[[bytes], T],
        failures: list[RequestFailed],
    ) -> T:
        """Send a request until a response can be parsed or its failure is final; append the others to `failures`."""
        async with self._acquire_session() as session:
            for attempt in itertools.count(1):
                try:
                    async with session.limit:
                        if session.stopped.is_set():
                            raise RequestFailed(
                                "was not queried: the client sends no more requests", is_retryable=False
                            )
                        content = await self._send(session, method, path, body, query)
                    await yield_to_loop()
                    return parse_content(content)
                except RequestFailed as error:
                    if not error.is_retryable or attempt > self.max_retries:
                        error.args = (f"{error} ({attempt} attempts)" if attempt > 1 else str(error),)
                        raise
                    failures.append(error)
                    pause = compute_backoff(self.retry_backoff, attempt, at_least=error.retry_after)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(session.stopped.wait(), pause)
        raise AssertionError

    async def fetch(self, path: str) -> bytes:
        """Return the body of one GET request, without retries. Raises RequestFailed."""
        async with self._acquire_session() as session:
            return await self._send(session, "GET", path, None, None)

    def stop_sending(self) -> None:
        """Fail the requests that wait for others, or for another attempt; those that were sent continue."""
        if self._session is not None:
            self._session.stopped.set()

    async def _send(
        self, session: _Session, method: str, path: str, body: Any, query: Mapping[str, str] | None
    ) -> bytes:
        """Send one request and return the body of a response with the status 200. Raises RequestFailed."""
        deadline = time.monotonic() + self.timeout
        while True:
            try:
                with session.choose_client() as client:
                    return await self._send_once(client, method, path, body, query)
            except RequestFailed as error:
                if not error.is_local or time.monotonic() > deadline or session.stopped.is_set():
                    raise
                await asyncio.sleep(_SHORTAGE_PAUSE)

    async def _send_once(
        self, client: httpx.AsyncClient, method: str, path: str, body: Any, query: Mapping[str, str] | None
    ) -> bytes:
        url = f"{self.base_url.rstrip('/')}/{path.lstrip('/')}"
        try:
            for address in filter(None, (url, self.proxy)):
                if (httpx.URL(address).port or 0) > _MAX_PORT:  # connecting would raise an OverflowError
                    raise httpx.InvalidURL(f"a port is at most {_MAX_PORT}")
            async with (
                asyncio.timeout(self.timeout),
                client.stream(method, url, params=query, **_encode_body(body)) as response,
            ):
                is_success = response.status_code == 200
                max_bytes = self.max_response_bytes if is_success else _MAX_ERROR_BYTES
                content, is_truncated = await _read_body(response, max_bytes)
        except TimeoutError:
            raise RequestFailed(f"did not answer within {self.timeout:g} seconds", is_timeout=True) from None
        except zlib.error:
            raise RequestFailed("answered with an invalid compression", status=response.status_code) from None
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            codes = {cause.errno or 0 for cause in _iterate_causes(error) if isinstance(cause, OSError)}
            if shortages := sorted(codes & _LOCAL_SHORTAGES):
                reason = f"was not queried: this machine has no room for a connection ({os.strerror(shortages[0])})"
                raise RequestFailed(reason, is_local=True) from error
            reason = _clean(str(error), self.api_key) or type(error).__name__
            is_unreachable = isinstance(error, _CONNECTION_ERRORS)
            problem = "can't be reached" if is_unreachable else "sent no complete HTTP response"
            raise RequestFailed(f"{problem}: {reason}"[:200], is_unreachable=is_unreachable) from error
        if is_success and is_truncated:
            size = f"{self.max_response_bytes / 2**20:g} MiB"
            raise RequestFailed(f"answered with more than {size}, or in too many parts", status=200, is_retryable=False)
        if is_success:
            return content
        retry_after = response.headers.get("Retry-After", "")  # seconds, or a date, which is ignored
        raise RequestFailed(
            f"answered {response.status_code} {_clean(response.reason_phrase, self.api_key)}",
            status=response.status_code,
            server_message=_extract_error_message(content, self.api_key),
            is_retryable=response.status_code in _RETRYABLE_STATUSES,
            retry_after=float(retry_after) if retry_after.isdecimal() else 0.0,
        )

    @contextlib.asynccontextmanager
    async def _acquire_session(self) -> AsyncIterator[_Session]:
        session = self._session = self._session or _Session(
            create_client=self._create_client,
            limit=asyncio.Semaphore(self.max_concurrency) if self.max_concurrency else contextlib.nullcontext(),
        )
        session.num_users += 1
        try:
            yield session
        finally:
            session.num_users -= 1
            if not session.num_users and not self.keeps_connections:
                self._session = None if self._session is session else self._session
                await session.close()

    def _create_client(self) -> httpx.AsyncClient:
        is_encrypted = self.base_url.startswith("https:") or self.proxy.startswith("https:")
        return httpx.AsyncClient(
            headers={
                "Accept-Encoding": "gzip",
                **({"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}),
            },
            timeout=None,  # `_send_once` limits the whole request
            limits=httpx.Limits(max_connections=None),  # `_Session.choose_client` limits them
            proxy=self.proxy or None,
            trust_env=False,
            verify=_load_certificates() if is_encrypted else False,  # not needed: loading them takes a while
        )

    async def close(self) -> None:
        """Close the connections; unfinished requests fail."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()


def fetch(url: str, *, timeout: float) -> bytes | None:
    """Return the body of one GET request; None if the status isn't 200 or the server fails.

    Block at most `timeout` seconds, whatever the server sends.
    """
    folder, _, name = url.rpartition("/")
    client = HttpClient(base_url=folder, timeout=timeout, max_response_bytes=_MAX_ERROR_BYTES)
    with contextlib.suppress(RequestFailed):
        return asyncio.run(client.fetch(name))
    return None


@functools.cache
def _load_certificates() -> Any:
    return httpx.create_ssl_context(trust_env=False)


def _encode_body(body: Any) -> dict[str, Any]:
    """Return httpx's arguments for a body: JSON-like, or the parts of a JSON text, which are sent in chunks."""
    is_encoded = isinstance(body, list) and all(isinstance(part, bytes) for part in body)
    if not is_encoded:
        return {"json": body}
    headers = {"Content-Type": "application/json", "Content-Length": str(sum(map(len, body)))}
    return {"content": _iterate_chunks(body), "headers": headers}


async def _iterate_chunks(parts: Sequence[bytes]) -> AsyncIterator[bytes]:
    pending = bytearray()
    for part in parts:
        for start in range(0, len(part), _CHUNK_BYTES):
            pending += part[start : start + _CHUNK_BYTES]
            if len(pending) >= _CHUNK_BYTES:
                yield bytes(pending)
                pending.clear()
    yield bytes(pending)


def _iterate_causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and all errors that caused it."""
    pending, seen = [error], set[int]()
    while pending:
        cause = pending.pop()
        if id(cause) in seen:
            continue
        seen.add(id(cause))
        yield cause
        pending += cause.exceptions if isinstance(cause, BaseExceptionGroup) else ()
        pending += filter(None, (cause.__cause__, cause.__context__))


async def _read_body(response: httpx.Response, max_bytes: int) -> tuple[bytes, bool]:
    """Return the first `max_bytes` bytes of a response's decompressed body, and whether that isn't all of it.

    Stop at `max_bytes` compressed bytes, too, and at as many tiny parts as cost that much. Raises zlib.error.
    """
    # httpx would decompress whole chunks, each of which may grow a thousandfold.
    encoding = response.headers.get("Content-Encoding", "identity").strip().lower()
    decompressor = None if encoding in ("", "identity") else zlib.decompressobj(wbits=32 + zlib.MAX_WBITS)
    parts: list[bytes] = []
    num_raw = num_decoded = 0
    async for chunk in response.aiter_raw():
        num_raw += max(len(chunk), _MIN_PART_BYTES)
        parts.append(decompressor.decompress(chunk, max_bytes + 1 - num_decoded) if decompressor else chunk)
        num_decoded += len(parts[-1])
        if max(num_raw, num_decoded) > max_bytes:
            return b"".join(parts)[:max_bytes], True
    return b"".join(parts), False


def _extract_error_message(content: bytes, api_key: str) -> str:
    """Return the error message of a response's body, shortened and without the key; "" if it has none."""
    try:
        body = json.loads(content)
        error = body.get("error") or body
        fields = error if isinstance(error, dict) else {}
        text = str(fields.get("message") or fields.get("detail") or error)
    except (ValueError, AttributeError, RecursionError):
        text = content.decode("utf-8", "replace")
    return _clean(text, api_key)[:_MAX_ERROR_CHARS]


def _clean(text: str, api_key: str) -> str:
    """Return a server's text as one line that is safe to show and store."""
    return escape_control_characters(" ".join(redact(text, api_key).split()))
