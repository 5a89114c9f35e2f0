"""The local engine: transformers in this process, with continuous batching and a prefix cache.

All waiting requests form one batch, of episodes and sub-agents alike.

    rollout --generate--> waiting --admit--> running rows --stop id / length--> future --> rollout
                            |                    |   ^
                            |  prefill: one per  |   | one forward pass per token for all rows
                            |  distinct ledger   |   |
                            +--> prefix cache <--+---+ a finished row is cached for the episode's next turn

A rollout waits for its future, which is set when its row ends, when the request is cancelled, or when the engine fails.
The loop runs while there are requests, on the event loop's thread, so the order of events is deterministic, and with it
the run. Between passes it yields, so that rollouts whose futures are set can run their tools and submit their next
requests. A result depends on its own ledger, sampling parameters and seed, and on the rest of the batch only through
floating-point rounding.
"""

import asyncio
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from saccade.config.schema import PositiveInt
from saccade.engines._local.kv_cache import NO_PREFIX, CachedPrefix, KVCache, PrefixCache
from saccade.errors import BrokenEngineError, EngineError, MediaError, SaccadeError, convert_errors
from saccade.ledger import ImageRef, Ledger
from saccade.media.cache import LRUCache
from saccade.models import checkpoint_io
from saccade.models.backbone import Backbone
from saccade.models.policy import VisionFeatures, compute_logprobs
from saccade.protocols import MediaLoader, WeightSource
from saccade.types import Completion, FinishReason, GenerationRequest, SamplingParams

_MAX_IDLE_CACHE_BYTES = 2**30  # of KV cache that an idle engine may hold


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """A ledger to continue; it waits for a row or runs in one."""

    ledger: Ledger
    length: int  # of the ledger, in tokens with expanded images
    sampling: SamplingParams
    future: "asyncio.Future[Completion]"
    prefix_hashes: tuple[str, ...]
    start_time: float
    uniforms: np.ndarray  # one number per token, from the request's own seed
    prefix: CachedPrefix = NO_PREFIX
    position: int = 0  # of the next token, on all three axes
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def num_new_tokens(self) -> int:
        """Return how many of the ledger's tokens are not in the KV cache yet."""
        return self.length - self.prefix.num_tokens

    @property
    def max_length(self) -> int:
        """Return the largest length that its row may reach."""
        return self.length + self.sampling.max_tokens

    def list_uncached_images(self) -> list[ImageRef]:
        """Return the ledger's images, in order, that are not in the KV cache yet."""
        return [slot.image for slot in self.ledger.slots() if slot.index >= self.prefix.num_tokens]


@dataclass(slots=True, kw_only=True)
class SamplingStats:
    """Counts and seconds since the start: prefilled tokens (without cached ones) and sampled tokens."""

    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0


