"""Numbers worked out by hand, fixed denominators, intervals that know about tasks."""

import random
from dataclasses import replace

import pytest
from evaluation_cases import scored, task
from hypothesis import given
from hypothesis import strategies as st

from saccade.errors import DataError
from saccade.evaluation.intervals import estimate
from saccade.evaluation.metrics import at_k, paired_difference, step_metrics, summarize, units_of
from saccade.types import End, Group, Kind


def test_an_interval_covers_the_mean_as_often_as_it_says():
    rng = random.Random(0)
    hits = 0
    for _ in range(120):
        values = [float(rng.random() < 0.6) for _ in range(60)]
        found = estimate(values, [str(i) for i in range(60)], resamples=300)
        hits += found.low <= 0.6 <= found.high
    assert 0.88 <= hits / 120 <= 1.0


def test_repeats_of_a_task_do_not_narrow_the_interval():
    values = [1.0, 0.0] * 10
    once = estimate(values, [str(i) for i in range(20)])
    thrice = estimate(values * 3, [str(i) for i in range(20)] * 3)
    assert thrice == once
    pretended = estimate(values * 3, [str(i) for i in range(60)])
    assert pretended.high - pretended.low < once.high - once.low


def test_questions_about_one_clip_do_not_narrow_the_interval():
    values = [1.0, 0.0] * 10
    once = estimate(values, [str(i) for i in range(20)])
    tasks = [f"{i}.{question}" for question in range(3) for i in range(20)]
    clips = {task: task.split(".")[0] for task in tasks}
    assert estimate(values * 3, tasks, units=clips) == replace(once, n=60)


def test_an_evaluation_and_a_difference_are_drawn_by_clip():
    before, after = (
        [scored(task(f"w-{i}", clip=f"clip{i % 4}"), float(right(i % 4))) for i in range(12)]
        for right in (lambda clip: 0, lambda clip: clip < 2)
    )
    four = estimate([1.0, 1.0, 0.0, 0.0], ["a", "b", "c", "d"])
    assert summarize(after).accuracy == replace(four, n=12)
    assert summarize(after).slices["kind"][0].accuracy == replace(four, n=12)
    found = paired_difference(before, after)
    assert (found.mean, found.low, found.high, found.n) == (0.5, four.low, four.high, 12)
    assert paired_difference(before, after, units={each: each for each in units_of(before)}).low > four.low


@pytest.mark.slow
@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.floats(0, 1)), min_size=1, max_size=20), st.randoms())
def test_an_estimate_does_not_depend_on_the_order_of_rows(rows, rng):
    shuffled = list(rows)
    rng.shuffle(shuffled)
    one, other = (estimate([v for _, v in each], [c for c, _ in each], resamples=20) for each in (rows, shuffled))
    assert one == other


def test_nothing_has_no_mean():
    with pytest.raises(DataError, match="no episode"):
        estimate([], [])


def test_the_paired_difference_is_taken_per_task():
    tasks = [task(str(i)) for i in range(4)]
    before = [scored(each, value) for each, value in zip(tasks, (0, 1, 0, 1), strict=True)]
    after = [scored(each, value) for each, value in zip(tasks, (1, 1, 1, 0), strict=True)] + [scored(task("new"), 1)]
    found = paired_difference(before, after)
    assert (found.mean, found.n, found.better, found.worse, found.unpaired) == (0.25, 4, 2, 1, 1)
    assert found.low <= 0.25 <= found.high


def test_a_constant_gain_has_a_narrow_interval_however_hard_the_tasks_differ():
    rng = random.Random(1)
    base = [rng.random() / 2 for _ in range(30)]
    before = [scored(task(str(i)), value) for i, value in enumerate(base)]
    after = [scored(task(str(i)), value + 0.3) for i, value in enumerate(base)]
    found = paired_difference(before, after)
    assert found.low == pytest.approx(0.3)
    assert found.high == pytest.approx(0.3)


