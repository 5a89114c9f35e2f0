"""Metrics against hand-computed numbers: fixed denominators and clusters."""

import random
from dataclasses import replace

import pytest
from error_cases import raises
from evaluation_cases import make_scored, task

from saccade.errors import DataError
from saccade.metrics.episode_metrics import (
    assign_clusters,
    compute_paired_difference,
    compute_step_metrics,
    summarize,
)
from saccade.metrics.statistics import estimate_clustered_mean
from saccade.types import AnswerType, EpisodeStatus, Group


def test_intervals_are_clustered_by_clip():
    before, after = (
        [make_scored(task(f"w-{i}", clip=f"clip{i % 4}"), float(right(i % 4))) for i in range(12)]
        for right in (lambda clip: 0, lambda clip: clip < 2)
    )
    four = estimate_clustered_mean([1.0, 1.0, 0.0, 0.0], ["a", "b", "c", "d"])
    assert summarize(after).accuracy == replace(four, n=12)
    assert summarize(after).slices["answer_type"][0].accuracy == replace(four, n=12)
    found = compute_paired_difference(before, after)
    assert (found.mean, found.n, found.num_clusters, found.is_significant) == (0.5, 12, 4, False)
    pretended = compute_paired_difference(before, after, clusters={task: task for task in assign_clusters(before)})
    assert pretended.low > found.low
    assert pretended.is_significant


def test_the_paired_difference_is_taken_per_task():
    tasks = [task(str(i)) for i in range(4)]
    before = [make_scored(case, value) for case, value in zip(tasks, (0, 1, 0, 1), strict=True)]
    after = [make_scored(case, value) for case, value in zip(tasks, (1, 1, 1, 0), strict=True)] + [
        make_scored(task("new"), 1)
    ]
    difference = compute_paired_difference(before, after)
    assert (difference.mean, difference.n, difference.better, difference.worse, difference.unpaired) == (
        0.25,
        4,
        2,
        1,
        1,
    )
    assert difference.low <= 0.25 <= difference.high


def test_constant_gain_has_a_narrow_interval():
    rng = random.Random(1)
    base = [rng.random() / 2 for _ in range(30)]
    before = [make_scored(task(str(i)), value) for i, value in enumerate(base)]
    after = [make_scored(task(str(i)), value + 0.3) for i, value in enumerate(base)]
    found = compute_paired_difference(before, after)
    assert found.is_significant
    assert 0.15 < found.low < 0.3 < found.high < 0.4  # unseen losses widen it downwards


def test_evaluations_without_a_shared_caseraise():
    with raises(DataError, key="tasks"):
        compute_paired_difference([make_scored(task("a"), 1)], [make_scored(task("b"), 1)])


def test_failed_and_unanswered_episodes_stay_in_the_denominator():
    rows = [
        make_scored(task("a"), 1.0, calls=2, failing=1),
        make_scored(
            task("b"), 1.0, end=EpisodeStatus.ABORTED, error="the engine stopped"
        ),  # a failed episode with a score
        make_scored(task("c"), 0.0, answer=None, end=EpisodeStatus.NO_ANSWER),
        make_scored(task("d", question="when", kind=AnswerType.GROUNDING), 0.5),
    ]
    baselines = {row.episode.task.digest: 0.05 if row.episode.task.id == "d" else 0.25 for row in rows}
    summary = summarize(rows, constant_baselines=baselines)
    assert summary.accuracy.mean == (1.0 + 0.0 + 0.0 + 0.5) / 4
    assert (summary.errors, summary.unanswered, summary.num_tasks, summary.num_episodes) == (1, 1, 4, 4)
    assert (summary.calls, summary.executed, summary.succeeded, summary.frac_with_tool_call) == (0.75, 0.5, 0.5, 0.25)
    assert summary.format_compliance.mean == 0.75
    assert summary.constant_baseline == pytest.approx((3 * 0.25 + 0.05) / 4)
    assert summary.statuses == {"answered": 0.5, "no_answer": 0.25, "aborted": 0.25}
    rows = {row.name: row for row in summary.slices["question_type"]}
    assert rows["at"].accuracy.mean == pytest.approx(1 / 3)
    assert rows["at"].accuracy.n == 3
    assert rows["when"].constant_baseline == pytest.approx(0.05)


def test_baseline_needs_every_task():
    assert summarize([make_scored(task("a"), 1.0)], constant_baselines={"another": 0.1}).constant_baseline is None


def test_frame_budgets_are_listed_by_size():
    rows = [make_scored(task(str(k)), 1.0, frames=k) for k in (16, 4, 32, 8)]
    assert [row.name for row in summarize(rows).slices["frame_budget"]] == ["K=4", "K=8", "K=16", "K=32"]


def test_pass_at_k_is_the_unbiased_estimator():
    rows = [make_scored(task("a"), value) for value in (1, 0, 0)] + [make_scored(task("b"), value) for value in (0, 0)]
    # k = 2: task a has 1 - C(2,2)/C(3,2) = 2/3, task b has 0
    assert summarize(rows).at_k == {"avg@2": pytest.approx(1 / 6), "pass@2": pytest.approx(1 / 3)}
    assert summarize([make_scored(task("a"), 1)]).at_k == {}


def test_the_mean_of_a_reward_term_is_that_of_the_episodes_that_have_it():
    """Environments may have rewards of their own."""
    with_term, without = (make_scored(task("a"), value) for value in (1.0, 0.0))
    without = replace(without, score=replace(without.score, parts={"format_compliance": 1.0}))
    metrics = compute_step_metrics([Group(task=task("a"), scored_episodes=(with_term, without))])
    assert (metrics["reward/accuracy"], metrics["format_compliance"]) == (1.0, 1.0)


def test_step_metrics():
    first = Group(
        task=task("a"),
        scored_episodes=(make_scored(task("a"), 1.0, calls=2, frames=4), make_scored(task("a"), 0.0, frames=4)),
    )
    two = task("b", question="count", kind=AnswerType.NUMBER, ground_truth=2.0)
    second = Group(
        task=two,
        scored_episodes=(make_scored(two, 1.0, frames=8, calls=1, failing=1), make_scored(two, 1.0, frames=8, calls=1)),
    )
    metrics = compute_step_metrics([first, second])
    assert metrics["reward"] == 0.75 + 0.5
    assert metrics["reward/accuracy"] == metrics["accuracy"] == 0.75
    assert "reward/format_compliance" not in metrics
    assert metrics["format_compliance"] == 1.0
    assert metrics["accuracy/open"] == metrics["accuracy/question_type/at"] == metrics["accuracy/K=4"] == 0.5
    assert metrics["accuracy/number"] == metrics["accuracy/K=8"] == 1.0
    assert (metrics["calls/K=4"], metrics["calls/K=8"]) == (1.0, 1.5)
    assert metrics["call_reward_diff/K=4"] == 1.0
    assert "call_reward_diff/K=8" not in metrics  # every episode has a call
    assert (metrics["calls"], metrics["calls/executed"], metrics["calls/succeeded"]) == (1.25, 1.0, 1.0)
    assert (metrics["frac_with_tool_call"], metrics["solve_rate"], metrics["solved/all"], metrics["solved/none"]) == (
        0.75,
        0.75,
        0.5,
        0.0,
    )
    assert (metrics["response_tokens"], metrics["sampled_tokens"], metrics["visual_tokens"]) == (3.0, 6.0, 2.0)
    assert metrics["status/answered"] == 1.0
    assert metrics["reward_std"] == 0.25
    assert all(isinstance(value, float) for value in metrics.values())
    assert compute_step_metrics([]) == {}
