"""Open answers: token F1, or equality, after a normalisation that keeps numbers what they are."""

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from typing import Literal

from saccade.rewards._text import folded
from saccade.types import Episode, Task

_ARTICLES = frozenset({"a", "an", "the"})
_OPPOSITE = {"yes": "no", "no": "yes", "true": "false", "false": "true"}
# A minus sign is kept where it can only be one: at the start of a word, never between two numbers ("3-5").
_NEGATIVE = re.compile(
    r"(?:\b(?:minus|negative)\s+|^\s*-\s*|(?<![\w.)])-\s*(?=[$€£¥]))[$€£¥]?\s*(?=\.?\d)",
)
_ACRONYM = re.compile(r"(?<!\w)(?:[^\W\d_]\.)+[^\W\d_](?!\w)\.?")  # U.S., u.s.a.
_BEYOND = re.compile(r"[^\x00-\x7f]")
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
# What leaves it to the reader which of several answers is meant; between two digits a stroke is a part of a number.
_OR = re.compile(r"\bor\b|\||(?<!\d)/|/(?!\d)")
_TOKEN = re.compile(r"(?<![\w.)])-?(?:\d+(?:\.\d+)?|\.\d+)|\w+(?:'\w+)*")


def open(episode: Episode, task: Task, *, mode: Literal["f1", "exact"] = "f1") -> float:
    """How well the final answer's words agree with the gold's, in [0, 1].

    `f1` is 2PR / (P + R) of the two multisets of tokens (SQuAD's measure); `exact` asks for the same tokens in the
    same order. Tokens are folded in case and width; punctuation and the articles a, an, the are dropped; digits,
    minus signs and decimal points stay (`-5`, `5` and `0.5` are three different tokens; `minus 5` is `-5` and `1,000`
    is `1000`). Of a gold of one word that has an opposite (yes and no, true and false) an answer that says that too is
    worth 0. No answer, or one of articles alone, earns 0; where the gold itself is only an article, as the blood
    type `A`, articles are kept on both sides.

    Several answers with `or`, a stroke or a bar between them, where the gold has none, are worth the worst of them.
    Side by side (`red blue`) they are words like any others, and F1 pays for each: where golds are single words,
    `exact` is the stricter measure.
    """
    gold = _tokens(str(task.gold))
    dropped = _ARTICLES if set(gold) - _ARTICLES else frozenset[str]()

    def words(text: str) -> list[str]:
        return [token for token in _tokens(text) if token not in dropped]

    wanted, answer = words(str(task.gold)), episode.answer or ""
    said = words(answer)
    if not said or not wanted:
        return 0.0
    if len(wanted) == 1 and _OPPOSITE.get(wanted[0]) in said:
        return 0.0
    if mode == "exact":
        return float(said == wanted)
    offered = [said]
    # Words of the gold alone offer nothing else, however they are divided (AC/DC).
    if Counter(said) - Counter(wanted) and not _OR.search(folded(str(task.gold))):
        offered += filter(None, map(words, _OR.split(folded(answer))))
    return min(_f1(each, wanted) for each in offered)


def _f1(said: Sequence[str], wanted: Sequence[str]) -> float:
    return 2 * (Counter(said) & Counter(wanted)).total() / (len(said) + len(wanted))


def _tokens(text: str) -> list[str]:
    plain = _THOUSANDS.sub(lambda match: match[0].replace(",", ""), _NEGATIVE.sub("-", folded(text)))
    plain = _BEYOND.sub(_spelled, _ACRONYM.sub(lambda match: match[0].replace(".", ""), plain))
    return [f"0{token}" if token[0] == "." else token.replace("-.", "-0.") for token in _TOKEN.findall(plain)]


def _spelled(character: re.Match[str]) -> str:
    r"""A mark that belongs to a letter (the vowels of Hindi and Thai) as part of the word, which `\w` says it isn't."""
    return f"_{ord(character[0]):x}" if unicodedata.category(character[0]).startswith("M") else character[0]
