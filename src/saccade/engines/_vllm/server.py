"""One vLLM server over HTTP: requests that end in a reply or in words for people."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from saccade.errors import BrokenEngineError, ConfigError, EngineError

_BUSY = frozenset({408, 425, 429, 503})
GENERATE = "/inference/v1/generate"
MEND = "start one with `saccade serve MODEL`, or name others in engine.settings.servers"
_DEV_MODE = "start it with VLLM_SERVER_DEV_MODE=1 in its environment, as `saccade serve` does"
_LACKS = {  # what a server without a path is
    GENERATE: "start it with vLLM's flag --enable-scale-out, as `saccade serve` does",
    "/pause": _DEV_MODE,
    "/is_paused": _DEV_MODE,
}


def check_servers(servers: Sequence[str]) -> None:
    """Raises ConfigError where there is no server to ask."""
    if not servers:
        raise ConfigError("the engine vllm has no servers; name one in engine.settings.servers")


class Trouble(Exception):
    """The server failed, not the request: another server, or the same one later, may do better."""


class Busy(Trouble):
    """The server is well and has too much to do."""


class Server:
    """A server at `url`, such as http://127.0.0.1:8000; an attempt as a whole may take `timeout` seconds.

    `load` is how many requests it has from us, `greeted` how often it came up, `context` how many tokens a conversation
    may have, `versions` the version of ours that each of its labels of weights stands for. The pool and the greeting
    set them.
    """

    def __init__(self, url: str, timeout: float) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"a vLLM server can't be at {url!r}; give its address, such as http://127.0.0.1:8000")
        self.url, self._timeout = url.rstrip("/"), timeout
        self.up, self.load, self.greeted, self.context = False, 0, 0, 0
        self.reason = "it was not asked yet"
        self.versions: dict[str, int] = {}
        self._client: httpx.AsyncClient | None = None

    def check_room(self, tokens: int) -> None:
        """Raises BrokenEngineError where a conversation of so many tokens doesn't fit."""
        if tokens > self.context:
            raise BrokenEngineError(
                f"{self.url} takes {self.context} tokens, and a conversation may have {tokens}; start it with "
                f"--context {tokens}, or lower agent.settings.context_tokens"
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

    async def _send(self, method: str, path: str, body: Any, query: Mapping[str, str], empty: bool = False) -> Any:
        if self._client is None:
            # As many connections as there are conversations; proxies of the environment are for other machines.
            self._client = httpx.AsyncClient(
                timeout=None, limits=httpx.Limits(max_connections=None), trust_env=False, base_url=self.url
            )
        try:
            async with asyncio.timeout(self._timeout):
                reply = await self._client.request(method, path, json=body, params=dict(query))
        except TimeoutError:
            raise Trouble(f"{self.url} did not answer within {self._timeout:g} seconds") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            why = " ".join(str(error).split()) or type(error).__name__
            raise Trouble(f"{self.url} can't be reached: {why}"[:300]) from error
        if reply.status_code != 200:
            raise self._refusal(path, reply)
        if empty and not reply.content:
            return None
        try:
            return reply.json()
        except (ValueError, RecursionError):
            raise Trouble(f"{self.url} answered {path} with something that is no JSON") from None

    def _refusal(self, path: str, reply: httpx.Response) -> Exception:
        status, said = reply.status_code, _message(reply)
        if status in _BUSY:
            return Busy(f"{self.url} is busy ({status}{said})")
        if status >= 500:
            return Trouble(f"{self.url} broke: it answered {path} with {status}{said}")
        if status in (404, 405):
            return EngineError(
                f"{self.url} doesn't know {path}; {_LACKS.get(path, 'give the address of a vLLM server')}"
            )
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
        text = str(said["error"]["message"] if isinstance(said.get("error"), dict) else said.get("detail") or said)
    except (ValueError, KeyError, AttributeError, RecursionError):
        text = reply.text
    text = " ".join(text.split())
    return f": {text[:300]}" if text else ""
