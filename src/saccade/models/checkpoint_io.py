"""Write or copy weights one layer at a time, so that no device holds a second model, even if weights are sharded.

    layer ──gather──> pending ── shard full? ──> model-00001-of-00009.safetensors ── freed ──> the next layer

If the weights are sharded among processes (FSDP2's DTensors), every process iterates over all layers in the same order,
because gathering is a collective operation. Rank 0 writes. Beyond its own weights a process holds at most one layer
and `SHARD_BYTES` bytes.
"""

import itertools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, distributed
from torch.distributed.tensor import DTensor
from transformers.core_model_loading import revert_weight_conversion

from saccade.models import lora

SHARD_BYTES = 64 * 2**20  # at which a file is closed
_LAYER_PREFIX = re.compile(r".*?\.\d+(?=\.)")  # up to the first number: model.language_model.layers.3
_WEIGHTS_NAME, _INDEX_NAME = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """The weights of one layer, by their names in the model; `adapted_layers` are the LoRA layers by weight name."""

    model: Any
    weights: Mapping[str, Tensor]
    adapted_layers: Mapping[str, Any]

    @torch.no_grad()
    def gather_weights(self) -> dict[str, Tensor]:
        """Return full weights by their names in a checkpoint, with adapters merged.

        A collective operation if the weights are sharded: all processes must call it for the same layer.
        """
        merged = {}
        for name, weight in self.weights.items():
            value = gather_tensor(weight)
            if name in self.adapted_layers:
                # Add in float32, to round only once.
                delta = gather_tensor(self.adapted_layers[name].get_delta_weight("default"))
                value = (value.float() + delta.float()).to(value.dtype)
            merged[lora.strip_base_layer(name)] = value
        # Names and shapes on disk differ from those in memory for some families.
        values: dict[str, Tensor] = revert_weight_conversion(self.model, merged)
        return values


def iterate_layers(model: Any) -> Iterator[Layer]:
    """Yield the layers of a model, in order, with adapters merged; tied weights appear once.

    A weight outside the layers, such as embeddings, is yielded as a layer of its own.
    """
    seen: set[int] = set()
    weights: dict[str, Tensor] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if not lora.is_adapter_weight(name) and id(value) not in seen:
            seen.add(id(value))
            weights[name] = value
    adapted = lora.find_adapted_layers(model)
    for _, names in itertools.groupby(weights, key=parse_layer_name):
        layer = {name: weights[name] for name in names}
        yield Layer(
            model=model, weights=layer, adapted_layers={name: adapted[name] for name in layer if name in adapted}
        )


def parse_layer_name(name: str) -> str:
    """Return the name of the layer that a weight belongs to.

    >>> parse_layer_name("model.language_model.layers.3.mlp.up_proj.weight"), parse_layer_name("lm_head.weight")
    ('model.language_model.layers.3', 'lm_head.weight')
    """
    match = _LAYER_PREFIX.match(name)
    return match[0] if match else name


def gather_tensor(value: Tensor) -> Tensor:
    """Return a weight as one full tensor; for a sharded one this is a collective operation."""
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach()


def write_weights(model: Any, folder: Path, *, shard_bytes: int = SHARD_BYTES) -> None:
    """Write a model's weights as safetensors: one file, or several of at least `shard_bytes` bytes with an index.

    Rank 0 writes; all processes return when it is done. Raises OSError if there is no room.
    """
    writer = _ShardWriter(folder) if is_rank_zero() else None
    for layer in iterate_layers(model):
        values = layer.gather_weights()
        if writer:
            writer.add(values, shard_bytes)
        del values  # free the layer before the next is gathered
    if writer:
        writer.finish()
    if _is_distributed():
        distributed.barrier()


def copy_layers_to_cpu(model: Any) -> tuple[dict[str, Tensor], ...]:
    """Copy a model's layers to the CPU, in order, each gathered and by its names in a checkpoint.

    Rank 0 gets the copy; the other processes take part in gathering and get nothing.
    """
    copies: list[dict[str, Tensor]] = []
    for layer in iterate_layers(model):
        values = layer.gather_weights()
        if is_rank_zero():
            copies.append({name: _copy_to_cpu(value) for name, value in values.items()})
        del values  # free the layer before the next is gathered
    return tuple(copies)


def _copy_to_cpu(value: Tensor) -> Tensor:
    return torch.empty(value.shape, dtype=value.dtype).copy_(value)


def is_rank_zero() -> bool:
    """Return whether this process has rank 0 or runs alone."""
    return not _is_distributed() or distributed.get_rank() == 0


def _is_distributed() -> bool:
    return distributed.is_available() and distributed.is_initialized()


class _ShardWriter:
    """Writes files under temporary names, and renames them when their number is known."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pending: dict[str, Tensor] = {}
        self._shards: list[tuple[str, ...]] = []  # the weight names of each file
        self._total_bytes = 0

    def add(self, values: dict[str, Tensor], shard_bytes: int) -> None:
        """Add weights (and clear `values`); write a file if at least `shard_bytes` are pending."""
        self._pending |= values
        values.clear()
        if sum(value.nbytes for value in self._pending.values()) >= shard_bytes:
            self._write_shard()

    def _write_shard(self) -> None:
        shard = {name: value.contiguous() for name, value in self._pending.items()}
        self._pending.clear()
        save_file(shard, self._temporary_path(len(self._shards)), metadata={"format": "pt"})
        self._shards.append(tuple(shard))
        self._total_bytes += sum(value.nbytes for value in shard.values())

    def _temporary_path(self, shard_index: int) -> Path:
        return self._folder / f".{_WEIGHTS_NAME}.{shard_index}"

    def finish(self) -> None:
        """Write the pending weights, rename the files, and write the index if there are several."""
        if self._pending:
            self._write_shard()
        for stale in (*self._folder.glob("model-?????-of-?????.safetensors"), self._folder / _INDEX_NAME):
            stale.unlink(missing_ok=True)
        count = len(self._shards)
        names = [
            _WEIGHTS_NAME if count == 1 else f"model-{index + 1:05d}-of-{count:05d}.safetensors"
            for index in range(count)
        ]
        for shard_index, name in enumerate(names):
            self._temporary_path(shard_index).rename(self._folder / name)
        if count > 1:
            (self._folder / _WEIGHTS_NAME).unlink(missing_ok=True)
            weight_map = {weight: name for name, weights in zip(names, self._shards, strict=True) for weight in weights}
            index = {"metadata": {"total_size": self._total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
            (self._folder / _INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
