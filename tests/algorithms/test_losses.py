"""The policy loss against numbers worked out by hand."""

import itertools
import math

import pytest
import torch
from error_cases import raises
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.algorithms.policy_loss import (
    compute_policy_loss,
    compute_reward_to_go,
    compute_token_weights,
    merge_stats,
)
from saccade.algorithms.ratios import compute_sequence_ratio, k1, k3
from saccade.config.load import load_recipe
from saccade.config.schema import LossConfig
from saccade.errors import ConfigError

AGGREGATIONS = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum_norm")


TOKEN_SETTINGS = ("clip_low", "clip_high", "dual_clip")


def make_settings(**settings):
    """Return the loss's section of a recipe; the clip range is a setting of the loss itself."""
    own = {name: settings.pop(name) for name in TOKEN_SETTINGS if name in settings}
    return LossConfig(settings=own, **settings)


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def compute_token_loss(ratio, advantage, **settings):
    """Return loss, gradient and statistics of a single token with this ratio to the old policy."""
    old = tensor([-1.0])
    logp = (old + math.log(ratio)).requires_grad_()
    loss, stats = compute_policy_loss(logp, old, tensor([advantage]), tensor([1.0]), settings=make_settings(**settings))
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
def test_clipped_ratio(ratio, advantage, loss, gradient):
    actual_loss, actual_gradient, stats = compute_token_loss(ratio, advantage)
    assert (actual_loss, actual_gradient) == pytest.approx((loss, gradient))
    assert stats["clip_fraction"].item() == float(gradient == 0 and advantage != 0)
    assert stats["ratio_mean"].item() == pytest.approx(ratio)


def test_clip_higher_and_dual_clip():
    assert compute_token_loss(1.25, 1.0, clip_high=0.28)[:2] == pytest.approx((-1.25, -1.25))
    assert compute_token_loss(1.3, 1.0, clip_high=0.28)[:2] == pytest.approx((-1.28, 0.0))
    assert compute_token_loss(5.0, -2.0, dual_clip=3.0)[:2] == pytest.approx((6.0, 0.0))
    assert compute_token_loss(5.0, -2.0, dual_clip=3.0)[2]["clip_fraction"].item() == 1.0
    assert compute_token_loss(2.0, -2.0, dual_clip=3.0)[:2] == pytest.approx((4.0, 4.0))
    assert compute_token_loss(5.0, 2.0, dual_clip=3.0)[:2] == pytest.approx((-2.4, 0.0))


def test_without_old_logprobs_the_ratio_is_one_and_the_gradient_is_the_advantage():
    logp = tensor([-1.0, -2.0]).requires_grad_()
    loss, stats = compute_policy_loss(logp, None, tensor([3.0, -1.0]), tensor([0.5, 0.5]), settings=LossConfig())
    loss.backward()
    assert loss.item() == pytest.approx(-1.0)
    assert logp.grad.tolist() == pytest.approx([-1.5, 0.5])
    assert (stats["ratio_max"].item(), stats["clip_fraction"].item(), stats["approx_kl"].item()) == (1.0, 0.0, 0.0)
    assert (stats["tis_weight_mean"].item(), stats["engine_trainer_logprob_diff_max"].item()) == (1.0, 0.0)


def test_token_weights_by_hand():
    seq_N = torch.tensor([7, 7, 7, 2])
    assert compute_token_weights(seq_N, aggregation="token_mean").tolist() == [0.25] * 4
    assert compute_token_weights(seq_N, aggregation="seq_mean_token_mean").tolist() == pytest.approx(
        [1 / 6] * 3 + [1 / 2]
    )
    assert compute_token_weights(
        seq_N, aggregation="seq_mean_token_sum_norm", token_sum_divisor=10.0
    ).tolist() == pytest.approx([0.05] * 4)
    assert compute_token_weights(torch.tensor([], dtype=torch.long), aggregation="token_mean").tolist() == []


def test_aggregations_by_hand():
    logp, adv = tensor([-1.0] * 4), tensor([1.0, 2.0, 3.0, 10.0])
    losses = {}
    for aggregation in AGGREGATIONS:
        weight = compute_token_weights(torch.tensor([0, 0, 0, 1]), aggregation=aggregation, token_sum_divisor=10.0)
        losses[aggregation] = compute_policy_loss(logp, None, adv, weight, settings=LossConfig())[0].item()
    expected = {"token_mean": -4.0, "seq_mean_token_mean": -(2.0 + 10.0) / 2, "seq_mean_token_sum_norm": -(6 + 10) / 20}
    assert losses == pytest.approx(expected)


