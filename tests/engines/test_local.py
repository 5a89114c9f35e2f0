"""The local engine against a plain forward pass of transformers, alone and in a batch."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from error_cases import raises

from saccade.config.schema import ModelConfig
from saccade.engines._local import decoder, kv_cache, rows
from saccade.engines.local import Local
from saccade.errors import BrokenEngineError, EngineError, MediaError
from saccade.ledger import ImageRef, Ledger
from saccade.models.tiny import make_tiny_model
from saccade.models.vlm import VisionLanguageModel
from saccade.testing import check_engine
from saccade.types import FinishReason, GenerationRequest, Message, SamplingParams


class Pixels:
    """A media loader whose pixels are noise seeded by the image's key."""

    def load_pixels(self, image: ImageRef) -> np.ndarray:
        rng = np.random.default_rng(abs(int.from_bytes(image.key.encode()[-8:], "little")))
        return rng.integers(0, 256, (image.height, image.width, 3), dtype=np.uint8)


def make_image(number: int, width: int = 16, height: int = 16) -> ImageRef:
    return ImageRef(path="x", digest=f"d{number:06d}", time=float(number), width=width, height=height)


@pytest.fixture(scope="module", params=["qwen3_vl", "qwen2_5_vl"])
def vlm(request, tmp_path_factory) -> VisionLanguageModel:
    folder = tmp_path_factory.mktemp(request.param) / "model"
    make_tiny_model(folder, family=request.param, seed=1)
    return VisionLanguageModel(ModelConfig(path=str(folder), num_threads=1))


def prompt(vlm: VisionLanguageModel, number: int, images: int = 3) -> Ledger:
    side = vlm.renderer.factor
    shown = [make_image(100 * number + n, side * (1 + n % 2), side) for n in range(images)]
    parts = [part for n, frame in enumerate(shown) for part in (f"<{n}.5 seconds>", frame)]
    message = Message(role="user", parts=(*parts, f"What is shown at second {number}?"))
    segment = vlm.renderer.render(Ledger(), [message])
    return Ledger().observe(segment.tokens, slots=segment.slots).prefill(vlm.renderer.encode("<think>\n"))


def make_sampling(vlm: VisionLanguageModel, seed: int, **changes) -> SamplingParams:
    given = {"temperature": 1.0, "max_tokens": 24, "seed": seed, "stop_ids": vlm.renderer.stop_ids}
    return SamplingParams(**{**given, **changes}, forbidden_ids=vlm.renderer.forbidden_ids)


def plain_logprobs(vlm: VisionLanguageModel, ledger: Ledger) -> torch.Tensor:
    """Return the logprobs of a ledger's tokens by transformers' own code: its positions, vision tower, no cache."""
    ids = torch.tensor([ledger.input_ids()])
    inputs = {}
    if ledger.images():
        values, grids = vlm.renderer.patchify([Pixels().load_pixels(p) for p in ledger.images()])
        inputs = {"pixel_values": torch.from_numpy(values), "image_grid_thw": torch.from_numpy(grids)}
    implementation = vlm.model.config._attn_implementation
    vlm.model.set_attn_implementation("eager")
    with torch.inference_mode():
        out = vlm.model(input_ids=ids, mm_token_type_ids=(ids == vlm.renderer.visual_ids[0]).int(), **inputs)
    vlm.model.set_attn_implementation({"": implementation, "text_config": "saccade", "vision_config": "sdpa"})
    logits = out.logits[0].float().clone()
    logits[:, list(vlm.renderer.forbidden_ids)] = float("-inf")
    logp = torch.log_softmax(logits, dim=-1)
    return logp[:-1].gather(1, ids[0, 1:, None])[:, 0]


async def converse(engine: Local, vlm: VisionLanguageModel, number: int, turns: int = 3, **changes) -> Ledger:
    """Sample several turns, with images in the tool results; return the ledger."""
    ledger = prompt(vlm, number)
    for turn in range(turns):
        completion = await engine.generate(
            GenerationRequest(ledger, make_sampling(vlm, seed=1000 * number + turn, **changes))
        )
        ledger = ledger.append_completion(completion.tokens, logprobs=completion.logprobs, version=completion.version)
        side = vlm.renderer.factor
        result = Message(role="tool", parts=("frame ", make_image(77 + number + turn, side, side), " and text"))
        segment = vlm.renderer.render(ledger, [result])
        if turn < turns - 1:
            ledger = ledger.observe(segment.tokens, slots=segment.slots, origin=segment.origin)
    return ledger


