"""Read numbers from untyped JSON, such as a task's extras, and times from text."""

from typing import Any

_MAX_NUMBER = 1e308  # a JSON integer may have any number of digits


def to_finite(value: Any) -> float | None:
    """Return a number as a float; None for any other value, NaN, infinities and integers that no float can hold.

    >>> to_finite(3), to_finite(True), to_finite("3"), to_finite(10**400)
    (3.0, None, None, None)
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and -_MAX_NUMBER < value < _MAX_NUMBER else None


def to_span(value: Any) -> tuple[float, float] | None:
    """Return the first two items of a list as a span of finite numbers, in order; None if they aren't one.

    >>> to_span([1, 2.5, "red"]), to_span([3, 2]), to_span([1]), to_span("12")
    ((1.0, 2.5), None, None, None)
    """
    bounds = [to_finite(bound) for bound in value[:2]] if isinstance(value, list | tuple) else []
    if len(bounds) < 2 or bounds[0] is None or bounds[1] is None or bounds[0] > bounds[1]:
        return None
    return bounds[0], bounds[1]


def parse_clock(text: str) -> float:
    """Return the seconds of `h:mm:ss`, `mm:ss` or `s`, with a fraction after a point or, as in subtitles, a comma.

    Raises ValueError for a field that isn't a number.

    >>> parse_clock("01:02:03,5"), parse_clock("2:10"), parse_clock("12.5")
    (3723.5, 130.0, 12.5)
    """
    total = 0.0
    for field in text.replace(",", ".").split(":"):
        total = total * 60 + float(field)
    return total
