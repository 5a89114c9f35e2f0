"""Frame budgets, advantages and group filters against numbers worked out by hand."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from error_cases import raises
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.algorithms import group_advantages
from saccade.algorithms.frame_budget import draw_frame_budget
from saccade.algorithms.group_advantages import (
    compute_frac_correct_with_negative_advantage,
    resolve_estimator,
    shape_rewards,
    whiten,
    whiten_tokens,
)
from saccade.algorithms.group_filter import filter_by_advantage, select_groups
from saccade.config.schema import AdvantageConfig
from saccade.errors import ConfigError
from saccade.ledger import ImageRef, ImageSlot, Ledger
from saccade.types import AnswerType, Episode, EpisodeStatus, Group, Reply, Score, ScoredEpisode, Task, ToolResult, Turn

ESTIMATORS = ("dr_grpo", "grpo", "rloo")
rewards_st = st.lists(st.floats(-10, 10), min_size=1, max_size=12)


FILTERS = {"statuses": {}, "reward_std": {}}


def compute_group_advantages(groups, settings):
    return [advantage.every_token_G for advantage in group_advantages.compute_group_advantages(groups, settings)]


def make_task(name):
    return Task(id=name, question="?", media=(), answer_type=AnswerType.OPEN, ground_truth="red")


def make_group(name, rewards, statuses=None):
    task, statuses = make_task(name), statuses or [EpisodeStatus.ANSWERED] * len(rewards)
    episodes = [
        Episode(task=task, environment="direct", ledger=Ledger(), turns=(), status=status) for status in statuses
    ]
    scores = [Score(value=reward, correct=min(1.0, reward)) for reward in rewards]
    scored = (ScoredEpisode(episode=episode, score=score) for episode, score in zip(episodes, scores, strict=True))
    return Group(task=task, scored_episodes=tuple(scored))


# ---- frame budgets ---------------------------------------------------------------------------------------------------

BUDGETS = (4, 8, 16, 32, 64)


def test_draw_depends_on_seed_epoch_and_task_id_only():
    task = make_task("w-1")
    first = draw_frame_budget(BUDGETS, run_seed=3, epoch=1, task=task)
    assert first == draw_frame_budget(BUDGETS, run_seed=3, epoch=1, task=replace(task, question="Another wording?"))
    assert len({draw_frame_budget(BUDGETS, run_seed=seed, epoch=0, task=task) for seed in range(40)}) == 5
    assert len({draw_frame_budget(BUDGETS, run_seed=0, epoch=epoch, task=task) for epoch in range(40)}) == 5


def test_draws_are_uniform():
    counts = dict.fromkeys(BUDGETS, 0)
    for index in range(2000):
        counts[draw_frame_budget(BUDGETS, run_seed=0, epoch=0, task=make_task(f"w-{index}"))] += 1
    assert all(340 < count < 460 for count in counts.values())  # 400 expected, three standard deviations are 54


def test_no_budgets():
    assert draw_frame_budget((), run_seed=0, epoch=0, task=make_task("w")) is None


# ---- advantages ------------------------------------------------------------------------------------------------------


def test_dr_grpo_by_hand():
    assert resolve_estimator("dr_grpo", {})([1.3, 1.0, 0, 0]) == pytest.approx([0.725, 0.425, -0.575, -0.575])
    assert resolve_estimator("dr_grpo", {})([1.2, 1, 1, 1]) == pytest.approx([0.15, -0.05, -0.05, -0.05])


def test_the_other_estimators_by_hand():
    assert resolve_estimator("grpo", {})([1, 0, 0, 1]) == pytest.approx([1, -1, -1, 1], abs=1e-5)  # population std 0.5
    assert resolve_estimator("rloo", {})([3, 1, 0, 0]) == pytest.approx([3 - 1 / 3, 0, -4 / 3, -4 / 3])
    for estimator in ESTIMATORS:
        assert resolve_estimator(estimator, {})([0.7]).tolist() == [0.0]
        assert resolve_estimator(estimator, {})([]).tolist() == []
        assert resolve_estimator(estimator, {})([0.3] * 7) == pytest.approx([0.0] * 7, abs=1e-9)


def test_standard_deviation_and_epsilon_of_grpo_are_settings():
    """Deviations 1, 0, -1: the population's std is sqrt(2 / 3), the sample's is 1."""
    assert resolve_estimator("grpo", {"std": "sample", "epsilon": 1.0})([2, 1, 0]) == pytest.approx([0.5, 0.0, -0.5])
    population = resolve_estimator("grpo", {"epsilon": 1e-9})([2, 1, 0])
    assert population == pytest.approx([math.sqrt(1.5), 0.0, -math.sqrt(1.5)])


def test_accuracy_baseline_by_hand():
    """Two of four are correct, and one of these has a bonus of 0.3: mean correctness 0.5, sample std 0.577."""
    rewards, correct = [1.3, 1.0, 0.0, 0.0], np.array([1.0, 1.0, 0.0, 0.0])
    assert resolve_estimator("accuracy_baseline", {})(rewards, correct_G=correct) == pytest.approx(
        [0.8, 0.5, -0.5, -0.5]
    )
    divided = resolve_estimator("accuracy_baseline", {"std": "sample"})(rewards, correct_G=correct)
    assert divided == pytest.approx(np.array([0.8, 0.5, -0.5, -0.5]) / math.sqrt(1 / 3), rel=1e-5)
    # All are correct: bonuses are not divided by a std of 0.
    all_correct = resolve_estimator("accuracy_baseline", {"std": "sample"})([1.2, 1.0], correct_G=np.ones(2))
    assert all_correct == pytest.approx([0.2, 0.0])


def test_accuracy_baseline_reads_the_score_and_is_shaped_like_it():
    groups = [make_group("a", [1.3, 1.0, 0.0, 0.0])]
    for scale, bias in ((1.0, 0.0), (10.0, -0.2)):
        chosen = AdvantageConfig(estimator="accuracy_baseline", reward_scale=scale, reward_bias=bias)
        [advantages] = compute_group_advantages(groups, chosen)
        assert advantages == pytest.approx(scale * np.array([0.8, 0.5, -0.5, -0.5]))
    unmarked = replace(groups[0].scored_episodes[0], score=Score(value=1.0))
    with raises(ConfigError, key="rl.advantage.estimator", value="accuracy_baseline"):
        compute_group_advantages([replace(groups[0], scored_episodes=(unmarked, unmarked))], chosen)


def test_remax_subtracts_the_reward_of_the_greedy_episode():
    [group] = [make_group("a", [1.0, 0.0, 0.4])]
    [baseline] = make_group("a", [0.7]).scored_episodes
    chosen = AdvantageConfig(estimator="remax", reward_scale=10.0, reward_bias=-0.2)
    assert compute_group_advantages([replace(group, greedy_baseline=baseline)], chosen)[0] == pytest.approx(
        [3.0, -7.0, -3.0]
    )
    with raises(ConfigError, key="rl.advantage.estimator", value="remax"):
        compute_group_advantages([group], chosen)


def test_a_group_whose_baseline_a_filter_drops_is_dropped():
    group = make_group("a", [1.0, 0.0])
    failed, kept = (
        replace(group, greedy_baseline=make_group("a", [0.0], [status]).scored_episodes[0]) for status in (ERROR, OK)
    )
    assert select_groups([failed, kept], FILTERS, target=2).kept_groups == (kept,)


def test_reinforce_plus_plus_is_the_reward_until_tokens_are_whitened():
    chosen = AdvantageConfig(estimator="reinforce_plus_plus", whiten="tokens")
    groups = [make_group("a", [1.0, 0.0]), make_group("b", [1.0, 1.0])]
    assert [part.tolist() for part in compute_group_advantages(groups, chosen)] == [[1.0, 0.0], [1.0, 1.0]]
    minus_mean = chosen.model_copy(update={"settings": {"baseline": "group"}})
    assert [part.tolist() for part in compute_group_advantages(groups, minus_mean)] == [[0.5, -0.5], [0.0, 0.0]]


def test_whitening_over_tokens_by_hand():
    """Three tokens of one episode and one of another: mean 2, deviations 1, 1, 1, -3, sample variance 12 / 3."""
    assert whiten_tokens([3.0, 3.0, 3.0, -1.0]) == pytest.approx([0.5, 0.5, 0.5, -1.5], rel=1e-4)
    assert whiten_tokens([2.0, 2.0]).tolist() == [0.0, 0.0]
    assert (whiten_tokens([]).tolist(), whiten_tokens([4.0]).tolist()) == ([], [0.0])


@settings(deadline=None)
@given(st.lists(st.floats(-10, 10), min_size=2, max_size=30))
def test_tokens_are_whitened_to_mean_0_and_sample_std_1(values):
    white, std = whiten_tokens(values), np.std(values, ddof=1)
    assert white.mean() == pytest.approx(0.0, abs=1e-6)
    assert white.std(ddof=1) == pytest.approx(std / (std + 1e-5), abs=1e-6)


@settings(deadline=None)
@given(rewards_st, st.sampled_from(ESTIMATORS))
def test_advantages_of_a_group_sum_to_zero(rewards, estimator):
    assert resolve_estimator(estimator, {})(rewards).sum() == pytest.approx(0.0, abs=1e-6)


@settings(deadline=None)
@given(rewards_st, st.sampled_from(ESTIMATORS), st.randoms())
def test_advantages_do_not_depend_on_the_order_of_episodes(rewards, estimator, random):
    order = list(range(len(rewards)))
    random.shuffle(order)
    shuffled = resolve_estimator(estimator, {})([rewards[index] for index in order])
    assert shuffled == pytest.approx(resolve_estimator(estimator, {})(rewards)[order], abs=1e-6)


@settings(deadline=None)
@given(rewards_st, st.floats(-5, 5))
def test_a_constant_added_to_all_rewards_makes_no_difference(rewards, constant):
    shifted = resolve_estimator("dr_grpo", {})(np.array(rewards) + constant)
    assert shifted == pytest.approx(resolve_estimator("dr_grpo", {})(rewards), abs=1e-9)


@pytest.mark.parametrize("bad", [[1.0, float("nan")], [[1.0]], [float("inf")]])
def test_invalid_rewards_raise(bad):
    estimate = resolve_estimator("dr_grpo", {})
    with raises(ValueError, by=estimate):
        estimate(bad)


def test_reward_shaping_and_clipping():
    assert shape_rewards([1.2, 0.0], scale=10.0, bias=-0.2) == pytest.approx([10.0, -2.0])
    assert shape_rewards([2.5, 3.0], scale=10.0, bias=-0.2).tolist() == [20.0, 20.0]
    assert shape_rewards([2.5, 3.0], scale=10.0, bias=-0.2, clip=100.0) == pytest.approx([23.0, 28.0])


def test_advantages_are_whitened_over_the_batch():
    groups = [make_group("a", [1, 0]), make_group("b", [0.2, 0.0, 0.1])]
    plain = compute_group_advantages(groups, AdvantageConfig(estimator="dr_grpo"))
    assert [part.tolist() for part in plain] == [[0.5, -0.5], pytest.approx([0.1, -0.1, 0.0])]
    white = compute_group_advantages(groups, AdvantageConfig(estimator="dr_grpo", whiten="episodes"))
    assert [len(part) for part in white] == [2, 3]
    batch = np.concatenate(white)
    assert (batch.mean(), batch.std()) == pytest.approx((0.0, 1.0), abs=1e-4)
    scaled = compute_group_advantages(groups, AdvantageConfig(estimator="dr_grpo", reward_scale=10.0, reward_bias=-0.2))
    assert scaled[0] == pytest.approx([5.0, -5.0])
    assert compute_group_advantages([], AdvantageConfig(whiten="episodes")) == []
    assert whiten([2.0, 2.0]).tolist() == [0.0, 0.0]


@settings(deadline=None)
@given(st.lists(st.floats(-10, 10), min_size=1, max_size=30))
def test_whitened_values_have_mean_0_and_std_1(values):
    white = whiten(values)
    assert white.mean() == pytest.approx(0.0, abs=1e-6)
    std = np.std(values)
    assert white.std() == pytest.approx(std / (std + 1e-6), abs=1e-6)
    assert whiten([]).tolist() == []


@settings(deadline=None)
@given(st.lists(rewards_st, min_size=1, max_size=5), st.sampled_from(ESTIMATORS), st.sampled_from(["none", "episodes"]))
def test_advantages_sum_to_zero_in_every_group_or_over_the_batch(drawn, estimator, whiten):
    groups = [make_group(str(index), rewards) for index, rewards in enumerate(drawn)]
    parts = compute_group_advantages(groups, AdvantageConfig(estimator=estimator, whiten=whiten, reward_clip=100.0))
    assert [len(part) for part in parts] == [len(rewards) for rewards in drawn]
    for part in [np.concatenate(parts)] if whiten == "episodes" else parts:
        assert part.sum() == pytest.approx(0.0, abs=1e-4)


def test_fraction_of_correct_episodes_with_negative_advantage():
    groups = [make_group("a", [1.2, 1, 1, 1]), make_group("b", [1, 0])]
    assert compute_frac_correct_with_negative_advantage(
        groups, compute_group_advantages(groups, AdvantageConfig(estimator="dr_grpo"))
    ) == pytest.approx(3 / 5)
    assert compute_frac_correct_with_negative_advantage([], []) == 0.0


# ---- selection -------------------------------------------------------------------------------------------------------

ERROR, OK = EpisodeStatus.ENVIRONMENT_ERROR, EpisodeStatus.ANSWERED


def test_filters_in_order_with_their_counts():
    groups = [
        make_group("even", [1, 1, 1, 1]),
        make_group("tight", [1.2, 1, 1, 1]),  # all correct, with a reward std of 0.087: it is kept
        make_group("lone", [1, 0, 0, 0], [OK, ERROR, ERROR, ERROR]),
        make_group("equal", [1, 1, 0, 1], [OK, OK, ERROR, OK]),  # only the failed episode's reward differs
        make_group("wide", [1, 0, 1, 0]),
        make_group("thin", [1, 0, 0, 0], [OK, OK, OK, ERROR]),
    ]
    chosen = select_groups(groups, FILTERS, rank_by="reward_std", target=2)
    assert [group.task.id for group in chosen.kept_groups] == ["wide", "thin"]
    assert [group.task.id for group in chosen.surplus_groups] == ["tight"]
    assert chosen.kept_groups[1].score_values == (1, 0, 0)
    assert chosen.num_missing == 0
    report = {report.name: report for report in chosen.filter_reports}
    assert list(report) == ["statuses", "too_few_episodes", "reward_std", "surplus"]
    assert (report["statuses"].num_groups, report["statuses"].num_episodes) == ((6, 0), (19, 5))
    assert report["statuses"].frac_correct == pytest.approx((15 / 19, 0.0))
    assert (report["too_few_episodes"].num_groups, report["too_few_episodes"].num_episodes) == ((5, 1), (18, 1))
    assert report["reward_std"].num_groups == (3, 2)
    assert report["reward_std"].frac_correct == pytest.approx((7 / 11, 1.0))
    assert (report["surplus"].num_groups, report["surplus"].num_episodes) == ((2, 1), (7, 4))


def test_arrival_order_without_ranking_and_a_missed_target():
    groups = [make_group(name, rewards) for name, rewards in (("c", [0.1, 0]), ("a", [1, 0]), ("b", [0, 0]))]
    chosen = select_groups(groups, FILTERS, target=5)
    assert [group.task.id for group in chosen.kept_groups] == ["c", "a"]
    assert (chosen.num_missing, chosen.surplus_groups) == (3, ())


def test_ties_are_broken_by_task_id_not_by_order():
    groups = [make_group("b", [0.1, 0.7, 0.2]), make_group("a", [0.7, 0.2, 0.1]), make_group("c", [0.2, 0.1, 0.7])]
    chosen = select_groups(groups, FILTERS, rank_by="reward_std", target=3)
    assert [group.task.id for group in chosen.kept_groups] == ["a", "b", "c"]


def make_tool_episode(shows_image: bool, *, has_child: bool = False, length: int = 1, child_length: int = 1):
    """Build an episode of `length` expanded tokens whose tool showed an image to it, or to a child."""
    task = make_task("w")
    frame = ImageRef(path="a", digest="d", time=0.0, width=32, height=32)
    slot = ImageSlot(index=0, image=frame, num_tokens=child_length)
    child_ledger = Ledger().observe((9,), slots=(slot,))
    children = (
        (Episode(task=task, environment="sub_agent", ledger=child_ledger, turns=(), status=OK),) if has_child else ()
    )
    result = ToolResult(images=(frame,) if shows_image else (), was_executed=True)
    turn = Turn(reply=Reply(text=""), results=(result,))
    ledger = Ledger().observe((1,) * length)
    return Episode(task=task, environment="direct", ledger=ledger, turns=(turn,), status=OK, children=children)


def group_episodes(*episodes):
    """Make a group in which the value of an episode's score is its index."""
    scored = (ScoredEpisode(episode=episode, score=Score(value=float(index))) for index, episode in enumerate(episodes))
    return Group(task=make_task("w"), scored_episodes=tuple(scored))


