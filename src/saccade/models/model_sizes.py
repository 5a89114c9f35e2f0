"""Model sizes without loading weights: parameters, KV cache, activations kept for the backward pass.

Sizes come from a folder's config.json, from the table of published models below, or from `build_tiny_config`. The
parameters are those of transformers' own class, built on torch's meta device, which allocates no memory.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedConfig

from saccade.config.schema import ModelConfig
from saccade.errors import ConfigError, ModelError, convert_errors
from saccade.models.tiny import build_tiny_config
from saccade.plugins import suggest
from saccade.utils.files import require_regular_files

TINY_VOCAB_SIZE = 665  # of the tiny recipes' synthetic dataset; other datasets have other words
_FLOAT32_BYTES = 4
_LAYER_MATRICES = 7  # linear layers of a language layer


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """A model's sizes; `shapes` has every parameter once; `query_width` and `key_width` are totals of all heads.

    `factor` is the side of a visual token in pixels; it consists of `spatial_merge_size` ** 2 patches.
    """

    name: str
    shapes: Mapping[str, tuple[int, ...]]
    num_layers: int
    hidden_size: int
    query_width: int
    key_width: int
    intermediate_size: int
    vocab_size: int
    vision_depth: int
    vision_hidden_size: int
    vision_intermediate_size: int
    spatial_merge_size: int
    factor: int

    @property
    def num_parameters(self) -> int:
        """Return the number of parameters."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    @property
    def num_matrix_parameters(self) -> int:
        """Return the number of parameters that Muon updates: matrices of layers and blocks; see training.optimizer."""
        names = (name for name in self.shapes if ".layers." in name or ".blocks." in name)
        return sum(math.prod(self.shapes[name]) for name in names if len(self.shapes[name]) == 2)

    def count_trained_parameters(self, model: ModelConfig) -> tuple[int, int]:
        """Return how many parameters a recipe's model trains, and how many of them Muon would update."""
        if model.lora_rank:  # all adapters are matrices of layers
            num_trained = self.count_adapter_parameters(model.lora_rank)
            return num_trained, num_trained
        if model.trained_weights == "all":
            return self.num_parameters, self.num_matrix_parameters
        language_model = {name: shape for name, shape in self.shapes.items() if ".visual." not in name}
        sizes = replace(self, shapes=language_model)
        return sizes.num_parameters, sizes.num_matrix_parameters

    def count_vision_parameters(self) -> int:
        """Return the number of parameters of the vision tower and its projector."""
        return sum(math.prod(shape) for name, shape in self.shapes.items() if ".visual." in name)

    def count_layer_parameters(self) -> int:
        """Return the number of parameters of all language layers."""
        return sum(math.prod(shape) for name, shape in self.shapes.items() if "language_model.layers." in name)

    def count_adapter_parameters(self, rank: int) -> int:
        """Return the number of parameters of LoRA adapters of `rank` on every linear layer of the text model."""
        shapes = (shape for name, shape in self.shapes.items() if "language_model.layers." in name)
        return sum(rank * sum(shape) for shape in shapes if len(shape) == 2)

    def compute_kv_bytes(self, dtype_bytes: int) -> int:
        """Return the bytes of KV cache per token, for numbers of `dtype_bytes` bytes."""
        return 2 * self.num_layers * self.key_width * dtype_bytes

    def compute_text_activation_bytes(self, dtype_bytes: int, *, repeat_kv: bool = False, lora_rank: int = 0) -> int:
        """Return the bytes that one layer keeps per token for its backward pass.

        A norm keeps a float32 copy, and its normalized input unless its weight is frozen; the next operation keeps its
        output. Attention keeps queries, keys, values and its output; keys and values once per query head with
        `repeat_kv` (on a GPU). The gated MLP keeps both projections, the activation and the product; an adapter of
        `lora_rank` its inner result.
        """
        normalized = 0 if lora_rank else dtype_bytes
        norms = 2 * (_FLOAT32_BYTES + normalized + dtype_bytes) * self.hidden_size
        if any(name.endswith("q_norm.weight") for name in self.shapes):
            norms += (_FLOAT32_BYTES + normalized) * (self.query_width + self.key_width)
        attention = 2 * dtype_bytes * (self.query_width + (self.query_width if repeat_kv else self.key_width))
        adapters = _LAYER_MATRICES * lora_rank * dtype_bytes
        return norms + attention + 4 * dtype_bytes * self.intermediate_size + adapters

    def compute_vision_activation_bytes(self, dtype_bytes: int) -> int:
        """Return the bytes that a vision block keeps per patch; queries and keys are rotated in float32."""
        has_layer_norm = any(name.endswith(".blocks.0.norm1.bias") for name in self.shapes)  # else RMSNorm
        norms = 4 * dtype_bytes if has_layer_norm else 2 * (_FLOAT32_BYTES + 2 * dtype_bytes)
        is_gated = any(".blocks.0.mlp.gate_proj." in name for name in self.shapes)
        mlp = (4 if is_gated else 2) * dtype_bytes * self.vision_intermediate_size
        return (norms + 7 * dtype_bytes) * self.vision_hidden_size + mlp


def read_sizes(folder: str) -> ModelSizes:
    """Return the sizes of a checkpoint folder. Raises ModelError if its config.json is missing or unsupported."""
    with convert_errors(ModelError, f"{folder} can't be read as a model"):
        require_regular_files(folder)
        return _compute_sizes(folder, AutoConfig.from_pretrained(folder, local_files_only=True))


@functools.cache
def compute_tiny_sizes(family: str) -> ModelSizes:
    """Return the sizes of a family's tiny model in the demo. Raises ModelError for an unknown family."""
    return _compute_sizes(f"tiny {family}", build_tiny_config(family, TINY_VOCAB_SIZE))


@functools.cache
def compute_published_sizes(name: str) -> ModelSizes:
    """Return the sizes of a published model, such as Qwen3-VL-8B-Instruct. Raises ConfigError for an unknown name."""
    if name not in PUBLISHED_MODELS:
        problem = f"model.memory_plan_model={name!r} is not a known published model; {suggest(name, PUBLISHED_MODELS)}"
        raise ConfigError(problem, key="model.memory_plan_model", value=name)
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
