"""What the local engine holds: no more than it needs, and no more than it may."""

import asyncio

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from saccade.config import Model
from saccade.engines._local import scheduler as scheduler_module
from saccade.engines._local.keyvalues import Kept, Prefixes, Rows
from saccade.engines.local import local
from saccade.ledger import Ledger, Picture
from saccade.model.backbone import Backbone
from saccade.types import Message, Sampling


class Media:
    def pixels(self, picture: Picture) -> np.ndarray:
        rng = np.random.default_rng(int(picture.digest))
        return rng.integers(0, 256, (picture.height, picture.width, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def backbone(tiny_folder) -> Backbone:
    return Backbone(Model(path=tiny_folder, threads=1))


def prompts(backbone: Backbone, count: int) -> list[Ledger]:
    side, ledgers = backbone.renderer.factor, []
    for number in range(count):
        frame = Picture(path="x", digest=str(number), time=1.0, width=side, height=side)
        segment = backbone.renderer.render(Ledger(), [Message(role="user", parts=(frame, f"{number} " * (number + 1)))])
        ledgers.append(Ledger().observe(segment.tokens, slots=segment.slots))
    return ledgers


def sample(backbone: Backbone, ledgers: list[Ledger], **settings):
    """The completions, the most rows in flight, and the engine's scheduler afterwards."""
    most = []
    hidden = Backbone.hidden

    def counting(self, ids, *args, **kwargs):
        most.append(len(ids) if ids.shape[1] == 1 else 0)
        return hidden(self, ids, *args, **kwargs)

    async def main():
        engine = local(backbone, Media(), **settings)
        draws = [Sampling(max_tokens=12, seed=seed) for seed in range(len(ledgers))]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Backbone, "hidden", counting)
            pairs = zip(ledgers, draws, strict=True)
            done = await asyncio.gather(*(engine.generate(ledger, sampling) for ledger, sampling in pairs))
        return done, engine._scheduler

    done, scheduler = asyncio.run(main())
    return [one.tokens for one in done], max(most), scheduler


def test_rows_in_flight_keep_within_their_tokens(backbone):
    ledgers = prompts(backbone, 6)
    free, most, scheduler = sample(backbone, ledgers)
    assert most == 6
    longest = max(map(len, ledgers)) + 12
    assert scheduler._rows.data.shape[2] == 6
    assert scheduler._rows.data.shape[4] <= longest * 1.25
    bounded, most, scheduler = sample(backbone, ledgers, flight_tokens=3 * longest)
    assert bounded == free
    assert 1 < most <= 3 + 1  # shorter rows leave room for another
    alone, most, _ = sample(backbone, ledgers, flight_tokens=1)
    assert (alone, most) == (free, 1)


def test_short_rows_make_room_for_long_ones(backbone):
    """Eight short conversations, then one that takes all that may be held."""
    short, long = prompts(backbone, 8), prompts(backbone, 90)[-1]
    flight = max(len(long) + 40, 8 * (max(map(len, short)) + 12))

    async def main():
        engine = local(backbone, Media(), flight_tokens=flight)
        held = []
        for ledgers in (short, [long], short):
            draws = [Sampling(max_tokens=12, seed=seed) for seed in range(len(ledgers))]
            pairs = zip(ledgers, draws, strict=True)
            done = await asyncio.gather(*(engine.generate(ledger, sampling) for ledger, sampling in pairs))
            held.append(([one.tokens for one in done], engine._scheduler._rows.data.shape))
        return held

    held = asyncio.run(main())
    assert [shape[2] for _, shape in held] == [8, 1, 8]
    assert all(shape[2] * shape[4] <= flight for _, shape in held)
    assert held[0][0] == held[2][0] == sample(backbone, short)[0]
    assert held[1][0] == sample(backbone, [long])[0]


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 40)), min_size=1, max_size=12))
def test_rows_keep_what_is_asked_for_and_no_more_than_they_may(asked):
    most, largest = 60, 0
    rows = Rows(shape=(1, 1, 1), dtype=torch.float32, device=torch.device("cpu"), most=most)
    for count, capacity in asked:
        before = rows.data.clone()
        rows.reserve(count, capacity)
        held, width = rows.data.shape[2], rows.data.shape[4]
        assert held >= count
        assert width >= capacity
        largest = max(largest, count * capacity)
        assert held * width <= max(most, 1.25 * largest)
        both = min(count, before.shape[2]), min(capacity, before.shape[4])
        assert torch.equal(rows.data[:, :, : both[0], :, : both[1]], before[:, :, : both[0], :, : both[1]])
        rows.data.normal_()


def test_an_idle_engine_lets_go_of_large_rows(backbone, monkeypatch):
    ledgers = prompts(backbone, 3)
    kept, _, scheduler = sample(backbone, ledgers)
    assert scheduler._rows.data.nbytes > 0
    monkeypatch.setattr(scheduler_module, "_IDLE_BYTES", 1024)
    again, _, scheduler = sample(backbone, ledgers)
    assert scheduler._rows.data.nbytes == 0
    assert again == kept


def test_features_are_kept_by_their_size(backbone):
    ledgers = prompts(backbone, 5)
    free, _, scheduler = sample(backbone, ledgers)
    size = scheduler._features.used // 5
    assert size == backbone.features(ledgers[0].pictures(), Media().pixels)[0].bytes
    bounded, _, scheduler = sample(backbone, ledgers, feature_bytes=2 * size)
    assert bounded == free
    assert scheduler._features.used == 2 * size


def test_rows_grow_both_ways_and_keep_what_they_hold():
    rows = Rows(shape=(2, 1, 4), dtype=torch.bfloat16, device=torch.device("cpu"))
    assert rows.data.nbytes == 0
    rows.reserve(2, 3)
    block = torch.randn(2, 2, 1, 3, 4).bfloat16()
    rows.load(1, [block])
    rows.reserve(3, 9)
    assert torch.equal(rows.block(1, 0, 3), block)
    assert rows.lengths.tolist() == [0, 3, 0]
    assert not rows.data[:, :, 1, :, 3:].any()
    held = rows.data.shape
    rows.reserve(1, 1)
    assert rows.data.shape == held


def test_a_shared_block_counts_once_until_its_last_user_goes():
    blocks = [torch.zeros(1, 2, 1, size, 1) for size in (10, 3, 4, 6)]
    kept = Prefixes(18)
    kept.put("prompt", Kept(blocks=(blocks[0],), length=10, last=None))
    kept.put("a", Kept(blocks=(blocks[0], blocks[1]), length=13, last=None))
    kept.put("b", Kept(blocks=(blocks[0], blocks[2]), length=14, last=None))
    assert kept._held == 17
    kept.put("c", Kept(blocks=(blocks[3],), length=6, last=None))
    # The prompt's own entry goes, then "a"; the prompt's block stays for as long as "b" does.
    assert [kept.longest([key]) is None for key in ("prompt", "a", "b", "c")] == [True, True, True, False]
    assert kept._held == 6
    kept.clear()
    assert kept._held == 0
