"""The local engine: transformers in this process, with continuous batching and a prefix cache."""

from saccade.config.schema import PositiveInt
from saccade.engines._local.scheduler import BatchScheduler, SchedulerStats
from saccade.errors import EngineError
from saccade.models.backbone import Backbone
from saccade.protocols import MediaLoader, WeightSource
from saccade.types import Completion, GenerationRequest


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
        self._backbone = backbone
        self._scheduler = BatchScheduler(
            backbone,
            media.load_pixels,
            max_num_seqs=max_num_seqs,
            kv_cache_tokens=kv_cache_tokens,
            prefix_cache_tokens=prefix_cache_tokens,
            max_num_batched_tokens=max_num_batched_tokens,
            vision_cache_bytes=vision_cache_bytes,
        )

    @property
    def version(self) -> int:
        """Return the version of the weights that it samples from."""
        return self._scheduler.version

    @property
    def stats(self) -> SchedulerStats:
        """Return counts and times of prefill and decoding so far."""
        return self._scheduler.stats

    async def generate(self, request: GenerationRequest) -> Completion:
        """Sample a continuation; see protocols.Engine."""
        if not request.ledger.segments:
            raise EngineError("the ledger is empty; render a prompt first")
        if not set(request.sampling.forbidden_ids) <= set(self._backbone.renderer.forbidden_ids):
            # Trainer and sampler mask the same ids, or their distributions would differ.
            raise EngineError(
                f"sampling.forbidden_ids={request.sampling.forbidden_ids} must be a subset of the model's "
                f"{self._backbone.renderer.forbidden_ids}: the local engine masks only these",
                key="sampling.forbidden_ids",
                value=request.sampling.forbidden_ids,
            )
        return await self._scheduler.submit(request.ledger, request.sampling)

    async def sync_weights(self, source: WeightSource, version: int) -> None:
        """Drop the caches; load the weights, unless the trainer shares this engine's tensors."""
        self._scheduler.clear_caches()
        if source is not self._backbone:
            self._backbone.model.load_state_dict(source.state_dict())
        self._scheduler.version = version

    async def close(self) -> None:
        """Abort all requests."""
        await self._scheduler.close()


local = Local
