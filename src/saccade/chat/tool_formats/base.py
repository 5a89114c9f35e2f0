"""What the readers of foreign syntaxes share: a reply's calls put as calls of our tools, and times in every spelling.

A syntax is a pure function `read(text, forced_length=0) -> Reply` that never raises. The calls of the reply bear the
names and arguments of Saccade's tools; what was written stays in the reply's text. A call that has no counterpart, or
can't be read, is a `Call` with an `error` in words for the model.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from saccade.chat.parse import bad_call
from saccade.types import Call, Form, Reply

_MOST = 1e9  # seconds; beyond it, and for NaN, there is no such time
_CLOCK = re.compile(
    r"(?:(?:(\d{1,3}):)?(\d{1,4}):)?(\d{1,9}(?:[.,]\d{1,9})?)\s*(?:s|secs?|seconds?)?", re.ASCII | re.IGNORECASE
)


def translated(reply: Reply, rule: Callable[[Call], Call]) -> Reply:
    """The reply with each readable call as `rule` puts it; the words of a ValueError become the call's `error`."""

    def put(call: Call | None) -> Call | None:
        if call is None or not call.ok:
            return call
        try:
            return rule(call)
        except ValueError as error:
            return bad_call(str(error), call.form)

    return replace(reply, blocks=tuple(replace(block, call=put(block.call)) for block in reply.blocks))


def foreign(name: str, arguments: Mapping[str, Any]) -> Call:
    """A call of one of our tools that was written in another system's syntax."""
    return Call(name=name, arguments=dict(arguments), form=Form.FOREIGN)


def window(start: Any, end: Any) -> dict[str, float]:
    """Two times as the arguments that our tools of windows take. Raises ValueError."""
    return {"start_time": seconds(start), "end_time": seconds(end)}


def seconds(value: Any) -> float:
    """A time in seconds from a number, or from text: `12.5`, `12.5s`, `mm:ss`, `hh:mm:ss.f`. Raises ValueError.

    >>> seconds(3), seconds("01:02:03,5"), seconds("90 s")
    (3.0, 3723.5, 90.0)
    """
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _MOST:
        return float(value)
    found = _CLOCK.fullmatch(value.strip()) if isinstance(value, str) else None
    if found is None:
        raise ValueError(f"a time must be seconds or hh:mm:ss, not {value!r:.40}")
    hours, minutes, rest = found.groups(default="0")
    return int(hours) * 3600 + int(minutes) * 60 + float(rest.replace(",", "."))


def first_of(arguments: Mapping[str, Any], names: Sequence[str]) -> Any:
    """The argument under the first of these names that was given, else None."""
    return next((arguments[name] for name in names if arguments.get(name) is not None), None)
