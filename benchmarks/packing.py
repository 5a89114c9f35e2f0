"""A training step with shared-prefix packing beside one padded row per sample: the same samples, loss and gradients.

    python benchmarks/packing.py

A group of 8 episodes of one prompt: frames with their times, a question, and a reply of about 95 tokens each. Forward,
backward and AdamW of a tiny model; the peak is the most that torch allocates at a time. Both sides encode each picture
once; a trainer that sends every row's own pictures through the vision tower is slower than what is shown here.

With --pairs the sides are the packed step with the frames in pairs (`media.frame_pairs`), and with the same frames as
single images.
"""

import tempfile
from argparse import Namespace
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from _common import alternate, build_comparison_row, describe_machine, measure_peak, parser, show
from local_engine import NoiseMediaLoader, prompts
from torch import Tensor

from saccade.config.schema import ModelConfig, OptimizerConfig
from saccade.models.tiny import make_tiny_model
from saccade.models.vlm import VisionLanguageModel
from saccade.training.optimizer import Optimizer
from saccade.training.packing import MicroBatch, PrefixTree, build_micro_batch, pack
from saccade.training.train_step import train_step
from saccade.types import TrainingSample


def group(
    vlm: VisionLanguageModel, frames: int, size: int, reply: int, *, frame_side: int = 1, in_pairs: bool = False
) -> list[TrainingSample]:
    """Attempts at one prompt, with replies of different lengths and advantages of both signs."""
    rng = np.random.default_rng(frames)
    [prompt] = prompts(vlm, 1, frames, frame_side=frame_side, in_pairs=in_pairs)
    samples = []
    for index in range(size):
        tokens = rng.integers(0, 250, reply + int(rng.integers(-8, 9))).tolist()
        ledger = prompt.append_completion(tokens, logprobs=[-5.0] * len(tokens), version=0)
        value = 1.0 if index % 2 else -1.0
        samples.append(
            TrainingSample(ledger=ledger, advantages=tuple(value * sampled for sampled in ledger.loss_mask()))
        )
    return samples


def padded(samples: Sequence[TrainingSample], vlm: VisionLanguageModel) -> list[MicroBatch]:
    """One row per sample, all as long as the longest."""
    rows = [
        [PrefixTree(prefix_length=0, sample_indices=(i,), num_tokens=len(sample.ledger))]
        for i, sample in enumerate(samples)
    ]
    return [build_micro_batch(samples, rows, vlm.renderer.compute_position_ids)]


def packed(samples: Sequence[TrainingSample], vlm: VisionLanguageModel) -> list[MicroBatch]:
    """The group as one tree."""
    return pack(samples, compute_positions=vlm.renderer.compute_position_ids, pack_length=10**6, micro_batch_size=8)


def loss(batch: MicroBatch, logp_N: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
    """The policy gradient's loss."""
    advantage_N = torch.from_numpy(batch.advantage_N).to(logp_N.device)
    return -(advantage_N * logp_N).mean(), {"tokens": torch.tensor(float(len(logp_N)))}


def compare_pairs(vlm: VisionLanguageModel, optimizer: Optimizer, frames: int, chosen: Namespace) -> dict[str, Any]:
    """Measure the packed step of the same frames in pairs and alone."""
    media, sides, counts = NoiseMediaLoader(), {}, {}
    for name, in_pairs in (("pairs", True), ("single", False)):
        samples = group(vlm, frames, chosen.group, chosen.reply, frame_side=chosen.frame_side, in_pairs=in_pairs)
        [batch] = packed(samples, vlm)
        counts[f"{name} visual tokens"] = sum(map(vlm.renderer.count_visual_tokens, batch.images))
        counts[f"{name} packed tokens"] = batch.ids_BT.size
        sides[name] = partial(train_step, vlm, optimizer, [batch], loss, load_all_pixels=media.load_all_pixels)
    seconds = alternate(sides, chosen.rounds)
    return build_comparison_row(f"{frames} frames, {chosen.group} replies", seconds) | counts


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure each length of the prefix in turn."""
    options = parser(__doc__)
    options.add_argument("--frames", type=int, nargs="+", default=[53, 110, 210], help="of the prompt")
    options.add_argument("--group", type=int, default=8)
    options.add_argument("--reply", type=int, default=95, help="tokens per episode, about")
    options.add_argument("--frame-side", type=int, default=1, help="of a frame, visual tokens")
    options.add_argument("--pairs", action="store_true", help="compare frames in pairs with frames alone")
    chosen = options.parse_args(arguments)
    torch.set_num_threads(chosen.threads)
    with tempfile.TemporaryDirectory() as folder:
        make_tiny_model(folder)
        vlm = VisionLanguageModel(ModelConfig(path=folder))
    optimizer = Optimizer(vlm.model, OptimizerConfig(lr=1e-6), num_steps=10**6)
    rows = []
    if chosen.pairs:
        rows = [compare_pairs(vlm, optimizer, frames, chosen) for frames in chosen.frames]
        show("Training step with frames in pairs, tiny model", rows, describe_machine(), chosen.out)
        return
    for frames in chosen.frames:
        samples = group(vlm, frames, chosen.group, chosen.reply, frame_side=chosen.frame_side)

        sides = {
            make.__name__: lambda make=make, samples=samples: train_step(
                vlm,
                optimizer,
                make(samples, vlm),
                loss,
                load_all_pixels=NoiseMediaLoader().load_all_pixels,
            )
            for make in (packed, padded)
        }
        losses = [side().loss for side in sides.values()]
        assert abs(losses[0] - losses[1]) < 1e-2, losses
        peaks = {name: measure_peak(side, "cpu") for name, side in sides.items()}
        seconds = alternate(sides, chosen.rounds)
        [tree], [whole] = packed(samples, vlm), padded(samples, vlm)
        prefix = int((tree.branch_BT == 0).sum())
        row = build_comparison_row(f"prefix {prefix}, {chosen.group} replies", seconds)
        row |= {"tokens packed": tree.ids_BT.size, "tokens padded": whole.ids_BT.size}
        rows.append(row | {f"{name} peak MB": peak / 1e6 for name, peak in peaks.items()})
    show("Training step, tiny model", rows, describe_machine(), chosen.out)


if __name__ == "__main__":
    main()
