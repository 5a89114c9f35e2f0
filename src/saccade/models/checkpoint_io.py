"""Weights as files or as a copy, a layer at a time: no device holds a second model, however its weights are divided.

    layer ──whole──> held ── enough for a file? ──> model-00001-of-00009.safetensors ── dropped ──> the next layer

Weights may be divided among processes (FSDP2's DTensors): then every process goes through all layers in the same order,
since each asks the others for their parts. The first writes, the others only lend. Beside what is written nobody holds
more than a layer and `FILE` bytes.
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

from saccade.model import _adapters

FILE = 64 * 2**20  # bytes, with which a file is closed
_LAYER = re.compile(r".*?\.\d+(?=\.)")  # up to the first number: model.language_model.layers.3
_NAME, _INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """Weights that belong together, by the names that they have inside the model; `adapted` by their adapted layers."""

    model: Any
    parts: Mapping[str, Tensor]
    adapted: Mapping[str, Any]

    @torch.no_grad()
    def whole(self) -> dict[str, Tensor]:
        """Its weights by the names of a checkpoint, each whole, with adapters added.

        Where they are divided among processes, all of these must ask for the same layer at the same time.
        """
        found = {}
        for name, part in self.parts.items():
            value = whole(part)
            if name in self.adapted:
                # Added in float32 and rounded once.
                delta = whole(self.adapted[name].get_delta_weight("default"))
                value = (value.float() + delta.float()).to(value.dtype)
            found[_adapters.plain(name)] = value
        # As the model's family names and shapes them on disk, where that differs.
        values: dict[str, Tensor] = revert_weight_conversion(self.model, found)
        return values


def layers(model: Any) -> Iterator[Layer]:
    """The layers of a model, in order, without adapters of their own; tied weights appear once.

    What is in no layer, such as embeddings, is a layer by itself.
    """
    seen: set[int] = set()
    weights: dict[str, Tensor] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if not _adapters.is_adapter(name) and id(value) not in seen:
            seen.add(id(value))
            weights[name] = value
    adapted = _adapters.adapted(model)
    for _, names in itertools.groupby(weights, key=layer_of):
        parts = {name: weights[name] for name in names}
        yield Layer(model=model, parts=parts, adapted={name: adapted[name] for name in parts if name in adapted})


def layer_of(name: str) -> str:
    """Which layer a weight belongs to.

    >>> layer_of("model.language_model.layers.3.mlp.up_proj.weight"), layer_of("lm_head.weight")
    ('model.language_model.layers.3', 'lm_head.weight')
    """
    found = _LAYER.match(name)
    return found[0] if found else name


def whole(value: Tensor) -> Tensor:
    """A weight as one tensor; of one that is divided among processes all must ask for it, each gets a copy."""
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach()


def write(model: Any, folder: Path, *, file: int = FILE) -> None:
    """Write a model's weights into `folder` as safetensors: one file, or several of `file` bytes or more with an index.

    Of several processes the first writes; all return when it has. Raises OSError where there is no room.
    """
    writer = _Writer(folder) if is_first() else None
    for layer in layers(model):
        values = layer.whole()
        if writer:
            writer.take(values, file)
        del values  # before the next
    if writer:
        writer.end()
    if _together():
        distributed.barrier()


def copied(model: Any) -> tuple[dict[str, Tensor], ...]:
    """A copy of a model's layers in this machine's memory, in order, each whole and by the names of a checkpoint.

    Of several processes the first gets them, the others lend their parts and get nothing.
    """
    found: list[dict[str, Tensor]] = []
    for layer in layers(model):
        values = layer.whole()
        if is_first():
            found.append({name: _here(value) for name, value in values.items()})
        del values  # before the next
    return tuple(found)


def _here(value: Tensor) -> Tensor:
    return torch.empty(value.shape, dtype=value.dtype).copy_(value)


def is_first() -> bool:
    """Whether this process is the first of those that work together, or works alone."""
    return not _together() or distributed.get_rank() == 0


def _together() -> bool:
    return distributed.is_available() and distributed.is_initialized()


class _Writer:
    """Files that are written one after the other, and get their names when it is known how many there are."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._held: dict[str, Tensor] = {}
        self._files: list[tuple[str, ...]] = []  # the names of the weights in each
        self._bytes = 0

    def take(self, values: dict[str, Tensor], most: int) -> None:
        """Hold the values, and write what is held where that is enough for a file."""
        self._held |= values
        values.clear()
        if sum(value.nbytes for value in self._held.values()) >= most:
            self._close()

    def _close(self) -> None:
        held = {name: value.contiguous() for name, value in self._held.items()}
        self._held.clear()
        save_file(held, self._part(len(self._files)), metadata={"format": "pt"})
        self._files.append(tuple(held))
        self._bytes += sum(value.nbytes for value in held.values())

    def _part(self, number: int) -> Path:
        return self._folder / f".{_NAME}.{number}"

    def end(self) -> None:
        """Write what is left, and name the files."""
        if self._held:
            self._close()
        for stale in (*self._folder.glob("model-?????-of-?????.safetensors"), self._folder / _INDEX):
            stale.unlink(missing_ok=True)
        many = len(self._files)
        names = [_NAME if many == 1 else f"model-{number + 1:05d}-of-{many:05d}.safetensors" for number in range(many)]
        for number, name in enumerate(names):
            self._part(number).rename(self._folder / name)
        if many > 1:
            (self._folder / _NAME).unlink(missing_ok=True)
            places = {weight: name for name, weights in zip(names, self._files, strict=True) for weight in weights}
            index = {"metadata": {"total_size": self._bytes}, "weight_map": dict(sorted(places.items()))}
            (self._folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
