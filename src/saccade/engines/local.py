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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from saccade.config.schema import PositiveInt
from saccade.engines._local.decoder import Decoder
from saccade.engines._local.kv_cache import CachedPrefix, KVCache, PrefixCache
from saccade.engines._local.rows import Request, Rows
from saccade.errors import BrokenEngineError, EngineError, MediaError, SaccadeError, convert_errors
from saccade.media.cache import LRUCache
from saccade.models import checkpoint_io
from saccade.models.attention import AttentionSpan, PackedTrees
from saccade.models.policy import VisionFeatures, compute_logprobs
from saccade.models.vlm import VisionLanguageModel
from saccade.protocols import MediaLoader, WeightSource
from saccade.types import Completion, FinishReason, GenerationRequest

_MAX_IDLE_CACHE_BYTES = 2**30  # of KV cache that an idle engine may hold
_NUM_RESERVED_TOKENS = 128  # room in each row for tokens to be sampled


@dataclass(slots=True, kw_only=True)
class SamplingStats:
    """Counts and seconds since the start: prefilled tokens (without cached ones) and sampled tokens."""

    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0


class Local:
    """Samples from a model in this process, which may be the one that is trained.

    Fewer conversations than `max_num_seqs` are sampled concurrently where their number times the longest length would
    exceed `kv_cache_tokens`. Memory is allocated as needed. The other requests of a batch change a result only by
    floating-point rounding.
    """

    has_separate_weights = False

    def __init__(
        self,
        vlm: VisionLanguageModel,
        media: MediaLoader,
        *,
        max_num_seqs: PositiveInt = 256,  # conversations sampled concurrently; fewer where the KV cache would overflow
        kv_cache_tokens: int = 262144,  # KV cache of the conversations being sampled, tokens
        prefix_cache_tokens: int = 131072,  # KV cache kept for later turns and shared prompts, tokens
        max_num_batched_tokens: int = 8192,  # new tokens of a prefill pass
        vision_cache_bytes: int = 2**31,  # cached image features, bytes
    ) -> None:
        self._vlm, self._media = vlm, media
        self._max_num_seqs, self._kv_cache_tokens = max_num_seqs, kv_cache_tokens
        self._max_num_batched_tokens, self._vision_cache_bytes = max_num_batched_tokens, vision_cache_bytes
        self._kv_cache = self._create_kv_cache(kv_cache_tokens)
        self._prefix_cache = PrefixCache(prefix_cache_tokens)
        self._vision_cache: LRUCache[str, VisionFeatures] = LRUCache(vision_cache_bytes)
        self._waiting: list[Request] = []
        self._rows = Rows()
        self._has_cancelled = self._is_syncing = False
        language_model = vlm.language_model
        self._decoder = Decoder(language_model) if Decoder.supports(language_model) else None
        self._loop_task: asyncio.Task[None] | None = None
        self.version = 0
        self.stats = SamplingStats()

    def _create_kv_cache(self, max_positions: int) -> KVCache:
        return KVCache(
            shape=self._vlm.kv_cache_shape,
            dtype=self._vlm.model.dtype,
            device=self._vlm.device,
            max_positions=max_positions,
        )

    async def generate(self, request: GenerationRequest) -> Completion:
        """Sample a continuation; see protocols.Engine. Cancelling frees the row at the next pass."""
        ledger, sampling = request.ledger, request.sampling
        if not ledger.segments:
            raise EngineError("the ledger is empty; render a prompt first")
        if not set(sampling.forbidden_ids) <= set(self._vlm.renderer.forbidden_ids):
            # Trainer and sampler mask the same ids, or their distributions would differ.
            raise EngineError(
                f"sampling.forbidden_ids={sampling.forbidden_ids} must be a subset of the model's "
                f"{self._vlm.renderer.forbidden_ids}: the local engine masks only these",
                key="sampling.forbidden_ids",
                value=sampling.forbidden_ids,
            )
        queued = Request(
            ledger=ledger,
            length=len(ledger),
            sampling=sampling,
            future=asyncio.get_running_loop().create_future(),
            prefix_hashes=ledger.prefix_hashes(),
            random=np.random.default_rng(sampling.seed),
        )
        self._waiting.append(queued)
        if self._loop_task is None or self._loop_task.done():
            self._loop_task = asyncio.create_task(self._run_loop())
        try:
            return await queued.future
        except asyncio.CancelledError:
            self._has_cancelled = True
            raise

    async def sync_weights(self, source: WeightSource, version: int) -> None:
        """Drop the caches; load the weights, unless the trainer shares this engine's tensors.

        If the weights are its own, it first samples running requests to their end; waiting ones start afterwards.
        Raises EngineError if requests are running and the tensors are shared.
        """
        self._drop_cancelled()
        if source is self._vlm and self._rows.requests:
            raise EngineError(
                f"{len(self._rows)} requests are running; the weights can be updated only when all have ended",
                value=len(self._rows),
            )
        self._is_syncing = True
        try:
            while self._rows.requests:
                await asyncio.sleep(0)
            self._drop_caches()
            if source is not self._vlm:
                self._vlm.model.load_state_dict(source.state_dict())
            self.version = version
        finally:
            self._is_syncing = False

    def _drop_caches(self) -> None:
        self._drop_weight_copies()
        self._prefix_cache.clear()
        self._vision_cache = LRUCache(self._vision_cache_bytes)

    def _drop_weight_copies(self) -> None:
        if self._decoder is not None:
            self._decoder.drop_weights()

    async def close(self) -> None:
        """Stop, and fail the pending requests."""
        self._fail_requests(lambda: EngineError("the engine was closed during a request"))
        self._has_cancelled = True
        if self._loop_task is not None:
            await self._loop_task

    # ---- the loop --------------------------------------------------------------------------------------------------

    async def _run_loop(self) -> None:
        try:
            with convert_errors(EngineError, "the local engine failed"):
                while self._waiting or self._rows.requests:
                    await self._wait_for_requests()
                    self._step()
                self._kv_cache.shrink(_MAX_IDLE_CACHE_BYTES)  # the trainer may need the memory now
        except SaccadeError as error:
            error_type = BrokenEngineError if isinstance(error, BrokenEngineError) else EngineError
            message, key, value = str(error), error.key, error.value
            self._fail_requests(lambda: error_type(message, key=key, value=value))
            self._waiting.clear()
            self._rows = Rows()
        finally:
            self._drop_weight_copies()  # the trainer may change the weights now

    def _fail_requests(self, build_error: Callable[[], SaccadeError]) -> None:
        for request in (*self._waiting, *self._rows.requests):
            if not request.future.done():
                request.future.set_exception(build_error())

    @torch.inference_mode()  # never around an await: other tasks may compute gradients
    def _step(self) -> None:
        self._drop_cancelled()
        self._admit()
        self._decode()

    async def _wait_for_requests(self) -> None:
        """Yield until no new request arrives, so that batches are full and deterministic."""
        num_waiting, num_idle_yields = len(self._waiting), 0
        while num_idle_yields < (1 if self._rows.requests and not self._waiting else 4):
            await asyncio.sleep(0)
            num_idle_yields = num_idle_yields + 1 if len(self._waiting) == num_waiting else 0
            num_waiting = len(self._waiting)

    def _drop_cancelled(self) -> None:
        if not self._has_cancelled:
            return
        self._has_cancelled = False
        self._waiting = [request for request in self._waiting if not request.future.done()]
        for row in reversed(range(len(self._rows))):
            if self._rows.requests[row].future.done():
                self._release(row)

    def _admit(self) -> None:
        num_admissible = self._count_admissible()
        started = time.perf_counter()
        admitted = self._prefill(self._waiting[:num_admissible])
        if not admitted:
            return  # no room, or no images could be loaded: those futures are set, and are dropped with the cancelled
        first = len(self._rows)
        longest = max(self._rows.max_length, *(request.length for request in admitted))
        # Growing copies the cache, so room for the next tokens is made now.
        full = max(request.max_length for request in (*self._rows.requests, *admitted))
        self._kv_cache.reserve(first + len(admitted), min(full, longest + _NUM_RESERVED_TOKENS))
        for row, request in enumerate(admitted, start=first):
            self._kv_cache.load_row(row, request.prefix.blocks)
        # Only now: if anything above fails, their futures must still receive the error.
        self._waiting = self._waiting[num_admissible:]
        self._rows.add(admitted)
        hidden = [request.prefix.last_hidden for request in admitted if request.prefix.last_hidden is not None]
        self._sample_next(torch.stack(hidden), first)
        self.stats.prefill_seconds += time.perf_counter() - started

    def _count_admissible(self) -> int:
        """Return how many waiting requests get a row, in order; at least one if none is running.

        0 while a weight sync waits for the running requests.
        """
        if self._is_syncing:
            return 0
        max_length = max((request.max_length for request in self._rows.requests), default=0)
        for count, request in enumerate(self._waiting):
            rows, max_length = len(self._rows) + count + 1, max(max_length, request.max_length)
            # All rows are as wide as the longest may become.
            if rows > self._max_num_seqs or (rows > 1 and rows * max_length > self._kv_cache_tokens):
                return count
        return len(self._waiting)

    def _decode(self) -> None:
        """Run one forward pass over the newest token of every running row."""
        if not self._rows.requests:
            return
        started = time.perf_counter()
        rows, device = self._rows, self._vlm.device
        count = len(rows)
        self._kv_cache.prepare(count, 1, rows.max_length - 1, is_even=rows.are_even, runs=rows.runs)
        ids, positions = (torch.from_numpy(values).to(device) for values in rows.get_newest())
        if self._decoder is not None:
            hidden = self._decoder.forward(ids, positions, self._kv_cache)
        else:
            mask, axes = self._kv_cache.build_mask(), positions[:, None].expand(3, -1, -1)
            policy = self._vlm.policy
            hidden = policy.compute_hidden_states(ids[:, None], axes, mask, kv_cache=self._kv_cache)[:, 0]
        self._kv_cache.lengths[:count] += 1
        self._sample_next(hidden, 0)
        # Reading the tokens synchronizes with the device, so its time is included.
        self.stats.decode_seconds += time.perf_counter() - started
        self.stats.decode_tokens += count

    def _sample_next(self, hidden_BD: Tensor, first_row: int) -> None:
        """Sample the next token of rows `first_row`, `first_row + 1`, …; release those that end."""
        temperatures, uniforms = self._rows.get_sampling(first_row)
        tokens, logprobs = sample_tokens(self._vlm.policy.compute_logits(hidden_BD), temperatures, uniforms)
        # The last row first: it takes the place of a released one.
        for row in reversed(self._rows.append(first_row, tokens, logprobs)):
            self._end(row)

    def _end(self, row: int) -> None:
        request, (tokens, logprobs) = self._rows.requests[row], self._rows.get_sampled(row)
        if not math.isfinite(logprobs[-1]):
            self._fail(row, len(tokens))
        elif tokens[-1] in request.sampling.stop_ids:
            self._finish(row, tokens, logprobs, FinishReason.STOP)
        else:
            self._finish(row, tokens, logprobs, FinishReason.LENGTH)

    def _finish(
        self, row: int, tokens: tuple[int, ...], logprobs: tuple[float, ...], finish_reason: FinishReason
    ) -> None:
        request = self._rows.requests[row]
        num_cached = request.prefix.num_tokens + len(tokens) - 1
        block = self._kv_cache.copy_block(row, request.prefix.num_tokens, num_cached)
        blocks = (*request.prefix.blocks, block) if block.shape[3] else request.prefix.blocks
        ledger = request.ledger.append_completion(tokens, logprobs=logprobs, version=self.version)
        self._prefix_cache.put(
            ledger.prefix_hashes()[-1], CachedPrefix(blocks=blocks, num_tokens=num_cached, last_hidden=None)
        )
        if not request.future.done():
            request.future.set_result(
                Completion(tokens=tokens, logprobs=logprobs, version=self.version, finish_reason=finish_reason)
            )
        self._release(row)

    def _fail(self, row: int, num_tokens: int) -> None:
        """End a request whose logits hold NaN or an infinity. Raises BrokenEngineError if a weight does, too."""
        if name := checkpoint_io.find_nonfinite(self._vlm.model.state_dict()):
            raise BrokenEngineError(
                f"the weight {name} holds NaN or an infinity; resume from an earlier checkpoint", key="model.path"
            )
        request = self._rows.requests[row]
        if not request.future.done():
            request.future.set_exception(
                EngineError(
                    f"the logits of token {num_tokens} of a reply hold NaN or an infinity, in "
                    f"model.dtype={self._vlm.dtype}",
                    key="model.dtype",
                    value=self._vlm.dtype,
                )
            )
        self._drop_caches()  # they may hold what made the logits
        self._kv_cache.clear_row(row)
        self._release(row)

    def _release(self, row: int) -> None:
        last = len(self._rows) - 1
        if row != last:
            self._kv_cache.move_row(last, row)
        self._rows.remove(row)

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
                position_ids = self._vlm.renderer.compute_position_ids(request.ledger)
                request.position = int(position_ids[:, -1].max()) + 1
        for request in requests:
            error = failed.get(request.prefix_hashes[-1])
            if error is not None and not request.future.done():
                request.future.set_exception(EngineError(str(error), key=error.key, value=error.value))
        self._has_cancelled |= bool(failed)
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
        device = self._vlm.device
        starts = [request.prefix.num_tokens for request in batch]
        new_ids = [request.ledger.input_ids()[start:] for request, start in zip(batch, starts, strict=True)]
        width = max(len(new) for new in new_ids)
        ids = torch.zeros(len(batch), width, dtype=torch.long)
        positions = torch.zeros(3, len(batch), width, dtype=torch.long)
        scratch = self._create_kv_cache(len(batch) * (max(starts) + width))
        scratch.reserve(len(batch), max(starts) + width)
        for row, (request, start, new) in enumerate(zip(batch, starts, new_ids, strict=True)):
            ids[row, : len(new)] = torch.tensor(new)
            position_ids = self._vlm.renderer.compute_position_ids(request.ledger)
            positions[:, row, : len(new)] = torch.from_numpy(position_ids[:, start:])
            request.position = int(position_ids[:, -1].max()) + 1
            scratch.load_row(row, request.prefix.blocks)
        scratch.prepare(len(batch), width, max(starts))
        features = self._gather_features(batch, pixels)
        visible: Tensor | PackedTrees
        if device.type == "cpu" and not any(starts):
            # Without a mask, the kernel skips the keys after each query.
            visible = PackedTrees([AttentionSpan(row, 0, len(new)) for row, new in enumerate(new_ids)])
        else:
            visible = scratch.build_mask()
        hidden = self._vlm.policy.compute_hidden_states(
            ids.to(device), positions.to(device), visible, features=features, kv_cache=scratch
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
        encoded = self._vlm.encode_images(list(missing.values()), lambda image: pixels[image.key])
        for key, feature in zip(missing, encoded, strict=True):
            features[key] = feature
            self._vision_cache.put(key, feature, feature.nbytes)
        return VisionFeatures.cat([features[image.key] for image in images])


def sample_tokens(logits_BV: Tensor, temperatures: np.ndarray, uniforms: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sample one token per row; return the tokens and their logprobs.

    Row b is sampled by inverting its cumulative distribution at `uniforms[b]`, or greedily at temperature 0. A token of
    probability 0 is never sampled. The cumulative sum is in float64, so that the tail is not lost to rounding.
    """
    device = logits_BV.device
    is_greedy = temperatures == 0
    scale = np.where(is_greedy, 1.0, temperatures).astype(np.float32)
    if (scale != 1).any():
        logits_BV = logits_BV / torch.from_numpy(scale).to(device)[:, None]
    logp = compute_logprobs(logits_BV, 1.0)
    if is_greedy.all():
        tokens_B = logp.argmax(dim=-1)
    else:
        cumulative = logp.exp().cumsum(dim=-1, dtype=torch.float64)
        points = torch.from_numpy(uniforms).to(device)[:, None] * cumulative[:, -1:]
        tokens_B = torch.searchsorted(cumulative, points, right=True)[:, 0].clamp_(max=logits_BV.shape[1] - 1)
        if is_greedy.any():
            tokens_B = torch.where(torch.from_numpy(is_greedy).to(device), logp.argmax(dim=-1), tokens_B)
    return tokens_B.cpu().numpy(), logp.gather(1, tokens_B[:, None])[:, 0].cpu().numpy()


local = Local
