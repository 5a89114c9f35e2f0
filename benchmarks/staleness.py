"""Compare asynchronous RL (rollouts during the update) with synchronous RL in steps per hour and in rewards.

    python benchmarks/staleness.py                                     # from random weights: speed alone
    python benchmarks/staleness.py --run runs/demo                     # from the run's cold start, by its recipe
    python benchmarks/staleness.py --run runs/demo --steps 60          # long enough for rewards to be compared
    python benchmarks/staleness.py --run runs/a engine.name=vllm       # with a server, where `saccade serve` runs one

All sides run the same steps from the same weights, for each seed one after the other. They sample in a process of its
own (`rollouts.executor=processes`), or from the servers of the recipe. Asynchronous runs keep two cores busy: sampling
and training have `--threads` threads each. Runs in turns have the same, and on other sides both parts have twice as
many threads, and sampling two processes, so that each part may use both cores. CPU seconds are those of this process
and the sampling processes, without servers. A speed is that of all steps but the first and the last, whose
rollouts don't overlap an update. Rewards are means over a fifth of the steps: the mean of the asynchronous runs' seeds
should be between the lowest and the highest seed of the synchronous runs. Settings come last, dotted.
"""

import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from _common import describe_machine, parser, show, sum_cpu_seconds

from saccade.config.load import load_recipe, resolve_model_path
from saccade.config.schema import Recipe
from saccade.rollouts.components import runs_model_here
from saccade.rollouts.executors import connect_executor
from saccade.runs import pipeline
from saccade.training import rl

