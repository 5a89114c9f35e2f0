"""Write or copy weights one layer at a time, so that no device holds a second model, even if weights are sharded.

    layer ──gather──> pending ── shard full? ──> model-00001-of-00009.safetensors ── freed ──> the next layer

If the weights are sharded among processes (FSDP2's DTensors), every process iterates over all layers in the same order,
because gathering is a collective operation. Rank 0 writes. Beyond its own weights a process holds at most one layer
and `SHARD_BYTES` bytes.
"""

import itertools
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, distributed
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers.core_model_loading import revert_weight_conversion

from saccade.models import lora
from saccade.models.checkpoint_files import convert_write_errors
from saccade.utils.files import require_regular

SHARD_BYTES = 64 * 2**20  # at which a file is closed
_LAYER_PREFIX = re.compile(r".*?\.\d+(?=\.)")  # up to the first number: model.language_model.layers.3
_WEIGHTS_NAME, _INDEX_NAME = "model.safetensors", "model.safetensors.index.json"


def iterate_layers(model: Any) -> Iterator[dict[str, Tensor]]:
    """Yield the weights of each layer, in order, by their names in the model; tied weights appear once.

    A weight outside the layers, such as embeddings, is yielded as a layer of its own.
    """
    seen: set[int] = set()
    weights: dict[str, Tensor] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if not lora.is_adapter_weight(name) and id(value) not in seen:
            seen.add(id(value))
            weights[name] = value
    for _, names in itertools.groupby(weights, key=parse_layer_name):
        yield {name: weights[name] for name in names}


def _gather_layers(model: Any, dtype: torch.dtype | None = None) -> Iterator[dict[str, Tensor]]:
    """Yield each layer's full weights by their names in a checkpoint, with adapters merged, in `dtype` or in their own.

    A collective operation if the weights are sharded: all processes must iterate. The caller frees a layer before the
    next is gathered.
    """
    adapted_layers = {f"{name}.base_layer.weight": layer for name, layer in lora.find_lora_layers(model).items()}
    for weights in iterate_layers(model):
        yield _gather_weights(model, weights, adapted_layers, dtype)


@torch.no_grad()
def _gather_weights(
    model: Any, weights: Mapping[str, Tensor], adapted_layers: Mapping[str, Any], dtype: torch.dtype | None
) -> dict[str, Tensor]:
    merged = {}
    for name, weight in weights.items():
        value = gather_tensor(weight)
        if name in adapted_layers:
            # Add in float32, to round only once.
            delta = gather_tensor(adapted_layers[name].get_delta_weight("default"))
            value = (value.float() + delta.float()).to(value.dtype)
        merged[name.replace(".base_layer.", ".")] = value if dtype is None else value.to(dtype)
    # Names and shapes on disk differ from those in memory for some families.
    return revert_weight_conversion(model, merged)


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


def find_nonfinite(tensors: Mapping[str, Tensor]) -> str | None:
    """Return the name of the first tensor that holds NaN or an infinity, None if none does.

    Of a sharded tensor only this process's part is read.
    """
    parts = {
        name: (value.to_local() if isinstance(value, DTensor) else value).detach()
        for name, value in tensors.items()
        if value.is_floating_point()
    }
    if not parts:
        return None
    # A sum reads each value once, copies nothing, and needs one synchronization with the device for all tensors.
    is_finite = torch.stack([part.sum(dtype=torch.float32) for part in parts.values()]).isfinite().tolist()
    suspects = (name for name, is_sum_finite in zip(parts, is_finite, strict=True) if not is_sum_finite)
    # The sum of finite values may overflow.
    return next((name for name in suspects if not bool(parts[name].isfinite().all())), None)


def write_weights(
    model: Any, folder: Path, *, shard_bytes: int = SHARD_BYTES, dtype: torch.dtype | None = None
) -> None:
    """Write a model's weights as safetensors: one file, or several of at least `shard_bytes` bytes with an index.

    Rank 0 writes; all processes return when it is done. Raises OSError if there is no room.
    """
    layers = _gather_layers(model, dtype)
    if is_rank_zero():
        write_layers(layers, folder, shard_bytes=shard_bytes)
    else:
        for values in layers:
            values.clear()  # free the layer before the next is gathered
    if _is_distributed():
        distributed.barrier()


