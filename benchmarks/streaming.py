"""Compare streaming rollouts with a barrier per step, for replies whose times have a long tail.

    python benchmarks/streaming.py [--sigma 1] [--staleness 2]

The tiny model trains on groups of direct answers about real clips; a scripted engine samples, whose replies take
`--seconds` at the median, log-normally distributed. So it measures waiting, not sampling. All sides have one process,
the same threads of torch, and as many episodes in progress as a step has; all but "in turns" update the policy in one
background thread. The baseline is the barrier with the same `rl.max_staleness`: its groups start during the updates,
up to as many steps ahead, each step's once those of the step before have ended. Ages are weight versions between the
start of a group and its training. A speed is that of all steps but the first and the last.
"""

import asyncio
import itertools
import math
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _common import describe_machine, parser, show
from stragglers import load_components

from saccade.config.schema import SyntheticConfig
from saccade.data.synthetic import generate_dataset
from saccade.engines.scripted import Scripted
from saccade.models.tiny import make_tiny_model
from saccade.protocols import Renderer
from saccade.rewards.compose import score_each
from saccade.rollouts.components import TrainingComponents
from saccade.training import rl
from saccade.types import Completion, GenerationRequest, Group, Score, Task


class LongTailEngine(Scripted):
    """A scripted engine whose replies take log-normal times, drawn from the requests' seeds."""

    def __init__(self, renderer: Renderer, *, median: float, sigma: float) -> None:
        super().__init__(renderer, replies=lambda ledger: "<answer>red</answer>")
        self._median, self._sigma = median, sigma
        self.num_in_progress = self.most_in_progress = 0

    async def generate(self, request: GenerationRequest) -> Completion:
        """Return the reply after its time; its version is that of the request."""
        version = self.version
        self.num_in_progress += 1
        self.most_in_progress = max(self.most_in_progress, self.num_in_progress)
        try:
            normal = np.random.default_rng(request.sampling.seed).standard_normal()
            await asyncio.sleep(self._median * math.exp(self._sigma * normal))
        finally:
            self.num_in_progress -= 1
        return replace(await super().generate(request), version=version)


@dataclass(slots=True, kw_only=True)
class Measurement:
    """A run: when its steps had ended (wall and CPU seconds), their metrics, and the staleness of their groups."""

    ends: list[tuple[float, float]] = field(default_factory=list)
    rows: list[Mapping[str, float]] = field(default_factory=list)
    staleness: Counter[int] = field(default_factory=Counter)
    most_in_progress: int = 0

    def compute_seconds(self, clock: int) -> float:
        """Return the seconds of a step: wall (0) or CPU (1)."""
        return (self.ends[-2][clock] - self.ends[0][clock]) / (len(self.ends) - 2)

    def compute_waiting_share(self) -> float:
        """Return the share of a step in which the trainer waits for rollouts."""
        return statistics.mean(row["seconds/rollout"] for row in self.rows[1:-1]) / self.compute_seconds(0)


def measure(
    components: TrainingComponents, tasks: Sequence[Task], seed: int, changes: Mapping[str, Any]
) -> Measurement:
    """Train with changed settings of `rl`, and throw away what comes of it."""
    settings = components.recipe.rl.model_copy(update=changes)
    recipe = components.recipe.model_copy(update={"seed": seed, "rl": settings})
    measurement = Measurement()

    def log_step(row: Mapping[str, float]) -> None:
        measurement.ends.append((time.perf_counter(), time.process_time()))
        measurement.rows.append(row)

    def record_ages(step: int, groups: Sequence[Group]) -> None:
        for group in groups:
            versions = [version for scored in group.scored_episodes for version in scored.episode.ledger.versions()]
            measurement.staleness[step - min(version for version in versions if version >= 0)] += 1

    numbers = itertools.count()
    score_fn = score_each(lambda episode: Score(value=float(next(numbers) % 2)))  # so that groups have advantages
    components = replace(components, recipe=recipe, score_fn=score_fn)
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(rl.train(components, tasks, folder=Path(folder), log_step=log_step, on_groups=record_ages))
    return measurement


