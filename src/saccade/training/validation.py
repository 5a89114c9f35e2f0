"""When a training is validated, and with which weights.

    own weights (servers)   sync s ──> rollouts, update of s+1 ──> wait ──> sync s+1     a validation runs beside them
                              └─────── validation of s ────────────^
    shared weights (local)  sync s ──> validation of s ──> drop caches ──> rollouts      in turns

Either way a validation samples from the weights of one step alone, and it changes no number of the training.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from saccade.protocols import Engine, WeightSource

RunValidation = Callable[[int], Coroutine[Any, Any, Mapping[str, float]]]  # finished steps -> metrics


class ValidationSchedule:
    """Runs a validation every `every` steps (0: never); `results` holds the metrics of the earlier ones by step."""

    def __init__(
        self,
        run_validation: RunValidation | None = None,
        every: int = 0,
        results: Mapping[int, Mapping[str, float]] | None = None,
    ) -> None:
        self._run_validation, self._every = run_validation, every
        self.results = dict(results or {})
        self._pending: asyncio.Task[None] | None = None

    @property
    def is_running(self) -> bool:
        """Return whether a validation runs beside the training."""
        return self._pending is not None

    def is_due(self, step: int) -> bool:
        """Return whether the weights after `step` finished steps are validated."""
        return self._every > 0 and step % self._every == 0

    async def start(self, step: int, engine: Engine, source: WeightSource) -> None:
        """Validate the weights of `step`, which the engine has, if that is due and not done.

        Return at once if the engine has its own weights: call `finish` before they change.
        """
        if not self.is_due(step) or step in self.results:
            return
        if engine.has_separate_weights:
            self._pending = asyncio.create_task(self._validate(step))
        else:
            await self._validate(step)
            # What the validation left in the engine's caches would change the rounding of the next rollouts.
            await engine.sync_weights(source, step)

    async def finish(self) -> None:
        """Wait for the validation in progress, and raise its exception if it failed."""
        pending, self._pending = self._pending, None
        if pending is not None:
            await pending

    async def cancel(self) -> None:
        """Cancel the validation in progress, and wait for its end."""
        if self._pending is not None:
            self._pending.cancel()
            await asyncio.gather(self._pending, return_exceptions=True)

    def get_scores(self, metric: str) -> dict[int, float]:
        """Return a metric of every validation so far that has it, by step."""
        return {step: result[metric] for step, result in self.results.items() if metric in result}

    async def _validate(self, step: int) -> None:
        assert self._run_validation is not None
        self.results[step] = await self._run_validation(step)