def write_layers(layers: Iterable[dict[str, Tensor]], folder: Path, *, shard_bytes: int = SHARD_BYTES) -> None:
    """Write layers of weights like `write_weights`; each is freed before the next is read."""
    pending: dict[str, Tensor] = {}
    shards: list[dict[str, int]] = []  # the bytes of each file's weights, by name
    for values in layers:
        pending |= values
        values.clear()
        if sum(value.nbytes for value in pending.values()) >= shard_bytes:
            shards.append(_write_shard(pending, _get_temporary_path(folder, len(shards))))
    if pending:
        shards.append(_write_shard(pending, _get_temporary_path(folder, len(shards))))
    _rename_shards(folder, shards)


def _get_temporary_path(folder: Path, shard_index: int) -> Path:
    return folder / f".{_WEIGHTS_NAME}.{shard_index}"


def _write_shard(pending: dict[str, Tensor], path: Path) -> dict[str, int]:
    """Write weights to a file and clear them; return their bytes by name."""
    shard = {name: value.contiguous() for name, value in pending.items()}
    pending.clear()
    with convert_write_errors():
        save_file(shard, path, metadata={"format": "pt"})
    return {name: value.nbytes for name, value in shard.items()}


def _rename_shards(folder: Path, shards: Sequence[Mapping[str, int]]) -> None:
    """Rename the files, whose number is known now, in place of an earlier model's, and write the index of several."""
    for outdated in (*folder.glob("model-?????-of-?????.safetensors"), folder / _INDEX_NAME):
        outdated.unlink(missing_ok=True)
    weight_map = {}
    for index, shard in enumerate(shards):
        name = _WEIGHTS_NAME if len(shards) == 1 else f"model-{index + 1:05d}-of-{len(shards):05d}.safetensors"
        _get_temporary_path(folder, index).rename(folder / name)
        weight_map.update(dict.fromkeys(shard, name))
    if len(shards) > 1:
        (folder / _WEIGHTS_NAME).unlink(missing_ok=True)
        total_size = sum(sum(shard.values()) for shard in shards)
        content = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))}
        (folder / _INDEX_NAME).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def read_tensors(folder: Path, select: Callable[[Collection[str]], Collection[str]]) -> dict[str, Tensor]:
    """Read the tensors of a checkpoint's folder whose names `select` returns, of all their names."""
    files = dict[str, Path]()
    for path in sorted(folder.glob("*.safetensors")):
        require_regular(path)
        with safe_open(path, "pt") as file:
            files.update(dict.fromkeys(file.keys(), path))
    tensors = dict[str, Tensor]()
    for name in select(files):
        with safe_open(files[name], "pt") as file:
            tensors[name] = file.get_tensor(name)
    return tensors


def copy_to_cpu(value: Tensor) -> Tensor:
    """Return a copy of a tensor in the CPU's memory, which shares no storage with it.

    Of a tensor that is made of others (this rank's part of a sharded one, a moment in 8 bits) those are copied.
    """
    value = value.detach()
    if not is_traceable_wrapper_subclass(value):
        return value.to("cpu", copy=True)
    names, context = value.__tensor_flatten__()
    parts = {name: getattr(value, name) for name in names}  # newer versions of torch have the mesh of ranks among them
    copies = {name: copy_to_cpu(part) if isinstance(part, Tensor) else part for name, part in parts.items()}
    return type(value).__tensor_unflatten__(copies, context, value.shape, value.stride())


def copy_layers_to_cpu(model: Any, dtype: torch.dtype | None = None) -> tuple[dict[str, Tensor], ...]:
    """Copy a model's layers to the CPU, in order, each gathered and by its names in a checkpoint.

    Rank 0 gets the copy; the other processes take part in gathering and get nothing.
    """
    copies: list[dict[str, Tensor]] = []
    for values in _gather_layers(model, dtype):
        if is_rank_zero():
            copies.append({name: copy_to_cpu(value) for name, value in values.items()})
        values.clear()  # free the layer before the next is gathered
    return tuple(copies)


def is_rank_zero() -> bool:
    """Return whether this process has rank 0 or runs alone."""
    return not _is_distributed() or distributed.get_rank() == 0


def _is_distributed() -> bool:
    return distributed.is_available() and distributed.is_initialized()
