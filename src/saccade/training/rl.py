"""Reinforcement learning: the loop reads like the algorithm.

    prompts ──> lot: rolled out, selected ──> credit ──samples──> learn ──> publish ──> one log line
                   ▲   engine.generate                                         │
                   └──────────────── the next version of the weights ──────────┘

One thread of control: rollouts wait for the engine, the trainer waits for the rollouts. With `rl.max_staleness: N`
rolling out goes on while a second thread learns, at most N versions ahead (`training/ahead.py` draws who waits for
whom). Attempts under way when new weights come go on (`rl.on_update: continue`), each token with the version that
sampled it; or they begin anew (`restart`), and what was sampled for them is lost. With `rl.staleness: N` lots wait in a
queue for N versions, to try what lateness does; the first N + 1 are then of version 0:

    version   0        1   2   3
    rolls out 0 1 2    3   4   5      for steps 0, 1, 2 ..., with N = 2
    learns    0        1   2   3

What a step draws depends on the seed, the step's number, the weights and what a checkpoint holds (`Progress`), so a
resumed run goes on as if never stopped; but for `max_staleness` and `overlaunch`, where what is learned from depends on
who was faster.
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from saccade.algorithms.advantages import anchor_credit, credit, is_punished, punished
from saccade.algorithms.select import forgiven
from saccade.config import Recipe, Rl
from saccade.data.record import read_jsonl, relocated, seen_from, write_jsonl
from saccade.errors import ConfigError, DataError, RunError, SaccadeError, boundary
from saccade.protocols import Engine
from saccade.rollouts.renewal import Renewal
from saccade.rollouts.stage import Stage
from saccade.training import checkpoint
from saccade.training.ahead import Ahead
from saccade.training.aside import Going, announced, aside
from saccade.training.checkpoint import Checkpoint
from saccade.training.clock import Clock
from saccade.training.credit import samples_of
from saccade.training.learn import learn
from saccade.training.lots import Lot, Seen, draw_lot, filter_metrics
from saccade.training.optim import Optimizer, rate
from saccade.training.prompts import Prompts
from saccade.training.reference import Reference, first_weights, trained
from saccade.training.step import StepReport
from saccade.types import Sample, Task

Log = Callable[[Mapping[str, float]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where a run stands between two steps: what a checkpoint holds besides weights and optimiser.

    `done` steps are finished; `prompts` is what is left of the tasks, `lots` wait to be learned from, `start` is the
    folder of the weights that RL began with.

    >>> Progress(done=3, prompts=Prompts(cursor=24), lots=(), start="run/sft/step-000400").done
    3
    """

    done: int
    prompts: Prompts
    lots: tuple[Lot, ...]
    start: str


async def train(stage: Stage, tasks: Sequence[Task], *, folder: Path, log: Log, seen: Seen | None = None) -> None:
    """Train `stage.backbone` in place for the recipe's steps; checkpoints go below `folder`.

    `log` gets one line of metrics a step, `seen` every step's groups as they are rolled out. A step of which no group
    is kept makes no update: its `updates` is 0, and it has no loss. Goes on from the newest checkpoint in `folder` (the
    stage must have been loaded from it). Raises DataError without tasks, EngineError where engine and trainer disagree
    about a token, RunError where groups are missing and `rl.select.on_short` is "stop", ConfigError where
    `rl.max_staleness` wants an engine with weights of its own.
    """
    settings = stage.recipe.rl
    if not tasks:
        raise DataError("there are no tasks to learn from")
    check_engine(stage.recipe, stage.engine)
    overlapped = settings.max_staleness > 0
    optimizer = Optimizer(stage.backbone.model, settings.optim, settings.steps)
    at = begin(stage, checkpoint.newest(folder), optimizer)
    reference = reference_of(stage, at)
    # The number of finished steps, whether or not each had something to learn, is the version of the weights.
    await stage.engine.publish(None, at.done)
    clock, renewal = Clock(stage.score, overlapped=overlapped), Renewal()
    async with rolling(replace(stage, score=clock.score), tasks, at, seen, renewal) as ahead:
        while at.done < settings.steps:
            optimizer.begin(at.done)
            sampled = ahead.tokens
            clock.begin()
            with kept(folder, stage, optimizer, at):
                lot = long_enough(await ahead.take(), settings)
            clock.lap("rollout")
            samples, measured = samples_from(lot, stage)
            report = await learned(stage, samples, optimizer, reference) if samples else None
            clock.lap("train")
            measured |= {"lr": rate(settings.optim, lot.number, settings.steps), **_learning(report, settings.updates)}
            row = {"step": at.done + 1, **lot.measured, **measured}
            with kept(folder, stage, optimizer, at, learned=ahead, tell=partial(log, row)):
                await publish(stage, at.done + 1, renewal)
            ahead.published(at.done + 1)
            clock.lap("publish")
            at = learned_from(at, ahead)
            log({**row, **renewal.lost(), **clock.metrics(stage.backbone.device, ahead.tokens - sampled)})
            if at.done % settings.save_every == 0 or at.done == settings.steps:
                save(folder, stage, optimizer, at)


