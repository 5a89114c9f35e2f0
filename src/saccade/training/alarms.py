"""Alarms: rules of a recipe on the metrics of a training that mark its log, and may stop it.

    row of metrics ──> AlarmMonitor.check ──> alarm/NAME: 1.0 or 0.0 in the row, a warning when an alarm becomes active
                                          └─> stop_error, if its action is "stop"

An alarm that is active stays marked in every row until its rule no longer holds, and warns (or stops) again only after
that: a run that is resumed after a stop continues.
"""

import logging
import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from saccade.config.schema import AlarmConfig
from saccade.errors import AlarmError

ALARM_PREFIX = "alarm/"  # of the metric that marks an active alarm
VALIDATION_PREFIX = "validation/"  # of a validation's metric in a rule
NUM_ROWS_TO_WARN = 20  # without a rule's metric: it may be misspelled, or belong to another stage
_logger = logging.getLogger("saccade")


@dataclass(slots=True)
class Alarm:
    """A rule, and what it depends on: the newest values of its metric and the highest mean of a window so far."""

    rule: AlarmConfig
    values: deque[float] = field(init=False)
    highest_mean: float = -math.inf
    mean: float | None = None  # of the newest window; None until it is full
    is_active: bool = False
    num_missing: int = 0  # rows before the first value
    has_value: bool = False

    def __post_init__(self) -> None:
        self.values = deque(maxlen=self.rule.window)

    def update(self, row: Mapping[str, Any]) -> bool:
        """Add the row's value of the metric, if it has a finite one; return whether the alarm becomes active."""
        value = row.get(self.rule.metric)
        if not isinstance(value, int | float) or not math.isfinite(value):
            self.num_missing += 1
            return False
        self.has_value = True
        self.values.append(float(value))
        if len(self.values) < self.rule.window:
            return False
        self.mean = fmean(self.values)
        was_active, self.is_active = self.is_active, self._holds(self.mean)
        self.highest_mean = max(self.highest_mean, self.mean)
        return self.is_active and not was_active

    def _holds(self, mean: float) -> bool:
        rule = self.rule
        if rule.above is not None:
            return mean > rule.above
        if rule.below is not None:
            return mean < rule.below
        return rule.drop is not None and mean < self.highest_mean - rule.drop

    def describe(self) -> str:
        """Return which mean violates which bound."""
        rule = self.rule
        if rule.drop is not None:
            bound = f"more than {rule.drop:g} below its highest, {self.highest_mean:.4g}"
        else:
            bound = f"above {rule.above:g}" if rule.above is not None else f"below {rule.below:g}"
        return f"the mean of {rule.metric} over {rule.window} values is {self.mean:.4g}, {bound}"


class AlarmMonitor:
    """Checks the rows of a training's stage against the recipe's rules; `stop_error` is set when one must stop it."""

    def __init__(self, rules: Mapping[str, AlarmConfig] | None = None) -> None:
        self._alarms = {name: Alarm(rule) for name, rule in (rules or {}).items()}
        self.stop_error: AlarmError | None = None

    def raise_stop(self) -> None:
        """Raise the AlarmError of an alarm that must stop the training, if there is one."""
        if self.stop_error:
            raise self.stop_error

    def replay(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add the rows of earlier invocations, without a warning."""
        for row in rows:
            for alarm in self._alarms.values():
                alarm.update(row)

    def check(self, step: int, row: Mapping[str, Any]) -> dict[str, float]:
        """Add the row of a step; return the marks of all alarms, which belong to the row."""
        for name, alarm in self._alarms.items():
            is_raised = alarm.update(row)
            if not alarm.has_value and alarm.num_missing == NUM_ROWS_TO_WARN:
                message = "The alarm %s has no effect so far: the first %d rows of the log have no metric %s"
                _logger.warning(message, name, NUM_ROWS_TO_WARN, alarm.rule.metric)
            if is_raised:
                _logger.warning("Alarm %s at step %d: %s", name, step, alarm.describe())
                if alarm.rule.action == "stop" and self.stop_error is None:
                    self.stop_error = AlarmError(
                        f"the alarm {name} stopped the training at step {step}: {alarm.describe()}. A "
                        "checkpoint is saved; --resume continues, with other values of `alarms` if you set them",
                        key=f"alarms.{name}",
                        value=alarm.mean,
                    )
        return {f"{ALARM_PREFIX}{name}": float(alarm.is_active) for name, alarm in self._alarms.items()}


def prefix_validation(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a validation's row under the names that rules use for its metrics."""
    return {f"{VALIDATION_PREFIX}{name}": value for name, value in row.items()}