def run(vlm: VisionLanguageModel, body: Callable, **settings):
    async def main():
        engine = Local(vlm, Pixels(), **settings)
        try:
            return await body(engine)
        finally:
            await engine.close()

    return asyncio.run(main())


@pytest.mark.slow
def test_logprobs_equal_a_plain_forward_pass(vlm):
    async def body(engine):
        return await asyncio.gather(*(converse(engine, vlm, n) for n in range(6)))

    for ledger in run(vlm, body):
        mask = torch.tensor(ledger.loss_mask()[1:])
        theirs = plain_logprobs(vlm, ledger)[mask]
        ours = torch.tensor(ledger.logprobs()[1:])[mask]
        assert mask.sum() > 20
        assert (theirs - ours).abs().max() <= 1e-5


def test_closing_fails_the_pending_requests(vlm):
    """Two requests are sampled and one waits for a row."""

    async def close_early(engine):
        requests = [asyncio.create_task(converse(engine, vlm, n, max_tokens=40)) for n in range(3)]
        while engine.stats.decode_tokens < 4:
            await asyncio.sleep(0)
        await engine.close()
        return await asyncio.gather(*requests, return_exceptions=True)

    errors = run(vlm, close_early, max_num_seqs=2)
    assert [type(error) for error in errors] == [EngineError] * 3


@pytest.mark.slow
def test_a_result_does_not_depend_on_the_batch(vlm):
    async def alone(engine):
        return await converse(engine, vlm, 2, max_tokens=40)

    async def in_batch(engine):
        return (await asyncio.gather(*(converse(engine, vlm, n, max_tokens=40) for n in (0, 2, 5, 7))))[1]

    first, second = run(vlm, alone), run(vlm, in_batch, max_num_seqs=3)
    assert first.unexpanded_ids() == second.unexpanded_ids()
    assert np.abs(np.array(first.logprobs()) - np.array(second.logprobs())).max() < 1e-5


@pytest.mark.slow
def test_sampling_is_seeded_and_greedy_ignores_seeds(vlm):
    ledger = prompt(vlm, 1)

    async def body(engine):
        drawn = [await engine.generate(GenerationRequest(ledger, make_sampling(vlm, seed=s))) for s in (5, 5, 6)]
        greedy = [
            await engine.generate(GenerationRequest(ledger, make_sampling(vlm, seed=s, temperature=0.0)))
            for s in (1, 2)
        ]
        return drawn, greedy

    (a, b, c), (x, y) = run(vlm, body)
    assert a.tokens == b.tokens
    assert a.tokens != c.tokens
    assert x.tokens == y.tokens


@pytest.mark.slow
def test_a_group_is_prefilled_once_and_turns_reuse_the_prefix_cache(vlm, monkeypatch):
    forwarded: list[int] = []
    hidden = vlm.policy.compute_hidden_states

    def count_forwarded(ids, *args, **kwargs):
        if ids.shape[1] > 1:
            forwarded.append(ids.numel())
        return hidden(ids, *args, **kwargs)

    monkeypatch.setattr(vlm.policy, "compute_hidden_states", count_forwarded)
    ledger = prompt(vlm, 3)

    async def body(engine):
        completions = await asyncio.gather(
            *(engine.generate(GenerationRequest(ledger, make_sampling(vlm, seed=s))) for s in range(8))
        )
        again = ledger.append_completion(completions[0].tokens, logprobs=completions[0].logprobs, version=0).observe(
            (5, 6, 7)
        )
        await engine.generate(GenerationRequest(again, make_sampling(vlm, seed=0)))

    run(vlm, body)
    assert forwarded == [
        len(ledger),
        3 + 1,
    ]  # the prompt once for all eight; then the tool results and the newest token


