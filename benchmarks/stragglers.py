"""A step's rollouts with one very slow episode, with and without over-provisioning, and without slow episodes.

    python benchmarks/stragglers.py [--slower 30]

The tiny synthetic dataset, groups of 8 direct answers over real clips; a scripted engine takes `--seconds` for a reply,
and for one episode of each step `--slower` times as long. So it measures waiting, not a model.
"""

import asyncio
import itertools
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from _common import alternate, describe_machine, parser, show

from saccade.config.load import load_recipe
from saccade.config.schema import SyntheticConfig
from saccade.data.dataset import load_tasks
from saccade.data.synthetic import generate_dataset
from saccade.engines.scripted import Scripted
from saccade.ledger import Ledger
from saccade.models.tiny import make_tiny_model
from saccade.rewards.compose import score_each
from saccade.rollouts.components import TrainingComponents
from saccade.training.prompt_sampler import PromptSampler
from saccade.training.rollout_batch import collect_batch
from saccade.types import Score, Task


def load_components(folder: Path, *overrides: str) -> tuple[TrainingComponents, list[Task]]:
    """Load components that keep every group, and their tasks, from the model and the dataset in `folder`."""
    settings = ["environment.name=single_turn", "environment.settings={num_frames: 4, frame_pixels: [256, 256]}"]
    settings += [f"model.path={folder / 'model'}", "rewards={accuracy: {}}", *overrides]
    recipe = load_recipe("tiny/base", [*settings, "rl={selection: {oversample: 1}, filters: {reward_std: null}}"])
    tasks = load_tasks(folder / "synthetic/train/tasks.jsonl")
    return replace(TrainingComponents.from_recipe(recipe), score_fn=score_each(lambda episode: Score(value=0.0))), tasks


def step(components: TrainingComponents, tasks: Sequence[Task], seconds: float, slower: float) -> Callable[[], None]:
    """Return a function that rolls out one step; the third request is `slower` times as slow as the others."""
    numbers = itertools.count()

    def go() -> None:
        requests = itertools.count()

        def wait(ledger: Ledger) -> float:
            return seconds * (slower if next(requests) == 2 else 1)

        engine = Scripted(components.vlm.renderer, replies=lambda ledger: "<answer>red</answer>", latency=wait)
        batch, _ = asyncio.run(collect_batch(replace(components, engine=engine), tasks, PromptSampler(), next(numbers)))
        assert len(batch.groups) == components.recipe.rl.prompts_per_step

    return go


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the three cases in turn."""
    options = parser(__doc__)
    options.add_argument("--prompts", type=int, default=8, help="groups per step")
    options.add_argument("--seconds", type=float, default=0.25, help="of a reply")
    options.add_argument("--slower", type=float, default=30.0, help="times, for one episode of a step")
    options.add_argument("--over-provision", type=float, default=1.25)
    chosen = options.parse_args(arguments)
    torch.set_num_threads(chosen.threads)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_tiny_model(folder / "model")
        generate_dataset(folder / "synthetic", SyntheticConfig(train=4, validation=1, test=1), seed=0)
        prompts = f"rl.prompts_per_step={chosen.prompts}"
        plain, tasks = load_components(folder, prompts)
        spare, _ = load_components(folder, prompts, f"rl.selection.over_provision={chosen.over_provision}")
        cases = {
            "none slow": (plain, 1.0),
            "none slow, over-provisioned": (spare, 1.0),
            "one slow, over-provisioned": (spare, chosen.slower),
            "one slow": (plain, chosen.slower),
        }
        sides = {name: step(components, tasks, chosen.seconds, slower) for name, (components, slower) in cases.items()}
        seconds = alternate(sides, chosen.rounds)
    wall, cpu = (
        {name: statistics.median(each[clock] for each in values) for name, values in seconds.items()}
        for clock in (0, 1)
    )
    base = "none slow, over-provisioned"
    rows = [
        {
            "case": name,
            "seconds": wall[name],
            f"of {base}": wall[name] / wall[base],
            "CPU s": cpu[name],
            f"of the CPU s of {base}": cpu[name] / cpu[base],
            "rounds": chosen.rounds,
        }
        for name in cases
    ]
    title = f"{chosen.prompts} groups of {plain.recipe.rl.group_size}; a reply takes {chosen.seconds:g} s"
    show(title, rows, describe_machine(), chosen.out)


if __name__ == "__main__":
    main()
