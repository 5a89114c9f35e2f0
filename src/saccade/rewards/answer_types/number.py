"""Score numbers: mean relative accuracy, or equality within a tolerance."""

import math
import re
from typing import Any, Literal

from saccade.config.schema import NonNegativeFloat
from saccade.rewards.answer_types.base import AnswerFormat, parse_numbers
from saccade.rewards.text_normalization import normalize_and_casefold
from saccade.types import Episode

_ONES = "one|two|three|four|five|six|seven|eight|nine"
_TEENS = "ten|eleven|twelve|thirteen|fourteen|fifteen|sixteen|seventeen|eighteen|nineteen"
_TENS = "twenty|thirty|forty|fifty|sixty|seventy|eighty|ninety"
_NUMBER_WORDS = {name: value for value, name in enumerate(f"zero|{_ONES}|{_TEENS}".split("|"))}
_NUMBER_WORDS |= {name: 10 * tens for tens, name in enumerate(_TENS.split("|"), 2)}
_NUMBER_WORD_PATTERN = re.compile(rf"\b(?:(?P<tens>{_TENS})(?:[- ](?P<ones>{_ONES}))?|zero|{_ONES}|{_TEENS})\b")
_SIGN = r"(?:\b(?:minus|negative)\s+|-\s*)[$€£¥({\[]*"
# A sign, then digits or a decimal. Digits inside a word ("x4"), after a point ("1.2.3") or in a power are not numbers,
# and a run of digits is never split.
_NUMBER = re.compile(
    rf"(?<![\w.^])((?:{_SIGN})?)"
    rf"((?:(?:\d{{1,3}}(?:,\d{{3}})+|\d+)(?:\.\d+)?|\.\d+)(?:e[+-]?\d+)?(?![,.]*\d)(?!\s*\^))"
)
# 12 345, 12'345 and 12_345, with a non-breaking space; the decimal point and the thousands comma of Arabic
_DIGIT_GROUP_SEPARATOR = re.compile(r"(?<=\d)[\u00a0\u2009\u202f'’_\u066c](?=\d{3}(?!\d))")
_ARABIC_DECIMAL_POINT = re.compile(r"(?<=\d)\u066b(?=\d)")
_SUPERSCRIPT_OR_SUBSCRIPT = re.compile("[²³¹⁰-⁹₀-₉]+")
# Words and signs that change a number's value, or leave it ambiguous.
_FRACTION_WORDS = "(?:third|quarter|fourth|fifth|sixth|seventh|eighth|ninth|tenth)s?"
_AMBIGUOUS = re.compile(
    r"\b(?:half|halves|quarters?|dozens?|lakhs?|crores?|(?:hundred|thousand|[a-z]*illion)\w*|twice|double|squared|cubed|root)\b"
    r"|\d\s*(?:(?:k|mn|bn|mio|mrd)\b|[万萬亿億千百兆])|\b0[xob]\d|[\u0335-\u0338]"  # struck out
    rf"|\d[\s-]*(?:and\s+)?(?:a\s+)?\b(?:{_FRACTION_WORDS})\b"
    r"|\d\s*(?:[-+*/×÷:x^·⋅•∙⁄∕∗]+|\s|\b(?:times|plus|minus|point|over|by|divided by)\b)\s*-?\.?\d"
    r"|[±∓√∛<>≤≥≠∞]|\+\s*/\s*-|-[\s({\[]*-|\b(?:not|never|except|neither|nor|none)\b|n't\b"
    r"|\b(?:at (?:least|most)|(?:more|less|fewer|greater|larger|smaller|other) than|up to"
    r"|over|under|above|below|beyond)\s+-?\.?\d"
    r"|\d\s*(?:\+(?!\s*\d)|or (?:more|less|fewer|over|under)\b|and (?:more|over|up|above|below)\b)"
)
_MRA_THRESHOLDS = tuple(percent / 100 for percent in range(50, 100, 5))
_ROUNDING_TOLERANCE = 1e-9  # for binary fractions: an error of exactly 10 % must pass the 10 % threshold


class NumberAnswer(AnswerFormat):
    """Numbers: how close the only number of the final answer is to the ground truth, in [0, 1].

    `mra` is the mean relative accuracy of VSI-Bench: the fraction of thresholds t in 0.50, 0.55 ... 0.95 with |answer -
    truth| / |truth| <= 1 - t; for a ground truth of 0 only 0 is right. `exact` requires |answer - truth| <= tolerance.
    Digits, decimals, exponents, thousands commas, minus signs and the words zero to ninety-nine are parsed; units are
    ignored, including `%`: 50 % is 50.

    These score 0: two different numbers (`3 or 4`, `3-4`, `1/2`), a sum or another calculation (`4 x 4`, `twice 4`), a
    bound or a denial (`>4`, `at least 4`, `not 4`, `±4`), a power, a larger or smaller number word (`4 million`, `4
    tenths`), no number at all.
    """

    names = ("number", "numeric", "numerical", "regression", "count")
    expected = "a finite number"
    example = (2.0, "2")

    def __init__(
        self,
        *,
        mode: Literal["mra", "exact"] = "mra",  # mra = mean relative accuracy, exact = within `tolerance`
        tolerance: NonNegativeFloat = 0.0,  # largest absolute error of exact
    ) -> None:
        self._mode, self._tolerance = mode, tolerance

    def __call__(self, episode: Episode) -> float:
        """Return the score of an episode. Raises DataError if the ground truth is not a finite number."""
        try:
            expected = float(episode.task.ground_truth)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            expected = math.nan
        if not math.isfinite(expected):
            self.require_valid(episode.task)
        predicted = _parse_answer(episode.answer or "")
        if predicted is None:
            return 0.0
        error = abs(predicted - expected)
        if self._mode == "exact":
            return float(error <= self._tolerance + _ROUNDING_TOLERANCE)
        if expected == 0:
            return float(predicted == 0)
        num_passed = sum(error / abs(expected) <= 1 - threshold + _ROUNDING_TOLERANCE for threshold in _MRA_THRESHOLDS)
        return num_passed / len(_MRA_THRESHOLDS)

    @classmethod
    def is_valid(cls, ground_truth: object) -> bool:
        """Return whether it is a finite number."""
        return isinstance(ground_truth, float) and math.isfinite(ground_truth)

    @classmethod
    def parse_ground_truth(cls, value: Any) -> float | None:
        """Return the only number of a published answer."""
        numbers = parse_numbers(value)
        return numbers[0] if len(numbers) == 1 else None


number = NumberAnswer


def _parse_answer(answer: str) -> float | None:
    """Return the number in an answer, or None if it contains none or several."""
    plain = " ".join(
        normalize_and_casefold(
            _SUPERSCRIPT_OR_SUBSCRIPT.sub("^", _DIGIT_GROUP_SEPARATOR.sub(",", _ARABIC_DECIMAL_POINT.sub(".", answer)))
        ).split()
    )
    plain = _NUMBER_WORD_PATTERN.sub(_convert_word_to_digits, plain)
    # The same number twice ("4 (four)") is one answer; two different numbers are not.
    values = {float(digits.replace(",", "")) * (-1 if sign else 1) for sign, digits in _NUMBER.findall(plain)}
    return values.pop() if len(values) == 1 and not _AMBIGUOUS.search(plain) else None


def _convert_word_to_digits(match: re.Match[str]) -> str:
    if match["tens"] is None:
        return str(_NUMBER_WORDS[match[0]])
    return str(_NUMBER_WORDS[match["tens"]] + _NUMBER_WORDS.get(match["ones"], 0))