@pytest.mark.slow
def test_stop_ids_length_and_forbidden_tokens(vlm):
    ledger = prompt(vlm, 4)
    all_ids = tuple(range(300))

    async def body(engine):
        short = await engine.generate(GenerationRequest(ledger, make_sampling(vlm, seed=1, max_tokens=3, stop_ids=())))
        stopped = await engine.generate(
            GenerationRequest(ledger, make_sampling(vlm, seed=1, stop_ids=all_ids, max_tokens=400))
        )
        hot = await engine.generate(
            GenerationRequest(ledger, make_sampling(vlm, seed=2, stop_ids=(), temperature=9.0, max_tokens=800))
        )
        return short, stopped, hot

    short, stopped, hot = run(vlm, body)
    assert (len(short.tokens), short.finish_reason) == (3, FinishReason.LENGTH)
    assert stopped.finish_reason is FinishReason.STOP
    assert stopped.tokens[-1] in all_ids
    assert not set(hot.tokens) & set(vlm.renderer.forbidden_ids)
    assert all(np.isfinite(hot.logprobs))


def test_cancelling_frees_the_row(vlm):
    async def body(engine):
        endless = make_sampling(vlm, 1, max_tokens=10**6, stop_ids=())
        slow = asyncio.create_task(engine.generate(GenerationRequest(prompt(vlm, 1), endless)))
        for _ in range(20):
            await asyncio.sleep(0)
        slow.cancel()
        with pytest.raises(asyncio.CancelledError):
            await slow
        return await engine.generate(
            GenerationRequest(prompt(vlm, 2), make_sampling(vlm, 2, max_tokens=5, stop_ids=()))
        )

    assert len(run(vlm, body, max_num_seqs=1).tokens) == 5


@pytest.mark.parametrize("error", [MediaError("the clip has changed"), RuntimeError("out of memory")])
def test_a_failure_fails_all_requests_and_the_engine_recovers(vlm, error):
    class Broken(Pixels):
        def load_pixels(self, image: ImageRef) -> np.ndarray:
            raise error

    async def body(engine):
        engine._media = Broken()
        requests = [engine.generate(GenerationRequest(prompt(vlm, n), make_sampling(vlm, n))) for n in range(3)]
        results = await asyncio.gather(*requests, return_exceptions=True)
        engine._media = Pixels()
        return results, await engine.generate(
            GenerationRequest(prompt(vlm, 1), make_sampling(vlm, 1, max_tokens=3, stop_ids=()))
        )

    results, after = run(vlm, body, max_num_seqs=2)
    assert all(isinstance(result, EngineError) and str(error) in str(result) for result in results)
    assert len(after.tokens) == 3


CHANGED = "the clip has changed"


@pytest.mark.slow
def test_an_unreadable_image_fails_only_its_requests(vlm):
    class Lossy(Pixels):
        def load_pixels(self, image: ImageRef) -> np.ndarray:
            if image.time and 200 <= image.time < 300:
                raise MediaError(CHANGED)
            return super().load_pixels(image)

    async def body(engine):
        engine._media = Lossy()
        requests = [engine.generate(GenerationRequest(prompt(vlm, n), make_sampling(vlm, n))) for n in (1, 2, 2, 3)]
        return await asyncio.gather(*requests, return_exceptions=True)

    first, *lost, last = run(vlm, body)
    assert all(isinstance(error, EngineError) for error in lost)
    assert all(CHANGED in str(error) for error in lost)

    async def alone(engine):
        return [await engine.generate(GenerationRequest(prompt(vlm, n), make_sampling(vlm, n))) for n in (1, 3)]

    assert [first.tokens, last.tokens] == [completion.tokens for completion in run(vlm, alone)]


def test_only_the_models_forbidden_ids_can_be_forbidden(vlm):
    sampling_params = SamplingParams(temperature=1.0, max_tokens=2, seed=1, stop_ids=(), forbidden_ids=(5,))
    with raises(EngineError, key="sampling.forbidden_ids", value=(5,)):
        run(
            vlm,
            lambda engine: engine.generate(GenerationRequest(prompt(vlm, 1), sampling_params)),
        )


