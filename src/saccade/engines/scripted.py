"""An engine with predefined replies, for tests, docs and demonstrations.

`scripted(renderer, replies=("red</think><answer>red</answer>",))` returns one text per call, in order;
`scripted(renderer, replies=lambda ledger: "<answer>red</answer>")` computes it from the ledger.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager

from saccade.errors import EngineError
from saccade.ledger import Ledger
from saccade.protocols import Renderer, WeightSource
from saccade.types import Completion, FinishReason, GenerationRequest


class Scripted:
    """Returns replies in the form of a real engine: tokens with logprobs, ended by the stop id or by `max_tokens`.

    `replies` is one text per call in order of arrival (then EngineError), or a function of the ledger. Each reply
    takes `latency` seconds, which may be a function of the ledger, too. `history` lists all ledgers and completions,
    in order of completion.
    """

    has_separate_weights = True  # it has no weights

    def __init__(
        self,
        renderer: Renderer,
        *,
        # one text per call in order of arrival, or a function of the ledger
        replies: Sequence[str] | Callable[[Ledger], str] = (),
        latency: float | Callable[[Ledger], float] = 0.0,  # time of a reply, seconds, or a function of the ledger
    ) -> None:
        self.version = 0
        self.history: list[tuple[Ledger, Completion]] = []
        self._renderer, self._replies, self._latency = renderer, replies, latency
        self._num_replies_used = 0
        self._is_closed = False
        self._guard_switch: Callable[[], AbstractAsyncContextManager[None]] = contextlib.nullcontext

    async def generate(self, request: GenerationRequest) -> Completion:
        """Return the next reply; see protocols.Engine. Raises EngineError if none is left."""
        # Before the first await, so that replies are assigned in order of arrival.
        text, version = self._take_next_reply(request.ledger), self.version
        await asyncio.sleep(self._latency(request.ledger) if callable(self._latency) else self._latency)
        if self._is_closed:
            raise EngineError("the scripted engine was closed during a request")
        text_ids = self._renderer.encode(text)
        if not set(request.sampling.forbidden_ids).isdisjoint(text_ids):
            raise EngineError(f"the scripted reply {text[:40]!r} contains a forbidden id", key="replies", value=text)
        tokens = (text_ids + request.sampling.stop_ids[:1])[: request.sampling.max_tokens]
        completion = Completion(
            tokens=tokens,
            # Arbitrary but distinct, so that tests detect a misplaced one.
            logprobs=tuple(-0.01 * (1 + token % 50) for token in tokens),
            version=version,
            finish_reason=FinishReason.STOP if len(tokens) > len(text_ids) else FinishReason.LENGTH,
        )
        self.history.append((request.ledger, completion))
        return completion

    def _take_next_reply(self, ledger: Ledger) -> str:
        if self._is_closed:
            raise EngineError("the scripted engine is closed")
        if callable(self._replies):
            return self._replies(ledger)
        if self._num_replies_used >= len(self._replies):
            raise EngineError(
                f"the scripted engine has only {len(self._replies)} replies, and all are used up", key="replies"
            )
        self._num_replies_used += 1
        return self._replies[self._num_replies_used - 1]

    async def sync_weights(self, source: WeightSource, version: int) -> None:
        """Set the version; scripts have no weights."""
        async with self._guard_switch():
            self.version = version

    def set_switch_guard(self, guard: Callable[[], AbstractAsyncContextManager[None]]) -> None:
        """Let `sync_weights` set the version inside a block of `guard()`; see protocols.SharedServersEngine."""
        self._guard_switch = guard

    def get_sync_state(self) -> int:
        """Return the version; see protocols.SharedServersEngine."""
        return self.version

    def pause_requests(self) -> AbstractAsyncContextManager[None]:
        """Do nothing: unfinished replies keep their version."""
        return contextlib.nullcontext()

    def follow(self, state: int) -> None:
        """Set the version."""
        self.version = state

    def list_outdated_servers(self) -> Sequence[str]:
        """Return no server."""
        return ()

    def reload_servers(self, servers: Sequence[str]) -> None:
        """Do nothing."""

    async def close(self) -> None:
        """Stop; unfinished requests fail."""
        self._is_closed = True


scripted = Scripted
