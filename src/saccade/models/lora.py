"""Low-rank adapters (LoRA, arXiv 2106.09685) on the linear layers of a text model, through peft.

The adapters live inside the model, so that engine and trainer run the same module; a saved folder holds the merged
weights, which need no peft to open, and beside them the adapters, so that training can go on from it.
"""

import importlib.util
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from saccade.errors import ConfigError, ModelError, boundary
from saccade.types import seed_of

FILE = "adapters.safetensors"
_ADAPTER, _BASE = ".lora_", ".base_layer."
_BASE_FOLDER, _BASE_BESIDE = "base", "beside"  # in the file's metadata: where the base is, and as seen from the file


def check_adapters(rank: int) -> None:
    """See that adapters of this rank (0: none) can be made here. Raises ConfigError where peft isn't installed."""
    if rank and importlib.util.find_spec("peft") is None:
        raise ConfigError("model.lora_rank needs the package peft: pip install 'saccade[lora]'")


def attach(model: nn.Module, text: nn.Module, rank: int) -> None:
    """Freeze `model` and give every linear layer of `text` an adapter of that rank, scaled by 2 (alpha = 2 * rank).

    Adapters begin as nothing: B is zero. They have the model's dtype. Raises ConfigError where peft isn't installed.
    """
    check_adapters(rank)
    with boundary(ConfigError, "the package peft can't be imported"):
        from peft import LoraConfig, inject_adapter_in_model
    # Injecting freezes the text model alone; the vision tower and the embeddings stay as they are, too.
    model.requires_grad_(False)
    linear = {name.rpartition(".")[2] for name, part in text.named_modules() if isinstance(part, nn.Linear)}
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=sorted(linear), init_lora_weights=True)
    # The caller's random state stays as it was.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_of("lora", rank))
        inject_adapter_in_model(config, text)


def adapters(model: nn.Module) -> dict[str, Tensor]:
    """The adapters' own weights by name; empty for a model without."""
    return {name: value for name, value in model.state_dict().items() if is_adapter(name)}


def is_adapter(name: str) -> bool:
    """Whether a weight is part of an adapter."""
    return _ADAPTER in name


def plain(name: str) -> str:
    """What a weight is called in a model without adapters."""
    return name.replace(_BASE, ".")


def adapted(model: nn.Module) -> dict[str, Any]:
    """The adapted layers of a model, by the names of the weights that they adapt."""
    return {f"{name}{_BASE}weight": layer for name, layer in _layers(model).items()}


def save(values: Mapping[str, Tensor], folder: Path, base: Path) -> None:
    """Write adapters by name beside merged weights, and where the weights are that they adapt."""
    beside = os.path.relpath(base, folder.resolve())  # which a run that holds both keeps when it is moved
    held = {name: value.contiguous() for name, value in values.items()}
    save_file(held, folder / FILE, metadata={_BASE_FOLDER: str(base), _BASE_BESIDE: beside})


@torch.no_grad()
def resume(model: nn.Module, folder: Path, read: Callable[[Path], nn.Module]) -> Path:
    """Take up the adapters that were saved in `folder`, and take them out of its merged weights again.

    Returns the folder of the weights that they adapt; without saved adapters that is `folder`, and nothing happens.
    Where that folder is still there its weights are taken as they are, to the bit: what was merged was rounded, so
    taking it out again is not exact. `read` opens a folder. Raises ModelError for adapters of another rank.
    """
    if not (folder / FILE).is_file():
        return folder.resolve()
    with boundary(ModelError, f"{folder / FILE} can't be read"), safe_open(folder / FILE, "pt") as file:
        saved = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no mapping)
        base = _base(file.metadata() or {}, folder)
    # Every shape names its rank, so equal shapes are equal ranks.
    own = adapters(model)
    if {name: value.shape for name, value in own.items()} != {name: value.shape for name, value in saved.items()}:
        raise ModelError(f"{folder} has adapters of another rank than model.lora_rank; delete {FILE} to start new ones")
    for name, value in saved.items():
        own[name].copy_(value)
    known: dict[str, Tensor] = {}
    if (base / "config.json").is_file() and base != folder.resolve():
        with boundary(
            ModelError, f"{base} can't be read; delete it, and the weights in {folder} are taken apart instead"
        ):
            known = read(base).state_dict()
    for name, layer in _layers(model).items():
        weight: Tensor = layer.base_layer.weight
        delta = layer.get_delta_weight("default").float()
        rounding = 4 * torch.finfo(weight.dtype).eps * float(weight.abs().max() + delta.abs().max())
        weight.copy_(_exact(weight.float() - delta, known.get(f"{name}.weight"), rounding))
    return base


def _base(notes: Mapping[str, str], folder: Path) -> Path:
    """The folder of the weights that were adapted: where it lies from here, or else where it lay then."""
    beside = (folder.resolve() / notes.get(_BASE_BESIDE, "")).resolve()
    if beside != folder.resolve() and (beside / "config.json").is_file():
        return beside
    return Path(notes.get(_BASE_FOLDER, folder))


def _exact(recovered: Tensor, base: Tensor | None, rounding: float) -> Tensor:
    """The base's own weight, unless the folder holds other weights by now than those that were adapted."""
    if base is None or base.shape != recovered.shape:
        return recovered
    base = base.to(recovered.device, torch.float32)
    return base if float((base - recovered).abs().max()) <= rounding else recovered


def _layers(model: nn.Module) -> dict[str, Any]:
    """The adapted linear layers by name."""
    return {name: part for name, part in model.named_modules() if "lora_A" in dict(part.named_children())}
