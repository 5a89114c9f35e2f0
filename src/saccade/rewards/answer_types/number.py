"""Numbers: mean relative accuracy, or equality within a tolerance."""

import math
import re
from typing import Literal

from saccade.errors import DataError
from saccade.rewards._text import folded
from saccade.sections import NotNegative
from saccade.types import Episode, Task

_ONES = "one|two|three|four|five|six|seven|eight|nine"
_TEENS = "ten|eleven|twelve|thirteen|fourteen|fifteen|sixteen|seventeen|eighteen|nineteen"
_TENS = "twenty|thirty|forty|fifty|sixty|seventy|eighty|ninety"
_WORDS = {name: value for value, name in enumerate(f"zero|{_ONES}|{_TEENS}".split("|"))}
_WORDS |= {name: 10 * place for place, name in enumerate(_TENS.split("|"), 2)}
_WORD = re.compile(rf"\b(?:(?P<tens>{_TENS})(?:[- ](?P<ones>{_ONES}))?|zero|{_ONES}|{_TEENS})\b")
_SIGN = r"(?:\b(?:minus|negative)\s+|-\s*)[$€£¥({\[]*"
# A sign, then digits or a decimal. Digits inside a word ("x4"), after a point ("1.2.3") or in a power are no
# numbers, and digits are never cut in two.
_NUMBER = re.compile(
    rf"(?<![\w.^])((?:{_SIGN})?)"
    rf"((?:(?:\d{{1,3}}(?:,\d{{3}})+|\d+)(?:\.\d+)?|\.\d+)(?:e[+-]?\d+)?(?![,.]*\d)(?!\s*\^))"
)
# 12 345, 12'345 and 12_345, with a space that holds; the point and the comma of Arabic
_SPACED = re.compile(r"(?<=\d)[\u00a0\u2009\u202f'’_\u066c](?=\d{3}(?!\d))")
_POINT = re.compile(r"(?<=\d)\u066b(?=\d)")
_POWER = re.compile("[²³¹⁰-⁹₀-₉]+")
# What makes another number of a number, or leaves open which one is meant.
_PARTS = "(?:third|quarter|fourth|fifth|sixth|seventh|eighth|ninth|tenth)s?"
_UNREAD = re.compile(
    r"\b(?:half|halves|quarters?|dozens?|lakhs?|crores?|(?:hundred|thousand|[a-z]*illion)\w*|twice|double|squared|cubed|root)\b"
    r"|\d\s*(?:(?:k|mn|bn|mio|mrd)\b|[万萬亿億千百兆])|\b0[xob]\d|[\u0335-\u0338]"  # struck out
    rf"|\d[\s-]*(?:and\s+)?(?:a\s+)?\b(?:{_PARTS})\b"
    r"|\d\s*(?:[-+*/×÷:x^·⋅•∙⁄∕∗]+|\s|\b(?:times|plus|minus|point|over|by|divided by)\b)\s*-?\.?\d"
    r"|[±∓√∛<>≤≥≠∞]|\+\s*/\s*-|-[\s({\[]*-|\b(?:not|never|except|neither|nor|none)\b|n't\b"
    r"|\b(?:at (?:least|most)|(?:more|less|fewer|greater|larger|smaller|other) than|up to"
    r"|over|under|above|below|beyond)\s+-?\.?\d"
    r"|\d\s*(?:\+(?!\s*\d)|or (?:more|less|fewer|over|under)\b|and (?:more|over|up|above|below)\b)"
)
_THRESHOLDS = tuple(percent / 100 for percent in range(50, 100, 5))
_SLACK = 1e-9  # for the rounding of binary fractions, so that an error of exactly 10 % passes the 10 % threshold


def number(
    episode: Episode, task: Task, *, mode: Literal["mra", "exact"] = "mra", tolerance: NotNegative = 0.0
) -> float:
    """How close the one number of the final answer is to the gold, in [0, 1].

    `mra` is the mean relative accuracy of VSI-Bench: the share of thresholds t in 0.50, 0.55 ... 0.95 with
    |answer - gold| / |gold| <= 1 - t; for a gold of 0 only 0 is right. `exact` asks for |answer - gold| <= tolerance.
    Digits, decimals, exponents, thousands commas, minus signs and the words zero to ninety-nine are read and units
    passed over, among them `%`: 50 % is 50. An answer with two different numbers (`3 or 4`, `3-4`, `1/2`), a sum or
    another calculation (`4 x 4`, `twice 4`), a bound or a denial (`>4`, `at least 4`, `not 4`, `±4`), a power, a larger
    or smaller number word (`4 million`, `4 tenths`) or no number at all is worth 0. DataError if the gold is no finite
    number.
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
    plain = " ".join(folded(_POWER.sub("^", _SPACED.sub(",", _POINT.sub(".", answer)))).split())
    plain = _WORD.sub(_digits, plain)
    # the same number twice ("4 (four)") is one answer, two numbers are a guess
    values = {_value(*found) for found in _NUMBER.findall(plain)}
    return values.pop() if len(values) == 1 and not _UNREAD.search(plain) else None


def _digits(word: re.Match[str]) -> str:
    if word["tens"] is None:
        return str(_WORDS[word[0]])
    return str(_WORDS[word["tens"]] + _WORDS.get(word["ones"], 0))


def _value(sign: str, magnitude: str) -> float:
    value = float(magnitude.replace(",", ""))
    return -value if sign else value


def _gold(task: Task) -> float:
    gold = task.gold if isinstance(task.gold, str | int | float) else "a span"
    try:
        value = float(gold)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise DataError(f"task {task.id}: the gold answer must be a number, it is {task.gold!r}")
    return value
