"""One of two processes among which a model's weights are divided (FSDP2): `divided.py RANK MODEL OUT STORE LORA_RANK`.

Writes the weights to OUT a layer at a time and copies them, and says as JSON how many bytes were whole at once, and
those of a layer.
"""

import json
import sys
import weakref
from pathlib import Path

import torch
from safetensors import safe_open
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForImageTextToText

from saccade.model import _adapters, layerwise

FILE = 100_000  # bytes


def opened(model: str, lora_rank: int):
    """The model, with adapters that say something."""
    found = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32)
    if lora_rank:
        _adapters.attach(found, found.model.language_model, lora_rank)
        torch.manual_seed(7)
        for value in _adapters.adapters(found).values():
            value.add_(torch.randn_like(value))
    return found


def load(folder: str, name: str) -> torch.Tensor:
    """A weight that was written."""
    places = json.loads((Path(folder) / "model.safetensors.index.json").read_text())["weight_map"]
    with safe_open(Path(folder) / places[name], framework="pt") as file:
        return file.get_tensor(name)


def main(rank: int, path: str, out: str, store: str, lora_rank: int) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    model = opened(path, lora_rank)
    mesh = init_device_mesh("cpu", (2,))
    for layer in (*model.model.language_model.layers, *model.model.visual.blocks, model):
        fully_shard(layer, mesh=mesh)
    model(input_ids=torch.tensor([[1, 2, 3]]))  # its root stays whole after a pass
    parts = [each.parts.values() for each in layerwise.layers(model)]
    assert all(isinstance(value, layerwise.DTensor) for values in parts for value in values)

    live, whole = {"now": 0, "most": 0}, layerwise.whole

    def counted(value):
        found = whole(value)
        live["now"] += found.nbytes
        live["most"] = max(live["most"], live["now"])
        weakref.finalize(found, lambda size: live.update(now=live["now"] - size), found.nbytes)
        return found

    layerwise.whole = counted
    layerwise.write(model, Path(out), file=FILE)
    sizes = [sum(value.nbytes for value in values) for values in parts]
    copies = {name: value for each in layerwise.copied(model) for name, value in each.items()}
    assert all(torch.equal(value, load(out, name)) for name, value in copies.items())
    print(json.dumps({**live, "copied": len(copies), "largest": max(sizes), "all": sum(sizes)}))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:5], int(sys.argv[5]))
