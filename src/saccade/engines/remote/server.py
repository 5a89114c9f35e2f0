"""One server over HTTP: requests that end in a reply or in words for people."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import httpx

from saccade.errors import BrokenEngineError, ConfigError, EngineError
from saccade.ledger import Ledger
from saccade.protocols import Renderer
from saccade.types import Sampling

Pause = Literal["keep", "wait"]  # what becomes of replies under way when new weights come: they go on, or end first
_BUSY = frozenset({408, 425, 429, 503})


class Trouble(Exception):
    """The server failed, not the request: another server, or the same one later, may do better."""


class Busy(Trouble):
    """The server is well and has too much to do."""


class Cut(Exception):
    """The reply was given up so that new weights could come; with them it may begin anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """What people are told of a kind of server: its `name`, `one` of them, and how to `start` one.

    `lacks` is the mend where it lacks a path, `seeds` that where seeds decide nothing. A conversation of n tokens wants
    its `option` to be n + `spare`.
    """

    name: str
    one: str
    start: str
    option: str
    lacks: Mapping[str, str]
    spare: int = 0
    seeds: str = ""

    @property
    def mend(self) -> str:
        """What to do where a server is away."""
        return f"{self.start}, or name others in engine.settings.servers"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A reply as any kind of server says it: the ids that it read and sampled, and a logprob for each of these.

    `spans` are (label of the weights, first token, one past the last); `reason` is why it ends.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    spans: tuple[tuple[str, int, int], ...]
    reason: str


class Dialect(Protocol):
    """What is particular to one kind of server; a module with these names is one."""

    WORDS: Words
    GENERATE: str  # the path that samples

    def request(
        self,
        ledger: Ledger,
        sampling: Sampling,
        *,
        urls: Sequence[str],
        forbidden: Sequence[str],
        filters: Mapping[str, float],
    ) -> dict[str, Any]:
        """The body of a request: compact ids (the server expands them), one URL per picture, and how to sample.

        `forbidden` are the texts of `sampling.forbidden_ids`; `filters` what changes the distribution besides the
        temperature, such as top_p.
        """

    def read(self, said: Any) -> Reply:
        """What a server says to a request. Raises LookupError, TypeError or ValueError for what is no such reply."""

    async def about(self, server: "Server") -> str:
        """The checkpoint that is served; notes the server's context, and whether it is seeded.

        Raises LookupError, TypeError or ValueError where it doesn't say, Trouble or EngineError.
        """

    async def spelled(self, server: "Server", ids: Sequence[int]) -> str:
        """The text of ids, special tokens included. Raises LookupError or TypeError, Trouble or EngineError."""

    async def listen(self, server: "Server", renderer: Renderer) -> str:
        """The label of the server's weights.

        Raises BrokenEngineError where it reports other logprobs than it samples by, or less than must be known;
        LookupError, TypeError or ValueError for what is no reply; Trouble or EngineError.
        """

    async def check_orders(self, server: "Server") -> None:
        """See that it takes new weights; nothing of it is changed. Raises Trouble or EngineError."""

    async def load(self, server: "Server", folder: Path, label: str, pause: Pause) -> None:
        """Let it take weights from a folder, know them by a label, and forget what it made of the old ones.

        With `pause="wait"` what it is sampling ends first, that of others included if the server is not ours alone.
        Raises Trouble or EngineError where that fails; then it samples no mixture.
        """


class Orders(Protocol):
    """How servers of a kind are told to take weights through a group of processes; a module with these names is one.

    All raise Trouble or EngineError.
    """

    async def check(self, server: "Server") -> None:
        """See that it was started so that its processes can join a group; nothing of it is changed."""

    async def label(self, server: "Server") -> str:
        """The label of its weights. Trouble where they are a part of some and a part of others."""

    async def processes(self, server: "Server") -> int:
        """How many of its processes hold weights."""

    async def join(self, server: "Server", invitation: Mapping[str, Any], size: int) -> None:
        """Let these join a group of `size`, all but the first of which are its own; returns when all are there."""

    async def expect(self, server: "Server", values: Mapping[str, Any]) -> None:
        """Let it receive these tensors, in this order; returns when it has them."""

    async def load(self, server: "Server", label: str, pause: Pause, send: Callable[[], Awaitable[None]]) -> None:
        """Let it take all weights while `send` sends them, know them by a label, and forget what it made of the old.

        `pause` is that of Dialect.load. Where it fails in the middle the server is known by its label, and not used
        before it was started again.
        """


def check_servers(servers: Sequence[str], words: Words) -> None:
    """Raises ConfigError where there is no server to ask."""
    if not servers:
        raise ConfigError(f"the engine {words.name.lower()} has no servers; name one in engine.settings.servers")