def test_importance_weights_are_truncated_at_their_cap_and_always_reported():
    logp, adv, weight = tensor([-1.0, -1.0]), tensor([1.0, 1.0]), tensor([0.5, 0.5])
    engine = tensor([-1.0 - math.log(4.0), -1.0 + math.log(2.0)])  # weights 4 and 0.5
    loss, stats = compute_policy_loss(logp, None, adv, weight, settings=LossConfig(tis_cap=2.0), engine_logp_N=engine)
    assert loss.item() == pytest.approx(-(2.0 + 0.5) / 2)
    loss_without_cap, stats_without_cap = compute_policy_loss(
        logp, None, adv, weight, settings=LossConfig(tis_cap=None), engine_logp_N=engine
    )
    assert loss_without_cap.item() == pytest.approx(-1.0)
    fractions = [values["frac_tis_truncated"].item() for values in (stats, stats_without_cap)]
    assert fractions == [0.5, 0.0]
    for values in (stats, stats_without_cap):
        assert values["tis_weight_mean"].item() == pytest.approx(2.25)
        assert values["tis_weight_max"].item() == pytest.approx(4.0)
        assert values["engine_trainer_logprob_diff_mean"].item() == pytest.approx(1.5 * math.log(2.0))
        assert values["engine_trainer_logprob_diff_max"].item() == pytest.approx(2 * math.log(2.0))


def test_importance_weight_compares_the_old_policy_with_the_engine():
    old, engine = tensor([-1.0]), tensor([-1.0 - math.log(1.5)])
    logp = tensor([-1.0 + math.log(1.1)]).requires_grad_()
    loss, _ = compute_policy_loss(logp, old, tensor([1.0]), tensor([1.0]), settings=LossConfig(), engine_logp_N=engine)
    loss.backward()
    assert (loss.item(), logp.grad.item()) == pytest.approx((-1.65, -1.65))


def test_stale_tokens_have_their_own_cap():
    """The weights are 4 for a fresh token and 8 for a stale one."""
    logp, adv, weight = tensor([-1.0, -1.0]), tensor([1.0, 1.0]), tensor([0.5, 0.5])
    engine = tensor([-1.0 - math.log(4.0), -1.0 - math.log(8.0)])
    stale = torch.tensor([False, True])

    def loss(**settings):
        return compute_policy_loss(
            logp, None, adv, weight, settings=LossConfig(**settings), engine_logp_N=engine, stale_N=stale
        )

    both, stats = loss()
    assert both.item() == pytest.approx(-(2.0 + 5.0) / 2)
    assert stats["frac_tis_truncated"].item() == 1.0
    assert loss(tis_cap=None)[0].item() == pytest.approx(-(1.0 + 5.0) / 2)
    assert loss(stale_tis_cap=None)[0].item() == pytest.approx(-(2.0 + 1.0) / 2)
    assert loss(stale_tis_cap=100.0)[0].item() == pytest.approx(-(2.0 + 8.0) / 2)
    assert loss(tis_cap=None, stale_tis_cap=None)[1]["tis_weight_mean"].item() == pytest.approx(6.0)


def test_tokens_above_a_cap_can_be_dropped():
    """The weights are 4, 0.5 (fresh) and 8, 5 (stale): a dropped token has no loss and still counts in the average."""
    logp, weight = tensor([-1.0] * 4).requires_grad_(), tensor([0.25] * 4)
    engine = -1.0 - tensor([4.0, 0.5, 8.0, 5.0]).log()
    stale = torch.tensor([False, False, True, True])

    def compute(**settings):
        loss, stats = compute_policy_loss(
            logp, None, tensor([1.0] * 4), weight, settings=LossConfig(**settings), engine_logp_N=engine, stale_N=stale
        )
        [gradient] = torch.autograd.grad(loss, logp)
        return loss.item(), gradient.tolist(), stats["frac_tis_truncated"].item()

    loss, gradient, _ = compute(above_tis_cap="mask")
    assert (loss, gradient) == (pytest.approx(-(0.5 + 5 + 5) / 4), pytest.approx([0.0, -0.125, -1.25, -1.25]))
    # exp(log 5) is 5 up to rounding: a cap slightly above keeps the last token.
    loss, gradient, truncated = compute(above_stale_tis_cap="mask", stale_tis_cap=5.001)
    assert (loss, truncated) == (pytest.approx(-(2 + 0.5 + 5) / 4), 0.5)
    assert gradient == pytest.approx([-0.5, -0.125, 0.0, -1.25])
    loss, gradient, _ = compute(above_tis_cap="mask", above_stale_tis_cap="mask", tis_cap=5.0, stale_tis_cap=4.9)
    assert (loss, gradient) == (pytest.approx(-4.5 / 4), pytest.approx([-1.0, -0.125, 0.0, 0.0]))


