"""Score open answers: token F1, or equality, after a normalization that preserves numbers."""

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

from saccade.rewards.answer_types.base import AnswerFormat, parse_text
from saccade.rewards.answer_types.reader import find_answers, has_denial
from saccade.rewards.text_normalization import normalize_and_casefold, normalize_text
from saccade.types import Episode

_ARTICLES = frozenset({"a", "an", "the"})
_OPPOSITES = {"yes": "no", "no": "yes", "true": "false", "false": "true"}
# A minus sign is kept only if it is unambiguous: at the start of a word, never between two numbers ("3-5").
_MINUS_SIGN = re.compile(r"(?:\b(?:minus|negative)\s+|^\s*-\s*|(?<![\w.)])-\s*(?=[$€£¥]))[$€£¥]?\s*(?=\.?\d)")
_ACRONYM = re.compile(r"(?<!\w)(?:[^\W\d_]\.)+[^\W\d_](?!\w)\.?")  # U.S., u.s.a.
_NON_ASCII = re.compile(r"[^\x00-\x7f]")
_THOUSANDS_NUMBER = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
# Separators of alternative answers; between two digits a slash is part of a number.
_ALTERNATIVE_SEPARATOR = re.compile(r"\bor\b|\||(?<!\d)/|/(?!\d)")
_TOKEN = re.compile(r"(?<![\w.)])-?(?:\d+(?:\.\d+)?|\.\d+)|\w+(?:'\w+)*")


class OpenAnswer(AnswerFormat):
    """Open answers: how well the words of the final answer agree with those of the ground truth, in [0, 1].

    `f1` is 2PR / (P + R) of the two multisets of tokens (the SQuAD metric) times their precision P, so that naming
    several candidates earns less than naming one of them: k words that hold the one right word score 2 / (k (k + 1)).
    `exact` requires the same tokens in the same order. The answer is the content of its box, what follows "the answer
    is", or all of it (`reader.find_answers`). Case and width are folded; punctuation and the articles a, an, the are
    dropped; digits, minus signs and decimal points stay (`-5`, `5` and `0.5` are three different tokens; `minus 5` is
    `-5` and `1,000` is `1000`). If the ground truth is one word with an opposite (yes and no, true and false), an
    answer that contains the opposite scores 0, and so does an answer that denies something if the ground truth doesn't.
    A missing answer, or one of articles alone, scores 0; if the ground truth itself is an article, such as the blood
    type `A`, articles are kept on both sides.

    Several answers separated by `or`, a slash or a bar score as the worst of them, unless the ground truth has such a
    separator.
    """

    names = ("open", "open_ended", "open-ended")
    expected = "a text"
    example = ("red", "red")

    def __init__(
        self,
        *,
        mode: Literal["f1", "exact"] = "f1",  # f1 of the words times precision, or exact: the same words in order
    ) -> None:
        self._mode = mode

    def __call__(self, episode: Episode) -> float:
        """Return the score of an episode."""
        ground_truth, answer = str(episode.task.ground_truth), episode.answer or ""
        if _tokenize(answer) == _tokenize(ground_truth) != []:
            return 1.0
        return min((self._score(part, ground_truth) for part in find_answers(answer)), default=0.0)

    def _score(self, answer: str, ground_truth: str) -> float:
        reference = _tokenize(ground_truth)
        dropped = _ARTICLES if set(reference) - _ARTICLES else frozenset[str]()

        def tokenize_without_articles(text: str) -> list[str]:
            return [token for token in _tokenize(text) if token not in dropped]

        expected, predicted = tokenize_without_articles(ground_truth), tokenize_without_articles(answer)
        if not predicted or not expected:
            return 0.0
        if len(expected) == 1 and _OPPOSITES.get(expected[0]) in predicted:
            return 0.0
        if self._mode == "exact":
            return float(predicted == expected)
        if has_denial(normalize_text(answer)) and not has_denial(" ".join(reference)):
            return 0.0
        candidates = [predicted]
        # Words of the ground truth alone hold no alternative, however they are separated (AC/DC).
        has_alternatives = _ALTERNATIVE_SEPARATOR.search(normalize_and_casefold(ground_truth))
        if Counter(predicted) - Counter(expected) and not has_alternatives:
            parts = _ALTERNATIVE_SEPARATOR.split(normalize_and_casefold(answer))
            candidates += filter(None, map(tokenize_without_articles, parts))
        return min(_compute_value(candidate, expected) for candidate in candidates)

    @classmethod
    def is_valid(cls, ground_truth: object) -> bool:
        """Return whether it is a text."""
        return isinstance(ground_truth, str)

    @classmethod
    def parse_ground_truth(cls, value: Any) -> str | None:
        """Return the text of a published answer."""
        return parse_text(value)


open_ = OpenAnswer


def _compute_value(predicted: Sequence[str], expected: Sequence[str]) -> float:
    """Return F1 times precision."""
    num_shared = (Counter(predicted) & Counter(expected)).total()
    return 2 * num_shared / (len(predicted) + len(expected)) * num_shared / len(predicted)


def _tokenize(text: str) -> list[str]:
    plain = _THOUSANDS_NUMBER.sub(
        lambda match: match[0].replace(",", ""), _MINUS_SIGN.sub("-", normalize_and_casefold(text))
    )
    plain = _NON_ASCII.sub(_escape_combining_mark, _ACRONYM.sub(lambda match: match[0].replace(".", ""), plain))
    return [f"0{token}" if token[0] == "." else token.replace("-.", "-0.") for token in _TOKEN.findall(plain)]


def _escape_combining_mark(character: re.Match[str]) -> str:
    r"""Return a combining mark (the vowels of Hindi and Thai) as a part of the word, which `\w` doesn't match."""
    return f"_{ord(character[0]):x}" if unicodedata.category(character[0]).startswith("M") else character[0]