def get_kept_indices(selection):
    return [scored.score.value for group in selection.kept_groups for scored in group.scored_episodes]


def test_require_tool_image_drops_episodes_without_one():
    group = group_episodes(
        make_tool_episode(True),
        make_tool_episode(False),
        make_tool_episode(False, has_child=True),
        make_tool_episode(True, has_child=True),
    )
    chosen = select_groups([group], {**FILTERS, "require_tool_image": {}}, target=1)
    assert get_kept_indices(chosen) == [0.0, 2.0, 3.0]
    assert {report.name: report.num_episodes for report in chosen.filter_reports}["require_tool_image"] == (3, 1)
    assert get_kept_indices(select_groups([group], FILTERS, target=1)) == [0.0, 1.0, 2.0, 3.0]


def test_max_tokens_drops_long_episodes():
    """Visual tokens count, and so do the conversations of sub-agents."""
    group = group_episodes(
        make_tool_episode(False, length=9),
        make_tool_episode(False, length=8),
        make_tool_episode(False, has_child=True, child_length=9),
        make_tool_episode(False),
    )
    chosen = select_groups([group], {**FILTERS, "length": {"max_tokens": 8}}, target=1)
    assert get_kept_indices(chosen) == [1.0, 3.0]
    assert [(report.name, report.num_episodes) for report in chosen.filter_reports][:2] == [
        ("statuses", (4, 0)),
        ("length", (2, 2)),
    ]


