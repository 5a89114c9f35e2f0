"""Losses and credit against the same formulas written a second time, token by token, with nothing but `math`."""

import math
import random
import statistics

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.algorithms.advantages import credit
from saccade.algorithms.losses import k1, k3, policy_loss, reward_to_go, token_weights
from saccade.config import Advantage, Loss
from saccade.ledger import Ledger
from saccade.types import End, Episode, Group, Kind, Score, Scored, Task

AGGREGATIONS = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum_norm")
losses_st = st.builds(
    Loss,
    ratio=st.sampled_from(["token", "sequence"]),
    clip_low=st.sampled_from([0.1, 0.2]),
    clip_high=st.sampled_from([0.2, 0.28]),
    dual_clip=st.sampled_from([None, 1.5, 3.0]),
    aggregation=st.sampled_from(AGGREGATIONS),
    sum_norm=st.just(7.0),
    importance_cap=st.sampled_from([None, 0.9, 2.0]),
    behaviour_cap=st.sampled_from([None, 1.1, 5.0]),
)


def drawn(seed, lengths):
    """Logprobs of four policies near each other, advantages of sequences, and which tokens are stale."""
    dice = random.Random(seed)
    seq = [number for number, length in enumerate(lengths) for _ in range(length)]
    dice.shuffle(seq)
    adv = [dice.gauss(0, 1) for _ in lengths]
    now = [-dice.uniform(0.1, 3) for _ in seq]
    columns = {name: [value + dice.gauss(0, 0.4) for value in now] for name in ("old", "engine", "ref")}
    return {
        "seq": seq,
        "now": now,
        "adv": [adv[one] for one in seq],
        "stale": [dice.random() < 0.4 for _ in seq],
        **columns,
    }


def weight(data, at, loss):
    tokens, sequences = len(data["seq"]), len(set(data["seq"]))
    own = data["seq"].count(data["seq"][at])
    divisors = {
        "token_mean": tokens,
        "seq_mean_token_mean": sequences * own,
        "seq_mean_token_sum_norm": sequences * loss.sum_norm,
    }
    return 1 / divisors[loss.aggregation]


def ratio(data, at, loss):
    """The ratio of one token, or of its sequence: the geometric mean of its tokens'."""
    same = [i for i, one in enumerate(data["seq"]) if one == data["seq"][at]] if loss.ratio == "sequence" else [at]
    return math.exp(sum(data["now"][i] - data["old"][i] for i in same) / len(same))


def importance(data, at, loss):
    cap = loss.behaviour_cap if data["stale"][at] else loss.importance_cap
    return 1.0 if cap is None else min(math.exp(data["old"][at] - data["engine"][at]), cap)


def by_hand(data, loss, kl):
    """The loss of the whole, and its gradient to each token's logprob."""
    total, slopes = 0.0, []
    for at, adv in enumerate(data["adv"]):
        r = ratio(data, at, loss)
        bounded = min(max(r, 1 - loss.clip_low), 1 + loss.clip_high)
        gain, moves = min(r * adv, bounded * adv), r * adv <= bounded * adv
        if loss.dual_clip is not None and adv < 0 and gain < loss.dual_clip * adv:
            gain, moves = loss.dual_clip * adv, False
        far = data["ref"][at] - data["now"][at]
        scale = weight(data, at, loss)
        total += scale * (-gain * importance(data, at, loss) + kl * (math.exp(far) - far - 1))
        slopes.append(scale * (-r * adv * moves * importance(data, at, loss) + kl * (1 - math.exp(far))))
    return total, slopes


def ours(data, loss, kl, chosen):
    """The loss of a micro-batch of those tokens."""
    column = {name: torch.tensor(values)[chosen] for name, values in data.items() if name in ("seq", "stale")}
    number = {name: torch.tensor(values, dtype=torch.float64)[chosen] for name, values in data.items()}
    whole_N = token_weights(torch.tensor(data["seq"]), aggregation=loss.aggregation, sum_norm=loss.sum_norm)
    now_N = number["now"].requires_grad_()
    value, _ = policy_loss(
        now_N,
        number["old"],
        number["adv"],
        whole_N[chosen],
        settings=loss,
        engine_logp_N=number["engine"],
        stale_N=column["stale"],
        seq_N=column["seq"],
        ref_logp_N=number["ref"],
        kl_weight=kl,
    )
    (slope_N,) = torch.autograd.grad(value, now_N)
    return value.item(), slope_N.tolist()


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(
    losses_st, st.integers(0, 10**6), st.lists(st.integers(1, 5), min_size=1, max_size=5), st.sampled_from([0.0, 0.1])
)
def test_loss_and_gradient_and_micro_batches(loss, seed, lengths, kl):
    """The whole at once, and cut between sequences into micro-batches whose losses and gradients are added up."""
    data = drawn(seed, lengths)
    expected, slopes = by_hand(data, loss, kl)
    parts = [random.Random(seed).randrange(3) for _ in lengths]
    total, found = 0.0, [0.0] * len(slopes)
    for part in set(parts):
        chosen = [at for at, one in enumerate(data["seq"]) if parts[one] == part]
        value, own = ours(data, loss, kl, chosen)
        total += value
        for at, slope in zip(chosen, own, strict=True):
            found[at] += slope
    whole, at_once = ours(data, loss, kl, list(range(len(slopes))))
    assert (total, whole) == pytest.approx((expected, expected), rel=1e-5, abs=1e-6)
    assert found == pytest.approx(slopes, rel=1e-5, abs=1e-6)
    assert at_once == pytest.approx(slopes, rel=1e-5, abs=1e-6)


