"""Settings of the model that must not change the numbers: checkpointing, bfloat16, adapters, chunked passes."""

import asyncio
import importlib.util
import logging
import os
import shutil
import sys

import numpy as np
import pytest
import torch
from error_cases import raises
from safetensors.torch import load_file, save_file

from saccade.config.schema import ModelConfig, OptimizerConfig
from saccade.engines.local import Local
from saccade.errors import ConfigError, ModelError
from saccade.ledger import ImageRef, Ledger
from saccade.models import policy as policy_module
from saccade.models import vlm as vlm_module
from saccade.models.tiny import make_tiny_model
from saccade.models.vlm import VisionLanguageModel
from saccade.training.optimizer import Optimizer
from saccade.training.packing import pack
from saccade.training.train_step import forward, train_step
from saccade.types import GenerationRequest, Message, SamplingParams, TrainingSample

needs_peft = pytest.mark.skipif(not importlib.util.find_spec("peft"), reason="peft is missing: pip install peft")


class Media:
    """Noise seeded by the image's digest."""

    def load_pixels(self, image: ImageRef) -> np.ndarray:
        rng = np.random.default_rng(int(image.digest))
        return rng.integers(0, 256, (image.height, image.width, 3), dtype=np.uint8)

    def load_all_pixels(self, images):
        return {image.key: self.load_pixels(image) for image in images}


@pytest.fixture(scope="module", params=["qwen3_vl", "qwen2_5_vl"])
def folder(request, tmp_path_factory) -> str:
    path = str(tmp_path_factory.mktemp(request.param) / "model")
    make_tiny_model(path, family=request.param, seed=3)
    return path


def load_vlm(folder, **changes) -> VisionLanguageModel:
    return VisionLanguageModel(ModelConfig(path=str(folder), num_threads=1, **changes))


def prompt(vlm: VisionLanguageModel, group: int) -> Ledger:
    side = vlm.renderer.factor
    frames = [ImageRef(path="x", digest=str(group * 10 + n), time=1.0 * n, width=side, height=side) for n in range(4)]
    parts = [part for frame in frames for part in (f"<{frame.time} seconds>", frame)]
    segment = vlm.renderer.render(Ledger(), [Message(role="user", parts=(*parts, "When is red shown?"))])
    return Ledger().observe(segment.tokens, slots=segment.slots)


def batches_of(vlm: VisionLanguageModel):
    rng = np.random.default_rng(0)
    samples = []
    for group in (0, 0, 1, 1):
        tokens = rng.integers(0, 250, 9).tolist()
        ledger = prompt(vlm, group).append_completion(tokens, logprobs=[-1.0] * 9, version=0)
        value = float(rng.normal())
        samples.append(
            TrainingSample(ledger=ledger, advantages=tuple(value * sampled for sampled in ledger.loss_mask()))
        )
    return pack(samples, compute_positions=vlm.renderer.compute_position_ids, pack_length=512, micro_batch_size=2)


def compute_gradients(vlm: VisionLanguageModel):
    """Return the loss, the logprobs and the gradients of one backward pass in training mode."""
    vlm.model.train()
    vlm.model.zero_grad(set_to_none=True)
    total, logps = 0.0, []
    for batch in batches_of(vlm):
        logp, _ = forward(vlm, batch, load_pixels=Media().load_pixels, temperature=0.7)
        loss = -(torch.from_numpy(batch.advantage_N) * logp).sum()
        loss.backward()
        total += float(loss.detach())
        logps.append(logp.detach())
    vlm.model.eval()
    grads = {name: p.grad.clone() for name, p in vlm.model.named_parameters() if p.grad is not None}
    return total, torch.cat(logps), grads


def assert_same(first, second, tolerance=1e-5):
    assert abs(first[0] - second[0]) <= tolerance * max(1.0, abs(second[0]))
    assert (first[1] - second[1]).abs().max() <= tolerance
    assert first[2].keys() == second[2].keys()
    for name, grad in first[2].items():
        assert (grad - second[2][name]).abs().max() <= tolerance * max(1.0, float(second[2][name].abs().max())), name


