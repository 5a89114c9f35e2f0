"""Compare the simulated time of a step with real runs on 1, 2 and 4 rollout workers; plot it for docs/scaling.md.

    python benchmarks/scaling.py [--rounds 1] [--plots docs/images]

`saccade rl` trains the tiny model with workers of a Ray cluster: two turns of code in a sandbox, then an answer. Each
worker has room for one group, so sampling is faster with more of them. Replies and code mostly wait
(`_paced_engine.py`), so two cores are no bottleneck. Costs are those that `recipes plan --costs RUN` reads from a
run's log and its stored episodes: once from the run with one worker, which predicts the others, and once from each run
itself, whose training has the same load of the machine. A step is the mean of all but the first three and the last one.
"""

import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from _common import describe_machine, parser, show
from matplotlib.figure import Figure

from saccade.checks.estimates import PlanAssumptions
from saccade.checks.scaling import ClusterPlan, ClusterPlanner, MeasuredRun, measure_run
from saccade.config.load import load_recipe
from saccade.config.schema import Recipe, SyntheticConfig
from saccade.data.synthetic import generate_dataset
from saccade.models.tiny import make_tiny_model
from saccade.reporting.plots import encode_figure
from saccade.runs import pipeline

NUM_SIMULATED = 200  # steps
SKIPPED = 3  # steps at the start of a run
WORKERS = (1, 2, 4)
MODES = {
    "in turns": ("rl.max_staleness=0",),
    "barrier": ("rl.max_staleness=2",),
    "streaming": ("rl.max_staleness=2", "rl.streaming=true"),
}
USUAL = {"paravt/para_grpo": PlanAssumptions(reply_tokens=256, calls_per_turn=2)}
REWARD = """
def variety(episode):
    return sum(episode.ledger.sampled_tokens()) % 97 / 97
"""


def make_recipe(folder: Path, run: Path, chosen: Any, mode: str, workers: int, seed: int) -> Recipe:
    """Return the recipe of a run in the folder `run`, on the model and the data in `folder`."""
    engine = Path(__file__).with_name("_paced_engine.py")
    settings = [
        f"seed={seed}",
        "model.num_threads=1",
        f"engine.name={engine}",
        f"engine.settings={{token_seconds: {chosen.token_seconds}, sigma: {chosen.sigma}}}",
        f"rewards={{{folder / 'variety.py'}: {{weight: 1.0}}}}",
        "sampling.max_tokens=400",
        "environment.settings.max_context_tokens=2000",
        f"rl={{steps: {chosen.steps}, save_every: {chosen.steps}, prompts_per_step: {chosen.prompts}}}",
        f"rl={{group_size: {chosen.group_size}, filters: {{reward_std: null, statuses: null}}}}",
        "rollouts.executor=ray",
        'media.folder=""',
        f"rollouts.ray={{workers: {workers}, max_episodes: {chosen.group_size}, cpus_per_worker: 0, "
        "lease_timeout: 600}",
        "episodes.max_gib=1000",
        "validation.every=0",
        *MODES[mode],
    ]
    recipe = load_recipe("tiny/pyvision_video", settings)
    return pipeline.with_paths(recipe, folder=run, model=folder / "model", data=folder / "synthetic")


def train(folder: Path, recipe: Recipe) -> float:
    """Train, and return the mean seconds of a step."""
    ends = list[float]()
    pipeline.run_rl(folder, recipe, on_step=lambda step, metrics: ends.append(time.perf_counter()))
    return (ends[-2] - ends[SKIPPED - 1]) / (len(ends) - 1 - SKIPPED)


def predict(recipe: Recipe, measured: MeasuredRun) -> float:
    """Return the simulated seconds of a step of the recipe."""
    planner = ClusterPlanner(recipe, PlanAssumptions(), measured=measured, num_steps=NUM_SIMULATED)
    return planner.simulate(1, 1).result.seconds_per_step


def compare(chosen: Any, folder: Path) -> list[dict[str, Any]]:
    """Run all modes with each number of workers, and simulate them."""
    rows = list[dict[str, Any]]()
    for mode in chosen.modes:
        seconds = dict[int, list[tuple[float, float, float]]]()
        for seed in range(chosen.rounds):
            first: MeasuredRun | None = None
            for workers in WORKERS:
                run = folder / f"{mode.replace(' ', '-')}-{workers}-{seed}"
                recipe = make_recipe(folder, run, chosen, mode, workers, seed)
                measured_seconds, own = train(run, recipe), measure_run(run, 1)
                first = first or own
                row = measured_seconds, predict(recipe, first), predict(recipe, own)
                print(mode, workers, seed, row, own, flush=True)
                seconds.setdefault(workers, []).append(row)
        for workers, values in seconds.items():
            measured, predicted, own_seconds = map(statistics.mean, zip(*values, strict=True))
            rows.append(
                {
                    "mode": mode,
                    "workers": workers,
                    "measured s a step": measured,
                    "predicted from one worker": predicted,
                    "error": predicted / measured - 1,
                    "simulated with its own costs": own_seconds,
                    "error, own costs": own_seconds / measured - 1,
                    "runs": len(values),
                }
            )
    return rows


