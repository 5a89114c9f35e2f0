"""Micro-batches distributed over ranks: every one once, similar costs in a micro-step, empty ones at the end."""

import threading
from dataclasses import replace

import numpy as np
import pytest

from saccade.errors import MediaError
from saccade.ledger import ImageRef
from saccade.training.distributed.micro_steps import count_micro_steps, estimate_cost, iterate_micro_steps
from saccade.training.packing import MicroBatch

IMAGE = ImageRef(path="a.png", digest="9f2c", time=None, width=32, height=32)


def build_micro_batch(*rows: str, images=()) -> MicroBatch:
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
    return MicroBatch(
        ids_BT=np.zeros((len(rows), T), dtype=np.int64),
        positions_3BT=np.zeros((3, len(rows), T), dtype=np.int64),
        tree_BT=tree_BT,
        branch_BT=branch_BT,
        images=images,
        image_start_2I=np.zeros((2, len(images)), dtype=np.int64),
        row_N=tokens,
        logit_index_N=tokens,
        column_N=tokens,
        token_N=tokens,
        engine_logp_N=tokens,
        advantage_N=tokens,
        sample_N=tokens,
        version_N=tokens,
    )


def count_pairs(batch: MicroBatch) -> int:
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
    batch = build_micro_batch(*rows)
    per_pair = estimate_cost(build_micro_batch("0")) - 1  # one token has one pair
    assert estimate_cost(batch) == pytest.approx(batch.ids_BT.size + per_pair * count_pairs(batch))


@pytest.mark.parametrize(("num_batches", "num_ranks"), [(1, 4), (4, 2), (5, 2), (7, 3)])
def test_every_micro_batch_is_trained_once_and_the_last_micro_step_is_padded(num_batches, num_ranks):
    batches = [build_micro_batch("0" * (1 + 3 * index % 7)) for index in range(num_batches)]
    micro_steps = list(iterate_micro_steps(batches, num_ranks, lambda image: None, lambda: None))
    assert len(micro_steps) == count_micro_steps(batches, num_ranks)
    assert all(len(micro_step) == num_ranks for micro_step in micro_steps)
    loaded_batches = [loaded for micro_step in micro_steps for loaded in micro_step]
    dealt, padding = loaded_batches[:num_batches], loaded_batches[num_batches:]
    assert sorted(loaded.index for loaded in dealt) == list(range(num_batches))
    assert all(loaded.micro_batch is batches[loaded.index] for loaded in dealt)
    costs = [estimate_cost(loaded.micro_batch) for loaded in dealt]
    assert costs == sorted(costs, reverse=True)
    for loaded in padding:
        assert loaded.index is None
        assert not loaded.micro_batch.images
        assert len(loaded.micro_batch.token_N) == 0


def test_pixels_are_loaded_once_per_micro_batch_at_most_one_micro_step_ahead():
    batches = [replace(build_micro_batch("00"), images=(IMAGE, IMAGE)) for _ in range(4)]
    loaded, checks, next_micro_step = [], [], threading.Semaphore(0)

    def load(images):
        loaded.append(threading.current_thread())
        next_micro_step.release()
        return {image.key: "pixels" for image in images}

    micro_steps = iterate_micro_steps(batches, 1, load, lambda: checks.append(1))
    for count in range(1, 5):
        [batch] = next(micro_steps)
        assert batch.load_pixels(IMAGE) == "pixels"
        assert len(checks) == count
        # The next micro-step is loaded while the caller trains on this one, and no further micro-step.
        for _ in range(2 if count == 1 else int(count < 4)):
            assert next_micro_step.acquire(timeout=60)
        assert len(loaded) == min(count + 1, 4)
    assert list(micro_steps) == []
    assert threading.current_thread() not in loaded


def test_micro_steps_after_a_cancellation_are_not_loaded():
    checks = iter([None, None, KeyError])

    def check_cancelled():
        if error := next(checks):
            raise error

    micro_steps = iterate_micro_steps([build_micro_batch("0")] * 4, 1, lambda image: None, check_cancelled)
    assert [len(next(micro_steps)) for _ in range(2)] == [1, 1]
    with pytest.raises(KeyError):
        next(micro_steps)


def test_an_error_while_pixels_are_loaded_is_raised():
    def fail(image):
        raise MediaError("no such file")

    with pytest.raises(MediaError):
        next(iterate_micro_steps([build_micro_batch("0", images=(IMAGE,))], 1, fail, lambda: None))
