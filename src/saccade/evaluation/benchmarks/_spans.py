"""Spans of time, as people write them."""

import re

from saccade.evaluation.benchmarks._answers import undressed
from saccade.rewards._text import boxes, tidy

_TIME = r"(?:\d{1,2}:)?\d{1,3}:[0-5]\d(?:\.\d+)?|\d{1,6}(?:\.\d+)?"
_UNIT = r"(?:\s*(?:s|secs?|seconds?)\b\.?)?"
_BETWEEN = r"\s*(?:-{1,3}>?|~|→|\.\.+|\bto\b|\band\b|\buntil\b|\btill\b|\bthrough\b|至|到)\s*"
_NAME = r"(?:(?:the|it|which|and)\s+)*['\"]?(?:end|stop|finish)(?:s|es|ing)?(?:[_ ]?time)?['\"]?\s*(?:is|at|by|:|=)*\s*"
_AT = r"(?:(?:about|around|at|second|time)\s+)*"
# Nothing numeric may touch a span: 2019-12-03 is a date, and -3 - 8 begins nowhere in a video.
_SPAN = re.compile(
    rf"(?<![\w.:,-])(?P<start>{_TIME}){_UNIT}(?:{_BETWEEN}(?:{_NAME})?|[\s,;.]*(?:and\s+)?{_NAME}){_AT}(?P<end>{_TIME})(?![\d:])"
)
_PAIR = re.compile(rf"(?:^|[\[(])\s*(?P<start>{_TIME}){_UNIT}\s*[,;]\s*(?P<end>{_TIME}){_UNIT}\s*(?:$|[\])])")


def tolerant_span(text: str) -> tuple[float, float] | None:
    """The first span of an answer in seconds, None where there is none; a time may be a clock's, with a fraction.

    Read are two times with any dash or `to`, `and`, `until` between; with the word `end` between; and as a pair in
    brackets. A minus before the first time makes none of it.

    >>> tolerant_span("from 00:12.5 to 0:20"), tolerant_span("[3.5, 8]"), tolerant_span("-3 - 8")
    ((12.5, 20.0), (3.5, 8.0), None)
    """
    inside = boxes(text)
    plain = undressed(tidy(inside[-1] if inside else text)).casefold()
    found = _PAIR.search(plain) or _SPAN.search(plain)
    return (seconds_of(found["start"]), seconds_of(found["end"])) if found else None


def seconds_of(clock: str) -> float:
    """Seconds of `h:mm:ss`, `mm:ss` or a number.

    >>> seconds_of("1:02:03.5"), seconds_of("7")
    (3723.5, 7.0)
    """
    total = 0.0
    for part in clock.split(":"):
        total = total * 60 + float(part)
    return total
