"""Runs of SFT and RL in a small world."""

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from saccade import stages
from saccade.config import load_recipe
from saccade.data.rows import read_tasks
from saccade.rollouts.stage import Stage
from saccade.training import rl, sft
from saccade.types import Demo, Score, Task

CLOCKS = ("seconds/", "tokens_per_second", "memory_")


class Killed(BaseException):
    """Stands for a kill: nothing of the package catches it."""


@dataclass(frozen=True)
class Home:
    """Where the world and the model lie, and what runs in them."""

    root: Path
    settings: tuple[str, ...]
    demos: tuple[Demo, ...]

    @property
    def tasks(self) -> list[Task]:
        return read_tasks(self.root / "world/train/tasks.jsonl")

    def recipe(self, *overrides: str):
        recipe = load_recipe("tiny/para_grpo", (*self.settings, *overrides))
        return stages.with_paths(recipe, model=self.root / "model", world=self.root / "world")

    def stage(self, *overrides: str, weights: Path | None = None) -> Stage:
        """A stage of its own: training changes its weights."""
        return stages.load(self.recipe(*overrides), weights or self.root / "model")

    def sft(self, stage: Stage, folder: Path, *, demos: Sequence[Demo] = (), die_at: int = 0) -> list[dict]:
        """The metrics of each step; killed before the checkpoint of step `die_at` is written."""
        rows, log = _log(die_at)
        return _run(sft.train(stage, demos or self.demos, folder=folder, log=log), rows)

    def rl(self, stage: Stage, folder: Path, *, die_at: int = 0, seen=None) -> list[dict]:
        rows, log = _log(die_at)
        return _run(rl.train(stage, self.tasks, folder=folder, log=log, seen=seen), rows)


def _log(die_at):
    rows: list[dict] = []

    def log(values):
        rows.append({key: value for key, value in values.items() if not key.startswith(CLOCKS)})
        if values["step"] == die_at:
            raise Killed

    return rows, log


def _run(training, rows):
    with contextlib.suppress(Killed):
        asyncio.run(training)
    return rows


def with_score(stage: Stage, value) -> Stage:
    """The stage with a reward of its own: `value(episode, count)` where `count` is of the episodes scored before."""
    counter = iter(range(10**9))
    return replace(stage, score=lambda episode, task: Score(value=float(value(episode, next(counter))), parts={}))


def turns(episode, count):
    """A reward with a spread that says nothing."""
    return count % 2


@dataclass
class Recorder:
    """The stage's own engine, and everything that it sampled."""

    engine: object
    served: list = field(default_factory=list)
    asked: list = field(default_factory=list)

    @property
    def own_weights(self):
        return self.engine.own_weights

    @property
    def version(self):
        return self.engine.version

    async def generate(self, ledger, sampling):
        self.asked.append(sampling)
        completion = await self.engine.generate(ledger, sampling)
        self.served.append((ledger, completion))
        return completion

    async def publish(self, weights, version):
        await self.engine.publish(weights, version)

    async def close(self):
        await self.engine.close()


def weights(stage: Stage) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in stage.backbone.model.named_parameters()}


def equal(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
