"""Memory of the local engine: no more than needed, and never beyond its limits."""

import asyncio
import importlib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from saccade.config.schema import ModelConfig
from saccade.engines import local as local_module
from saccade.engines._local.kv_cache import NO_PREFIX, CachedPrefix, KVCache, PrefixCache
from saccade.engines.local import Local
from saccade.ledger import ImageRef, Ledger
from saccade.models.attention import AttentionSpan
from saccade.models.policy import Policy
from saccade.models.vlm import VisionLanguageModel
from saccade.types import GenerationRequest, Message, SamplingParams


class Media:
    def load_pixels(self, image: ImageRef) -> np.ndarray:
        rng = np.random.default_rng(int(image.digest))
        return rng.integers(0, 256, (image.height, image.width, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def vlm(tiny_folder) -> VisionLanguageModel:
    return VisionLanguageModel(ModelConfig(path=tiny_folder, num_threads=1))


def prompts(vlm: VisionLanguageModel, count: int) -> list[Ledger]:
    side, ledgers = vlm.renderer.factor, []
    for number in range(count):
        frame = ImageRef(path="x", digest=str(number), time=1.0, width=side, height=side)
        segment = vlm.renderer.render(Ledger(), [Message(role="user", parts=(frame, f"{number} " * (number + 1)))])
        ledgers.append(Ledger().observe(segment.tokens, slots=segment.slots))
    return ledgers


def sample(vlm: VisionLanguageModel, ledgers: list[Ledger], **settings):
    """Sample all ledgers; return the tokens, the largest number of running rows, and the engine."""
    max_rows = []
    compute_logits = Policy.compute_logits

    def count_rows(self, hidden_BD):
        max_rows.append(len(hidden_BD))
        return compute_logits(self, hidden_BD)

    async def main():
        engine = Local(vlm, Media(), **settings)
        draws = [SamplingParams(max_tokens=12, seed=seed) for seed in range(len(ledgers))]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Policy, "compute_logits", count_rows)
            pairs = zip(ledgers, draws, strict=True)
            completions = await asyncio.gather(
                *(engine.generate(GenerationRequest(ledger, sampling)) for ledger, sampling in pairs)
            )
        return completions, engine

    completions, engine = asyncio.run(main())
    return [completion.tokens for completion in completions], max(max_rows), engine


@pytest.mark.slow
def test_running_rows_stay_within_kv_cache_tokens(vlm):
    ledgers = prompts(vlm, 6)
    free, max_rows, engine = sample(vlm, ledgers)
    assert max_rows == 6
    longest = max(map(len, ledgers)) + 12
    assert engine._kv_cache.data.shape[2] == 6
    assert engine._kv_cache.data.shape[4] <= longest * 1.25
    bounded, max_rows, engine = sample(vlm, ledgers, kv_cache_tokens=3 * longest)
    assert bounded == free
    assert 1 < max_rows <= 3 + 1  # shorter rows leave room for another
    alone, max_rows, _ = sample(vlm, ledgers, kv_cache_tokens=1)
    assert (alone, max_rows) == (free, 1)


def test_short_rows_make_room_for_long_ones(vlm):
    """Eight short conversations, then one that needs the whole KV cache, then eight short ones."""
    short, long = prompts(vlm, 8), prompts(vlm, 90)[-1]
    flight = max(len(long) + 40, 8 * (max(map(len, short)) + 12))

    async def main():
        engine = Local(vlm, Media(), kv_cache_tokens=flight)
        held = []
        for ledgers in (short, [long], short):
            draws = [SamplingParams(max_tokens=12, seed=seed) for seed in range(len(ledgers))]
            pairs = zip(ledgers, draws, strict=True)
            completions = await asyncio.gather(
                *(engine.generate(GenerationRequest(ledger, sampling)) for ledger, sampling in pairs)
            )
            held.append(([completion.tokens for completion in completions], engine._kv_cache.data.shape))
        return held

    held = asyncio.run(main())
    assert [shape[2] for _, shape in held] == [8, 1, 8]
    assert all(shape[2] * shape[4] <= flight for _, shape in held)
    assert held[0][0] == held[2][0] == sample(vlm, short)[0]
    assert held[1][0] == sample(vlm, [long])[0]


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 40)), min_size=1, max_size=12))
def test_the_kv_cache_holds_what_is_reserved_within_its_bound(reservations):
    max_positions, largest = 60, 0
    rows = KVCache(shape=(1, 1, 1), dtype=torch.float32, device=torch.device("cpu"), max_positions=max_positions)
    for count, capacity in reservations:
        before = rows.data.clone()
        rows.reserve(count, capacity)
        held, width = rows.data.shape[2], rows.data.shape[4]
        assert held >= count
        assert width >= capacity
        largest = max(largest, count * capacity)
        assert held * width <= max(max_positions, 1.25 * largest)
        common = min(count, before.shape[2]), min(capacity, before.shape[4])
        assert torch.equal(rows.data[:, :, : common[0], :, : common[1]], before[:, :, : common[0], :, : common[1]])
        rows.data.normal_()


