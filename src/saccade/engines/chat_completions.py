"""Engine for any OpenAI-compatible chat completions server: for evaluation and `saccade ask`, not training.

    rollouts ──a ledger of messages──> messages, images as data URLs ──> the server's own template and tokens
             <── the reply's text, and its number of tokens ──

It is not token-exact: the server returns neither tokens nor logprobs, its template may omit parts (such as the thoughts
of earlier turns), and the same seed may give another reply.
"""

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from saccade.chat.message_renderer import MessageRenderer
from saccade.chat.tokenizer import replace_surrogates
from saccade.config.schema import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from saccade.engines.image_urls import ImageUrls, join_json, mark_image
from saccade.errors import BrokenEngineError, ConfigError, EngineError, SaccadeError
from saccade.ledger import ImageRef, Message
from saccade.protocols import ChatEngine, MediaLoader
from saccade.types import Completion, FinishReason, GenerationRequest
from saccade.utils.http_client import RequestFailed, is_server_address
from saccade.utils.openai_client import ChatCompletion, OpenAIClient, read_api_key

_FINISH_REASONS = {
    "stop": FinishReason.STOP,
    "eos_token": FinishReason.STOP,
    "stop_sequence": FinishReason.STOP,
    "length": FinishReason.LENGTH,
}
_PREFILL_SERVERS = {"vllm", "sglang"}  # values of `owned_by` of servers that continue a prefilled assistant message
_NUM_SEEDS = 2**31  # the range that all servers accept
_RESERVED_FIELDS = {"model", "messages", "temperature", "seed", "stream", "n"}
_MAX_LISTED_MODELS = 20  # in an error message
_MAX_REFUSALS = 8  # requests in a row: a gateway may refuse a single prompt with 403
_IMAGE_ERROR = re.compile(r"image|modal|vision|picture", re.IGNORECASE)
_LENGTH_ERROR = re.compile(r"context|length|too long|too large|max\w*_tokens", re.IGNORECASE)


