import pytest
from reward_cases import RAISED, RAN, REFUSED, SILENT, answer, call, episode, task, think, turn

from saccade.rewards.tool_call_penalty import tool_call_penalty

TASK = task("red")


def cost(*turns, **settings):
    return tool_call_penalty(episode(*turns), **settings).value


def call_turn(*results):
    return turn(think(), *[call() for _ in results], results=results)


def test_every_executed_call_costs_the_same():
    end = turn(think(), answer("red"))
    assert cost(call_turn(RAN, RAN), call_turn(RAN), end) == pytest.approx(-0.15)
    assert cost(call_turn(RAN, RAN), end, penalty=0.2) == pytest.approx(-0.4)
    assert cost(call_turn(SILENT), end) == pytest.approx(-0.05)


def test_calls_not_executed_cost_nothing():
    end = turn(think(), answer("red"))
    assert cost(end) == 0.0
    assert cost(call_turn(REFUSED), turn(think(), call(error="bad")), end) == 0.0


def test_failed_call_costs_if_executed():
    assert cost(call_turn(RAISED), turn(think(), answer("red"))) == pytest.approx(-0.05 * RAISED.was_executed)
