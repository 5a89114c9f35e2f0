import pytest
from reward_cases import RAISED, RAN, REFUSED, SILENT, answer, call, episode, task, think, turn

from saccade.rewards.call_cost import call_cost

TASK = task("red")


def cost(*turns, **settings):
    return call_cost(episode(*turns), TASK, **settings)


def looked(*results):
    return turn(think(), *[call() for _ in results], results=results)


def test_every_call_that_was_run_costs_the_same():
    end = turn(think(), answer("red"))
    assert cost(looked(RAN, RAN), looked(RAN), end) == pytest.approx(-0.15)
    assert cost(looked(RAN, RAN), end, price=0.2) == pytest.approx(-0.4)
    assert cost(looked(SILENT), end) == pytest.approx(-0.05)


def test_what_was_not_run_costs_nothing():
    end = turn(think(), answer("red"))
    assert cost(end) == 0.0
    assert cost(looked(REFUSED), turn(think(), call(error="bad")), end) == 0.0


def test_a_call_that_ran_and_failed_costs_what_its_record_says():
    assert cost(looked(RAISED), turn(think(), answer("red"))) == pytest.approx(-0.05 * RAISED.executed)
