"""What the parameters of the viewer's requests may be, by name: one rule for every route.

Names of runs, stages and episodes are any text: the routes look them up.
"""

import math
import re
from collections.abc import Iterable

from saccade.errors import DataError
from saccade.reporting.viewer.index import FIXED_FILTERS, MAX_PAGE, SORTS

MAX_INTEGER = 10**15  # of a step, a position or a number of an image
MAX_SEARCH_CHARS = 1000
INTEGERS = {
    "limit": (1, MAX_PAGE),
    **dict.fromkeys(
        ("offset", "step", "grp", "image", "number", "file", "first_step", "second_step"), (0, MAX_INTEGER)
    ),
}
NUMBERS = ("reward_min", "reward_max")
CHOICES = {
    "sort": tuple(filter(None, SORTS)),
    **{name: tuple(options) for name, options in FIXED_FILTERS.items()},
    "kind": ("evaluation", "rollout"),
    "bands": ("0", "1"),
    "size": ("thumb", "full"),
}


class InvalidParameterError(DataError):
    """A request has a parameter that can't be what it is."""


def check_parameters(parameters: Iterable[tuple[str, str]]) -> None:
    """Raise InvalidParameterError for the first parameter that is out of range; an empty one counts as left out."""
    for name, text in parameters:
        if expected := _find_objection(name, text):
            message = f"{name} must be {expected}, got {text!r:.40}"
            raise InvalidParameterError(message, key=name, value=text)


def _find_objection(name: str, text: str) -> str:
    """Return what a parameter must be if it isn't that; "" for a good one."""
    if not text:
        return ""
    if name in INTEGERS:
        low, high = INTEGERS[name]
        is_good = re.fullmatch("[0-9]{1,16}", text) is not None and low <= int(text) <= high
        return "" if is_good else f"a whole number from {low} to {high}"
    if name in NUMBERS:
        return "" if _is_finite(text) else "a finite number"
    if name in CHOICES:
        return "" if text in CHOICES[name] else f"one of {', '.join(CHOICES[name])}"
    is_long = name == "text" and len(text) > MAX_SEARCH_CHARS
    return f"at most {MAX_SEARCH_CHARS} characters" if is_long else ""


def _is_finite(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False
