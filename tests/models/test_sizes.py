"""Model sizes against real models, and against numbers worked out by hand."""

import copy

import pytest
import torch
from error_cases import raises

from saccade.checks.estimates import resolve_model_sizes
from saccade.config.load import load_recipe
from saccade.config.schema import ModelConfig, OptimizerConfig
from saccade.data.dataset import write_items
from saccade.errors import ConfigError, ModelError
from saccade.ledger import ImageRef
from saccade.models.config_sizes import PUBLISHED_MODELS, compute_published_sizes, compute_tiny_sizes, read_sizes
from saccade.models.model_sizes import get_published_sizes, get_tiny_sizes
from saccade.models.tiny import FAMILIES, make_tiny_model
from saccade.models.vlm import VisionLanguageModel
from saccade.runs import pipeline
from saccade.testing import FakeMediaLoader
from saccade.training.optimizer import Optimizer
from saccade.types import AnswerType, Demonstration, Task

# Parameters of the published checkpoints in billions, to one decimal.
BILLIONS = {
    "Qwen3-VL-2B-Instruct": 2.1,
    "Qwen3-VL-4B-Instruct": 4.4,
    "Qwen3-VL-8B-Instruct": 8.8,
    "Qwen3-VL-32B-Instruct": 33.4,
    "Qwen2.5-VL-3B-Instruct": 3.8,
    "Qwen2.5-VL-7B-Instruct": 8.3,
}


def make(folder, family, **changes):
    make_tiny_model(str(folder), family=family, **{"hidden_size": 64, "num_layers": 2, **changes})
    return str(folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED_MODELS)
def test_published_models_have_their_known_parameter_counts(name):
    assert compute_published_sizes(name).num_parameters / 1e9 == pytest.approx(BILLIONS[name], abs=0.05)


@pytest.mark.slow
def test_known_sizes_are_those_of_transformers():
    # After a change run scripts/generate_sizes.py.
    assert {name: get_published_sizes(name) for name in PUBLISHED_MODELS} == {
        name: compute_published_sizes(name) for name in PUBLISHED_MODELS
    }
    assert {name: get_tiny_sizes(name) for name in FAMILIES} == {name: compute_tiny_sizes(name) for name in FAMILIES}


def test_qwen3_vl_8b_by_hand():
    sizes = get_published_sizes("Qwen3-VL-8B-Instruct")
    # 36 layers: q and o 4096 x 4096, k and v 4096 x 1024, MLP 3 x 4096 x 12288, norms 2 x 4096 + 2 x 128
    layer = 2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 12288 + 2 * 4096 + 2 * 128
    text = 36 * layer + 2 * 151936 * 4096 + 4096
    # 27 blocks of the tower: attention 4 x 1152^2, MLP 2 x 1152 x 4304, their biases, two norms with biases
    block = 4 * 1152**2 + 2 * 1152 * 4304 + (4 * 1152 + 4304 + 1152) + 4 * 1152
    patches = 1152 * (3 * 2 * 16 * 16) + 1152 + 2304 * 1152
    merger = 4608 * 4608 + 4608 + 4608 * 4096 + 4096
    tower = 27 * block + patches + (merger + 2 * 1152) + 3 * (merger + 2 * 4608)
    assert sizes.num_parameters == text + tower == 8_767_123_696
    assert sizes.compute_kv_bytes(2) == 2 * 36 * 8 * 128 * 2 == 147_456
    assert sizes.factor == 32
    # on every layer: q and o 4096 + 4096, k and v 4096 + 1024, gate, up and down 4096 + 12288
    assert sizes.count_adapter_parameters(64) == 36 * 64 * (2 * 8192 + 2 * 5120 + 3 * 16384)


