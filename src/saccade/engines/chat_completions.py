"""Any server of OpenAI's chat completions, asked in words: for evaluation and `saccade ask`, never for training.

    agents ──a ledger of text ids──> messages, pictures as data URLs ──> the server's own template and tokens
           <── the reply's text, in as many ids as the server counts ──

What the server samples from is not known here: neither its tokens nor their logprobs come back, its template may leave
something out (thoughts of earlier turns, for example), and the same seed may give another reply.
"""

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from saccade.chat.text import TextRenderer, spell
from saccade.endpoint import Answer, Endpoint, NoAnswer, key_of
from saccade.engines._chat import check_settings, chosen, failure, sent
from saccade.engines._urls import Urls
from saccade.errors import ConfigError, EngineError
from saccade.ledger import Ledger
from saccade.protocols import MediaLibrary, TextEngine
from saccade.sections import Count, NotNegative, Positive, Whole
from saccade.types import Completion, Sampling, Stop

_ENDS = {"stop": Stop.STOP, "eos_token": Stop.STOP, "stop_sequence": Stop.STOP, "length": Stop.LENGTH}
_CONTINUING = {"vllm", "sglang"}  # servers, as they name themselves, that go on with an assistant's message
_SEEDS = 2**31  # what every server takes


class openai(TextEngine):
    """Asks the model called `model` (by default the only one there is) at `url`, such as http://127.0.0.1:8000/v1.

    Not token-exact: see `protocols.TextEngine`. `key_variable` names the environment variable that holds the key;
    `body` holds further fields of each request, such as `top_p`; `limit` is the server's name for the most tokens of a
    reply. `factor` is the side of a visual token in pixels, for sizing pictures and counting. `continues` says whether
    the server goes on with a reply that was begun for it, by `continue_final_message` (null: if it is vLLM or SGLang).
    A request is tried 1 + `retries` times, each for `seconds`, with pauses of `wait` seconds, then twice as long, and
    so on, or as long as the server says; at most `at_once` are under way.
    """

    def __init__(
        self,
        media: MediaLibrary,
        context: int = 0,
        *,
        url: str,
        model: str = "",
        key_variable: str = "",
        body: Mapping[str, Any] | None = None,
        limit: str = "max_tokens",
        factor: Count = 32,
        continues: bool | None = None,
        seconds: Positive = 600.0,
        retries: Whole = 4,
        wait: NotNegative = 1.0,
        at_once: Count = 32,
    ) -> None:
        check_settings(url, body or {}, limit)
        self.renderer: TextRenderer = TextRenderer(factor)
        self._urls = Urls(media)
        self._url, self._model, self._context, self._continues = url, model, context, continues
        self._body, self._limit, self._key_variable = dict(body or {}), limit, key_variable
        key = key_of(key_variable, "engines/openai")
        self._endpoint = Endpoint(url=url, key=key, timeout=seconds, retries=retries, wait=wait, at_once=at_once)
        self._met, self._meeting = False, asyncio.Lock()
        self._under_way: set[asyncio.Task[Answer]] = set()
        self._closed = False

    async def meet(self) -> str:
        """The name of the model. Raises ConfigError or BrokenEngineError where it can't be asked.

        A server that doesn't list its models is believed to have the one that was named.
        """
        async with self._meeting:
            if not self._met:
                card = chosen(await self._offered(), self._model, self._context, self._url)
                self._model = card["id"]
                if self._continues is None:
                    self._continues = card.get("owned_by") in _CONTINUING
                self._met = True
        return self._model

    async def _offered(self) -> list[dict[str, Any]]:
        try:
            return await self._endpoint.models()
        except NoAnswer as error:
            if self._model and error.status in (200, 404, 405, 501):
                return []
            raise failure(error, url=self._url, key_variable=self._key_variable, pictures=0) from error

    async def generate(self, ledger: Ledger, sampling: Sampling) -> Completion:
        """Ask for a reply; see protocols.TextEngine. What ends it is the server's own end of a turn.

        Raises EngineError where the request is refused or no answer comes, BrokenEngineError where no request can be
        answered, ConfigError for a reply that must go on from a prefix where the server can't do that.
        """
        *said, reply = self.renderer.messages(ledger) or (None,)
        if reply is None or reply.role != "assistant":
            raise EngineError("the ledger holds no question in text ids; render it with the engine's own renderer")
        model, started = await self.meet(), time.perf_counter()
        body: dict[str, Any] = {
            **{"model": model, "temperature": sampling.temperature, "seed": sampling.seed % _SEEDS},
            **{self._limit: sampling.max_tokens, **self._body},
        }
        if reply.text and not self._continues:
            raise ConfigError(
                f"{self._url} can't be made to begin a reply with {reply.text.strip()!r}: set agent.settings."
                "think_prefix=false, or engine.settings.continues=true if it takes continue_final_message"
            )
        if reply.text:
            said = [*said, reply]
            body |= {"add_generation_prompt": False, "continue_final_message": True}
        body["messages"] = [sent(each, self._urls) for each in said if each is not None]
        answer = await self._ask(body, pictures=len(ledger.pictures()))
        stop = _ENDS.get(answer.finish or "stop")
        if stop is None:
            raise EngineError(f"{self._url} ended a reply for a reason of its own: {answer.finish[:60]}")
        end = self.renderer.stop_ids if stop is Stop.STOP else ()
        # As many ids as the server counts; where it doesn't, what a reply that was cut must have.
        count = min(answer.tokens or (0 if end else sampling.max_tokens), sampling.max_tokens)
        tokens = (*spell(answer.text, max(count - len(end), 0)), *end)
        return Completion(tokens=tokens, logprobs=(), version=None, stop=stop, seconds=time.perf_counter() - started)

    async def _ask(self, body: Mapping[str, Any], *, pictures: int) -> Answer:
        if self._closed:
            raise EngineError("the engine is closed")
        asking = asyncio.ensure_future(self._endpoint.ask(body))
        self._under_way.add(asking)
        try:
            # Who is cancelled closes the connection, by which the server knows.
            return await asking
        except NoAnswer as error:
            raise failure(error, url=self._url, key_variable=self._key_variable, pictures=pictures) from error
        except asyncio.CancelledError:
            if self._closed:
                raise EngineError("the engine was closed while a reply was under way") from None
            raise
        finally:
            self._under_way.discard(asking)

    async def close(self) -> None:
        """Stop; what is under way fails."""
        self._closed = True
        for asking in self._under_way:
            asking.cancel()
        await asyncio.gather(*self._under_way, return_exceptions=True)
