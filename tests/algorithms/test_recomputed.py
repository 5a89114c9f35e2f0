"""Losses and advantages against the same formulas implemented a second time, token by token, with `math` alone."""

import math
import random
import statistics

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.algorithms.group_advantages import compute_group_advantages
from saccade.algorithms.policy_loss import compute_policy_loss, compute_reward_to_go, compute_token_weights
from saccade.algorithms.ratios import k1, k3
from saccade.config.schema import AdvantageConfig, LossConfig
from saccade.ledger import Ledger
from saccade.types import AnswerType, Episode, EpisodeStatus, Group, Score, ScoredEpisode, Task

AGGREGATIONS = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum_norm")
losses_st = st.builds(
    LossConfig,
    name=st.sampled_from(["ppo_clip", "gspo"]),
    settings=st.fixed_dictionaries(
        {
            "clip_low": st.sampled_from([0.1, 0.2]),
            "clip_high": st.sampled_from([0.2, 0.28]),
            "dual_clip": st.sampled_from([None, 1.5, 3.0]),
        }
    ),
    aggregation=st.sampled_from(AGGREGATIONS),
    token_sum_divisor=st.just(7.0),
    tis_cap=st.sampled_from([None, 0.9, 2.0]),
    stale_tis_cap=st.sampled_from([1.1, 5.0]),
    above_stale_tis_cap=st.sampled_from(["truncate", "mask"]),
)


def draw_data(seed, lengths):
    """Draw logprobs of four similar policies, an advantage per sequence, and which tokens are stale."""
    rng = random.Random(seed)
    seq = [number for number, length in enumerate(lengths) for _ in range(length)]
    rng.shuffle(seq)
    adv = [rng.gauss(0, 1) for _ in lengths]
    now = [-rng.uniform(0.1, 3) for _ in seq]
    columns = {name: [value + rng.gauss(0, 0.4) for value in now] for name in ("old", "engine", "ref")}
    return {
        "seq": seq,
        "now": now,
        "adv": [adv[number] for number in seq],
        "stale": [rng.random() < 0.4 for _ in seq],
        **columns,
    }


def token_weight(data, index, loss):
    tokens, sequences = len(data["seq"]), len(set(data["seq"]))
    own = data["seq"].count(data["seq"][index])
    divisors = {
        "token_mean": tokens,
        "seq_mean_token_mean": sequences * own,
        "seq_mean_token_sum_norm": sequences * loss.token_sum_divisor,
    }
    return 1 / divisors[loss.aggregation]


def token_ratio(data, index, loss):
    """Return the ratio of a token, or of its sequence: the geometric mean over its tokens."""
    indices = [index]
    if loss.name == "gspo":
        indices = [i for i, number in enumerate(data["seq"]) if number == data["seq"][index]]
    return math.exp(sum(data["now"][i] - data["old"][i] for i in indices) / len(indices))


def tis_weight(data, index, loss):
    cap = loss.stale_tis_cap if data["stale"][index] else loss.tis_cap
    weight = math.exp(data["old"][index] - data["engine"][index])
    if data["stale"][index] and loss.above_stale_tis_cap == "mask" and weight > cap:
        return 0.0
    return 1.0 if cap is None else min(weight, cap)


def compute_by_hand(data, loss, kl):
    """Return the loss of the whole batch, and its gradient with respect to each token's logprob."""
    total, gradients = 0.0, []
    for index, adv in enumerate(data["adv"]):
        r = token_ratio(data, index, loss)
        bounded = min(max(r, 1 - loss.settings["clip_low"]), 1 + loss.settings["clip_high"])
        dual_clip = loss.settings["dual_clip"]
        gain, has_gradient = min(r * adv, bounded * adv), r * adv <= bounded * adv
        if dual_clip is not None and adv < 0 and gain < dual_clip * adv:
            gain, has_gradient = dual_clip * adv, False
        log_ratio = data["ref"][index] - data["now"][index]
        scale, importance = token_weight(data, index, loss), tis_weight(data, index, loss)
        total += scale * (-gain * importance + kl * (math.exp(log_ratio) - log_ratio - 1))
        gradients.append(scale * (-r * adv * has_gradient * importance + kl * (1 - math.exp(log_ratio))))
    return total, gradients


def compute_micro_batch(data, loss, kl, indices):
    """Return the loss and gradient of Saccade's implementation for a micro-batch of those tokens."""
    column = {name: torch.tensor(values)[indices] for name, values in data.items() if name in ("seq", "stale")}
    number = {name: torch.tensor(values, dtype=torch.float64)[indices] for name, values in data.items()}
    weight_N = compute_token_weights(
        torch.tensor(data["seq"]), aggregation=loss.aggregation, token_sum_divisor=loss.token_sum_divisor
    )
    now_N = number["now"].requires_grad_()
    value, _ = compute_policy_loss(
        now_N,
        number["old"],
        number["adv"],
        weight_N[indices],
        settings=loss,
        engine_logp_N=number["engine"],
        stale_N=column["stale"],
        seq_N=column["seq"],
        ref_logp_N=number["ref"],
        kl_coef=kl,
    )
    (gradient_N,) = torch.autograd.grad(value, now_N)
    return value.item(), gradient_N.tolist()


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(
    losses_st, st.integers(0, 10**6), st.lists(st.integers(1, 5), min_size=1, max_size=5), st.sampled_from([0.0, 0.1])
)
def test_loss_and_gradient_and_micro_batches(loss, seed, lengths, kl):
    """Compare the whole batch, and micro-batches cut between sequences whose losses and gradients are added up."""
    data = draw_data(seed, lengths)
    expected, gradients = compute_by_hand(data, loss, kl)
    parts = [random.Random(seed).randrange(3) for _ in lengths]
    total, summed = 0.0, [0.0] * len(gradients)
    for part in set(parts):
        indices = [index for index, number in enumerate(data["seq"]) if parts[number] == part]
        value, part_gradients = compute_micro_batch(data, loss, kl, indices)
        total += value
        for index, gradient in zip(indices, part_gradients, strict=True):
            summed[index] += gradient
    whole, whole_gradients = compute_micro_batch(data, loss, kl, list(range(len(gradients))))
    assert (total, whole) == pytest.approx((expected, expected), rel=1e-5, abs=1e-6)
    assert summed == pytest.approx(gradients, rel=1e-5, abs=1e-6)
    assert whole_gradients == pytest.approx(gradients, rel=1e-5, abs=1e-6)