def test_other_families_have_other_patch_sizes():
    assert get_published_sizes("Qwen2.5-VL-7B-Instruct").factor == 28
    assert get_published_sizes("Qwen2.5-VL-7B-Instruct").compute_kv_bytes(2) == 2 * 28 * 4 * 128 * 2


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl"])
@pytest.mark.parametrize("tied", [True, False])
def test_sizes_of_a_folder_are_exact(tmp_path, family, tied):
    vlm = VisionLanguageModel(ModelConfig(path=make(tmp_path, family, tie_word_embeddings=tied)))
    sizes = read_sizes(str(tmp_path))
    assert sizes.num_parameters == sum(parameter.numel() for parameter in vlm.trainable_parameters)
    assert sizes.factor == vlm.renderer.factor
    layers, heads, width = vlm.kv_cache_shape
    assert sizes.compute_kv_bytes(4) == 2 * layers * heads * width * 4
    assert sizes.vocab_size == vlm.model.lm_head.out_features


def test_sizes_of_the_demos_model_match_make_tiny_model(tmp_path):
    make_tiny_model(str(tmp_path))
    made, computed = read_sizes(str(tmp_path)), get_tiny_sizes("qwen3_vl")
    # Only the vocabularies differ: one row of 128 numbers per token.
    assert made.num_parameters - computed.num_parameters == 128 * (made.vocab_size - computed.vocab_size)


def test_a_recipe_sets_the_size_of_its_tiny_model(tmp_path):
    recipe = load_recipe("tiny/quick", ["synthetic.model.hidden_size=64", "synthetic.model.num_layers=2"])
    task = Task(id="a", question="Which color?", media=(), answer_type=AnswerType.OPEN, ground_truth="red")
    write_items(tmp_path / "demonstrations.jsonl", [Demonstration(task=task, frame_budget=4, replies=("red",))])
    pipeline.create_tiny_model(tmp_path / "model", recipe, demonstrations=tmp_path / "demonstrations.jsonl")
    made, planned = read_sizes(str(tmp_path / "model")), resolve_model_sizes(recipe)
    assert (made.hidden_size, made.num_layers) == (planned.hidden_size, planned.num_layers) == (64, 2)
    assert made.num_parameters - planned.num_parameters == 64 * (made.vocab_size - planned.vocab_size)


def test_the_default_size_of_a_tiny_model_is_that_of_the_known_sizes():
    recipe = load_recipe("tiny/quick")
    sizes = get_tiny_sizes("qwen3_vl")
    assert resolve_model_sizes(recipe) == sizes
    assert recipe.synthetic.model.model_dump() == {"hidden_size": sizes.hidden_size, "num_layers": sizes.num_layers}


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_moment_counts_match_the_optimizer(tmp_path, name):
    vlm = VisionLanguageModel(ModelConfig(path=make(tmp_path, "qwen3_vl")))
    optimizer = Optimizer(vlm.model, OptimizerConfig(name=name), 1)
    for parameter in vlm.trainable_parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    states = [state for part in optimizer.state_dict()["optimizers"] for state in part["state"].values()]
    held = sum(value.numel() for state in states for value in state.values() if value.ndim)
    sizes = read_sizes(str(tmp_path))
    assert held == 2 * sizes.num_parameters - (sizes.num_matrix_parameters if name == "muon" else 0)


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl"])
def test_a_frozen_vision_tower_is_counted_exactly(tmp_path, family):
    settings = ModelConfig(path=make(tmp_path, family), trained_weights="language_model")
    vlm, sizes = VisionLanguageModel(settings), read_sizes(str(tmp_path))
    trained = {name: value for name, value in vlm.model.named_parameters() if value.requires_grad}
    assert not any(".visual." in name for name in trained)
    assert any("lm_head" in name or "embed_tokens" in name for name in trained)
    matrices = [value for name, value in trained.items() if ".layers." in name and value.ndim == 2]
    assert sizes.count_trained_parameters(settings) == tuple(
        sum(value.numel() for value in values) for values in (trained.values(), matrices)
    )
    assert sizes.count_trained_parameters(ModelConfig()) == (sizes.num_parameters, sizes.num_matrix_parameters)


