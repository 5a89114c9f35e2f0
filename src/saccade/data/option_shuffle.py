"""Shuffle the options of a task for each sample, with the ground-truth letter adjusted.

    variant = shuffle_options(task, seed=7, sample_index=0)     the variant is rolled out, graded and stored
    restore_options(variant) == task                            results are grouped by the original task

The score of a model that prefers a letter depends on where the right option is; over shuffled options it doesn't.
"""

import re
from collections.abc import Mapping
from dataclasses import replace

from saccade.types import AnswerType, Task
from saccade.utils.hashing import compute_digest

# In the extras of a variant: {"order": original indices of its options, "attempt": sample index}. Its keys are frozen:
# they enter the variant's digest, from which the sampling seeds derive.
SHUFFLE_KEY = "shuffled"
_LETTER = r"[(\[]?[A-J][)\]]?"
# Options that refer to positions: "both A and B", "all of the above", a letter that is visible in the image.
_POSITIONAL_OPTION = re.compile(
    rf"(?<!\w)[(\[]?[A-Ja-j][)\].]?|.*(?:(?<!\w){_LETTER}\s*(?:,|and|or|&|/|\+)\s*{_LETTER}(?!\w)"
    r"|\b(?i:of|the|as)\s+(?i:above|below|preceding)\b(?!\s+\w)"
    r"|\b(?i:above|preceding|previous)\s+(?i:options?|answers?|choices?|statements?)\b).*",
    re.DOTALL,
)
_OPTION_REFERENCE = re.compile(rf"\b(?i:options?|answers?|choices?)\s+{_LETTER}(?!\w)")


def shuffle_options(task: Task, *, seed: int, sample_index: int) -> Task:
    """Return the task with its options in the order that follows from `seed` and the sample's index.

    The order stays if the task isn't a choice or an option refers to positions ("both A and B", "none of the above").
    Every sample has another variant, with another digest, so that each has its own sampling seed.

    >>> options = ("red", "blue", "green")
    >>> task = Task(
    ...     id="q", question="Which?", media=(), answer_type=AnswerType.CHOICE, ground_truth="A", options=options
    ... )
    >>> variant = shuffle_options(task, seed=0, sample_index=0)
    >>> variant.options, variant.ground_truth
    (('green', 'red', 'blue'), 'B')
    """
    # Sorting by digests gives the same order in every Python version; random.shuffle may change.
    order = list(range(len(task.options)))
    if can_shuffle_options(task):
        order.sort(key=lambda index: compute_digest("options", seed, task.digest, sample_index, index))
    extras = {**task.extras, SHUFFLE_KEY: {"order": order, "attempt": sample_index}}
    return replace(_reorder_options(task, order), extras=extras)


def restore_options(task: Task) -> Task:
    """Return the original task of a variant; an unshuffled task is returned unchanged."""
    record = task.extras.get(SHUFFLE_KEY)
    order = record.get("order") if isinstance(record, Mapping) else None
    indices = list(range(len(task.options)))
    if (
        not isinstance(order, list | tuple)
        or any(type(index) is not int for index in order)
        or sorted(order) != indices
    ):
        return task  # the dataset's own extras may have the key
    inverse = [order.index(index) for index in indices]
    extras = {name: value for name, value in task.extras.items() if name != SHUFFLE_KEY}
    return replace(_reorder_options(task, inverse), extras=extras)


def can_shuffle_options(task: Task) -> bool:
    """Return whether the options of a task keep their meaning in any order."""
    if task.answer_type != AnswerType.CHOICE or len(task.options) < 2 or _OPTION_REFERENCE.search(task.question):
        return False
    return not any(
        _POSITIONAL_OPTION.fullmatch(option.strip()) or _OPTION_REFERENCE.search(option) for option in task.options
    )


def _reorder_options(task: Task, order: list[int]) -> Task:
    """Return the task with the options at the indices `order`; a ground truth that isn't a letter of them stays."""
    letters = [chr(ord("A") + index) for index in range(len(order))]
    truth = task.ground_truth
    truth = letters[order.index(letters.index(truth))] if truth in letters else truth
    return replace(task, options=tuple(task.options[index] for index in order), ground_truth=truth)
