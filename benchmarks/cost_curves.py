"""How the cost of a step grows: with the group, the prompt, turns, crops, episodes in progress, a video's length.

    python benchmarks/cost_curves.py --threads 1

Each curve doubles one size, holds the others, and fits the exponent of CPU seconds, from all sizes and from the larger
half. A part that is constant lowers an exponent; what grows faster than linearly has one above 1. The trained model is
tiny, so that attention, whose cost grows with the square of a conversation's length, has a large share.
"""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from _common import alternate, describe_machine, parser, show
from local_engine import NoiseMediaLoader, prompts
from media import build_loader, load, make_clip
from packing import group, loss
from stragglers import load_components, step

from saccade.config.schema import ModelConfig, OptimizerConfig, SyntheticConfig
from saccade.data.synthetic import generate_dataset
from saccade.ledger import Ledger
from saccade.media.frame_sampling import sample_uniform_times
from saccade.models.tiny import make_tiny_model
from saccade.models.vlm import VisionLanguageModel
from saccade.training.optimizer import Optimizer
from saccade.training.packing import pack
from saccade.training.train_step import train_step
from saccade.types import TrainingSample

# By name: what grows, with its unit; the sizes; the reason for the exponent.
CURVES: Mapping[str, tuple[str, tuple[int, ...], str]] = {
    "group": ("replies of one prompt of 400 tokens", (4, 8, 16, 32, 64), "the prompt is computed once per group"),
    "prompt": ("frames of a prompt, 7 tokens each", (50, 100, 200, 400), "linear, and attention within the prompt"),
    "turns": ("turns of 60 tokens", (2, 4, 8, 16, 32), "linear, and attention within the conversation"),
    "crops": (
        "sub-agents with 8 frames each, in rows of 1,024 tokens",
        (8, 16, 32, 64),
        "each sub-agent is a conversation of its own",
    ),
    "episodes": ("episodes in progress, scripted replies", (64, 128, 256, 512), "each episode costs the same"),
    "video": (
        "seconds of a video, 64 frames of it",
        (60, 600, 3600, 10800),
        "at most 64 groups of pictures are decoded; finding them reads the index",
    ),
}


def build_turns(vlm: VisionLanguageModel, turns: int) -> list[TrainingSample]:
    """Return one conversation of `turns` replies of 30 tokens, each followed by a tool result of 30 tokens."""
    rng = np.random.default_rng(turns)
    [ledger] = prompts(vlm, 1, 8)
    for _ in range(turns):
        reply, result = rng.integers(0, 250, (2, 30)).tolist()
        ledger = ledger.append_completion(reply, logprobs=[-5.0] * len(reply), version=0).observe(result)
    return [build_sample(ledger)]


def build_crops(vlm: VisionLanguageModel, crops: int) -> list[TrainingSample]:
    """Return the conversations of `crops` sub-agents, with different frames and replies of 20 tokens."""
    rng = np.random.default_rng(crops)
    return [
        build_sample(prompt.append_completion(rng.integers(0, 250, 20).tolist(), logprobs=[-5.0] * 20, version=0))
        for prompt in prompts(vlm, crops, 8)
    ]


def build_sample(ledger: Ledger) -> TrainingSample:
    """Return a sample whose sampled tokens all have the advantage 1."""
    return TrainingSample(ledger=ledger, advantages=tuple(float(sampled) for sampled in ledger.loss_mask()))


def build_functions(folder: Path, threads: int, scale: int) -> dict[str, Callable[[int], Callable[[], Any]]]:
    """Return, for each curve, what builds the measured function of a size."""
    make_tiny_model(str(folder / "model"))
    generate_dataset(folder / "synthetic", SyntheticConfig(train=4, validation=1, test=1), seed=0)
    vlm = VisionLanguageModel(ModelConfig(path=str(folder / "model"), num_threads=threads))
    optimizer = Optimizer(vlm.model, OptimizerConfig(lr=1e-6), num_steps=10**6)

    def train(samples: Sequence[TrainingSample], *, pack_length: int = 10**6) -> Callable[[], Any]:
        positions, media = vlm.renderer.compute_position_ids, NoiseMediaLoader()
        batches = pack(samples, compute_positions=positions, pack_length=pack_length, micro_batch_size=1)
        return lambda: train_step(vlm, optimizer, batches, loss, load_all_pixels=media.load_all_pixels)

    def roll_out(episodes: int) -> Callable[[], Any]:
        components, tasks = load_components(folder, f"rl.prompts_per_step={episodes // 8}")
        return step(components, tasks, 0.05, 1.0)

    def decode(seconds: int) -> Callable[[], Any]:
        path = folder / f"{seconds}.mp4"
        make_clip(path, 20, seconds // 20, "pyramid", size=(320, 180))
        times = sample_uniform_times(float(seconds - seconds % 20), 64)
        return lambda: load(build_loader(threads), str(path), times)

    return {
        "group": lambda size: train(group(vlm, 55 // scale, size, 60)),
        "prompt": lambda size: train(group(vlm, size, 8, 60)),
        "turns": lambda size: train(build_turns(vlm, size)),
        "crops": lambda size: train(build_crops(vlm, size), pack_length=1024),
        "episodes": roll_out,
        "video": decode,
    }


def fit_exponent(sizes: Sequence[float], seconds: Sequence[float]) -> float:
    """Return the slope of the least-squares line through the logarithms."""
    return float(np.polyfit(np.log(sizes), np.log(seconds), 1)[0])


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure each curve, its sizes in turn."""
    options = parser(__doc__)
    options.add_argument("--curves", nargs="+", choices=CURVES, default=[*CURVES])
    options.add_argument("--scale", type=int, default=1, help="divides the sizes")
    chosen = options.parse_args(arguments)
    torch.set_num_threads(chosen.threads)
    rows = []
    with tempfile.TemporaryDirectory() as name:
        functions = build_functions(Path(name), chosen.threads, chosen.scale)
        for curve in chosen.curves:
            unit, largest, reason = CURVES[curve]
            sizes = [size // chosen.scale for size in largest]
            sides = {str(size): functions[curve](size) for size in sizes}
            medians = [median(cpu for _, cpu in values) for values in alternate(sides, chosen.rounds).values()]
            half = len(sizes) // 2
            rows.append(
                {
                    "curve": curve,
                    "grows": unit,
                    "sizes": ", ".join(map(str, sizes)),
                    "CPU s": ", ".join(f"{value:.3g}" for value in medians),
                    "exponent": fit_exponent(sizes, medians),
                    "of the larger half": fit_exponent(sizes[half:], medians[half:]),
                    "why": reason,
                    "rounds": chosen.rounds,
                }
            )
    show("Cost by size", rows, describe_machine(), chosen.out)


if __name__ == "__main__":
    main()