@pytest.mark.slow
def test_adapters_are_counted_exactly(tmp_path):
    pytest.importorskip("peft", reason="peft is missing: pip install peft")
    vlm = VisionLanguageModel(ModelConfig(path=make(tmp_path, "qwen3_vl"), lora_rank=4))
    assert read_sizes(str(tmp_path)).count_adapter_parameters(4) == sum(
        parameter.numel() for parameter in vlm.trainable_parameters
    )


# ---- saved tensors of autograd ---------------------------------------------------------------------------------------


def count_saved_bytes(vlm, work):
    """Return the bytes that autograd saves for `work`, without parameters."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in vlm.model.parameters()}
    held = {}

    def keep(tensor):
        held[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    vlm.model.train()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = work()
    assert result is not None
    return sum(tensor.untyped_storage().nbytes() for pointer, tensor in held.items() if pointer not in weights)


def forward(vlm, T):
    ids, positions = torch.randint(0, 50, (1, T)), torch.arange(T).expand(3, 1, T)
    return lambda: vlm.policy.compute_hidden_states(ids, positions, torch.ones(1, T, T, dtype=torch.bool).tril())


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl"])
@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2)])
def test_text_activation_bytes_match_autograd(tmp_path, family, dtype, size):
    T, saved_bytes = 256, []
    for layers in (1, 3):
        folder = make(tmp_path / str(layers), family, num_layers=layers, hidden_size=128)
        vlm = VisionLanguageModel(ModelConfig(path=folder, dtype=dtype))
        saved_bytes.append(count_saved_bytes(vlm, forward(vlm, T)))
    # In addition there are the mask, and a few numbers per token and head.
    expected = read_sizes(folder).compute_text_activation_bytes(size) * T + size * T * T
    assert (saved_bytes[1] - saved_bytes[0]) / 2 == pytest.approx(expected, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl"])
def test_a_checkpointed_layer_keeps_its_input(tmp_path, family):
    T, saved_bytes = 64, []
    for layers in (1, 3):
        vlm = VisionLanguageModel(
            ModelConfig(path=make(tmp_path / str(layers), family, num_layers=layers), activation_checkpointing=True)
        )
        saved_bytes.append(count_saved_bytes(vlm, forward(vlm, T)))
    assert (saved_bytes[1] - saved_bytes[0]) / 2 == 4 * 64 * T


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl"])
@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2)])
def test_vision_activation_bytes_match_autograd(tmp_path, family, dtype, size):
    folder = make(tmp_path, family)
    vlm = VisionLanguageModel(ModelConfig(path=folder, dtype=dtype))
    frames = [ImageRef(path="v", digest=str(index), time=0.0, width=128, height=128) for index in range(4)]
    before = count_saved_bytes(vlm, lambda: vlm.encode_images(frames, FakeMediaLoader().load_pixels))
    blocks = vlm.model.model.visual.blocks
    blocks.append(copy.deepcopy(blocks[0]))
    after = count_saved_bytes(vlm, lambda: vlm.encode_images(frames, FakeMediaLoader().load_pixels))
    patches = 4 * 16 * 16  # of 8 x 8 pixels
    assert after - before == pytest.approx(read_sizes(folder).compute_vision_activation_bytes(size) * patches, rel=0.02)


# ---- errors ----------------------------------------------------------------------------------------------------------


def test_unknown_models_are_refused(tmp_path):
    with raises(ConfigError, key="model.memory_plan_model", value="Qwen3-VL-8B") as caught:
        get_published_sizes("Qwen3-VL-8B")
    assert "'Qwen3-VL-8B-Instruct'" in str(caught.value)
    with raises(ModelError, key="family", value="nothing"):
        get_tiny_sizes("nothing")
    with raises(ModelError):
        read_sizes(str(tmp_path))
