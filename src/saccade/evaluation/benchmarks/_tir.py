"""TIR-Bench's rules, by task: what an extracted answer is worth in [0, 1], None where it holds none."""

import re
from collections.abc import Callable, Sequence

from saccade.data.raw import LETTERS
from saccade.evaluation.benchmarks._answers import letter_of, number_of, undressed
from saccade.rewards._text import boxes, folded, tidy
from saccade.types import Task

_PATCHED = {"60.jpg": "mobi", "62.jpg": "aires"}  # by the published code, wherever a file's name ends so


_READING = (
    "You read a candidate's solution of a task about one or two pictures, and say what it gives as its final answer. "
    "Take it as it stands; don't solve the task, and don't mend the answer. Say {form}."
)
_FORMS = {
    "jigsaw": "all numbers of the arrangement in its order, on one line, with blanks between them, such as 3 1 4 2",
    "spot_difference": "the numbers that are named, with commas between them, such as 2, 5, 7, or the one number",
    "word_search": "the row and the column with a comma between them, such as 3, 4, or the one number",
}


def reading(task: Task) -> str:
    """What a judge is told to read in an answer; "" for text in a picture, which is looked for in the answer as it is.

    The form follows from the kind of gold alone, as the published examples per task do.
    """
    kind, gold = task.extras["task"], str(task.gold)
    if kind == "ocr":
        return ""
    if _is(float, gold):
        form = "the number alone, without its unit"
    elif {*gold} <= {*LETTERS}:
        form = "the letter of the option, which the question gives its text, or the letters, such as B or AC"
    else:
        form = _FORMS.get(kind, "the word or the expression alone")
    return _READING.format(form=form)


def extracted(text: str, task: Task) -> str:
    """What stands in the last box, else all of it; of text in a picture the response as it is."""
    inside = boxes(text)
    return inside[-1] if inside and task.extras["task"] != "ocr" else text


def official_value(text: str, task: Task) -> float | None:
    """The published rule; unreadable numbers and lists are None."""
    kind, gold = task.extras["task"], str(task.gold)
    if kind == "ocr":
        gold = next((word for name, word in _PATCHED.items() if name in str(task.extras["image_1"])), gold)
        return float(gold in text)
    text = text.replace("*", "").strip()
    if kind in _LISTS and not _is(int, gold):
        return _LISTS[kind](text, gold, task)
    if kind == "jigsaw":
        return _jigsaw(text, gold, task)
    if gold.isalpha():
        return _letters(text, gold, task)
    return _number(text, gold)


def tolerant_value(text: str, task: Task) -> float | None:
    """The same tasks, read as a person would: one letter named, the last number, a word in any case."""
    kind, gold = task.extras["task"], str(task.gold)
    if kind == "ocr":
        return float(folded(gold) in folded(text))
    plain = undressed(tidy(text)).strip()
    if kind == "jigsaw" or (kind in _LISTS and not _is(int, gold)):
        return official_value(plain, task)
    if len(gold) == 1 and gold.isalpha():
        letter = letter_of(plain, LETTERS)
        return None if letter is None else float(letter == gold)
    if gold.isalpha():
        return float(sorted(re.findall("[A-Za-z]", plain)) == sorted(gold))
    said = number_of(plain)
    if _is(float, gold):
        return None if said is None else float(said == float(gold))
    return float(folded(plain).rstrip(".") == folded(gold))


def _is(kind: Callable[[str], object], text: str) -> bool:
    try:
        kind(text)
    except ValueError:
        return False
    return True


def _number(text: str, gold: str) -> float | None:
    """Letters, colons and blanks are dropped, so that `7 2` is 72; a gold that is no number is never met."""
    kind = int if _is(int, gold) else float
    if not _is(kind, gold):
        return 0.0
    plain = re.sub(r"[A-Za-z*:\s]+", "", text.replace("Extracted answer:", "")).strip()
    said = [kind(plain)] if _is(kind, plain) else []
    comma = re.fullmatch(r"-?\d+,\d+", plain)  # which math-verify reads as a decimal
    last = float(plain.replace(",", ".")) if comma else number_of(text)
    said += [] if last is None else [last]
    return float(float(gold) in said) if said else None


def _letters(text: str, gold: str, task: Task) -> float:
    if len(gold) > 1:
        return float(sorted(text) == sorted(gold))
    said = text.replace("Extracted answer:", "").strip()
    if gold not in LETTERS:
        return 0.0
    if said not in (*LETTERS,):
        for letter in f"{LETTERS}H":  # which the published list holds twice
            if any(f"{letter}{gap}{said}" in task.question for gap in (". ", ".", " ", "")):
                said = letter
        # The published code never gives up: whatever was said is the letter it is nearest to, ties to the first.
        said = min(LETTERS, key=lambda letter: _distance(said, letter))
    return float(said == gold)


def _distance(text: str, letter: str) -> int:
    """Levenshtein's distance to a single letter: all others are deleted, or one of them is replaced."""
    return len(text) - 1 if letter in text else max(len(text), 1)


def _pair(text: str, gold: str, task: Task) -> float | None:
    pairs = [re.search(r"\b(\d+)\s*,\s*(\d+)\b", each) for each in (text, gold)]
    return None if pairs[0] is None else float(pairs[1] is not None and _ints(pairs[0]) == _ints(pairs[1]))


def _ints(found: re.Match[str]) -> list[int]:
    return [_whole(each) for each in found.groups()]


def _whole(digits: str) -> int:
    """Digits as a number; -1, which is none of theirs, for more of them than any gold has."""
    return int(digits) if len(digits) <= 18 else -1


def _overlap(text: str, gold: str, task: Task) -> float:
    """Intersection over union of the two sets of whole numbers; two empty ones are the same."""
    said, wanted = ({_whole(each) for each in re.findall(r"\d+", one)} for one in (text, gold))
    return len(said & wanted) / len(said | wanted) if said | wanted else 1.0


def _jigsaw(text: str, gold: str, task: Task) -> float | None:
    """The share of places that are right in the first run of exactly n * n whole numbers."""
    try:
        count = int(task.extras["difficulty"]) ** 2
    except (TypeError, ValueError):
        return None
    said, wanted = (_run(each, count) for each in (text, gold))
    return None if said is None or wanted is None else sum(map(int.__eq__, said, wanted)) / count


def _run(text: str, count: int) -> Sequence[int] | None:
    runs = ([_whole(each) for each in re.findall(r"\d+", run)] for run in re.findall(r"[\d\s,，]+", text))
    return next((run for run in runs if len(run) == count), None)


_LISTS: dict[str, Callable[[str, str, Task], float | None]] = {"word_search": _pair, "spot_difference": _overlap}