class Local:
    """Samples from a backbone in this process, which may be the one that is trained.

    Fewer conversations than `max_num_seqs` are sampled concurrently where their number times the longest length would
    exceed `kv_cache_tokens`. Memory is allocated as needed. The other requests of a batch change a result only by
    floating-point rounding.
    """

    has_separate_weights = False

    def __init__(
        self,
        backbone: Backbone,
        media: MediaLoader,
        *,
        max_num_seqs: PositiveInt = 256,  # conversations sampled concurrently; fewer where the KV cache would overflow
        kv_cache_tokens: int = 262144,  # KV cache of the conversations being sampled, tokens
        prefix_cache_tokens: int = 131072,  # KV cache kept for later turns and shared prompts, tokens
        max_num_batched_tokens: int = 8192,  # new tokens of a prefill pass
        vision_cache_bytes: int = 2**31,  # cached image features, bytes
    ) -> None:
        self._backbone, self._media = backbone, media
        self._max_num_seqs, self._kv_cache_tokens = max_num_seqs, kv_cache_tokens
        self._max_num_batched_tokens, self._vision_cache_bytes = max_num_batched_tokens, vision_cache_bytes
        self._kv_cache = self._create_kv_cache(kv_cache_tokens)
        self._prefix_cache = PrefixCache(prefix_cache_tokens)
        self._vision_cache: LRUCache[str, VisionFeatures] = LRUCache(vision_cache_bytes)
        self._waiting: list[Request] = []
        self._running: list[Request] = []
        self._loop_task: asyncio.Task[None] | None = None
        self.version = 0
        self.stats = SamplingStats()

    def _create_kv_cache(self, max_positions: int) -> KVCache:
        return KVCache(
            shape=self._backbone.kv_cache_shape,
            dtype=self._backbone.model.dtype,
            device=self._backbone.device,
            max_positions=max_positions,
        )

    async def generate(self, request: GenerationRequest) -> Completion:
        """Sample a continuation; see protocols.Engine. Cancelling frees the row at the next pass."""
        ledger, sampling = request.ledger, request.sampling
        if not ledger.segments:
            raise EngineError("the ledger is empty; render a prompt first")
        if not set(sampling.forbidden_ids) <= set(self._backbone.renderer.forbidden_ids):
            # Trainer and sampler mask the same ids, or their distributions would differ.
            raise EngineError(
                f"sampling.forbidden_ids={sampling.forbidden_ids} must be a subset of the model's "
                f"{self._backbone.renderer.forbidden_ids}: the local engine masks only these",
                key="sampling.forbidden_ids",
                value=sampling.forbidden_ids,
            )
        queued = Request(
            ledger=ledger,
            length=len(ledger),
            sampling=sampling,
            future=asyncio.get_running_loop().create_future(),
            prefix_hashes=ledger.prefix_hashes(),
            start_time=time.perf_counter(),
            uniforms=np.random.default_rng(sampling.seed).random(sampling.max_tokens),
        )
        self._waiting.append(queued)
        if self._loop_task is None or self._loop_task.done():
            self._loop_task = asyncio.create_task(self._run_loop())
        return await queued.future

    async def sync_weights(self, source: WeightSource, version: int) -> None:
        """Drop the caches; load the weights, unless the trainer shares this engine's tensors.

        Raises EngineError if requests are running.
        """
        self._drop_cancelled()
        if self._running:
            raise EngineError(
                f"{len(self._running)} requests are running; the weights can be updated only when all have ended",
                value=len(self._running),
            )
        self._drop_caches()
        if source is not self._backbone:
            self._backbone.model.load_state_dict(source.state_dict())
        self.version = version

    def _drop_caches(self) -> None:
        self._prefix_cache.clear()
        self._vision_cache = LRUCache(self._vision_cache_bytes)

    async def close(self) -> None:
        """Abort all requests."""
        for request in (*self._waiting, *self._running):
            request.future.cancel()
        if self._loop_task is not None:
            await self._loop_task

    # ---- the loop --------------------------------------------------------------------------------------------------

    async def _run_loop(self) -> None:
        try:
            with convert_errors(EngineError, "the local engine failed"):
                while self._waiting or self._running:
                    await self._wait_for_requests()
                    self._step()
                self._kv_cache.shrink(_MAX_IDLE_CACHE_BYTES)  # the trainer may need the memory now
        except SaccadeError as error:
            for request in (*self._waiting, *self._running):
                if not request.future.done():
                    error_type = BrokenEngineError if isinstance(error, BrokenEngineError) else EngineError
                    request.future.set_exception(error_type(str(error), key=error.key, value=error.value))
            self._waiting.clear()
            self._running.clear()

    @torch.inference_mode()  # never around an await: other tasks may compute gradients
    def _step(self) -> None:
        self._drop_cancelled()
        self._admit()
        self._decode()

    async def _wait_for_requests(self) -> None:
        """Yield until no new request arrives, so that batches are full and deterministic."""
        num_waiting, num_idle_yields = len(self._waiting), 0
        while num_idle_yields < (1 if self._running and not self._waiting else 4):
            await asyncio.sleep(0)
            num_idle_yields = num_idle_yields + 1 if len(self._waiting) == num_waiting else 0
            num_waiting = len(self._waiting)

    def _drop_cancelled(self) -> None:
        self._waiting = [request for request in self._waiting if not request.future.done()]
        for row in reversed(range(len(self._running))):
            if self._running[row].future.done():
                self._release(row)

    def _admit(self) -> None:
        num_admissible = self._count_admissible()
        started = time.perf_counter()
        admitted = self._prefill(self._waiting[:num_admissible])
        if not admitted:
            return  # no room, or no images could be loaded: those futures are set, and are dropped with the cancelled
        first = len(self._running)
        rows = (*self._running, *admitted)
        self._kv_cache.reserve(len(rows), max(request.length + len(request.tokens) for request in rows) + 1)
        for row, request in enumerate(admitted, start=first):
            self._kv_cache.load_row(row, request.prefix.blocks)
        # Only now: if anything above fails, their futures must still receive the error.
        self._waiting = self._waiting[num_admissible:]
        self._running += admitted
        hidden = [request.prefix.last_hidden for request in admitted if request.prefix.last_hidden is not None]
        self._sample_next(torch.stack(hidden), first)
        self.stats.prefill_seconds += time.perf_counter() - started

    def _count_admissible(self) -> int:
        """Return how many waiting requests get a row, in order; at least one if none is running."""
        max_length = max((request.max_length for request in self._running), default=0)
        for count, request in enumerate(self._waiting):
            rows, max_length = len(self._running) + count + 1, max(max_length, request.max_length)
            # All rows are as wide as the longest may become.
            if rows > self._max_num_seqs or (rows > 1 and rows * max_length > self._kv_cache_tokens):
                return count
        return len(self._waiting)

    def _decode(self) -> None:
        """Run one forward pass over the newest token of every running row."""
        if not self._running:
            return
        started = time.perf_counter()
        count, device = len(self._running), self._backbone.device
        lengths = [request.prefix.num_tokens + len(request.tokens) for request in self._running]
        self._kv_cache.prepare(count, 1, max(lengths) - 1)
        ids = torch.tensor([[request.tokens[-1]] for request in self._running], device=device)
        positions = torch.tensor([[request.position] for request in self._running], device=device)
        hidden = self._backbone.compute_hidden_states(
            ids, positions.expand(3, -1, -1), self._kv_cache.build_mask(), kv_store=self._kv_cache
        )
        self._kv_cache.lengths[:count] += 1
        for request in self._running:
            request.position += 1
        self._sample_next(hidden[:, 0], 0)
        # Reading the tokens synchronizes with the device, so its time is included.
        self.stats.decode_seconds += time.perf_counter() - started
        self.stats.decode_tokens += count

    def _sample_next(self, hidden_BD: Tensor, first_row: int) -> None:
        """Sample the next token of rows `first_row`, `first_row + 1`, …; release those that end."""
        requests = self._running[first_row:]
        tokens, logprobs = sample_tokens(
            self._backbone.compute_logits(hidden_BD),
            [request.sampling.temperature for request in requests],
            [float(request.uniforms[len(request.tokens)]) for request in requests],
        )
        for request, token, logprob in zip(requests, tokens, logprobs, strict=True):
            request.tokens.append(token)
            request.logprobs.append(logprob)
        for row in reversed(range(first_row, len(self._running))):
            request = self._running[row]
            if not math.isfinite(request.logprobs[-1]):
                self._fail(row)
                continue
            has_stop_id = request.tokens[-1] in request.sampling.stop_ids
            if has_stop_id or len(request.tokens) == request.sampling.max_tokens:
                self._finish(row, FinishReason.STOP if has_stop_id else FinishReason.LENGTH)

    def _finish(self, row: int, finish_reason: FinishReason) -> None:
        request = self._running[row]
        tokens, logprobs = tuple(request.tokens), tuple(request.logprobs)
        num_cached = request.prefix.num_tokens + len(tokens) - 1
        block = self._kv_cache.copy_block(row, request.prefix.num_tokens, num_cached)
        blocks = (*request.prefix.blocks, block) if block.shape[3] else request.prefix.blocks
        ledger = request.ledger.append_completion(tokens, logprobs=logprobs, version=self.version)
        self._prefix_cache.put(
            ledger.prefix_hashes()[-1], CachedPrefix(blocks=blocks, num_tokens=num_cached, last_hidden=None)
        )
        if not request.future.done():
            seconds = time.perf_counter() - request.start_time
            request.future.set_result(
                Completion(
                    tokens=tokens, logprobs=logprobs, version=self.version, finish_reason=finish_reason, seconds=seconds
                )
            )
        self._release(row)

    def _fail(self, row: int) -> None:
        """End a request whose logits hold NaN or an infinity. Raises BrokenEngineError if a weight does, too."""
        if name := checkpoint_io.find_nonfinite(self._backbone.model.state_dict()):
            raise BrokenEngineError(
                f"the weight {name} holds NaN or an infinity; resume from an earlier checkpoint", key="model.path"
            )
        request = self._running[row]
        if not request.future.done():
            request.future.set_exception(
                EngineError(
                    f"the logits of token {len(request.tokens)} of a reply hold NaN or an infinity, in "
                    f"model.dtype={self._backbone.dtype}",
                    key="model.dtype",
                    value=self._backbone.dtype,
                )
            )
        self._drop_caches()  # they may hold what made the logits
        self._kv_cache.clear_row(row)
        self._release(row)

    def _release(self, row: int) -> None:
        last = len(self._running) - 1
        if row != last:
            self._kv_cache.move_row(last, row)
            self._running[row] = self._running[last]
        self._running.pop()

    # ---- prefill ---------------------------------------------------------------------------------------------------

    def _prefill(self, requests: Sequence[Request]) -> list[Request]:
        """Compute the prefix of every request: only new tokens, and each distinct ledger once.

        Returns the requests that succeeded: one whose images can't be loaded fails alone.
        """
        distinct: dict[str, Request] = {}
        for request in requests:
            request.prefix = self._prefix_cache.find_longest(request.prefix_hashes)
            if request.prefix.last_hidden is None or request.num_new_tokens:
                distinct.setdefault(request.prefix_hashes[-1], request)
        self.stats.prefill_tokens += sum(request.num_new_tokens for request in distinct.values())
        computed: dict[str, Request] = {}
        failed: dict[str, MediaError] = {}
        for batch in self._split_into_passes(distinct.values()):
            pixels, errors = self._load_images(batch)
            failed |= errors
            loaded = [request for request in batch if request.prefix_hashes[-1] not in errors]
            if loaded:
                self._forward(loaded, pixels)
            computed.update({request.prefix_hashes[-1]: request for request in loaded})
        succeeded = [request for request in requests if request.prefix_hashes[-1] not in failed]
        for request in succeeded:
            if same := computed.get(request.prefix_hashes[-1]):
                request.prefix, request.position = same.prefix, same.position
            else:
                position_ids = self._backbone.renderer.compute_position_ids(request.ledger)
                request.position = int(position_ids[:, -1].max()) + 1
        for request in requests:
            error = failed.get(request.prefix_hashes[-1])
            if error is not None and not request.future.done():
                request.future.set_exception(EngineError(str(error), key=error.key, value=error.value))
        return succeeded

    def _load_images(self, batch: Sequence[Request]) -> tuple[dict[str, np.ndarray], dict[str, MediaError]]:
        """Load the images without cached features: pixels by image key, and errors by the ledger's last hash."""
        pixels: dict[str, np.ndarray] = {}
        errors: dict[str, MediaError] = {}
        for request in batch:
            images = {image.key: image for image in request.list_uncached_images()}
            missing = {key: image for key, image in images.items() if self._vision_cache.get(key) is None}
            try:
                pixels |= {key: self._media.load_pixels(image) for key, image in missing.items() if key not in pixels}
            except MediaError as error:  # the file may have changed or been deleted
                errors[request.prefix_hashes[-1]] = error
        return pixels, errors

    def _split_into_passes(self, requests: Iterable[Request]) -> list[list[Request]]:
        """Split requests into passes of similar lengths, each within the token budget when padded.

        A pass also copies the cached tokens that it attends to; with these it may be four times as large.
        """
        batches: list[list[Request]] = []
        budget = self._max_num_batched_tokens
        for request in sorted(requests, key=lambda request: request.num_new_tokens, reverse=True):
            batch = batches[-1] if batches else []
            size, max_length = len(batch) + 1, max(member.length for member in (*batch, request))
            if batch and size * batch[0].num_new_tokens <= budget and size * max_length <= 4 * budget:
                batch.append(request)
            else:
                batches.append([request])
        return batches

    def _forward(self, batch: Sequence[Request], pixels: Mapping[str, np.ndarray]) -> None:
        """Run one padded pass over the new tokens of several ledgers; cache the results."""
        device = self._backbone.device
        starts = [request.prefix.num_tokens for request in batch]
        new_ids = [request.ledger.input_ids()[start:] for request, start in zip(batch, starts, strict=True)]
        width = max(len(new) for new in new_ids)
        ids = torch.zeros(len(batch), width, dtype=torch.long)
        positions = torch.zeros(3, len(batch), width, dtype=torch.long)
        scratch = self._create_kv_cache(len(batch) * (max(starts) + width))
        scratch.reserve(len(batch), max(starts) + width)
        for row, (request, start, new) in enumerate(zip(batch, starts, new_ids, strict=True)):
            ids[row, : len(new)] = torch.tensor(new)
            position_ids = self._backbone.renderer.compute_position_ids(request.ledger)
            positions[:, row, : len(new)] = torch.from_numpy(position_ids[:, start:])
            request.position = int(position_ids[:, -1].max()) + 1
            scratch.load_row(row, request.prefix.blocks)
        scratch.prepare(len(batch), width, max(starts))
        features = self._gather_features(batch, pixels)
        hidden = self._backbone.compute_hidden_states(
            ids.to(device), positions.to(device), scratch.build_mask(), features=features, kv_store=scratch
        )
        for row, (request, start, new) in enumerate(zip(batch, starts, new_ids, strict=True)):
            blocks = *request.prefix.blocks, scratch.copy_block(row, start, start + len(new))
            last = hidden[row, len(new) - 1].clone()
            request.prefix = CachedPrefix(blocks=blocks, num_tokens=start + len(new), last_hidden=last)
            self._prefix_cache.put(request.prefix_hashes[-1], request.prefix)

    def _gather_features(self, batch: Sequence[Request], pixels: Mapping[str, np.ndarray]) -> VisionFeatures | None:
        """Return the features of the new images of all rows; encode each image once. None if there are no images."""
        images = [image for request in batch for image in request.list_uncached_images()]
        if not images:
            return None
        features = {image.key: cached for image in images if (cached := self._vision_cache.get(image.key))}
        missing = {image.key: image for image in images if image.key not in features}
        encoded = self._backbone.encode_images(list(missing.values()), lambda image: pixels[image.key])
        for key, feature in zip(missing, encoded, strict=True):
            features[key] = feature
            self._vision_cache.put(key, feature, feature.nbytes)
        return VisionFeatures.cat([features[image.key] for image in images])


def sample_tokens(
    logits_BV: Tensor, temperatures: Sequence[float], uniforms: Sequence[float]
) -> tuple[list[int], list[float]]:
    """Sample one token per row; return the tokens and their logprobs.

    Row b is sampled by inverting its cumulative distribution at `uniforms[b]`, or greedily at temperature 0. A token of
    probability 0 is never sampled. The cumulative sum is in float64, so that the tail is not lost to rounding.
    """
    scale = torch.tensor([temperature or 1.0 for temperature in temperatures], device=logits_BV.device)
    logp = compute_logprobs(logits_BV / scale[:, None], 1.0)
    cumulative = logp.double().exp().cumsum(dim=-1)
    points = torch.tensor(uniforms, dtype=torch.float64, device=logits_BV.device)[:, None] * cumulative[:, -1:]
    sampled = torch.searchsorted(cumulative, points, right=True)[:, 0].clamp_(max=logits_BV.shape[1] - 1)
    is_greedy = torch.tensor([temperature == 0 for temperature in temperatures], device=logits_BV.device)
    tokens_B = torch.where(is_greedy, logp.argmax(dim=-1), sampled)
    return tokens_B.tolist(), logp.gather(1, tokens_B[:, None])[:, 0].tolist()


local = Local
