import pytest
from reward_cases import RAISED, RAN, REFUSED, SILENT, answer, call, episode, task, text, think, turn

from saccade.rewards.answer_types.open_ import OpenAnswer
from saccade.rewards.tool_use import tool_use
from saccade.types import CallFormat

RIGHT, WRONG = turn(think(), answer("red")), turn(think(), answer("blue"))
TASK = task("red")


def score(*turns, **settings):
    attempt = episode(*turns)
    return tool_use(attempt, correct=OpenAnswer()(attempt), **settings)


def call_turn(*results):
    return turn(think(), *[call() for _ in results], results=results)


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
        ((call_turn(RAN), turn(think(), answer("red ball"))), 0.8),  # F1 2/3
        ((call_turn(RAN), turn(think(), answer("red blue green white"))), 0.3),  # F1 2/5
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
    assert score(*partly, mode="accumulative", threshold=0.5) == pytest.approx(0.1)
    assert score(*partly, threshold=1.0) == pytest.approx(0.3)
    assert score(*many, mode="none") == 0.0


def test_correctness_is_an_argument():
    attempt = episode(call_turn(RAN), RIGHT)
    assert tool_use(attempt, correct=0.0) == pytest.approx(0.3)
    assert tool_use(episode(call_turn(RAN), WRONG), correct=0.5) == pytest.approx(0.8)