def test_a_dropped_token_keeps_its_kl_term():
    logp, engine, ref = tensor([-1.0]), tensor([-3.0]), tensor([-1.5])
    chosen = {"settings": LossConfig(above_tis_cap="mask"), "engine_logp_N": engine, "ref_logp_N": ref}
    loss, _ = compute_policy_loss(logp, None, tensor([1.0]), tensor([1.0]), kl_coef=0.1, **chosen)
    assert loss.item() == pytest.approx(0.1 * (math.exp(-0.5) + 0.5 - 1))


@pytest.mark.parametrize("cap", ["tis_cap", "stale_tis_cap"])
def test_dropping_needs_a_cap(cap):
    with raises(ConfigError, key=f"rl.loss.above_{cap}", value="mask"):
        load_recipe("tiny/para_grpo", [f"rl.loss={{{cap}: null, above_{cap}: mask}}"])


def test_approx_kl_is_unbiased_for_samples_of_the_old_policy():
    """Exactly, over a vocabulary of four: the mean under the old policy is sum q log(q / p), with the new policy p."""
    p = tensor([0.3, -1.0, 0.5, 0.1]).log_softmax(0)
    q = tensor([0.1, 0.4, -0.3, 0.0]).log_softmax(0)
    values = [
        compute_policy_loss(new, old, tensor([1.0]), tensor([1.0]), settings=LossConfig())[1]["approx_kl"].item()
        for new, old in zip(p.split(1), q.split(1), strict=True)
    ]
    ratio = (p - q).exp()
    assert values == pytest.approx((ratio - 1 - ratio.log()).tolist())
    assert sum(q.exp().tolist()[i] * values[i] for i in range(4)) == pytest.approx((q.exp() * (q - p)).sum().item())


def test_with_the_engine_as_old_policy_only_the_ratio_holds_the_difference():
    """PPO without decoupling: r = exp(-1 + 1.5) = 1.65, clipped at 1.2; no weight on top."""
    logp, engine = tensor([-1.0]).requires_grad_(), tensor([-1.5])
    chosen = LossConfig(old_logprobs="engine", tis_cap=None, stale_tis_cap=None)
    loss, stats = compute_policy_loss(
        logp, tensor([-1.0]), tensor([1.0]), tensor([1.0]), settings=chosen, engine_logp_N=engine
    )
    assert loss.item() == pytest.approx(-1.2)
    assert stats["ratio_mean"].item() == stats["tis_weight_mean"].item() == pytest.approx(math.exp(0.5))


@pytest.mark.parametrize(
    ("override", "section"),
    [
        ("rl.loss.old_logprobs=engine", "rl.loss"),
        ("rl.loss={old_logprobs: engine, tis_cap: null}", "rl.loss"),
        ("rl.kl={loss_coef: 0.1, advantage_coef: 0.1}", "rl.kl"),
    ],
)
def test_settings_that_count_a_term_twice_are_rejected(override, section):
    with raises(ConfigError) as caught:
        load_recipe("tiny/para_grpo", [override])
    assert str(caught.value).startswith(f"tiny/para_grpo: {section}.")


# ---- sequence ratios -------------------------------------------------------------------------------------------------

SEQUENCES = torch.tensor([7, 7, 2])
NEW, OLD, ADV = tensor([-1.0, -2.0, -3.0]), tensor([-1.2, -2.0, -2.9]), tensor([2.0, 2.0, -1.0])


def compute_gspo_loss(logp, **settings):
    weight = compute_token_weights(SEQUENCES, aggregation="seq_mean_token_mean").double()
    chosen = make_settings(name="gspo", **{"clip_low": 0.2, "clip_high": 0.2, **settings})
    return compute_policy_loss(logp, OLD, ADV, weight, settings=chosen, seq_N=SEQUENCES)


