r"""Final answers, and the tolerant readers of letters and numbers.

final_answer("<think>A man ...</think><answer>B</answer>")   "B": what every rule is given
letter_of(r"so it is \boxed{b}.", "ABCD", options)           "B": what a person would read
"""

import re
from collections.abc import Sequence

from saccade.rewards._text import boxes, tidy

_THOUGHT = re.compile(r"<(think|tool_call|tool_response|code|interpreter)>.*?(?:</\1>|\Z)", re.DOTALL)
_DRESS = re.compile(r"\\(?:text(?:bf|it|rm)?|math(?:bf|it|rm)|underline)\s*\{([^{}]*)\}|\*+|\$+|`+|_{2,}|[\"“”]")
_NOT = r"(?<!\bnot )(?<!n't )(?<!except )(?<!neither )(?<!nor )"
_LEAD = r"(?:answer|option|choice|答案|选项?)(?:\s+is|\s*是|\s*为)?\s*[:：]?\s*(?:option\s*)?"
_NAMES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty"
)
_WORDS = {name: str(value) for value, name in enumerate(_NAMES.split())}
_WORD = re.compile(rf"\b(?:{'|'.join(_WORDS)})\b")
_NUMBER = re.compile(r"(?<![\w.])-?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:e[+-]?\d+)?")


def final_answer(text: str) -> str:
    """The body of the last closed answer tag, else what follows the last open one, else the text without reasoning.

    >>> final_answer("A man... <answer>B"), final_answer("<think>A or B?</think> C")
    ('B', 'C')
    """
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, end) if end >= 0 else text.rfind("<answer>")
    if start < 0 <= end:
        start = text.rfind("<answer>", end)  # a closing tag without an opening one says nothing
    if start >= 0:
        return text[start + len("<answer>") :].split("</answer>")[0].strip()
    # where the opening tag was forced, only the closing one is in the text
    return _THOUGHT.sub("", text).rpartition("</think>")[2].replace("</answer>", "").strip()


def first_letter(text: str, phrases: Sequence[str], letters: str) -> str | None:
    """The first of these capital letters anywhere, even inside a word, once the phrases are deleted in order."""
    text = text.strip()
    for phrase in phrases:
        text = text.replace(phrase, "")
    found = re.search(f"[{letters}]", text)
    return found[0] if found else None


def letter_of(text: str, letters: str, options: Sequence[str] = ()) -> str | None:
    r"""The one letter that an answer names, or None where it names none or several.

    Read are, first of all what is in the last `\boxed{}`: a letter alone in any case and dress; one at the start with a
    bracket, full stop or colon; the last one after `answer`, `option` or `choice`; the text of one option; and the only
    capital letter that stands by itself (`A` before a word is an article, `I` a pronoun).

    >>> letter_of("**(b)**", "ABCD"), letter_of("A man walks in, so B", "ABCD"), letter_of("A or B", "ABCD")
    ('B', 'B', None)
    """
    inside = boxes(text)
    plain = " ".join(undressed(tidy(inside[-1] if inside else text)).split())
    lettered = f"[{letters}{letters.lower()}]"
    alone = re.fullmatch(rf"(?:{_LEAD})?[(\[{{]?({lettered})[)\]}}]?[.,:;!)]*", plain, re.IGNORECASE)
    if alone:
        return alone[1].upper()
    bare = [_bare(option) for option in options]
    same = [letters[at] for at, option in enumerate(bare[: len(letters)]) if option and option == _bare(plain)]
    if same:
        return same[0] if len(same) == 1 else None
    found = _labelled(plain, letters) or _led(plain, letters)
    if found:
        return found
    return _told(plain, letters) or _quoted(plain, letters, bare)


def _labelled(plain: str, letters: str) -> str | None:
    """A letter at the very start that is set off by a bracket, a full stop or a colon."""
    found = re.match(rf"[(\[]([{letters}{letters.lower()}])[)\]]|([{letters}])[).:,](?=\s|$)", plain)
    rest = plain[found.end() :] if found else ""
    # "(A) or (B)" is a guess
    return (found[1] or found[2]).upper() if found and not re.match(r"\s*(?:or|and|/)\b", rest) else None


def _led(plain: str, letters: str) -> str | None:
    """The letter after the last `answer is`, `option` and the like, unless that is denied or one of several."""
    stop = r"(?![A-Za-z0-9])(?!\s*(?:or|and|/)\s*[(\[]?[A-Z](?![A-Za-z]))"
    low = letters.lower()
    named = rf"[(\[]([{letters}{low}])[)\]]|([{letters}]){stop}(?! [a-z])|([{low}])[.!]?$"
    form = rf"{_NOT}(?i:{_LEAD})(?:{named})"
    found = list(re.finditer(form, plain))
    return next(group for group in found[-1].groups() if group).upper() if found else None


def _told(plain: str, letters: str) -> str | None:
    """The only letter that stands by itself."""
    found = re.findall(rf"{_NOT}(?<![A-Za-z0-9])([{letters}])(?!['’]?[A-Za-z0-9])(?=( [a-z]+)?)", plain)
    named = {letter for letter, word in found if letter not in "AI" or word in ("", " or", " and", " is")}
    return named.pop() if len(named) == 1 else None


def _quoted(plain: str, letters: str, options: Sequence[str]) -> str | None:
    """The only option whose text occurs as whole words."""
    said = f" {_bare(plain)} "
    named = [letter for letter, option in zip(letters, options, strict=False) if option and f" {option} " in said]
    return named[0] if len(named) == 1 and not re.search(r"\b(?:not|neither|nor|except)\b|n't\b", said) else None


def _bare(text: str) -> str:
    """Words and numbers in one case, single spaces, without the label that some options bear."""
    plain = re.sub(r"^\s*[(\[]?[A-Ja-j][)\].:]+\s+", "", tidy(text)).casefold()
    return " ".join(re.sub(r"[^\w.%+-]+|[.](?!\d)", " ", plain).split())


def undressed(text: str) -> str:
    r"""Text without marks of bold print, mathematics and quotation: `**B**`, `$B$` and `\\textbf{B}` are B."""
    for _ in range(3):  # \textbf{\text{B}} wears more than one
        text = _DRESS.sub(lambda match: match[1] or "", text)
    return text


def number_of(text: str) -> float | None:
    r"""The last number of an answer, which may be a word up to twenty, or None where there is none.

    Thousands commas, every dash that is a minus, percent signs and units are read over; `\boxed{}` goes first.

    >>> number_of("about 1,200 cm"), number_of("four"), number_of("\u2212 2.5 m"), number_of("none")
    (1200.0, 4.0, -2.5, None)
    """
    inside = boxes(text)
    plain = undressed(tidy(inside[-1] if inside else text)).casefold()
    digits = _WORD.sub(lambda match: _WORDS[match[0]], re.sub(r"^\s*-\s+", "-", plain))
    found = _NUMBER.findall(digits)
    return float(found[-1].replace(",", "")) if found else None
