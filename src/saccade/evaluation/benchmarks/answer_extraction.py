"""Extract final answers from responses, and letters and numbers from answers, leniently."""

import re
from collections.abc import Sequence

from saccade.data.source_row import OPTION_LETTERS
from saccade.rewards.text_normalization import extract_boxed, normalize_text

_REASONING = re.compile(r"<(think|tool_call|tool_response|code|interpreter)>.*?(?:</\1>|\Z)", re.DOTALL)
_FORMATTING = re.compile(r"\\(?:text(?:bf|it|rm)?|math(?:bf|it|rm)|underline)\s*\{([^{}]*)\}|\*+|\$+|`+|_{2,}|[\"“”]")
_NOT_NEGATED = r"(?<!\bnot )(?<!n't )(?<!except )(?<!neither )(?<!nor )"
_ANSWER_LEAD = r"(?:answer|option|choice|答案|选项?)(?:\s+is|\s*是|\s*为)?\s*[:：]?\s*(?:option\s*)?"
_NUMBER_NAMES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty"
)
_NUMBER_WORDS = {name: str(value) for value, name in enumerate(_NUMBER_NAMES.split())}
_OPTION = re.compile(r"^[ \t]*\(([A-J])\)[ \t]*(.*?)[ \t]*$", re.MULTILINE)
_LABEL = re.compile(r"\s*[(\[]?([A-J])[)\].:]+\s*")
_NUMBER_WORD = re.compile(rf"\b(?:{'|'.join(_NUMBER_WORDS)})\b")
_NUMBER = re.compile(r"(?<![\w.])-?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:e[+-]?\d+)?")


def extract_final_answer(text: str) -> str:
    """Return the last closed answer tag's body, else the text after the last open one, else the text but its reasoning.

    >>> extract_final_answer("A man... <answer>B"), extract_final_answer("<think>A or B?</think> C")
    ('B', 'C')
    """
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, end) if end >= 0 else text.rfind("<answer>")
    if start < 0 <= end:
        start = text.rfind("<answer>", end)  # ignore a closing tag without an opening one
    if start >= 0:
        return text[start + len("<answer>") :].split("</answer>")[0].strip()
    # If the opening think tag was prefilled, the text has only the closing one.
    return _REASONING.sub("", text).rpartition("</think>")[2].replace("</answer>", "").strip()


def find_first_letter(text: str, phrases: Sequence[str], letters: str) -> str | None:
    """Return the first of these capital letters anywhere, even inside a word, after deleting the phrases in order."""
    text = text.strip()
    for phrase in phrases:
        text = text.replace(phrase, "")
    match = re.search(f"[{letters}]", text)
    return match[0] if match else None


def extract_letter(text: str, letters: str, options: Sequence[str] = ()) -> str | None:
    r"""Return the one letter that an answer names, or None if it names none or several.

    Checked in order, inside the last `\boxed{}` if there is one: a letter alone in any case and markup; the exact text
    of one option; a letter at the start with a bracket, period or colon; the last letter after `answer`, `option` or
    `choice`; the only capital letter that is a word (`A` before a word is an article, `I` a pronoun); the only option
    whose text occurs.

    >>> [extract_letter(text, "ABCD") for text in ("**(b)**", "A man walks in, so B", "A or B")]
    ['B', 'B', None]
    """
    plain = " ".join(extract_plain_answer(text).split())
    any_case = f"[{letters}{letters.lower()}]"
    letter_only = re.fullmatch(rf"(?:{_ANSWER_LEAD})?[(\[{{]?({any_case})[)\]}}]?[.,:;!)]*", plain, re.IGNORECASE)
    if letter_only:
        return letter_only[1].upper()
    option_texts, normalized = [_normalize_option(option) for option in options], _normalize_option(plain)
    matching = [
        letter for letter, option in zip(letters, option_texts, strict=False) if option and option == normalized
    ]
    if matching:
        return matching[0] if len(matching) == 1 else None
    return (
        _find_leading_letter(plain, letters)
        or _find_announced_letter(plain, letters)
        or _find_lone_letter(plain, letters)
        or _find_quoted_option(normalized, letters, option_texts)
    )


def _find_leading_letter(text: str, letters: str) -> str | None:
    """Return a letter at the very start that is followed by a bracket, a period or a colon."""
    match = re.match(rf"[(\[]([{letters}{letters.lower()}])[)\]]|([{letters}])[).:,](?=\s|$)", text)
    rest = text[match.end() :] if match else ""
    # "(A) or (B)" names several.
    return (match[1] or match[2]).upper() if match and not re.match(r"\s*(?:or|and|/)\b", rest) else None


