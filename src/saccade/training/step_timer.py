"""Measure the cost of a step: seconds per phase, tokens per second, memory."""

import resource
import sys
import time
from collections.abc import Sequence

import torch

from saccade.protocols import ScoreFn, ScoreResult
from saccade.types import Episode


class StepTimer:
    """Measures the seconds per phase of a step; its `score_fn` wraps the given one to measure the reward's.

    Rollouts and rewards run concurrently: time in which at least one episode waits for its score counts as reward, the
    rest of the phase as rollout, so the phases add up to the step. If rollouts overlap training (`is_overlapped`), the
    rollout phase is the time that the trainer waited for a batch, and the reward's time is not part of the sum.
    """

    def __init__(self, score_fn: ScoreFn, *, is_overlapped: bool = False) -> None:
        self._score_fn, self._is_overlapped = score_fn, is_overlapped
        self._num_waiting, self._wait_start, self._reward_seconds = 0, 0.0, 0.0
        self.start_step()

    def start_step(self) -> None:
        """Start measuring a step."""
        self._phase_start, self._phase_seconds = time.perf_counter(), dict[str, float]()

    def end_phase(self, phase: str) -> None:
        """End the current phase, under this name, and start the next one."""
        now = time.perf_counter()
        self._phase_seconds[f"seconds/{phase}"] = now - self._phase_start
        if phase == "rollout":
            self._phase_seconds["seconds/reward"] = self._reward_seconds
            self._phase_seconds["seconds/rollout"] -= 0.0 if self._is_overlapped else self._reward_seconds
            self._reward_seconds = 0.0
        self._phase_start = now

    async def score_fn(self, episodes: Sequence[Episode]) -> Sequence[ScoreResult]:
        """Score episodes and sum the seconds in which callers wait; overlapping waits count once."""
        if not self._num_waiting:
            self._wait_start = time.perf_counter()
        self._num_waiting += 1
        try:
            return await self._score_fn(episodes)
        finally:
            self._num_waiting -= 1
            if not self._num_waiting:
                self._reward_seconds += time.perf_counter() - self._wait_start

    def compute_metrics(self, device: torch.device, num_sampled_tokens: int) -> dict[str, float]:
        """Return the phases' seconds, sampled tokens per second (0 if none were sampled), and peak memory (GiB).

        Tokens per second are relative to the rollout phase, or to the whole step if rollouts overlap training.
        """
        step_seconds = sum(self._phase_seconds.values()) - self._phase_seconds["seconds/reward"]
        rollout_seconds = step_seconds if self._is_overlapped else self._phase_seconds["seconds/rollout"]
        return {
            **self._phase_seconds,
            "tokens_per_second": num_sampled_tokens / rollout_seconds if num_sampled_tokens else 0.0,
            **measure_peak_memory(device),
        }


def measure_peak_memory(device: torch.device) -> dict[str, float]:
    """Return this process's peak memory so far in GiB: `memory_gib`, and `memory_device_gib` on a GPU."""
    unit = 1 if sys.platform == "darwin" else 2**10  # ru_maxrss is in bytes on macOS, in KiB on Linux
    metrics = {"memory_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30}
    if device.type == "cuda":
        metrics["memory_device_gib"] = torch.cuda.max_memory_allocated(device) / 2**30
    return metrics
