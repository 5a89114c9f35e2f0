"""Tokens per second of the local engine beside transformers' own `generate`, with the same weights and prompts.

    python benchmarks/local_engine.py

A tiny model answers distinct prompts of 8 frames, so that nothing can be shared between rows; with `--attempts 8` each
prompt is attempted 8 times, as in training, and the engine reads it once. Prompts are of one length, so that `generate`
needs no padding. Both sample at temperature 1 from the same distribution and report what a trainer needs: the engine a
logprob per token, `generate` its logits. Preparing the pictures is left out for both.
"""

import asyncio
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from _common import alternate, compared, machine, parser, show
from transformers import AutoModelForImageTextToText, GenerationConfig, PreTrainedModel

from saccade.config import Model
from saccade.engines.local import local
from saccade.ledger import Ledger, Picture
from saccade.model.backbone import Backbone
from saccade.model.tiny import make_tiny
from saccade.types import Message, Sampling


class Noise:
    """Pixels drawn from a picture's number."""

    def pixels(self, picture: Picture) -> np.ndarray:
        """Noise, uint8 RGB."""
        rng = np.random.default_rng(int(picture.digest))
        return rng.integers(0, 256, (picture.height, picture.width, 3), dtype=np.uint8)


def prompts(backbone: Backbone, count: int, frames: int) -> list[Ledger]:
    """Prompts of one length and different pictures."""
    side, ledgers = backbone.renderer.factor, []
    for number in range(count):
        pictures = [
            Picture(path="noise", digest=str(1000 * number + n), time=float(n), width=side, height=side)
            for n in range(frames)
        ]
        parts = [part for n, picture in enumerate(pictures) for part in (f"<{n}.5 seconds>", picture)]
        message = Message(role="user", parts=(*parts, f"What is shown at second {number:03d}?"))
        segment = backbone.renderer.render(Ledger(), [message])
        ledgers.append(Ledger().observe(segment.tokens, slots=segment.slots))
    return ledgers


def ours(backbone: Backbone, ledgers: Sequence[Ledger], new_tokens: int) -> int:
    """Sample a continuation of every ledger with the local engine; returns how many tokens were sampled."""

    async def main() -> int:
        engine = local(backbone, Noise())
        draws = [Sampling(max_tokens=new_tokens, seed=seed) for seed in range(len(ledgers))]
        pairs = zip(ledgers, draws, strict=True)
        done = await asyncio.gather(*(engine.generate(ledger, draw) for ledger, draw in pairs))
        await engine.close()
        return sum(len(one.tokens) for one in done)

    return asyncio.run(main())


def inputs(backbone: Backbone, ledgers: Sequence[Ledger]) -> dict[str, Any]:
    """What `generate` takes for the ledgers."""
    ids = torch.tensor([ledger.expanded() for ledger in ledgers])
    pictures = [Noise().pixels(picture) for ledger in ledgers for picture in ledger.pictures()]
    values, grids = backbone.renderer.patches(pictures)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": (ids == backbone.image_token).int(),
        "pixel_values": torch.from_numpy(values),
        "image_grid_thw": torch.from_numpy(grids),
    }


def theirs(model: PreTrainedModel, given: dict[str, Any], new_tokens: int) -> int:
    """The same with transformers' `generate`."""
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
    options.add_argument("--attempts", type=int, default=1, help="at each prompt")
    options.add_argument("--new-tokens", type=int, default=96)
    options.add_argument("--frames", type=int, default=8)
    chosen = options.parse_args(arguments)
    torch.set_num_threads(chosen.threads)
    with tempfile.TemporaryDirectory() as folder:
        make_tiny(folder)
        backbone = Backbone(Model(path=folder))
        model = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="sdpa").eval()
        model.generation_config = GenerationConfig(pad_token_id=0)
    rows = []
    for count in chosen.rows:
        distinct = prompts(backbone, max(1, count // chosen.attempts), chosen.frames)
        ledgers = [ledger for ledger in distinct for _ in range(chosen.attempts)][:count]
        given, tokens = inputs(backbone, ledgers), count * chosen.new_tokens
        first = ledgers[:1]
        sampled = (ours(backbone, first, chosen.new_tokens), theirs(model, inputs(backbone, first), chosen.new_tokens))
        assert sampled == (chosen.new_tokens, chosen.new_tokens), sampled
        sides = {
            "saccade": lambda ledgers=ledgers: ours(backbone, ledgers, chosen.new_tokens),
            "generate": lambda given=given: theirs(model, given, chosen.new_tokens),
        }
        seconds = alternate(sides, chosen.rounds)
        rows.append(compared(f"{count} rows of {len(ledgers[0])} + {chosen.new_tokens} tokens", seconds, tokens=tokens))
    show("Sampling, tiny model", rows, machine(), chosen.out)


if __name__ == "__main__":
    main()
