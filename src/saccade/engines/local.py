"""The local engine: transformers in this process, with continuous batching and shared prefixes."""

from collections.abc import Mapping

from torch import Tensor

from saccade.config import Count
from saccade.engines._local.scheduler import Limits, Scheduler, Work
from saccade.errors import EngineError
from saccade.ledger import Ledger
from saccade.model.backbone import Backbone
from saccade.protocols import MediaLibrary
from saccade.types import Completion, Sampling


class local:
    """Samples from a backbone that lives in this process, and may be the very one that is being trained.

    At most `rows` conversations are sampled at once, and fewer where rows times the length of the longest would exceed
    `flight_tokens` of keys and values; `kept_tokens` of them are kept for later turns and shared prompts. A prefill
    pass holds at most `pass_tokens` new tokens; `feature_bytes` bound what is kept of the vision tower's work. Memory
    is taken as it is needed. Results don't depend on what else is in the batch.
    """

    own_weights = False

    def __init__(
        self,
        backbone: Backbone,
        media: MediaLibrary,
        *,
        rows: Count = 256,
        flight_tokens: int = 262144,
        kept_tokens: int = 131072,
        pass_tokens: int = 8192,
        feature_bytes: int = 2**31,
    ) -> None:
        self._backbone = backbone
        limits = Limits(
            rows=rows,
            flight_tokens=flight_tokens,
            kept_tokens=kept_tokens,
            pass_tokens=pass_tokens,
            feature_bytes=feature_bytes,
        )
        self._scheduler = Scheduler(backbone, media.pixels, limits)

    @property
    def version(self) -> int:
        """The version of the weights it samples from."""
        return self._scheduler.version

    @property
    def work(self) -> Work:
        """What it has done so far, and how long that took."""
        return self._scheduler.work

    async def generate(self, ledger: Ledger, sampling: Sampling) -> Completion:
        """Sample a continuation; see protocols.Engine."""
        if not ledger.segments:
            raise EngineError("an empty ledger can't be continued; render a prompt first")
        if not set(sampling.forbidden_ids) <= set(self._backbone.renderer.forbidden_ids):
            # Trainer and sampler mask the same ids, or their distributions would differ.
            raise EngineError(f"the local engine forbids the ids {self._backbone.renderer.forbidden_ids} and no others")
        return await self._scheduler.submit(ledger, sampling)

    async def publish(self, weights: Mapping[str, Tensor] | None, version: int) -> None:
        """Take new weights: a state dict, or None where the trainer shares this engine's own tensors."""
        self._scheduler.forget()
        if weights is not None:
            self._backbone.model.load_state_dict(weights)
        self._scheduler.version = version

    async def close(self) -> None:
        """Abort all requests."""
        await self._scheduler.close()
