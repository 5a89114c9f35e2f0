"""A true engine whose replies you wrote: for tests, docs, and demonstrations as traces.

`scripted(renderer, replies=("red</think><answer>red</answer>",))` says one text per call, in order;
`scripted(renderer, replies=lambda ledger: "<answer>red</answer>")` says what the function gives for a ledger.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from saccade.errors import EngineError
from saccade.ledger import Ledger
from saccade.protocols import Renderer
from saccade.types import Completion, Sampling, Stop


class scripted:
    """Replies as an engine would: as tokens, with logprobs, ended by the stop id or cut at `max_tokens`.

    `replies` is one text per call in order of arrival (then EngineError), or a function of the ledger. Every reply
    takes `seconds`, which may be a function of the ledger too. `served` keeps what was asked and answered, in order of
    the answers.
    """

    own_weights = True  # or none at all

    def __init__(
        self,
        renderer: Renderer,
        *,
        replies: Sequence[str] | Callable[[Ledger], str] = (),
        seconds: float | Callable[[Ledger], float] = 0.0,
    ) -> None:
        self.version = 0
        self.served: list[tuple[Ledger, Completion]] = []
        self._renderer, self._replies, self._seconds = renderer, replies, seconds
        self._asked = 0
        self._closed = False

    async def generate(self, ledger: Ledger, sampling: Sampling) -> Completion:
        """The next reply; see protocols.Engine. Raises EngineError where none is left."""
        started = time.perf_counter()
        text, version = self._next(ledger), self.version  # before the first wait: replies are dealt in order of arrival
        await asyncio.sleep(self._seconds(ledger) if callable(self._seconds) else self._seconds)
        if self._closed:
            raise EngineError("the scripted engine was closed while a reply was under way")
        said = self._renderer.encode(text)
        if not set(sampling.forbidden_ids).isdisjoint(said):
            raise EngineError(f"the scripted reply {text[:40]!r} contains a forbidden id")
        tokens = (said + sampling.stop_ids[:1])[: sampling.max_tokens]
        completion = Completion(
            tokens=tokens,
            # Not of any distribution, but distinct, so that a misplaced one is seen.
            logprobs=tuple(-0.01 * (1 + token % 50) for token in tokens),
            version=version,
            stop=Stop.STOP if len(tokens) > len(said) else Stop.LENGTH,
            seconds=time.perf_counter() - started,
        )
        self.served.append((ledger, completion))
        return completion

    def _next(self, ledger: Ledger) -> str:
        if self._closed:
            raise EngineError("the scripted engine is closed")
        if callable(self._replies):
            return self._replies(ledger)
        if self._asked >= len(self._replies):
            raise EngineError(f"the scripted engine has {len(self._replies)} replies, and all of them are said")
        self._asked += 1
        return self._replies[self._asked - 1]

    async def publish(self, weights: Any, version: int) -> None:
        """Take the version; scripts have no weights."""
        self.version = version

    async def close(self) -> None:
        """Stop; replies under way fail."""
        self._closed = True
