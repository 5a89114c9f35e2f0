"""Low-rank adapters (LoRA, arXiv 2106.09685) on the linear layers of a text model, through peft.

The adapters are injected into the model, so that engine and trainer run the same module. A checkpoint holds the merged
weights, which load without peft, and the adapters, so that training can continue from it.
"""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from saccade.errors import ConfigError, ModelError, convert_errors
from saccade.models.adapter_package import check_adapters
from saccade.models.checkpoint_files import ADAPTERS_FILE, convert_write_errors
from saccade.utils.files import require_regular, resolve_path
from saccade.utils.hashing import derive_seed

_LORA_INFIX = ".lora_"
_SCALE = 2  # of an adapter's output: alpha / rank
# The one metadata entry, since safetensors writes several in random order: JSON of the base's path, and of its path
# relative to the file.
_BASE_FOLDERS_KEY = "base_folders"


def attach_adapters(model: nn.Module, language_model: nn.Module, rank: int) -> None:
    """Freeze `model`; add an adapter of `rank`, scaled by 2 (alpha = 2 * rank), to each linear layer of its text model.

    Adapters start as zero (B = 0), in the model's dtype. Raises ConfigError if peft isn't installed.
    """
    check_adapters(rank)
    with convert_errors(ConfigError, "the package peft can't be imported"):
        from peft import LoraConfig, inject_adapter_in_model
    # Injecting freezes only the text model; the vision tower and the embeddings must be frozen, too.
    model.requires_grad_(False)
    modules = language_model.named_modules()
    linear = {name.rpartition(".")[2] for name, module in modules if isinstance(module, nn.Linear)}
    config = LoraConfig(r=rank, lora_alpha=_SCALE * rank, target_modules=sorted(linear), init_lora_weights=True)
    # Don't change the caller's random state.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed("lora", rank))
        inject_adapter_in_model(config, language_model)


def get_adapter_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the adapters' weights by name; empty for a model without adapters."""
    return {name: value for name, value in model.state_dict().items() if is_adapter_weight(name)}


def is_adapter_weight(name: str) -> bool:
    """Return whether a weight belongs to an adapter."""
    return _LORA_INFIX in name


def save_adapters(weights: Mapping[str, Tensor], folder: Path, base_folder: Path) -> None:
    """Write adapters by name into a checkpoint folder, with the path of the base weights that they adapt."""
    relative = os.path.relpath(base_folder, resolve_path(folder))  # stays valid if a run that contains both is moved
    contiguous = {name: value.contiguous() for name, value in weights.items()}
    metadata = {_BASE_FOLDERS_KEY: json.dumps([str(base_folder), relative])}
    with convert_write_errors():
        save_file(contiguous, folder / ADAPTERS_FILE, metadata=metadata)


def export_adapters(weights: Mapping[str, Tensor], folder: Path, base: str | None = None) -> None:
    """Write adapters by name as a folder that peft and inference servers load beside the base weights, those in `base`.

    The config lists whole names of layers: a vision tower may have layers of the same last name.
    """
    rank = next(value.shape[0] for name, value in weights.items() if f"{_LORA_INFIX}A." in name)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": _SCALE * rank,
        "target_modules": sorted({name.partition(_LORA_INFIX)[0] for name in weights}),
        "bias": "none",
        "base_model_name_or_path": base,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    tensors = {f"base_model.model.{name.replace('.default.', '.')}": value for name, value in weights.items()}
    with convert_write_errors():
        save_file({name: value.contiguous() for name, value in tensors.items()}, folder / "adapter_model.safetensors")


def read_adapters(folder: Path) -> tuple[dict[str, Tensor], Path]:
    """Return the adapters of a checkpoint by name, and the folder of their base weights. Raises ModelError."""
    path = folder / ADAPTERS_FILE
    with convert_errors(ModelError, f"{path} can't be read", key=str(path)):
        require_regular(path)
        with safe_open(path, "pt") as file:
            saved = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
            return saved, _find_base_folder(file.metadata() or {}, folder)


@torch.no_grad()
def restore_adapters(model: nn.Module, folder: Path, load_model: Callable[[Path], nn.Module]) -> Path:
    """Load the adapters saved in `folder`, and restore the base weights that its merged weights were made from.

    Returns the folder of the base weights; without saved adapters that is `folder`, and nothing changes. If the base
    folder still exists, its weights are used, bit for bit: subtracting the adapters from the rounded merged weights is
    not exact. `load_model` loads a folder. Raises ModelError for adapters of another rank or of other layers.
    """
    path = folder / ADAPTERS_FILE
    if not path.is_file():
        return resolve_path(folder)
    saved, base = read_adapters(folder)
    adapters = get_adapter_weights(model)
    for problem, first, second in (("lacks", adapters, saved), ("has surplus", saved, adapters)):
        if names := sorted(first.keys() - second.keys()):
            raise ModelError(
                f"{path} {problem} adapters: {len(names)}, first {names[0]}; restore it, or delete it for new ones",
                key=str(path),
                value=tuple(names),
            )
    # Shapes contain the rank, so equal shapes mean equal ranks.
    if any(value.shape != adapters[name].shape for name, value in saved.items()):
        fix = f"set the same rank, or delete {ADAPTERS_FILE} to start new adapters"
        problem = f"{folder} has adapters of another rank than model.lora_rank"
        raise ModelError(f"{problem}; {fix}", key="model.lora_rank", value=str(path))
    for name, value in saved.items():
        adapters[name].copy_(value)
    base_weights: dict[str, Tensor] = {}
    if (base / "config.json").is_file() and base != resolve_path(folder):
        fix = f"delete it to recover the base weights from those in {folder} instead"
        with convert_errors(ModelError, f"{base} can't be read; {fix}"):
            base_weights = load_model(base).state_dict()
    for name, layer in find_lora_layers(model).items():
        weight: Tensor = layer.base_layer.weight
        delta = layer.get_delta_weight("default").float()
        rounding = 4 * torch.finfo(weight.dtype).eps * float(weight.abs().max() + delta.abs().max())
        weight.copy_(_restore_exact_weight(weight.float() - delta, base_weights.get(f"{name}.weight"), rounding))
    return base


def _find_base_folder(metadata: Mapping[str, str], folder: Path) -> Path:
    """Return the folder of the base weights: by the relative path if it exists, else by the absolute path."""
    try:
        absolute, relative = json.loads(metadata[_BASE_FOLDERS_KEY])
        beside = resolve_path(resolve_path(folder) / relative)
        return beside if (beside / "config.json").is_file() else Path(absolute)
    except (KeyError, TypeError, ValueError):
        return folder


def _restore_exact_weight(recovered: Tensor, base_weight: Tensor | None, tolerance: float) -> Tensor:
    """Return the base's weight, or the recovered one if the base folder has changed since."""
    if base_weight is None or base_weight.shape != recovered.shape:
        return recovered
    base_weight = base_weight.to(recovered.device, torch.float32)
    return base_weight if float((base_weight - recovered).abs().max()) <= tolerance else recovered


def find_lora_layers(model: nn.Module) -> dict[str, Any]:
    """Return the LoRA layers of a model by name."""
    return {name: part for name, part in model.named_modules() if "lora_A" in dict(part.named_children())}
