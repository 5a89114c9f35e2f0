"""Run SFT and RL on a small synthetic dataset."""

import asyncio
import contextlib
import itertools
import json
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from saccade.config.load import load_recipe
from saccade.data.dataset import load_tasks
from saccade.rewards.compose import score_each
from saccade.rollouts.components import TrainingComponents
from saccade.runs import pipeline
from saccade.training import rl, sft
from saccade.types import Demonstration, Score, Task

TIMING_METRICS = (
    "rollout/reward_seconds",
    "seconds/",
    "sampled_tokens_per_second",
    "packed_tokens_per_second",
    "memory_",
)


class Killed(BaseException):
    """Simulates a kill: nothing in the package catches it."""


@dataclass(frozen=True)
class Workspace:
    """A folder with a dataset and a model, and functions that train in it."""

    root: Path
    settings: tuple[str, ...]
    demonstrations: tuple[Demonstration, ...]

    @property
    def tasks(self) -> list[Task]:
        return load_tasks(self.root / "data/train/tasks.jsonl")

    def load_recipe(self, *overrides: str):
        recipe = load_recipe("tiny/para_grpo", (*self.settings, *overrides))
        return pipeline.with_paths(recipe, model=self.root / "model", data=self.root / "data")

    def load_components(self, *overrides: str, weights: Path | None = None) -> TrainingComponents:
        """Load new components; training changes their weights."""
        return pipeline.load_training_components(self.load_recipe(*overrides), weights or self.root / "model")

    def run_sft(
        self,
        components: TrainingComponents,
        folder: Path,
        *,
        demonstrations: Sequence[Demonstration] = (),
        kill_at: int = 0,
        interrupt_at: int = 0,
    ) -> list[dict]:
        """Return the metrics of each step.

        The run is killed before it writes the checkpoint of step `kill_at`, or stopped by Ctrl-C after `interrupt_at`.
        """
        rows, log_step = _build_log(kill_at, interrupt_at)
        return _run(
            sft.train(components, demonstrations or self.demonstrations, folder=folder, log_step=log_step), rows
        )

    def run_rl(
        self, components: TrainingComponents, folder: Path, *, kill_at: int = 0, interrupt_at: int = 0, on_groups=None
    ) -> list[dict]:
        rows, log_step = _build_log(kill_at, interrupt_at)
        return _run(rl.train(components, self.tasks, folder=folder, log_step=log_step, on_groups=on_groups), rows)


def is_timing(metric):
    """Return whether a metric depends on the machine's speed: equal runs differ in it."""
    return metric.startswith(TIMING_METRICS) or metric.endswith("/seconds")


def interrupt() -> None:
    """Press Ctrl-C."""
    os.kill(os.getpid(), signal.SIGINT)


def _build_log(kill_at, interrupt_at=0):
    rows: list[dict] = []

    def log_step(values):
        rows.append({key: value for key, value in values.items() if not is_timing(key)})
        if values["step"] == kill_at:
            raise Killed
        if values["step"] == interrupt_at:
            interrupt()

    return rows, log_step


def _run(training, rows):
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in background jobs of a shell
    try:
        with contextlib.suppress(Killed, KeyboardInterrupt):
            asyncio.run(training)
    finally:
        signal.signal(signal.SIGINT, previous)
    return rows


def with_reward(components: TrainingComponents, compute) -> TrainingComponents:
    """Replace the reward by `compute(episode, count)`; `count` is the number of episodes scored before.

    A group's episodes are scored together, in the order of their seeds. So with groups of even size, `count % 2` is the
    parity of an episode's index in its group, in a resumed run too.
    """
    counter = itertools.count()
    return replace(components, score_fn=score_each(lambda episode: Score(value=float(compute(episode, next(counter))))))


def alternate(episode, count):
    """Return 0 and 1 in turns: a reward that differs within every group, whatever the model samples."""
    return count % 2


ALTERNATING_REWARD = '''
"""A reward that differs within every group, whatever the model samples."""
from collections import Counter

_counts = Counter()


def alternating(episode):
    _counts[episode.task.id] += 1
    return float(_counts[episode.task.id] % 2)
'''


def write_alternating_reward(folder: Path) -> str:
    """Write a reward to a file; return the override that adds it to a recipe with a dominating weight."""
    path = folder / "alternating.py"
    path.write_text(ALTERNATING_REWARD)
    return f"rewards={json.dumps({str(path): {'weight': 10.0}})}"


@dataclass
class RecordingEngine:
    """Wraps an engine and records its requests and completions."""

    engine: object
    completions: list = field(default_factory=list)  # (ledger, completion)
    requests: list = field(default_factory=list)  # sampling parameters

    @property
    def has_separate_weights(self):
        return self.engine.has_separate_weights

    @property
    def version(self):
        return self.engine.version

    async def generate(self, request):
        self.requests.append(request.sampling)
        completion = await self.engine.generate(request)
        self.completions.append((request.ledger, completion))
        return completion

    async def sync_weights(self, source, version):
        await self.engine.sync_weights(source, version)

    async def close(self):
        await self.engine.close()


def copy_weights(components: TrainingComponents) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in components.vlm.model.named_parameters()}


def are_equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
