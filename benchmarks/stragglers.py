"""A step's rollouts with one very slow attempt, with and without overlaunching, beside a step in which nobody is slow.

    python benchmarks/stragglers.py [--slower 30]

The tiny world, groups of 8 direct answers over real clips; a scripted engine takes `--seconds` for a reply, and for one
attempt of each step `--slower` times as long. So what is measured is who waits for whom, and not a model.
"""

import asyncio
import itertools
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from _common import alternate, machine, parser, show

from saccade.config import World, load_recipe
from saccade.data.rows import read_tasks
from saccade.data.world.make import make_world
from saccade.engines.scripted import scripted
from saccade.ledger import Ledger
from saccade.model.tiny import make_tiny
from saccade.rollouts.stage import Stage
from saccade.training.lots import draw_lot
from saccade.training.prompts import Prompts
from saccade.types import Score, Task


def staged(folder: Path, prompts: int, overlaunch: float) -> tuple[Stage, list[Task]]:
    """A stage that keeps every group, and its tasks."""
    settings = ["agent.name=direct", "agent.settings={overview_frames: 4, overview_pixels: [256, 256]}"]
    settings += [f"model.path={folder / 'model'}", f"rl.prompts={prompts}", f"rl.select.overlaunch={overlaunch}"]
    recipe = load_recipe(
        "tiny/base", [*settings, "rl.select={oversample: 1, min_spread: -1}", "rewards={accuracy: {}}"]
    )
    tasks = read_tasks(folder / "world/train/tasks.jsonl")
    return replace(Stage.of(recipe), score=lambda episode, task: Score(value=0.0, parts={})), tasks


def step(stage: Stage, tasks: Sequence[Task], seconds: float, slower: float) -> Callable[[], None]:
    """Rolls out one step; the third attempt that asks is `slower` times as slow as the others."""
    numbers = itertools.count()

    def go() -> None:
        asked = itertools.count()

        def wait(ledger: Ledger) -> float:
            return seconds * (slower if next(asked) == 2 else 1)

        engine = scripted(stage.backbone.renderer, replies=lambda ledger: "<answer>red</answer>", seconds=wait)
        lot, _ = asyncio.run(draw_lot(replace(stage, engine=engine), tasks, Prompts(), next(numbers)))
        assert not lot.missing

    return go


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the three cases in turn."""
    options = parser(__doc__)
    options.add_argument("--prompts", type=int, default=8, help="groups that a step learns from")
    options.add_argument("--seconds", type=float, default=0.25, help="that a reply takes")
    options.add_argument("--slower", type=float, default=30.0, help="times, for one attempt of a step")
    options.add_argument("--overlaunch", type=float, default=1.25)
    chosen = options.parse_args(arguments)
    torch.set_num_threads(chosen.threads)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_tiny(folder / "model")
        make_world(folder / "world", World(train=4, validation=1, test=1), seed=0)
        spare, (plain, tasks) = staged(folder, chosen.prompts, chosen.overlaunch)[0], staged(folder, chosen.prompts, 1)
        cases = {
            "nobody slow": (plain, 1.0),
            "nobody slow, overlaunched": (spare, 1.0),
            "one slow, overlaunched": (spare, chosen.slower),
            "one slow": (plain, chosen.slower),
        }
        sides = {name: step(stage, tasks, chosen.seconds, slower) for name, (stage, slower) in cases.items()}
        seconds = alternate(sides, chosen.rounds)
    wall = {name: sorted(each[0] for each in values)[len(values) // 2] for name, values in seconds.items()}
    base = wall["nobody slow, overlaunched"]
    rows = [
        {"case": name, "seconds": value, "of nobody slow, overlaunched": value / base} for name, value in wall.items()
    ]
    title = f"{chosen.prompts} groups of {plain.recipe.rl.group}; a reply takes {chosen.seconds:g} s"
    show(title, rows, machine(), chosen.out)


if __name__ == "__main__":
    main()
