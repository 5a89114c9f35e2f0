"""One of two ranks of models sharded by FSDP2: `sharded_models.py RANK STORE FOLDER`, with CASES in FOLDER.

It writes each model's weights layer by layer, copies them, and prints as a line of JSON how many gathered bytes were
alive at most, and the bytes of the largest layer.
"""

import json
import sys
import weakref
from pathlib import Path
from unittest import mock

import torch
from safetensors import safe_open
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForImageTextToText

from saccade.models import checkpoint_io, lora

SHARD_BYTES = 100_000  # bytes
CASES = {"tied": 0, "untied": 0, "adapters": 4}  # the rank of the adapters


def load_model(model: str, lora_rank: int):
    """Load the model, with nonzero adapters."""
    model = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32)
    if lora_rank:
        lora.attach_adapters(model, model.model.language_model, lora_rank)
        torch.manual_seed(7)
        for value in lora.get_adapter_weights(model).values():
            value.add_(torch.randn_like(value))
    return model


def load_weight(folder: Path, name: str) -> torch.Tensor:
    """Load a weight that was written."""
    weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    with safe_open(folder / weight_map[name], framework="pt") as file:
        return file.get_tensor(name)


def main(rank: int, store: str, folder: Path) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    for name, lora_rank in CASES.items():
        print(json.dumps(write_and_copy(folder / name / "model", folder / name / "out", mesh, lora_rank)))
    distributed.destroy_process_group()


def write_and_copy(path: Path, out: Path, mesh: DeviceMesh, lora_rank: int) -> dict[str, int]:
    """Write and copy a sharded model; return what was counted."""
    model = load_model(str(path), lora_rank)
    for layer in (*model.model.language_model.layers, *model.model.visual.blocks, model):
        fully_shard(layer, mesh=mesh)
    model(input_ids=torch.tensor([[1, 2, 3]]))  # after a forward pass the root stays unsharded
    layers = [layer.values() for layer in checkpoint_io.iterate_layers(model)]
    assert all(isinstance(value, checkpoint_io.DTensor) for values in layers for value in values)

    live, gather_tensor = {"now": 0, "max": 0}, checkpoint_io.gather_tensor

    def gather_and_count(value):
        gathered = gather_tensor(value)
        live["now"] += gathered.nbytes
        live["max"] = max(live["max"], live["now"])
        weakref.finalize(gathered, lambda size: live.update(now=live["now"] - size), gathered.nbytes)
        return gathered

    with mock.patch.object(checkpoint_io, "gather_tensor", gather_and_count):
        checkpoint_io.write_weights(model, out, shard_bytes=SHARD_BYTES)
        sizes = [sum(value.nbytes for value in values) for values in layers]
        copies = {name: value for layer in checkpoint_io.copy_layers_to_cpu(model) for name, value in layer.items()}
    assert all(torch.equal(value, load_weight(out, name)) for name, value in copies.items())
    return {**live, "copied": len(copies), "largest": max(sizes), "all": sum(sizes)}


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
