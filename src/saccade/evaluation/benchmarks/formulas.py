r"""The value of a formula in LaTeX: numbers and what is made of them, nothing else; no code is ever run.

expression := term (("+" | "-") term)*         term := factor (("*" | "/")? factor)*
factor     := "-" factor | base ("^" factor)? ("!" | "%")*
base       := number | \pi | "(" expression ")" | \frac{..}{..} | \sqrt[n]{..} | \sin .. | |..|
"""

import math
import re

_TOKEN = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+|\\[a-zA-Z]+|\\.|\S)")
_SPACING = re.compile(r"\\[,;:! ]|\\(?:left|right|displaystyle|quad)(?![a-zA-Z])|[$~]")
_CLOSING = {"(": ")", "{": "}", "[": "]", r"\{": r"\}"}
_TIMES = {"*", r"\cdot", r"\times"}
_OVER = {"/", r"\div"}
_FUNCTIONS = {r"\sin": math.sin, r"\cos": math.cos, r"\tan": math.tan, r"\ln": math.log, r"\log": math.log10}
_LONGEST, _LARGEST = 400, 1e15


def value_of(formula: str) -> float | None:
    r"""The value of a formula, or None where it is none, holds a variable or can't be worked out.

    >>> value_of(r"2\sqrt{3}"), value_of(r"\frac{1}{4}"), value_of("27cm"), value_of("(1,2)")
    (3.4641016151377544, 0.25, None, None)
    """
    if len(formula) > _LONGEST:
        return None
    try:
        parser = _Parser(_TOKEN.findall(_SPACING.sub(" ", formula)))
        value = parser.expression()
    except (ValueError, ArithmeticError, RecursionError):
        return None
    return value if parser.done and math.isfinite(value) else None


def same_value(one: str, other: str, digits: int = 2) -> bool:
    """Whether two formulas have the same value once each is rounded to so many decimals."""
    left, right = value_of(one), value_of(other)
    return left is not None and right is not None and round(left, digits) == round(right, digits)


class _Parser:
    """Reads tokens from left to right. Raises ValueError for what it doesn't know."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens, self._at = tokens, 0

    @property
    def done(self) -> bool:
        return self._at == len(self._tokens)

    def expression(self) -> float:
        value = self._term()
        while self._next() in ("+", "-"):
            value = value + self._term() if self._take() == "+" else value - self._term()
        return value

    def _term(self) -> float:
        value = self._factor()
        while True:
            token = self._next()
            if token in _TIMES:
                self._take()
                value *= self._factor()
            elif token in _OVER:
                self._take()
                value /= self._factor()
            elif self._begins(token):
                value *= self._factor()
            else:
                return value

    def _factor(self) -> float:
        if self._next() in ("-", "+"):
            return -self._factor() if self._take() == "-" else self._factor()
        value = self._base()
        if self._next() == "^":
            self._take()
            exponent = self._argument() if self._next() == "{" else self._factor()
            if abs(exponent) > 64:  # 9^{9^9} is no answer
                raise ValueError
            value = float(value**exponent)
        while self._next() in ("!", "%", r"\%"):
            value = self._after(value, self._take())
        return value

    def _after(self, value: float, sign: str) -> float:
        if sign != "!":
            return value / 100
        if value != int(value) or not 0 <= value <= 20:
            raise ValueError
        return float(math.factorial(int(value)))

    def _base(self) -> float:
        token = self._take()
        if re.match(r"[\d.]", token):
            return float(token)
        if token == r"\pi" or token == "π":
            return math.pi
        if token in _CLOSING and token != "[":
            return self._until(_CLOSING[token])
        if token == "|":
            return abs(self._until("|"))
        if token in (r"\frac", r"\dfrac", r"\tfrac"):
            above = self._argument()
            return above / self._argument()
        if token == r"\sqrt":
            root = self._until("]") if self._next() == "[" and self._take() else 2.0
            return float(self._positive(self._argument()) ** (1 / root))
        if token in _FUNCTIONS:
            return _FUNCTIONS[token](self._factor())
        raise ValueError(token)

    def _positive(self, value: float) -> float:
        if value < 0:
            raise ValueError
        return value

    def _argument(self) -> float:
        """What stands in braces, else the one digit that LaTeX takes."""
        if self._next() == "{":
            self._take()
            return self._until("}")
        token = self._take()
        if token.isdigit() and len(token) > 1:
            self._at -= 1
            self._tokens[self._at] = token[1:]
            return float(token[0])
        if token.isdigit():
            return float(token)
        raise ValueError(token)

    def _until(self, closing: str) -> float:
        value = self.expression()
        if self._take() != closing or abs(value) > _LARGEST:
            raise ValueError
        return value

    def _begins(self, token: str) -> bool:
        """Whether a factor follows without a sign between."""
        known = {r"\pi", "π", "(", "{", r"\frac", r"\dfrac", r"\tfrac", r"\sqrt", *_FUNCTIONS}
        return token in known or bool(re.match(r"[\d.]", token))

    def _next(self) -> str:
        return "" if self.done else self._tokens[self._at]

    def _take(self) -> str:
        if self.done:
            raise ValueError("the formula ends too early")
        self._at += 1
        return self._tokens[self._at - 1]
