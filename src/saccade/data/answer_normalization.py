"""How a published question is judged: its options, its gold answer as a letter, a span, a number or a text.

Options that stand in the question (`A. red`, `(A) red`) are taken out of it, since an agent lists them itself.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from saccade.data.raw import LETTERS, Row
from saccade.rewards._text import LEAD, boxes, tidy
from saccade.types import Kind

# What data sets call their kinds of question; any other word means an open one.
KINDS = {
    **dict.fromkeys(("choice", "mcq", "mc", "multiple-choice", "multiple_choice", "multi-choice"), Kind.CHOICE),
    **dict.fromkeys(("grounding", "tvg", "temporal_grounding", "temporal-grounding"), Kind.GROUNDING),
    **dict.fromkeys(("number", "numeric", "numerical", "regression", "count"), Kind.NUMBER),
    **dict.fromkeys(("math", "formula"), Kind.MATH),
    **dict.fromkeys(("box", "bbox"), Kind.BOX),
    "point": Kind.POINT,
}
_LABEL = re.compile(r"^[ \t]*(?:\(([A-Ja-j])\)|([A-J])[.):：．、])[ \t]*(?=\S)", re.MULTILINE)
_INLINE = re.compile(r"(?<!\S)(?:\(([A-J])\)|([A-J])[.):：．、])[ \t]+(?=\S)")
_NAMED = re.compile(r"[(\[]?([A-Ja-j])[)\]]?[.):：,]*(?:\s+|\Z|(?<=[.):：]))(.*)", re.DOTALL)
_LEAD = re.compile(LEAD, re.IGNORECASE)
_TAGS = re.compile(r"</?(?:options|choices|candidates)>[ \t]*\n?")
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_TIME = r"\d+(?::\d{1,2}){0,2}(?:\.\d+)?"
_NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?(?:[eE][-+]?\d+)?%?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A question as a task has it: `Judged(question="Which?", kind=Kind.CHOICE, gold="A", choices=("red", "blue"))`."""

    question: str
    kind: Kind
    gold: str | float | tuple[float, ...]
    choices: tuple[str, ...] = ()


def judged(
    row: Row, question: str, answer: Any, *, where: str, declared: str | None = None, choices: Sequence[str] = ()
) -> Judged:
    """The question with the gold answer that its kind asks for; `where` names the answer's field.

    Without a declared kind a question with options whose answer names one of them is a choice, any other is open. A
    formula among options is a choice, too. Raises DataError, naming row and field, for an answer that doesn't fit.
    """
    kind = None if declared is None else KINDS.get(declared.strip().lower(), Kind.OPEN)
    head, found = split_options(question)
    options = tuple(map(unlabelled, choices)) or found
    asked = question if choices else head
    if kind in (None, Kind.CHOICE, Kind.MATH) and options:
        letter = letter_of(answer, options)
        if letter is not None:
            return Judged(question=asked, kind=Kind.CHOICE, gold=letter, choices=options)
    if kind is Kind.CHOICE:
        listed = f"one of {', '.join(options)}" if options else "a letter, since the question lists no options"
        raise row.wrong(where, f"{answer!r} should be {listed}")
    return Judged(question=question, kind=kind or Kind.OPEN, gold=_gold(row, answer, kind or Kind.OPEN, where))


def _gold(row: Row, answer: Any, kind: Kind, where: str) -> str | float | tuple[float, ...]:
    if kind is Kind.GROUNDING:
        span = span_of(answer)
        if span is None:
            raise row.wrong(where, f"{answer!r} should be a start and a later end, such as [3.5, 9]")
        return span
    if kind in (Kind.BOX, Kind.POINT):
        sides = _numbers(answer)
        if len(sides) != 4 or not (sides[0] < sides[2] and sides[1] < sides[3]):
            raise row.wrong(where, f"{answer!r} should be left, top, right and bottom of a box")
        return sides
    if kind is Kind.NUMBER:
        numbers = _numbers(answer)
        if len(numbers) != 1:
            raise row.wrong(where, f"{answer!r} should be one number")
        return numbers[0]
    return bare(row.as_text(answer, where))


def bare(text: str) -> str:
    r"""A gold answer without the tags and the box that it may stand in.

    >>> bare("<answer>\n\\boxed{red}\n</answer>")
    'red'
    """
    inside = (_ANSWER.findall(text) or [text])[-1].strip()
    boxed = boxes(inside)
    return boxed[-1].strip() if boxed and inside.startswith("\\boxed") else inside


# ---- options -------------------------------------------------------------------------------------------------------


