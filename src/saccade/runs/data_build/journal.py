"""Append-only files of what a stage has computed, by key, and requests to the teacher that are never repeated.

    request ── key ──> recorded? ──> the recorded reply
                ├────> pending?  ──> both callers share one reply
                └────> room for its reply on the disk ──> the server ──> append to stages/STAGE.jsonl ──> the reply

A key is a digest of all that the reply depends on: the model, the messages with the content of their images, and the
sampling parameters; not the server's address. Everything else is computed from the replies, so a build that was killed
continues where it was, and ends with the same files.

`stages/STAGE.reserve` has the size of all replies that are on their way. If a reply can't be written, the disk is full:
the reserve is deleted, and the replies that were requested are written in its place.
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from saccade.errors import BrokenEngineError, EngineError, RunError, SaccadeError
from saccade.ledger import ImageRef, Ledger, Message
from saccade.protocols import ChatEngine
from saccade.types import Completion, FinishReason, GenerationRequest, SamplingParams
from saccade.utils.files import convert_file_errors, create_folder, open_file
from saccade.utils.hashing import compute_digest
from saccade.utils.jsonl import append_jsonl, read_jsonl
from saccade.utils.text import pluralize

_GRACE_SECONDS = 60.0  # for requests in progress when the build stops
# More than text has, by the longest tokens of a vocabulary but for runs of spaces. A longer reply is truncated: the
# server ignores the limit of tokens.
MAX_BYTES_PER_TOKEN = 8
_logger = logging.getLogger("saccade")


class _Keyed(Protocol):
    @property
    def key(self) -> str: ...


class ReplySettings(Protocol):
    """The settings of a stage that limit a reply."""

    @property
    def temperature(self) -> float:
        """Sampling temperature; 0 = greedy."""

    @property
    def max_tokens(self) -> int:
        """Longest reply, tokens."""


ItemT = TypeVar("ItemT", bound=_Keyed)


class Journal(Generic[ItemT]):
    """The items of a JSONL file by key; a new one is appended at once. A truncated last line is ignored."""

    def __init__(self, path: Path, item_type: type[ItemT]) -> None:
        self.path = path
        with convert_file_errors(path):
            create_folder(path.parent)
        items = read_jsonl(path, item_type, skip_truncated_line=True) if path.exists() else []
        self.items = {item.key: item for item in items}
        self._reserve_path, self._num_reserved = path.with_suffix(".reserve"), 0

    def append(self, item: ItemT) -> None:
        """Write an item. Raises RunError if the file can't be written, or only with the room that was reserved."""
        with convert_file_errors(self.path):
            try:
                append_jsonl(self.path, item)
            except OSError:
                if not self._num_reserved:
                    raise
                self.release()
                append_jsonl(self.path, item)
                self.items[item.key] = item
                raise
        self.items[item.key] = item

    def reserve(self, num_bytes: int) -> None:
        """Keep room for items of so many bytes. Raises RunError if there is none."""
        if num_bytes <= self._num_reserved:
            return
        with convert_file_errors(self._reserve_path), open_file(self._reserve_path, "ab") as file:
            file.write(os.urandom(num_bytes - self._num_reserved))  # a file system may compress zeros
        self._num_reserved = num_bytes

    def release(self) -> None:
        """Give the reserved room back."""
        self._num_reserved = 0
        with contextlib.suppress(OSError):  # the file system may have become read-only
            self._reserve_path.unlink()


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedReply:
    """A reply of the teacher; prompt tokens are estimated, completion tokens are the server's count."""

    key: str
    text: str
    finish_reason: FinishReason
    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StageUsage:
    """The requests of a stage and their tokens."""

    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def __add__(self, other: "StageUsage") -> "StageUsage":
        return StageUsage(
            requests=self.requests + other.requests,
            prompt_tokens=self.prompt_tokens + other.prompt_tokens,
            completion_tokens=self.completion_tokens + other.completion_tokens,
        )


