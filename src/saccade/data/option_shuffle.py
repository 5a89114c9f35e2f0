"""The options of a task in another order, drawn for each attempt; the gold follows them.

variant = shuffled(task, seed=7, attempt=0)     what is asked, marked and kept in the results
published(variant) == task                      whose attempt it is, whatever was drawn

A model that prefers a letter scores by where the gold happens to stand; over shuffled options it doesn't.
"""

import re
from dataclasses import replace

from saccade.types import Kind, Task, digest_of

SHUFFLED = "shuffled"  # in the extras of a variant: {"order": its options' published places, "attempt": whose it is}
_LETTER = r"[(\[]?[A-J][)\]]?"
# What an option means by its place: "both A and B", "all of the above", a letter that stands in the picture.
_PLACED = re.compile(
    rf"(?<!\w)[(\[]?[A-Ja-j][)\].]?|.*(?:(?<!\w){_LETTER}\s*(?:,|and|or|&|/|\+)\s*{_LETTER}(?!\w)"
    r"|\b(?i:of|the|as)\s+(?i:above|below|preceding)\b(?!\s+\w)"
    r"|\b(?i:above|preceding|previous)\s+(?i:options?|answers?|choices?|statements?)\b).*",
    re.DOTALL,
)
_NAMED = re.compile(rf"\b(?i:options?|answers?|choices?)\s+{_LETTER}(?!\w)")


def shuffled(task: Task, *, seed: int, attempt: int) -> Task:
    """The task with its options in the order that `seed` and the attempt's index draw for it.

    They keep their places where the task isn't a choice or one of them is meant by its place ("both A and B", "none of
    the above", a letter of the picture). Every attempt's variant is another task, so that its sampling is its own.

    >>> task = Task(id="q", question="Which?", media=(), kind=Kind.CHOICE, gold="A", choices=("red", "blue", "green"))
    >>> one = shuffled(task, seed=0, attempt=0)
    >>> one.choices, one.gold
    (('green', 'red', 'blue'), 'B')
    """
    # By digests and not by a generator, whose shuffle may change from one version of Python to the next.
    order = list(range(len(task.choices)))
    if may_move(task):
        order.sort(key=lambda place: digest_of("options", seed, task.digest, attempt, place))
    extras = {**task.extras, SHUFFLED: {"order": order, "attempt": attempt}}
    return replace(_reordered(task, order), extras=extras)


def published(task: Task) -> Task:
    """The task as it was before it was shuffled; itself if it never was."""
    note = task.extras.get(SHUFFLED)
    if note is None:
        return task
    back = [note["order"].index(place) for place in range(len(task.choices))]
    extras = {name: value for name, value in task.extras.items() if name != SHUFFLED}
    return replace(_reordered(task, back), extras=extras)


def may_move(task: Task) -> bool:
    """Whether the options of a task mean the same in any order."""
    if task.kind is not Kind.CHOICE or len(task.choices) < 2 or _NAMED.search(task.question):
        return False
    return not any(_PLACED.fullmatch(option.strip()) or _NAMED.search(option) for option in task.choices)


def _reordered(task: Task, order: list[int]) -> Task:
    """The task with the options that stood at the places `order`; a gold that is no letter of them stays."""
    letters = [chr(ord("A") + place) for place in range(len(order))]
    gold = letters[order.index(letters.index(task.gold))] if task.gold in letters else task.gold
    return replace(task, choices=tuple(task.choices[place] for place in order), gold=gold)
