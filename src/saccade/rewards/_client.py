"""Chat completions of an OpenAI-compatible server, over HTTP; the only user of httpx among the rewards.

    ask ─┐                ┌─ POST ── an answer ─────────────────────────────> its text
    ask ─┼─ at most ──────┼─ POST ── 429, 5xx, no answer in time ── wait ──┐
    ask ─┘  `at_once`     └─ POST ── 400, 401, 404 ──> NoAnswer            │
                 ▲                                                         │
                 └──── again, `retries` times, then NoAnswer ──────────────┘

The connections are open while somebody waits for an answer: whoever comes first opens them, the last one closes them.
So nothing is bound to an event loop that is gone, and nobody has to be told that the work is over.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

_LONGEST_WAIT = 60.0  # seconds between two attempts
_AGAIN = frozenset({408, 409, 425, 429, *range(500, 600)})


class NoAnswer(Exception):
    """The server gave no answer; the text says why, in words for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failure:
    """Why an attempt failed, whether another may do better, and how many seconds the server wants to be left alone."""

    reason: str
    again: bool = True
    rest: float = 0.0


@dataclass(slots=True, kw_only=True)
class _Session:
    """What those who wait at the same time share."""

    client: httpx.AsyncClient
    gate: asyncio.Semaphore
    users: int = 0


@dataclass(slots=True, kw_only=True)
class Endpoint:
    """A server: `url` is its base, such as http://127.0.0.1:8000/v1, `timeout` and `wait` are seconds.

    The n-th retry comes after `wait` * 2^(n - 1) seconds or when the server says, but within a minute. `timeout` is for
    the whole of an attempt, however slowly the server talks. Proxies are those of `proxy`, never of the environment.
    """

    url: str
    key: str
    timeout: float
    retries: int
    wait: float
    at_once: int
    proxy: str = ""
    _session: _Session | None = None

    async def ask(self, body: Mapping[str, Any]) -> str:
        """The text of the answer to a request. Raises NoAnswer."""
        failure = _Failure(reason="was never asked")
        async with self._shared() as session:
            for attempt in range(self.retries + 1):
                if attempt:
                    pause = max(self.wait * 2 ** (attempt - 1), failure.rest)
                    await asyncio.sleep(min(pause, _LONGEST_WAIT))
                async with session.gate:
                    said = await self._attempt(session.client, body)
                if isinstance(said, str):
                    return said
                failure = said
                if not failure.again:
                    break
        raise NoAnswer(f"{failure.reason} ({attempt + 1} attempts)" if attempt else failure.reason)

    async def _attempt(self, client: httpx.AsyncClient, body: Mapping[str, Any]) -> str | _Failure:
        try:
            async with asyncio.timeout(self.timeout):
                reply = await client.post(f"{self.url.rstrip('/')}/chat/completions", json=dict(body))
        except TimeoutError:
            return _Failure(reason=f"did not answer within {self.timeout:g} seconds")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            return _Failure(reason=f"can't be reached: {' '.join(str(error).split()) or type(error).__name__}"[:200])
        if reply.status_code != 200:
            reason = f"answered {reply.status_code} {reply.reason_phrase}"
            return _Failure(reason=reason, again=reply.status_code in _AGAIN, rest=_rest(reply))
        return _text(reply)

    @contextlib.asynccontextmanager
    async def _shared(self) -> AsyncIterator[_Session]:
        session = self._session or _Session(client=self._client(), gate=asyncio.Semaphore(self.at_once))
        self._session = session
        session.users += 1
        try:
            yield session
        finally:
            session.users -= 1
            if not session.users:
                self._session = None if self._session is session else self._session
                await session.client.aclose()

    def _client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            headers={"Authorization": f"Bearer {self.key}"} if self.key else {},
            timeout=None,  # the attempt as a whole has one
            limits=httpx.Limits(max_connections=self.at_once),
            proxy=self.proxy or None,
            trust_env=False,
        )


def _rest(reply: httpx.Response) -> float:
    """The seconds of a Retry-After header; 0 where there is none, or a date."""
    wanted = reply.headers.get("Retry-After", "")
    return float(wanted) if wanted.isdecimal() else 0.0


def _text(reply: httpx.Response) -> str | _Failure:
    """The text of a completion."""
    try:
        said = reply.json()["choices"][0]["message"]["content"]
    except (ValueError, KeyError, IndexError, TypeError, RecursionError):
        said = None
    return said if isinstance(said, str) else _Failure(reason="answered something that is no chat completion")
