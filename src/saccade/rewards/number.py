"""Numbers: mean relative accuracy, or equality within a tolerance."""

import math
import re
from typing import Literal

from saccade.errors import DataError
from saccade.rewards._text import folded
from saccade.types import Episode, Task

_NAMES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty"
)
_WORDS = {name: float(value) for value, name in enumerate(_NAMES.split())}
# A sign, then digits, a decimal or a word. Digits inside a word ("x4"), after a point ("1.2.3") or in a power are no
# numbers, and digits are never cut in two.
_NUMBER = re.compile(
    r"(?<![\w.^])(?:\b(?:minus|negative)\s+|-\s*)?"
    rf"(?:(?:(?:\d{{1,3}}(?:,\d{{3}})+|\d+)(?:\.\d+)?|\.\d+)(?:e[+-]?\d+)?(?![,.]*\d)(?!\s*\^)|\b(?:{'|'.join(_WORDS)})\b)"
)
_SPACED = re.compile(r"(?<=\d)[\u00a0\u2009\u202f'’](?=\d{3}(?!\d))")  # 12 345 and 12'345, with a space that holds
_POWER = re.compile("[²³¹⁰-⁹₀-₉]+")
# What makes another number of a number, or leaves open which one is meant.
_UNREAD = re.compile(
    r"\b(?:thirty|forty|fifty|sixty|seventy|eighty|ninety|half|dozen|(?:hundred|thousand|[mb]illion)s?)\b"
    r"|[±∓√∛<>≤≥≠∞]|\+\s*/\s*-|\d\s*[-+*/×÷:]\s*\d|\b(?:not|never|except|neither|nor)\b|n't\b|\d\s*k\b|\b0[xob]\d"
)
_THRESHOLDS = tuple(percent / 100 for percent in range(50, 100, 5))
_SLACK = 1e-9  # for the rounding of binary fractions, so that an error of exactly 10 % passes the 10 % threshold


def number(episode: Episode, task: Task, *, mode: Literal["mra", "exact"] = "mra", tolerance: float = 0.0) -> float:
    """How close the one number of the final answer is to the gold, in [0, 1].

    `mra` is the mean relative accuracy of VSI-Bench: the share of thresholds t in 0.50, 0.55 ... 0.95 with
    |answer - gold| / |gold| <= 1 - t; for a gold of 0 only 0 is right. `exact` asks for |answer - gold| <= tolerance.
    Digits, decimals, exponents, thousands commas, minus signs and the words zero to twenty are read and units passed
    over, among them `%`: 50 % is 50. An answer with two different numbers (`3 or 4`, `3-4`, `1/2`), a bound or a denial
    (`>4`, `not 4`, `±4`), a power, a larger number word (`4 million`) or no number at all is worth 0. DataError if the
    gold is no finite number.
    """
    gold, said = _gold(task), _read(episode.answer or "")
    if said is None:
        return 0.0
    error = abs(said - gold)
    if mode == "exact":
        return float(error <= tolerance + _SLACK)
    if gold == 0:
        return float(said == 0)
    return sum(error / abs(gold) <= 1 - threshold + _SLACK for threshold in _THRESHOLDS) / len(_THRESHOLDS)


def _read(answer: str) -> float | None:
    """The number that an answer holds, or None where it holds none or several."""
    plain = folded(_POWER.sub("^", _SPACED.sub(",", answer)))
    # the same number twice ("4 (four)") is one answer, two numbers are a guess
    values = {_value(found) for found in _NUMBER.findall(plain)}
    return values.pop() if len(values) == 1 and not _UNREAD.search(plain) else None


def _value(text: str) -> float:
    magnitude = re.sub(r"^(?:minus|negative|-)\s*", "", text)
    value = _WORDS[magnitude] if magnitude in _WORDS else float(magnitude.replace(",", ""))
    return value if magnitude == text else -value


def _gold(task: Task) -> float:
    gold = task.gold if isinstance(task.gold, str | int | float) else "a span"
    try:
        value = float(gold)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise DataError(f"task {task.id}: the gold answer must be a number, it is {task.gold!r}")
    return value