def build_row(name: str, runs: Sequence[Measurement], baseline: Sequence[Measurement]) -> dict[str, Any]:
    """Return one line: medians over the runs, and the staleness of all groups."""
    seconds, base = (statistics.median(run.compute_seconds(0) for run in side) for side in (runs, baseline))
    cpu, base_cpu = (statistics.median(run.compute_seconds(1) for run in side) for side in (runs, baseline))
    ratios, cpu_ratios = (  # by seed
        [before.compute_seconds(clock) / run.compute_seconds(clock) for run, before in zip(runs, baseline, strict=True)]
        for clock in (0, 1)
    )
    staleness = sum((run.staleness for run in runs), Counter[int]())
    return {
        "side": name,
        "s a step": seconds,
        "times faster": base / seconds,
        "by seed": f"{min(ratios):.2f} to {max(ratios):.2f}",
        "CPU s a step": cpu,
        "times less CPU": base_cpu / cpu,
        "CPU, by seed": f"{min(cpu_ratios):.2f} to {max(cpu_ratios):.2f}",
        "groups cancelled a step": statistics.mean(row["groups/cancelled"] for run in runs for row in run.rows),
        "waiting for rollouts": statistics.median(run.compute_waiting_share() for run in runs),
        "in progress, most": max(run.most_in_progress for run in runs),
        "staleness": ", ".join(f"{lag}: {staleness[lag] / staleness.total():.0%}" for lag in sorted(staleness)),
        "runs": len(runs),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all sides in turn, for each seed."""
    options = parser(__doc__)
    options.add_argument("--prompts", type=int, default=8, help="groups per step")
    options.add_argument("--group-size", type=int, default=8)
    options.add_argument("--steps", type=int, default=16, help="of each run, at least four")
    options.add_argument("--staleness", type=int, default=2, help="rl.max_staleness")
    options.add_argument("--seconds", type=float, default=0.25, help="of a reply, at the median")
    options.add_argument("--sigma", type=float, default=1.0, help="of the logarithm of a reply's time")
    options.add_argument("--first-seed", type=int, default=0)
    options.set_defaults(threads=1)
    chosen = options.parse_args(arguments)
    if chosen.steps < 4:
        options.error("--steps must be at least 4")
    torch.set_num_threads(chosen.threads)
    barrier = {"max_staleness": chosen.staleness, "max_groups_in_progress": chosen.prompts}
    streaming = {**barrier, "streaming": True}
    sides: dict[str, dict[str, Any]] = {
        "barrier": barrier,
        "barrier, in turns": {"max_staleness": 0},
        "streaming": streaming,
        # Both cancel slow groups, so that long episodes are rarer in the training data.
        "barrier, over_provision=1.25": barrier,
        "streaming, on_stale_group=drop": {**streaming, "on_stale_group": "drop"},
    }
    runs: dict[str, list[Measurement]] = {name: [] for name in sides}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_tiny_model(folder / "model")
        generate_dataset(folder / "synthetic", SyntheticConfig(train=4, validation=1, test=1), seed=0)
        size = f"rl={{prompts_per_step: {chosen.prompts}, group_size: {chosen.group_size}, steps: {chosen.steps}}}"
        fixed = (size, f"rl.save_every={chosen.steps}", f"model.num_threads={chosen.threads}")
        for seed in range(chosen.first_seed, chosen.first_seed + chosen.rounds):
            for side, changes in sides.items():
                spare = ("rl.selection.over_provision=1.25",) if "over_provision" in side else ()
                components, tasks = load_components(folder, *fixed, *spare)
                engine = LongTailEngine(components.renderer, median=chosen.seconds, sigma=chosen.sigma)
                measurement = measure(replace(components, engine=engine), tasks, seed, changes)
                measurement.most_in_progress = engine.most_in_progress
                runs[side].append(measurement)
    size = f"{chosen.prompts} groups of {chosen.group_size}, {chosen.steps} steps"
    title = f"{size}, staleness at most {chosen.staleness}, replies of {chosen.seconds:g} s, sigma {chosen.sigma:g}"
    baseline = next(iter(runs.values()))
    rows = [build_row(side, measurements, baseline) for side, measurements in runs.items()]
    show(title, rows, describe_machine(), chosen.out)


if __name__ == "__main__":
    main()