def update(vlm: VisionLanguageModel, times: int = 2, lr: float = 1e-2) -> Optimizer:
    optimizer = Optimizer(vlm.model, OptimizerConfig(lr=lr), num_steps=times)

    def loss(batch, logp):
        return -(torch.from_numpy(batch.advantage_N) * logp).sum(), {"tokens": torch.tensor(float(len(logp)))}

    for _ in range(times):
        train_step(vlm, optimizer, batches_of(vlm), loss, load_all_pixels=Media().load_all_pixels)
    return optimizer


def logprobs(vlm: VisionLanguageModel) -> torch.Tensor:
    with torch.no_grad():
        parts = [forward(vlm, batch, load_pixels=Media().load_pixels, temperature=1.0) for batch in batches_of(vlm)]
    return torch.cat([logp for logp, _ in parts])


# ---- settings that must not change the numbers -----------------------------------------------------------------------


@pytest.mark.slow
def test_activation_checkpointing_changes_only_memory(folder, monkeypatch):
    calls = []
    checkpoint = torch.utils.checkpoint.checkpoint
    plain, checkpointed = load_vlm(folder), load_vlm(folder, activation_checkpointing=True)
    for part in checkpointed.model.modules():
        if "_gradient_checkpointing_func" in vars(part):
            counted = lambda *a, **k: calls.append(1) or checkpoint(*a, use_reentrant=False, **k)  # noqa: E731
            monkeypatch.setattr(part, "_gradient_checkpointing_func", counted)
    assert_same(compute_gradients(checkpointed), compute_gradients(plain))
    layers = len(checkpointed.language_model.layers) + len(checkpointed.model.model.visual.blocks)
    assert len(calls) == layers * len(batches_of(checkpointed))


@pytest.mark.slow
def test_an_engine_samples_the_same_with_checkpointing(folder):
    assert sample(load_vlm(folder, activation_checkpointing=True)) == sample(load_vlm(folder))


@pytest.mark.slow
def test_chunked_computation_gives_the_same(folder, monkeypatch):
    vlm = load_vlm(folder)
    reference = compute_gradients(vlm)
    monkeypatch.setattr(vlm_module, "MAX_ATTENTION_QUERIES", 16)
    monkeypatch.setattr(vlm_module, "MAX_VISION_TOKENS", 3)
    monkeypatch.setattr(policy_module, "MAX_LOGITS_PER_CHUNK", 5 * vlm.model.lm_head.out_features)
    passes = []
    encode_patches = vlm.policy.encode_patches
    monkeypatch.setattr(
        vlm.policy,
        "encode_patches",
        lambda patches, grids: passes.append(len(grids)) or encode_patches(patches, grids),
    )
    assert_same(compute_gradients(vlm), reference)
    assert max(passes) == 3


@pytest.mark.parametrize("is_joined", [False, True])
def test_deepstack_features_are_those_of_every_version_of_transformers(tmp_path, monkeypatch, is_joined):
    """Versions differ in whether a layer's features are one tensor or one per image."""
    make_tiny_model(tmp_path / "model")
    vlm, media = load_vlm(tmp_path / "model"), Media()
    images = [ImageRef(path="", digest=str(i), time=None, width=side, height=side) for i, side in enumerate((32, 64))]
    expected = vlm.encode_images(images, media.load_pixels)
    get_image_features = vlm.model.model.get_image_features

    def convert(*arguments, **options):
        out = get_image_features(*arguments, **options)
        joined = [layer if torch.is_tensor(layer) else torch.cat(tuple(layer)) for layer in out.deepstack_features]
        lengths = [len(tokens) for tokens in out.pooler_output]
        out.deepstack_features = joined if is_joined else [torch.split(layer, lengths) for layer in joined]
        return out

    monkeypatch.setattr(vlm.model.model, "get_image_features", convert)
    for before, after in zip(expected, vlm.encode_images(images, media.load_pixels), strict=True):
        assert len(before.deepstack) == 2
        assert all(map(torch.equal, before.deepstack, after.deepstack))