def test_estimators_of_the_distance_are_unbiased_and_so_is_the_gradient_of_the_plain_one():
    """Over a vocabulary of four, exactly: both have the mean sum p log(p / q); that of k3 is never below 0."""
    logits = torch.tensor([0.3, -1.0, 0.5, 0.1], dtype=torch.float64, requires_grad=True)
    p, q = logits.log_softmax(0), torch.tensor([0.1, 0.4, -0.3, 0.0], dtype=torch.float64).log_softmax(0)
    exact = (p.exp() * (p - q)).sum()
    chance = p.exp().detach()
    assert (chance * k1(p, q)).sum().item() == pytest.approx(exact.item())
    assert (chance * k3(p, q)).sum().item() == pytest.approx(exact.item())
    assert (k3(p, q) >= 0).all()
    (wanted,) = torch.autograd.grad(exact, logits, retain_graph=True)
    # in the reward: score function times the plain estimator
    (scored,) = torch.autograd.grad((chance * k1(p, q).detach() * p).sum(), logits, retain_graph=True)
    assert scored.tolist() == pytest.approx(wanted.tolist())
    # in the loss: (1 - q / p) per token, which is the gradient of the reverse distance
    reverse = -(q.exp() * (p - q)).sum()
    (wanted_reverse,) = torch.autograd.grad(reverse, logits, retain_graph=True)
    (found,) = torch.autograd.grad((chance * k3(p, q)).sum(), logits)
    assert found.tolist() == pytest.approx(wanted_reverse.tolist())


@pytest.mark.slow
@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.floats(-5, 5)), max_size=20))
def test_what_is_still_to_come(pairs):
    pairs = sorted(pairs, key=lambda pair: pair[0])
    expected = [sum(value for other, value in pairs[at:] if other == seq) for at, (seq, _) in enumerate(pairs)]
    values, seqs = (torch.tensor([pair[i] for pair in pairs]) for i in (1, 0))
    assert reward_to_go(values.double(), seqs.long()).tolist() == pytest.approx(expected, abs=1e-6)


# ---- credit --------------------------------------------------------------------------------------------------------


def group(name, rewards):
    task = Task(id=name, question="?", media=(), kind=Kind.OPEN, gold="red")
    episode = Episode(task=task, agent="direct", ledger=Ledger(), turns=(), end=End.ANSWERED)
    return Group(task=task, members=tuple(Scored(episode=episode, score=Score(value=one, parts={})) for one in rewards))


def compared(rewards, estimator):
    if len(rewards) < 2:
        return [0.0]
    if estimator == "leave_one_out":
        return [one - statistics.fmean(rewards[:at] + rewards[at + 1 :]) for at, one in enumerate(rewards)]
    centred = [one - statistics.fmean(rewards) for one in rewards]
    divisor = statistics.pstdev(rewards) + 1e-6 if estimator == "mean_std" else 1.0
    return [one / divisor for one in centred]


@pytest.mark.slow
@settings(deadline=None)
@given(
    st.lists(st.lists(st.sampled_from([0.0, 0.3, 0.8, 1.0, 1.3, 2.3]), min_size=1, max_size=8), min_size=1, max_size=5),
    st.sampled_from(["mean", "mean_std", "leave_one_out"]),
    st.booleans(),
    st.sampled_from([(1.0, 0.0, 20.0), (10.0, -0.2, 40.0), (10.0, -0.2, 5.0)]),
)
def test_credit_is_shaped_then_compared_then_whitened(drawn_rewards, estimator, whiten, shaping):
    scale, bias, clip = shaping
    chosen = Advantage(estimator=estimator, whiten=whiten, reward_scale=scale, reward_bias=bias, reward_clip=clip)
    found = credit([group(f"t{at}", rewards) for at, rewards in enumerate(drawn_rewards)], chosen)
    expected = []
    for rewards in drawn_rewards:
        expected += compared([min(max((one + bias) * scale, -clip), clip) for one in rewards], estimator)
    if whiten:
        mean, spread = statistics.fmean(expected), statistics.pstdev(expected) + 1e-6
        expected = [(one - mean) / spread for one in expected]
    assert [len(values) for values in found] == [len(rewards) for rewards in drawn_rewards]
    assert np.concatenate(found).tolist() == pytest.approx(expected, rel=1e-6, abs=1e-6)
