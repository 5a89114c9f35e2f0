"""One step of RL on one device: a model of Qwen3-VL's shape with random weights, at the published settings.

    python benchmarks/gpu_step.py --device cuda
    python benchmarks/gpu_step.py --scale tiny --device cpu --dtype float32 --peak-tflops 1     a dry run

The weights are made on the device. A prompt of 64 frames is attempted 8 times: a reply of 512 tokens, crops that
sub-agents answer at the same time (16 frames and 512 tokens each), another reply; agent, tool, engine, packing, loss
and optimizer are those of a training run. Two things are fake, since random weights sample random tokens: every reply
runs to its last token, and is then parsed as calls. All weights are trained with AdamW where they fit, else adapters
(LoRA) of rank 64.

Model FLOPs utilization (training) = model FLOPs / (seconds * peak), with

    model FLOPs = text: W * tokens * 2 * linear weights of the layers  +  3 * 4 * layers * heads * head_dim * pairs
                + head: W * trained tokens * 2 * hidden * vocabulary
                + vision: V * (patches * 2 * linear weights of the blocks + 4 * depth * hidden * pairs of patches
                               + visual tokens * 2 * linear weights of the mergers)

where a pair is a token and one that it sees; W = 3 for weights that are trained (forward, and backward to inputs and
weights), 2 for frozen ones (forward, backward to inputs); V = 3, or 1 where the vision tower is frozen; adapters count
as trained weights. Shared prefixes count once, since they are computed once; what activation checkpointing computes
again doesn't count (PaLM, arXiv 2204.02311, appendix B). The peak is the device's dense bfloat16 peak, by its name in
of saccade.training.peak_flops; for another device, or another dtype, give --peak-tflops.
"""

import argparse
import asyncio
import dataclasses
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from _common import describe_machine, parser, peak_gib, show
from _fake_components import SCALES, CallingRenderer, FullLengthEngine, NoiseMediaLoader, Sizes, make_model, score
from torch import nn

from saccade.algorithms.group_advantages import compute_group_advantages
from saccade.config.load import load_recipe
from saccade.config.schema import Recipe
from saccade.environments.task_environments import TaskEnvironments
from saccade.models.attention import find_attention_spans
from saccade.models.tiny import make_tiny_model
from saccade.models.vlm import VisionLanguageModel
from saccade.rollouts.components import TrainingComponents
from saccade.training.optimizer import Optimizer
from saccade.training.packing import MicroBatch, pack
from saccade.training.peak_flops import find_peak_flops
from saccade.training.policy_update import update_policy
from saccade.training.rollout_batch import collect_groups
from saccade.training.train_step import StepReport
from saccade.training.training_samples import build_samples
from saccade.types import AnswerType, Group, Media, MediaKind, Task, TrainingSample

# ---- the step ------------------------------------------------------------------------------------------------------


def make_recipe(options: argparse.Namespace, sizes: Sizes, folder: str) -> Recipe:
    """The published recipe at the benchmark's shape."""
    agent = {
        "max_tool_turns": 1,
        "num_frames": sizes.frames,
        "frame_pixels": [784, sizes.pixels],
        "tools.crop_video.frame_range": [1, sizes.crop_frames],
        "tools.crop_video.frame_pixels": [784, sizes.pixels],
    }
    changes = {
        "engine.name": "local",
        "model.path": folder,
        "model.device": options.device,
        "model.dtype": options.dtype,
        "model.attention": options.attention,
        "model.num_threads": options.threads,
        "model.lora_rank": 0 if options.lora_rank is None else options.lora_rank,
        "sampling.max_tokens": sizes.new_tokens,
        "frame_budgets": [],
        "rl.max_staleness": 0,
        "rl.prompts_per_step": 1,
        "rl.group_size": sizes.group,
        "rl.pack_length": sizes.pack_length,
        **{f"environment.settings.{name}": value for name, value in agent.items()},
    }
    return load_recipe("paravt/para_grpo", [f"{key}={value}" for key, value in changes.items()])


def make_components(options: argparse.Namespace, sizes: Sizes, folder: str) -> TrainingComponents:
    """Build the components of a training run with random weights, a fake clip and the fake components."""
    torch.set_num_threads(options.threads)
    make_tiny_model(folder, patch_size=sizes.patch, num_layers=1)
    model = make_model(sizes, folder, options.device, getattr(torch, options.dtype))
    if options.lora_rank is None:
        options.lora_rank = 0 if fits(model, options.device) else 64
    recipe = make_recipe(options, sizes, folder)
    vlm = VisionLanguageModel(recipe.model, model)
    vlm.renderer = CallingRenderer(vlm.renderer, sizes)
    media = NoiseMediaLoader()
    environments = TaskEnvironments.from_recipe(recipe)
    engine = FullLengthEngine(
        vlm, media, prefix_cache_tokens=options.prefix_cache_tokens, kv_cache_tokens=options.kv_cache_tokens
    )
    acting = {"media": media, "engine": engine, "environments": environments, "score_fn": score}
    return TrainingComponents(recipe=recipe, renderer=vlm.renderer, vlm=vlm, **acting)


