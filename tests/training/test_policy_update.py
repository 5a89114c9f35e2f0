"""The policy update: KL penalties in the reward, and staleness of tokens."""

import math
import statistics
from dataclasses import replace

import numpy as np
import pytest

from saccade.config.schema import KlConfig
from saccade.training.packing import MicroBatch
from saccade.training.policy_update import _apply_kl_penalty, _compute_staleness, _whiten_advantages
from saccade.training.train_step import StepReport, merge_reports


def make_batch(sample_N, old_N, version_N=None, advantage=1.0):
    """Make a batch of these trained tokens, and of no others."""
    count = len(sample_N)
    empty, zero = np.zeros((1, 1), dtype=np.int64), np.zeros(count, dtype=np.int64)
    return MicroBatch(
        ids_BT=empty,
        positions_3BT=np.zeros((3, 1, 1), dtype=np.int64),
        tree_BT=empty,
        branch_BT=empty,
        images=(),
        image_start_2I=np.zeros((2, 0), dtype=np.int64),
        row_N=zero,
        logit_index_N=zero,
        column_N=zero,
        token_N=zero,
        engine_logp_N=np.array(old_N, dtype=np.float32),
        advantage_N=np.full(count, advantage, dtype=np.float32),
        sample_N=np.array(sample_N),
        version_N=zero if version_N is None else np.array(version_N),
    )


def test_kl_penalty_in_the_reward_by_hand():
    """k1 is 0.5 and -0.2 in one sequence and 1.0 in another: the rewards-to-go are 0.3, -0.2 and 1.0, times 0.1."""
    reference_logp_N = np.array([-1.5, -1.0, -1.5], dtype=np.float32)
    batch = replace(make_batch([4, 4, 1], [-1.0, -1.2, -0.5]), ref_logp_N=reference_logp_N)
    penalized = _apply_kl_penalty(batch, KlConfig(advantage_coef=0.1))
    assert penalized.advantage_N.tolist() == pytest.approx([1 - 0.03, 1 + 0.02, 1 - 0.1])
    k3 = [math.exp(-0.5) + 0.5 - 1, math.exp(0.2) - 0.2 - 1, math.exp(-1.0) + 1.0 - 1]
    penalized = _apply_kl_penalty(batch, KlConfig(advantage_coef=0.1, penalty_estimator="k3"))
    expected = [1 - 0.1 * (k3[0] + k3[1]), 1 - 0.1 * k3[1], 1 - 0.1 * k3[2]]
    assert penalized.advantage_N.tolist() == pytest.approx(expected)
    assert penalized.advantage_N.dtype == np.float32
    assert _apply_kl_penalty(batch, KlConfig(loss_coef=0.1)) is batch


def test_advantages_are_whitened_over_all_tokens_after_the_kl_penalty():
    """The penalties are 0.1 * (0.3, -0.2) and 0.1 * 1.0; the three advantages 0.97, 1.02, 0.9 have a sample std."""
    batches = [make_batch([4, 4], [-1.0, -1.2]), make_batch([1], [-0.5])]
    references = [np.array([-1.5, -1.0], dtype=np.float32), np.array([-1.5], dtype=np.float32)]
    kl = KlConfig(advantage_coef=0.1)
    penalized = [
        _apply_kl_penalty(replace(batch, ref_logp_N=ref_logp_N), kl)
        for batch, ref_logp_N in zip(batches, references, strict=True)
    ]
    white = [batch.advantage_N for batch in _whiten_advantages(penalized)]
    values = [0.97, 1.02, 0.9]
    mean, std = statistics.fmean(values), statistics.stdev(values)
    assert [len(part) for part in white] == [2, 1]
    assert np.concatenate(white).tolist() == pytest.approx(
        [(value - mean) / (std + 1e-5) for value in values], rel=1e-4
    )
    assert white[0].dtype == np.float32


def test_reinforce_plus_plus_by_hand():
    """Rewards 1 and 0 minus 0.1 times the KL to go: 0.97, 1.02 and -0.1, of mean 0.63 and sample variance 0.4003."""
    kl = KlConfig(advantage_coef=0.1)
    right, wrong = make_batch([4, 4], [-1.0, -1.2], advantage=1.0), make_batch([1], [-0.5], advantage=0.0)
    right = _apply_kl_penalty(replace(right, ref_logp_N=np.array([-1.5, -1.0], dtype=np.float32)), kl)
    wrong = _apply_kl_penalty(replace(wrong, ref_logp_N=np.array([-1.5], dtype=np.float32)), kl)
    white_N = np.concatenate([batch.advantage_N for batch in _whiten_advantages([right, wrong])])
    assert white_N.tolist() == pytest.approx([0.34 / 0.63269, 0.39 / 0.63269, -0.73 / 0.63269], rel=1e-4)


def test_staleness_is_counted_in_weight_versions():
    batches = [make_batch([0, 0], [0.0, 0.0], [3, 3]), make_batch([1, 1], [0.0, 0.0], [5, 1])]
    assert _compute_staleness(batches, 5) == {"staleness_mean": 2.0, "staleness_max": 4.0}
    assert _compute_staleness([replace(batches[0], version_N=np.array([5, 5]))], 5)["staleness_max"] == 0.0


def test_reports_of_mini_batches_are_one_row():
    """Entropy and statistics are averaged over 3 + 1 tokens, loss and gradient norm over two steps."""
    first = StepReport(
        loss=1.0,
        entropy=0.5,
        grad_norm=2.0,
        packed_tokens=10,
        trained_tokens=3,
        stats={"ratio_mean": 1.0, "ratio_max": 1.5, "tokens": 3.0},
    )
    second = StepReport(
        loss=3.0,
        entropy=1.5,
        grad_norm=6.0,
        packed_tokens=4,
        trained_tokens=1,
        stats={"ratio_mean": 2.0, "ratio_max": 2.0, "tokens": 1.0},
    )
    assert merge_reports([first, second]) == StepReport(
        loss=2.0,
        entropy=0.75,
        grad_norm=4.0,
        packed_tokens=14,
        trained_tokens=4,
        stats={"ratio_mean": 1.25, "ratio_max": 2.0, "tokens": 4.0},
        updates=2,
    )
    assert merge_reports([first]) is first
