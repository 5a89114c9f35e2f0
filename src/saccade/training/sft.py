"""Supervised fine-tuning on demonstrations: both roles, packed, masks from the ledger.

    demos ──draw──> rehearse (the agent, with the written replies) ──> samples ──> pack ──> forward, backward, step

What a step learns from depends on the seed and the step's number alone, so a resumed run goes on as if never stopped;
where practice comes first, also on how many steps there are.
"""

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from saccade.config import Sft
from saccade.errors import DataError
from saccade.rollouts.stage import Stage
from saccade.training import checkpoint
from saccade.training.demos import rehearse
from saccade.training.optim import Optimizer, rate
from saccade.training.pack import Batch, pack, plant
from saccade.training.step import StepReport, step
from saccade.types import Demo, Sample, seed_of

Log = Callable[[Mapping[str, float]], None]


async def train(stage: Stage, demos: Sequence[Demo], *, folder: Path, log: Log) -> None:
    """Train `stage.backbone` in place for the recipe's steps; checkpoints go below `folder`.

    Goes on from the newest checkpoint there (the stage must have been loaded from it). Raises DataError without demos.
    """
    settings = stage.recipe.sft
    if not demos:
        raise DataError("there are no demonstrations to learn from; make a world or name a file of traces")
    found = scenes(demos)
    optimizer = Optimizer(stage.backbone.model, settings.optim, settings.steps)
    last = checkpoint.newest(folder)
    if last is not None:
        last.restore(optimizer)
    first, begun = last.step if last else 0, time.perf_counter()
    async with contextlib.aclosing(drawn(stage, found, first)) as batches:
        async for number, samples in batches:
            prepared = time.perf_counter()
            optimizer.begin(number)
            report = await asyncio.to_thread(learn, stage, samples, settings, optimizer)
            log(_metrics(report, settings, number, prepared - begun, time.perf_counter() - prepared))
            if (number + 1) % settings.save_every == 0 or number + 1 == settings.steps:
                checkpoint.save(folder, step=number + 1, backbone=stage.backbone, optimizer=optimizer, notes={})
            begun = time.perf_counter()


Scenes = Mapping[tuple[object, ...], Sequence[Demo]]


def scenes(demos: Sequence[Demo]) -> Scenes:
    """Demonstrations by what they look at first (media and frame budget): those of one scene share its tokens."""
    found: dict[tuple[object, ...], list[Demo]] = {}
    for demo in demos:
        found.setdefault((demo.task.media, demo.frames, demo.main), []).append(demo)
    return found


async def drawn(stage: Stage, found: Scenes, first: int) -> AsyncGenerator[tuple[int, list[Sample]], None]:
    """Each step's number and samples; the next ones are drawn while the ones before are learned."""
    settings, seed = stage.recipe.sft, stage.recipe.seed

    def share(number: int) -> float:
        return 1.0 if number < round(settings.practice_first * settings.steps) else settings.practice

    def begin(number: int) -> "asyncio.Task[list[Sample]]":
        return asyncio.create_task(draw(stage, found, settings, seed_of(seed, "sft", number), practice=share(number)))

    waiting = begin(first)
    try:
        for number in range(first, settings.steps):
            samples = await waiting
            if number + 1 < settings.steps:
                waiting = begin(number + 1)
            yield number, samples
    finally:
        waiting.cancel()


async def draw(stage: Stage, found: Scenes, settings: Sft, seed: int, *, practice: float) -> list[Sample]:
    """The conversations of scenes drawn at random, up to `settings.per_scene` of each, until a step's tokens are full.

    A share `practice` of the scenes is of those for practice, where there are any. Tokens are counted as packed, so
    that a shared prefix counts once.
    """
    rng, context = random.Random(seed), stage.context(seed=seed)
    whole = [place for place, demos in found.items() if demos[0].main]
    drills = [place for place, demos in found.items() if not demos[0].main]
    samples, tokens = list[Sample](), 0
    while tokens < settings.tokens_per_step:
        practised = not whole or (drills and rng.random() < practice)
        scene = found[rng.choice(drills if practised else whole)]
        fresh: list[Sample] = []
        for demo in rng.sample(scene, min(len(scene), settings.per_scene)):
            fresh += await rehearse(demo, stage.agent, context)
        tokens += sum(tree.tokens for tree in plant(fresh, settings.row_tokens))
        samples += fresh
    return samples


def learn(stage: Stage, samples: Sequence[Sample], settings: Sft, optimizer: Optimizer) -> StepReport:
    """One update on the mean negative log-likelihood of all tokens to be learned."""
    batches = pack(
        samples,
        positions=stage.backbone.renderer.positions,
        row_tokens=settings.row_tokens,
        rows_per_pass=settings.rows_per_pass,
        side_by_side=stage.backbone.side_by_side,
    )
    count = sum(len(batch.token_N) for batch in batches)

    def loss(_: Batch, logp_N: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
        return -logp_N.sum() / count, {"tokens": torch.tensor(float(len(logp_N)))}

    with torch.enable_grad():
        return step(stage.backbone, optimizer, batches, loss, pixels=stage.media.pixels)


def _metrics(report: StepReport, settings: Sft, number: int, drawing: float, training: float) -> dict[str, float]:
    return {
        "step": number + 1,
        "loss": report.loss,
        "entropy": report.entropy,
        "grad_norm": report.grad_norm,
        "lr": rate(settings.optim, number, settings.steps),
        "tokens": report.tokens,
        "trained_tokens": report.trained_tokens,
        "tokens_per_second": report.tokens / (drawing + training),
        "seconds/draw": drawing,
        "seconds/train": training,
    }
