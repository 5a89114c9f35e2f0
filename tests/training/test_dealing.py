"""Micro-batches dealt to ranks: every one once, similar costs in a wave, empty ones at the end."""

import threading
from dataclasses import replace

import numpy as np
import pytest

from saccade.errors import MediaError
from saccade.ledger import ImageRef
from saccade.training.distributed.dealing import count_waves, deal_waves, estimate_cost
from saccade.training.packing import Batch

IMAGE = ImageRef(path="a.png", digest="9f2c", time=None, width=32, height=32)


def build_batch(*rows: str, images=()) -> Batch:
    """Build rows from characters: "0" is a tree's prefix, "1" its first branch; "|" begins another tree."""
    T = max(len(row.replace("|", "")) for row in rows)
    tree_BT, branch_BT = np.full((len(rows), T), -1), np.zeros((len(rows), T), dtype=np.int64)
    for b, row in enumerate(rows):
        start = 0
        for tree, part in enumerate(row.split("|")):
            tree_BT[b, start : start + len(part)] = tree
            branch_BT[b, start : start + len(part)] = [int(character) for character in part]
            start += len(part)
    tokens = np.arange(3)
    return Batch(
        ids_BT=np.zeros((len(rows), T), dtype=np.int64),
        positions_3BT=np.zeros((3, len(rows), T), dtype=np.int64),
        tree_BT=tree_BT,
        branch_BT=branch_BT,
        images=images,
        image_start_2I=np.zeros((2, len(images)), dtype=np.int64),
        row_N=tokens,
        predictor_N=tokens,
        column_N=tokens,
        token_N=tokens,
        rollout_logp_N=tokens,
        advantage_N=tokens,
        sample_N=tokens,
        version_N=tokens,
    )


def count_pairs(batch: Batch) -> int:
    """Count the causal pairs of the tree attention mask by its definition."""
    pairs = 0
    for tree_T, branch_T in zip(batch.tree_BT, batch.branch_BT, strict=True):
        for query in range(len(tree_T)):
            for key in range(query + 1):
                same_tree = tree_T[query] == tree_T[key] >= 0
                pairs += bool(same_tree and branch_T[key] in (0, branch_T[query]))
    return pairs


@pytest.mark.parametrize("rows", [("000",), ("0011122",), ("0011|01", "000111"), ("0|0|012", "0")])
def test_the_cost_counts_padded_tokens_and_visible_pairs(rows):
    batch = build_batch(*rows)
    per_pair = estimate_cost(build_batch("0")) - 1  # one token has one pair
    assert estimate_cost(batch) == pytest.approx(batch.ids_BT.size + per_pair * count_pairs(batch))


@pytest.mark.parametrize(("num_batches", "num_ranks"), [(1, 4), (4, 2), (5, 2), (7, 3)])
def test_every_micro_batch_is_dealt_once_and_the_last_wave_is_padded(num_batches, num_ranks):
    batches = [build_batch("0" * (1 + 3 * index % 7)) for index in range(num_batches)]
    waves = list(deal_waves(batches, num_ranks, lambda image: None, lambda: None))
    assert len(waves) == count_waves(batches, num_ranks)
    assert all(len(wave) == num_ranks for wave in waves)
    deals = [deal for wave in waves for deal in wave]
    dealt, padding = deals[:num_batches], deals[num_batches:]
    assert sorted(deal.index for deal in dealt) == list(range(num_batches))
    assert all(deal.batch is batches[deal.index] for deal in dealt)
    costs = [estimate_cost(deal.batch) for deal in dealt]
    assert costs == sorted(costs, reverse=True)
    for deal in padding:
        assert deal.index is None
        assert not deal.batch.images
        assert len(deal.batch.token_N) == 0


def test_pixels_are_loaded_once_per_micro_batch_at_most_one_wave_ahead():
    batches = [replace(build_batch("00"), images=(IMAGE, IMAGE)) for _ in range(4)]
    loaded, checks, next_wave = [], [], threading.Semaphore(0)

    def load(images):
        loaded.append(threading.current_thread())
        next_wave.release()
        return {image.key: "pixels" for image in images}

    waves = deal_waves(batches, 1, load, lambda: checks.append(1))
    for count in range(1, 5):
        [deal] = next(waves)
        assert deal.load_pixels(IMAGE) == "pixels"
        assert len(checks) == count
        # The next wave is loaded while the caller trains on this one, and no further wave.
        for _ in range(2 if count == 1 else int(count < 4)):
            assert next_wave.acquire(timeout=60)
        assert len(loaded) == min(count + 1, 4)
    assert list(waves) == []
    assert threading.current_thread() not in loaded


def test_waves_after_a_cancellation_are_not_dealt():
    checks = iter([None, None, KeyError])

    def check_cancelled():
        if error := next(checks):
            raise error

    waves = deal_waves([build_batch("0")] * 4, 1, lambda image: None, check_cancelled)
    assert [len(next(waves)) for _ in range(2)] == [1, 1]
    with pytest.raises(KeyError):
        next(waves)


def test_an_error_while_pixels_are_loaded_is_raised():
    def fail(image):
        raise MediaError("no such file")

    with pytest.raises(MediaError):
        next(deal_waves([build_batch("0", images=(IMAGE,))], 1, fail, lambda: None))
