"""The local engine against a plain forward pass of transformers, alone and in company."""

import asyncio
from collections.abc import Callable

import numpy as np
import pytest
import torch

from saccade.config import Model
from saccade.engines.local import local
from saccade.errors import EngineError, MediaError
from saccade.ledger import Ledger, Picture
from saccade.model.backbone import Backbone
from saccade.model.tiny import make_tiny
from saccade.testing import check_engine
from saccade.types import Message, Sampling, Stop


class Pixels:
    """A media library that only knows pixels: noise from the picture's own key."""

    def pixels(self, picture: Picture) -> np.ndarray:
        rng = np.random.default_rng(abs(int.from_bytes(picture.key.encode()[-8:], "little")))
        return rng.integers(0, 256, (picture.height, picture.width, 3), dtype=np.uint8)


def picture(number: int, width: int = 16, height: int = 16) -> Picture:
    return Picture(path="x", digest=f"d{number:06d}", time=float(number), width=width, height=height)


@pytest.fixture(scope="module", params=["qwen3_vl", "qwen2_5_vl"])
def backbone(request, tmp_path_factory) -> Backbone:
    folder = tmp_path_factory.mktemp(request.param) / "model"
    make_tiny(folder, family=request.param, seed=1)
    return Backbone(Model(path=str(folder), threads=1))


def prompt(backbone: Backbone, number: int, pictures: int = 3) -> Ledger:
    side = backbone.renderer.factor
    shown = [picture(100 * number + n, side * (1 + n % 2), side) for n in range(pictures)]
    parts = [part for n, frame in enumerate(shown) for part in (f"<{n}.5 seconds>", frame)]
    message = Message(role="user", parts=(*parts, f"What is shown at second {number}?"))
    segment = backbone.renderer.render(Ledger(), [message])
    return Ledger().observe(segment.tokens, slots=segment.slots).force(backbone.renderer.encode("<think>\n"))


def sampling(backbone: Backbone, seed: int, **changes) -> Sampling:
    given = {"temperature": 1.0, "max_tokens": 24, "seed": seed, "stop_ids": backbone.renderer.stop_ids}
    return Sampling(**{**given, **changes}, forbidden_ids=backbone.renderer.forbidden_ids)


def plain_logprobs(backbone: Backbone, ledger: Ledger) -> torch.Tensor:
    """Logprobs of each token of a ledger by transformers' own path: its positions, its vision tower, no cache."""
    ids = torch.tensor([ledger.expanded()])
    inputs = {}
    if ledger.pictures():
        values, grids = backbone.renderer.patches([Pixels().pixels(p) for p in ledger.pictures()])
        inputs = {"pixel_values": torch.from_numpy(values), "image_grid_thw": torch.from_numpy(grids)}
    fresh = backbone.model.config._attn_implementation
    backbone.model.set_attn_implementation("eager")
    with torch.inference_mode():
        out = backbone.model(input_ids=ids, mm_token_type_ids=(ids == backbone.image_token).int(), **inputs)
    backbone.model.set_attn_implementation({"": fresh, "text_config": "saccade", "vision_config": "sdpa"})
    logits = out.logits[0].float().clone()
    logits[:, list(backbone.renderer.forbidden_ids)] = float("-inf")
    logp = torch.log_softmax(logits, dim=-1)
    return logp[:-1].gather(1, ids[0, 1:, None])[:, 0]


async def converse(engine: local, backbone: Backbone, number: int, turns: int = 3, **changes) -> Ledger:
    """Several turns with pictures in the tool results, each sampled by the engine."""
    ledger = prompt(backbone, number)
    for turn in range(turns):
        done = await engine.generate(ledger, sampling(backbone, seed=1000 * number + turn, **changes))
        ledger = ledger.act(done.tokens, logprobs=done.logprobs, version=done.version)
        side = backbone.renderer.factor
        result = Message(role="tool", parts=("frame ", picture(77 + number + turn, side, side), " and text"))
        segment = backbone.renderer.render(ledger, [result])
        if turn < turns - 1:
            ledger = ledger.observe(segment.tokens, slots=segment.slots, origin=segment.origin)
    return ledger


