"""The policy loss against numbers worked out by hand."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.algorithms.losses import (
    k1,
    k3,
    merge_stats,
    policy_loss,
    reward_to_go,
    sequence_ratio,
    token_weights,
)
from saccade.config import Loss, load_recipe
from saccade.errors import ConfigError

AGGREGATIONS = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum_norm")


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def one(ratio, advantage, **settings):
    """The loss and gradient of a single token with this ratio to the old policy."""
    old = tensor([-1.0])
    logp = (old + math.log(ratio)).requires_grad_()
    loss, stats = policy_loss(logp, old, tensor([advantage]), tensor([1.0]), settings=Loss(**settings))
    loss.backward()
    return loss.item(), logp.grad.item(), stats


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.0, 2.0, -2.0, -2.0),
        (1.1, 2.0, -2.2, -2.2),
        (1.5, 2.0, -2.4, 0.0),  # above 1 + 0.2: clipped
        (0.5, 2.0, -1.0, -1.0),  # low ratio, good action: not clipped
        (0.5, -2.0, 1.6, 0.0),  # below 1 - 0.2: clipped
        (1.5, -2.0, 3.0, 3.0),
        (5.0, -2.0, 10.0, 10.0),
        (5.0, 0.0, 0.0, 0.0),
    ],
)
def test_the_clipped_ratio(ratio, advantage, loss, gradient):
    value, slope, stats = one(ratio, advantage)
    assert (value, slope) == pytest.approx((loss, gradient))
    assert stats["clip_fraction"].item() == float(gradient == 0 and advantage != 0)
    assert stats["ratio_mean"].item() == pytest.approx(ratio)


def test_clip_higher_and_dual_clip():
    assert one(1.25, 1.0, clip_high=0.28)[:2] == pytest.approx((-1.25, -1.25))
    assert one(1.3, 1.0, clip_high=0.28)[:2] == pytest.approx((-1.28, 0.0))
    assert one(5.0, -2.0, dual_clip=3.0)[:2] == pytest.approx((6.0, 0.0))
    assert one(5.0, -2.0, dual_clip=3.0)[2]["clip_fraction"].item() == 1.0
    assert one(2.0, -2.0, dual_clip=3.0)[:2] == pytest.approx((4.0, 4.0))
    assert one(5.0, 2.0, dual_clip=3.0)[:2] == pytest.approx((-2.4, 0.0))


def test_without_old_logprobs_the_ratio_is_one_and_the_gradient_is_the_advantage():
    logp = tensor([-1.0, -2.0]).requires_grad_()
    loss, stats = policy_loss(logp, None, tensor([3.0, -1.0]), tensor([0.5, 0.5]), settings=Loss())
    loss.backward()
    assert loss.item() == pytest.approx(-1.0)
    assert logp.grad.tolist() == pytest.approx([-1.5, 0.5])
    assert (stats["ratio_max"].item(), stats["clip_fraction"].item(), stats["approx_kl"].item()) == (1.0, 0.0, 0.0)
    assert (stats["importance_mean"].item(), stats["logprob_gap_max"].item()) == (1.0, 0.0)


def test_token_weights_by_hand():
    seq_N = torch.tensor([7, 7, 7, 2])
    assert token_weights(seq_N, aggregation="token_mean").tolist() == [0.25] * 4
    assert token_weights(seq_N, aggregation="seq_mean_token_mean").tolist() == pytest.approx([1 / 6] * 3 + [1 / 2])
    assert token_weights(seq_N, aggregation="seq_mean_token_sum_norm", sum_norm=10.0).tolist() == pytest.approx(
        [0.05] * 4
    )
    assert token_weights(torch.tensor([], dtype=torch.long), aggregation="token_mean").tolist() == []


def test_the_three_aggregations_by_hand():
    logp, adv = tensor([-1.0] * 4), tensor([1.0, 2.0, 3.0, 10.0])
    losses = {}
    for aggregation in AGGREGATIONS:
        weight = token_weights(torch.tensor([0, 0, 0, 1]), aggregation=aggregation, sum_norm=10.0)
        losses[aggregation] = policy_loss(logp, None, adv, weight, settings=Loss())[0].item()
    expected = {"token_mean": -4.0, "seq_mean_token_mean": -(2.0 + 10.0) / 2, "seq_mean_token_sum_norm": -(6 + 10) / 20}
    assert losses == pytest.approx(expected)


def test_importance_weights_are_truncated_and_always_measured():
    logp, adv, weight = tensor([-1.0, -1.0]), tensor([1.0, 1.0]), tensor([0.5, 0.5])
    engine = tensor([-1.0 - math.log(4.0), -1.0 + math.log(2.0)])  # weights 4 and 0.5
    loss, stats = policy_loss(logp, None, adv, weight, settings=Loss(importance_cap=2.0), engine_logp_N=engine)
    assert loss.item() == pytest.approx(-(2.0 + 0.5) / 2)
    off, measured = policy_loss(logp, None, adv, weight, settings=Loss(importance_cap=None), engine_logp_N=engine)
    assert off.item() == pytest.approx(-1.0)
    for found in (stats, measured):
        assert found["importance_mean"].item() == pytest.approx(2.25)
        assert found["importance_max"].item() == pytest.approx(4.0)
        assert found["importance_truncated"].item() == 0.5
        assert found["logprob_gap_mean"].item() == pytest.approx(1.5 * math.log(2.0))
        assert found["logprob_gap_max"].item() == pytest.approx(2 * math.log(2.0))


def test_the_importance_weight_compares_the_old_policy_with_the_engine():
    old, engine = tensor([-1.0]), tensor([-1.0 - math.log(1.5)])
    logp = tensor([-1.0 + math.log(1.1)]).requires_grad_()
    loss, _ = policy_loss(logp, old, tensor([1.0]), tensor([1.0]), settings=Loss(), engine_logp_N=engine)
    loss.backward()
    assert (loss.item(), logp.grad.item()) == pytest.approx((-1.65, -1.65))


def test_stale_tokens_have_a_cap_of_their_own():
    """One weight per token: 4 and 8, of which the first token is fresh and the second stale."""
    logp, adv, weight = tensor([-1.0, -1.0]), tensor([1.0, 1.0]), tensor([0.5, 0.5])
    engine = tensor([-1.0 - math.log(4.0), -1.0 - math.log(8.0)])
    stale = torch.tensor([False, True])

    def loss(**chosen):
        return policy_loss(logp, None, adv, weight, settings=Loss(**chosen), engine_logp_N=engine, stale_N=stale)

    both, stats = loss()
    assert both.item() == pytest.approx(-(2.0 + 5.0) / 2)
    assert stats["importance_truncated"].item() == 1.0
    assert loss(importance_cap=None)[0].item() == pytest.approx(-(1.0 + 5.0) / 2)
    assert loss(behaviour_cap=None)[0].item() == pytest.approx(-(2.0 + 1.0) / 2)
    assert loss(behaviour_cap=100.0)[0].item() == pytest.approx(-(2.0 + 8.0) / 2)
    assert loss(importance_cap=None, behaviour_cap=None)[1]["importance_mean"].item() == pytest.approx(6.0)


def test_against_the_behaviour_policy_the_gap_is_in_the_ratio_and_nowhere_else():
    """PPO without decoupling: r = exp(-1 + 1.5) = 1.65, clipped at 1.2; no weight on top."""
    logp, engine = tensor([-1.0]).requires_grad_(), tensor([-1.5])
    chosen = Loss(against="behaviour", importance_cap=None, behaviour_cap=None)
    loss, stats = policy_loss(logp, tensor([-1.0]), tensor([1.0]), tensor([1.0]), settings=chosen, engine_logp_N=engine)
    assert loss.item() == pytest.approx(-1.2)
    assert stats["ratio_mean"].item() == stats["importance_mean"].item() == pytest.approx(math.exp(0.5))


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (
            "rl.loss.against=behaviour",
            "a cap would count it twice: set rl.loss.importance_cap and rl.loss.behaviour_cap",
        ),
        ("rl.loss={against: behaviour, importance_cap: null}", "a cap would count it twice"),
        ("rl.kl={loss: 0.1, reward: 0.1}", "would count one distance twice: set one of them to 0"),
    ],
)
def test_what_would_count_twice_is_refused_in_one_sentence(override, words):
    with pytest.raises(ConfigError) as caught:
        load_recipe("tiny/para_grpo", [override])
    assert str(caught.value).startswith("tiny/para_grpo: rl.")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


# ---- sequence ratios -----------------------------------------------------------------------------------------------

SEQUENCES = torch.tensor([7, 7, 2])
NEW, OLD, ADV = tensor([-1.0, -2.0, -3.0]), tensor([-1.2, -2.0, -2.9]), tensor([2.0, 2.0, -1.0])


def gspo(logp, adv=ADV, seq=SEQUENCES, **chosen):
    weight = token_weights(seq, aggregation="seq_mean_token_mean").double()
    return policy_loss(logp, OLD, adv, weight, settings=Loss(ratio="sequence", **chosen), seq_N=seq)


def test_the_sequence_ratio_and_its_gradient_by_hand():
    """Mean log ratios (0.2 + 0) / 2 = 0.1 and -0.1: s = e^0.1 with advantage 2, s = e^-0.1 with advantage -1."""
    logp = NEW.clone().requires_grad_()
    loss, stats = gspo(logp)
    loss.backward()
    up, down = math.exp(0.1), math.exp(-0.1)
    assert loss.item() == pytest.approx(-(2 * up - down) / 2)
    assert logp.grad.tolist() == pytest.approx([-up / 2, -up / 2, down / 2])
    assert stats["ratio_mean"].item() == pytest.approx((2 * up + down) / 3)


def test_loss_and_gradient_are_those_of_the_published_objective():
    """Equation 5 of arXiv 2507.18071 written as it stands, with a gradient through s itself."""
    ours, theirs = NEW.clone().requires_grad_(), NEW.clone().requires_grad_()
    loss, _ = gspo(ours)
    loss.backward()
    s = torch.stack([(theirs - OLD)[:2].mean(), (theirs - OLD)[2:].mean()]).exp()
    adv = tensor([2.0, -1.0])
    published = -torch.minimum(s * adv, s.clamp(0.8, 1.2) * adv).mean()
    published.backward()
    assert loss.item() == pytest.approx(published.item())
    assert ours.grad.tolist() == pytest.approx(theirs.grad.tolist())


def test_a_sequence_is_clipped_as_a_whole():
    """Token ratios 1.22 and 1.0: by tokens one is clipped, by sequences (1.105 < 1.2) none, at 1.05 both."""
    assert gspo(NEW)[1]["clip_fraction"].item() == 0.0
    logp = NEW.clone().requires_grad_()
    loss, stats = gspo(logp, clip_high=0.05)
    loss.backward()
    assert stats["clip_fraction"].item() == pytest.approx(2 / 3)
    assert logp.grad.tolist() == pytest.approx([0.0, 0.0, math.exp(-0.1) / 2])
    by_token = policy_loss(NEW, OLD, ADV, tensor([1.0] * 3), settings=Loss(), seq_N=SEQUENCES)[1]
    assert by_token["clip_fraction"].item() == pytest.approx(1 / 3)
    with pytest.raises(ValueError, match="which tokens are one sequence"):
        policy_loss(NEW, OLD, ADV, ADV, settings=Loss(ratio="sequence"))


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(-5, 0), st.floats(-5, 0)), min_size=1, max_size=8))
def test_of_sequences_of_one_token_the_ratio_is_the_tokens(pairs):
    logp, old = tensor([one for one, _ in pairs]), tensor([two for _, two in pairs])
    assert torch.allclose(sequence_ratio(logp, old, torch.arange(len(pairs))), (logp - old).exp())


@settings(deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=20), st.integers(0, 999), st.integers(0, 6))
def test_whole_sequences_in_two_micro_batches_are_the_whole(lengths, seed, cut):
    """Cut anywhere between sequences, with tokens of sequences in any order."""
    torch.manual_seed(seed)
    seq = torch.cat([torch.full((length,), number) for number, length in enumerate(lengths)])
    seq = seq[torch.randperm(len(seq))]
    logp, old, adv, engine = torch.randn(4, len(seq), dtype=torch.float64)
    logp.requires_grad_()
    weight = token_weights(seq, aggregation="seq_mean_token_mean").double()

    def part(chosen):
        return policy_loss(
            logp[chosen],
            old[chosen],
            adv[chosen],
            weight[chosen],
            settings=Loss(ratio="sequence"),
            engine_logp_N=engine[chosen],
            seq_N=seq[chosen],
        )[0]

    whole = part(torch.ones_like(seq, dtype=torch.bool))
    total = part(seq < cut) + part(seq >= cut)
    assert total.item() == pytest.approx(whole.item(), rel=1e-9, abs=1e-12)
    [one], [two] = torch.autograd.grad(whole, logp), torch.autograd.grad(total, logp)
    assert torch.allclose(one, two)


# ---- distance to the reference -------------------------------------------------------------------------------------


def test_a_penalty_is_borne_by_what_came_before_it():
    value, seq = tensor([1.0, 2.0, 4.0, 8.0, 16.0]), torch.tensor([3, 3, 3, 0, 0])
    assert reward_to_go(value, seq).tolist() == [7.0, 6.0, 4.0, 24.0, 16.0]
    assert reward_to_go(tensor([]), torch.tensor([], dtype=torch.long)).tolist() == []


def test_kl_in_the_loss():
    logp, ref = tensor([-1.0, -2.0]).requires_grad_(), tensor([-1.5, -2.0])
    by_hand = math.exp(-0.5) + 0.5 - 1
    assert k3(logp, ref).tolist() == pytest.approx([by_hand, 0.0])
    assert k1(logp, ref).tolist() == pytest.approx([0.5, 0.0])
    given = {"settings": Loss(), "kl_weight": 0.1}
    loss, stats = policy_loss(logp, None, tensor([0.0, 0.0]), tensor([0.5, 0.5]), ref_logp_N=ref, **given)
    loss.backward()
    assert loss.item() == pytest.approx(0.1 * by_hand / 2)
    assert logp.grad.tolist() == pytest.approx([0.05 * (1 - math.exp(-0.5)), 0.0])
    assert stats["kl"].item() == pytest.approx(by_hand / 2)
    assert "kl" not in policy_loss(logp, None, logp, logp, settings=Loss())[1], "there is nothing to be far from"
    with pytest.raises(ValueError, match="no reference logprobs"):
        policy_loss(logp, None, tensor([0.0, 0.0]), tensor([0.5, 0.5]), **given)


@pytest.mark.slow
@settings(deadline=None)
@given(st.integers(1, 30), st.lists(st.integers(0, 30), max_size=3), st.sampled_from(AGGREGATIONS), st.integers(0, 999))
def test_micro_batches_add_up_to_the_whole_wherever_they_are_cut(count, cuts, aggregation, seed):
    torch.manual_seed(seed)
    logp, old, adv, engine, ref = torch.randn(5, count, dtype=torch.float64)
    logp.requires_grad_()
    weight = token_weights(torch.randint(0, 4, (count,)), aggregation=aggregation)
    chosen = Loss(dual_clip=3.0, aggregation=aggregation)

    def part(start, stop):
        return policy_loss(
            logp[start:stop],
            old[start:stop],
            adv[start:stop],
            weight[start:stop],
            settings=chosen,
            engine_logp_N=engine[start:stop],
            ref_logp_N=ref[start:stop],
            kl_weight=0.1,
        )

    whole, stats = part(0, count)
    edges = [0, *sorted(min(cut, count) for cut in cuts), count]
    pieces = [part(start, stop) for start, stop in itertools.pairwise(edges)]
    total = sum(loss for loss, _ in pieces)
    assert total.item() == pytest.approx(whole.item(), rel=1e-9, abs=1e-12)
    whole_gradient, *_ = torch.autograd.grad(whole, logp)
    summed_gradient, *_ = torch.autograd.grad(total, logp)
    assert torch.allclose(whole_gradient, summed_gradient)
    merged = merge_stats([found for _, found in pieces])
    assert merged == pytest.approx({name: value.item() for name, value in stats.items()}, rel=1e-4, abs=1e-5)


def test_far_policies_stay_finite_and_empty_parts_count_nothing():
    logp = tensor([-1e4, 0.0]).requires_grad_()
    loss, stats = policy_loss(logp, tensor([0.0, -1e4]), tensor([1.0, 0.0]), tensor([0.5, 0.5]), settings=Loss())
    loss.backward()
    assert all(math.isfinite(value.item()) for value in (loss, logp.grad.sum(), *stats.values()))
    empty, none = policy_loss(tensor([]), None, tensor([]), tensor([]), settings=Loss())
    assert (empty.item(), none["tokens"].item(), none["ratio_max"].item()) == (0.0, 0.0, 0.0)
    assert merge_stats([]) == {"tokens": 0.0}


def test_half_precision_is_raised_and_shapes_are_checked():
    loss, _ = policy_loss(torch.zeros(2, dtype=torch.bfloat16), None, torch.ones(2), torch.ones(2), settings=Loss())
    assert loss.dtype is torch.float32
    with pytest.raises(ValueError, match="flat tensors of one shape"):
        policy_loss(tensor([0.0, 0.0]), None, tensor([1.0]), tensor([1.0, 1.0]), settings=Loss())