def test_an_idle_engine_frees_a_large_cache(vlm, monkeypatch):
    ledgers = prompts(vlm, 3)
    before, _, engine = sample(vlm, ledgers)
    assert engine._kv_cache.data.nbytes > 0
    monkeypatch.setattr(local_module, "_MAX_IDLE_CACHE_BYTES", 1024)
    again, _, engine = sample(vlm, ledgers)
    assert engine._kv_cache.data.nbytes == 0
    assert again == before


def test_the_vision_cache_is_bounded_by_bytes(vlm):
    ledgers = prompts(vlm, 5)
    free, _, engine = sample(vlm, ledgers)
    size = engine._vision_cache.total_cost // 5
    assert size == vlm.encode_images(ledgers[0].images(), Media().load_pixels)[0].nbytes
    bounded, _, engine = sample(vlm, ledgers, vision_cache_bytes=2 * size)
    assert bounded == free
    assert engine._vision_cache.total_cost == 2 * size


def test_the_kv_cache_grows_in_both_dimensions_and_keeps_its_contents():
    rows = KVCache(shape=(2, 1, 4), dtype=torch.bfloat16, device=torch.device("cpu"))
    assert rows.data.nbytes == 0
    rows.reserve(2, 3)
    block = torch.randn(2, 2, 1, 3, 4).bfloat16()
    rows.load_row(1, [block])
    rows.reserve(3, 9)
    assert torch.equal(rows.copy_block(1, 0, 3), block)
    assert rows.lengths.tolist() == [0, 3, 0]
    assert not rows.data[:, :, 1, :, 3:].any()
    held = rows.data.shape
    rows.reserve(1, 1)
    assert rows.data.shape == held


def test_a_shared_block_counts_once_until_its_last_reference():
    blocks = [torch.zeros(1, 2, 1, size, 1) for size in (10, 3, 4, 6)]
    cache = PrefixCache(18)
    cache.put("prompt", CachedPrefix(blocks=(blocks[0],), num_tokens=10, last_hidden=None))
    cache.put("a", CachedPrefix(blocks=(blocks[0], blocks[1]), num_tokens=13, last_hidden=None))
    cache.put("b", CachedPrefix(blocks=(blocks[0], blocks[2]), num_tokens=14, last_hidden=None))
    assert cache._num_tokens == 17
    cache.put("c", CachedPrefix(blocks=(blocks[3],), num_tokens=6, last_hidden=None))
    # The prompt's entry is evicted, then "a"; the prompt's block stays as long as "b" holds it.
    assert [cache.find_longest([key]) is NO_PREFIX for key in ("prompt", "a", "b", "c")] == [True, True, True, False]
    assert cache._num_tokens == 6
    cache.clear()
    assert cache._num_tokens == 0


@pytest.mark.slow
def test_no_tensor_stays_behind_on_the_cpu(tiny_folder, monkeypatch):
    """A pass at the published shape on a device that holds no data, where a tensor of another device is an error."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    fake_components = importlib.import_module("_fake_components")
    model = fake_components.make_model(fake_components.SCALES["qwen3-vl-8b"], tiny_folder, "meta", torch.bfloat16)
    vlm = VisionLanguageModel(ModelConfig(path=tiny_folder, device="meta", activation_checkpointing=True), model)
    ids, positions = (torch.zeros(shape, dtype=torch.long, device="meta") for shape in ((1, 5000), (3, 1, 5000)))
    vlm.model.train()
    hidden = vlm.policy.compute_hidden_states(ids, positions, vlm.pack_spans([AttentionSpan(0, 0, 5000)], 5000))
    vlm.policy.compute_logits(hidden[0, :100]).sum().backward()
    assert all(layer.mlp.up_proj.weight.grad is not None for layer in vlm.language_model.layers)
    vlm.model.eval()
    rows = KVCache(shape=vlm.kv_cache_shape, dtype=torch.bfloat16, device=vlm.device)
    rows.reserve(8, 5000)
    assert rows.data.nbytes == 8 * 5000 * 36 * 2 * 8 * 128 * 2
    with torch.no_grad():
        for tokens in (300, 1):
            rows.prepare(8, tokens, 4000)
            new = ids[:, :tokens].expand(8, -1)
            out = vlm.policy.compute_hidden_states(new, new.expand(3, -1, -1), rows.build_mask(), kv_cache=rows)
            assert out.shape == (8, tokens, 4096)