def _find_announced_letter(text: str, letters: str) -> str | None:
    """Return the letter after the last `answer is`, `option` and the like, unless it is negated or one of several."""
    not_a_list = r"(?![A-Za-z0-9])(?!\s*(?:or|and|/)\s*[(\[]?[A-Z](?![A-Za-z]))"
    lowercase = letters.lower()
    letter_pattern = rf"[(\[]([{letters}{lowercase}])[)\]]|([{letters}]){not_a_list}(?! [a-z])|([{lowercase}])[.!]?$"
    pattern = rf"{_NOT_NEGATED}(?i:{_ANSWER_LEAD})(?:{letter_pattern})"
    matches = list(re.finditer(pattern, text))
    return next(group for group in matches[-1].groups() if group).upper() if matches else None


def _find_lone_letter(text: str, letters: str) -> str | None:
    """Return the only letter that is a word."""
    matches = re.findall(rf"{_NOT_NEGATED}(?<![A-Za-z0-9])([{letters}])(?!['’]?[A-Za-z0-9])(?=( [a-z]+)?)", text)
    candidates = {letter for letter, word in matches if letter not in "AI" or word in ("", " or", " and", " is")}
    return candidates.pop() if len(candidates) == 1 else None


def _find_quoted_option(text: str, letters: str, options: Sequence[str]) -> str | None:
    """Return the letter of the only option whose text occurs as whole words; all texts are normalized."""
    padded = f" {text} "
    matching = [letter for letter, option in zip(letters, options, strict=False) if option and f" {option} " in padded]
    is_negated = re.search(r"\b(?:not|neither|nor|except)\b|n't\b", padded)
    return matching[0] if len(matching) == 1 and not is_negated else None


def _normalize_option(text: str) -> str:
    """Return words and numbers in one case with single spaces, without the label that some options have."""
    plain = re.sub(r"^\s*[(\[]?[A-Ja-j][)\].:]+\s+", "", normalize_text(text)).casefold()
    return " ".join(re.sub(r"[^\w.%+-]+|[.](?!\d)", " ", plain).split())


def extract_plain_answer(text: str) -> str:
    r"""Return the content of the last `\boxed{}`, else the whole text, normalized and without formatting."""
    boxes = extract_boxed(text)
    return strip_formatting(normalize_text(boxes[-1] if boxes else text))


def strip_formatting(text: str) -> str:
    r"""Remove marks of bold, math and quotes: `**B**`, `$B$` and `\\textbf{B}` become B."""
    for _ in range(3):  # markup nests: \textbf{\text{B}}
        text = _FORMATTING.sub(lambda match: match[1] or "", text)
    return text


def extract_number(text: str) -> float | None:
    r"""Return the last number of an answer, or None; words up to twenty count as numbers.

    Thousands commas, any dash as a minus sign, percent signs and units are handled; the last `\boxed{}` comes first.

    >>> extract_number("about 1,200 cm"), extract_number("four"), extract_number("\u2212 2.5 m"), extract_number("none")
    (1200.0, 4.0, -2.5, None)
    """
    plain = re.sub(r"^\s*-\s+", "-", extract_plain_answer(text).casefold())
    digits = _NUMBER_WORD.sub(lambda match: _NUMBER_WORDS[match[0]], plain)
    numbers = _NUMBER.findall(digits)
    return float(numbers[-1].replace(",", "")) if numbers else None


def parse_float(text: str) -> float | None:
    """Return the number that a whole text is, or None."""
    try:
        return float(text)
    except ValueError:
        return None


def strip_option_labels(options: Sequence[str]) -> tuple[str, ...]:
    """Return options without the letters that a dataset wrote into them.

    >>> strip_option_labels(["A. Apples.", "(B) Candles."]), strip_option_labels(["A", "B"])
    (('Apples.', 'Candles.'), ('A', 'B'))
    """
    texts = []
    for letter, option in zip(OPTION_LETTERS, options, strict=False):
        label = _LABEL.match(option)
        # An option that is only a letter, or starts with another option's letter, is content and stays.
        is_label = label and label[1] == letter and label.end() < len(option)
        texts.append(option[label.end() :] if label and is_label else option)
    return tuple(texts)


def split_inline_options(text: str) -> tuple[str, tuple[str, ...]]:
    r"""Split a question from the options in its lines; text after the options is dropped.

    >>> split_inline_options("Which?\n(A) red\n(B) blue\nAnswer with the letter.")
    ('Which?', ('red', 'blue'))
    """
    lines = list(_OPTION.finditer(text))
    # Only consecutive letters from A: a line of the question itself may begin with "(B)".
    listed = [line for i, line in enumerate(lines) if i < len(OPTION_LETTERS) and line[1] == OPTION_LETTERS[i]]
    if len(listed) < 2:
        return text.strip(), ()
    return text[: listed[0].start()].strip(), tuple(line[2] for line in listed)
