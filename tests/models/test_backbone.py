"""What the backbone can be set to: checkpointing, bfloat16, adapters, bounded passes. Each leaves the numbers alone."""

import asyncio
import importlib.util
import os
import shutil
import sys

import numpy as np
import pytest
import torch

from saccade.config import Model, Optim
from saccade.engines.local import local
from saccade.errors import ConfigError, ModelError
from saccade.ledger import Ledger, Picture
from saccade.model import backbone as backbone_module
from saccade.model.backbone import Backbone
from saccade.model.tiny import make_tiny
from saccade.training import step as step_module
from saccade.training.optim import Optimizer
from saccade.training.pack import pack
from saccade.training.step import forward, step
from saccade.types import Message, Sample, Sampling

needs_peft = pytest.mark.skipif(not importlib.util.find_spec("peft"), reason="peft is missing: pip install peft")


class Media:
    """Noise from a picture's number."""

    def pixels(self, picture: Picture) -> np.ndarray:
        rng = np.random.default_rng(int(picture.digest))
        return rng.integers(0, 256, (picture.height, picture.width, 3), dtype=np.uint8)


@pytest.fixture(scope="module", params=["qwen3_vl", "qwen2_5_vl"])
def folder(request, tmp_path_factory) -> str:
    path = str(tmp_path_factory.mktemp(request.param) / "model")
    make_tiny(path, family=request.param, seed=3)
    return path


def opened(folder, **changes) -> Backbone:
    return Backbone(Model(path=str(folder), threads=1, **changes))


def prompt(backbone: Backbone, group: int) -> Ledger:
    side = backbone.renderer.factor
    frames = [Picture(path="x", digest=str(group * 10 + n), time=1.0 * n, width=side, height=side) for n in range(4)]
    parts = [part for frame in frames for part in (f"<{frame.time} seconds>", frame)]
    segment = backbone.renderer.render(Ledger(), [Message(role="user", parts=(*parts, "When is red shown?"))])
    return Ledger().observe(segment.tokens, slots=segment.slots)


def batches_of(backbone: Backbone):
    rng = np.random.default_rng(0)
    samples = []
    for group in (0, 0, 1, 1):
        tokens = rng.integers(0, 250, 9).tolist()
        ledger = prompt(backbone, group).act(tokens, logprobs=[-1.0] * 9, version=0)
        value = float(rng.normal())
        samples.append(Sample(ledger=ledger, advantages=tuple(value * sampled for sampled in ledger.mask())))
    return pack(samples, positions=backbone.renderer.positions, row_tokens=512, rows_per_pass=2)


def learn(backbone: Backbone):
    """The loss, the logprobs and the gradients of one backward pass in training mode."""
    backbone.model.train()
    backbone.model.zero_grad(set_to_none=True)
    total, logps = 0.0, []
    for batch in batches_of(backbone):
        logp, _ = forward(backbone, batch, pixels=Media().pixels, temperature=0.7)
        loss = -(torch.from_numpy(batch.advantage_N) * logp).sum()
        loss.backward()
        total += float(loss.detach())
        logps.append(logp.detach())
    backbone.model.eval()
    grads = {name: p.grad.clone() for name, p in backbone.model.named_parameters() if p.grad is not None}
    return total, torch.cat(logps), grads


def same(one, two, tolerance=1e-5):
    assert abs(one[0] - two[0]) <= tolerance * max(1.0, abs(two[0]))
    assert (one[1] - two[1]).abs().max() <= tolerance
    assert one[2].keys() == two[2].keys()
    for name, grad in one[2].items():
        assert (grad - two[2][name]).abs().max() <= tolerance * max(1.0, float(two[2][name].abs().max())), name


def update(backbone: Backbone, times: int = 2, lr: float = 1e-2) -> Optimizer:
    optimizer = Optimizer(backbone.model, Optim(lr=lr), steps=times)

    def loss(batch, logp):
        return -(torch.from_numpy(batch.advantage_N) * logp).sum(), {"tokens": torch.tensor(float(len(logp)))}

    for _ in range(times):
        step(backbone, optimizer, batches_of(backbone), loss, pixels=Media().pixels)
    return optimizer


def logprobs(backbone: Backbone) -> torch.Tensor:
    with torch.no_grad():
        parts = [forward(backbone, batch, pixels=Media().pixels, temperature=1.0) for batch in batches_of(backbone)]
    return torch.cat([logp for logp, _ in parts])


# ---- what must not change the numbers ------------------------------------------------------------------------------