@pytest.mark.slow
def test_a_model_in_memory_replaces_the_folders_weights(folder):
    plain = load_vlm(folder)
    assert torch.equal(logprobs(VisionLanguageModel(plain.settings, plain.model)), logprobs(load_vlm(folder)))


# ---- bfloat16 ------------------------------------------------------------------------------------------------------


def copy_with_weights(folder, copy, change) -> str:
    """Copy a checkpoint, with `change` applied to its tensors by name."""
    shutil.copytree(folder, copy)
    weights = load_file(copy / "model.safetensors")
    change(weights)
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


@pytest.mark.slow
def test_missing_surplus_and_misshaped_tensors_are_named(folder, tmp_path, caplog):
    """transformers only logs them: it trains from random values where tensors are missing."""
    stored = load_file(f"{folder}/model.safetensors")
    weight, vision = (next(name for name in stored if part in name) for part in ("mlp.up_proj", "patch_embed"))

    without = copy_with_weights(
        folder, tmp_path / "without", lambda weights: [weights.pop(weight), weights.pop(vision)]
    )
    with raises(ModelError, key="model.path") as caught:
        load_vlm(without)
    assert len(caught.value.value) == 2
    assert [name.rsplit(".", 3)[1:] for name in caught.value.value] == [
        name.rsplit(".", 3)[1:] for name in sorted((weight, vision))
    ]

    misshaped = copy_with_weights(
        folder, tmp_path / "misshaped", lambda weights: weights.update({weight: weights[weight][:-1].clone()})
    )
    with raises(ModelError, key="model.path") as caught:
        load_vlm(misshaped)
    assert [name.rsplit(".", 3)[1:] for name in caught.value.value] == [weight.rsplit(".", 3)[1:]]

    as_integers = copy_with_weights(
        folder, tmp_path / "integers", lambda weights: weights.update({weight: weights[weight].to(torch.int8)})
    )
    with raises(ModelError, key="model.path", value=(weight,)):
        load_vlm(as_integers)

    extra = weight.replace("up_proj", "side_proj")
    with_extra = copy_with_weights(folder, tmp_path / "extra", lambda weights: weights.update({extra: torch.ones(2)}))
    with caplog.at_level(logging.WARNING):
        load_vlm(with_extra)
    (warning,) = caplog.records
    assert warning.name == "saccade"
    assert "side_proj" in warning.getMessage()

    adapter = weight.replace("up_proj.weight", "up_proj.lora_A.weight")
    unmerged = copy_with_weights(
        folder, tmp_path / "adapters", lambda weights: weights.update({adapter: torch.ones(2)})
    )
    with raises(ModelError, key="model.path") as caught:
        load_vlm(unmerged)
    assert len(caught.value.value) == 1


@pytest.mark.parametrize("tied", [True, False])
def test_a_missing_output_head_is_refused_unless_it_is_tied(tied, tmp_path):
    make_tiny_model(str(tmp_path / "model"), tie_word_embeddings=tied, num_layers=1)
    headless = copy_with_weights(
        tmp_path / "model", tmp_path / "headless", lambda weights: weights.pop("lm_head.weight", None)
    )
    if tied:
        load_vlm(headless)
        return
    with raises(ModelError, key="model.path", value=("lm_head.weight",)):
        load_vlm(headless)


def test_a_folder_with_adapters_of_peft_is_refused(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "model")
    (tmp_path / "model" / "adapter_config.json").write_text('{"base_model_name_or_path": "elsewhere"}')
    with raises(ModelError, key="model.path", value="adapter_config.json"):
        load_vlm(tmp_path / "model")


def sample(vlm: VisionLanguageModel, tokens: int = 12):
    async def main():
        engine = Local(vlm, Media())
        sampling = SamplingParams(max_tokens=tokens, seed=4, forbidden_ids=vlm.renderer.forbidden_ids)
        first = await engine.generate(GenerationRequest(prompt(vlm, 0), sampling))
        await engine.close()
        return first

    completion = asyncio.run(main())
    return completion.tokens, completion.logprobs