async def learned(
    stage: Stage, samples: Sequence[Sample], optimizer: Optimizer, reference: Reference | None
) -> StepReport:
    """Learn from the samples; where rolling out goes on meanwhile, in another thread."""

    def update(going: Going) -> StepReport:
        return learn(stage, samples, stage.recipe.rl, optimizer, reference, going)

    if stage.recipe.rl.max_staleness:
        return await aside(update, "the update under way")
    with announced("the update under way"):
        return update(lambda: None)


async def publish(stage: Stage, version: int, renewal: Renewal) -> None:
    """Give the engine the trained weights. Attempts under way have as long afterwards as they had before."""
    restart = stage.recipe.rl.on_update == "restart"
    with stage.clock.paused(), renewal.renewed() if restart else contextlib.nullcontext():
        await stage.engine.publish(None, version)


def check_engine(recipe: Recipe, engine: Engine | type[Engine]) -> None:
    """See that rolling out may go on while the trainer learns, where it is to, with this engine or one of this class.

    Raises ConfigError.
    """
    most = recipe.rl.max_staleness
    if most and not engine.own_weights:
        raise ConfigError(
            f"rl.max_staleness={most} needs an engine with weights of its own, such as vllm; "
            f"{recipe.engine.name} samples from those that are being trained: set rl.max_staleness=0"
        )


def rolling(stage: Stage, tasks: Sequence[Task], at: Progress, seen: Seen | None, renewal: Renewal) -> Ahead:
    """What rolls out the lots of the steps that are left."""
    settings = stage.recipe.rl
    return Ahead(
        lambda prompts, number: draw_lot(stage, tasks, prompts, number, seen=seen, run=renewal.run),
        at.prompts,
        at.lots,
        version=at.done,
        last=settings.steps,
        most=settings.max_staleness or settings.staleness,
        patient=not settings.max_staleness,
        room=settings.max_waiting_tokens,
    )


def samples_from(lot: Lot, stage: Stage) -> tuple[list[Sample], dict[str, float]]:
    """What a lot's groups have to teach, and what was measured of their credit."""
    settings, kept = stage.recipe.rl, lot.kept
    everywhere, anchors = credit(kept, settings.advantage), anchor_credit(kept, settings.advantage)
    whole = [one + other for one, other in zip(everywhere, anchors, strict=True)]
    measured = {"punished": punished(kept, whole)}
    if settings.select.correct_with_negative_advantage:
        measured |= filter_metrics(forgiven(kept, whole))
    samples = samples_of(
        kept,
        everywhere,
        settings.advantage.children,
        anchors=anchors,
        decode=stage.backbone.renderer.decode,
        leave_out=is_punished if settings.select.correct_with_negative_advantage else lambda member, advantage: False,
    )
    return samples, measured


