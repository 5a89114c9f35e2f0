"""Reinforcement learning: the loop reads like the algorithm.

    tasks ──prompts──> collect ──groups──> select ──kept──> credit ──samples──> learn ──> publish ──> one log line
                         ▲   engine.generate                                               │
                         └──────────────────── the next version of the weights ────────────┘

One process, one thread of control: rollouts wait for the engine, the trainer waits for the rollouts. What a step draws
depends on the seed, the step's number and the weights, so a resumed run goes on as if never stopped.
"""

import random
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from saccade.algorithms.advantages import credit, punished
from saccade.algorithms.gating import draw
from saccade.algorithms.losses import policy_loss, token_weights
from saccade.algorithms.select import Selection, select
from saccade.config import Rl
from saccade.errors import DataError, EngineError
from saccade.evaluation.metrics import step_metrics
from saccade.rollouts.collect import collect
from saccade.rollouts.stage import Stage
from saccade.training import checkpoint
from saccade.training.credit import samples_of
from saccade.training.optim import Optimizer, rate
from saccade.training.pack import Batch, pack
from saccade.training.step import StepReport, forward, step
from saccade.types import End, Group, Sample, Task, seed_of

Log = Callable[[Mapping[str, float]], None]


async def train(
    stage: Stage,
    tasks: Sequence[Task],
    *,
    folder: Path,
    log: Log,
    seen: Callable[[int, Sequence[Group]], None] | None = None,
) -> None:
    """Train `stage.backbone` in place for the recipe's steps; checkpoints go below `folder`.

    `log` gets one line of metrics a step, `seen` every step's groups. A step of which no group is kept makes no update:
    its `updates` is 0, and it has no loss. Goes on from the newest checkpoint in `folder` (the stage must have been
    loaded from it). Raises DataError without tasks, EngineError where engine and trainer disagree about a token.
    """
    settings = stage.recipe.rl
    if not tasks:
        raise DataError("there are no tasks to learn from")
    optimizer = Optimizer(stage.backbone.model, settings.optim, settings.steps)
    last = checkpoint.newest(folder)
    if last is not None:
        last.restore(optimizer)
    # The number of finished steps, whether or not each had something to learn, is the version of the weights.
    done = last.step if last else 0
    await stage.engine.publish(None, done)
    for number in range(done, settings.steps):
        clock = Clock()
        optimizer.begin(number)
        groups = await roll_out(stage, tasks, number)
        clock.lap("rollout")
        _refuse_broken(groups, number)
        if seen is not None:
            seen(number, groups)
        chosen = select(groups, settings.select, target=settings.prompts)
        credits = credit(chosen.kept, settings.advantage)
        samples = samples_of(chosen.kept, credits, settings.advantage.children)
        report = learn(stage, samples, settings, optimizer) if samples else None
        clock.lap("train")
        await stage.engine.publish(None, number + 1)
        clock.lap("publish")
        measured = {**step_metrics(groups), "punished": punished(chosen.kept, credits)}
        measured |= {"lr": rate(settings.optim, number, settings.steps), "updates": settings.updates if report else 0}
        log({"step": number + 1, **measured, **_selection(chosen), **_learning(report), **clock.metrics(groups)})
        if (number + 1) % settings.save_every == 0 or number + 1 == settings.steps:
            checkpoint.save(folder, step=number + 1, backbone=stage.backbone, optimizer=optimizer, notes={})


def _refuse_broken(groups: Sequence[Group], number: int) -> None:
    """Stop where no attempt of a step got anywhere: going on would only count steps. Raises EngineError."""
    episodes = [member.episode for group in groups for member in group.members]
    if all(episode.end in (End.ABORTED, End.TOOL_BROKEN) for episode in episodes):
        reason = next((episode.error for episode in episodes if episode.error), "no reason given")
        raise EngineError(f"all {len(episodes)} attempts of step {number + 1} broke, the first with: {reason}")