def simulate_clusters(name: str, assumptions: PlanAssumptions, workers: int) -> list[ClusterPlan]:
    """Simulate the best split of clusters of 1 to 1,024 GPUs, without those that are too small."""
    settings = ["rollouts.executor=ray", f"rollouts.ray.workers={workers}"] if workers > 1 else []
    planner = ClusterPlanner(load_recipe(name, settings), assumptions)
    found = [planner.find_best_split(2**power) for power in range(11)]
    return [plan for plan in found if isinstance(plan, ClusterPlan)]


def plot(folder: Path, rows: Sequence[dict[str, Any]], clusters: dict[str, list[ClusterPlan]]) -> None:
    """Write the two plots of docs/scaling.md."""
    figure = Figure(figsize=(4.2, 3.2), layout="constrained")
    axes = figure.subplots()
    modes = dict.fromkeys(row["mode"] for row in rows)
    for mode, marker in zip(modes, "osD", strict=False):
        points = [row for row in rows if row["mode"] == mode]
        axes.plot(
            [row["measured s a step"] for row in points],
            [row["predicted from one worker"] for row in points],
            marker,
            label=mode,
        )
    edge = max(row["measured s a step"] for row in rows) * 1.1
    axes.plot([0, edge], [0, edge], color="gray", linewidth=0.8)
    axes.set(xlabel="measured, seconds a step", ylabel="predicted, seconds a step")
    axes.legend(frameon=False)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "scaling-validation.svg").write_bytes(encode_figure(figure, "svg"))
    figure = Figure(figsize=(5.6, 3.2), layout="constrained")
    axes = figure.subplots()
    for label, plans in clusters.items():
        gpus = [plan.trainer_gpus + plan.servers for plan in plans]
        axes.plot(gpus, [plan.result.steps_per_hour for plan in plans], "o-", label=label)
    axes.set_xscale("log", base=2)
    axes.set(xlabel="GPUs", ylabel="simulated steps per hour", ylim=(0, None))
    axes.legend(frameon=False)
    (folder / "scaling-clusters.svg").write_bytes(encode_figure(figure, "svg"))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, simulate, and write."""
    options = parser(__doc__, rounds=1)
    options.add_argument("--modes", nargs="+", choices=MODES, default=[*MODES])
    options.add_argument("--prompts", type=int, default=4, help="groups per step")
    options.add_argument("--group-size", type=int, default=4)
    options.add_argument("--steps", type=int, default=9, help="of each run, at least six")
    options.add_argument("--token-seconds", type=float, default=0.012, help="of a reply, per token")
    options.add_argument("--sigma", type=float, default=0.7, help="of the logarithm of a reply's and a call's time")
    options.add_argument("--plots", type=Path, help="a folder for the plots; also simulates clusters")
    options.set_defaults(threads=1)
    chosen = options.parse_args(arguments)
    if chosen.steps < 6:
        options.error("--steps must be at least 6")
    torch.set_num_threads(chosen.threads)
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's default, 15, lets other programs of this machine go first
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_tiny_model(folder / "model")
        generate_dataset(folder / "synthetic", SyntheticConfig(train=8, validation=1, test=1), seed=0)
        (folder / "variety.py").write_text(REWARD)
        rows = compare(chosen, folder)
    title = f"{chosen.prompts} groups of {chosen.group_size}, {chosen.token_seconds * 1e3:g} ms a token"
    show(f"{title}, sigma {chosen.sigma:g}", rows, describe_machine(), chosen.out)
    if chosen.plots is not None:
        clusters = {
            f"{name}, {workers} rollout worker{'s' * (workers > 1)}": simulate_clusters(name, assumptions, workers)
            for name, assumptions in USUAL.items()
            for workers in (1, 8)
        }
        plot(chosen.plots, rows, clusters)
        figures = {
            label: [
                {
                    "trainer": plan.trainer_gpus,
                    "servers": plan.servers,
                    "steps/hour": round(plan.result.steps_per_hour, 1),
                    "trainer idle": round(plan.result.trainer_idle, 3),
                    "servers idle": round(plan.result.servers_idle, 3),
                    "workers idle": round(plan.result.workers_idle, 3),
                    "limited by": plan.result.bottleneck,
                }
                for plan in plans
            ]
            for label, plans in clusters.items()
        }
        (chosen.plots / "scaling-clusters.json").write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