def long_enough(lot: Lot, settings: Rl) -> Lot:
    """The lot; RunError where groups are missing and that is to stop the run."""
    if lot.missing and settings.select.on_short == "stop":
        found = f"{settings.prompts - lot.missing} of {settings.prompts} groups to learn from"
        mend = "raise rl.select.oversample or rl.select.max_rounds, or set rl.select.on_short=go_on"
        raise RunError(f"step {lot.number + 1} found {found} in {lot.measured['rounds']:.0f} rounds; {mend}")
    return lot


# ---- stopping and going on -------------------------------------------------------------------------------------------


def begin(stage: Stage, last: Checkpoint | None, optimizer: Optimizer) -> Progress:
    """Where the run stands: at its beginning, or where its last checkpoint was written. Raises RunError."""
    if last is None:
        return Progress(done=0, prompts=Prompts(), lots=(), start=str(Path(stage.recipe.model.path).resolve()))
    notes = last.restore(optimizer)
    with boundary(RunError, f"the checkpoint {last.folder} can't be read; delete it to go on from the one before"):
        row = Prompts(cursor=int(notes["cursor"]), front=tuple(notes["front"]))
        read = read_jsonl(last.folder / "lots.jsonl", Lot)
        lots = tuple(relocated(lot, lambda file: os.path.normpath(last.folder / file)) for lot in read)
        # As seen from the stage's folder, so that a run may be moved as a whole; an absolute path stays as it is.
        start = (last.folder.parent / str(notes["start"])).resolve()
        return Progress(done=last.step, prompts=row, lots=lots, start=str(start))


def learned_from(at: Progress, ahead: Ahead) -> Progress:
    """Where a run stands that has learned from one more lot."""
    prompts, lots = ahead.state
    return replace(at, done=at.done + 1, prompts=prompts, lots=lots)


@contextlib.contextmanager
def kept(
    folder: Path,
    stage: Stage,
    optimizer: Optimizer,
    at: Progress,
    *,
    learned: Ahead | None = None,
    tell: Callable[[], None] = lambda: None,
) -> Iterator[None]:
    """Where the block fails, as it does where no server can be used for too long, what was learned is kept.

    That is what was when the run stood `at`, and with `learned` one lot more, of which `tell` writes its line.
    """
    try:
        yield
    except SaccadeError:
        if learned:
            tell()
            save(folder, stage, optimizer, learned_from(at, learned))
        elif at.done % stage.recipe.rl.save_every:  # else it was saved, or there is nothing to save
            save(folder, stage, optimizer, at)
        raise


def save(folder: Path, stage: Stage, optimizer: Optimizer, at: Progress) -> None:
    """Write a checkpoint of the run as it stands; attempts stand still meanwhile, and so does their clock."""
    run = folder.resolve().parent  # what lies in it moves with it
    start = seen_from(folder.resolve(), at.start, run)
    with stage.clock.paused():
        checkpoint.save(
            folder,
            step=at.done,
            backbone=stage.backbone,
            optimizer=optimizer,
            notes={**asdict(at.prompts), "start": start},
            attach=lambda place: write_jsonl(
                place / "lots.jsonl",
                # The folder that a checkpoint is written in is beside the one where it will stand.
                [relocated(lot, lambda file: seen_from(place.resolve(), file, run)) for lot in at.lots],
            ),
        )


def reference_of(stage: Stage, at: Progress) -> Reference | None:
    """The policy to be held to, where a setting asks for it. Raises RunError where its weights are gone."""
    settings = stage.recipe.rl.kl
    if not (settings.loss or settings.reward):
        return None
    first = first_weights(stage.backbone, at.start) if at.done else trained(stage.backbone)
    return Reference(stage.backbone, first, settings.keep)


def _learning(report: StepReport | None, updates: int) -> dict[str, float]:
    if report is None:
        return {"updates": 0}
    stats = {name: value for name, value in report.stats.items() if name != "tokens"}
    measured = {"loss": report.loss, "entropy": report.entropy, "grad_norm": report.grad_norm}
    return {"updates": updates, **measured, **stats, "tokens": report.tokens, "trained_tokens": report.trained_tokens}
