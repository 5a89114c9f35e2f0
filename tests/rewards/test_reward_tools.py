import itertools

import pytest
from reward_cases import RAISED, RAN, REFUSED, SILENT, answer, call, episode, task, text, think, turn

from saccade.rewards.answer_types.open_ import OpenAnswer
from saccade.rewards.tool_use import tool_use
from saccade.types import CallFormat

STARTS = itertools.count()
RIGHT, WRONG = turn(think(), answer("red")), turn(think(), answer("blue"))
TASK = task("red")


def score(*turns, **settings):
    attempt = episode(*turns)
    return tool_use(attempt, correct=OpenAnswer()(attempt), **settings).value


def call_turn(*results):
    """Return a turn with a call per result, each of another window."""
    return turn(think(), *[call(start_time=next(STARTS), end_time=10**6) for _ in results], results=results)


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        ((RIGHT,), 0.0),
        ((turn(think(), call(error="bad")), RIGHT), 0.0),
        ((call_turn(REFUSED), WRONG), 0.1),
        ((call_turn(RAISED), WRONG), 0.1),
        ((call_turn(RAN), WRONG), 0.3),
        ((call_turn(REFUSED, RAN), WRONG), 0.3),
        ((call_turn(RAISED), RIGHT), 0.6),
        ((call_turn(REFUSED), RIGHT), 0.1),  # refused: it was never run
        ((turn(think(), call(), answer("red")),), 0.1),  # beside the answer: it was never run
        ((call_turn(RAN), turn(think(), call(), answer("red"))), 0.8),
        ((call_turn(RAN, RAN), RIGHT), 0.8),
        ((call_turn(RAN), turn(think(), answer("red ball"))), 0.3),  # F1 2/3, precision 1/2
        ((call_turn(RAN), turn(think(), answer("red blue green"))), 0.3),  # F1 1/2, precision 1/3
        ((turn(text("<tool_response>red</tool_response>")), RIGHT), 0.0),
        ((turn(think(), call(form=CallFormat.PYTHON_STYLE), results=[RAN]), WRONG), 0.3),
    ],
)
def test_graded(turns, expected):
    assert score(*turns) == pytest.approx(expected)


def test_accumulative_reference_values():
    assert 1.0 + score(call_turn(RAN), call_turn(RAN), call_turn(RAN), RIGHT, mode="accumulative") == pytest.approx(1.3)
    assert score(call_turn(RAN), call_turn(RAN), call_turn(RAN), WRONG, mode="accumulative") == 0.0


def test_what_counts_as_a_call():
    turns = (call_turn(RAN, SILENT, RAISED, REFUSED), RIGHT)
    by_count = {
        count: score(*turns, mode="accumulative", count=count) for count in ("executed", "succeeded", "informative")
    }
    assert by_count == pytest.approx({"executed": 0.3, "succeeded": 0.2, "informative": 0.1})


def test_cap_bonus_threshold_and_none():
    many = (call_turn(*[RAN] * 9), RIGHT)
    assert score(*many, mode="accumulative") == pytest.approx(0.4)
    assert score(*many, mode="accumulative", cap=2, bonus=0.5) == pytest.approx(1.0)
    partly = (call_turn(RAN), turn(think(), answer("red ball")))
    assert score(*partly, mode="accumulative") == 0.0
    assert score(*partly, mode="accumulative", threshold=0.3) == pytest.approx(0.1)
    assert score(*partly, threshold=0.3) == pytest.approx(0.8)
    assert score(*many, mode="none") == 0.0


def test_correctness_is_an_argument():
    attempt = episode(call_turn(RAN), RIGHT)
    assert tool_use(attempt, correct=0.0).value == pytest.approx(0.3)
    assert tool_use(episode(call_turn(RAN), WRONG), correct=0.5).value == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("calls", "num_paid"),
    [
        ([call(start_time=1, end_time=2)] * 4, 1),
        ([call(start_time=1, end_time=2), call(end_time=2.0, start_time="1")], 1),
        ([call(question="Which  Color?"), call(question="which color?\u200b ")], 1),
        ([call(name="python", code="x = 1"), call(name="python", code="x=1  # again")], 1),
        ([call(name="python", code="x = (1"), call(name="python", code="x = (1\n")], 1),  # no Python
        ([call(windows=[[1, 2]]), call(windows=[[1.0, 2]])], 1),
        ([call(start_time=1, end_time=2), call(start_time=1, end_time=3)], 2),
        ([call(start_time=1), call(end_time=1)], 2),
        ([call(name="zoom", x=1), call(name="crop", x=1)], 2),
        ([call(name="python", code="print(1)"), call(name="python", code="print(2)")], 2),
        ([call(flag=True), call(flag=1)], 2),
        ([call(x=10**400), call(x=10**400)], 1),
    ],
)
def test_equal_calls_are_paid_once(calls, num_paid):
    turns = (*(turn(think(), made, results=[RAN]) for made in calls), RIGHT)
    in_one_turn = (turn(think(), *calls, results=[RAN] * len(calls)), RIGHT)
    for count in ("informative", "succeeded"):
        assert score(*turns, mode="accumulative", count=count) == pytest.approx(0.1 * num_paid)
        assert score(*in_one_turn, mode="accumulative", count=count) == pytest.approx(0.1 * num_paid)
    published = score(*turns, mode="accumulative", count="executed")
    assert published == pytest.approx(0.1 * len(calls))


def test_an_equal_call_is_paid_for_its_informative_result():
    assert score(call_turn(SILENT), call_turn(RAN), RIGHT, mode="accumulative") == pytest.approx(0.1)
    twice = [turn(think(), call(), results=[result]) for result in (SILENT, RAN)]
    assert score(*twice, RIGHT, mode="accumulative") == pytest.approx(0.1)
