"""Score open answers: token F1, or equality, after a normalization that preserves numbers."""

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

from saccade.rewards.answer_types.base import BaseAnswerType, parse_text
from saccade.rewards.answer_types.denials import has_denial
from saccade.rewards.answer_types.reader import clean_text, find_answers
from saccade.rewards.text_normalization import normalize_and_casefold, normalize_text
from saccade.types import Episode

_ARTICLES = frozenset({"a", "an", "the"})
_OPPOSITES = {"yes": "no", "no": "yes", "true": "false", "false": "true"}
# A minus sign is kept only if it is unambiguous: at the start of a word, never between two numbers ("3-5").
_MINUS_SIGN = re.compile(r"(?:\b(?:minus|negative)\s+|^\s*-\s*|(?<![\w.)])-\s*(?=[$€£¥]))[$€£¥]?\s*(?=\.?\d)")
_ACRONYM = re.compile(r"(?<!\w)(?<!\w\.)(?:[^\W\d_]\.)+[^\W\d_](?!\w)\.?")  # U.S., u.s.a.
_NON_ASCII = re.compile(r"[^\x00-\x7f]")
_THOUSANDS_NUMBER = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
# Separators of alternative answers; between two digits a slash is part of a number.
_ALTERNATIVE_SEPARATOR = re.compile(r"\bor\b|\||(?<!\d)/|/(?!\d)")
# Signs at the end belong to a word: C++, C#, A+, the grade A-, 18+.
_TOKEN = re.compile(
    r"(?<![\w.)])-?(?:\d+(?:\.\d+)?|\.\d+)(?:\+(?![\w+]))?|(?<!\w)[^\W\d]{1,2}-(?![\w-])"
    r"|\w+(?:'\w+)*(?:(?:\+{1,2}|#)(?![\w+#]))?"
)
_LIST_SEPARATOR = re.compile(r"[,;\n]|\band\b")
# Words that relate what is before to what is after them: `red, then blue` isn't `blue, then red`.
_ORDER_WORDS = frozenset({"then", "before", "after", "next", "finally", "later", "from", "to", "of", "than"})
_ORDER_WORDS |= {"above", "below", "behind", "under", "over"}
_MAX_ITEM_TOKENS = 3  # a text with longer parts is a sentence, no list
_TEXT_COMMAND = re.compile(r"\\(?:text(?:bf|it|rm|sf)?|math(?:bf|it|rm|sf)|mbox)\s*\{([^{}]*)\}")
_SQUAD_ARTICLE = re.compile(r"\b(a|an|the)\b")
_SQUAD_PUNCTUATION = str.maketrans("", "", string.punctuation)


