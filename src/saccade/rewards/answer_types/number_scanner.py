r"""Find the numbers of a text, each as a whole, however it is written.

    text ──normalize_answer──> plain text ──scan_numbers──> Number(value, start, end), Number(...), ...
                                    └──mask_numbers──> the text with "#" for each number

A number is a run of digits with its separators, its exponent, its denominator, its scale, or a phrase of words. Every
digit of a plain text belongs to exactly one number, or to a word (`x4`, `m2`); no number is a part of another one.
"""

import math
import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from saccade.rewards.text_normalization import normalize_and_casefold

_ONES = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
_TEENS = ["ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"]
_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
_SCALES = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_WORD_VALUES = {"a": 1, "an": 1, "zero": 0} | {word: value for value, word in enumerate(_ONES + _TEENS, 1)}
_WORD_VALUES |= {word: 10 * value for value, word in enumerate(_TENS, 2)}

_GAP = r"(?:[ ]+|[ ]?-[ ]?)"  # between the words of a number
_BELOW_100 = rf"(?:(?:{'|'.join(_TENS)})(?:{_GAP}(?:{'|'.join(_ONES)})\b)?|{'|'.join(_TEENS)}|{'|'.join(_ONES)})\b"
_BELOW_1000 = rf"(?:(?:an?\b|{_BELOW_100}){_GAP}hundred\b(?:{_GAP}(?:and )?{_BELOW_100})?|{_BELOW_100})"
_SCALE = rf"(?:{'|'.join(_SCALES)})\b"
_SCALED = rf"(?:an?\b|{_BELOW_1000}){_GAP}{_SCALE}"
_CARDINAL = rf"(?:{_SCALED}(?:,?{_GAP}(?:and )?{_SCALED})*(?:,?{_GAP}(?:and )?{_BELOW_1000})?|{_BELOW_1000}|zero\b)"
_DIGIT_WORD = rf"(?:zero|{'|'.join(_ONES)})\b"
_WORDS = rf"\b{_CARDINAL}(?: point(?: {_DIGIT_WORD})+)?(?!-(?:first|second|third|[a-z]+th)\b)"
_RUN = r"(?:\d+(?:[.,]\d+)*|(?<![.\w])\.\d+)"
_NUMERAL = rf"(?:{_RUN}(?:e[+-]?\d{{1,4}}(?!\w))?|{_WORDS})"
_POWER = r"(?:[ ]?(?:\^|\*\*)[ ]?[-+]?\d+)"
# Letters of scripts without blanks between words: one before a digit is not a part of the same word.
SPACELESS = r"\u0e00-\u0eff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
_TOKEN = re.compile(
    rf"(?P<clock>\d+(?::\d+)+(?:[.,]\d+(?![\d:]))?)"
    rf"|(?P<mixed>\d+[ ]\d+[ ]?/[ ]?\d+(?![\d/]))"
    rf"|(?P<fraction>{_NUMERAL}(?:[ ]?/[ ]?{_NUMERAL})+{_POWER}*)"
    rf"|(?P<scientific>{_NUMERAL}[ ]?[x×*·⋅∙•][ ]?10{_POWER}+)"
    rf"|(?P<power>{_NUMERAL}{_POWER}+)"
    rf"|(?P<scaled>{_RUN}[ -]?(?:hundred\b|{_SCALE}){_POWER}*)"
    rf"|(?P<words>{_WORDS})"
    rf"|(?P<numeral>{_RUN}(?:e[+-]?\d{{1,4}}(?!\w))?)"
    rf"|(?P<other_word>[^\W\d_{SPACELESS}][^\W{SPACELESS}]*(?:(?<=\d)[.,:'_]\d+)*)"
)
_SIGN = re.compile(r"(?:(?<![\w.)\]}%])(?P<dash>-)(?P<gap>[ ]*)|\b(?:minus|negative) +)[$€£¥({\[]*\Z")
_CONTEXT = 40  # characters around a number that decide what it is
# Letters and more digits, as in 1h30, make a compound; m2 is a unit.
_CONTINUATION = re.compile(
    r"/(?=\w)|_\d|\s?\^|\*\*(?=[a-z(])|:\d|\s?[ap]\.?m\b|\s?o'?\s?clock\b|h\d|[a-z]{1,8}(?![23](?!\d))\d|'\s?\d"
)
_RATE = re.compile(r"/(?:s|secs?|seconds?|min|minutes?|h|hr|hours?|days?|years?|c?m|km|kg|persons?|frames?)\b")
_EUROPEAN = r"\d{1,3}(?:\.\d{3})+,\d+"  # 1.234,5
_THOUSANDS = r"[1-9]\d{0,2}(?:,\d{3})+(?:\.\d+)?"
_CLOCK = re.compile(r"(?:(\d{1,3}):)?(\d{1,4}):(\d\d)(?:[.,](\d+))?")

