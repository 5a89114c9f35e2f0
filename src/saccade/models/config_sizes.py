"""Compute model sizes from a config: the parameters of transformers' own class, built on torch's meta device.

The meta device allocates no memory. `scripts/generate_sizes.py` writes what this module computes of published and tiny
models to `known_sizes.json`, so that planning them needs no torch.
"""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedConfig

from saccade.errors import ModelError, convert_errors
from saccade.models.model_sizes import ModelSizes
from saccade.models.tiny import build_tiny_config
from saccade.utils.files import require_regular_files

TINY_VOCAB_SIZE = 665  # of the tiny recipes' synthetic dataset; other datasets have other words


def read_sizes(folder: str) -> ModelSizes:
    """Return the sizes of a checkpoint folder. Raises ModelError if its config.json is missing or unsupported."""
    with convert_errors(ModelError, f"{folder} can't be read as a model"):
        require_regular_files(folder)
        return _compute_sizes(folder, AutoConfig.from_pretrained(folder, local_files_only=True))


def compute_tiny_sizes(family: str, hidden_size: int = 128, num_layers: int = 4) -> ModelSizes:
    """Return the sizes of a family's tiny model. Raises ModelError for an unknown family."""
    return _compute_sizes(f"tiny {family}", build_tiny_config(family, TINY_VOCAB_SIZE, hidden_size, num_layers))


def compute_published_sizes(name: str) -> ModelSizes:
    """Return the sizes of a model of `PUBLISHED_MODELS`."""
    family, text_sizes, vision, tied = PUBLISHED_MODELS[name]
    text = dict(zip(_TEXT_KEYS, text_sizes, strict=True))
    if family == "qwen3_vl":
        text["head_dim"] = 128
    shared = {"text_config": {**text, "tie_word_embeddings": tied}, "tie_word_embeddings": tied}
    config = AutoConfig.for_model(family, vision_config={**vision, "out_hidden_size": text["hidden_size"]}, **shared)
    return _compute_sizes(name, config)


def _compute_sizes(name: str, config: PreTrainedConfig) -> ModelSizes:
    auto_model: Any = AutoModelForImageTextToText
    with torch.device("meta"):
        model = auto_model.from_config(config)
    text: Any = config.get_text_config()
    vision: Any = config.vision_config
    attention: Any = model.model.language_model.layers[0].self_attn
    return ModelSizes(
        name=name,
        shapes={name: tuple(parameter.shape) for name, parameter in model.named_parameters()},
        num_layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        query_width=attention.head_dim * text.num_attention_heads,
        key_width=attention.head_dim * text.num_key_value_heads,
        intermediate_size=text.intermediate_size,
        vocab_size=text.vocab_size,
        vision_depth=vision.depth,
        vision_hidden_size=vision.hidden_size,
        vision_intermediate_size=vision.intermediate_size,
        spatial_merge_size=vision.spatial_merge_size,
        factor=vision.patch_size * vision.spatial_merge_size,
    )


_TEXT_KEYS = (
    *("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads"),
    *("intermediate_size", "vocab_size"),
)
_VISION_KEYS = ("depth", "hidden_size", "intermediate_size", "patch_size")


def _build_vision_config(*sizes: int, **extra: Any) -> dict[str, Any]:
    return {**dict(zip(_VISION_KEYS, sizes, strict=True)), "num_heads": 16, **extra}


_POSITIONS = {"num_position_embeddings": 2304}
_LARGE_VISION = _build_vision_config(27, 1152, 4304, 16, deepstack_visual_indexes=[8, 16, 24], **_POSITIONS)
_SMALL_VISION = _build_vision_config(24, 1024, 4096, 16, deepstack_visual_indexes=[5, 11, 17], **_POSITIONS)
_WINDOWED_VISION = _build_vision_config(32, 1280, 3420, 14)

# By name: the family, the text model by `_TEXT_KEYS`, the vision tower, whether input and output embeddings are tied.
PUBLISHED_MODELS: Mapping[str, tuple[str, tuple[int, ...], dict[str, Any], bool]] = {
    "Qwen3-VL-2B-Instruct": ("qwen3_vl", (28, 2048, 16, 8, 6144, 151936), _SMALL_VISION, True),
    "Qwen3-VL-4B-Instruct": ("qwen3_vl", (36, 2560, 32, 8, 9728, 151936), _SMALL_VISION, True),
    "Qwen3-VL-8B-Instruct": ("qwen3_vl", (36, 4096, 32, 8, 12288, 151936), _LARGE_VISION, False),
    "Qwen3-VL-32B-Instruct": ("qwen3_vl", (64, 5120, 64, 8, 25600, 151936), _LARGE_VISION, False),
    "Qwen2.5-VL-3B-Instruct": ("qwen2_5_vl", (36, 2048, 16, 2, 11008, 151936), _WINDOWED_VISION, True),
    "Qwen2.5-VL-7B-Instruct": ("qwen2_5_vl", (28, 3584, 28, 4, 18944, 152064), _WINDOWED_VISION, False),
}