def test_sampling_does_not_disable_gradients_and_sync_weights_ignores_cancelled_requests(vlm):
    async def body(engine):
        slow = asyncio.create_task(
            engine.generate(GenerationRequest(prompt(vlm, 1), make_sampling(vlm, 1, max_tokens=10**6)))
        )
        for _ in range(20):
            await asyncio.sleep(0)
        free = not torch.is_inference_mode_enabled()
        with raises(EngineError, value=1):
            await engine.sync_weights(vlm, version=1)
        slow.cancel()
        await asyncio.sleep(0)
        await engine.sync_weights(vlm, version=1)
        return free

    assert run(vlm, body)


def test_weights_of_its_own_change_between_replies(vlm):
    state = {name: value.clone() for name, value in vlm.model.state_dict().items()}

    async def body(engine):
        ledger = prompt(vlm, 1)
        requests = [GenerationRequest(ledger, make_sampling(vlm, seed, stop_ids=(), max_tokens=8)) for seed in (1, 2)]
        running = asyncio.create_task(engine.generate(requests[0]))
        while not engine.stats.decode_tokens:
            await asyncio.sleep(0)
        syncing = asyncio.create_task(engine.sync_weights(SimpleNamespace(state_dict=lambda: state), version=1))
        await asyncio.sleep(0)
        waiting = asyncio.create_task(engine.generate(requests[1]))
        first, second, _ = await asyncio.gather(running, waiting, syncing)
        return first, second

    first, second = run(vlm, body)
    assert (first.version, second.version) == (0, 1)
    assert len(first.tokens) == len(second.tokens) == 8


@pytest.mark.slow
def test_new_weights_clear_the_caches(vlm):
    ledger = prompt(vlm, 6)
    state = {name: value.clone() for name, value in vlm.model.state_dict().items()}
    changed = {name: value + 0.05 * torch.randn_like(value) for name, value in state.items()}

    async def body(engine):
        before = await engine.generate(GenerationRequest(ledger, make_sampling(vlm, seed=1)))
        await engine.sync_weights(SimpleNamespace(state_dict=lambda: changed), version=7)
        after = await engine.generate(GenerationRequest(ledger, make_sampling(vlm, seed=1)))
        ledger_after = ledger.append_completion(after.tokens, logprobs=after.logprobs, version=7)
        theirs = plain_logprobs(vlm, ledger_after)[-len(after.tokens) :]
        await engine.sync_weights(SimpleNamespace(state_dict=lambda: state), version=8)
        return before, after, theirs

    before, after, theirs = run(vlm, body)
    assert (before.version, after.version) == (0, 7)
    assert before.logprobs != after.logprobs
    assert (theirs - torch.tensor(after.logprobs)).abs().max() <= 1e-5


@pytest.mark.slow
def test_contract(vlm):
    async def body(engine):
        await check_engine(engine, vlm.renderer, vlm)

    run(vlm, body)


@pytest.mark.slow
def test_logits_that_are_nan_end_their_own_reply(vlm, monkeypatch):
    """A later request gets the failed one's row of the KV cache, whose keys and values are NaN from then on."""
    compute_logits, num_calls = vlm.policy.compute_logits, 0

    def compute(hidden_BD):
        nonlocal num_calls
        num_calls += 1
        logits_BV = compute_logits(hidden_BD)
        if num_calls == 5:
            logits_BV[0] = float("nan")
        return logits_BV

    async def body(engine):
        requests = [converse(engine, vlm, number, turns=1, temperature=0.0) for number in (1, 2)]
        outcomes = await asyncio.gather(*requests, return_exceptions=True)
        return [*outcomes, await converse(engine, vlm, 1, turns=1, temperature=0.0)]

    expected = run(vlm, body)
    monkeypatch.setattr(vlm.policy, "compute_logits", compute)
    failed, *others = run(vlm, body)
    assert type(failed) is EngineError
    assert (failed.key, failed.value) == ("model.dtype", "float32")
    assert [ledger.sampled_tokens() for ledger in others] == [ledger.sampled_tokens() for ledger in expected[1:]]


def test_a_weight_that_is_nan_stops_the_run(vlm):
    weight = vlm.model.model.language_model.layers[0].mlp.up_proj.weight
    value = float(weight.data[0, 0])
    weight.data[0, 0] = float("nan")
    try:
        with raises(BrokenEngineError, key="model.path") as caught:
            run(vlm, lambda engine: converse(engine, vlm, 1, turns=1))
    finally:
        weight.data[0, 0] = value
    assert "layers.0.mlp.up_proj.weight" in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("lora_rank", [0, 4])