SEEDLING = (  # train on every group: random weights rarely earn a reward
    "synthetic={train: 8, validation: 1, test: 1}",
    "rl={selection: {oversample: 1}, filters: {reward_std: null, statuses: null}}",
)
WINDOWS = 5  # over which rewards are averaged


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingTimes:
    """A run: when each of its steps had ended (wall seconds, and CPU seconds until then), and what was measured."""

    ends: Sequence[float]
    cpu_ends: Sequence[float] = ()
    rows: Sequence[Mapping[str, float]]

    @property
    def seconds(self) -> float:
        """Of a step."""
        return (self.ends[-2] - self.ends[0]) / (len(self.ends) - 2)

    @property
    def cpu_seconds(self) -> float:
        """Of a step."""
        return (self.cpu_ends[-2] - self.cpu_ends[0]) / (len(self.cpu_ends) - 2)

    def mean(self, *names: str) -> float:
        """What the named figures add up to, on average, in the steps that count."""
        return statistics.mean(sum(row[name] for name in names) for row in self.rows[1:-1])

    def rewards(self) -> list[float]:
        """The mean of each window."""
        edges = [len(self.rows) * window // WINDOWS for window in range(WINDOWS + 1)]
        return [
            statistics.mean(row["reward"] for row in self.rows[start:stop]) for start, stop in itertools.pairwise(edges)
        ]


def prepare_run(run: Path | None, folder: Path, settings: Sequence[str]) -> tuple[Recipe, Path, Path]:
    """The recipe, the folder that its paths start at, and the weights to begin with: a run's, or made in `folder`."""
    if run is not None:
        recipe = load_recipe(str(run / "recipe.yaml"), settings)
        return recipe, run, pipeline.find_newest_weights(run, "sft") or resolve_model_path(run, recipe)
    recipe = load_recipe("tiny/para_grpo", [*SEEDLING, *settings])
    pipeline.generate_data(folder / "data", recipe, on_progress=lambda *_: None)
    pipeline.create_tiny_model(folder / "model", recipe, demonstrations=folder / "data/train/demonstrations.jsonl")
    return pipeline.with_paths(recipe, folder=folder, data=folder / "data"), folder, folder / "model"


def train(recipe: Recipe, home: Path, weights: Path) -> TrainingTimes:
    """Train by the recipe, and throw away what comes of it."""
    ends: list[float] = []
    cpu_ends: list[float] = []
    rows: list[Mapping[str, float]] = []

    def log(values: Mapping[str, float]) -> None:
        ends.append(time.perf_counter())
        cpu_ends.append(sum_cpu_seconds(os.getpid()))
        rows.append(values)

    torch.set_num_threads(recipe.model.num_threads)
    executor = "processes" if runs_model_here(recipe) else "local"
    recipe = recipe.with_values({"rollouts.executor": executor})
    tasks = pipeline.load_training_tasks(home, recipe)
    with tempfile.TemporaryDirectory() as folder:
        components = connect_executor(pipeline.load_training_components(recipe, weights), Path(folder))
        pipeline.run_and_close(components, rl.train(components, tasks, folder=Path(folder), log_step=log))
    return TrainingTimes(ends=ends, cpu_ends=cpu_ends, rows=rows)


def build_speed_rows(found: Mapping[str, Sequence[TrainingTimes]]) -> list[dict[str, Any]]:
    """A line for each side; the first is the baseline."""
    lines = list[dict[str, Any]]()
    seconds, cpu_seconds = (
        {name: [(took.seconds, took.cpu_seconds)[clock] for took in runs] for name, runs in found.items()}
        for clock in (0, 1)
    )
    base = next(iter(found))
    for name, runs in found.items():
        line: dict[str, Any] = {"side": name, "steps/hour": 3600 / statistics.median(seconds[name])}
        for unit, ratio, values in (
            ("s a step", "times faster", seconds),
            ("CPU s a step", "times less CPU", cpu_seconds),
        ):
            ratios = [before / own for before, own in zip(values[base], values[name], strict=True)]  # by seed
            line[unit] = statistics.median(values[name])
            line[ratio] = statistics.median(values[base]) / line[unit]
            line[f"{ratio}, by seed"] = f"{min(ratios):.2f} to {max(ratios):.2f}"
        line |= {
            "waiting for rollouts": statistics.median(
                took.mean("seconds/rollout") / took.mean("seconds/rollout", "seconds/train", "seconds/weight_sync")
                for took in runs
            ),
            "staleness, max": max(row.get("staleness_max", 0.0) for took in runs for row in took.rows),
            "runs": len(runs),
        }
        lines.append(line)
    return lines


def build_reward_rows(found: Mapping[str, Sequence[TrainingTimes]]) -> list[dict[str, Any]]:
    """A line for each window: the band of the first side's seeds, and the mean of the last one's."""
    in_turns, *_, stale = ([took.rewards() for took in runs] for runs in found.values())
    lines = []
    for window in range(WINDOWS):
        band, mean = [seed[window] for seed in in_turns], statistics.mean(seed[window] for seed in stale)
        line = {"fifth of the steps": window + 1, "in turns, lowest": min(band), "in turns, highest": max(band)}
        lines.append(line | {"asynchronous, mean": mean, "inside": min(band) <= mean <= max(band)})
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    """Run all sides for every seed."""
    options = parser(__doc__, rounds=3)
    options.add_argument("--run", type=Path, help="a run whose cold start has ended, such as runs/demo")
    options.add_argument("--steps", type=int, default=12, help="of each run, at least five")
    options.add_argument("--staleness", type=int, default=1, help="versions that rolling out may be ahead")
    options.add_argument("settings", nargs="*", help="such as rl.prompts_per_step=4")
    options.set_defaults(threads=1)  # the sampling process needs a core as well
    chosen = options.parse_args(arguments)
    if chosen.steps < WINDOWS:
        options.error(f"--steps must be at least {WINDOWS}")
    torch.set_num_threads(chosen.threads)
    fixed = (f"rl.steps={chosen.steps}", f"rl.save_every={chosen.steps}", f"model.num_threads={chosen.threads}")
    sides = {  # versions, threads of the trainer and of sampling, and sampling processes
        "in turns": (0, chosen.threads, 1),
        "in turns, twice the threads": (0, 2 * chosen.threads, 1),
        "in turns, twice the threads, two processes": (0, 2 * chosen.threads, 2),
        f"staleness at most {chosen.staleness}": (chosen.staleness, chosen.threads, 1),
    }
    found: dict[str, list[TrainingTimes]] = {name: [] for name in sides}
    with tempfile.TemporaryDirectory() as name:
        recipe, home, weights = prepare_run(chosen.run, Path(name), [*fixed, *chosen.settings])
        for seed in range(chosen.rounds):
            for side, (most, threads, processes) in sides.items():
                values = {"seed": seed, "rl.max_staleness": most, "model.num_threads": threads}
                one = recipe.with_values({**values, "rollouts.num_processes": processes})
                found[side].append(train(one, home, weights))
    size = f"{recipe.rl.prompts_per_step} groups of {recipe.rl.group_size}, {chosen.steps} steps, {chosen.rounds} seeds"
    show(
        f"Rewards: {size}",
        build_reward_rows(found),
        describe_machine(),
        chosen.out and chosen.out.with_suffix(".rewards.json"),
    )
    show(f"Speed: {size}", build_speed_rows(found), describe_machine(), chosen.out)


if __name__ == "__main__":
    main()
