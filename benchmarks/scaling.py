"""Compare the simulated time of a step with real runs on 1, 2 and 4 servers, and write the tables of docs/scaling.md.

    python benchmarks/scaling.py [--sigma 0.7] [--plots docs/images]

The tiny model trains on groups of direct answers about real clips. Each server has `--slots` slots, keeps a group to
itself, and replies after log-normal times with the median `--seconds`; so two cores are no bottleneck. The simulation
has the servers' true times; those of training, weight sync and the rest of a step are measured in each run, so that
other load on the machine affects both sides alike. A step is the mean of all but the first three and the last one.
"""

import asyncio
import json
import math
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _common import describe_machine, parser, show
from matplotlib.figure import Figure
from stragglers import load_components
from streaming import Measurement, measure

from saccade.checks.estimates import PlanAssumptions
from saccade.checks.scaling import ClusterPlan, ClusterPlanner
from saccade.checks.simulation import Cluster, Conversation, LogNormal, StageCosts, Workload, simulate
from saccade.config.load import load_recipe
from saccade.config.schema import SyntheticConfig
from saccade.data.synthetic import generate_dataset
from saccade.engines.scripted import Scripted
from saccade.models.tiny import make_tiny_model
from saccade.protocols import Renderer
from saccade.reporting.plots import encode_figure
from saccade.types import Completion, GenerationRequest

TOKEN_SECONDS = 1e-3  # of the simulated servers, whose replies have as many tokens as they take milliseconds
NUM_SIMULATED = 200  # steps
SKIPPED = 3  # steps at the start of a run
SERVERS = (1, 2, 4)
MODES: dict[str, dict[str, Any]] = {
    "in turns": {"max_staleness": 0},
    "barrier": {"max_staleness": 2},
    "streaming": {"max_staleness": 2, "streaming": True},
}
USUAL = {"paravt/para_grpo": PlanAssumptions(reply_tokens=256, calls_per_turn=2)}


class SlotServers(Scripted):
    """Servers with slots; a group in progress keeps its server, a new one gets that with the fewest requests."""

    def __init__(self, renderer: Renderer, servers: int, slots: int, median: float, sigma: float) -> None:
        super().__init__(renderer, replies=lambda ledger: "<answer>red</answer>")
        self._slots = [asyncio.Semaphore(slots) for _ in range(servers)]
        self._num_requests, self._servers = [0] * servers, dict[str, tuple[int, int]]()
        self._median, self._sigma = median, sigma

    async def generate(self, request: GenerationRequest) -> Completion:
        """Return the reply after its time, drawn from the request's seed."""
        group = request.ledger.prefix(1).prefix_hashes()[0]
        server, count = self._servers.get(group, (int(np.argmin(self._num_requests)), 0))
        self._servers[group] = server, count + 1
        self._num_requests[server] += 1
        try:
            async with self._slots[server]:
                normal = np.random.default_rng(request.sampling.seed).standard_normal()
                await asyncio.sleep(self._median * math.exp(self._sigma * normal))
        finally:
            self._num_requests[server] -= 1
            self._servers[group] = server, self._servers[group][1] - 1
            if not self._servers[group][1]:
                del self._servers[group]
        return await super().generate(request)


def get_step_seconds(run: Measurement) -> float:
    """Return the mean seconds of a step."""
    return (run.ends[-2][0] - run.ends[SKIPPED - 1][0]) / (len(run.ends) - 1 - SKIPPED)


def build_simulation(chosen: Any, mode: str, run: Measurement) -> tuple[Workload, StageCosts]:
    """Describe the runs of a mode, with the costs of the trainer in one run."""
    rows = run.rows[SKIPPED:-1]
    train, sync = (statistics.mean(row[f"seconds/{phase}"] for row in rows) for phase in ("train", "weight_sync"))
    waited = statistics.mean(row["seconds/rollout"] for row in rows)
    # In turns, the reward's time isn't part of `seconds/rollout`.
    score = statistics.mean(row["seconds/reward"] for row in rows) if mode == "in turns" else 0.0
    mean = chosen.seconds * math.exp(chosen.sigma**2 / 2) / TOKEN_SECONDS
    nothing = LogNormal(mean=0.0)
    workload = Workload(
        groups_per_round=chosen.prompts,
        launched_per_round=chosen.prompts,
        rounds_per_step=1,
        group_size=chosen.group_size,
        prompts=[Conversation(prompt_tokens=0, num_frames=0)],
        reply_tokens=LogNormal(mean=mean, sigma=chosen.sigma),
        tool_turns=0,
        calls_per_turn=0,
        tokens_per_result=0,
        sub_agent=None,
        max_staleness=MODES[mode]["max_staleness"],
        is_streaming=MODES[mode].get("streaming", False),
        waits_for_stale=True,
        max_groups_in_progress=0,
        packed_tokens=0,
        num_updates=0,
        weight_bytes=0,
    )
    costs = StageCosts(
        decode_step=TOKEN_SECONDS,
        decode_step_per_reply=0.0,
        prefill_token=0.0,
        max_replies=chosen.slots,
        tool_call=nothing,
        frame=0.0,
        score=nothing,
        packed_token=0.0,
        trained_token=train,  # a wave of one token
        optimizer_step=0.0,
        sync_byte=0.0,
        sync=sync,
        step=max(get_step_seconds(run) - waited - train - sync, score),
    )
    return workload, costs