@pytest.mark.slow
def test_bfloat16_samples_and_learns(folder):
    vlm, exact = load_vlm(folder, dtype="bfloat16"), load_vlm(folder)
    assert {p.dtype for p in vlm.model.parameters()} == {torch.bfloat16}
    assert {b.dtype for b in vlm.language_model.rotary_emb.buffers()} == {
        torch.float32
    }  # in bfloat16 positions would be rounded
    tokens, ours = sample(vlm)
    ledger = prompt(vlm, 0).append_completion(tokens, logprobs=ours, version=0)
    batches = pack(
        [TrainingSample(ledger=ledger, advantages=(0.0,) * len(ledger))],
        compute_positions=vlm.renderer.compute_position_ids,
        pack_length=512,
        micro_batch_size=1,
    )
    with torch.no_grad():
        logp, _ = forward(vlm, batches[0], load_pixels=Media().load_pixels, temperature=1.0)
        rounded = forward(exact, batches[0], load_pixels=Media().load_pixels, temperature=1.0)[0]
    assert (logp - torch.tensor(ours)).abs().max() < 0.02
    assert (logp - rounded).abs().max() < 0.05
    assert logp.dtype == torch.float32
    before = logprobs(vlm)
    update(vlm, lr=1e-3)
    assert (logprobs(vlm) - before).abs().max() > 1e-2


@pytest.mark.slow
def test_small_updates_are_not_lost_in_bfloat16(folder):
    vlm = load_vlm(folder, dtype="bfloat16")
    before = {name: p.detach().clone() for name, p in vlm.model.named_parameters()}
    optimizer = update(vlm, times=1, lr=1e-6)
    [*copies] = optimizer.state_dict()["master_copies"]
    moved = [not torch.equal(copy, before[name].float()) for copy, name in zip(copies, before, strict=True)]
    assert sum(moved) > len(moved) / 2
    again = Optimizer(load_vlm(folder, dtype="bfloat16").model, OptimizerConfig(lr=1e-6), num_steps=1)
    again.load_state_dict(optimizer.state_dict())
    assert all(torch.equal(one, two) for one, two in zip(again.state_dict()["master_copies"], copies, strict=True))


# ---- adapters ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@needs_peft
def test_only_adapters_are_trained(folder):
    plain, vlm = load_vlm(folder), load_vlm(folder, lora_rank=4)
    assert torch.equal(logprobs(plain), logprobs(vlm))
    names = {name for name, p in vlm.model.named_parameters() if p.requires_grad}
    linear = sum(isinstance(part, torch.nn.Linear) for part in plain.language_model.modules())
    assert len(names) == 2 * linear
    assert all(".language_model." in name and ".lora_" in name for name in names)
    frozen = {name: p.detach().clone() for name, p in vlm.model.named_parameters() if name not in names}
    optimizer = update(vlm)
    assert sum(len(group["params"]) for part in optimizer.optimizers for group in part.param_groups) == len(names)
    assert all(torch.equal(p, frozen[name]) for name, p in vlm.model.named_parameters() if name in frozen)
    assert (logprobs(plain) - logprobs(vlm)).abs().max() > 1e-2


@pytest.mark.slow
@needs_peft
@pytest.mark.parametrize("tied", [True, False])
def test_a_saved_model_loads_without_adapters(tied, tmp_path):
    make_tiny_model(str(tmp_path / "model"), seed=4, tie_word_embeddings=tied)
    vlm = load_vlm(tmp_path / "model", lora_rank=4)
    update(vlm)
    vlm.save(tmp_path / "saved")
    merged = load_vlm(tmp_path / "saved")
    assert (logprobs(merged) - logprobs(vlm)).abs().max() <= 1e-5
    assert merged.model.state_dict().keys() == load_vlm(tmp_path / "model").model.state_dict().keys()
    assert sample(merged)[0] == sample(vlm)[0]


