"""Share code among tool formats: translate the calls of other systems into calls of Saccade's tools, and parse times.

A tool format is a pure function `parse(text, prefill_length=0) -> Reply` that never raises. The calls of the reply have
the names and arguments of Saccade's tools; the reply's text is unchanged. A call without a counterpart, or one that
can't be parsed, is a `Call` with an `error` that the model reads.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from saccade.types import Call, CallFormat
from saccade.utils.numbers import parse_clock

_MAX_SECONDS = 1e9  # seconds; larger values, and NaN, are rejected
_TIME_PATTERN = re.compile(
    r"((?:(?:\d{1,3}:)?\d{1,4}:)?\d{1,9}(?:[.,]\d{1,9})?)\s*(?:s|secs?|seconds?)?", re.ASCII | re.IGNORECASE
)


def build_external_call(name: str, arguments: Mapping[str, Any]) -> Call:
    """Return a call of a Saccade tool that was written in another system's syntax."""
    return Call(name=name, arguments=dict(arguments), call_format=CallFormat.THIRD_PARTY)


def parse_window(start: Any, end: Any) -> dict[str, float]:
    """Parse two times into the arguments of Saccade's window tools. Raises ValueError."""
    return {"start_time": parse_seconds(start), "end_time": parse_seconds(end)}


def parse_seconds(value: Any) -> float:
    """Parse a time into seconds, from a number or a text such as `12.5s`, `mm:ss`, `hh:mm:ss.f`. Raises ValueError.

    >>> parse_seconds(3), parse_seconds("01:02:03,5"), parse_seconds("90 s")
    (3.0, 3723.5, 90.0)
    """
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _MAX_SECONDS:
        return float(value)
    match = _TIME_PATTERN.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        raise ValueError(f"a time must be seconds or hh:mm:ss, not {value!r:.40}")
    return parse_clock(match[1])


def get_first(arguments: Mapping[str, Any], names: Sequence[str]) -> Any:
    """Return the first of these arguments that is given and not None, else None."""
    return next((arguments[name] for name in names if arguments.get(name) is not None), None)
