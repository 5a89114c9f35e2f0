"""Multiple choice: one unambiguous letter, or the exact text of an option."""

import re

from saccade.errors import DataError
from saccade.rewards._text import LEAD, folded
from saccade.types import Episode, Task

_LETTERS = "ABCDEFGHIJ"
# All are matched against `_plain` text.
_LETTER = re.compile(rf"{LEAD}[(\[{{「]?([a-z])[)\]}}」.:,;!。、]*")
_LABELLED = re.compile(rf"{LEAD}[(\[]?([a-z])(?:[)\]][.:]? ?|[.:] ?| ?- ?| )(\S.*)")
_STOPS = ".!。"  # which end a sentence, and no option
_DRESS = re.compile(
    r"\\(?:f?box(?:ed)?|text(?:bf|it|rm|sf)?|math(?:bf|it|rm|sf)|underline)\s*\{([^{}]*)\}|\\[()\[\]]|\*+|\$+|_{2,}|[\"'`]"
)


def choice(episode: Episode, task: Task) -> float:
    r"""1.0 if the final answer names the gold option and no other, else 0.0.

    Accepted, after dropping bold marks, quotes, `$` and `\boxed{}`, in any case: a letter alone (`B`, `(B)`, `b.`),
    a letter after a lead (`Option B`, `The answer is: (B)`), the exact text of one option (`the red ball`), or both
    when they agree (`B. the red ball`, `B the red ball`). Only the letters of THIS task's 2-10 options count.
    Everything else is wrong: `A or B`, `not A`, a letter with another option's text, a sentence about it. A letter wins
    over an option whose text is that letter. DataError if the task has no such options or its gold is not one of their
    letters.
    """
    letters = _LETTERS[: len(task.choices)]
    if not 2 <= len(task.choices) <= len(_LETTERS):
        raise DataError(f"task {task.id}: a choice needs 2 to {len(_LETTERS)} options, it has {len(task.choices)}")
    if not isinstance(task.gold, str) or len(task.gold) != 1 or task.gold not in letters:
        raise DataError(f"task {task.id}: the gold answer must be one of the letters {letters}, it is {task.gold!r}")
    return float(_named(episode.answer or "", task.choices) == task.gold)


def _named(answer: str, choices: tuple[str, ...]) -> str | None:
    """The one letter that an answer names, or None."""
    plain = _plain(answer)
    options = [_option(text, letter) for letter, text in zip(_LETTERS, choices, strict=False)]
    letters = _LETTERS[: len(options)]
    if (alone := _LETTER.fullmatch(plain)) is not None:
        return _among(alone[1], letters)
    # an option may itself look hedged ("A and B"), so its exact text is tried before anything is refused
    exact = [
        letter for letter, option in zip(letters, options, strict=True) if option and option == plain.rstrip(_STOPS)
    ]
    if exact:
        return exact[0] if len(exact) == 1 else None  # two options of one text can't be told apart
    if (both := _LABELLED.fullmatch(plain)) is not None and (letter := _among(both[1], letters)) is not None:
        return letter if options[letters.index(letter)] == both[2].rstrip(_STOPS) else None
    return None


def _among(letter: str, letters: str) -> str | None:
    return letter.upper() if letter.upper() in letters else None


def _option(text: str, letter: str) -> str:
    """An option's text without the label that some data sets write into it (`B. the red ball`)."""
    plain = _plain(text)
    own = re.match(rf"[(\[]?{letter.lower()}[)\].:]+\s*(?=\S)", plain)
    return (plain[own.end() :] if own else plain).rstrip(_STOPS)


def _plain(text: str) -> str:
    """Folded case and width, single spaces, no dress."""
    plain = folded(text)
    for _ in range(4):  # \boxed{\text{b}} wears more than one
        plain = _DRESS.sub(lambda match: match[1] or "", plain)
    return " ".join(plain.split())