def split_options(question: str) -> tuple[str, tuple[str, ...]]:
    r"""The question without its options, and the options without their letters; none where it lists none.

    They are labelled A, B, ... in order, a line each or all in one line. What stands in lines after a blank line, or
    behind the last option as a sentence of its own line that isn't an option, stays with the question.

    >>> split_options("Which?\nA. red\nB. blue\nAnswer with the letter.")
    ('Which?\nAnswer with the letter.', ('red', 'blue'))
    >>> split_options("Which? (A) red (B) blue")
    ('Which?', ('red', 'blue'))
    """
    whole, question = question, _TAGS.sub("", question)
    for pattern in (_LABEL, _INLINE):
        labels = _in_order(
            [((match[1] or match[2]).upper(), match.start(), match.end()) for match in pattern.finditer(question)]
        )
        if len(labels) >= 2:
            break
    else:
        return whole, ()
    ends = [*(start for _, start, _ in labels[1:]), len(question)]
    texts = [question[label[2] : end] for label, end in zip(labels, ends, strict=True)]
    last, _, tail = texts[-1].strip().partition("\n")
    texts[-1] = last
    head = question[: labels[0][1]].rstrip()
    # "Options:" announces a list that is not there any more
    head = re.sub(r"\n[ \t]*(?:options|choices|candidates)[ \t]*[:：]?$", "", head, flags=re.IGNORECASE).rstrip()
    options = tuple(text.strip().rstrip(";").rstrip() for text in texts)
    if not all(options) or not head:
        return whole, ()
    return "\n".join(filter(None, (head, tail.strip()))), options


def _in_order(labels: list[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
    """The labels from the last A on that go on as B, C, ... one after the other."""
    starts = [place for place, label in enumerate(labels) if label[0] == "A"]
    if not starts:
        return []
    run = labels[starts[-1] :]
    return [label for wanted, label in zip(LETTERS, run, strict=False) if label[0] == wanted]


def unlabelled(option: str) -> str:
    """An option without the letter that may stand before it.

    >>> unlabelled("(B) blue"), unlabelled("B. blue"), unlabelled("blue")
    ('blue', 'blue', 'blue')
    """
    return _LABEL.sub("", str(option), count=1).strip()


def letter_of(answer: Any, options: Sequence[str]) -> str | None:
    """The letter of the option that an answer names: by letter, by text or by both; None where it names none.

    >>> letter_of("(B) blue", ("red", "blue")), letter_of("Red", ("red", "blue")), letter_of("C", ("red", "blue"))
    ('B', 'A', None)
    """
    text = tidy(bare(str(answer)))
    plain = [_plain(option) for option in options]
    if plain.count(_plain(text)) == 1:
        return LETTERS[plain.index(_plain(text))] if len(options) <= len(LETTERS) else None
    text = text[match.end() :] if (match := _LEAD.match(text)) else text
    named = _NAMED.fullmatch(text)
    letters = LETTERS[: len(options)]
    if named is None or named[1].upper() not in letters:
        return None
    said = _plain(named[2])
    return named[1].upper() if not said or said == plain[letters.index(named[1].upper())] else None


def _plain(text: str) -> str:
    return " ".join(tidy(str(text)).casefold().split()).rstrip(".")


# ---- spans and numbers ---------------------------------------------------------------------------------------------


def span_of(answer: Any) -> tuple[float, float] | None:
    """A start and a later end in seconds: a pair, listed or named, or two times in a text; None where it is neither.

    >>> span_of([3, 5.5]), span_of("From 00:10 to 00:12.5"), span_of("24.3 30.4"), span_of("9 to 3")
    ((3.0, 5.5), (10.0, 12.5), (24.3, 30.4), None)
    """
    if isinstance(answer, Mapping):
        answer = [value for name in ("start", "end") for key, value in answer.items() if str(key).startswith(name)]
    if isinstance(answer, list | tuple) and len(answer) == 1:
        return span_of(answer[0])
    if isinstance(answer, str):
        times = tuple(_seconds(time) for time in re.findall(_TIME, tidy(bare(answer))))
    else:
        times = _numbers(answer)
    return (times[0], times[1]) if len(times) == 2 and times[0] < times[1] else None


def _seconds(time: str) -> float:
    total = 0.0
    for part in time.split(":"):
        total = total * 60 + float(part)
    return total


def _numbers(answer: Any) -> tuple[float, ...]:
    """Every finite number of an answer, in order."""
    if isinstance(answer, str):
        found = [float(text.rstrip("%").replace(",", "")) for text in _NUMBER.findall(_apart(tidy(bare(answer))))]
    else:
        values = answer if isinstance(answer, list | tuple) else [answer]
        found = [float(each) for each in values if isinstance(each, int | float) and not isinstance(each, bool)]
    return tuple(each for each in found if math.isfinite(each))


def _apart(text: str) -> str:
    # a comma between digits is a separator of thousands only before exactly three of them, and outside a list
    listed = text.lstrip().startswith(("[", "("))
    return text.replace(",", ", ") if listed else re.sub(r",(?!\d{3}(?!\d))", ", ", text)
