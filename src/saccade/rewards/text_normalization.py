"""Normalize answers: characters that look alike become the same character."""

import re
import unicodedata
from collections.abc import Callable, Sequence
from typing import NamedTuple

# Characters that render as nothing although their category is letter, mark or symbol.
_INVISIBLE = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)
_QUOTES = dict(zip("‘’‛“”‟", "'''\"\"\"", strict=True))
_DASHES = dict.fromkeys(map(chr, (*range(0x2010, 0x2016), 0x2212, 0x2E3A, 0x2E3B)), "-")


class _CharacterTable(dict[int, str | None]):
    """A table for `str.translate` whose entries are computed when a character first occurs."""

    def __init__(self, fold: Callable[[str], str | None]) -> None:
        super().__init__()
        self._fold = fold

    def __missing__(self, code: int) -> str | None:
        self[code] = self._fold(chr(code))
        return self[code]


def _drop_invisible(character: str) -> str | None:
    is_control = unicodedata.category(character) in ("Cf", "Cc") and not character.isspace()
    return None if is_control or _INVISIBLE.match(character) else character


def _fold_character(character: str) -> str | None:
    if character in _QUOTES or character in _DASHES:
        return _QUOTES.get(character) or _DASHES[character]
    return _drop_invisible(str(unicodedata.decimal(character, character)))


_VISIBLE, _FOLDED = _CharacterTable(_drop_invisible), _CharacterTable(_fold_character)
_ASCII_CONTROL = re.compile("[\\x00-\\x08\\x0e-\\x1b\\x7f]")  # without those that are blanks
_BOXED = re.compile(r"\\(?:boxed|fbox)\s*(?=\{)")
_BRACE = re.compile(r"(?<!\\)[{}]")  # `\{` is a literal character, not a grouping brace
# Matches casefolded text. The bounded repeat and unambiguous spaces keep every match linear in the answer's length.
_ANSWER_WORDS = "(?:answer|option|choice)"
_CHINESE_LEAD_IN = "(?:答案?|选项|选择?)(?:应该?|应当)?(?:是|为)? ?:? ?"
ANSWER_LEAD_IN = (
    rf"(?:(?:the )?(?:(?:final|correct|best|right) )*{_ANSWER_WORDS}(?: is)?(?: ?: ?| )|{_CHINESE_LEAD_IN}){{0,3}}"
)


def normalize_text(text: str) -> str:
    r"""Fold compatible characters (full width, ligatures) and the digits of all scripts, make every dash a hyphen,
    straighten quotes, and remove invisible characters.

    >>> normalize_text("Ｂ \u2212 ٥\u200b")
    'B - 5'
    """
    if text.isascii():  # most answers, ten times faster
        return _remove_invisible(text)
    return unicodedata.normalize("NFKC", text).translate(_FOLDED)


def strip_invisible(text: str) -> str:
    r"""Return the visible part of a text, without zero-width and control characters and without surrounding blanks.

    >>> strip_invisible("\u200b red \u2060"), strip_invisible("\u3164" * 10)
    ('red', '')
    """
    return _remove_invisible(text).strip()


def _remove_invisible(text: str) -> str:
    if text.isascii():
        return _ASCII_CONTROL.sub("", text)
    return text.translate(_VISIBLE)


def normalize_and_casefold(text: str) -> str:
    """Apply `normalize_text` and fold case."""
    return normalize_text(text).casefold()


class Box(NamedTuple):
    """A box of a text."""

    content: str
    start: int  # of its command
    end: int  # after its closing brace


def find_boxed(text: str) -> list[Box]:
    r"""Return each `\boxed{...}` outside of other boxes, in order; a box that isn't closed ends with its line."""
    boxes: list[Box] = []
    position = 0
    while (command := _BOXED.search(text, position)) is not None:
        end = _find_closing_brace(text, command.end())
        if end is None:
            content = text[command.end() + 1 :].lstrip().partition("\n")[0].rstrip(" $.")
            start = text.index(content, command.end() + 1)
            return [*boxes, Box(content, command.start(), start + len(content))]
        boxes.append(Box(text[command.end() + 1 : end], command.start(), end + 1))
        position = end + 1
    return boxes


def extract_boxed(text: str) -> list[str]:
    r"""Return the content of each box (`find_boxed`).

    >>> extract_boxed(r"it is \boxed{\frac{1}{2}}"), extract_boxed("$\\boxed{1$.\nSo it is.")
    (['\\frac{1}{2}'], ['1'])
    """
    return [box.content for box in find_boxed(text)]


def _find_closing_brace(text: str, opening: int) -> int | None:
    """Return the index of the brace that closes the one at `opening`, or None."""
    depth = 0
    for brace in _BRACE.finditer(text, opening):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return brace.start()
    return None


def format_question(question: str, options: Sequence[str]) -> str:
    r"""Return a question followed by its options, one per line.

    >>> format_question("Which?", ("red", "blue"))
    'Which?\nA. red\nB. blue'
    """
    return "\n".join((question, *(f"{chr(65 + i)}. {option}" for i, option in enumerate(options))))