class Server:
    """A server at `url`, such as http://127.0.0.1:8000; an attempt as a whole may take `timeout` seconds.

    `load` is how many requests it has from us, `greeted` how often it came up, `context` how many tokens a conversation
    may have, `seeded` whether seeds decide what it samples, `versions` the version of ours that each of its labels of
    weights stands for. The pool and the greeting set them.
    """

    def __init__(self, url: str, timeout: float, dialect: Dialect) -> None:
        if not url.startswith(("http://", "https://")):
            name = dialect.WORDS.name
            raise ConfigError(f"no {name} server can be at {url!r}; give its address, such as http://127.0.0.1:8000")
        self.url, self._timeout, self.dialect = url.rstrip("/"), timeout, dialect
        self.up, self.load, self.greeted, self.context = False, 0, 0, 0
        self.reason, self.seeded = "it was not asked yet", True
        self.versions: dict[str, int] = {}
        self._client: httpx.AsyncClient | None = None

    def check_room(self, tokens: int) -> None:
        """Raises BrokenEngineError where a conversation of so many tokens doesn't fit."""
        if tokens > self.context:
            words = self.dialect.WORDS
            raise BrokenEngineError(
                f"{self.url} takes {self.context} tokens, and a conversation may have {tokens}; start it with "
                f"{words.option} {tokens + words.spare}, or lower agent.settings.context_tokens"
            )

    async def get(self, path: str) -> Any:
        """The JSON at a path; see `post`."""
        return await self._send("GET", path, None, {})

    async def post(self, path: str, body: Any = None, *, empty: bool = False, **query: str) -> Any:
        """The JSON that is answered, or None where the answer may be `empty`.

        Raises Trouble where it can't be reached, takes too long, breaks or answers with no JSON, Busy where it asks for
        patience, EngineError where it refuses the request. A cancelled request is aborted by the server, which sees its
        connection close.
        """
        return await self._send("POST", path, body, query, empty)

    async def check_path(self, path: str) -> None:
        """See that orders can be posted to a path: asked to show it, a server says 405, and 404 where it lacks it.

        Raises Trouble or EngineError.
        """
        reply = await self._answer("GET", path, None, {})
        if reply.status_code not in (200, 405):
            raise self._refusal(path, reply)

    async def _send(self, method: str, path: str, body: Any, query: Mapping[str, str], empty: bool = False) -> Any:
        reply = await self._answer(method, path, body, query)
        if reply.status_code != 200:
            raise self._refusal(path, reply)
        if empty and not reply.content:
            return None
        try:
            return reply.json()
        except (ValueError, RecursionError):
            raise Trouble(f"{self.url} answered {path} with something that is no JSON") from None

    async def _answer(self, method: str, path: str, body: Any, query: Mapping[str, str]) -> httpx.Response:
        if self._client is None:
            # As many connections as there are conversations; proxies of the environment are for other machines.
            self._client = httpx.AsyncClient(
                timeout=None, limits=httpx.Limits(max_connections=None), trust_env=False, base_url=self.url
            )
        try:
            async with asyncio.timeout(self._timeout):
                return await self._client.request(method, path, json=body, params=dict(query))
        except TimeoutError:
            raise Trouble(f"{self.url} did not answer within {self._timeout:g} seconds") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            why = " ".join(str(error).split()) or type(error).__name__
            raise Trouble(f"{self.url} can't be reached: {why}"[:300]) from error

    def _refusal(self, path: str, reply: httpx.Response) -> Exception:
        status, said = reply.status_code, _message(reply)
        if status in _BUSY:
            return Busy(f"{self.url} is busy ({status}{said})")
        if status >= 500:
            return Trouble(f"{self.url} broke: it answered {path} with {status}{said}")
        if status in (404, 405):
            words = self.dialect.WORDS
            mend = words.lacks.get(path, f"give the address of {words.one}")
            return EngineError(f"{self.url} doesn't know {path}; {mend}")
        return EngineError(f"{self.url} refused a request to {path} with {status}{said}")

    async def close(self) -> None:
        """Close the connections; what still waits for an answer fails."""
        if self._client is not None:
            await self._client.aclose()
            self._client = None


def _message(reply: httpx.Response) -> str:
    """What the server says of its refusal, shortened, after a colon; nothing where it says nothing."""
    try:
        said = reply.json()
        error = said.get("error")
        told = error["message"] if isinstance(error, dict) else error or said.get("detail") or said.get("message")
        text = str(told or said)
    except (ValueError, KeyError, AttributeError, RecursionError):
        text = reply.text
    text = " ".join(text.split())
    return f": {text[:300]}" if text else ""
