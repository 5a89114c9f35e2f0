"""Tokens per second of the local engine compared with transformers' own `generate`, with the same weights and prompts.

    python benchmarks/local_engine.py

A tiny model answers distinct prompts of 8 frames, so that rows share no prefix; with `--group-size 8` each prompt is
sampled 8 times, as in training, and the engine prefills it once. All prompts have one length, so that `generate` needs
no padding. Both sample at temperature 1 from the same distribution and return what a trainer needs: the engine one
logprob per token, `generate` its logits. Image preprocessing is not measured.
"""

import asyncio
import tempfile
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from _common import alternate, build_comparison_row, describe_machine, parser, show
from transformers import AutoModelForImageTextToText, GenerationConfig, PreTrainedModel

from saccade.config.schema import ModelConfig
from saccade.engines.local import Local
from saccade.ledger import ImageRef, Ledger
from saccade.models.backbone import Backbone
from saccade.models.tiny import make_tiny_model
from saccade.types import GenerationRequest, Message, SamplingParams


class NoiseMediaLoader:
    """Noise seeded by the image's digest."""

    def load_pixels(self, image: ImageRef) -> np.ndarray:
        """Return noise, uint8 RGB."""
        rng = np.random.default_rng(int(image.digest))
        return rng.integers(0, 256, (image.height, image.width, 3), dtype=np.uint8)

    def load_all_pixels(self, images: Collection[ImageRef]) -> Mapping[str, np.ndarray]:
        """Return the noise of each image by its key."""
        return {image.key: self.load_pixels(image) for image in images}


def prompts(backbone: Backbone, count: int, frames: int) -> list[Ledger]:
    """Build prompts of one length with different images."""
    side, ledgers = backbone.renderer.factor, []
    for number in range(count):
        images = [
            ImageRef(path="noise", digest=str(1000 * number + n), time=float(n), width=side, height=side)
            for n in range(frames)
        ]
        parts = [part for n, image in enumerate(images) for part in (f"<{n}.5 seconds>", image)]
        message = Message(role="user", parts=(*parts, f"What is shown at second {number:03d}?"))
        segment = backbone.renderer.render(Ledger(), [message])
        ledgers.append(Ledger().observe(segment.tokens, slots=segment.slots))
    return ledgers


def run_saccade(backbone: Backbone, ledgers: Sequence[Ledger], new_tokens: int) -> int:
    """Sample a continuation of every ledger with the local engine; return the number of sampled tokens."""

    async def main() -> int:
        engine = Local(backbone, NoiseMediaLoader())
        draws = [SamplingParams(max_tokens=new_tokens, seed=seed) for seed in range(len(ledgers))]
        pairs = zip(ledgers, draws, strict=True)
        completions = await asyncio.gather(
            *(engine.generate(GenerationRequest(ledger, draw)) for ledger, draw in pairs)
        )
        await engine.close()
        return sum(len(completion.tokens) for completion in completions)

    return asyncio.run(main())


def inputs(backbone: Backbone, ledgers: Sequence[Ledger]) -> dict[str, Any]:
    """Return the inputs of `generate` for the ledgers."""
    ids = torch.tensor([ledger.input_ids() for ledger in ledgers])
    images = [NoiseMediaLoader().load_pixels(image) for ledger in ledgers for image in ledger.images()]
    values, grids = backbone.renderer.patchify(images)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": (ids == backbone.image_token_id).int(),
        "pixel_values": torch.from_numpy(values),
        "image_grid_thw": torch.from_numpy(grids),
    }


def run_transformers(model: PreTrainedModel, given: dict[str, Any], new_tokens: int) -> int:
    """Sample with transformers' `generate`; return the number of sampled tokens."""
    settings = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=new_tokens,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    with torch.inference_mode():
        out = model.generate(**given, generation_config=settings)
    return (out.sequences.shape[1] - given["input_ids"].shape[1]) * len(out.sequences)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure each number of rows in turn."""
    options = parser(__doc__)
    options.add_argument("--rows", type=int, nargs="+", default=[8, 64, 192])
    options.add_argument("--group-size", type=int, default=1, help="samples per prompt")
    options.add_argument("--new-tokens", type=int, default=96)
    options.add_argument("--frames", type=int, default=8)
    chosen = options.parse_args(arguments)
    torch.set_num_threads(chosen.threads)
    with tempfile.TemporaryDirectory() as folder:
        make_tiny_model(folder)
        backbone = Backbone(ModelConfig(path=folder))
        model = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="sdpa").eval()
        model.generation_config = GenerationConfig(pad_token_id=0)
    rows = []
    for count in chosen.rows:
        distinct = prompts(backbone, max(1, count // chosen.group_size), chosen.frames)
        ledgers = [ledger for ledger in distinct for _ in range(chosen.group_size)][:count]
        given, tokens = inputs(backbone, ledgers), count * chosen.new_tokens
        first = ledgers[:1]
        sampled = (
            run_saccade(backbone, first, chosen.new_tokens),
            run_transformers(model, inputs(backbone, first), chosen.new_tokens),
        )
        assert sampled == (chosen.new_tokens, chosen.new_tokens), sampled
        sides = {
            "saccade": lambda ledgers=ledgers: run_saccade(backbone, ledgers, chosen.new_tokens),
            "generate": lambda given=given: run_transformers(model, given, chosen.new_tokens),
        }
        seconds = alternate(sides, chosen.rounds)
        rows.append(
            build_comparison_row(
                f"{count} rows of {len(ledgers[0])} + {chosen.new_tokens} tokens", seconds, tokens=tokens
            )
        )
    show("Sampling, tiny model", rows, describe_machine(), chosen.out)


if __name__ == "__main__":
    main()
