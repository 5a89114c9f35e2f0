"""What several benchmarks' readers and rules share: options inside a question, letters as marks, means of tables."""

import re
from collections.abc import Callable, Sequence
from statistics import fmean

from saccade.data.raw import LETTERS
from saccade.evaluation.benchmarks._answers import letter_of
from saccade.evaluation.benchmarks._benchmark import UNPARSED, Mark, Metrics, Names, Result, accuracy, mean, table
from saccade.types import Task

_OPTION = re.compile(r"^[ \t]*\(([A-J])\)[ \t]*(.*?)[ \t]*$", re.MULTILINE)
_LABEL = re.compile(r"\s*[(\[]?([A-J])[)\].:]+\s*")


def choice_mark(letter: str | None, task: Task) -> Mark:
    """What a letter is worth; nothing read where there is none."""
    return UNPARSED if letter is None else Mark(read=letter, value=float(letter == task.gold))


def option(task: Task) -> str:
    """The right option as a judge is told it, with its letter and its text."""
    return f"{task.gold}. {task.choices[LETTERS.index(str(task.gold))]}"


def tolerant_choice(text: str, task: Task) -> Mark:
    """The tolerant rule of every multiple choice: see `letter_of`."""
    return choice_mark(letter_of(text, LETTERS[: len(task.choices)], task.choices), task)


def unlabelled(options: Sequence[str]) -> tuple[str, ...]:
    """Options without the letters that a data set wrote into them.

    >>> unlabelled(["A. Apples.", "(B) Candles."]), unlabelled(["A", "B"])
    (('Apples.', 'Candles.'), ('A', 'B'))
    """
    plain = []
    for letter, option in zip(LETTERS, options, strict=False):
        label = _LABEL.match(option)
        # An option that is nothing but a letter, or another's, keeps it: the letter is what it says.
        own = label is not None and label[1] == letter and label.end() < len(option)
        plain.append(option[label.end() :] if own and label is not None else option)
    return tuple(plain)


def inline_options(text: str) -> tuple[str, tuple[str, ...]]:
    r"""A question and the options that its lines hold; what follows the options is dropped.

    >>> inline_options("Which?\n(A) red\n(B) blue\nAnswer with the letter.")
    ('Which?', ('red', 'blue'))
    """
    lines = list(_OPTION.finditer(text))
    # Only where letters follow each other: a question may well speak of "(B)" in a line of its own.
    listed = [line for at, line in enumerate(lines) if at < len(LETTERS) and line[1] == LETTERS[at]]
    if len(listed) < 2:
        return text.strip(), ()
    return text[: listed[0].start()].strip(), tuple(line[2] for line in listed)


def accuracy_beside(kept: Callable[[Result], bool]) -> Metrics:
    """The mean over all tasks and, as some official scripts have it, over those that are kept."""

    def metrics(results: Sequence[Result]) -> dict[str, float]:
        some = [each for each in results if kept(each)]
        return {**accuracy(results), "accuracy_of_answered": 100 * mean(some) if some else 0.0}

    return metrics


def mean_of_means(results: Sequence[Result], names: Names) -> float:
    """The unweighted mean, in percent, of a table's rows."""
    return fmean(cell.value for cell in table(results, names).values())
