r"""Extract answers that are formulas and compare them; evaluate LaTeX formulas of numbers, and run no code.

expression := term (("+" | "-") term)*
term       := factor (("*" | "/")? factor)*
factor     := "-" factor | base ("^" factor)? ("!" | "%")*
base       := number | \pi | "(" expression ")" | \frac{..}{..} | \sqrt[n]{..} | \sin .. | |..|
"""

import math
import re

from saccade.evaluation.benchmarks.answer_extraction import strip_formatting
from saccade.rewards.answer_types.reader import clean_text
from saccade.rewards.text_normalization import extract_boxed, normalize_text

_ANSWER_LEAD = re.compile(r"(?i:answer|result|value|答案)(?:\s*(?:is|:|=|：|是|为))+\s*")
_UNITS = (
    r"degrees?|°|cm|mm|km|m|meters?|metres?|centimeters?|feet|foot|ft|inches|inch|in|units?|seconds?|s|minutes?|hours?|"
    r"dollars?|kg|g|miles?|yards?"
)
_UNIT = re.compile(rf"(?<=[\d}})])\s*(?:square\s+|cubic\s+)?(?:{_UNITS})(?:\^?\{{?[23²³]\}}?)?\s*\.?$", re.IGNORECASE)
_TOKEN = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+|\\[a-zA-Z]+|\\.|\S)")
_SPACING = re.compile(r"\\[,;:! ]|\\(?:left|right|displaystyle|quad)(?![a-zA-Z])|[$~]")
_CLOSING_BRACKETS = {"(": ")", "{": "}", "[": "]", r"\{": r"\}"}
_DIVIDE_TOKENS = {"/", r"\div"}
_OPERATORS = {"*", r"\cdot", r"\times", *_DIVIDE_TOKENS}
_FRACTIONS = {r"\frac", r"\dfrac", r"\tfrac"}
_FUNCTIONS = {r"\sin": math.sin, r"\cos": math.cos, r"\tan": math.tan, r"\ln": math.log, r"\log": math.log10}
_FACTOR_STARTS = {r"\pi", "π", "(", "{", r"\sqrt", *_FRACTIONS, *_FUNCTIONS}  # besides digits
_DIGITS = re.compile(r"[\d.]")
_MAX_CHARS, _MAX_VALUE = 400, 1e15


def extract_formula(text: str) -> str | None:
    r"""Return the last box's content, the text after the last `answer is`, or the whole answer; no markup, no unit.

    >>> extract_formula(r"so \boxed{27\text{ cm}}"), extract_formula("The answer is 27 degrees.")
    ('27', '27')
    """
    text = clean_text(text)
    boxes = extract_boxed(text)
    raw = boxes[-1] if boxes else _ANSWER_LEAD.split(text)[-1].strip().split("\n")[0]
    plain = strip_formatting(normalize_text(raw))
    for mark in ("{,}", r"^\circ", r"^{\circ}"):
        plain = plain.replace(mark, "")
    plain = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", plain.strip()).rstrip(".").strip()
    plain = _UNIT.sub("", plain).removesuffix(r"\%").removesuffix("%").strip()
    return plain or None


def are_formulas_equal(predicted: str, ground_truth: str) -> bool:
    """Return whether two formulas are the same text, ignoring blanks and case, or have equal values to two decimals."""
    ground_truth = extract_formula(ground_truth) or ""
    if "".join(predicted.split()).casefold() == "".join(ground_truth.split()).casefold():
        return True
    return have_equal_values(predicted.rpartition("=")[2], ground_truth.rpartition("=")[2])


def evaluate_formula(formula: str) -> float | None:
    r"""Return the value of a formula, or None if it is invalid, contains a variable or can't be evaluated.

    >>> [evaluate_formula(formula) for formula in (r"2\sqrt{3}", r"\frac{1}{4}", "27cm", "(1,2)")]
    [3.4641016151377544, 0.25, None, None]
    """
    if len(formula) > _MAX_CHARS:
        return None
    tokens = ["", *reversed(_TOKEN.findall(_SPACING.sub(" ", formula)))]
    try:
        value = _Parser(tokens).parse_expression()
    except (ValueError, ArithmeticError, RecursionError):
        return None
    return value if tokens == [""] and math.isfinite(value) else None


def have_equal_values(first: str, second: str) -> bool:
    """Return whether two formulas have the same value after each is rounded to two decimals."""
    left, right = evaluate_formula(first), evaluate_formula(second)
    return left is not None and right is not None and round(left, 2) == round(right, 2)


class _Parser:
    """Parse tokens, the next one last, down to the empty one that ends them. Raises ValueError for an unknown token."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens

    def parse_expression(self) -> float:
        value = self._parse_term()
        while self._tokens[-1] in ("+", "-"):
            value = value + self._parse_term() if self._tokens.pop() == "+" else value - self._parse_term()
        return value

    def _parse_term(self) -> float:
        value = self._parse_factor()
        # An operator before a factor may be omitted.
        while (token := self._tokens[-1]) in _OPERATORS or token in _FACTOR_STARTS or _DIGITS.match(token):
            if token in _OPERATORS:
                self._tokens.pop()
            factor = self._parse_factor()
            value = value / factor if token in _DIVIDE_TOKENS else value * factor
        return value

    def _parse_factor(self) -> float:
        if self._tokens[-1] in ("-", "+"):
            return -self._parse_factor() if self._tokens.pop() == "-" else self._parse_factor()
        value = self._parse_base()
        if self._tokens[-1] == "^":
            self._tokens.pop()
            exponent = self._parse_argument() if self._tokens[-1] == "{" else self._parse_factor()
            if abs(exponent) > 64:  # 9^{9^9} is not a plausible answer
                raise ValueError
            power = value**exponent
            if isinstance(power, complex):  # a root of a negative number
                raise ValueError
            value = float(power)
        while self._tokens[-1] in ("!", "%", r"\%"):
            if self._tokens.pop() != "!":
                value /= 100
            elif value == int(value) and 0 <= value <= 20:
                value = float(math.factorial(int(value)))
            else:
                raise ValueError
        return value

    def _parse_base(self) -> float:
        token = self._tokens.pop()
        if _DIGITS.match(token):
            return float(token)
        if token in (r"\pi", "π"):
            return math.pi
        if token in _CLOSING_BRACKETS and token != "[":
            return self._parse_until(_CLOSING_BRACKETS[token])
        if token == "|":
            return abs(self._parse_until("|"))
        if token in _FRACTIONS:
            numerator = self._parse_argument()
            return numerator / self._parse_argument()
        if token == r"\sqrt":
            root = self._parse_until("]") if self._tokens[-1] == "[" and self._tokens.pop() else 2.0
            radicand = self._parse_argument()
            if radicand < 0:
                raise ValueError
            return float(radicand ** (1 / root))
        if token in _FUNCTIONS:
            return _FUNCTIONS[token](self._parse_factor())
        raise ValueError(token)

    def _parse_argument(self) -> float:
        """Parse the content of braces, else the single digit that LaTeX takes."""
        token = self._tokens.pop()
        if token == "{":
            return self._parse_until("}")
        if not token.isdigit():
            raise ValueError(token)
        if len(token) > 1:
            self._tokens.append(token[1:])
        return float(token[0])

    def _parse_until(self, closing: str) -> float:
        value = self.parse_expression()
        if self._tokens.pop() != closing or abs(value) > _MAX_VALUE:
            raise ValueError
        return value
