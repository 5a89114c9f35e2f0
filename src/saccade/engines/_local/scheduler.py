"""Continuous batching in this process: whatever waits is taken together, main agents and sub-agents alike.

    agent --generate--> waiting --admit--> rows in flight --stop id / length--> future --> agent
                          |                    |   ^
                          |  prefill: one per  |   | one forward pass per token for all rows together
                          |  distinct ledger   |   |
                          +--> kept prefixes <-+---+ a finished row is kept for the episode's next turn

Who waits for whom: an agent waits for its future, set when its row ends, when it is cancelled or when the engine fails.
The loop runs while anything waits or is in flight, on the event loop's own thread: the order of events, and with it a
run, is the same every time. Between passes it yields, so that agents whose futures are set can act, run their tools
and come back with the next request. A result depends on its own ledger, sampling and seed alone.
"""

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from saccade.engines._local.keyvalues import Kept, Prefixes, Rows
from saccade.errors import EngineError, MediaError, SaccadeError, boundary
from saccade.ledger import Ledger, Picture
from saccade.media.cache import Lru
from saccade.model.backbone import Backbone, Features, Pixels, log_probabilities
from saccade.types import Completion, Sampling, Stop

_IDLE_BYTES = 2**30  # of keys and values that an idle engine may hold on to


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """A ledger that waits for, or is in, a row."""

    ledger: Ledger
    length: int  # of the ledger, in expanded tokens
    sampling: Sampling
    future: "asyncio.Future[Completion]"
    keys: tuple[str, ...]
    started: float
    uniforms: np.ndarray  # one number per token, from the request's own seed
    prefix: Kept | None = None
    position: int = 0  # of the next token, on all three axes
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def new(self) -> int:
        """How many of the ledger's tokens have no keys and values yet."""
        return self.length - (self.prefix.length if self.prefix else 0)

    @property
    def most(self) -> int:
        """How long its row may become."""
        return self.length + self.sampling.max_tokens

    def pictures(self) -> list[Picture]:
        """The ledger's pictures, in order, that have no keys and values yet."""
        start = self.prefix.length if self.prefix else 0
        return [slot.picture for slot in self.ledger.slots() if slot.at >= start]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the engine may hold at once; see `local`."""

    rows: int
    flight_tokens: int
    kept_tokens: int
    pass_tokens: int
    feature_bytes: int


@dataclass(slots=True, kw_only=True)
class Work:
    """What the engine has done since it began: tokens that were new to it, tokens sampled, and the seconds of both."""

    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0


class Scheduler:
    """Batches requests over one backbone. See the drawing above."""

    def __init__(self, backbone: Backbone, pixels: Pixels, limits: Limits) -> None:
        self._backbone, self._pixels, self._limits = backbone, pixels, limits
        self._rows = self._new_rows(limits.flight_tokens)
        self._prefixes = Prefixes(limits.kept_tokens)
        self._features: Lru[str, Features] = Lru(limits.feature_bytes)
        self._waiting: list[Request] = []
        self._active: list[Request] = []
        self._loop: asyncio.Task[None] | None = None
        self.version = 0
        self.work = Work()

    def _new_rows(self, most: int) -> Rows:
        backbone = self._backbone
        return Rows(shape=backbone.cache_shape, dtype=backbone.model.dtype, device=backbone.device, most=most)

    # ---- what the engine calls -------------------------------------------------------------------------------------

    async def submit(self, ledger: Ledger, sampling: Sampling) -> Completion:
        """Wait for a continuation; cancelling frees the row at the next pass."""
        request = Request(
            ledger=ledger,
            length=len(ledger),
            sampling=sampling,
            future=asyncio.get_running_loop().create_future(),
            keys=ledger.keys(),
            started=time.perf_counter(),
            uniforms=np.random.default_rng(sampling.seed).random(sampling.max_tokens),
        )
        self._waiting.append(request)
        if self._loop is None or self._loop.done():
            self._loop = asyncio.create_task(self._run())
        return await request.future

    def forget(self) -> None:
        """Drop all that was computed from old weights. Nothing may be in flight but what was cancelled."""
        self._drop_cancelled()
        if self._active:
            raise EngineError(f"{len(self._active)} requests are in flight; new weights can be taken when they end")
        self._prefixes.clear()
        self._features = Lru(self._limits.feature_bytes)

    async def close(self) -> None:
        """Abort what waits and what is in flight."""
        for request in (*self._waiting, *self._active):
            request.future.cancel()
        if self._loop is not None:
            await self._loop

    # ---- the loop --------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        try:
            with boundary(EngineError, "the local engine failed"):
                while self._waiting or self._active:
                    await self._settle()
                    self._advance()
                self._rows.shrink(_IDLE_BYTES)  # who shares the device may need it now
        except SaccadeError as error:
            for request in (*self._waiting, *self._active):
                if not request.future.done():
                    request.future.set_exception(EngineError(str(error)))
            self._waiting.clear()
            self._active.clear()

    @torch.inference_mode()  # never around a wait: whoever acts in it may want gradients
    def _advance(self) -> None:
        self._drop_cancelled()
        self._admit()
        self._decode()

    async def _settle(self) -> None:
        """Let agents act until no new request comes: batches are then full, and the same every time."""
        seen, quiet = len(self._waiting), 0
        while quiet < (1 if self._active and not self._waiting else 4):
            await asyncio.sleep(0)
            quiet = quiet + 1 if len(self._waiting) == seen else 0
            seen = len(self._waiting)

    def _drop_cancelled(self) -> None:
        self._waiting = [request for request in self._waiting if not request.future.done()]
        for row in reversed(range(len(self._active))):
            if self._active[row].future.done():
                self._release(row)

    def _admit(self) -> None:
        room = self._room()
        begun = time.perf_counter()
        admitted = self._prefill(self._waiting[:room])
        if not admitted:
            return  # nobody has room, or no picture of theirs can be read: those were told, and go with the cancelled
        first = len(self._active)
        everyone = (*self._active, *admitted)
        self._rows.reserve(len(everyone), max(request.length + len(request.tokens) for request in everyone) + 1)
        for row, request in enumerate(admitted, start=first):
            assert request.prefix is not None
            self._rows.load(row, request.prefix.blocks)
        # Not before: if anything above fails, they must be among those that are told.
        self._waiting = self._waiting[room:]
        self._active += admitted
        lasts = [request.prefix.last for request in admitted if request.prefix is not None]
        self._take(torch.stack([last for last in lasts if last is not None]), first)
        self.work.prefill_seconds += time.perf_counter() - begun

    def _room(self) -> int:
        """How many of those that wait can have a row, in order; one at least where none is in flight."""
        longest = max((request.most for request in self._active), default=0)
        for count, request in enumerate(self._waiting):
            rows, longest = len(self._active) + count + 1, max(longest, request.most)
            # All rows are as wide as the longest may become.
            if rows > self._limits.rows or (rows > 1 and rows * longest > self._limits.flight_tokens):
                return count
        return len(self._waiting)

    def _decode(self) -> None:
        """One forward pass: the newest token of every row in flight."""
        if not self._active:
            return
        begun = time.perf_counter()
        count, device = len(self._active), self._backbone.device
        longest = max(request.prefix.length + len(request.tokens) for request in self._active if request.prefix) - 1
        self._rows.prepare(count, 1, longest)
        ids = torch.tensor([[request.tokens[-1]] for request in self._active], device=device)
        at = torch.tensor([[request.position] for request in self._active], device=device)
        hidden = self._backbone.hidden(ids, at.expand(3, -1, -1), self._rows.mask(), store=self._rows)
        self._rows.lengths[:count] += 1
        for request in self._active:
            request.position += 1
        self._take(hidden[:, 0], 0)
        # Taking tokens waits for the device, so the clock tells its time too.
        self.work.decode_seconds += time.perf_counter() - begun
        self.work.decode_tokens += count

    def _take(self, hidden_BD: Tensor, first: int) -> None:
        """Sample the next token of rows `first`, `first + 1`, …; release those that end."""
        requests = self._active[first:]
        tokens, logprobs = draw(
            self._backbone.logits(hidden_BD),
            [request.sampling.temperature for request in requests],
            [float(request.uniforms[len(request.tokens)]) for request in requests],
        )
        for request, token, logprob in zip(requests, tokens, logprobs, strict=True):
            request.tokens.append(token)
            request.logprobs.append(logprob)
        for row in reversed(range(first, len(self._active))):
            request = self._active[row]
            stop = request.tokens[-1] in request.sampling.stop_ids
            if stop or len(request.tokens) == request.sampling.max_tokens:
                self._finish(row, Stop.STOP if stop else Stop.LENGTH)

    def _finish(self, row: int, stop: Stop) -> None:
        request = self._active[row]
        tokens, logprobs = tuple(request.tokens), tuple(request.logprobs)
        assert request.prefix is not None
        covered = request.prefix.length + len(tokens) - 1
        block = self._rows.block(row, request.prefix.length, covered)
        blocks = (*request.prefix.blocks, block) if block.shape[3] else request.prefix.blocks
        after = request.ledger.act(tokens, logprobs=logprobs, version=self.version)
        self._prefixes.put(after.keys()[-1], Kept(blocks=blocks, length=covered, last=None))
        if not request.future.done():
            seconds = time.perf_counter() - request.started
            request.future.set_result(
                Completion(tokens=tokens, logprobs=logprobs, version=self.version, stop=stop, seconds=seconds)
            )
        self._release(row)

    def _release(self, row: int) -> None:
        last = len(self._active) - 1
        if row != last:
            self._rows.move(last, row)
            self._active[row] = self._active[last]
        self._active.pop()

    # ---- prefill ---------------------------------------------------------------------------------------------------

    def _prefill(self, requests: Sequence[Request]) -> list[Request]:
        """Give every request its prefix; each distinct ledger goes through the model once, and only what is new.

        Returns those that have one: a request whose pictures can't be read fails alone.
        """
        work: dict[str, Request] = {}
        for request in requests:
            request.prefix = self._prefixes.longest(request.keys)
            if request.prefix is None or request.prefix.last is None or request.new:
                work.setdefault(request.keys[-1], request)
        self.work.prefill_tokens += sum(request.new for request in work.values())
        done: dict[str, Request] = {}
        lost: dict[str, MediaError] = {}
        for batch in self._passes(work.values()):
            held, unread = self._read(batch)
            lost |= unread
            readable = [request for request in batch if request.keys[-1] not in unread]
            if readable:
                self._forward(readable, held)
            done.update({request.keys[-1]: request for request in readable})
        found = [request for request in requests if request.keys[-1] not in lost]
        for request in found:
            twin = done.get(request.keys[-1])
            request.prefix = twin.prefix if twin else request.prefix
            request.position = twin.position if twin else self._next_position(request)
        for request in requests:
            if request.keys[-1] in lost and not request.future.done():
                request.future.set_exception(EngineError(str(lost[request.keys[-1]])))
        return found

    def _read(self, batch: Sequence[Request]) -> tuple[dict[str, np.ndarray], dict[str, MediaError]]:
        """Pixels of the pictures that the vision tower has yet to see, by key; why a ledger's can't be read, by its."""
        held: dict[str, np.ndarray] = {}
        lost: dict[str, MediaError] = {}
        for request in batch:
            unseen = {each.key: each for each in request.pictures() if self._features.get(each.key) is None}
            try:
                held |= {key: self._pixels(picture) for key, picture in unseen.items() if key not in held}
            except MediaError as error:  # a clip may have changed or gone
                lost[request.keys[-1]] = error
        return held, lost

    def _next_position(self, request: Request) -> int:
        return int(self._backbone.renderer.positions(request.ledger)[:, -1].max()) + 1

    def _passes(self, requests: Iterable[Request]) -> list[list[Request]]:
        """Split into passes of similar lengths, each within the token budget when padded.

        The past that a pass works on is copied beside it, and may be four times as much.
        """
        batches: list[list[Request]] = []
        budget = self._limits.pass_tokens
        for request in sorted(requests, key=lambda request: request.new, reverse=True):
            batch = batches[-1] if batches else []
            size, longest = len(batch) + 1, max(each.length for each in (*batch, request))
            if batch and size * batch[0].new <= budget and size * longest <= 4 * budget:
                batch.append(request)
            else:
                batches.append([request])
        return batches

    def _forward(self, batch: Sequence[Request], pixels: Mapping[str, np.ndarray]) -> None:
        """One padded pass over the new tokens of several ledgers; keeps the results."""
        device = self._backbone.device
        starts = [request.prefix.length if request.prefix else 0 for request in batch]
        news = [request.ledger.expanded()[start:] for request, start in zip(batch, starts, strict=True)]
        width = max(len(new) for new in news)
        ids = torch.zeros(len(batch), width, dtype=torch.long)
        positions = torch.zeros(3, len(batch), width, dtype=torch.long)
        scratch = self._new_rows(len(batch) * (max(starts) + width))
        scratch.reserve(len(batch), max(starts) + width)
        for row, (request, start, new) in enumerate(zip(batch, starts, news, strict=True)):
            ids[row, : len(new)] = torch.tensor(new)
            where = self._backbone.renderer.positions(request.ledger)
            positions[:, row, : len(new)] = torch.from_numpy(where[:, start:])
            request.position = int(where[:, -1].max()) + 1
            scratch.load(row, request.prefix.blocks if request.prefix else ())
        scratch.prepare(len(batch), width, max(starts))
        features = self._gather(batch, pixels)
        hidden = self._backbone.hidden(
            ids.to(device), positions.to(device), scratch.mask(), features=features, store=scratch
        )
        for row, (request, start, new) in enumerate(zip(batch, starts, news, strict=True)):
            past = request.prefix.blocks if request.prefix else ()
            block = scratch.block(row, start, start + len(new))
            last = hidden[row, len(new) - 1].clone()
            request.prefix = Kept(blocks=(*past, block), length=start + len(new), last=last)
            self._prefixes.put(request.keys[-1], request.prefix)

    def _gather(self, batch: Sequence[Request], pixels: Mapping[str, np.ndarray]) -> Features | None:
        """The features of the new pictures of all rows, each picture through the vision tower once."""
        pictures = [picture for request in batch for picture in request.pictures()]
        if not pictures:
            return None
        found: dict[str, Features] = {}
        missing: dict[str, Picture] = {}
        for picture in pictures:
            held = self._features.get(picture.key)
            if held is None:
                missing[picture.key] = picture
            else:
                found[picture.key] = held
        seen = self._backbone.features(list(missing.values()), lambda picture: pixels[picture.key])
        for key, feature in zip(missing, seen, strict=True):
            found[key] = feature
            self._features.put(key, feature, feature.bytes)
        return Features.cat([found[picture.key] for picture in pictures])


def draw(logits_BV: Tensor, temperatures: Sequence[float], uniforms: Sequence[float]) -> tuple[list[int], list[float]]:
    """One token per row and its logprob; row b is drawn by inverting its distribution at `uniforms[b]`, or greedily.

    A token of probability 0 is never drawn. The sum runs in float64, so that the tail is not lost.
    """
    scale = torch.tensor([temperature or 1.0 for temperature in temperatures], device=logits_BV.device)
    logp = log_probabilities(logits_BV / scale[:, None], 1.0)
    cumulative = logp.double().exp().cumsum(dim=-1)
    points = torch.tensor(uniforms, dtype=torch.float64, device=logits_BV.device)[:, None] * cumulative[:, -1:]
    drawn = torch.searchsorted(cumulative, points, right=True)[:, 0].clamp_(max=logits_BV.shape[1] - 1)
    greedy = torch.tensor([temperature == 0 for temperature in temperatures], device=logits_BV.device)
    tokens = torch.where(greedy, logp.argmax(dim=-1), drawn)
    picked: list[float] = logp.gather(1, tokens[:, None])[:, 0].tolist()
    chosen: list[int] = tokens.tolist()
    return chosen, picked
