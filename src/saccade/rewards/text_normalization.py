"""Answers as people read them: characters that look alike are one character."""

import re
import unicodedata
from collections.abc import Sequence

_DASHES = re.compile("[\u2010-\u2015\u2212\u2e3a\u2e3b]")
# Drawn as nothing, though their category says letter, mark or symbol.
_EMPTY = re.compile("[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]")
_QUOTES = str.maketrans("‘’‛“”‟", "'''\"\"\"")
_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?=\{)")
# For `folded` text. The repeat is bounded and its spaces are read in one way only, so that no answer makes it slow.
_WORD = "(?:answer|option|choice)"
_CHINESE = "(?:答案|选项|选)(?:是|为)? ?:? ?"
LEAD = rf"(?:(?:the )?(?:(?:final|correct|best|right) )*{_WORD}(?: is)?(?: ?: ?| )|{_CHINESE}){{0,3}}"


def tidy(text: str) -> str:
    """Compatible characters (full width, ligatures) and the digits of all scripts folded, every dash a hyphen, quotes
    straight, nothing that can't be seen.

    >>> tidy("Ｂ \u2212 ٥\u200b")
    'B - 5'
    """
    plain = _DASHES.sub("-", unicodedata.normalize("NFKC", text)).translate(_QUOTES)
    return "".join(str(unicodedata.decimal(character, character)) for character in _shown(plain))


def visible(text: str) -> str:
    """What people see of a text, without the blanks around it: nothing of zero-width and control characters.

    >>> visible("\u200b red \u2060"), visible("\u3164" * 10)
    ('red', '')
    """
    return _shown(text).strip()


def _shown(text: str) -> str:
    drawn = _EMPTY.sub("", text)
    return "".join(each for each in drawn if each.isspace() or unicodedata.category(each) not in ("Cf", "Cc"))


def folded(text: str) -> str:
    """`tidy`, in one case."""
    return tidy(text).casefold()


def boxes(text: str) -> list[str] | None:
    r"""What stands inside each `\boxed{...}`, outermost first; None where a box is not closed.

    >>> boxes(r"it is \boxed{\frac{1}{2}}"), boxes(r"\boxed{1")
    (['\\frac{1}{2}'], None)
    """
    found, at = [], 0
    while (box := _BOX.search(text, at)) is not None:
        end = _closing(text, box.end())
        if end is None:
            return None
        found.append(text[box.end() + 1 : end])
        at = end + 1
    return found


def _closing(text: str, opening: int) -> int | None:
    """The index of the brace that closes the one at `opening`."""
    depth = 0
    for at in range(opening, len(text)):
        # `\{` is a character, not a brace that groups
        if text[at] in "{}" and (at == 0 or text[at - 1] != "\\"):
            depth += 1 if text[at] == "{" else -1
            if depth == 0:
                return at
    return None


def asked(question: str, choices: Sequence[str]) -> str:
    r"""A question with its options, a line each.

    >>> asked("Which?", ("red", "blue"))
    'Which?\nA. red\nB. blue'
    """
    return "\n".join((question, *(f"{chr(65 + place)}. {choice}" for place, choice in enumerate(choices))))
