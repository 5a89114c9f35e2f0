"""What an engine says to a server of chat completions, and what it makes of refusals, as functions."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from saccade.endpoint import NoAnswer
from saccade.errors import BrokenEngineError, ConfigError, EngineError, SaccadeError
from saccade.ledger import Picture
from saccade.types import Message

_OWN = {"model", "messages", "temperature", "seed", "stream", "n"}
_SHOWN = 20  # names of models that are listed
_ABOUT_PICTURES = re.compile(r"image|modal|vision|picture", re.IGNORECASE)
_ABOUT_LENGTH = re.compile(r"context|length|too long|too large|max\w*_tokens", re.IGNORECASE)


def check_settings(url: str, body: Mapping[str, Any], limit: str) -> None:
    """Raises ConfigError for an address that is none or holds a key, and for fields that other settings set."""
    try:
        place = urlsplit(url)
        sound = place.scheme in ("http", "https") and bool(place.hostname) and not re.search(r"\s", url)
    except ValueError:
        sound = False
    if not sound:
        raise ConfigError(f"engines/openai: the url can't be {url!r}; give one such as http://127.0.0.1:8000/v1")
    if place.username or place.password or place.query or place.fragment:  # what may be a key must not be repeated
        raise ConfigError(
            "engines/openai: the url holds more than an address; a key belongs in an environment variable, which "
            "engine.settings.key_variable names"
        )
    if taken := sorted({*_OWN, limit} & body.keys()):
        raise ConfigError(f"engines/openai: the body can't hold {taken[0]!r}, which is set by other settings")


def chosen(offered: Sequence[Mapping[str, Any]], name: str, context: int, url: str) -> Mapping[str, Any]:
    """What the server says of the model of this name ("": of the only one); `{"id": name}` where it lists none.

    Raises ConfigError where there is no such model, BrokenEngineError where it takes shorter conversations only.
    """
    names = [each["id"] for each in offered]
    listed = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
    if not name and len(names) != 1:
        raise ConfigError(f"{url} offers {listed or 'no model'}; name one with engine.settings.model=NAME")
    if names and name and name not in names:
        raise ConfigError(f"{url} has no model {name!r}, it offers {listed}; mend engine.settings.model")
    card = next((each for each in offered if each["id"] == (name or names[0])), {"id": name})
    longest = card.get("max_model_len")  # vLLM and SGLang say so
    if isinstance(longest, int) and longest < context:
        raise BrokenEngineError(
            f"{url} takes {longest} tokens, and a conversation may have {context}; start it with a longer context, or "
            f"set agent.settings.context_tokens={longest}"
        )
    return card


def sent(message: Message, url_of: Callable[[Picture], str]) -> dict[str, Any]:
    """A message as it is sent: a text, or parts where there are pictures.

    >>> sent(Message(role="user", parts=("Which?",)), str)
    {'role': 'user', 'content': 'Which?'}
    """
    if all(isinstance(part, str) for part in message.parts):
        return {"role": message.role, "content": message.text}
    return {"role": message.role, "content": [_part(part, url_of) for part in message.parts]}


def _part(part: str | Picture, url_of: Callable[[Picture], str]) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    return {"type": "image_url", "image_url": {"url": url_of(part)}}


def failure(error: NoAnswer, *, url: str, key_variable: str, pictures: int) -> SaccadeError:
    """What there is no answer for, in a sentence with its mend; `pictures` is how many were shown.

    BrokenEngineError where no other request will have an answer either, else EngineError.
    """
    what = f"{url} {error}" + (f": {error.said}" if error.said else "")
    if not error.status and not error.late:
        return BrokenEngineError(f"{what}; start the server, or mend its address (it often ends in /v1)")
    if error.status in (401, 403):
        mend = f"look at the key in {key_variable}" if key_variable else "name the variable that holds its key"
        return BrokenEngineError(f"{what}; {mend} (engine.settings.key_variable)")
    if error.status in (404, 405):
        return BrokenEngineError(f"{what}; mend its address (it often ends in /v1) or engine.settings.model")
    if error.status >= 400 and pictures and _ABOUT_PICTURES.search(error.said):
        return EngineError(f"{what}; {pictures} pictures were shown: serve a model that takes so many, or show fewer")
    if error.status >= 400 and _ABOUT_LENGTH.search(error.said):
        return EngineError(f"{what}; lower agent.settings.context_tokens or sampling.max_tokens")
    return EngineError(what)
