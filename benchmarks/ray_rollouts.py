"""Rollouts bound by sandboxes and decoding: on one Ray worker, on two, and without Ray.

    python benchmarks/ray_rollouts.py [--tasks 6] [--group 4] [--rounds 3]

Each episode sees frames of a video, runs code twice that reads other frames of it and computes with them, and answers;
a scripted engine replies at once. Every round takes new videos, and no side has a store on disk, so that each decodes
them. Each worker is pinned to one CPU, its sandboxes and threads included; the process without Ray has all of them.
The sides alternate: in every round each side starts its workers and warms up with groups that aren't counted. A ratio
is that of a round's sides, then the median and the range of the rounds.

CPU seconds are those of all processes of a side; `busiest CPU s` those of its busiest worker with its sandboxes: pinned
workers can't be faster than that. `other CPU s` is what the rest of the machine used meanwhile: seconds of sides whose
processes waited for it can't be compared.
"""

import asyncio
import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from _common import TICKS, describe_machine, list_descendants, parser, show, sum_cpu_seconds

from saccade import sandbox
from saccade.config.load import load_recipe
from saccade.config.schema import Recipe
from saccade.data.synthetic.video_writer import write_video
from saccade.models.tiny import make_tiny_model
from saccade.rollouts.collect import collect
from saccade.rollouts.components import RolloutComponents
from saccade.rollouts.executors import connect_executor
from saccade.types import AnswerType, EpisodeStatus, Media, MediaKind, Task

WIDTH, HEIGHT, FPS, NUM_FRAMES = 480, 270, 10.0, 200


def write_tasks(folder: Path, count: int, seed: int) -> list[Task]:
    """Write videos of moving noise, and return a task for each."""
    rng, tasks = np.random.default_rng(seed), []
    for number in range(count):
        base = rng.integers(0, 256, (HEIGHT, WIDTH, 3), np.uint8)
        path = folder / f"{seed}-{number}.mp4"
        write_video(path, (np.roll(base, 3 * index, axis=1) for index in range(NUM_FRAMES)), FPS)
        media = (Media(path=str(path), kind=MediaKind.VIDEO),)
        identity = f"{seed}-{number}"
        tasks.append(Task(id=identity, question="Which?", media=media, answer_type=AnswerType.OPEN, ground_truth="red"))
    return tasks


def make_recipe(model: Path, workers: int) -> Recipe:
    """Return the recipe of a side; 0 workers: without Ray."""
    engine = Path(__file__).with_name("_coding_engine.py")
    overrides = [f"engine.name={engine}", f"model.path={model}", "sampling.max_tokens=600", 'media.folder=""']
    environment = ["video_in_prompt=true", "num_frames=32", "max_context_tokens=16000", "tools.python.timeout=120"]
    overrides += [f"environment.settings.{setting}" for setting in environment]
    if workers:
        ray = {"workers": workers, "pin_cpus": True, "max_episodes": 64}
        overrides += ["rollouts.executor=ray", *(f"rollouts.ray.{name}={value}" for name, value in ray.items())]
    return load_recipe("tiny/pyvision_video", overrides)


def read_worker_seconds() -> dict[int, float]:
    """Return the CPU seconds of each rollout worker with all its descendants, ended ones included, by pid."""
    workers = []
    for pid, _ in list_descendants(os.getpid()):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::RolloutWorker"):
                workers.append(pid)
    return {pid: sum_cpu_seconds(pid) for pid in workers or [os.getpid()]}


def read_cpu_seconds() -> tuple[float, float]:
    """Return the CPU seconds of this process with all its descendants, ended ones included, and of the machine."""
    ours = sum_cpu_seconds(os.getpid())
    user, nice, system, _, _, interrupt, soft, *_ = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:])
    return ours, (user + nice + system + interrupt + soft) / TICKS


async def measure(
    recipe: Recipe, folder: Path, warm_ups: Sequence[Sequence[Task]], tasks: Sequence[Task], group_size: int
) -> list[float]:
    """Collect a group per task of each warm-up, then of `tasks`; return the seconds (see above) of the latter."""
    components = RolloutComponents.from_recipe(recipe)
    components.media.generated_dir = str(folder / "images")
    components = connect_executor(components, folder)

    async def run(tasks: Sequence[Task], group_size: int) -> None:
        groups = await collect(
            tasks,
            components.environments,
            components.build_context(seed=0),
            group_size=group_size,
            score_fn=components.score_fn,
            executor=components.executor,
        )
        episodes = [member.episode for group in groups for member in group.scored_episodes]
        assert len(episodes) == len(tasks) * group_size
        assert {episode.status for episode in episodes} == {EpisodeStatus.ANSWERED}
        assert all(result.ok for episode in episodes for result in episode.results)

    try:
        for warm_up in warm_ups:
            await run(warm_up, 1)
            while components.executor and components.executor.pop_metrics()["workers/up"] < recipe.rollouts.ray.workers:
                await asyncio.sleep(0.1)  # the first worker that is up runs the first groups
        workers, (ours, machine), started = read_worker_seconds(), read_cpu_seconds(), time.perf_counter()
        await run(tasks, group_size)
        seconds, (ours_after, machine_after) = time.perf_counter() - started, read_cpu_seconds()
        busiest = max(value - workers.get(pid, 0.0) for pid, value in read_worker_seconds().items())
        return [seconds, ours_after - ours, busiest, machine_after - machine - (ours_after - ours)]
    finally:
        await components.engine.close()
        sandbox.close_shared_servers()


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the sides in turn, round by round."""
    options = parser(__doc__, rounds=3)
    options.add_argument("--tasks", type=int, default=6, help="groups per round")
    options.add_argument("--group", type=int, default=4, help="episodes per group")
    chosen = options.parse_args(arguments)
    sides = {"without Ray, all CPUs": 0, "one worker": 1, "two workers": 2}
    figures: dict[str, list[list[float]]] = {side: [] for side in sides}
    counts = 2, 2, chosen.tasks  # of groups: two warm-ups, so that each of two workers has one
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        make_tiny_model(root / "model")
        for number in range(chosen.rounds):
            *warm_ups, tasks = (write_tasks(root, count, 3 * number + index) for index, count in enumerate(counts))
            for side, workers in sides.items():
                folder = root / f"{side.replace(' ', '-')}-{number}"
                folder.mkdir()
                recipe = make_recipe(root / "model", workers)
                figures[side].append(asyncio.run(measure(recipe, folder, warm_ups, tasks, chosen.group)))
    rows: list[dict[str, Any]] = []
    for side, values in figures.items():
        wall, ours, busiest, other = (statistics.median(column) for column in zip(*values, strict=True))
        row = {"side": side, "seconds": wall, "episodes/s": chosen.tasks * chosen.group / wall}
        row |= {"CPU s": ours, "busiest CPU s": busiest, "other CPU s": other}
        for title, column in (("times one worker", 0), ("by busiest CPU s", 2)):
            ratios = [one[column] / own[column] for one, own in zip(figures["one worker"], values, strict=True)]
            row[title] = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        rows.append(row)
    title = f"{chosen.tasks} groups of {chosen.group}: decoding and code; medians of {chosen.rounds} rounds"
    show(title, rows, {"cores": str(os.cpu_count()), **describe_machine()}, chosen.out)


if __name__ == "__main__":
    main()