@pytest.mark.slow
def test_activation_checkpointing_changes_nothing_but_memory(folder, monkeypatch):
    ran = []
    real = torch.utils.checkpoint.checkpoint
    plain, saving = opened(folder), opened(folder, activation_checkpointing=True)
    for part in saving.model.modules():
        if "_gradient_checkpointing_func" in vars(part):
            counted = lambda *a, **k: ran.append(1) or real(*a, use_reentrant=False, **k)  # noqa: E731
            monkeypatch.setattr(part, "_gradient_checkpointing_func", counted)
    same(learn(saving), learn(plain))
    layers = len(saving.text.layers) + len(saving.model.model.visual.blocks)
    assert len(ran) == layers * len(batches_of(saving))


def test_an_engine_samples_the_same_with_checkpointing(folder):
    assert sample(opened(folder, activation_checkpointing=True)) == sample(opened(folder))


@pytest.mark.slow
def test_work_in_pieces_gives_the_same(folder, monkeypatch):
    backbone = opened(folder)
    whole = learn(backbone)
    monkeypatch.setattr(backbone_module, "QUERIES", 16)
    monkeypatch.setattr(backbone_module, "VISUAL_TOKENS", 3)
    monkeypatch.setattr(step_module, "LOGITS", 5 * backbone.vocabulary)
    passes = []
    look = backbone._look
    monkeypatch.setattr(backbone, "_look", lambda images: passes.append(len(images)) or look(images))
    same(learn(backbone), whole)
    assert max(passes) == 3


def test_a_model_in_memory_takes_the_place_of_the_folders(folder):
    plain = opened(folder)
    assert torch.equal(logprobs(Backbone(plain.settings, plain.model)), logprobs(opened(folder)))


# ---- bfloat16 ------------------------------------------------------------------------------------------------------


def sample(backbone: Backbone, tokens: int = 12):
    async def main():
        engine = local(backbone, Media())
        sampling = Sampling(max_tokens=tokens, seed=4, forbidden_ids=backbone.renderer.forbidden_ids)
        first = await engine.generate(prompt(backbone, 0), sampling)
        await engine.close()
        return first

    done = asyncio.run(main())
    return done.tokens, done.logprobs


@pytest.mark.slow
def test_bfloat16_samples_and_learns(folder):
    backbone, exact = opened(folder, dtype="bfloat16"), opened(folder)
    assert {p.dtype for p in backbone.model.parameters()} == {torch.bfloat16}
    assert {b.dtype for b in backbone.text.rotary_emb.buffers()} == {torch.float32}  # positions would be rounded
    tokens, ours = sample(backbone)
    ledger = prompt(backbone, 0).act(tokens, logprobs=ours, version=0)
    batches = pack(
        [Sample(ledger=ledger, advantages=(0.0,) * len(ledger))],
        positions=backbone.renderer.positions,
        row_tokens=512,
        rows_per_pass=1,
    )
    with torch.no_grad():
        logp, _ = forward(backbone, batches[0], pixels=Media().pixels, temperature=1.0)
        rounded = forward(exact, batches[0], pixels=Media().pixels, temperature=1.0)[0]
    assert (logp - torch.tensor(ours)).abs().max() < 0.02
    assert (logp - rounded).abs().max() < 0.05
    assert logp.dtype == torch.float32
    before = logprobs(backbone)
    update(backbone, lr=1e-3)
    assert (logprobs(backbone) - before).abs().max() > 1e-2


def test_small_steps_are_not_lost_to_bfloat16(folder):
    backbone = opened(folder, dtype="bfloat16")
    before = {name: p.detach().clone() for name, p in backbone.model.named_parameters()}
    optimizer = update(backbone, times=1, lr=1e-6)
    [*copies] = optimizer.state()["copies"]
    moved = [not torch.equal(copy, before[name].float()) for copy, name in zip(copies, before, strict=True)]
    assert sum(moved) > len(moved) / 2
    again = Optimizer(opened(folder, dtype="bfloat16").model, Optim(lr=1e-6), steps=1)
    again.restore(optimizer.state())
    assert all(torch.equal(one, two) for one, two in zip(again.state()["copies"], copies, strict=True))


# ---- adapters ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@needs_peft
def test_only_adapters_are_trained(folder):
    plain, backbone = opened(folder), opened(folder, lora_rank=4)
    assert torch.equal(logprobs(plain), logprobs(backbone))
    names = {name for name, p in backbone.model.named_parameters() if p.requires_grad}
    linear = sum(isinstance(part, torch.nn.Linear) for part in plain.text.modules())
    assert len(names) == 2 * linear
    assert all(".language_model." in name and ".lora_" in name for name in names)
    frozen = {name: p.detach().clone() for name, p in backbone.model.named_parameters() if name not in names}
    optimizer = update(backbone)
    assert sum(len(group["params"]) for part in optimizer._parts for group in part.param_groups) == len(names)
    assert all(torch.equal(p, frozen[name]) for name, p in backbone.model.named_parameters() if name in frozen)
    assert (logprobs(plain) - logprobs(backbone)).abs().max() > 1e-2


