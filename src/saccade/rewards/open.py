"""Open answers: token F1, or equality, after a normalisation that keeps numbers what they are."""

import re
import unicodedata
from collections import Counter
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
_TOKEN = re.compile(r"(?<![\w.)])-?(?:\d+(?:\.\d+)?|\.\d+)|\w+(?:'\w+)*")


def open(episode: Episode, task: Task, *, mode: Literal["f1", "exact"] = "f1") -> float:
    """How well the final answer's words agree with the gold's, in [0, 1].

    `f1` is 2PR / (P + R) of the two multisets of tokens (SQuAD's measure); `exact` asks for the same tokens in the
    same order. Tokens are folded in case and width; punctuation and the articles a, an, the are dropped; digits,
    minus signs and decimal points stay (`-5`, `5` and `0.5` are three different tokens; `minus 5` is `-5` and `1,000`
    is `1000`). Of a gold of one word that has an opposite (yes and no, true and false) an answer that says that too is
    worth 0. No answer, or one of articles alone, earns 0; where the gold itself is only an article, as the blood
    type `A`, articles are kept on both sides.
    """
    gold = _tokens(str(task.gold))
    dropped = _ARTICLES if set(gold) - _ARTICLES else frozenset[str]()
    wanted = [token for token in gold if token not in dropped]
    said = [token for token in _tokens(episode.answer or "") if token not in dropped]
    if not said or not wanted:
        return 0.0
    if len(wanted) == 1 and _OPPOSITE.get(wanted[0]) in said:
        return 0.0
    if mode == "exact":
        return float(said == wanted)
    return 2 * (Counter(said) & Counter(wanted)).total() / (len(said) + len(wanted))


def _tokens(text: str) -> list[str]:
    plain = _THOUSANDS.sub(lambda match: match[0].replace(",", ""), _NEGATIVE.sub("-", folded(text)))
    plain = _BEYOND.sub(_spelled, _ACRONYM.sub(lambda match: match[0].replace(".", ""), plain))
    return [f"0{token}" if token[0] == "." else token.replace("-.", "-0.") for token in _TOKEN.findall(plain)]


def _spelled(character: re.Match[str]) -> str:
    r"""A mark that belongs to a letter (the vowels of Hindi and Thai) as part of the word, which `\w` says it isn't."""
    return f"_{ord(character[0]):x}" if unicodedata.category(character[0]).startswith("M") else character[0]
