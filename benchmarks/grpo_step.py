"""A whole step of GRPO (generation and training) of a tiny model with pictures, beside TRL's GRPOTrainer.

    python benchmarks/grpo_step.py --threads 1

Saccade samples with the local engine and trains with the packed update of a run. TRL runs in .venv-trl, which
`scripts/bootstrap --trl` makes from pinned packages, and generates with transformers (its other engine is vLLM).
Both start from the same weights, and take turns step by step. A group of 8 replies to one prompt of pictures, times and
a question, whose token ids are compared; every reply has 100 tokens. One update per step, clipped ratios, no KL
penalty, no gradient checkpointing, AdamW, float32. A step includes rendering, preprocessing of pictures, and dropping
what the caches hold of older weights; reading rows and pictures from files isn't counted.
"""

import asyncio
import json
import statistics
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _common import (
    BaselineProcess,
    alternate_sides,
    build_comparison_row,
    describe_machine,
    measure,
    parser,
    show,
)
from PIL import Image

from saccade.config.load import load_recipe
from saccade.engines.local import Local
from saccade.environments.task_environments import TaskEnvironments
from saccade.ledger import ImageRef, Ledger
from saccade.models.tiny import make_tiny_model
from saccade.models.vlm import VisionLanguageModel
from saccade.rollouts.components import TrainingComponents, compose_task_rewards
from saccade.training.optimizer import Optimizer
from saccade.training.policy_update import update_policy
from saccade.types import GenerationRequest, Message, SamplingParams, TrainingSample

PICTURE = (160, 96)  # width, height; 60 visual tokens
QUESTION = "What is shown in the last picture, and in which of the others did it appear first, and when?"


class PictureLoader:
    """Pictures of noise, in memory."""

    def __init__(self, count: int) -> None:
        rng = np.random.default_rng(count)
        width, height = PICTURE
        refs = [ImageRef(path="noise", digest=str(n), time=float(n), width=width, height=height) for n in range(count)]
        self.pixels = {ref: rng.integers(0, 256, (height, width, 3), dtype=np.uint8) for ref in refs}

    def load_pixels(self, image: ImageRef) -> np.ndarray:
        """Return the picture, uint8 RGB."""
        return self.pixels[image]

    def load_all_pixels(self, images: Collection[ImageRef]) -> Mapping[str, np.ndarray]:
        """Return the pictures by their keys."""
        return {image.key: self.pixels[image] for image in images}

    def build_parts(self) -> list[str | ImageRef]:
        """Return the parts of the prompt: each picture after its time, then the question."""
        return [part for ref in self.pixels for part in (f"<{ref.time:.1f} seconds>", ref)] + [QUESTION]


class SaccadeSteps:
    """Steps of Saccade's engine and trainer on one prompt."""

    def __init__(self, folder: str, loader: PictureLoader, threads: int, group: int, new_tokens: int) -> None:
        settings = {
            "model.path": folder,
            "model.num_threads": threads,
            "rl.pack_length": 8192,
            "rl.micro_batch_size": group,
            "rl.optim.lr": 1e-6,
            "rl.optim.warmup_steps": 0,
            "rl.optim.schedule": "constant",
        }
        recipe = load_recipe("tiny/base", [f"{key}={value}" for key, value in settings.items()])
        torch.set_num_threads(threads)
        vlm = VisionLanguageModel(recipe.model)
        self._components = TrainingComponents(
            recipe=recipe,
            renderer=vlm.renderer,
            vlm=vlm,
            media=loader,
            engine=Local(vlm, loader),
            environments=TaskEnvironments.from_recipe(recipe),
            score_fn=compose_task_rewards(recipe),
        )
        self._optimizer = Optimizer(vlm.model, recipe.rl.optim, num_steps=10**6)
        self._loader, self._group, self._new_tokens = loader, group, new_tokens
        self._samples: list[TrainingSample] = []

    def render(self) -> Ledger:
        """Return the prompt."""
        message = Message(role="user", parts=tuple(self._loader.build_parts()))
        segment = self._components.renderer.render(Ledger(), [message])
        return Ledger().observe(segment.tokens, slots=segment.slots)

    def generate(self) -> None:
        """Sample the group, and give its replies advantages of 1 and -1 in turns."""
        self._samples = asyncio.run(self._sample_group())

    async def _sample_group(self) -> list[TrainingSample]:
        prompt, engine = self.render(), self._components.engine
        forbidden_ids = self._components.renderer.forbidden_ids
        params = [
            SamplingParams(
                max_tokens=self._new_tokens, seed=self._group * engine.version + n, forbidden_ids=forbidden_ids
            )
            for n in range(self._group)
        ]
        completions = await asyncio.gather(*(engine.generate(GenerationRequest(prompt, each)) for each in params))
        samples = []
        for index, completion in enumerate(completions):
            assert len(completion.tokens) == self._new_tokens
            ledger = prompt.append_completion(
                completion.tokens, logprobs=completion.logprobs, version=completion.version
            )
            value = 1.0 if index % 2 else -1.0
            samples.append(TrainingSample(ledger=ledger, advantages=tuple(value * flag for flag in ledger.loss_mask())))
        return samples

    def train(self) -> None:
        """Update the policy, and drop what the engine holds of the old weights."""
        components = self._components
        update_policy(components, self._samples, components.recipe.rl, self._optimizer)
        asyncio.run(components.engine.sync_weights(components.vlm, components.engine.version + 1))

    def step(self) -> dict[str, Any]:
        """Take one step and return its seconds."""
        return {"generation": measure(self.generate), "training": measure(self.train)}


