"""Parts of `gpu_step.py`: a model of any size with random weights, and fake media, renderer, engine and reward."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from saccade.chat.renderer import ChatRenderer
from saccade.engines.local import Local
from saccade.ledger import ImageRef
from saccade.media.image import fit_size
from saccade.protocols import PixelBudget, VideoInfo
from saccade.rewards.compose import score_each
from saccade.types import (
    Block,
    BlockKind,
    Call,
    CallFormat,
    Completion,
    Episode,
    FinishReason,
    GenerationRequest,
    Reply,
    Score,
)
from saccade.utils.hashing import derive_seed


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The model's shape and the step's; the defaults are Qwen3-VL-8B's and ParaVT's."""

    layers: int = 36
    hidden: int = 4096
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    intermediate: int = 12288
    vocabulary: int = 151936
    vision_depth: int = 27
    vision_hidden: int = 1152
    vision_heads: int = 16
    vision_intermediate: int = 4304
    patch: int = 16
    vision_positions: int = 2304
    frames: int = 64
    pixels: int = 50176
    group: int = 8
    crops: int = 2
    crop_frames: int = 16
    new_tokens: int = 512
    pack_length: int = 16384

    @property
    def deepstack(self) -> list[int]:
        """Return which vision layers feed the first text layers: [8, 16, 24] of 27."""
        step = max(1, self.vision_depth * 8 // 27)
        return [step, 2 * step, 3 * step]


SCALES = {
    "qwen3-vl-8b": Sizes(),
    "qwen3-vl-4b": Sizes(
        hidden=2560,
        intermediate=9728,
        vision_depth=24,
        vision_hidden=1024,
        vision_intermediate=4096,
    ),
    "tiny": Sizes(
        layers=2,
        hidden=64,
        heads=2,
        kv_heads=1,
        head_dim=32,
        intermediate=128,
        vocabulary=2048,
        vision_depth=5,
        vision_hidden=32,
        vision_heads=2,
        vision_intermediate=64,
        vision_positions=64,
        frames=4,
        pixels=2048,
        group=3,
        crops=2,
        crop_frames=2,
        new_tokens=12,
        pack_length=512,
    ),
}


# ---- the model -----------------------------------------------------------------------------------------------------


def make_model(sizes: Sizes, folder: str, device: str, dtype: torch.dtype) -> Qwen3VLForConditionalGeneration:
    """Create random weights on the device; the folder provides tokenizer and image processor."""
    half = sizes.head_dim // 2
    side = half * 20 // 64
    rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_interleaved": True}
    given = Qwen3VLConfig.from_pretrained(folder)
    config = Qwen3VLConfig(
        text_config={
            "vocab_size": sizes.vocabulary,
            "hidden_size": sizes.hidden,
            "intermediate_size": sizes.intermediate,
            "num_hidden_layers": sizes.layers,
            "num_attention_heads": sizes.heads,
            "num_key_value_heads": sizes.kv_heads,
            "head_dim": sizes.head_dim,
            "max_position_embeddings": 262144,
            "rope_parameters": {**rope, "mrope_section": [half - 2 * side, side, side]},
            "pad_token_id": None,
        },
        vision_config={
            "depth": sizes.vision_depth,
            "hidden_size": sizes.vision_hidden,
            "intermediate_size": sizes.vision_intermediate,
            "num_heads": sizes.vision_heads,
            "patch_size": sizes.patch,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "out_hidden_size": sizes.hidden,
            "num_position_embeddings": sizes.vision_positions,
            "deepstack_visual_indexes": sizes.deepstack,
        },
        tie_word_embeddings=False,
        **{name: value for name, value in given.to_dict().items() if name.endswith("_token_id")},
    )
    with torch.device(device), torch.random.fork_rng():
        torch.manual_seed(0)
        return Qwen3VLForConditionalGeneration._from_config(config, dtype=dtype)


# ---- fake components -------------------------------------------------------------------------------------------------


class NoiseMediaLoader:
    """A fake five-minute clip of 640x360: pixels are noise, so that no decoder is measured."""

    pairs_frames = False

    async def probe(self, path: str) -> VideoInfo:
        """Describe the clip."""
        return VideoInfo(path=path, digest=path, duration=300.0, num_frames=9000, width=640, height=360)

    async def load_frames(
        self, path: str, times: Sequence[float], *, factor: int, budget: PixelBudget
    ) -> list[ImageRef]:
        """Return one image per time."""
        width, height = fit_size(640, 360, factor, budget)
        return [ImageRef(path=path, digest=path, time=round(time, 3), width=width, height=height) for time in times]

    def load_pixels(self, image: ImageRef) -> np.ndarray:
        """Return noise, uint8 RGB."""
        rng = np.random.default_rng(derive_seed(image.key))
        return rng.integers(0, 256, (image.height, image.width, 3), dtype=np.uint8)

    def load_all_pixels(self, images: Collection[ImageRef]) -> Mapping[str, np.ndarray]:
        """Return the noise of each image by its key."""
        return {image.key: self.load_pixels(image) for image in images}


class CallingRenderer(ChatRenderer):
    """A renderer that parses every reply of the main agent as calls, and of a sub-agent as a sentence."""

    def __init__(self, given: ChatRenderer, sizes: Sizes) -> None:
        vars(self).update(vars(given))
        self._crops, self._seconds = sizes.crops, sizes.crop_frames

    def parse(self, tokens: Sequence[int], *, prefill: Sequence[int] = ()) -> Reply:
        """Derive the calls' arguments from the tokens, so that episodes differ like real ones."""
        if not prefill:
            return Reply(text="A red disc appears, then a blue square crosses it from the left. " * 6)
        rng = np.random.default_rng(derive_seed(list(tokens)))
        starts = rng.uniform(0, 300 - self._seconds, self._crops).round(1).tolist()
        calls = [
            Call(
                name="crop_video",
                arguments={"start_time": start, "end_time": start + self._seconds, "question": "What is shown?"},
                call_format=CallFormat.NATIVE,
            )
            for start in starts
        ]
        return Reply(
            text="", blocks=tuple(Block(kind=BlockKind.CALL, body="", is_closed=True, call=call) for call in calls)
        )


class FullLengthEngine(Local):
    """The local engine, with replies that never stop before their last token."""

    async def generate(self, request: GenerationRequest) -> Completion:
        """Sample all of `max_tokens`."""
        completion = await super().generate(
            GenerationRequest(request.ledger, dataclasses.replace(request.sampling, stop_ids=()))
        )
        return dataclasses.replace(completion, finish_reason=FinishReason.STOP)


@score_each
def score(episode: Episode) -> Score:
    """Return a value derived from the sampled tokens."""
    return Score(value=derive_seed(list(episode.ledger.sampled_tokens())) / 2**63)
