"""Temporal grounding: the overlap of a time span with the gold span."""

import re

from saccade.errors import DataError
from saccade.rewards._text import folded
from saccade.types import Episode, Task

_TIME = r"(?:\d{1,3}:[0-5]\d:[0-5]\d(?:,\d{3})?|\d{1,4}:[0-5]\d|\d{1,7})(?:\.\d{1,9})?"
_UNIT = r"(?:\s*(?:(?:s|secs?|seconds?)\b\.?|秒))?"
_BETWEEN = r"\s*(?:-{1,3}>?|~|\u301c|\u2192|\.\.+|(?:up )?to\b|and\b|until\b|till\b|through\b|[,;]|到|至)\s*"
_DRESS = r"(?:\s*[\"'`<>()\[\]*$]{1,4})?"  # what a time may stand in: `<4 seconds>` as in prompts, quotes, bold, maths
# The second time may have a name: `end: 8`, `"end_time": 8`, `it ends at 8`, `second 8`. With one, a blank is enough.
_END = r"(?:it\s+)?['\"]?end(?:s|ing)?(?:[_ ]?time)?['\"]?\s*(?:at|[:=])?\s*"
_NAMED = rf"(?:{_BETWEEN}(?:(?:{_END})|(?:second|at|t\s*=)\s*)?|\s+{_END})"
# What stands before and after decides whether it is a span at all: no sign, digit or letter may touch it, nor another
# unit; nor may a third number follow.
_OTHER = r"(?:m|min(?:ute)?s?|h|hrs?|hours?|ms|msecs?|milliseconds?|days?|frames?|scenes?|pages?|percent)"
_SPAN = re.compile(
    rf"(?<![\w.:,-])({_TIME}){_UNIT}{_DRESS}{_NAMED}{_DRESS}\s*({_TIME})(?!\d)"
    rf"{_UNIT}(?![0-9a-z_:%]|\.\d|\s*(?:-|to\b)\s*\d)(?!\s*(?:%|{_OTHER}(?![a-z])))"
)
# `frames 4-8`, `minutes: 4 to 8`, `frame numbers 4-8`
_COUNTED = re.compile(rf"\b{_OTHER}\W{{0,3}}(?:(?:numbers?|nos?|ind(?:ex|ices)|from)\W{{1,3}})?$")


def grounding(episode: Episode, task: Task) -> float:
    """Intersection over union, in [0, 1], of the first well-formed span in the final answer and the gold span.

    A span is two times with `-`, `to`, `and`, `until`, a comma or `, end:` between them; a time is seconds (`12.5`,
    `12.5s`), `mm:ss` or `hh:mm:ss`, with a fraction if wanted. Later spans are not read, so that listing several earns
    nothing. An empty or inverted span, a negative time, other units and no span at all are worth 0. DataError if the
    gold is not a pair of seconds in order.
    """
    if isinstance(task.gold, str | int | float) or len(task.gold) != 2 or not task.gold[0] < task.gold[1]:
        raise DataError(f"task {task.id}: the gold must be a start and a later end in seconds, not {task.gold!r}")
    answer = " ".join(folded(episode.answer or "").split())
    found = next((each for each in _SPAN.finditer(answer) if not _is_counted(answer, each.start())), None)
    if found is None:
        return 0.0
    start, end = _seconds(found[1]), _seconds(found[2])
    if start >= end:
        return 0.0
    shared = min(end, task.gold[1]) - max(start, task.gold[0])
    union = max(end, task.gold[1]) - min(start, task.gold[0])
    return max(0.0, shared) / union


def _is_counted(answer: str, start: int) -> bool:
    """Whether the word before a span says that it counts something else than seconds."""
    return _COUNTED.search(answer[max(0, start - 40) : start]) is not None


def _seconds(time: str) -> float:
    """`hh:mm:ss.f`, `hh:mm:ss,f` (of subtitles), `mm:ss.f` or `s.f` in seconds."""
    total = 0.0
    for field in time.replace(",", ".").split(":"):
        total = total * 60 + float(field)
    return total
