"""Score multiple choice: one unambiguous letter, or the exact text of an option."""

from typing import Any

from saccade.rewards.answer_types.base import BaseAnswerType, quote_answer
from saccade.rewards.answer_types.reader import read_letter
from saccade.types import Episode, Task

OPTION_LETTERS = "ABCDEFGHIJ"


class ChoiceAnswer(BaseAnswerType):
    r"""Multiple choice: 1.0 if the final answer names the ground-truth option and no other, else 0.0.

    `reader.read_letter` reads it, ignoring markup and case: a letter alone (`B`, `(B)`, `\boxed{B`), a letter after a
    lead-in (`Option B`, `The answer is: (B)`, `It must be B`), the text of one option, whatever its article (`It's the
    red ball`), both if they agree (`B. the red ball`), each also as the first line with an explanation after it. Only
    the letters of this task's 2-10 options count; a letter takes precedence over an option whose text is that letter.
    Anything else is wrong: `A or B`, `not A`, `I think B`, a letter with another option's text, a sentence about it.
    """

    names = ("choice", "mcq", "mc", "multiple-choice", "multiple_choice", "multi-choice")
    expected = "the letter of an option"
    example = ("A", "A")
    example_options = ("red", "blue")

    def __call__(self, episode: Episode) -> float:
        """Return the score of an episode. Raises DataError if the task's options or ground truth are invalid."""
        self.require_valid(episode.task)
        return float(_read_option(episode) == episode.task.ground_truth)

    def explain(self, episode: Episode) -> str:
        """Return the letter that was read, and the right one."""
        letter = _read_option(episode)
        return f"{quote_answer(episode)} read as {letter or 'no option'}, ground truth {episode.task.ground_truth}"

    @classmethod
    def is_valid(cls, ground_truth: object) -> bool:
        """Return whether it is a letter."""
        return isinstance(ground_truth, str) and len(ground_truth) == 1 and ground_truth in OPTION_LETTERS

    @classmethod
    def parse_ground_truth(cls, value: Any) -> None:
        """Return None: a letter is found among the options (see `data.task_builder`)."""
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


def _read_option(episode: Episode) -> str | None:
    options = episode.task.options
    return read_letter(episode.answer or "", OPTION_LETTERS[: len(options)], options)


choice = ChoiceAnswer