class ChatCompletions(ChatEngine):
    """Queries `model` (by default the server's only one) at `url`, such as http://127.0.0.1:8000/v1.

    Not token-exact: see `protocols.ChatEngine`. A server may demand longer pauses between attempts. It continues a
    prefilled reply by `continue_final_message`.
    """

    def __init__(
        self,
        media: MediaLoader,
        context_length: int = 0,
        *,
        url: str,  # address of the server, such as http://127.0.0.1:8000/v1
        model: str = "",  # name of the model; empty = the server's only one
        api_key_env: str = "",  # environment variable that holds the API key; empty = none
        extra_body: Mapping[str, Any] | None = None,  # further request fields, such as top_p
        max_tokens_field: str = "max_tokens",  # the server's name for the token limit of a reply
        image_token_size: PositiveInt = 32,  # side of a visual token for resizing and counting, pixels
        supports_prefill: bool | None = None,  # the server continues a prefilled reply; null = if it is vLLM or SGLang
        request_timeout: PositiveFloat = 600.0,  # time limit of an attempt, seconds
        max_retries: NonNegativeInt = 4,  # attempts after the first
        retry_backoff: NonNegativeFloat = 1.0,  # first pause between attempts, doubled each time, seconds
        max_concurrency: PositiveInt = 32,  # requests at a time
    ) -> None:
        check_settings(url, extra_body or {}, max_tokens_field)
        self.renderer: MessageRenderer = MessageRenderer(image_token_size)
        self._image_urls = ImageUrls(media)
        self._url, self._model, self._context_length = url, model, context_length
        self.supports_prefill = supports_prefill
        self._extra_body, self._max_tokens_field = dict(extra_body or {}), max_tokens_field
        self._api_key_env = api_key_env
        key = read_api_key(api_key_env, "engines/chat_completions", key="engine.settings.api_key_env")
        self._client = OpenAIClient(
            base_url=url,
            api_key=key,
            timeout=request_timeout,
            max_retries=max_retries,
            retry_backoff=retry_backoff,
            max_concurrency=max_concurrency,
        )
        self._is_connected, self._connect_lock = False, asyncio.Lock()
        self._num_refusals = 0  # in a row
        self._requests_in_flight: set[asyncio.Task[ChatCompletion]] = set()
        self._is_stopped = self._is_closed = False

    async def connect(self) -> str:
        """Return the name of the model. Raises ConfigError or BrokenEngineError if it is unusable.

        A server that doesn't list its models is assumed to serve the one in `model`.
        """
        async with self._connect_lock:
            if not self._is_connected:
                card = choose_model(await self._list_models(), self._model, self._context_length, self._url)
                self._model = card["id"]
                if self.supports_prefill is None:
                    self.supports_prefill = card.get("owned_by") in _PREFILL_SERVERS
                self._is_connected = True
        return self._model

    async def _list_models(self) -> list[dict[str, Any]]:
        try:
            return await self._client.list_models()
        except RequestFailed as error:
            if self._model and error.status in (200, 404, 405, 501):
                return []
            raise build_error(error, url=self._url, api_key_env=self._api_key_env, num_images=0) from error

    async def generate(self, request: GenerationRequest) -> Completion:
        """Request a reply; see protocols.ChatEngine. It ends at the server's own end of a turn.

        Raises EngineError if the request is refused or fails, BrokenEngineError if every request would fail, which 8
        in a row that were refused for their key or address show; ConfigError for a prefilled reply that the server
        can't continue.
        """
        ledger, sampling = request.ledger, request.sampling
        messages = ledger.messages()
        if not messages:
            raise EngineError("the ledger has no messages; render the prompt with the engine's own renderer")
        model = await self.connect()
        body: dict[str, Any] = {
            **{"model": model, "temperature": sampling.temperature, "seed": sampling.seed % _NUM_SEEDS},
            **{self._max_tokens_field: sampling.max_tokens, **self._extra_body},
            "messages": [format_message(message, mark_image) for message in messages],
        }
        if messages[-1].role == "assistant":
            if not self.supports_prefill:
                prefill = messages[-1].text.strip()
                raise ConfigError(
                    f"{self._url} can't continue the prefilled reply {prefill!r}: set environment.settings."
                    "force_think=false, or engine.settings.supports_prefill=true if it supports continue_final_message",
                    key="environment.settings.force_think",
                    value=prefill,
                )
            body |= {"add_generation_prompt": False, "continue_final_message": True}
        images = [part for message in messages for part in message.parts if isinstance(part, ImageRef)]
        parts = join_json(body, await self._image_urls.encode(images))
        response = await self._send_request(parts, num_images=len(images))
        finish_reason = _FINISH_REASONS.get(response.finish_reason or "stop")
        if finish_reason is None:
            raise EngineError(
                f"{self._url} ended a reply with the unknown finish reason {response.finish_reason[:60]!r}",
                key="finish_reason",
                value=response.finish_reason,
            )
        is_truncated, text = finish_reason is FinishReason.LENGTH, replace_surrogates(response.text)
        # A server that doesn't count tokens: a truncated reply has max_tokens, another one is estimated.
        estimate = sampling.max_tokens if is_truncated else len(self.renderer.encode(text)) + 1
        return Completion(
            text=text,
            num_text_tokens=min(response.num_tokens or estimate, sampling.max_tokens),
            tokens=(),
            logprobs=(),
            version=None,
            finish_reason=finish_reason,
        )

    async def _send_request(self, body: list[bytes], *, num_images: int) -> ChatCompletion:
        if self._is_stopped or self._is_closed:
            raise EngineError("the engine is closed" if self._is_closed else "the engine sends no more requests")
        request = asyncio.ensure_future(self._client.create_chat_completion(body))
        self._requests_in_flight.add(request)
        try:
            # Cancelling closes the connection, which makes the server abort the request.
            completion = await request
        except RequestFailed as error:
            failure = build_error(error, url=self._url, api_key_env=self._api_key_env, num_images=num_images)
            if isinstance(failure, BrokenEngineError) and not error.is_unreachable:
                self._num_refusals += 1
                if self._num_refusals < _MAX_REFUSALS:
                    raise EngineError(str(failure), key=failure.key, value=failure.value) from error
            raise failure from error
        except asyncio.CancelledError:
            if self._is_closed:
                raise EngineError("the engine was closed during a request") from None
            raise
        finally:
            self._requests_in_flight.discard(request)
        self._num_refusals = 0
        return completion

    def stop_sending(self) -> None:
        """See ChatEngine."""
        self._is_stopped = True
        self._client.stop_sending()

    async def close(self) -> None:
        """Stop; unfinished requests fail."""
        self._is_closed = True
        for request in self._requests_in_flight:
            request.cancel()
        await asyncio.gather(*self._requests_in_flight, return_exceptions=True)


chat_completions = ChatCompletions


# ---- settings, messages and errors -----------------------------------------------------------------------------------


