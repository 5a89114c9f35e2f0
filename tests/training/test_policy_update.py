"""From samples to an update: penalties in the reward, ages of tokens, sequences that stay whole."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from saccade.config import Kl
from saccade.training.learn import _penalised, _staleness
from saccade.training.pack import Batch


def batch_of(sample_N, old_N, version_N=None, advantage=1.0):
    """A batch of these tokens, and of nothing else."""
    count = len(sample_N)
    none, zero = np.zeros((1, 1), dtype=np.int64), np.zeros(count, dtype=np.int64)
    return Batch(
        ids_BT=none,
        positions_3BT=np.zeros((3, 1, 1), dtype=np.int64),
        tree_BT=none,
        branch_BT=none,
        pictures=(),
        row_N=zero,
        at_N=zero,
        token_N=zero,
        old_logp_N=np.array(old_N, dtype=np.float32),
        advantage_N=np.full(count, advantage, dtype=np.float32),
        sample_N=np.array(sample_N),
        version_N=zero if version_N is None else np.array(version_N),
    )


def test_the_penalty_in_the_reward_by_hand():
    """k1 = 0.5, -0.2 of one sequence and 1.0 of another: to go 0.3, -0.2 and 1.0, times 0.1."""
    batch = batch_of([4, 4, 1], [-1.0, -1.2, -0.5])
    reference = torch.tensor([-1.5, -1.0, -1.5])
    found = _penalised(batch, reference, Kl(reward=0.1))
    assert found.advantage_N.tolist() == pytest.approx([1 - 0.03, 1 + 0.02, 1 - 0.1])
    k3 = [math.exp(-0.5) + 0.5 - 1, math.exp(0.2) - 0.2 - 1, math.exp(-1.0) + 1.0 - 1]
    found = _penalised(batch, reference, Kl(reward=0.1, estimator="k3"))
    assert found.advantage_N.tolist() == pytest.approx([1 - 0.1 * (k3[0] + k3[1]), 1 - 0.1 * k3[1], 1 - 0.1 * k3[2]])
    assert found.advantage_N.dtype == np.float32
    assert _penalised(batch, reference, Kl(loss=0.1)) is batch


def test_ages_are_counted_in_versions():
    batches = [batch_of([0, 0], [0.0, 0.0], [3, 3]), batch_of([1, 1], [0.0, 0.0], [5, 1])]
    assert _staleness(batches, 5) == {"staleness_mean": 2.0, "staleness_max": 4.0}
    assert _staleness([replace(batches[0], version_N=np.array([5, 5]))], 5)["staleness_max"] == 0.0
