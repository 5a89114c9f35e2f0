"""Measure the cost of a step: seconds per phase, tokens per second, model FLOPs utilization (MFU), memory."""

import resource
import sys
import time
from collections.abc import Sequence

import torch

from saccade.models.vlm import VisionLanguageModel
from saccade.protocols import ScoreFn, ScoreResult
from saccade.training.peak_flops import find_peak_flops
from saccade.training.train_step import StepReport
from saccade.types import Episode


class StepTimer:
    """Measures the seconds per phase of a step, which don't overlap; its `score_fn` wraps the given one.

    Rollouts and rewards run concurrently: the time in which at least one episode waits for its score lies within the
    rollout phase, or anywhere in the step if rollouts overlap training (`is_overlapped`). Then the rollout phase is the
    time that the trainer waited for a batch.
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
        self._phase_start = now

    @property
    def train_seconds(self) -> float:
        """Return the seconds of the policy update."""
        return self._phase_seconds.get("seconds/train", 0.0)

    @property
    def step_seconds(self) -> float:
        """Return the seconds of the step's phases so far."""
        return sum(self._phase_seconds.values())

    async def score_fn(
        self, episodes: Sequence[Episode], *graded: Sequence[ScoreResult] | None
    ) -> Sequence[ScoreResult]:
        """Score episodes and sum the seconds in which callers wait; overlapping waits count once."""
        if not self._num_waiting:
            self._wait_start = time.perf_counter()
        self._num_waiting += 1
        try:
            return await self._score_fn(episodes, *graded)
        finally:
            self._num_waiting -= 1
            if not self._num_waiting:
                self._reward_seconds += time.perf_counter() - self._wait_start

    def compute_metrics(self, device: torch.device, num_sampled_tokens: int) -> dict[str, float]:
        """Return the phases' seconds, sampled tokens per second (0 if none were sampled), and peak memory (GiB).

        `rollout/reward_seconds` are those since the last call in which an episode waited for its score.
        Tokens per second are relative to the rollout phase, or to the whole step if rollouts overlap training.
        """
        reward_seconds, self._reward_seconds = self._reward_seconds, 0.0
        rollout_seconds = self.step_seconds if self._is_overlapped else self._phase_seconds["seconds/rollout"]
        return {
            **self._phase_seconds,
            "rollout/reward_seconds": reward_seconds,
            "sampled_tokens_per_second": num_sampled_tokens / rollout_seconds if num_sampled_tokens else 0.0,
            **measure_peak_memory(device),
        }


def measure_peak_memory(device: torch.device) -> dict[str, float]:
    """Return this process's peak memory so far in GiB: `memory_gib`, and `memory_device_gib` on a GPU."""
    unit = 1 if sys.platform == "darwin" else 2**10  # ru_maxrss is in bytes on macOS, in KiB on Linux
    metrics = {"memory_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30}
    if device.type == "cuda":
        metrics["memory_device_gib"] = torch.cuda.max_memory_allocated(device) / 2**30
    return metrics


def compute_update_speed(
    vlm: VisionLanguageModel, report: StepReport | None, num_passes: int, seconds: float
) -> dict[str, float]:
    """Return the packed tokens per second of an update, and `mfu` if the GPU's peak is known; {} without an update.

    `report` measures one of the update's `num_passes` passes over the samples.
    """
    if report is None or seconds <= 0:
        return {}
    metrics = {"packed_tokens_per_second/train": num_passes * report.packed_tokens / seconds}
    peak = find_peak_flops(torch.cuda.get_device_name(vlm.device)) if vlm.device.type == "cuda" else None
    if peak is not None and vlm.dtype == "bfloat16":
        flops = num_passes * estimate_flops(vlm, report.packed_tokens, report.trained_tokens)
        metrics["mfu"] = flops / seconds / peak
    return metrics


def estimate_flops(vlm: VisionLanguageModel, packed_tokens: int, trained_tokens: int) -> float:
    """Return the model FLOPs of a training pass: 4 N + 2 N_t per packed token, 4 H + 2 H_t per trained token.

    N are the weights of the text layers, H those of the output layer, N_t and H_t the trained ones of each: a forward
    pass takes 2 FLOPs per weight and token, the gradient of the activations 2, and that of the weights 2 (Kaplan et al.
    2020, arXiv 2001.08361, table 1: 6 N). Attention scores, the vision tower, recomputed activations and passes without
    a gradient are left out, so the utilization is a lower bound.
    """
    layers, layers_trained = _count_weights(vlm.language_model.layers)
    head, head_trained = _count_weights(vlm.model.lm_head)
    per_packed, per_trained = 4 * layers + 2 * layers_trained, 4 * head + 2 * head_trained
    return float(per_packed * packed_tokens + per_trained * trained_tokens)


def _count_weights(module: torch.nn.Module) -> tuple[int, int]:
    """Return how many weights a module has, and how many of them are trained."""
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in module.parameters()]
    return sum(size for size, _ in sizes), sum(size for size, is_trained in sizes if is_trained)