def write_prompt(folder: Path, loader: PictureLoader) -> Path:
    """Write the prompt's parts and pictures for TRL."""
    parts = []
    for part in loader.build_parts():
        if isinstance(part, ImageRef):
            file = folder / f"{part.digest}.png"
            Image.fromarray(loader.load_pixels(part)).save(file)
            parts.append({"type": "image", "file": str(file)})
        else:
            parts.append({"type": "text", "text": part})
    path = folder / "prompt.json"
    path.write_text(json.dumps(parts))
    return path


def compare(count: int, rounds: int, threads: int, group: int, new_tokens: int) -> dict[str, Any]:
    """Return the row of one prompt."""
    with tempfile.TemporaryDirectory() as folder:
        make_tiny_model(folder)
        loader = PictureLoader(count)
        ours = SaccadeSteps(folder, loader, threads, group, new_tokens)
        sizes = {"threads": threads, "group": group, "new-tokens": new_tokens}
        arguments = [text for name, value in sizes.items() for text in (f"--{name}", str(value))]
        prompt_file = write_prompt(Path(folder), loader)
        trl = BaselineProcess("trl", "_trl_steps.py", "--model", folder, "--prompt", str(prompt_file), *arguments)
        steps = alternate_sides({"saccade": ours.step, "TRL": lambda: trl.request({})}, rounds)
        trl.close()
        prompt = list(ours.render().input_ids())
    for step in steps["TRL"]:
        assert step["prompt"] == prompt, "TRL has another prompt"
        assert step["completion_lengths"] == [new_tokens] * group, step["completion_lengths"]
    totals = {
        side: [tuple(map(sum, zip(step["generation"], step["training"], strict=True))) for step in values]
        for side, values in steps.items()
    }
    row = build_comparison_row(f"{len(prompt):,} tokens, {count} of {PICTURE[0]}x{PICTURE[1]}", totals)
    for phase in ("generation", "training"):
        for side, values in steps.items():
            row[f"{side} {phase} CPU s"] = statistics.median(step[phase][1] for step in values)
    return row


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure each prompt in turn."""
    options = parser(__doc__)
    options.add_argument("--pictures", type=int, nargs="+", default=[1, 5, 11, 18], help="of the prompt")
    options.add_argument("--group", type=int, default=8)
    options.add_argument("--new-tokens", type=int, default=100, help="of each reply")
    chosen = options.parse_args(arguments)
    sizes = (chosen.rounds, chosen.threads, chosen.group, chosen.new_tokens)
    rows = [compare(count, *sizes) for count in chosen.pictures]
    show(f"A step of GRPO, tiny model, {chosen.group} replies", rows, describe_machine(), chosen.out)


if __name__ == "__main__":
    main()