async def roll_out(stage: Stage, tasks: Sequence[Task], number: int) -> list[Group]:
    """The groups of step `number`: its prompts in the epoch's order, a frame budget drawn for each."""
    settings, seed, budgets = stage.recipe.rl, stage.recipe.seed, stage.recipe.gating.frames
    count = round(settings.prompts * settings.select.oversample)
    places = range(number * count, (number + 1) * count)
    orders = {epoch: order(len(tasks), seed, epoch) for epoch in {place // len(tasks) for place in places}}
    prompts = [tasks[orders[place // len(tasks)][place % len(tasks)]] for place in places]
    epoch = number * count // len(tasks)
    return await collect(
        prompts,
        stage.agent,
        stage.context(seed=seed),
        size=settings.group,
        score=stage.score,
        epoch=number,
        frames=lambda task: draw(budgets, run_seed=seed, epoch=epoch, task=task),
    )


def order(count: int, seed: int, epoch: int) -> list[int]:
    """The order of the tasks in an epoch."""
    places = list(range(count))
    random.Random(seed_of("order", seed, epoch)).shuffle(places)
    return places


def learn(stage: Stage, samples: Sequence[Sample], settings: Rl, optimizer: Optimizer) -> StepReport:
    """Update on one batch of samples, `updates` times; the first is on-policy and needs no second look at old logprobs.

    Raises EngineError where a token that was packed is not the engine's own.
    """
    backbone, temperature = stage.backbone, stage.recipe.sampling.temperature
    batches = pack(
        samples,
        positions=backbone.renderer.positions,
        row_tokens=settings.row_tokens,
        rows_per_pass=settings.rows_per_pass,
    )
    assert_engine_tokens(samples, batches)
    weights = token_weights(
        torch.from_numpy(np.concatenate([batch.sample_N for batch in batches])),
        aggregation=settings.loss.aggregation,
        sum_norm=settings.loss.sum_norm,
    )
    parts = torch.split(weights, [len(batch.token_N) for batch in batches])
    weight_of = {id(batch): part for batch, part in zip(batches, parts, strict=True)}
    proximal = _proximal(stage, batches) if settings.updates > 1 else {}

    def loss(batch: Batch, logp_N: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
        device = logp_N.device
        return policy_loss(
            logp_N,
            proximal.get(id(batch)),
            torch.from_numpy(batch.advantage_N).to(device),
            weight_of[id(batch)].to(device),
            settings=settings.loss,
            engine_logp_N=torch.from_numpy(batch.old_logp_N).to(device),
        )

    pixels = stage.media.pixels
    reports = [
        step(backbone, optimizer, batches, loss, pixels=pixels, temperature=temperature)
        for _ in range(settings.updates)
    ]
    # Loss and norm as on-policy; what the ratios became shows after the last update alone.
    return replace(reports[0], stats=reports[-1].stats)


def _proximal(stage: Stage, batches: Sequence[Batch]) -> dict[int, Tensor]:
    """The trainer's logprobs before the first update, for the ratios of the later ones."""
    temperature, pixels = stage.recipe.sampling.temperature, stage.media.pixels
    with torch.no_grad():
        return {
            id(batch): forward(stage.backbone, batch, pixels=pixels, temperature=temperature)[0] for batch in batches
        }


def assert_engine_tokens(samples: Sequence[Sample], batches: Sequence[Batch]) -> None:
    """Check that the batches train exactly the tokens that were sampled, each once, in order."""
    trained: dict[int, list[int]] = {}
    for batch in batches:
        for sample, token in zip(batch.sample_N.tolist(), batch.token_N.tolist(), strict=True):
            trained.setdefault(sample, []).append(token)
    for index, sample in enumerate(samples):
        if tuple(trained.get(index, ())) != sample.ledger.sampled_tokens():
            raise EngineError(f"sample {index} trains other tokens than the engine sampled; the batch can't be trusted")


class Clock:
    """Seconds by stage of a step."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self._laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        """The stage `name` ends now."""
        now = time.perf_counter()
        self._laps[f"seconds/{name}"] = now - self._last
        self._last = now

    def metrics(self, groups: Sequence[Group]) -> dict[str, float]:
        """The laps, sampled tokens per second of rollout, and the process's peak memory (GiB)."""
        sampled = sum(member.episode.usage.sampled_tokens for group in groups for member in group.members)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        return {**self._laps, "tokens_per_second": sampled / self._laps["seconds/rollout"], "memory_gib": peak}


def _selection(chosen: Selection) -> dict[str, float]:
    kept = {"groups/kept": float(len(chosen.kept)), "groups/missing": float(chosen.missing)}
    for one in chosen.report:
        kept[f"groups/dropped/{one.name}"] = float(one.groups[1])
        kept[f"episodes/dropped/{one.name}"] = float(one.episodes[1])
        kept[f"correct/kept/{one.name}"], kept[f"correct/dropped/{one.name}"] = one.correct
    return kept


def _learning(report: StepReport | None) -> dict[str, float]:
    if report is None:
        return {}
    stats = {name: value for name, value in report.stats.items() if name != "tokens"}
    measured = {"loss": report.loss, "entropy": report.entropy, "grad_norm": report.grad_norm}
    return measured | stats | {"tokens": report.tokens, "trained_tokens": report.trained_tokens}