def test_sequence_ratio_and_its_gradient_by_hand():
    """Mean log ratios (0.2 + 0) / 2 = 0.1 and -0.1: s = e^0.1 with advantage 2, s = e^-0.1 with advantage -1."""
    logp = NEW.clone().requires_grad_()
    loss, stats = compute_gspo_loss(logp)
    loss.backward()
    up, down = math.exp(0.1), math.exp(-0.1)
    assert loss.item() == pytest.approx(-(2 * up - down) / 2)
    assert logp.grad.tolist() == pytest.approx([-up / 2, -up / 2, down / 2])
    assert stats["ratio_mean"].item() == pytest.approx((2 * up + down) / 3)


def test_loss_and_gradient_equal_the_published_objective():
    """The published objective is equation 5 of arXiv 2507.18071, with a gradient through s itself."""
    logp, published_logp = NEW.clone().requires_grad_(), NEW.clone().requires_grad_()
    loss, _ = compute_gspo_loss(logp)
    loss.backward()
    s = torch.stack([(published_logp - OLD)[:2].mean(), (published_logp - OLD)[2:].mean()]).exp()
    adv = tensor([2.0, -1.0])
    published_loss = -torch.minimum(s * adv, s.clamp(0.8, 1.2) * adv).mean()
    published_loss.backward()
    assert loss.item() == pytest.approx(published_loss.item())
    assert logp.grad.tolist() == pytest.approx(published_logp.grad.tolist())


def test_sequences_are_clipped_as_a_whole():
    """Token ratios 1.22 and 1.0: by tokens one is clipped, by sequences (1.105 < 1.2) none, at 1.05 both."""
    assert compute_gspo_loss(NEW)[1]["clip_fraction"].item() == 0.0
    logp = NEW.clone().requires_grad_()
    loss, stats = compute_gspo_loss(logp, clip_high=0.05)
    loss.backward()
    assert stats["clip_fraction"].item() == pytest.approx(2 / 3)
    assert logp.grad.tolist() == pytest.approx([0.0, 0.0, math.exp(-0.1) / 2])
    by_token = compute_policy_loss(NEW, OLD, ADV, tensor([1.0] * 3), settings=LossConfig(), seq_N=SEQUENCES)[1]
    assert by_token["clip_fraction"].item() == pytest.approx(1 / 3)


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(-5, 0), st.floats(-5, 0)), min_size=1, max_size=8))
def test_sequence_ratio_of_one_token_is_the_token_ratio(pairs):
    logp, old = tensor([new for new, _ in pairs]), tensor([old for _, old in pairs])
    assert torch.allclose(compute_sequence_ratio(logp, old, torch.arange(len(pairs))), (logp - old).exp())


@pytest.mark.slow
@settings(deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=20), st.integers(0, 999), st.integers(0, 6))
def test_sequence_losses_of_two_micro_batches_add_up(lengths, seed, cut):
    """The batch is cut between sequences, and the tokens are in random order."""
    torch.manual_seed(seed)
    seq = torch.cat([torch.full((length,), number) for number, length in enumerate(lengths)])
    seq = seq[torch.randperm(len(seq))]
    logp, old, adv, engine = torch.randn(4, len(seq), dtype=torch.float64)
    logp.requires_grad_()
    weight = compute_token_weights(seq, aggregation="seq_mean_token_mean").double()

    def compute_part(mask):
        return compute_policy_loss(
            logp[mask],
            old[mask],
            adv[mask],
            weight[mask],
            settings=make_settings(name="gspo", clip_low=0.2, clip_high=0.2),
            engine_logp_N=engine[mask],
            seq_N=seq[mask],
        )[0]

    whole = compute_part(torch.ones_like(seq, dtype=torch.bool))
    total = compute_part(seq < cut) + compute_part(seq >= cut)
    assert total.item() == pytest.approx(whole.item(), rel=1e-9, abs=1e-12)
    [whole_gradient], [summed_gradient] = torch.autograd.grad(whole, logp), torch.autograd.grad(total, logp)
    assert torch.allclose(whole_gradient, summed_gradient)


# ---- divergence from the reference -----------------------------------------------------------------------------------


