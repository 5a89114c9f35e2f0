"""Answers that are formulas: the tolerant way to find and to compare them."""

import re

from saccade.evaluation.benchmarks._answers import undressed
from saccade.evaluation.benchmarks._latex import same_value
from saccade.rewards._text import boxes, tidy

_LED = re.compile(r"(?i:answer|result|value|答案)(?:\s*(?:is|:|=|：|是|为))+\s*")
_UNITS = (
    r"degrees?|°|cm|mm|km|m|meters?|metres?|centimeters?|feet|foot|ft|inches|inch|in|units?|seconds?|s|minutes?|hours?|"
    r"dollars?|kg|g|miles?|yards?"
)
_UNIT = re.compile(rf"(?<=[\d}})])\s*(?:square\s+|cubic\s+)?(?:{_UNITS})(?:\^?\{{?[23²³]\}}?)?\s*\.?$", re.IGNORECASE)


def tolerant_formula(text: str) -> str | None:
    r"""What stands in the last box, else after the last `answer is`, else the whole answer, without dress and unit.

    >>> tolerant_formula(r"so \boxed{27\text{ cm}}"), tolerant_formula("The answer is 27 degrees.")
    ('27', '27')
    """
    inside = boxes(text)
    if inside:
        found = inside[-1]
    else:
        found = _LED.split(text)[-1].strip().split("\n")[0]
    plain = undressed(tidy(found)).replace("{,}", "").replace(r"^\circ", "").replace(r"^{\circ}", "").strip()
    plain = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", plain).rstrip(".").strip()
    plain = _UNIT.sub("", plain).removesuffix(r"\%").removesuffix("%").strip()
    return plain or None


def same_formula(said: str, gold: str) -> bool:
    """Whether two formulas are one text but for blanks and case, or have one value to two decimals."""
    gold = tolerant_formula(gold) or ""
    if "".join(said.split()).casefold() == "".join(gold.split()).casefold():
        return True
    return same_value(said.rpartition("=")[2], gold.rpartition("=")[2])