def test_correct_episodes_with_a_negative_advantage_can_be_left_out():
    """Three episodes of [1.2, 1, 1, 1] and [1, 0] are; both groups remain."""
    groups = [make_group("a", [1.2, 1, 1, 1]), make_group("b", [1, 0])]
    advantages = compute_group_advantages(groups, AdvantageConfig(estimator="dr_grpo"))
    masks, [report] = filter_by_advantage(groups, advantages, {**FILTERS, "drop_correct_with_negative_advantage": {}})
    assert masks == [[True, False, False, False], [True, True]]
    assert (report.name, report.num_groups) == ("drop_correct_with_negative_advantage", (2, 0))
    assert (report.num_episodes, report.frac_correct) == ((3, 3), (pytest.approx(2 / 3), 1.0))


def test_reward_std_is_compared_with_a_tolerance():
    groups = [make_group("noise", [0.1 + 0.2, 0.3, 0.3]), make_group("real", [0.3, 0.301])]
    assert [group.task.id for group in select_groups(groups, FILTERS, target=2).kept_groups] == ["real"]


group_st = st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from(list(EpisodeStatus))), max_size=6)


@settings(deadline=None)
@given(st.lists(group_st, max_size=8), st.integers(0, 8), st.sampled_from(["none", "reward_std"]))
def test_selection_never_splits_a_group(drawn, target, rank):
    pairs = [([reward for reward, _ in members], [status for _, status in members]) for members in drawn]
    groups = [make_group(f"t{index}", *pair) for index, pair in enumerate(pairs)]
    chosen = select_groups(groups, FILTERS, rank_by=rank, target=target)
    assert len(chosen.kept_groups) + chosen.num_missing == target
    assert all(
        np.std(group.score_values) > 1e-6 and len(group.scored_episodes) > 1
        for group in (*chosen.kept_groups, *chosen.surplus_groups)
    )
    dropped = (ERROR, EpisodeStatus.ABORTED, EpisodeStatus.LENGTH)
    survivors = {
        group.task.id: [m for m in group.scored_episodes if m.episode.status not in dropped] for group in groups
    }
    for group in (*chosen.kept_groups, *chosen.surplus_groups):
        assert list(group.scored_episodes) == survivors[group.task.id]
    for before, after in itertools.pairwise(chosen.filter_reports):
        assert before.num_groups[0] == sum(after.num_groups)
        assert before.num_episodes[0] == sum(after.num_episodes)