def compare(chosen: Any, folder: Path) -> list[dict[str, Any]]:
    """Run all modes with each number of servers, and simulate them."""
    size = f"rl={{prompts_per_step: {chosen.prompts}, group_size: {chosen.group_size}, steps: {chosen.steps}}}"
    fixed = (size, f"rl.save_every={chosen.steps}", f"model.num_threads={chosen.threads}")
    rows = list[dict[str, Any]]()
    for mode, changes in MODES.items():
        for servers in SERVERS:
            runs = list[Measurement]()
            for seed in range(chosen.rounds):
                components, tasks = load_components(folder, *fixed)
                engine = SlotServers(components.renderer, servers, chosen.slots, chosen.seconds, chosen.sigma)
                runs.append(measure(replace(components, engine=engine), tasks, seed, changes))
            cluster = Cluster(wave_tokens=1, wave_idle=0.0, servers=servers)
            simulated = statistics.mean(
                simulate(*build_simulation(chosen, mode, run), cluster, num_steps=NUM_SIMULATED).seconds_per_step
                for run in runs
            )
            measured = statistics.mean(map(get_step_seconds, runs))
            rows.append(
                {
                    "mode": mode,
                    "servers": servers,
                    "measured s a step": measured,
                    "simulated s a step": simulated,
                    "difference": simulated / measured - 1,
                    "steps": sum(len(run.ends) - 1 - SKIPPED for run in runs),
                    "seeds": len(runs),
                }
            )
    return rows


def simulate_clusters(name: str, assumptions: PlanAssumptions, workers: int) -> list[ClusterPlan]:
    """Simulate the best split of clusters of 1 to 1,024 GPUs, without those that are too small."""
    settings = ["rollouts.launcher=ray", f"rollouts.ray.workers={workers}"] if workers > 1 else []
    planner = ClusterPlanner(load_recipe(name, settings), assumptions)
    found = [planner.find_best_split(2**power) for power in range(11)]
    return [plan for plan in found if isinstance(plan, ClusterPlan)]


def plot(folder: Path, rows: Sequence[dict[str, Any]], clusters: dict[str, list[ClusterPlan]]) -> None:
    """Write the two plots of docs/scaling.md."""
    figure = Figure(figsize=(4.2, 3.2), layout="constrained")
    axes = figure.subplots()
    for mode, marker in zip(MODES, "osD", strict=True):
        points = [row for row in rows if row["mode"] == mode]
        axes.plot(
            [row["measured s a step"] for row in points],
            [row["simulated s a step"] for row in points],
            marker,
            label=mode,
        )
    edge = max(row["measured s a step"] for row in rows) * 1.1
    axes.plot([0, edge], [0, edge], color="gray", linewidth=0.8)
    axes.set(xlabel="measured, seconds a step", ylabel="simulated, seconds a step")
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
    options.add_argument("--prompts", type=int, default=8, help="groups per step")
    options.add_argument("--group-size", type=int, default=4)
    options.add_argument("--steps", type=int, default=14, help="of each run, at least six")
    options.add_argument("--slots", type=int, default=8, help="replies in progress on a server")
    options.add_argument("--seconds", type=float, default=0.25, help="of a reply, at the median")
    options.add_argument("--sigma", type=float, default=0.7, help="of the logarithm of a reply's time")
    options.add_argument("--plots", type=Path, help="a folder for the plots; also simulates clusters")
    options.set_defaults(threads=1)
    chosen = options.parse_args(arguments)
    if chosen.steps < 6:
        options.error("--steps must be at least 6")
    torch.set_num_threads(chosen.threads)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_tiny_model(folder / "model")
        generate_dataset(folder / "synthetic", SyntheticConfig(train=24, validation=1, test=1), seed=0)
        rows = compare(chosen, folder)
    title = f"{chosen.prompts} groups of {chosen.group_size}, {chosen.slots} slots, replies of {chosen.seconds:g} s"
    show(f"{title} (sigma {chosen.sigma:g})", rows, describe_machine(), chosen.out)
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
