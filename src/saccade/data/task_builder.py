"""Build tasks of published questions: split off the options, parse the answer as a letter, span, number or text.

Options written into the question (`A. red`, `(A) red`) are removed from it, because environments list them themselves.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from saccade.data.source_row import OPTION_LETTERS, SourceRow
from saccade.rewards.answer_types.base import find_answer_type, get_answer_type, unwrap_answer
from saccade.rewards.text_normalization import ANSWER_LEAD_IN, normalize_text
from saccade.types import AnswerType, Media, Task

_OPTION_LABEL_PATTERN = re.compile(r"^[ \t]*(?:\(([A-Ja-j])\)|([A-J])[.):：．、])[ \t]*(?=\S)", re.MULTILINE)
_INLINE_LABEL_PATTERN = re.compile(r"(?<!\S)(?:\(([A-J])\)|([A-J])[.):：．、])[ \t]+(?=\S)")
_LETTER_ANSWER_PATTERN = re.compile(r"[(\[]?([A-Ja-j])[)\]]?[.):：,]*(?:\s+|\Z|(?<=[.):：]))(.*)", re.DOTALL)
_LEAD_IN_PATTERN = re.compile(ANSWER_LEAD_IN, re.IGNORECASE)
_OPTION_TAG_PATTERN = re.compile(r"</?(?:options|choices|candidates)>[ \t]*\n?")


def build_task(
    row: SourceRow,
    question: str,
    answer: Any,
    media: tuple[Media, ...],
    *,
    field_name: str,
    extras: Mapping[str, Any],
    declared_type: str | None = None,
    option_texts: Sequence[str] = (),
    id: str = "",
    environment: str | None = None,
) -> Task:
    """Build the task of a published question; `field_name` is the field of its answer.

    Without `declared_type` a question is CHOICE if its answer names one of its options, else OPEN. A MATH question
    with options is CHOICE, too. Raises DataError with the field as its key for an answer that doesn't fit the type.
    """
    answer_type = None if declared_type is None else find_answer_type(declared_type) or AnswerType.OPEN
    stem, inline_options = split_options(question)
    options = tuple(map(strip_option_label, option_texts)) or inline_options
    ground_truth: str | float | tuple[float, ...] | None = None
    if answer_type in (None, AnswerType.CHOICE, AnswerType.MATH) and options:
        ground_truth = find_option_letter(answer, options)
    if ground_truth is not None:
        answer_type, question = AnswerType.CHOICE, question if option_texts else stem
    elif answer_type == AnswerType.CHOICE:
        expected = f"one of {', '.join(options)}" if options else "a letter, since the question lists no options"
        raise row.build_field_error(field_name, f"{answer!r} should be {expected}", value=answer)
    else:
        answer_type, options = answer_type or AnswerType.OPEN, ()
        plugin = get_answer_type(answer_type)
        ground_truth = plugin.parse_ground_truth(answer)
        if ground_truth is None:
            raise row.build_field_error(field_name, f"{answer!r} should be {plugin.expected}", value=answer)
    return Task(
        id=id or row.id,
        question=question,
        media=media,
        answer_type=answer_type,
        ground_truth=ground_truth,
        options=options,
        extras=extras,
        environment=environment,
    )


def split_options(question: str) -> tuple[str, tuple[str, ...]]:
    r"""Return the question without its options, and the options without their letters; () if it lists none.

    Options are labeled A, B, ... in order, one per line or all in one line. Text in lines after the last option stays
    with the question.

    >>> split_options("Which?\nA. red\nB. blue\nAnswer with the letter.")
    ('Which?\nAnswer with the letter.', ('red', 'blue'))
    >>> split_options("Which? (A) red (B) blue")
    ('Which?', ('red', 'blue'))
    """
    original, question = question, _OPTION_TAG_PATTERN.sub("", question)
    for pattern in (_OPTION_LABEL_PATTERN, _INLINE_LABEL_PATTERN):
        labels = _select_consecutive_labels(
            [((match[1] or match[2]).upper(), match.start(), match.end()) for match in pattern.finditer(question)]
        )
        if len(labels) >= 2:
            break
    else:
        return original, ()
    ends = [*(start for _, start, _ in labels[1:]), len(question)]
    texts = [question[label[2] : end] for label, end in zip(labels, ends, strict=True)]
    last, _, tail = texts[-1].strip().partition("\n")
    texts[-1] = last
    head = question[: labels[0][1]].rstrip()
    # "Options:" would announce a list that was removed
    head = re.sub(r"\n[ \t]*(?:options|choices|candidates)[ \t]*[:：]?$", "", head, flags=re.IGNORECASE).rstrip()
    options = tuple(text.strip().rstrip(";").rstrip() for text in texts)
    if not all(options) or not head:
        return original, ()
    return "\n".join(filter(None, (head, tail.strip()))), options


def _select_consecutive_labels(labels: list[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
    """Return the labels A, B, C, ... that follow each other, starting at the last A."""
    starts = [index for index, label in enumerate(labels) if label[0] == "A"]
    if not starts:
        return []
    run = labels[starts[-1] :]
    return [label for letter, label in zip(OPTION_LETTERS, run, strict=False) if label[0] == letter]


def strip_option_label(option: str) -> str:
    """Remove the letter before an option, if there is one.

    >>> strip_option_label("(B) blue"), strip_option_label("B. blue"), strip_option_label("blue")
    ('blue', 'blue', 'blue')
    """
    return _OPTION_LABEL_PATTERN.sub("", str(option), count=1).strip()


def find_option_letter(answer: Any, options: Sequence[str]) -> str | None:
    """Return the letter of the option that an answer names by letter, by text or by both; None if it names none.

    >>> [find_option_letter(answer, ("red", "blue")) for answer in ("(B) blue", "Red", "C")]
    ['B', 'A', None]
    """
    text = normalize_text(unwrap_answer(str(answer)))
    plain, plain_text = [_normalize_text(option) for option in options], _normalize_text(text)
    if plain.count(plain_text) == 1:
        return OPTION_LETTERS[plain.index(plain_text)] if len(options) <= len(OPTION_LETTERS) else None
    text = text[match.end() :] if (match := _LEAD_IN_PATTERN.match(text)) else text
    parts = _LETTER_ANSWER_PATTERN.fullmatch(text)
    letters = OPTION_LETTERS[: len(options)]
    if parts is None or parts[1].upper() not in letters:
        return None
    option_text = _normalize_text(parts[2])
    return parts[1].upper() if not option_text or option_text == plain[letters.index(parts[1].upper())] else None


def _normalize_text(text: str) -> str:
    return " ".join(normalize_text(str(text)).casefold().split()).rstrip(".")
