"""Chat completions of an OpenAI-compatible server: for judges and chat APIs."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from saccade.errors import ConfigError
from saccade.utils.http_client import HttpClient

_MAX_NAME_CHARS = 1000  # of a model
_LIST_TIMEOUT = 20.0  # seconds for the list of models, with its retries


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCompletion:
    """A completion: text, finish reason ("stop", "length", …), and the server's token count (0: not reported)."""

    text: str
    finish_reason: str = ""
    num_tokens: int = 0


class OpenAIClient(HttpClient):
    """A client of one server, whose `base_url` is such as http://127.0.0.1:8000/v1."""

    async def create_chat_completion(self, body: Mapping[str, Any] | list[bytes]) -> ChatCompletion:
        """Request a chat completion; the body may be JSON text in parts. Raises RequestFailed."""
        path, expected = "chat/completions", "chat completion"
        return await self.request("POST", path, body, parse=_parse_chat_completion, expected=expected)

    async def list_models(self) -> list[dict[str, Any]]:
        """Return the server's description of each model, such as `[{"id": "m"}]`. Raises RequestFailed."""
        return await self.request(
            "GET",
            "models",
            parse=_parse_models,
            expected="list of models",
            total_timeout=min(self.timeout, _LIST_TIMEOUT),
        )


def _parse_models(content: Any) -> list[dict[str, Any]]:
    """Return the models with their names, and without a length of the context that none can have."""
    models = [dict(model) for model in content["data"]]
    for model in models:
        name, length = model["id"], model.get("max_model_len")
        if not (isinstance(name, str) and 0 < len(name) <= _MAX_NAME_CHARS):
            raise ValueError("a model without a name")
        if type(length) is not int or length < 1:
            model.pop("max_model_len", None)
    return models


def _parse_chat_completion(content: Any) -> ChatCompletion:
    choice, usage = content["choices"][0], content.get("usage")
    count = usage.get("completion_tokens") if isinstance(usage, dict) else None
    num_tokens = count if isinstance(count, int) and count > 0 else 0  # a wrong count doesn't make a reply unusable
    text, finish = choice["message"]["content"], str(choice.get("finish_reason") or "")
    if text is None and finish == "length":  # the server spent all tokens on reasoning that it hides
        text = ""
    if not isinstance(text, str):
        raise TypeError("a completion without text")
    return ChatCompletion(text=text, finish_reason=finish, num_tokens=num_tokens)


def read_api_key(env_name: str, source: str, *, key: str = "api_key_env") -> str:
    """Return the API key in the environment variable `env_name`; "" for no variable. Raises ConfigError with `key`."""
    # The value may be the API key itself: it must not get into a log, so the error has no value.
    if env_name and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", env_name):
        raise ConfigError(f"{source}: api_key_env must be the name of an environment variable, not an API key", key=key)
    if env_name and not os.environ.get(env_name, "").strip():
        message = f"{source}: the environment variable {env_name} must hold the server's key; it is not set"
        raise ConfigError(message, key=key, value=env_name)
    return os.environ[env_name].strip() if env_name else ""