def fits(model: nn.Module, device: str) -> bool:
    """Return whether all weights fit: they, gradients, float32 copies of both, two moments; and 24 GiB to work."""
    if not device.startswith("cuda"):
        return True
    size = next(model.parameters()).element_size()
    each = 16 if size == 4 else size + 4 + 4 + 8
    needed = each * sum(parameter.numel() for parameter in model.parameters()) + 24 * 2**30
    return needed <= torch.cuda.get_device_properties(device).total_memory


class Phases:
    """Seconds and peak memory by phase."""

    def __init__(self, device: str) -> None:
        self._device = device
        self.seconds: dict[str, float] = {}
        self.peak_gib: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure what runs inside."""
        self._settle()
        begun = time.perf_counter()
        yield
        if self._device.startswith("cuda"):
            torch.cuda.synchronize(self._device)
        self.seconds[name] = time.perf_counter() - begun
        self.peak_gib[name] = peak_gib(self._device)
        print(f"{name}: {self.seconds[name]:.1f} s, {self.peak_gib[name]:.1f} GiB", file=sys.stderr, flush=True)

    def _settle(self) -> None:
        if self._device.startswith("cuda"):
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)


async def one_step(
    components: TrainingComponents, optimizer: Optimizer, number: int, phases: Phases
) -> tuple[list[TrainingSample], StepReport]:
    """Roll out, train, sync the weights: the body of `saccade.training.rl.train`."""
    settings = components.recipe.rl
    task = Task(
        id="clip",
        question="When does the red disc appear for the second time?",
        media=(Media(path="noise", kind=MediaKind.VIDEO),),
        answer_type=AnswerType.OPEN,
        ground_truth="",
    )
    with phases.phase("rollout"):
        groups = await collect_groups(components, [task], [number], number)
    check(groups, components)
    with phases.phase("train"):
        samples = build_samples(
            groups, compute_group_advantages(groups, settings.advantage), settings.advantage.sub_agent_advantage
        )
        report = update_policy(components, samples, settings, optimizer)
    with phases.phase("weight_sync"):
        await components.engine.sync_weights(components.vlm, number + 1)
    return samples, report


def check(groups: Sequence[Group], components: TrainingComponents) -> None:
    """Exit unless every episode has the shape that the results assume."""
    for member in groups[0].scored_episodes:
        episode = member.episode
        calls = sum(len(turn.results) for turn in episode.turns)
        if len(episode.turns) != 2 or len(episode.children) != calls:
            raise SystemExit(f"an episode failed ({episode.status.value}): {episode.error or episode.results}")


# ---- the figures ---------------------------------------------------------------------------------------------------


def linear_weights(*modules: nn.Module) -> tuple[int, int]:
    """Weights of linear layers: of the model's own, and of adapters."""
    own = adapters = 0
    for module in modules:
        for name, part in module.named_modules():
            size = part.weight.numel() if isinstance(part, nn.Linear) else 0
            if ".lora_" in name:
                adapters += size
            else:
                own += size
    return own, adapters


def model_flops(vlm: VisionLanguageModel, batches: Sequence[MicroBatch]) -> float:
    """Model FLOPs of one training step; see the top of the file."""
    text, visual = vlm.language_model.config, vlm.model.model.visual
    weights, adapters = linear_weights(vlm.language_model.layers)
    frozen = vlm.settings.lora_rank > 0
    W, V = (2, 1) if frozen else (3, 3)
    blocks, _ = linear_weights(visual.blocks)
    mergers, _ = linear_weights(visual.merger, visual.deepstack_merger_list)
    total = 0.0
    for batch in batches:
        spans = find_attention_spans(batch.tree_BT, batch.branch_BT)
        pairs = sum(span.num_pairs for span in spans)
        total += sum(span.length for span in spans) * 2 * (W * weights + 3 * adapters)
        total += 3 * 4 * text.num_hidden_layers * text.num_attention_heads * vlm.kv_cache_shape[2] * pairs
        total += W * len(batch.token_N) * 2 * text.hidden_size * text.vocab_size
        for picture in {picture.key: picture for picture in batch.images}.values():
            tokens = vlm.renderer.count_visual_tokens(picture)
            patches = tokens * visual.spatial_merge_size**2
            attention = 4 * visual.config.depth * visual.config.hidden_size * patches**2
            total += V * (patches * 2 * blocks + attention + tokens * 2 * mergers)
    return total