def test_fused_passes_equal_those_of_the_modules(vlm, lora_rank, monkeypatch):
    """Rows of different lengths, groups with one prompt, further turns: the same tokens, logprobs up to rounding."""
    vlm = VisionLanguageModel(vlm.settings.model_copy(update={"lora_rank": lora_rank}))
    with torch.no_grad():
        for name, weight in vlm.model.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.05)
            elif "norm" in name or name.endswith(".bias"):  # ones and zeros at first
                weight.add_(torch.rand_like(weight) - 0.5)
    monkeypatch.setattr(kv_cache, "_MIN_SAVED_POSITIONS", 1)
    runs = []
    monkeypatch.setattr(rows, "find_runs", lambda prefixes: runs.append(kv_cache.find_runs(prefixes)) or runs[-1])

    async def sample(engine):
        numbers = (0, 1, 1, 1, 2, 3, 4, 4)
        conversations = [
            converse(
                engine,
                vlm,
                number,
                turns=1 + index % 2,
                max_tokens=12 + index,
                temperature=0.6 + 0.2 * index,
            )
            for index, number in enumerate(numbers)
        ]
        return await asyncio.gather(*conversations)

    async def sample_with_modules(engine):
        assert engine._decoder is not None
        engine._decoder = None
        return await sample(engine)

    for fused, plain in zip(run(vlm, sample), run(vlm, sample_with_modules), strict=True):
        assert fused.unexpanded_ids() == plain.unexpanded_ids()
        assert fused.sampled_tokens() == plain.sampled_tokens()
        assert np.abs(np.array(fused.logprobs()) - np.array(plain.logprobs())).max() <= 1e-6
    first, second = (len(prompt(vlm, number)) for number in (1, 4))
    assert runs[0] == ((0, 1, 0), (1, 4, first), (4, 6, 0), (6, 8, second))


@pytest.mark.slow
def test_rows_keep_their_own_draws_when_they_outgrow_the_arrays(vlm, monkeypatch):
    """Replies longer than the arrays, whose rows end at different times, equal replies that are sampled alone."""
    monkeypatch.setattr(rows, "_FIRST_WIDTH", 4)
    lengths = (3, 19, 7, 12)

    def sample_reply(engine, number):
        sampling = make_sampling(vlm, number, max_tokens=lengths[number], stop_ids=())
        return engine.generate(GenerationRequest(prompt(vlm, number), sampling))

    async def together(engine):
        return await asyncio.gather(*(sample_reply(engine, number) for number in range(4)))

    async def alone(engine):
        return [await sample_reply(engine, number) for number in range(4)]

    batched, single = run(vlm, together), run(vlm, alone)
    assert [len(completion.tokens) for completion in batched] == list(lengths)
    assert [completion.tokens for completion in batched] == [completion.tokens for completion in single]


@pytest.mark.slow
def test_nothing_is_prefilled_twice_between_turns(vlm):
    """Each token of a conversation is prefilled once, but for the newest of each reply, which no pass has seen."""

    async def body(engine):
        ledgers = [await converse(engine, vlm, number, turns=3, max_tokens=6, stop_ids=()) for number in (1, 2)]
        return ledgers, engine.stats.prefill_tokens

    ledgers, num_prefilled = run(vlm, body)
    num_given = sum(len(ledger) - len(ledger.sampled_tokens()) for ledger in ledgers)
    assert num_prefilled == num_given + 2 * len(ledgers)


@pytest.mark.slow
def test_attention_may_return_its_axes_in_any_order(vlm, monkeypatch):
    """Kernels of GPUs return the tokens before the heads in memory."""
    attend = decoder._attend

    def attend_in_other_order(*args):
        return attend(*args).transpose(1, 2).contiguous().transpose(1, 2)

    async def body(engine):
        return await asyncio.gather(*(converse(engine, vlm, number, turns=1) for number in range(3)))

    expected = run(vlm, body)
    monkeypatch.setattr(decoder, "_attend", attend_in_other_order)
    assert [ledger.logprobs() for ledger in run(vlm, body)] == [ledger.logprobs() for ledger in expected]