def test_kl_estimators_are_unbiased_and_so_is_the_gradient_of_k1():
    """Computed exactly over a vocabulary of four: both have the mean sum p log(p / q); k3 is never below 0."""
    logits = torch.tensor([0.3, -1.0, 0.5, 0.1], dtype=torch.float64, requires_grad=True)
    p, q = logits.log_softmax(0), torch.tensor([0.1, 0.4, -0.3, 0.0], dtype=torch.float64).log_softmax(0)
    exact = (p.exp() * (p - q)).sum()
    chance = p.exp().detach()
    assert (chance * k1(p, q)).sum().item() == pytest.approx(exact.item())
    assert (chance * k3(p, q)).sum().item() == pytest.approx(exact.item())
    assert (k3(p, q) >= 0).all()
    (exact_gradient,) = torch.autograd.grad(exact, logits, retain_graph=True)
    # in the reward: score function times the plain estimator
    (k1_gradient,) = torch.autograd.grad((chance * k1(p, q).detach() * p).sum(), logits, retain_graph=True)
    assert k1_gradient.tolist() == pytest.approx(exact_gradient.tolist())
    # in the loss: (1 - q / p) per token, which is the gradient of the reverse KL divergence
    reverse = -(q.exp() * (p - q)).sum()
    (reverse_gradient,) = torch.autograd.grad(reverse, logits, retain_graph=True)
    (k3_gradient,) = torch.autograd.grad((chance * k3(p, q)).sum(), logits)
    assert k3_gradient.tolist() == pytest.approx(reverse_gradient.tolist())


@pytest.mark.slow
@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.floats(-5, 5)), max_size=20))
def test_reward_to_go(pairs):
    pairs = sorted(pairs, key=lambda pair: pair[0])
    expected = [sum(value for other, value in pairs[index:] if other == seq) for index, (seq, _) in enumerate(pairs)]
    values, seqs = (torch.tensor([pair[i] for pair in pairs]) for i in (1, 0))
    assert compute_reward_to_go(values.double(), seqs.long()).tolist() == pytest.approx(expected, abs=1e-6)


# ---- advantages ------------------------------------------------------------------------------------------------------


def make_group(name, rewards):
    task = Task(id=name, question="?", media=(), answer_type=AnswerType.OPEN, ground_truth="red")
    episode = Episode(task=task, environment="direct", ledger=Ledger(), turns=(), status=EpisodeStatus.ANSWERED)
    scored = (ScoredEpisode(episode=episode, score=Score(value=reward, parts={})) for reward in rewards)
    return Group(task=task, scored_episodes=tuple(scored))


def compute_expected_advantages(rewards, estimator):
    if len(rewards) < 2:
        return [0.0]
    if estimator == "rloo":
        return [
            reward - statistics.fmean(rewards[:index] + rewards[index + 1 :]) for index, reward in enumerate(rewards)
        ]
    divisor = statistics.pstdev(rewards) + 1e-6 if estimator == "grpo" else 1.0
    return [(reward - statistics.fmean(rewards)) / divisor for reward in rewards]


@pytest.mark.slow
@settings(deadline=None)
@given(
    st.lists(st.lists(st.sampled_from([0.0, 0.3, 0.8, 1.0, 1.3, 2.3]), min_size=1, max_size=8), min_size=1, max_size=5),
    st.sampled_from(["dr_grpo", "grpo", "rloo"]),
    st.sampled_from(["none", "episodes"]),
    st.sampled_from([(1.0, 0.0, 20.0), (10.0, -0.2, 40.0), (10.0, -0.2, 5.0)]),
)
def test_rewards_are_shaped_then_compared_then_whitened(drawn_rewards, estimator, whiten, shaping):
    scale, bias, clip = shaping
    chosen = AdvantageConfig(estimator=estimator, whiten=whiten, reward_scale=scale, reward_bias=bias, reward_clip=clip)
    groups = [make_group(f"t{index}", rewards) for index, rewards in enumerate(drawn_rewards)]
    advantages = [advantage.every_token_G for advantage in compute_group_advantages(groups, chosen)]
    expected = []
    for rewards in drawn_rewards:
        shaped = [min(max((reward + bias) * scale, -clip), clip) for reward in rewards]
        expected += compute_expected_advantages(shaped, estimator)
    if whiten == "episodes":
        mean, std = statistics.fmean(expected), statistics.pstdev(expected) + 1e-6
        expected = [(value - mean) / std for value in expected]
    assert [len(values) for values in advantages] == [len(rewards) for rewards in drawn_rewards]
    assert np.concatenate(advantages).tolist() == pytest.approx(expected, rel=1e-6, abs=1e-6)