_VULGAR_FRACTIONS = {
    chr(code): f" {unicodedata.normalize('NFKC', chr(code)).replace(chr(0x2044), '/')}"
    for code in (*range(0xBC, 0xBF), *range(0x2150, 0x215F), 0x2189)
}
_SPECIAL = re.compile(
    f"(?P<fraction>[{''.join(_VULGAR_FRACTIONS)}])|(?P<power>[⁺⁻]?[⁰¹²³⁴-⁹]+)|(?P<index>[₀-₉]+)"
    r"|(?P<group>(?<=\d)[\u00a0\u2009\u202f'’_\u066c](?=\d{3}(?!\d)))|(?P<point>(?<=\d)\u066b(?=\d))"
)
_FUNCTIONS = "(?:arc)?(?:sin|cos|tan|cot|sec|csc)h?|log|ln|lg|exp|max|min|gcd|lcm"
_SLASHES = str.maketrans("\u2044\u2215", "//")
_LATEX = [
    (re.compile(r"\{,\}|(?<=\d)\\[,!;: ](?=\d{3}(?!\d))"), ","),
    (re.compile(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}"), r" \1/\2 "),
    (re.compile(r"\\[dt]?frac\s*(\d)\s*(\d)"), r" \1/\2 "),
    (re.compile(r"\\(?:times|cdot|ast)(?![a-zA-Z])"), "×"),
    (re.compile(r"\\(?:pm|mp)(?![a-zA-Z])"), "±"),
    (re.compile(r"\\(?:leq?|lt|geq?|gt|neq?|not|nleq|ngeq|ll|gg)(?![a-zA-Z])"), "≠"),  # a bound is no value
    (re.compile(r"\\(?:sqrt|i{0,3}int|sum|prod|lim)(?![a-zA-Z])"), "√"),  # another value than the number after it
    (re.compile(r"</?(?:b|strong|i|em|u|span|p)\s?>", re.IGNORECASE), " "),
    (re.compile(r"\\pi(?![a-zA-Z])"), "π"),
    (re.compile(r"\\infty(?![a-zA-Z])"), "∞"),
    (re.compile(r"\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![a-zA-Z]))"), "°"),
    (re.compile(rf"\\({_FUNCTIONS})(?![a-zA-Z])"), r" \1 "),
    (re.compile(r"\\(?:text(?:bf|it|rm|sf|superscript)?|math(?:bf|it|rm|sf)|mbox|underline)\s*\{([^{}]*)\}"), r" \1 "),
    (re.compile(r"\^\s*(?:\{\s*)?(st|nd|rd|th)\b(?:\s*\})?"), r"\1"),  # an ordinal
    (re.compile(r"_\s*\{\s*(\w+)\s*\}"), r"_\1"),  # an index is a part of the name
    (re.compile(r"(?<=[a-zA-Z])\s+(?=\^)"), ""),  # the power of a unit
    (re.compile(r"(?<=\d)\s?M(?![\w/'])"), " mn"),  # million, unlike m
    (re.compile(r"(?<=\d)B(?![\w/'])"), " bn"),
    (re.compile(r"\\([%$#&_])"), r"\1"),
    (re.compile(r"\\[a-zA-Z]+|\\[,;:! ()\[\]]|<<|>>"), " "),
    (re.compile(r"\^\s*\{\s*([-+]?\d+)\s*\}"), r"^\1"),
]


@dataclass(frozen=True, slots=True)
class Number:
    """A number of a plain text."""

    value: float | None  # seconds for a clock time; None if it has no single value, such as 1.2.3 or 1/2/3
    start: int  # its first character, the sign included
    end: int  # the character after its last one
    is_clock: bool = False  # written as mm:ss or hh:mm:ss


def normalize_answer(text: str) -> str:
    r"""Return a text as `scan_numbers` reads it: case and width folded, LaTeX and special digits as plain characters.

    >>> normalize_answer(r"x \approx 2\frac{1}{2}"), normalize_answer("4½ · 10³")
    ('x 2 1/2', '4 1/2 · 10^3')
    """
    text = _SPECIAL.sub(_write_special, text).translate(_SLASHES)
    for pattern, replacement in _LATEX:
        text = pattern.sub(replacement, text)
    return "\n".join(" ".join(line.split()) for line in normalize_and_casefold(text).splitlines()).strip()


def scan_numbers(plain: str) -> tuple[Number, ...]:
    """Return the numbers of a plain text (`normalize_answer`), in order; they don't overlap.

    `2,500` is 2500, `2,5` is 2.5, `1.234,5` is 1234.5; `[2,5]` and `(2,5)` are two numbers. `3/4` is 0.75, `10^3` is
    1000, `seventy-two` is 72, `01:30` is 90 seconds.

    >>> [number.value for number in scan_numbers("2,500 or 2,5 or 3/4 of three hundred and five")]
    [2500.0, 2.5, 0.75, 305.0]
    """
    return tuple(number for match in _TOKEN.finditer(plain) for number in _read_token(match, plain))


def mask_numbers(plain: str, numbers: Sequence[Number]) -> str:
    """Return a plain text with "#" in place of each number.

    >>> mask_numbers("from 1,200 to 1,300", scan_numbers("from 1,200 to 1,300"))
    'from # to #'
    """
    ends = [0, *(number.end for number in numbers)]
    starts = [*(number.start for number in numbers), len(plain)]
    return "#".join(plain[end:start] for end, start in zip(ends, starts, strict=True))


def _write_special(match: re.Match[str]) -> str:
    if match["fraction"]:
        return _VULGAR_FRACTIONS[match[0]]
    if match["power"] or match["index"]:
        return ("^" if match["power"] else "_") + unicodedata.normalize("NFKC", match[0]).replace("\u2212", "-")
    return "," if match["group"] else "."


def _read_token(match: re.Match[str], plain: str) -> Iterator[Number]:
    """Yield the numbers of a token: none for a word, several for a list without blanks."""
    kind, text = match.lastgroup or "", match[0]
    offset = max(0, match.start() - _CONTEXT)
    before, after = plain[offset : match.start()], plain[match.end() : match.end() + _CONTEXT]
    is_exponent = re.search(r"[^\W\d_]\^[-+]?\Z", before)
    if kind == "other_word" or (kind == "numeral" and is_exponent):  # of a unit: m^2
        return
    if kind == "numeral" and (parts := _split_list(text, before)):
        start = match.start()
        for part in parts:
            yield Number(_read_run(part), start, start + len(part))
            start += len(part) + 1
        return
    sign = _find_sign(before)
    number = Number(
        _read_value(kind, text), match.start() if sign is None else offset + sign, match.end(), kind == "clock"
    )
    # A part of something longer that is no number: x/4, 4/x, 4_2, 3 pm, sqrt(9) and the power of a variable.
    is_inner = re.search(r"/\Z|[^\W_]_\Z|\^[-+]?\Z|[^\W_]\(\Z", before)
    if is_inner or (_CONTINUATION.match(after) and not _RATE.match(after)):
        number = replace(number, value=None)
    if sign is not None and number.value is not None:
        number = replace(number, value=-number.value)
    yield number


def _find_sign(before: str) -> int | None:
    """Return where the sign before a number begins; None without one. A dash after a number or a word is none."""
    sign = _SIGN.search(before)
    if sign is None or sign["dash"] is None:
        return sign.start() if sign else None
    previous = before[: sign.start()].rstrip(" ")
    if re.search(r"[\d)\]}%]$", previous) and sign.start():  # `20 -24` is a span
        return None
    # With a blank after it a dash is a sign at the start of a line, in a bracket or after a colon.
    return sign.start() if not sign["gap"] or not previous or previous[-1] in "\n:=([{$" else None


def _split_list(run: str, before: str) -> list[str]:
    """Return the numbers that commas without blanks separate: in brackets, or if the run is no number otherwise."""
    parts = run.split(",")
    if len(parts) < 2 or not all(re.fullmatch(r"\d+(?:\.\d+)?|\.\d+", part) for part in parts):
        return []
    is_thousands = re.fullmatch(_THOUSANDS, run)
    if re.search(r"\[\s*$", before) or (re.search(r"\[\s*['\"]$|\($", before) and not is_thousands):
        return parts
    is_decimal = re.fullmatch(rf"{_EUROPEAN}|\d+,\d+", run)
    is_misgrouped = any(len(part) == 3 for part in parts[1:])  # 12,34,567
    return [] if is_thousands or is_decimal or is_misgrouped else parts


def _read_value(kind: str, text: str) -> float | None:
    try:
        value = _READERS[kind](text)
    except (ArithmeticError, ValueError):  # Python refuses integers of more than 4,300 digits
        return None
    return value if value is not None and math.isfinite(value) else None


def _read_clock(text: str) -> float | None:
    match = _CLOCK.fullmatch(text)
    if match is None or int(match[3]) > 59 or (match[1] and int(match[2]) > 59):
        return None
    return 3600.0 * int(match[1] or 0) + 60 * int(match[2]) + float(f"{match[3]}.{match[4] or 0}")


def _read_run(run: str) -> float | None:
    """Return the value of digits with separators; None if they don't form one number."""
    digits, _, exponent = run.partition("e")
    if len(digits) > 400:
        return None
    if re.fullmatch(_THOUSANDS, digits):
        digits = digits.replace(",", "")
    elif re.fullmatch(rf"{_EUROPEAN}|\d+,\d+", digits):
        digits = digits.replace(".", "").replace(",", ".")
    elif not re.fullmatch(r"\d*(?:\.\d+)?", digits):
        return None
    return float(f"{digits}e{exponent or 0}")


def _read_numeral(text: str) -> float | None:
    return _read_run(text) if text[0].isdigit() or text[0] == "." else _read_words(text)


def _read_words(text: str) -> float:
    whole, _, decimals = text.partition(" point ")
    total = hundreds = 0
    for word in re.findall(r"[a-z]+", whole):
        if word == "hundred":
            hundreds *= 100
        elif word in _SCALES:
            total, hundreds = total + hundreds * _SCALES[word], 0
        elif word != "and":
            hundreds += _WORD_VALUES[word]
    return float(f"{total + hundreds}.{''.join(str(_WORD_VALUES[word]) for word in decimals.split()) or 0}")


def _read_fraction(text: str) -> float | None:
    values = [_read_numeral(part.strip()) for part in text.split("/")]
    if len(values) != 2 or None in values or re.search(r"\^|\*\*", text):  # 12/3/2020 is a date
        return None
    numerator, denominator = values
    return numerator / denominator if numerator is not None and denominator is not None else None


def _read_mixed(text: str) -> float | None:
    whole, _, rest = text.partition(" ")
    fraction = _read_fraction(rest)
    return None if fraction is None or fraction >= 1 else int(whole) + fraction


def _read_power(text: str) -> float | None:
    base, *exponents = re.split(r"\s?(?:\^|\*\*)\s?", text)
    value = _read_numeral(base.strip())
    if value is None or len(exponents) != 1 or len(exponents[0]) > 4:
        return None
    return float(value ** int(exponents[0]))


def _read_scientific(text: str) -> float | None:
    factor, power = re.split(r"\s?[x×*·⋅∙•]\s?(?=10\s?(?:\^|\*\*))", text, maxsplit=1)
    values = _read_numeral(factor.strip()), _read_power(power)
    return None if values[0] is None or values[1] is None else values[0] * values[1]


def _read_scaled(text: str) -> float | None:
    match = re.fullmatch(rf"({_RUN})[ -]?(\w+)", text)
    value = _read_run(match[1]) if match else None
    return None if value is None or match is None else value * _SCALES.get(match[2], 100)


_READERS = {
    "clock": _read_clock,
    "mixed": _read_mixed,
    "fraction": _read_fraction,
    "scientific": _read_scientific,
    "power": _read_power,
    "scaled": _read_scaled,
    "words": _read_words,
    "numeral": _read_run,
}
