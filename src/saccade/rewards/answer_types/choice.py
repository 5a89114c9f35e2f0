"""Score multiple choice: one unambiguous letter, or the exact text of an option."""

import re
from typing import Any

from saccade.rewards.answer_types.base import AnswerFormat
from saccade.rewards.text_normalization import ANSWER_LEAD_IN, normalize_and_casefold
from saccade.types import Episode, Task

OPTION_LETTERS = "ABCDEFGHIJ"
# The patterns match `_normalize`d text.
_LETTER_ANSWER = re.compile(rf"{ANSWER_LEAD_IN}[(\[{{「]?([a-z])[)\]}}」.:,;!。、]*")
_LABELED_OPTION = re.compile(rf"{ANSWER_LEAD_IN}[(\[]?([a-z])(?:[)\]][.:]? ?|[.:] ?| ?- ?| )(\S.*)")
_SENTENCE_ENDS = ".!。"  # stripped before an option's text is compared
_MARKUP = re.compile(
    r"\\(?:f?box(?:ed)?|text(?:bf|it|rm|sf)?|math(?:bf|it|rm|sf)|underline)\s*\{([^{}]*)\}|\\[()\[\]]|\*+|\$+|_{2,}|[\"'`]"
)


class ChoiceAnswer(AnswerFormat):
    r"""Multiple choice: 1.0 if the final answer names the ground-truth option and no other, else 0.0.

    Bold marks, quotes, `$`, `\boxed{}` and case are ignored. Accepted: a letter alone (`B`, `(B)`, `b.`), a letter
    after a lead-in (`Option B`, `The answer is: (B)`), the exact text of one option (`the red ball`), or both if they
    agree (`B. the red ball`, `B the red ball`). Only the letters of this task's 2-10 options count; a letter takes
    precedence over an option whose text is that letter. Anything else is wrong: `A or B`, `not A`, a letter with
    another option's text, a sentence about it.
    """

    names = ("choice", "mcq", "mc", "multiple-choice", "multiple_choice", "multi-choice")
    expected = "the letter of an option"
    example = ("A", "A")
    example_options = ("red", "blue")

    def __call__(self, episode: Episode) -> float:
        """Return the score of an episode. Raises DataError if the task's options or ground truth are invalid."""
        self.require_valid(episode.task)
        return float(_extract_letter(episode.answer or "", episode.task.options) == episode.task.ground_truth)

    @classmethod
    def is_valid(cls, ground_truth: object) -> bool:
        """Return whether it is a letter."""
        return isinstance(ground_truth, str) and len(ground_truth) == 1 and ground_truth in OPTION_LETTERS

    @classmethod
    def parse_ground_truth(cls, value: Any) -> None:
        """Return None: a letter is found among the options (see `data.answer_normalization`)."""
        return

    @classmethod
    def find_problem(cls, task: Task) -> tuple[str, str] | None:
        """Check the options too, and that the letter is one of theirs."""
        if not 2 <= len(task.options) <= len(OPTION_LETTERS):
            return "options", f"it has {len(task.options)} options; a choice question needs 2 to {len(OPTION_LETTERS)}"
        letters = OPTION_LETTERS[: len(task.options)]
        if not cls.is_valid(task.ground_truth) or str(task.ground_truth) not in letters:
            return "ground_truth", f"ground truth {task.ground_truth!r} is not one of the letters {letters}"
        return None


choice = ChoiceAnswer


def _extract_letter(answer: str, option_texts: tuple[str, ...]) -> str | None:
    """Return the one letter that an answer names, or None."""
    plain = _normalize(answer)
    options = [_strip_option_label(text, letter) for letter, text in zip(OPTION_LETTERS, option_texts, strict=False)]
    letters = OPTION_LETTERS[: len(options)]
    if (letter_only := _LETTER_ANSWER.fullmatch(plain)) is not None:
        return _match_letter(letter_only[1], letters)
    # An option may itself look hedged ("A and B"), so compare exact texts before rejecting anything.
    sentence = plain.rstrip(_SENTENCE_ENDS)
    matching = [letter for letter, option in zip(letters, options, strict=True) if option and option == sentence]
    if matching:
        return matching[0] if len(matching) == 1 else None  # two options with the same text are indistinguishable
    if (labeled := _LABELED_OPTION.fullmatch(plain)) is not None and (
        letter := _match_letter(labeled[1], letters)
    ) is not None:
        return letter if options[letters.index(letter)] == labeled[2].rstrip(_SENTENCE_ENDS) else None
    return None


def _match_letter(letter: str, letters: str) -> str | None:
    return letter.upper() if letter.upper() in letters else None


def _strip_option_label(text: str, letter: str) -> str:
    """Return an option's text without the label some datasets write into it (`B. the red ball`)."""
    plain = _normalize(text)
    label = re.match(rf"[(\[]?{letter.lower()}[)\].:]+\s*(?=\S)", plain)
    return (plain[label.end() :] if label else plain).rstrip(_SENTENCE_ENDS)


def _normalize(text: str) -> str:
    """Fold case and width, collapse spaces, and remove markup."""
    plain = normalize_and_casefold(text)
    for _ in range(4):  # markup nests: \boxed{\text{b}}
        plain = _MARKUP.sub(lambda match: match[1] or "", plain)
    return " ".join(plain.split())
