"""What a step costs: seconds by stage, tokens per second, memory."""

import resource
import sys
import time

import torch

from saccade.protocols import Scorer, Settled
from saccade.types import Episode, Task
from saccade.waiting import settled


class Clock:
    """Seconds by stage of a step; `score` is the stage's own scorer, watched.

    Rollouts and rewards run together: the time in which anybody waits for a score is the reward's, however many wait,
    and the rest of that stage is the rollout's. So the stages add up to the step. Where rolling out is `overlapped` by
    learning, the rollout's is what the trainer waited for, and the reward's is no part of the sum.
    """

    def __init__(self, score: Scorer, *, overlapped: bool = False) -> None:
        self.score = _Watched(score)
        self._overlapped = overlapped
        self._last = 0.0
        self._laps: dict[str, float] = {}
        self.begin()

    def begin(self) -> None:
        """A step begins now."""
        self._last, self._laps = time.perf_counter(), {}

    def lap(self, name: str) -> None:
        """The stage `name` ends now."""
        now = time.perf_counter()
        self._laps[f"seconds/{name}"] = now - self._last
        if name == "rollout":
            waited, self.score.seconds = self.score.seconds, 0.0
            self._laps["seconds/reward"] = waited
            self._laps["seconds/rollout"] -= 0.0 if self._overlapped else waited
        self._last = now

    def metrics(self, device: torch.device, sampled: int) -> dict[str, float]:
        """The laps, tokens per second of rollout (0 where a step rolled nothing out), and peak memory so far (GiB).

        Where learning overlaps it, rolling out may take all of the step.
        """
        whole = sum(self._laps.values()) - self._laps["seconds/reward"]
        spent = whole if self._overlapped else self._laps["seconds/rollout"]
        return {**self._laps, "tokens_per_second": sampled / spent if sampled else 0.0, **memory(device)}


class _Watched:
    """A scorer that counts the seconds in which it is waited for; waits that overlap count once."""

    def __init__(self, score: Scorer) -> None:
        self.seconds = 0.0
        self._score, self._waiting, self._since = score, 0, 0.0

    async def __call__(self, episode: Episode, task: Task) -> Settled:
        if not self._waiting:
            self._since = time.perf_counter()
        self._waiting += 1
        try:
            return await settled(self._score(episode, task))
        finally:
            self._waiting -= 1
            if not self._waiting:
                self.seconds += time.perf_counter() - self._since


def memory(device: torch.device) -> dict[str, float]:
    """The most memory that this process has held so far, in GiB: `memory_gib`, and `memory_device_gib` on a GPU."""
    unit = 1 if sys.platform == "darwin" else 2**10  # macOS counts bytes, Linux KiB
    found = {"memory_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30}
    if device.type == "cuda":
        found["memory_device_gib"] = torch.cuda.max_memory_allocated(device) / 2**30
    return found
