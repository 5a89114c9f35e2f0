"""Model sizes without loading weights: parameters, KV cache, activations kept for the backward pass.

Those of published and tiny models are in `known_sizes.json`, which needs no torch; `config_sizes.py` computes them, and
those of a folder, from a config.
"""

import functools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from saccade.config.schema import ModelConfig
from saccade.errors import ConfigError, ModelError
from saccade.plugins import suggest
from saccade.utils.files import read_text

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


def get_tiny_sizes(family: str) -> ModelSizes:
    """Return the sizes of a family's tiny model of the default size. Raises ModelError for an unknown family."""
    sizes = _read_known_sizes()["tiny"]
    if family not in sizes:
        problem = f"family={family!r} has no tiny model; choose one of {', '.join(sorted(sizes))}"
        raise ModelError(problem, key="family", value=family)
    return sizes[family]


def get_published_sizes(name: str) -> ModelSizes:
    """Return the sizes of a published model, such as Qwen3-VL-8B-Instruct. Raises ConfigError for an unknown name."""
    sizes = _read_known_sizes()["published"]
    if name not in sizes:
        problem = f"model.memory_plan_model={name!r} is not a known published model; {suggest(name, sizes)}"
        raise ConfigError(problem, key="model.memory_plan_model", value=name)
    return sizes[name]


@functools.cache
def _read_known_sizes() -> dict[str, dict[str, ModelSizes]]:
    known = json.loads(read_text(Path(__file__).with_name("known_sizes.json")))
    return {kind: {name: _unpack(**fields) for name, fields in models.items()} for kind, models in known.items()}


def _unpack(*, shapes: Mapping[str, Sequence[Any]], **fields: Any) -> ModelSizes:
    """Return sizes whose `shapes` hold equal layers once: the number of layers, and the shape, by `*.NAME`."""
    every = {
        pattern.replace("*", str(layer)): tuple(shape)
        for pattern, (num_layers, shape) in shapes.items()
        for layer in range(num_layers)
    }
    return ModelSizes(shapes=every, **fields)
