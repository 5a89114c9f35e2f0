"""How large a model is: against the real one, and against numbers worked out by hand."""

import copy

import pytest
import torch

from saccade.config import Model, Optim
from saccade.errors import ConfigError, ModelError
from saccade.ledger import Picture
from saccade.model.backbone import Backbone
from saccade.model.sizes import PUBLISHED, published_sizes, read_sizes, tiny_sizes
from saccade.model.tiny import make_tiny
from saccade.testing import PaintedMedia
from saccade.training.optim import Optimizer

# What the published checkpoints hold, to a tenth of a billion.
BILLIONS = {
    "Qwen3-VL-2B-Instruct": 2.1,
    "Qwen3-VL-4B-Instruct": 4.4,
    "Qwen3-VL-8B-Instruct": 8.8,
    "Qwen3-VL-32B-Instruct": 33.4,
    "Qwen2.5-VL-3B-Instruct": 3.8,
    "Qwen2.5-VL-7B-Instruct": 8.3,
}


def make(folder, family, **changes):
    make_tiny(str(folder), family=family, **{"hidden": 64, "layers": 2, **changes})
    return str(folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_the_parameters_they_are_known_for(name):
    assert published_sizes(name).parameters / 1e9 == pytest.approx(BILLIONS[name], abs=0.05)


def test_qwen3_vl_8b_by_hand():
    found = published_sizes("Qwen3-VL-8B-Instruct")
    # 36 layers: q and o 4096 x 4096, k and v 4096 x 1024, MLP 3 x 4096 x 12288, norms 2 x 4096 + 2 x 128
    layer = 2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 12288 + 2 * 4096 + 2 * 128
    text = 36 * layer + 2 * 151936 * 4096 + 4096
    # 27 blocks of the tower: attention 4 x 1152^2, MLP 2 x 1152 x 4304, their biases, two norms with biases
    block = 4 * 1152**2 + 2 * 1152 * 4304 + (4 * 1152 + 4304 + 1152) + 4 * 1152
    patches = 1152 * (3 * 2 * 16 * 16) + 1152 + 2304 * 1152
    merger = 4608 * 4608 + 4608 + 4608 * 4096 + 4096
    tower = 27 * block + patches + (merger + 2 * 1152) + 3 * (merger + 2 * 4608)
    assert found.parameters == text + tower == 8_767_123_696
    assert found.key_values(2) == 2 * 36 * 8 * 128 * 2 == 147_456
    assert found.factor == 32
    # on every layer: q and o 4096 + 4096, k and v 4096 + 1024, gate, up and down 4096 + 12288
    assert found.adapters(64) == 36 * 64 * (2 * 8192 + 2 * 5120 + 3 * 16384)


def test_other_families_see_other_patches():
    assert published_sizes("Qwen2.5-VL-7B-Instruct").factor == 28
    assert published_sizes("Qwen2.5-VL-7B-Instruct").key_values(2) == 2 * 28 * 4 * 128 * 2


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_folder_is_counted_exactly(tmp_path, family, tied):
    backbone = Backbone(Model(path=make(tmp_path, family, tied=tied)))
    found = read_sizes(str(tmp_path))
    assert found.parameters == sum(parameter.numel() for parameter in backbone.parameters)
    assert found.factor == backbone.renderer.factor
    layers, heads, width = backbone.cache_shape
    assert found.key_values(4) == 2 * layers * heads * width * 4
    assert found.vocabulary == backbone.vocabulary


def test_what_the_demo_makes_is_what_make_tiny_makes(tmp_path):
    make_tiny(str(tmp_path))
    made, told = read_sizes(str(tmp_path)), tiny_sizes("qwen3_vl")
    # They differ by their words alone: one row of 128 numbers for each.
    assert made.parameters - told.parameters == 128 * (made.vocabulary - told.vocabulary)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_moments_are_the_optimisers_own(tmp_path, name):
    backbone = Backbone(Model(path=make(tmp_path, "qwen3_vl")))
    optimizer = Optimizer(backbone.model, Optim(name=name), 1)
    for parameter in backbone.parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    states = [state for part in optimizer.state()["parts"] for state in part["state"].values()]
    held = sum(value.numel() for state in states for value in state.values() if value.ndim)
    found = read_sizes(str(tmp_path))
    assert held == 2 * found.parameters - (found.matrices if name == "muon" else 0)


def test_adapters_are_counted_exactly(tmp_path):
    pytest.importorskip("peft", reason="peft is missing: pip install peft")
    backbone = Backbone(Model(path=make(tmp_path, "qwen3_vl"), lora_rank=4))
    assert read_sizes(str(tmp_path)).adapters(4) == sum(parameter.numel() for parameter in backbone.parameters)


# ---- what autograd keeps -------------------------------------------------------------------------------------------


def saved(backbone, work):
    """Bytes that autograd keeps of `work`, but for the parameters."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in backbone.model.parameters()}
    held = {}

    def keep(tensor):
        held[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    backbone.model.train()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = work()
    assert result is not None
    return sum(tensor.untyped_storage().nbytes() for place, tensor in held.items() if place not in weights)


def read(backbone, T):
    ids, positions = torch.randint(0, 50, (1, T)), torch.arange(T).expand(3, 1, T)
    return lambda: backbone.hidden(ids, positions, torch.ones(1, T, T, dtype=torch.bool).tril())


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl"])
@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2)])
def test_a_layer_keeps_what_is_said(tmp_path, family, dtype, size):
    T, kept = 256, []
    for layers in (1, 3):
        folder = make(tmp_path / str(layers), family, layers=layers, hidden=128)
        backbone = Backbone(Model(path=folder, dtype=dtype))
        kept.append(saved(backbone, read(backbone, T)))
    # Beside what is said there is the mask, as numbers, and a few numbers per token and head.
    said = read_sizes(folder).saved_text(size) * T + size * T * T
    assert (kept[1] - kept[0]) / 2 == pytest.approx(said, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl"])
def test_a_checkpointed_layer_keeps_its_input(tmp_path, family):
    T, kept = 64, []
    for layers in (1, 3):
        backbone = Backbone(
            Model(path=make(tmp_path / str(layers), family, layers=layers), activation_checkpointing=True)
        )
        kept.append(saved(backbone, read(backbone, T)))
    assert (kept[1] - kept[0]) / 2 == 4 * 64 * T


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl"])
@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2)])
def test_a_block_of_the_tower_keeps_what_is_said(tmp_path, family, dtype, size):
    folder = make(tmp_path, family)
    backbone = Backbone(Model(path=folder, dtype=dtype))
    frames = [Picture(path="v", digest=str(at), time=0.0, width=128, height=128) for at in range(4)]
    before = saved(backbone, lambda: backbone.features(frames, PaintedMedia().pixels))
    blocks = backbone.model.model.visual.blocks
    blocks.append(copy.deepcopy(blocks[0]))
    after = saved(backbone, lambda: backbone.features(frames, PaintedMedia().pixels))
    patches = 4 * 16 * 16  # of 8 x 8 pixels
    assert after - before == pytest.approx(read_sizes(folder).saved_vision(size) * patches, rel=0.02)


# ---- what can't be counted -----------------------------------------------------------------------------------------


def test_unknown_models_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"did you mean 'Qwen3-VL-8B-Instruct'"):
        published_sizes("Qwen3-VL-8B")
    with pytest.raises(ModelError, match="no tiny model of the family 'nothing'"):
        tiny_sizes("nothing")
    with pytest.raises(ModelError, match="can't be read as a model"):
        read_sizes(str(tmp_path))
