"""Chat completions of an OpenAI-compatible server, over HTTP: for judges, and for engines that take text.

    ask ─┐                ┌─ POST ── an answer ─────────────────────────────> Answer
    ask ─┼─ at most ──────┼─ POST ── 429, 5xx, no answer in time ── wait ──┐
    ask ─┘  `at_once`     └─ POST ── 400, 401, 404 ──> NoAnswer            │
                 ▲                                                         │
                 └──── again, `retries` times, then NoAnswer ──────────────┘

The connections are open while somebody waits for an answer: whoever comes first opens them, the last one closes them.
So nothing is bound to an event loop that is gone, and nobody has to be told that the work is over.
"""

import asyncio
import contextlib
import os
import re
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx

from saccade.errors import ConfigError

T = TypeVar("T")
_LONGEST_WAIT = 60.0  # seconds between two attempts
_WANTED = {"chat/completions": "chat completion", "models": "list of models"}
_AGAIN = frozenset({408, 409, 425, 429, *range(500, 600)})


class NoAnswer(Exception):
    """The server gave no answer; the text says why, in words for people.

    `status` is that of its last reply (0: there was none), `said` its own words; `late` is true where it can be
    reached and took too long.
    """

    def __init__(self, text: str, *, status: int = 0, said: str = "", late: bool = False) -> None:
        super().__init__(text)
        self.status, self.said, self.late = status, said, late


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A completion: its text, why it ended ("stop", "length", …), and its tokens as the server counts them (0: not)."""

    text: str
    finish: str = ""
    tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failure:
    """Why an attempt failed, whether another may do better, and how many seconds the server wants to be left alone."""

    reason: str
    again: bool = True
    rest: float = 0.0
    status: int = 0
    said: str = ""
    late: bool = False


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

    async def ask(self, body: Mapping[str, Any]) -> Answer:
        """The answer to a request. Raises NoAnswer."""
        return await self._send("POST", "chat/completions", body, _answer)

    async def models(self) -> list[dict[str, Any]]:
        """What the server says of each model that it offers, such as `[{"id": "m"}]`. Raises NoAnswer."""
        return await self._send("GET", "models", None, _models)

    async def _send(self, method: str, path: str, body: Mapping[str, Any] | None, read: Callable[[Any], T]) -> T:
        """What is read from the answer, by a function that raises where there is nothing to be read."""
        failure = _Failure(reason="was never asked")
        async with self._shared() as session:
            for attempt in range(self.retries + 1):
                if attempt:
                    pause = max(self.wait * 2 ** (attempt - 1), failure.rest)
                    await asyncio.sleep(min(pause, _LONGEST_WAIT))
                async with session.gate:
                    said = await self._attempt(session.client, method, path, body)
                found = said if isinstance(said, _Failure) else _read(said, read, _WANTED[path])
                if not isinstance(found, _Failure):
                    return found
                failure = found
                if not failure.again:
                    break
        text = f"{failure.reason} ({attempt + 1} attempts)" if attempt else failure.reason
        raise NoAnswer(text, status=failure.status, said=failure.said, late=failure.late)

    async def _attempt(
        self, client: httpx.AsyncClient, method: str, path: str, body: Mapping[str, Any] | None
    ) -> httpx.Response | _Failure:
        try:
            async with asyncio.timeout(self.timeout):
                reply = await client.request(method, f"{self.url.rstrip('/')}/{path}", json=body)
        except TimeoutError:
            return _Failure(reason=f"did not answer within {self.timeout:g} seconds", late=True)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            return _Failure(reason=f"can't be reached: {' '.join(str(error).split()) or type(error).__name__}"[:200])
        status = reply.status_code
        if status == 200:
            return reply
        reason = f"answered {status} {reply.reason_phrase}"
        return _Failure(reason=reason, again=status in _AGAIN, rest=_rest(reply), status=status, said=_words(reply))

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


def _read(reply: httpx.Response, read: Callable[[Any], T], what: str) -> T | _Failure:
    try:
        return read(reply.json())
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return _Failure(reason=f"answered something that is no {what}", status=200)


def _rest(reply: httpx.Response) -> float:
    """The seconds of a Retry-After header; 0 where there is none, or a date."""
    wanted = reply.headers.get("Retry-After", "")
    return float(wanted) if wanted.isdecimal() else 0.0


def _words(reply: httpx.Response) -> str:
    """What a server says of its refusal, shortened; "" where it says nothing."""
    try:
        said = reply.json()
        error = said.get("error", said)
        text = str(error.get("message") or error.get("detail") or error) if isinstance(error, dict) else str(error)
    except (ValueError, AttributeError, RecursionError):
        text = reply.text
    return " ".join(text.split())[:300]


def _answer(reply: Any) -> Answer:
    """A completion; raises what reading something else raises."""
    choice, usage = reply["choices"][0], reply.get("usage") or {}
    text, finish = choice["message"]["content"], str(choice.get("finish_reason") or "")
    if text is None and finish == "length":  # all went into thoughts that the server keeps to itself
        text = ""
    if not isinstance(text, str):
        raise TypeError("a completion without text")
    return Answer(text=text, finish=finish, tokens=max(int(usage.get("completion_tokens") or 0), 0))


def _models(reply: Any) -> list[dict[str, Any]]:
    """The models that are offered; raises what reading something else raises."""
    return [{**each, "id": str(each["id"])} for each in reply["data"]]


def key_of(variable: str, place: str) -> str:
    """The key that an environment variable holds; "" for no variable. Raises ConfigError, naming `place`."""
    # who put the key itself into a recipe must not find it in a log as well
    if variable and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", variable):
        raise ConfigError(f"{place}: key_variable must be the name of an environment variable, not a key")
    if variable and not os.environ.get(variable, "").strip():
        raise ConfigError(f"{place}: the environment variable {variable} must hold the server's key; it is not set")
    return os.environ[variable].strip() if variable else ""