class Teacher(ChatEngine):
    """A chat engine that sends no request twice; one per stage, with the stage's journal.

    `identity` holds what replies depend on besides the request, such as the model. After `max_failures` failed requests
    in a row it raises BrokenEngineError.
    """

    def __init__(self, engine: ChatEngine, path: Path, *, identity: Mapping[str, Any], max_failures: int) -> None:
        self.renderer = engine.renderer
        self._engine, self._identity, self._max_failures = engine, dict(identity), max_failures
        self._journal = Journal(path, RecordedReply)
        self._pending: dict[str, asyncio.Task[SaccadeError | None]] = {}
        self._num_pending_bytes = 0  # of the longest replies to the pending requests
        self._used_keys: set[str] = set()
        self._num_failures = 0  # in a row
        self._broken: SaccadeError | None = None  # why no request is sent any more

    @property
    def usage(self) -> StageUsage:
        """The cost of the replies that were used, whether or not an earlier call recorded them."""
        used = [self._journal.items[key] for key in self._used_keys]
        return StageUsage(
            requests=len(used),
            prompt_tokens=sum(reply.prompt_tokens for reply in used),
            completion_tokens=sum(reply.completion_tokens for reply in used),
        )

    async def connect(self) -> str:
        """Connect to the server and return the name of the model it serves."""
        return await self._engine.connect()

    async def ask(self, messages: Sequence[Message], settings: ReplySettings, *, seed: int) -> Completion:
        """Return the reply to a conversation. Raises EngineError if the request failed."""
        segment = self.renderer.render(Ledger(), messages)
        sampling = SamplingParams(temperature=settings.temperature, max_tokens=settings.max_tokens, seed=seed)
        return await self.generate(GenerationRequest(Ledger(segments=(segment,)), sampling))

    async def generate(self, request: GenerationRequest) -> Completion:
        """Return the recorded reply, or request and record it; see protocols.ChatEngine."""
        key = self._compute_key(request)
        if key not in self._journal.items:
            if key not in self._pending:
                self._pending[key] = asyncio.create_task(self._query(key, request))
            # Cancelling the caller doesn't cancel the request, which is paid for: `close` and `abort` wait for it.
            if error := await asyncio.shield(self._pending[key]):
                raise error
        self._used_keys.add(key)
        reply = self._journal.items[key]
        return Completion(
            text=reply.text,
            num_text_tokens=reply.completion_tokens,
            tokens=(),
            logprobs=(),
            version=None,
            finish_reason=reply.finish_reason,
        )

    async def _query(self, key: str, request: GenerationRequest) -> SaccadeError | None:
        """Request a reply and record it; return the error: its callers may have been cancelled."""
        max_bytes = request.sampling.max_tokens * MAX_BYTES_PER_TOKEN
        self._num_pending_bytes += max_bytes
        try:
            if self._broken is not None:
                return self._broken
            self._journal.reserve(self._num_pending_bytes)
            completion = await self._engine.generate(request)
            self._num_failures = 0
            self._record(key, request, completion)
        except EngineError as error:
            self._num_failures += 1
            if self._num_failures < self._max_failures:
                return error
            self._broken = BrokenEngineError(
                f"{pluralize(self._num_failures, 'request')} failed in a row, the last one: {error}; fix that and "
                "repeat the command, which continues",
                key="data_build.max_failures",
                value=self._num_failures,
            )
            self.stop_sending()
            return self._broken
        except RunError as error:  # the disk is full
            self._broken = error
            return error
        except SaccadeError as error:
            return error
        finally:
            del self._pending[key]
            self._num_pending_bytes -= max_bytes
        return None

    def _record(self, key: str, request: GenerationRequest, completion: Completion) -> None:
        text, finish_reason = completion.text or "", completion.finish_reason
        max_bytes = request.sampling.max_tokens * MAX_BYTES_PER_TOKEN
        if len(text.encode()) > max_bytes:
            text, finish_reason = text.encode()[:max_bytes].decode(errors="ignore"), FinishReason.LENGTH
        self._journal.append(
            RecordedReply(
                key=key,
                text=text,
                finish_reason=finish_reason,
                prompt_tokens=len(request.ledger),
                completion_tokens=completion.num_text_tokens,
            )
        )

    def _compute_key(self, request: GenerationRequest) -> str:
        sampling = request.sampling
        messages = [
            (message.role, [part.key if isinstance(part, ImageRef) else [part] for part in message.parts])
            for message in request.ledger.messages()
        ]
        return compute_digest(self._identity, messages, sampling.temperature, sampling.max_tokens, sampling.seed)

    def stop_sending(self) -> None:
        """See ChatEngine."""
        self._engine.stop_sending()

    async def close(self) -> None:
        """Wait for the requests whose callers were cancelled, so that their replies are recorded."""
        await asyncio.gather(*self._pending.values(), return_exceptions=True)
        self._journal.release()

    async def abort(self) -> None:
        """Send nothing more, and wait at most a minute for the requests in progress, so that they are recorded."""
        self.stop_sending()
        await asyncio.sleep(0)  # those that were not sent fail
        if pending := list(self._pending.values()):
            message = (
                "Stopping: %d requests in progress finish first (at most %g seconds); press Ctrl-C to stop at once. "
                "The same command continues the build."
            )
            _logger.warning(message, len(pending), _GRACE_SECONDS)
            await asyncio.wait(pending, timeout=_GRACE_SECONDS)
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)
        self._journal.release()