def test_reward_to_go_by_hand():
    value, seq = tensor([1.0, 2.0, 4.0, 8.0, 16.0]), torch.tensor([3, 3, 3, 0, 0])
    assert compute_reward_to_go(value, seq).tolist() == [7.0, 6.0, 4.0, 24.0, 16.0]
    assert compute_reward_to_go(tensor([]), torch.tensor([], dtype=torch.long)).tolist() == []


def test_kl_in_the_loss():
    logp, ref = tensor([-1.0, -2.0]).requires_grad_(), tensor([-1.5, -2.0])
    by_hand = math.exp(-0.5) + 0.5 - 1
    assert k3(logp, ref).tolist() == pytest.approx([by_hand, 0.0])
    assert k1(logp, ref).tolist() == pytest.approx([0.5, 0.0])
    chosen = {"settings": LossConfig(), "kl_coef": 0.1}
    loss, stats = compute_policy_loss(logp, None, tensor([0.0, 0.0]), tensor([0.5, 0.5]), ref_logp_N=ref, **chosen)
    loss.backward()
    assert loss.item() == pytest.approx(0.1 * by_hand / 2)
    assert logp.grad.tolist() == pytest.approx([0.05 * (1 - math.exp(-0.5)), 0.0])
    assert stats["kl"].item() == pytest.approx(by_hand / 2)
    assert "kl" not in compute_policy_loss(logp, None, logp, logp, settings=LossConfig())[1]
    with raises(ValueError, by=compute_policy_loss):
        compute_policy_loss(logp, None, tensor([0.0, 0.0]), tensor([0.5, 0.5]), **chosen)


@pytest.mark.slow
@settings(deadline=None)
@given(st.integers(1, 30), st.lists(st.integers(0, 30), max_size=3), st.sampled_from(AGGREGATIONS), st.integers(0, 999))
def test_micro_batches_add_up_for_any_cut(count, cuts, aggregation, seed):
    torch.manual_seed(seed)
    logp, old, adv, engine, ref = torch.randn(5, count, dtype=torch.float64)
    logp.requires_grad_()
    weight = compute_token_weights(torch.randint(0, 4, (count,)), aggregation=aggregation)
    chosen = make_settings(dual_clip=3.0, aggregation=aggregation)

    def compute_part(start, stop):
        return compute_policy_loss(
            logp[start:stop],
            old[start:stop],
            adv[start:stop],
            weight[start:stop],
            settings=chosen,
            engine_logp_N=engine[start:stop],
            ref_logp_N=ref[start:stop],
            kl_coef=0.1,
        )

    whole, stats = compute_part(0, count)
    edges = [0, *sorted(min(cut, count) for cut in cuts), count]
    pieces = [compute_part(start, stop) for start, stop in itertools.pairwise(edges)]
    total = sum(loss for loss, _ in pieces)
    assert total.item() == pytest.approx(whole.item(), rel=1e-9, abs=1e-12)
    whole_gradient, *_ = torch.autograd.grad(whole, logp)
    summed_gradient, *_ = torch.autograd.grad(total, logp)
    assert torch.allclose(whole_gradient, summed_gradient)
    merged = merge_stats([part_stats for _, part_stats in pieces])
    assert merged == pytest.approx({name: value.item() for name, value in stats.items()}, rel=1e-4, abs=1e-5)


def test_distant_policies_give_finite_values_and_empty_parts_zero():
    logp = tensor([-1e4, 0.0]).requires_grad_()
    loss, stats = compute_policy_loss(
        logp, tensor([0.0, -1e4]), tensor([1.0, 0.0]), tensor([0.5, 0.5]), settings=LossConfig()
    )
    loss.backward()
    assert all(math.isfinite(value.item()) for value in (loss, logp.grad.sum(), *stats.values()))
    loss, stats = compute_policy_loss(tensor([]), None, tensor([]), tensor([]), settings=LossConfig())
    assert (loss.item(), stats["tokens"].item(), stats["ratio_max"].item()) == (0.0, 0.0, 0.0)
    assert merge_stats([]) == {"tokens": 0.0}


def test_half_precision_is_promoted_and_shapes_are_checked():
    loss, _ = compute_policy_loss(
        torch.zeros(2, dtype=torch.bfloat16), None, torch.ones(2), torch.ones(2), settings=LossConfig()
    )
    assert loss.dtype is torch.float32
    with raises(ValueError, by=compute_policy_loss):
        compute_policy_loss(tensor([0.0, 0.0]), None, tensor([1.0]), tensor([1.0, 1.0]), settings=LossConfig())