def test_evaluations_without_a_common_task_have_no_difference():
    with pytest.raises(DataError, match="share no task"):
        paired_difference([scored(task("a"), 1)], [scored(task("b"), 1)])


def test_broken_and_unanswered_episodes_stay_in_the_denominator():
    rows = [
        scored(task("a"), 1.0, calls=2, failing=1),
        scored(task("b"), 1.0, end=End.ABORTED, error="the engine stopped"),  # a stray score of a broken episode
        scored(task("c"), 0.0, answer=None, end=End.NO_ANSWER),
        scored(task("d", question="when", kind=Kind.GROUNDING), 0.5),
    ]
    found = summarize(rows, floors={"at": 0.25, "when": 0.05})
    assert found.accuracy.mean == (1.0 + 0.0 + 0.0 + 0.5) / 4
    assert (found.errors, found.unanswered, found.tasks, found.episodes) == (1, 1, 4, 4)
    assert (found.calls, found.executed, found.succeeded, found.tool_share) == (0.75, 0.5, 0.5, 0.25)
    assert found.compliance.mean == 0.75
    assert found.floor == pytest.approx((3 * 0.25 + 0.05) / 4)
    assert found.ends == {"answered": 0.5, "no_answer": 0.25, "aborted": 0.25}
    rows = {row.name: row for row in found.slices["question"]}
    assert rows["at"].accuracy.mean == pytest.approx(1 / 3)
    assert rows["at"].accuracy.n == 3
    assert rows["when"].floor == pytest.approx(0.05)


def test_a_floor_that_is_not_known_for_every_task_is_not_given():
    assert summarize([scored(task("a"), 1.0)], floors={"when": 0.1}).floor is None


def test_frame_budgets_are_listed_by_size():
    rows = [scored(task(str(k)), 1.0, frames=k) for k in (16, 4, 32, 8)]
    assert [row.name for row in summarize(rows).slices["frames"]] == ["K=4", "K=8", "K=16", "K=32"]


def test_pass_at_k_is_the_unbiased_estimator():
    rows = [scored(task("a"), value) for value in (1, 0, 0)] + [scored(task("b"), value) for value in (0, 0)]
    # k = 2: task a has 1 - C(2,2)/C(3,2) = 2/3, task b has 0
    assert at_k(rows) == {"avg@2": pytest.approx(1 / 6), "pass@2": pytest.approx(1 / 3)}
    assert at_k([scored(task("a"), 1)]) == {}


def test_a_training_step_in_numbers():
    one = Group(task=task("a"), members=(scored(task("a"), 1.0, calls=2, frames=4), scored(task("a"), 0.0, frames=4)))
    two = task("b", question="count", kind=Kind.NUMBER, gold=2.0)
    other = Group(
        task=two, members=(scored(two, 1.0, frames=8, calls=1, failing=1), scored(two, 1.0, frames=8, calls=1))
    )
    found = step_metrics([one, other])
    assert found["reward"] == 0.75 + 0.5
    assert found["reward/accuracy"] == found["accuracy"] == 0.75
    assert "reward/compliance" not in found
    assert found["compliance"] == 1.0
    assert found["accuracy/open"] == found["accuracy/question/at"] == found["accuracy/K=4"] == 0.5
    assert found["accuracy/number"] == found["accuracy/K=8"] == 1.0
    assert (found["calls/K=4"], found["calls/K=8"]) == (1.0, 1.5)
    assert found["call_gain/K=4"] == 1.0
    assert "call_gain/K=8" not in found  # nobody skipped
    assert (found["calls"], found["calls/executed"], found["calls/succeeded"]) == (1.25, 1.0, 1.0)
    assert (found["tool_share"], found["solved"], found["solved/all"], found["solved/none"]) == (0.75, 0.75, 0.5, 0.0)
    assert (found["response_tokens"], found["sampled_tokens"], found["visual_tokens"]) == (3.0, 6.0, 2.0)
    assert found["end/answered"] == 1.0
    assert found["spread"] == 0.25
    assert all(isinstance(value, float) for value in found.values())
    assert step_metrics([]) == {}