def peak_tflops(options: argparse.Namespace) -> float:
    """The device's peak: as given, or by its name. Exits where neither is known."""
    if options.peak_tflops is not None:
        return options.peak_tflops
    name = describe_machine(options.device)["device"]
    peak = find_peak_flops(name) if options.dtype == "bfloat16" else None
    if peak is None:
        raise SystemExit(f"the {options.dtype} peak of {name!r} isn't known; give it with --peak-tflops")
    return peak / 1e12


def measure(options: argparse.Namespace, sizes: Sizes, folder: str) -> dict[str, Any]:
    """Warm up with short replies, then measure one whole step."""
    peak = peak_tflops(options)
    phases = Phases(options.device)
    with phases.phase("load"):
        components = make_components(options, sizes, folder)
        optimizer = Optimizer(components.vlm.model, components.recipe.rl.optim, num_steps=2)
    short = components.recipe.model_copy(
        update={"sampling": components.recipe.sampling.model_copy(update={"max_tokens": 8})}
    )
    asyncio.run(one_step(dataclasses.replace(components, recipe=short), optimizer, 0, Phases(options.device)))
    before = dataclasses.replace(components.engine.stats)
    samples, report = asyncio.run(one_step(components, optimizer, 1, phases))
    work = components.engine.stats
    settings = components.recipe.rl
    positions = components.vlm.renderer.compute_position_ids
    batches = pack(
        samples,
        compute_positions=positions,
        pack_length=settings.pack_length,
        micro_batch_size=settings.micro_batch_size,
    )
    flops = model_flops(components.vlm, batches)
    parameters = sum(parameter.numel() for parameter in components.vlm.model.parameters())
    return {
        "parameters (billions)": parameters / 1e9,
        "trained": f"adapters of rank {options.lora_rank}" if options.lora_rank else "all weights",
        "dtype": options.dtype,
        "attention": options.attention,
        "conversations": len(samples),
        "longest conversation": max(len(sample.ledger) for sample in samples),
        "decode tokens/s": (work.decode_tokens - before.decode_tokens) / (work.decode_seconds - before.decode_seconds),
        "prefill tokens/s": (work.prefill_tokens - before.prefill_tokens)
        / (work.prefill_seconds - before.prefill_seconds),
        "sampled tokens": sum(len(sample.ledger.sampled_tokens()) for sample in samples),
        "prefilled tokens": work.prefill_tokens - before.prefill_tokens,
        "packed tokens": report.packed_tokens,
        "training tokens/s": report.packed_tokens / phases.seconds["train"],
        "training TFLOP": flops / 1e12,
        "peak TFLOPS": peak,
        "model FLOPs utilization": flops / phases.seconds["train"] / (peak * 1e12),
        "engine-trainer logprob difference, mean": report.stats["engine_trainer_logprob_diff_mean"],
        "engine-trainer logprob difference, max": report.stats["engine_trainer_logprob_diff_max"],
        **{f"{name} seconds": value for name, value in phases.seconds.items()},
        **{f"{name} peak GiB": value for name, value in phases.peak_gib.items()},
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and show."""
    options = parser(__doc__)
    options.add_argument("--scale", choices=sorted(SCALES), default="qwen3-vl-8b")
    options.add_argument("--device", default="cuda")
    options.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    options.add_argument("--attention", choices=["branchwise", "varlen"], default="branchwise", help="in training")
    options.add_argument("--lora-rank", type=int, help="0 trains all weights; without it, what fits decides")
    options.add_argument("--peak-tflops", type=float, help="the device's dense peak for this dtype")
    options.add_argument("--prefix-cache-tokens", type=int, default=65536, help="of the prefix cache")
    options.add_argument("--kv-cache-tokens", type=int, default=131072, help="of the KV cache of running requests")
    for size in dataclasses.fields(Sizes):
        options.add_argument(f"--{size.name.replace('_', '-')}", type=int)
    chosen = options.parse_args(arguments)
    given = {size.name: getattr(chosen, size.name) for size in dataclasses.fields(Sizes)}
    sizes = dataclasses.replace(SCALES[chosen.scale], **{k: v for k, v in given.items() if v is not None})
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(chosen, sizes, folder)
    rows = [{"figure": name, "value": value} for name, value in figures.items()]
    show(f"One step of RL, {chosen.scale}", rows, describe_machine(chosen.device), chosen.out)


if __name__ == "__main__":
    main()