@pytest.mark.slow
@needs_peft
@pytest.mark.parametrize("tied", [True, False])
def test_a_saved_model_opens_without_its_adapters(tied, tmp_path):
    make_tiny(str(tmp_path / "model"), seed=4, tied=tied)
    backbone = opened(tmp_path / "model", lora_rank=4)
    update(backbone)
    backbone.save(tmp_path / "saved")
    merged = opened(tmp_path / "saved")
    assert (logprobs(merged) - logprobs(backbone)).abs().max() <= 1e-5
    assert merged.model.state_dict().keys() == opened(tmp_path / "model").model.state_dict().keys()
    assert sample(merged)[0] == sample(backbone)[0]


@pytest.mark.slow
def test_words_go_with_weights_and_the_index_of_other_files_does_not(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "model")
    opened(tmp_path / "model").model.save_pretrained(tmp_path / "model", max_shard_size="100KB")
    (tmp_path / "model" / "model.safetensors").unlink()
    assert (tmp_path / "model" / "model.safetensors.index.json").exists()
    backbone = opened(tmp_path / "model")
    backbone.save(tmp_path / "saved")
    assert sorted(os.listdir(tmp_path / "saved")) == sorted(os.listdir(folder))
    assert torch.equal(logprobs(opened(tmp_path / "saved")), logprobs(backbone))


@pytest.mark.slow
@needs_peft
def test_a_moved_run_finds_its_own_base(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "run" / "model")
    first = opened(tmp_path / "run" / "model", lora_rank=4, dtype="bfloat16")
    update(first)
    first.save(tmp_path / "run" / "rl" / "step")
    shutil.move(tmp_path / "run", tmp_path / "moved")
    again = opened(tmp_path / "moved" / "rl" / "step", lora_rank=4, dtype="bfloat16")
    ours, theirs = first.model.state_dict(), again.model.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.slow
@needs_peft
def test_training_goes_on_from_saved_adapters(folder, tmp_path):
    backbone = opened(folder, lora_rank=4)
    update(backbone)
    backbone.save(tmp_path / "saved")
    again = opened(tmp_path / "saved", lora_rank=4)
    assert (logprobs(again) - logprobs(backbone)).abs().max() <= 1e-5
    ours, theirs = backbone.model.state_dict(), again.model.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    with pytest.raises(ModelError, match=r"another rank than model\.lora_rank"):
        opened(tmp_path / "saved", lora_rank=8)


@pytest.mark.slow
@needs_peft
@pytest.mark.parametrize("base", ["gone", "other", "kept"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapted_weights_are_those_of_the_base_while_it_is_there(folder, tmp_path, base, dtype):
    """Through a chain of checkpoints; without the base, or with other weights in its place, they are recovered."""
    shutil.copytree(folder, tmp_path / "base")
    first = opened(tmp_path / "base", lora_rank=4, dtype=dtype)
    update(first)
    first.save(tmp_path / "one")
    opened(tmp_path / "one", lora_rank=4, dtype=dtype).save(tmp_path / "two")
    if base == "gone":
        shutil.rmtree(tmp_path / "base")
    if base == "other":
        make_tiny(str(tmp_path / "base"), seed=99)
    again = opened(tmp_path / "two", lora_rank=4, dtype=dtype)
    ours, theirs = first.model.state_dict(), again.model.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours if "base_layer" not in name)
    equal = [torch.equal(ours[name], theirs[name]) for name in ours if "base_layer" in name]
    assert all(equal) if base == "kept" else not all(equal)
    assert (logprobs(again) - logprobs(first)).abs().max() <= (1e-5 if dtype == "float32" else 0.2)


@pytest.mark.slow
@needs_peft
def test_adapters_and_checkpointing_go_together_in_bfloat16(folder):
    backbone = opened(folder, lora_rank=4, activation_checkpointing=True, dtype="bfloat16")
    before = logprobs(backbone)
    update(backbone)
    assert (logprobs(backbone) - before).abs().max() > 1e-2
    assert {p.dtype for p in backbone.parameters} == {torch.bfloat16}
    same(learn(opened(folder, lora_rank=4, activation_checkpointing=True)), learn(opened(folder, lora_rank=4)))


def test_without_peft_the_error_names_the_extra(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match=r"lora_rank needs the package peft: pip install 'saccade\[lora\]'"):
        opened(folder, lora_rank=4)
