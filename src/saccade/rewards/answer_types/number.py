"""Score numbers: mean relative accuracy, or equality within a tolerance."""

import math
from typing import Any, Literal

from saccade.config.schema import NonNegativeFloat
from saccade.rewards.answer_types.base import BaseAnswerType, parse_numbers, quote_answer
from saccade.rewards.answer_types.reader import read_number
from saccade.types import Episode

_MRA_THRESHOLDS = tuple(percent / 100 for percent in range(50, 100, 5))
_ROUNDING_TOLERANCE = 1e-9  # for binary fractions: an error of exactly 10 % must pass the 10 % threshold


class NumberAnswer(BaseAnswerType):
    """Numbers: how close the only number of the final answer is to the ground truth, in [0, 1].

    `mra` is the mean relative accuracy of VSI-Bench: the fraction of thresholds t in 0.50, 0.55 ... 0.95 with |answer -
    truth| / |truth| <= 1 - t; for a ground truth of 0 only 0 is right. `exact` requires |answer - truth| <= tolerance.
    `reader.read_number` reads it: digits with thousands commas or a decimal comma, fractions, powers, exponents, number
    words; units are ignored, including `%`: 50 % is 50.

    These score 0: two different numbers (`3 or 4`, `3-4`), a sum or another calculation (`4 x 4`, `twice 4`), a bound
    or a denial (`>4`, `at least 4`, `not 4`, `±4`), a clock time, no number at all.
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
        predicted = read_number(episode.answer or "")
        if predicted is None:
            return 0.0
        error = abs(predicted - expected)
        if self._mode == "exact":
            return float(error <= self._tolerance + _ROUNDING_TOLERANCE)
        if expected == 0:
            return float(predicted == 0)
        num_passed = sum(error / abs(expected) <= 1 - threshold + _ROUNDING_TOLERANCE for threshold in _MRA_THRESHOLDS)
        return num_passed / len(_MRA_THRESHOLDS)

    def explain(self, episode: Episode) -> str:
        """Return the number that was read, and the right one."""
        predicted = read_number(episode.answer or "")
        read = "no number" if predicted is None else f"{predicted:g}"
        return f"{quote_answer(episode)} read as {read}, ground truth {episode.task.ground_truth}"

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