def run(backbone: Backbone, body: Callable, **settings):
    async def main():
        engine = local(backbone, Pixels(), **settings)
        try:
            return await body(engine)
        finally:
            await engine.close()

    return asyncio.run(main())


@pytest.mark.slow
def test_logprobs_equal_a_plain_forward_pass(backbone):
    async def body(engine):
        return await asyncio.gather(*(converse(engine, backbone, n) for n in range(6)))

    for ledger in run(backbone, body):
        mask = torch.tensor(ledger.mask()[1:])
        theirs = plain_logprobs(backbone, ledger)[mask]
        ours = torch.tensor(ledger.logprobs()[1:])[mask]
        assert mask.sum() > 20
        assert (theirs - ours).abs().max() <= 1e-5


@pytest.mark.slow
def test_a_result_does_not_depend_on_its_company(backbone):
    async def alone(engine):
        return await converse(engine, backbone, 2, max_tokens=40)

    async def together(engine):
        return (await asyncio.gather(*(converse(engine, backbone, n, max_tokens=40) for n in (0, 2, 5, 7))))[1]

    first, second = run(backbone, alone), run(backbone, together, rows=3)
    assert first.compact() == second.compact()
    assert np.abs(np.array(first.logprobs()) - np.array(second.logprobs())).max() < 1e-5


@pytest.mark.slow
def test_seeds_decide_and_greedy_ignores_them(backbone):
    ledger = prompt(backbone, 1)

    async def body(engine):
        drawn = [await engine.generate(ledger, sampling(backbone, seed=s)) for s in (5, 5, 6)]
        greedy = [await engine.generate(ledger, sampling(backbone, seed=s, temperature=0.0)) for s in (1, 2)]
        return drawn, greedy

    (a, b, c), (x, y) = run(backbone, body)
    assert a.tokens == b.tokens
    assert a.tokens != c.tokens
    assert x.tokens == y.tokens


def test_a_group_is_prefilled_once_and_turns_keep_their_keys(backbone, monkeypatch):
    forwarded: list[int] = []
    hidden = backbone.hidden

    def counting(ids, *args, **kwargs):
        if ids.shape[1] > 1:
            forwarded.append(ids.numel())
        return hidden(ids, *args, **kwargs)

    monkeypatch.setattr(backbone, "hidden", counting)
    ledger = prompt(backbone, 3)

    async def body(engine):
        done = await asyncio.gather(*(engine.generate(ledger, sampling(backbone, seed=s)) for s in range(8)))
        again = ledger.act(done[0].tokens, logprobs=done[0].logprobs, version=0).observe((5, 6, 7))
        await engine.generate(again, sampling(backbone, seed=0))

    run(backbone, body)
    assert forwarded == [len(ledger), 3 + 1]  # the prompt once for eight; then the results and the newest token


@pytest.mark.slow
def test_stop_ids_length_and_forbidden_tokens(backbone):
    ledger = prompt(backbone, 4)
    everything = tuple(range(300))

    async def body(engine):
        short = await engine.generate(ledger, sampling(backbone, seed=1, max_tokens=3, stop_ids=()))
        stopped = await engine.generate(ledger, sampling(backbone, seed=1, stop_ids=everything, max_tokens=400))
        hot = await engine.generate(ledger, sampling(backbone, seed=2, stop_ids=(), temperature=9.0, max_tokens=800))
        return short, stopped, hot

    short, stopped, hot = run(backbone, body)
    assert (len(short.tokens), short.stop) == (3, Stop.LENGTH)
    assert stopped.stop is Stop.STOP
    assert stopped.tokens[-1] in everything
    assert not set(hot.tokens) & set(backbone.renderer.forbidden_ids)
    assert all(np.isfinite(hot.logprobs))


