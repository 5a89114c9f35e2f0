"""Alarms: windows, bounds, marks in the log, and what is repeated after a resume."""

import logging

import pytest
from error_cases import raises

from saccade.config.schema import AlarmConfig, Recipe, parse_section
from saccade.errors import AlarmError, ConfigError
from saccade.training.alarms import AlarmMonitor, prefix_validation


def check(monitor, values, metric="entropy"):
    """Return the marks of rows with these values."""
    return [monitor.check(step, {metric: value})["alarm/a"] for step, value in enumerate(values, 1)]


def build(**rule):
    return AlarmMonitor({"a": AlarmConfig(**{"metric": "entropy", "window": 2, **rule})})


@pytest.mark.parametrize(
    ("rule", "values", "marks"),
    [
        ({"below": 1.0}, [0.5, 1.25, 0.5, 2.0, 0.5], [0, 1, 1, 0, 0]),  # means 0.875, 0.875, 1.25, 1.25
        ({"above": 1.0}, [1.5, 0.5, 2.0, 3.0, 0.0], [0, 0, 1, 1, 1]),  # means 1.0, 1.25, 2.5, 1.5
        ({"drop": 0.5}, [1.0, 1.0, 0.5, 0.25, 1.0], [0, 0, 0, 1, 0]),  # means 1.0, 0.75, 0.375, 0.625
        ({"below": 1.0, "window": 1}, [2.0, 0.5], [0, 1]),
        ({"below": 1.0}, [0.5, None, float("nan"), 0.5], [0, 0, 0, 1]),  # a row without a finite value doesn't count
    ],
)
def test_the_mean_of_a_window_is_compared(rule, values, marks):
    assert check(build(**rule), values) == marks


def test_an_alarm_warns_when_it_becomes_active_alone(caplog):
    with caplog.at_level(logging.WARNING, logger="saccade"):
        check(build(below=1.0, window=1), [0.5, 0.5, 2.0, 0.5])
    assert [record.args[:2] for record in caplog.records] == [("a", 1), ("a", 4)]


def test_a_metric_that_is_never_logged_is_reported_once(caplog):
    with caplog.at_level(logging.WARNING, logger="saccade"):
        check(build(metric="entrpy", below=1.0), [0.5] * 50)
        check(build(below=1.0), [None] * 5 + [2.0] * 50)
    assert [record.args[0] for record in caplog.records] == ["a"]


def test_stop_sets_the_first_alarms_error():
    monitor = AlarmMonitor(
        {name: AlarmConfig(metric="kl", above=bound, window=1, action="stop") for name, bound in (("a", 1), ("b", 0.5))}
    )
    monitor.check(1, {"kl": 0.25})
    assert monitor.stop_error is None
    for value in (0.75, 2.0):
        monitor.check(2, {"kl": value})
    assert type(monitor.stop_error) is AlarmError
    assert (monitor.stop_error.key, monitor.stop_error.value, monitor.stop_error.exit_code) == ("alarms.b", 0.75, 3)


@pytest.mark.parametrize("at", range(6))
def test_a_resumed_monitor_continues_as_an_uninterrupted_one(at, caplog):
    values = [1.0, 1.0, 0.25, 0.25, 1.0, 0.0]
    whole = check(build(drop=0.5), values)
    resumed = build(drop=0.5, action="stop")
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="saccade"):
        resumed.replay({"entropy": value} for value in values[:at])
    assert not caplog.records
    assert resumed.stop_error is None
    assert check(resumed, values[at:]) == whole[at:]


def test_a_rule_reads_a_validation():
    monitor = build(metric="validation/greedy/accuracy", below=0.5, window=1)
    assert monitor.check(1, {"greedy/accuracy": 0.0}) == {"alarm/a": 0.0}
    assert monitor.check(1, prefix_validation({"greedy/accuracy": 0.0})) == {"alarm/a": 1.0}


def test_a_rule_on_validations_needs_one():
    values = {"alarms": {"a": {"metric": "validation/greedy/accuracy", "below": 0.5}}}
    with raises(ConfigError, key="alarms.a.metric", value="validation/greedy/accuracy"):
        parse_section(Recipe, values, "a recipe")
    assert parse_section(Recipe, {**values, "validation": {"every": 5}}, "a recipe").alarms


@pytest.mark.parametrize(("bounds", "value"), [({}, ()), ({"above": 1, "drop": 2}, ("above", "drop"))])
def test_a_rule_has_one_bound(bounds, value):
    with raises(ConfigError, key="alarms", value=value):
        parse_section(Recipe, {"alarms": {"a": {"metric": "kl", **bounds}}}, "a recipe")