def check_settings(url: str, extra_body: Mapping[str, Any], max_tokens_field: str) -> None:
    """Raise ConfigError for an invalid URL, one with credentials, or an `extra_body` that sets reserved fields."""
    if not is_server_address(url):
        raise ConfigError(
            f"engine.settings.url={url!r} is not an address; give one such as http://127.0.0.1:8000/v1",
            key="engine.settings.url",
            value=url,
        )
    parts = urlsplit(url)
    if parts.username or parts.password or parts.query or parts.fragment:  # may be a secret: don't repeat it
        raise ConfigError(
            "engine.settings.url contains more than an address; put the API key into an environment variable and set "
            "engine.settings.api_key_env to its name",
            key="engine.settings.url",
        )
    if reserved := sorted({*_RESERVED_FIELDS, max_tokens_field} & extra_body.keys()):
        raise ConfigError(
            f"engine.settings.extra_body contains {reserved[0]!r}, which other settings determine; remove it",
            key="engine.settings.extra_body",
            value=reserved[0],
        )


def choose_model(models: Sequence[Mapping[str, Any]], name: str, context_length: int, url: str) -> Mapping[str, Any]:
    """Return the server's entry of the named model ("": of its only one); `{"id": name}` if it lists none.

    Raises ConfigError if there is no such model, BrokenEngineError if its context is too short.
    """
    names = [model["id"] for model in models]
    listed = ", ".join(names[:_MAX_LISTED_MODELS])
    if len(names) > _MAX_LISTED_MODELS:
        listed += f" and {len(names) - _MAX_LISTED_MODELS} more"
    if not name and len(names) != 1:
        raise ConfigError(
            f"{url} serves {listed or 'no model'}; choose one with engine.settings.model=NAME",
            key="engine.settings.model",
            value=name,
        )
    if names and name and name not in names:
        raise ConfigError(
            f"{url} has no model {name!r}, it serves {listed}; set engine.settings.model to one of these",
            key="engine.settings.model",
            value=name,
        )
    card = next((model for model in models if model["id"] == (name or names[0])), {"id": name})
    max_model_len = card.get("max_model_len")  # vLLM and SGLang report it
    if isinstance(max_model_len, int) and max_model_len < context_length:
        raise BrokenEngineError(
            f"{url} has a context of {max_model_len} tokens, but a conversation may have {context_length}; start it "
            f"with a longer context, or set environment.settings.max_context_tokens={max_model_len}",
            key="environment.settings.max_context_tokens",
            value=context_length,
        )
    return card


def format_message(message: Message, url_of: Callable[[ImageRef], str]) -> dict[str, Any]:
    """Convert a message to the API's format: one text, or a list of parts if it has images.

    Lone surrogates, which can't be sent, become question marks.

    >>> format_message(Message(role="user", parts=("Which?",)), str)
    {'role': 'user', 'content': 'Which?'}
    """
    if all(isinstance(part, str) for part in message.parts):
        return {"role": message.role, "content": replace_surrogates(message.text)}
    return {"role": message.role, "content": [_format_part(part, url_of) for part in message.parts]}


def _format_part(part: str | ImageRef, url_of: Callable[[ImageRef], str]) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": replace_surrogates(part)}
    return {"type": "image_url", "image_url": {"url": url_of(part)}}


def build_error(error: RequestFailed, *, url: str, api_key_env: str, num_images: int) -> SaccadeError:
    """Convert a failed request to an error with a hint; `num_images` is how many the request contained.

    Return BrokenEngineError if other requests would probably fail, too, else EngineError.
    """
    problem = f"{url} {error}" + (f": {error.server_message}" if error.server_message else "")
    url_key = "engine.settings.url"
    if error.is_local:  # the failure is this machine's, which has room once other requests end
        hint = "run fewer rollouts at a time, or raise the limit of open files (ulimit -n)"
        return EngineError(f"{problem}; {hint}", key=url_key, value=url)
    if not error.status and not error.is_timeout:
        remedy = "start the server" if error.is_unreachable else "look at the server's log"
        hint = f"{remedy}, or correct engine.settings.url (it often ends in /v1)"
        return BrokenEngineError(f"{problem}; {hint}", key=url_key, value=url)
    if error.status in (401, 403):
        hint = f"check the key in {api_key_env}" if api_key_env else "set it to the variable that holds the API key"
        key = "engine.settings.api_key_env"
        return BrokenEngineError(f"{problem}; {key}: {hint}", key=key, value=api_key_env)
    if error.status in (404, 405):
        hint = "correct engine.settings.url (it often ends in /v1) or engine.settings.model"
        return BrokenEngineError(f"{problem}; {hint}", key=url_key, value=url)
    if error.status >= 400 and num_images and _IMAGE_ERROR.search(error.server_message):
        hint = f"the request has {num_images} images: serve a model that accepts as many, or show fewer"
        return EngineError(f"{problem}; {hint}", key="images", value=num_images)
    if error.status >= 400 and _LENGTH_ERROR.search(error.server_message):
        key = "environment.settings.max_context_tokens"
        return EngineError(f"{problem}; lower {key} or sampling.max_tokens", key=key)
    return EngineError(problem, key=url_key, value=url)