def test_cancelling_frees_the_row(backbone):
    async def body(engine):
        endless = sampling(backbone, 1, max_tokens=10**6, stop_ids=())
        slow = asyncio.create_task(engine.generate(prompt(backbone, 1), endless))
        for _ in range(20):
            await asyncio.sleep(0)
        slow.cancel()
        with pytest.raises(asyncio.CancelledError):
            await slow
        return await engine.generate(prompt(backbone, 2), sampling(backbone, 2, max_tokens=5, stop_ids=()))

    assert len(run(backbone, body, rows=1).tokens) == 5


@pytest.mark.parametrize("error", [MediaError("the clip has changed"), RuntimeError("out of memory")])
def test_a_failure_reaches_everybody_and_is_over(backbone, error):
    class Broken(Pixels):
        def pixels(self, picture: Picture) -> np.ndarray:
            raise error

    async def body(engine):
        engine._scheduler._pixels = Broken().pixels
        asked = [engine.generate(prompt(backbone, n), sampling(backbone, n)) for n in range(3)]
        said = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), timeout=10)
        engine._scheduler._pixels = Pixels().pixels
        return said, await engine.generate(prompt(backbone, 1), sampling(backbone, 1, max_tokens=3, stop_ids=()))

    said, after = run(backbone, body, rows=2)
    assert all(isinstance(each, EngineError) and str(error) in str(each) for each in said)
    assert len(after.tokens) == 3


def test_a_lost_picture_fails_only_who_shows_it(backbone):
    class Lossy(Pixels):
        def pixels(self, picture: Picture) -> np.ndarray:
            if picture.time and 200 <= picture.time < 300:
                raise MediaError("the clip has changed")
            return super().pixels(picture)

    async def body(engine):
        engine._scheduler._pixels = Lossy().pixels
        asked = [engine.generate(prompt(backbone, n), sampling(backbone, n)) for n in (1, 2, 2, 3)]
        return await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), timeout=60)

    one, *lost, three = run(backbone, body)
    assert all(isinstance(each, EngineError) and "the clip has changed" in str(each) for each in lost)

    async def alone(engine):
        return [await engine.generate(prompt(backbone, n), sampling(backbone, n)) for n in (1, 3)]

    assert [one.tokens, three.tokens] == [each.tokens for each in run(backbone, alone)]


def test_other_ids_can_not_be_forbidden(backbone):
    strange = Sampling(temperature=1.0, max_tokens=2, seed=1, stop_ids=(), forbidden_ids=(5,))
    with pytest.raises(EngineError, match="and no others"):
        run(backbone, lambda engine: engine.generate(prompt(backbone, 1), strange))


def test_others_can_learn_while_it_samples_and_weights_ignore_what_was_cancelled(backbone):
    async def body(engine):
        slow = asyncio.create_task(engine.generate(prompt(backbone, 1), sampling(backbone, 1, max_tokens=10**6)))
        for _ in range(20):
            await asyncio.sleep(0)
        free = not torch.is_inference_mode_enabled()
        with pytest.raises(EngineError, match="in flight"):
            await engine.publish(None, version=1)
        slow.cancel()
        await asyncio.sleep(0)
        await engine.publish(None, version=1)
        return free

    assert run(backbone, body)


def test_new_weights_clear_what_was_kept(backbone):
    ledger = prompt(backbone, 6)
    state = {name: value.clone() for name, value in backbone.model.state_dict().items()}
    changed = {name: value + 0.05 * torch.randn_like(value) for name, value in state.items()}

    async def body(engine):
        before = await engine.generate(ledger, sampling(backbone, seed=1))
        await engine.publish(changed, version=7)
        after = await engine.generate(ledger, sampling(backbone, seed=1))
        ledger_after = ledger.act(after.tokens, logprobs=after.logprobs, version=7)
        theirs = plain_logprobs(backbone, ledger_after)[-len(after.tokens) :]
        await engine.publish(state, version=8)
        return before, after, theirs

    before, after, theirs = run(backbone, body)
    assert (before.version, after.version) == (0, 7)
    assert before.logprobs != after.logprobs
    assert (theirs - torch.tensor(after.logprobs)).abs().max() <= 1e-5


@pytest.mark.slow
def test_contract(backbone):
    async def body(engine):
        await check_engine(engine, backbone.renderer)

    run(backbone, body)
