"""Gating, advantages and selection against numbers worked out by hand."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.algorithms.advantages import advantages, credit, punished, shaped, whitened
from saccade.algorithms.gating import draw
from saccade.algorithms.select import forgiven, select
from saccade.config import Advantage, Select
from saccade.errors import ConfigError
from saccade.ledger import Ledger, Picture, Slot
from saccade.types import End, Episode, Group, Kind, Reply, Score, Scored, Task, ToolResult, Turn

ESTIMATORS = ("mean", "mean_std", "leave_one_out")
rewards_st = st.lists(st.floats(-10, 10), min_size=1, max_size=12)


def make_task(name):
    return Task(id=name, question="?", media=(), kind=Kind.OPEN, gold="red")


def make_group(name, rewards, ends=None):
    task, ends = make_task(name), ends or [End.ANSWERED] * len(rewards)
    made = [Episode(task=task, agent="direct", ledger=Ledger(), turns=(), end=end) for end in ends]
    scores = [Score(value=reward, parts={"accuracy": min(1.0, reward)}) for reward in rewards]
    members = (Scored(episode=episode, score=score) for episode, score in zip(made, scores, strict=True))
    return Group(task=task, members=tuple(members))


# ---- gating --------------------------------------------------------------------------------------------------------

BUDGETS = (4, 8, 16, 32, 64)


def test_a_draw_is_fixed_by_seed_epoch_and_task_id():
    task = make_task("w-1")
    first = draw(BUDGETS, run_seed=3, epoch=1, task=task)
    assert first == draw(BUDGETS, run_seed=3, epoch=1, task=replace(task, question="Another wording?"))
    assert len({draw(BUDGETS, run_seed=seed, epoch=0, task=task) for seed in range(40)}) == 5
    assert len({draw(BUDGETS, run_seed=0, epoch=epoch, task=task) for epoch in range(40)}) == 5


def test_draws_are_uniform():
    counts = dict.fromkeys(BUDGETS, 0)
    for index in range(2000):
        counts[draw(BUDGETS, run_seed=0, epoch=0, task=make_task(f"w-{index}"))] += 1
    assert all(340 < count < 460 for count in counts.values())  # 400 expected, three standard deviations are 54


def test_gating_off_and_bad_budgets():
    assert draw((), run_seed=0, epoch=0, task=make_task("w")) is None
    with pytest.raises(ConfigError, match=r"gating\.frames holds 0"):
        draw((4, 0), run_seed=0, epoch=0, task=make_task("w"))


# ---- advantages ----------------------------------------------------------------------------------------------------


def test_the_check_values():
    assert advantages([1.3, 1.0, 0, 0], "mean") == pytest.approx([0.725, 0.425, -0.575, -0.575])
    assert advantages([1.2, 1, 1, 1], "mean") == pytest.approx([0.15, -0.05, -0.05, -0.05])


def test_the_other_estimators_by_hand():
    assert advantages([1, 0, 0, 1], "mean_std") == pytest.approx([1, -1, -1, 1], abs=1e-5)  # population std 0.5
    assert advantages([3, 1, 0, 0], "leave_one_out") == pytest.approx([3 - 1 / 3, 0, -4 / 3, -4 / 3])
    for estimator in ESTIMATORS:
        assert advantages([0.7], estimator).tolist() == [0.0]
        assert advantages([], estimator).tolist() == []
        assert advantages([0.3] * 7, estimator) == pytest.approx([0.0] * 7, abs=1e-9)


@settings(deadline=None)
@given(rewards_st, st.sampled_from(ESTIMATORS))
def test_a_group_sums_to_zero(rewards, estimator):
    assert advantages(rewards, estimator).sum() == pytest.approx(0.0, abs=1e-6)


@settings(deadline=None)
@given(rewards_st, st.sampled_from(ESTIMATORS), st.randoms())
def test_order_of_members_makes_no_difference(rewards, estimator, random):
    order = list(range(len(rewards)))
    random.shuffle(order)
    shuffled = advantages([rewards[index] for index in order], estimator)
    assert shuffled == pytest.approx(advantages(rewards, estimator)[order], abs=1e-6)


@settings(deadline=None)
@given(rewards_st, st.floats(-5, 5))
def test_a_constant_added_to_all_rewards_makes_no_difference(rewards, constant):
    moved = advantages(np.array(rewards) + constant, "mean")
    assert moved == pytest.approx(advantages(rewards, "mean"), abs=1e-9)


@pytest.mark.parametrize("bad", [[1.0, float("nan")], [[1.0]], [float("inf")]])
def test_bad_rewards_are_refused(bad):
    with pytest.raises(ValueError, match="flat list of finite numbers"):
        advantages(bad, "mean")


def test_shaping_and_the_clip_that_must_not_saturate():
    assert shaped([1.2, 0.0], scale=10.0, bias=-0.2) == pytest.approx([10.0, -2.0])
    assert shaped([2.5, 3.0], scale=10.0, bias=-0.2).tolist() == [20.0, 20.0]
    assert shaped([2.5, 3.0], scale=10.0, bias=-0.2, clip=100.0) == pytest.approx([23.0, 28.0])


def test_credit_whitens_over_the_batch():
    groups = [make_group("a", [1, 0]), make_group("b", [0.2, 0.0, 0.1])]
    plain = credit(groups, Advantage(estimator="mean"))
    assert [part.tolist() for part in plain] == [[0.5, -0.5], pytest.approx([0.1, -0.1, 0.0])]
    white = credit(groups, Advantage(estimator="mean", whiten=True))
    assert [len(part) for part in white] == [2, 3]
    together = np.concatenate(white)
    assert (together.mean(), together.std()) == pytest.approx((0.0, 1.0), abs=1e-4)
    scaled = credit(groups, Advantage(estimator="mean", reward_scale=10.0, reward_bias=-0.2))
    assert scaled[0] == pytest.approx([5.0, -5.0])
    assert credit([], Advantage(whiten=True)) == []
    assert whitened([2.0, 2.0]).tolist() == [0.0, 0.0]


@settings(deadline=None)
@given(st.lists(st.floats(-10, 10), min_size=1, max_size=30))
def test_whitened_values_have_mean_0_and_std_1(values):
    white = whitened(values)
    assert white.mean() == pytest.approx(0.0, abs=1e-6)
    spread = np.std(values)
    assert white.std() == pytest.approx(spread / (spread + 1e-6), abs=1e-6)
    assert whitened([]).tolist() == []


@settings(deadline=None)
@given(st.lists(rewards_st, min_size=1, max_size=5), st.sampled_from(ESTIMATORS), st.booleans())
def test_credit_sums_to_zero_in_every_group_or_over_the_batch(drawn, estimator, whiten):
    groups = [make_group(str(index), rewards) for index, rewards in enumerate(drawn)]
    parts = credit(groups, Advantage(estimator=estimator, whiten=whiten, reward_clip=100.0))
    assert [len(part) for part in parts] == [len(rewards) for rewards in drawn]
    for part in [np.concatenate(parts)] if whiten else parts:
        assert part.sum() == pytest.approx(0.0, abs=1e-4)


def test_share_of_correct_episodes_that_are_punished():
    groups = [make_group("a", [1.2, 1, 1, 1]), make_group("b", [1, 0])]
    assert punished(groups, credit(groups, Advantage(estimator="mean"))) == pytest.approx(3 / 5)
    assert punished([], []) == 0.0


# ---- selection -----------------------------------------------------------------------------------------------------

B, OK = End.TOOL_BROKEN, End.ANSWERED


def test_filters_in_order_with_their_counts():
    groups = [
        make_group("even", [1, 1, 1, 1]),
        make_group("tight", [1.2, 1, 1, 1]),  # all correct, yet 0.087 wide: it stays
        make_group("lone", [1, 0, 0, 0], [OK, B, B, B]),
        make_group("cured", [1, 1, 0, 1], [OK, OK, B, OK]),  # its spread was the broken episode's
        make_group("wide", [1, 0, 1, 0]),
        make_group("thin", [1, 0, 0, 0], [OK, OK, OK, B]),
    ]
    chosen = select(groups, Select(rank="std"), target=2)
    assert [group.task.id for group in chosen.kept] == ["wide", "thin"]
    assert [group.task.id for group in chosen.spare] == ["tight"]
    assert chosen.kept[1].rewards == (1, 0, 0)
    assert chosen.missing == 0
    report = {step.name: step for step in chosen.report}
    assert list(report) == ["ends", "survivors", "spread", "target"]
    assert (report["ends"].groups, report["ends"].episodes) == ((6, 0), (19, 5))
    assert report["ends"].correct == pytest.approx((15 / 19, 0.0))
    assert (report["survivors"].groups, report["survivors"].episodes) == ((5, 1), (18, 1))
    assert (report["spread"].groups, report["spread"].correct) == ((3, 2), pytest.approx((7 / 11, 1.0)))
    assert (report["target"].groups, report["target"].episodes) == ((2, 1), (7, 4))


def test_arrival_order_without_ranking_and_a_missed_target():
    groups = [make_group(name, rewards) for name, rewards in (("c", [0.1, 0]), ("a", [1, 0]), ("b", [0, 0]))]
    chosen = select(groups, Select(), target=5)
    assert [group.task.id for group in chosen.kept] == ["c", "a"]
    assert (chosen.missing, chosen.spare) == (3, ())


def test_ties_go_by_task_id_whatever_the_order_of_members():
    groups = [make_group("b", [0.1, 0.7, 0.2]), make_group("a", [0.7, 0.2, 0.1]), make_group("c", [0.2, 0.1, 0.7])]
    chosen = select(groups, Select(rank="std"), target=3)
    assert [group.task.id for group in chosen.kept] == ["a", "b", "c"]


def saw(picture: bool, *, child: bool = False, length: int = 1, below: int = 1):
    """An episode of `length` expanded tokens whose tool showed a picture to it, or to a child of `below` tokens."""
    task = make_task("w")
    frame = Picture(path="a", digest="d", time=0.0, width=32, height=32)
    slot = Slot(at=0, picture=frame, tokens=below)
    under = Ledger().observe((9,), slots=(slot,)) if child else Ledger()
    kids = (Episode(task=task, agent="sub", ledger=under, turns=(), end=OK),) if child else ()
    turn = Turn(reply=Reply(text=""), results=(ToolResult(pictures=(frame,) if picture else (), executed=True),))
    own = Ledger().observe((1,) * length)
    return Episode(task=task, agent="direct", ledger=own, turns=(turn,), end=OK, children=kids)


def group_of(*episodes):
    scored = (Scored(episode=each, score=Score(value=float(place), parts={})) for place, each in enumerate(episodes))
    return Group(task=make_task("w"), members=tuple(scored))


def kept_places(chosen):
    return [member.score.value for group in chosen.kept for member in group.members]


def test_episodes_that_were_shown_nothing_can_be_dropped():
    group = group_of(saw(True), saw(False), saw(False, child=True), saw(True, child=True))
    chosen = select([group], Select(must_show_image=True), target=1)
    assert kept_places(chosen) == [0.0, 2.0, 3.0]
    assert {step.name: step.episodes for step in chosen.report}["image"] == (3, 1)
    assert kept_places(select([group], Select(), target=1)) == [0.0, 1.0, 2.0, 3.0]


def test_episodes_that_are_too_long_can_be_dropped():
    """Visual tokens count, and so does every conversation below."""
    group = group_of(saw(False, length=9), saw(False, length=8), saw(False, child=True, below=9), saw(False))
    chosen = select([group], Select(max_tokens=8), target=1)
    assert kept_places(chosen) == [1.0, 3.0]
    assert [(step.name, step.episodes) for step in chosen.report][:2] == [("ends", (4, 0)), ("length", (2, 2))]


def test_correct_episodes_with_a_negative_advantage_can_be_left_out():
    """Of [1.2, 1, 1, 1] and [1, 0] three are; the statistics of the others stay, and the two groups do too."""
    groups = [make_group("a", [1.2, 1, 1, 1]), make_group("b", [1, 0])]
    credits = credit(groups, Advantage(estimator="mean"))
    found = forgiven(groups, credits)
    assert (found.name, found.groups) == ("correct_with_negative_advantage", (2, 0))
    assert (found.episodes, found.correct) == ((3, 3), (pytest.approx(2 / 3), 1.0))


def test_spread_is_compared_with_a_tolerance():
    groups = [make_group("noise", [0.1 + 0.2, 0.3, 0.3]), make_group("real", [0.3, 0.301])]
    assert [group.task.id for group in select(groups, Select(), target=2).kept] == ["real"]


group_st = st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from(list(End))), max_size=6)


@settings(deadline=None)
@given(st.lists(group_st, max_size=8), st.integers(0, 8), st.sampled_from(["none", "std"]))
def test_selection_never_splits_a_group(drawn, target, rank):
    pairs = [([reward for reward, _ in members], [end for _, end in members]) for members in drawn]
    groups = [make_group(f"t{index}", *pair) for index, pair in enumerate(pairs)]
    chosen = select(groups, Select(rank=rank), target=target)
    assert len(chosen.kept) + chosen.missing == target
    assert all(np.std(group.rewards) > 1e-6 and len(group.members) > 1 for group in (*chosen.kept, *chosen.spare))
    gone = (B, End.ABORTED, End.LENGTH)
    whole = {group.task.id: [m for m in group.members if m.episode.end not in gone] for group in groups}
    assert all(list(group.members) == whole[group.task.id] for group in (*chosen.kept, *chosen.spare))
    for before, after in itertools.pairwise(chosen.report):
        assert before.groups[0] == sum(after.groups)
        assert before.episodes[0] == sum(after.episodes)
