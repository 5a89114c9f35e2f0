"""How large a model is, without its weights: parameters, keys and values, what training keeps for the backward pass.

Sizes come from a folder's config.json, from the table of published models below, or from what `make_tiny` would make.
The parameters are those of transformers' own class, built without memory (on torch's meta device).
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedConfig

from saccade.errors import ConfigError, ModelError, boundary
from saccade.model.tiny import tiny_config
from saccade.plugins import nearest

TINY_VOCABULARY = 665  # of the tiny recipes' world; another world has other words
_FLOAT = 4  # bytes of float32


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """A model's sizes; `shapes` holds every parameter's, each once, and `query` and `key` are widths of all heads.

    `factor` is in pixels per side of a visual token, which `merge` * `merge` patches make.
    """

    name: str
    shapes: Mapping[str, tuple[int, ...]]
    layers: int
    hidden: int
    query: int
    key: int
    intermediate: int
    vocabulary: int
    depth: int
    vision_hidden: int
    vision_intermediate: int
    merge: int
    factor: int

    @property
    def parameters(self) -> int:
        """How many parameters there are."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    @property
    def matrices(self) -> int:
        """Parameters that Muon updates: the matrices of layers and blocks (as `training.optim` divides them)."""
        inside = (name for name in self.shapes if ".layers." in name or ".blocks." in name)
        return sum(math.prod(self.shapes[name]) for name in inside if len(self.shapes[name]) == 2)

    def adapters(self, rank: int) -> int:
        """Parameters of adapters (LoRA) of that rank on every linear layer of the text model."""
        inside = (shape for name, shape in self.shapes.items() if "language_model.layers." in name)
        return sum(rank * sum(shape) for shape in inside if len(shape) == 2)

    def key_values(self, size: int) -> int:
        """Bytes of keys and values per token, where a number has `size` bytes."""
        return 2 * self.layers * self.key * size

    def saved_text(self, size: int, *, repeated: bool = False) -> int:
        """Bytes that one layer keeps per token for its backward pass, but for the attention mask.

        A norm keeps a float32 copy and what it normalised; its output is kept by who reads it. Attention keeps
        queries, keys, values and its output, keys and values once per query head where they are `repeated` (on a GPU);
        the gated MLP keeps both projections, the activation and the product.
        """
        norms = 2 * (_FLOAT + 2 * size) * self.hidden
        if any(name.endswith("q_norm.weight") for name in self.shapes):
            norms += (_FLOAT + size) * (self.query + self.key)
        attention = 2 * size * (self.query + (self.query if repeated else self.key))
        return norms + attention + 4 * size * self.intermediate

    def saved_vision(self, size: int) -> int:
        """Bytes that one block of the vision tower keeps per patch; queries and keys are rotated in float32."""
        exact = any(name.endswith(".blocks.0.norm1.bias") for name in self.shapes)
        norms = 4 * size if exact else 2 * (_FLOAT + 2 * size)
        gated = any(".blocks.0.mlp.gate_proj." in name for name in self.shapes)
        return (norms + 7 * size) * self.vision_hidden + (4 if gated else 2) * size * self.vision_intermediate


# ---- where they come from ------------------------------------------------------------------------------------------


def read_sizes(folder: str) -> Sizes:
    """The sizes of the checkpoint in a folder. Raises ModelError where its config.json is none that can be used."""
    with boundary(ModelError, f"{folder} can't be read as a model's folder"):
        return _sizes(folder, AutoConfig.from_pretrained(folder, local_files_only=True))


@functools.cache
def tiny_sizes(family: str) -> Sizes:
    """The sizes of what the demo makes of a family. Raises ModelError for an unknown one."""
    return _sizes(f"tiny {family}", tiny_config(family, TINY_VOCABULARY))


@functools.cache
def published_sizes(name: str) -> Sizes:
    """The sizes of a published model, such as Qwen3-VL-8B-Instruct. Raises ConfigError for one that isn't known."""
    if name not in PUBLISHED:
        raise ConfigError(f"the sizes of the model {name!r} aren't known; {nearest(name, PUBLISHED)}")
    family, text, vision, tied = PUBLISHED[name]
    shared = {"text_config": {**text, "tie_word_embeddings": tied}, "tie_word_embeddings": tied}
    config = AutoConfig.for_model(family, vision_config={**vision, "out_hidden_size": text["hidden_size"]}, **shared)
    return _sizes(name, config)


def _sizes(name: str, config: PreTrainedConfig) -> Sizes:
    maker: Any = AutoModelForImageTextToText
    with torch.device("meta"):
        skeleton = maker.from_config(config)
    text: Any = config.get_text_config()
    vision: Any = config.vision_config
    attention: Any = skeleton.model.language_model.layers[0].self_attn
    return Sizes(
        name=name,
        shapes={name: tuple(parameter.shape) for name, parameter in skeleton.named_parameters()},
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        query=attention.head_dim * text.num_attention_heads,
        key=attention.head_dim * text.num_key_value_heads,
        intermediate=text.intermediate_size,
        vocabulary=text.vocab_size,
        depth=vision.depth,
        vision_hidden=vision.hidden_size,
        vision_intermediate=vision.intermediate_size,
        merge=vision.spatial_merge_size,
        factor=vision.patch_size * vision.spatial_merge_size,
    )


# ---- published models ----------------------------------------------------------------------------------------------


def _text(layers: int, hidden: int, heads: int, key_heads: int, intermediate: int, vocabulary: int) -> dict[str, int]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "intermediate_size": intermediate,
        "vocab_size": vocabulary,
    }


def _tower(depth: int, hidden: int, intermediate: int, patch: int, **more: Any) -> dict[str, Any]:
    sizes = {"depth": depth, "hidden_size": hidden, "intermediate_size": intermediate, "patch_size": patch}
    return {**sizes, "num_heads": 16, **more}


_LARGE = _tower(27, 1152, 4304, 16, deepstack_visual_indexes=[8, 16, 24], num_position_embeddings=2304)
_SMALL = _tower(24, 1024, 4096, 16, deepstack_visual_indexes=[5, 11, 17], num_position_embeddings=2304)
_WINDOWED = _tower(32, 1280, 3420, 14)
_HEAD = {"head_dim": 128}

# By name: the family, the text model, the vision tower, and whether input and output share their embeddings.
PUBLISHED: Mapping[str, tuple[str, dict[str, int], dict[str, Any], bool]] = {
    "Qwen3-VL-2B-Instruct": ("qwen3_vl", _text(28, 2048, 16, 8, 6144, 151936) | _HEAD, _SMALL, True),
    "Qwen3-VL-4B-Instruct": ("qwen3_vl", _text(36, 2560, 32, 8, 9728, 151936) | _HEAD, _SMALL, True),
    "Qwen3-VL-8B-Instruct": ("qwen3_vl", _text(36, 4096, 32, 8, 12288, 151936) | _HEAD, _LARGE, False),
    "Qwen3-VL-32B-Instruct": ("qwen3_vl", _text(64, 5120, 64, 8, 25600, 151936) | _HEAD, _LARGE, False),
    "Qwen2.5-VL-3B-Instruct": ("qwen2_5_vl", _text(36, 2048, 16, 2, 11008, 151936), _WINDOWED, True),
    "Qwen2.5-VL-7B-Instruct": ("qwen2_5_vl", _text(28, 3584, 28, 4, 18944, 152064), _WINDOWED, False),
}
