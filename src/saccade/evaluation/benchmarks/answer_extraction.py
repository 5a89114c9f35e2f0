"""Extract final answers from responses, and options from questions."""

import re
from collections.abc import Sequence

from saccade.data.source_row import OPTION_LETTERS

_REASONING = re.compile(r"<(think|tool_call|tool_response|code|interpreter)>.*?(?:</\1>|\Z)", re.DOTALL)
_FORMATTING = re.compile(r"\\(?:text(?:bf|it|rm)?|math(?:bf|it|rm)|underline)\s*\{([^{}]*)\}|\*+|\$+|`+|_{2,}|[\"“”]")
_OPTION = re.compile(r"^[ \t]*\(([A-J])\)[ \t]*(.*)$", re.MULTILINE)
_LABEL = re.compile(r"\s*[(\[]?([A-J])[)\].:]+\s*")


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


def strip_formatting(text: str) -> str:
    r"""Remove marks of bold, math and quotes: `**B**`, `$B$` and `\\textbf{B}` become B."""
    for _ in range(3):  # markup nests: \textbf{\text{B}}
        text = _FORMATTING.sub(lambda match: match[1] or "", text)
    return text


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
    return text[: listed[0].start()].strip(), tuple(line[2].rstrip(" \t") for line in listed)