@pytest.mark.slow
def test_metadata_is_saved_and_an_outdated_index_is_not(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "model")
    load_vlm(tmp_path / "model").model.save_pretrained(tmp_path / "model", max_shard_size="100KB")
    (tmp_path / "model" / "model.safetensors").unlink()
    assert (tmp_path / "model" / "model.safetensors.index.json").exists()
    vlm = load_vlm(tmp_path / "model")
    vlm.save(tmp_path / "saved")
    assert sorted(os.listdir(tmp_path / "saved")) == sorted(os.listdir(folder))
    assert torch.equal(logprobs(load_vlm(tmp_path / "saved")), logprobs(vlm))


@pytest.mark.slow
@needs_peft
def test_a_moved_run_finds_its_base_weights(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "run" / "model")
    first = load_vlm(tmp_path / "run" / "model", lora_rank=4, dtype="bfloat16")
    update(first)
    first.save(tmp_path / "run" / "rl" / "step")
    shutil.move(tmp_path / "run", tmp_path / "moved")
    again = load_vlm(tmp_path / "moved" / "rl" / "step", lora_rank=4, dtype="bfloat16")
    ours, theirs = first.model.state_dict(), again.model.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.slow
@needs_peft
def test_training_continues_from_saved_adapters(folder, tmp_path):
    vlm = load_vlm(folder, lora_rank=4)
    update(vlm)
    vlm.save(tmp_path / "saved")
    again = load_vlm(tmp_path / "saved", lora_rank=4)
    assert (logprobs(again) - logprobs(vlm)).abs().max() <= 1e-5
    ours, theirs = vlm.model.state_dict(), again.model.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    with raises(ModelError, key="model.lora_rank"):
        load_vlm(tmp_path / "saved", lora_rank=8)
    file = tmp_path / "saved" / "adapters.safetensors"
    saved = load_file(file)
    name = next(iter(saved))
    for changed, named in (({**saved, "surplus.lora_A": saved[name].clone()}, "surplus.lora_A"), ({**saved}, name)):
        if named == name:
            del changed[name]
        save_file(changed, file)
        with raises(ModelError, key=str(file), value=(named,)):
            load_vlm(tmp_path / "saved", lora_rank=4)


@pytest.mark.slow
@needs_peft
@pytest.mark.parametrize("base", ["deleted", "changed", "unchanged"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_base_weights_are_exact_while_the_base_folder_exists(folder, tmp_path, base, dtype):
    """Through a chain of checkpoints; without the base, or if it changed, the weights are recovered from the merged."""
    shutil.copytree(folder, tmp_path / "base")
    first = load_vlm(tmp_path / "base", lora_rank=4, dtype=dtype)
    update(first)
    first.save(tmp_path / "one")
    load_vlm(tmp_path / "one", lora_rank=4, dtype=dtype).save(tmp_path / "two")
    if base == "deleted":
        shutil.rmtree(tmp_path / "base")
    if base == "changed":
        make_tiny_model(str(tmp_path / "base"), seed=99)
    again = load_vlm(tmp_path / "two", lora_rank=4, dtype=dtype)
    ours, theirs = first.model.state_dict(), again.model.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours if "base_layer" not in name)
    equal = [torch.equal(ours[name], theirs[name]) for name in ours if "base_layer" in name]
    assert all(equal) if base == "unchanged" else not all(equal)
    assert (logprobs(again) - logprobs(first)).abs().max() <= (1e-5 if dtype == "float32" else 0.2)


@pytest.mark.slow
@needs_peft
def test_adapters_and_checkpointing_combine_in_bfloat16(folder):
    vlm = load_vlm(folder, lora_rank=4, activation_checkpointing=True, dtype="bfloat16")
    before = logprobs(vlm)
    update(vlm)
    assert (logprobs(vlm) - before).abs().max() > 1e-2
    assert {p.dtype for p in vlm.trainable_parameters} == {torch.bfloat16}
    assert_same(
        compute_gradients(load_vlm(folder, lora_rank=4, activation_checkpointing=True)),
        compute_gradients(load_vlm(folder, lora_rank=4)),
    )


def test_lora_without_peft_raises(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with raises(ConfigError, key="model.lora_rank", value=4):
        load_vlm(folder, lora_rank=4)