class OpenAnswer(BaseAnswerType):
    """Open answers: how well the words of the final answer agree with those of the ground truth, in [0, 1].

    `f1_precision` is 2PR / (P + R) of the two multisets of tokens times their precision P, so that naming several
    candidates earns less than naming one of them: k words that hold the one right word score 2 / (k (k + 1)). If the
    ground truth is a list, an answer with any other word is worth half; if it relates what it names (`red, then blue`,
    `left of the dog`), only the longest common subsequence is shared. `exact` requires the same tokens in the same
    order. `f1` is the metric as published with SQuAD (Rajpurkar et al. 2016, arXiv 1606.05250), of the whole answer:
    lower case, no ASCII punctuation, no articles, 2PR / (P + R) of the words; signs, denials and lists of candidates
    don't matter to it. The rest is about the other two modes.

    The answer is the content of its box, what follows "the answer is", or all of it (`reader.find_answers`). Case and
    width are folded; punctuation and the articles a, an, the are dropped; digits, minus signs and decimal points stay
    (`-5`, `5` and `0.5` are three different tokens; `minus 5` is `-5` and `1,000` is `1000`), and so do signs at the
    end of a word (`A+`, `A-`, `C#`, `C++`). If the ground truth is one word with an opposite (yes and no, true and
    false), an answer that contains the opposite scores 0; so does an answer that denies something if the ground truth
    denies nothing, and the other way round. A missing answer, or one of articles alone, scores 0; if the ground truth
    itself is an article, such as the blood type `A`, articles are kept on both sides.

    Several answers separated by `or`, a slash or a bar score as the worst of them, unless the ground truth has such a
    separator.
    """

    names = ("open", "open_ended", "open-ended")
    expected = "a text"
    example = ("red", "red")

    def __init__(
        self,
        *,
        mode: Literal[
            "f1_precision", "f1", "exact"
        ] = "f1_precision",  # f1 = as in SQuAD, f1_precision = times precision
    ) -> None:
        self._mode = mode

    def __call__(self, episode: Episode) -> float:
        """Return the score of an episode."""
        ground_truth, answer = str(episode.task.ground_truth), episode.answer or ""
        if self._mode == "f1":
            return compute_squad_f1(answer, ground_truth)
        if _tokenize(clean_text(answer)) == _tokenize(ground_truth) != []:
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
        stance = re.match(r"(yes|no)[,.;:!] ", normalize_and_casefold(answer))  # `No, it isn't`
        if stance and expected == [stance[1]]:
            return float(stance[1] == "no" or not has_denial(normalize_text(answer)))
        if has_denial(normalize_text(answer)) != has_denial(normalize_text(ground_truth)):
            return 0.0
        candidates = [predicted]
        # Words of the ground truth alone hold no alternative, however they are separated (AC/DC).
        has_alternatives = _ALTERNATIVE_SEPARATOR.search(normalize_and_casefold(ground_truth))
        if Counter(predicted) - Counter(expected) and not has_alternatives:
            parts = _ALTERNATIVE_SEPARATOR.split(normalize_and_casefold(answer))
            candidates += filter(None, map(tokenize_without_articles, parts))
        value = min(_compute_value(candidate, expected) for candidate in candidates)
        items = [_tokenize(item) for item in _LIST_SEPARATOR.split(normalize_and_casefold(ground_truth))]
        is_list = len(items) > 1 and all(0 < len(item) <= _MAX_ITEM_TOKENS for item in items)
        return value / 2 if is_list and {*predicted} - {*expected, "and"} else value

    @classmethod
    def is_valid(cls, ground_truth: object) -> bool:
        """Return whether it is a text."""
        return isinstance(ground_truth, str)

    @classmethod
    def parse_ground_truth(cls, value: Any) -> str | None:
        """Return the text of a published answer."""
        return parse_text(value)


open_ = OpenAnswer


def compute_squad_f1(answer: str, ground_truth: str) -> float:
    """Return the F1 of the words of two texts, normalized as SQuAD's evaluation does; 0 if either has none.

    >>> compute_squad_f1("The red ball!", "a red ball"), compute_squad_f1("red, green, blue", "red, green")
    (1.0, 0.8)
    """
    predicted, expected = (
        Counter(_SQUAD_ARTICLE.sub(" ", text.lower().translate(_SQUAD_PUNCTUATION)).split())
        for text in (answer, ground_truth)
    )
    num_shared = (predicted & expected).total()
    return 2 * num_shared / (predicted.total() + expected.total()) if num_shared else 0.0


def _compute_value(predicted: Sequence[str], expected: Sequence[str]) -> float:
    """Return F1 times precision."""
    if _ORDER_WORDS.isdisjoint(expected):
        num_shared = (Counter(predicted) & Counter(expected)).total()
    else:
        num_shared = _count_common_subsequence(predicted, expected)
    return 2 * num_shared / (len(predicted) + len(expected)) * num_shared / len(predicted)


def _count_common_subsequence(first: Sequence[str], second: Sequence[str]) -> int:
    """Return the length of the longest common subsequence, with the bits of one integer as a row of its table."""
    # Hyyrö 2004: a zero bit at i means that the row grows by one at position i of `first`.
    positions: dict[str, int] = {}
    for i, token in enumerate(first):
        positions[token] = positions.get(token, 0) | 1 << i
    full = (1 << len(first)) - 1
    row = full
    for token in second:
        matched = row & positions.get(token, 0)
        row = ((row + matched) | (row - matched)) & full
    return len(first) - row.bit_count()


def _tokenize(text: str) -> list[str]:
    plain = _MINUS_SIGN.sub("-", normalize_and_casefold(_TEXT_COMMAND.sub(r"\1", text)))
    plain = _THOUSANDS_NUMBER.sub(lambda match: match[0].replace(",", ""), plain)
    plain = _NON_ASCII.sub(_escape_combining_mark, _ACRONYM.sub(lambda match: match[0].replace(".", ""), plain))
    return [f"0{token}" if token[0] == "." else token.replace("-.", "-0.") for token in _TOKEN.findall(plain)]


def _escape_combining_mark(character: re.Match[str]) -> str:
    r"""Return a combining mark (the vowels of Hindi and Thai) as a part of the word, which `\w` doesn't match."""
    return f"_{ord(character[0]):x}" if unicodedata.category(character[0]).startswith("M") else character[0]
