"""A model as judge: whether the final answer means what the gold answer means."""

import re
from collections.abc import Mapping
from typing import Any

from saccade.endpoint import Endpoint, key_of
from saccade.errors import ConfigError
from saccade.rewards._inquiry import Inquiry
from saccade.rewards._text import asked, visible
from saccade.rewards._verdicts import Verdicts
from saccade.types import Episode, Task, Ungraded

PROMPT = (
    "You compare a candidate's answer to a question with the reference answer. It is right only if it means the same "
    "as the reference and commits to it: an answer that names several possibilities, hedges or only repeats the "
    "question is wrong. How it is worded makes no difference."
)
_VERDICTS: Mapping[str, float] = {"yes": 1.0, "no": 0.0}
_OWN = {"model", "messages", "temperature", "max_tokens", "n", "stream"}
NOTHING = "none"  # what the model says where it reads no answer
_READING = 512  # tokens that what it reads may take, where a verdict may take fewer


class judge:
    """What the verdict of a model behind an OpenAI-compatible `url` (such as http://127.0.0.1:8000/v1) is worth.

    It is asked at temperature 0, with `prompt` and then question, gold and answer; the answer stands between marks
    drawn anew for every request, so that nothing in it can end it early. What comes back must be exactly one of
    `verdicts`, but for case and the blanks around it. `key_variable` names the environment variable that holds the key;
    `body` holds further fields of the request, such as `chat_template_kwargs`. A request is tried 1 + `retries` times,
    each for `timeout` seconds, at most `at_once` at a time (see `endpoint`). Verdicts are kept in the folder `cache`
    (null: not) under a digest of model, prompt, verdicts, request, question, gold and answer; not of the url, so that a
    model may move.

    No answer earns 0 unasked, and so does one of more than `longest` characters, which is none. Where there is no
    verdict (no server, not in time, something else) the episode is `Ungraded`. Only `Episode.answer` is judged, never
    what tools printed. ConfigError for settings that can't be used, such as a variable that isn't set.
    """

    def __init__(
        self,
        *,
        url: str,
        model: str,
        key_variable: str = "",
        prompt: str = PROMPT,
        verdicts: Mapping[str, float] = _VERDICTS,
        max_tokens: int | None = 16,
        body: Mapping[str, Any] | None = None,
        timeout: float = 60.0,
        retries: int = 3,
        wait: float = 1.0,
        at_once: int = 16,
        longest: int = 2000,
        cache: str | None = "~/.cache/saccade/judge",
        proxy: str = "",
    ) -> None:
        _check(url=url, model=model, verdicts=verdicts, body=body or {})
        if retries < 0 or wait < 0 or timeout <= 0 or min(max_tokens or 1, at_once, longest) < 1:
            raise ConfigError("rewards/judge: retries and wait can't be below 0, the other numbers must be above it")
        self._request = {"model": model, "temperature": 0.0, **(body or {})}
        self._max_tokens = max_tokens
        self._prompt, self._longest = prompt, longest
        self._verdicts = {word.strip().casefold(): float(value) for word, value in verdicts.items()}
        key = key_of(key_variable, "rewards/judge")
        endpoint = Endpoint(url=url, key=key, timeout=timeout, retries=retries, wait=wait, at_once=at_once, proxy=proxy)
        self._inquiry = Inquiry(name=f"the judge {model} at {url}", endpoint=endpoint, kept=Verdicts(cache))

    async def __call__(self, episode: Episode, task: Task) -> float | Ungraded:
        """The reward of an episode."""
        return await self.compare(asked(task.question, task.choices), str(task.gold), episode.answer or "")

    async def compare(self, question: str, gold: str, answer: str) -> float | Ungraded:
        """What the verdict on an answer is worth; 0 unasked for a blank one, and for one that is too long to be one."""
        plain = self._shown(answer)
        if not plain:
            return 0.0
        case, known = {"question": question, "gold": gold, "answer": plain}, sorted(self._verdicts)
        closing = f"Your verdict, exactly one of these and nothing else: {', '.join(self._verdicts)}"
        request = self._limited(self._max_tokens)
        said = await self._inquiry.ask(request, self._prompt, case, closing, identity=known, fair=self._verdict)
        return said if isinstance(said, Ungraded) else self._verdicts[said]

    async def read(self, question: str, answer: str, prompt: str) -> str | Ungraded:
        """What the model reads in an answer as `prompt` tells it to; "" where there is nothing, and unasked for an
        answer that is blank or too long to be one.
        """
        plain = self._shown(answer)
        if not plain:
            return ""
        # what is read may be a list, which is longer than a verdict
        request = self._limited(None if self._max_tokens is None else max(self._max_tokens, _READING))
        closing = f"The candidate's final answer and nothing else; {NOTHING} where there is none:"
        case = {"question": question, "answer": plain}
        said = await self._inquiry.ask(request, prompt, case, closing, identity="read", fair=_reading)
        return "" if said == NOTHING else said

    def _shown(self, answer: str) -> str:
        """An answer as the model is shown it; "" where there is none."""
        # half a character, which JSON can hold, is nothing that can be sent; what people can't see, such as an
        # instruction in the tag characters of Unicode, is nothing to judge
        return visible(answer.encode("utf-8", "replace").decode()) if len(answer) <= self._longest else ""

    def _limited(self, tokens: int | None) -> dict[str, Any]:
        # some servers want the limit under another name, in `body`
        return self._request if tokens is None else {**self._request, "max_tokens": tokens}

    def _verdict(self, said: str) -> str | Ungraded:
        word = said.strip().casefold()
        if word in self._verdicts:
            return word
        return Ungraded(reason=f"said {said[:60]!r}, which is not one of {', '.join(self._verdicts)}")


def _reading(said: str) -> str | Ungraded:
    plain = said.strip()
    if not plain:
        return Ungraded(reason="said nothing")
    return NOTHING if plain.casefold().rstrip(".") == NOTHING else plain


def _check(*, url: str, model: str, verdicts: Mapping[str, float], body: Mapping[str, Any]) -> None:
    if not re.match(r"https?://[^/\s]+", url):
        raise ConfigError(f"rewards/judge: the url must begin with http:// or https://, it is {url!r}")
    if not model:
        raise ConfigError("rewards/judge: the model needs a name, as its server knows it")
    if len(verdicts) < 2 or not all(word.strip() and 0 <= value <= 1 for word, value in verdicts.items()):
        raise ConfigError("rewards/judge: verdicts must be two words or more, each worth something between 0 and 1")
    if taken := sorted(_OWN & body.keys()):
        raise ConfigError(f"rewards/judge: the body can't hold {taken[0]!r}, which is the judge's own")
