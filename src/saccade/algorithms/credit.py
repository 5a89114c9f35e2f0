"""Anchors at structural tokens (Exploration Anchoring, ParaVT, arXiv 2605.20342).

Where a score has a part called `anchor`, that part is not in the score's value: it is credited apart, to the tokens
that make up a reply's structure, while the value is credited to everything that was sampled.

    tokens    <think>   It    was red  </think>   <answer>   red   </answer>
    value        A       A     A   A      A           A       A        A
    anchor                                B           B                B      (`<think>` may be forced: it is no anchor)
"""

import re
from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from saccade.types import Group, Score

PART = "anchor"  # of a score
TAGS = ("</think>", "<tool_call>", "</tool_call>", "<answer>", "</answer>")
_TAG = re.compile("|".join(map(re.escape, TAGS)))


def worth(score: Score) -> float:
    """The whole of a reward: the score's value, and the anchor where that is credited apart."""
    return score.value + score.parts.get(PART, 0.0)


def rewards(group: Group) -> NDArray[np.float64]:
    """The whole reward of each member, [G]."""
    return np.array([worth(member.score) for member in group.members], dtype=np.float64)


def structural(tokens: Sequence[int], decode: Callable[[Sequence[int]], str]) -> tuple[bool, ...]:
    """Which of one turn's sampled tokens are, or are a part of, one of the `TAGS`.

    A tag may be one token or be spelled by several; one that also holds other text counts as a whole. `decode` turns
    ids to text, as a renderer does.

    >>> spelled = {1: "Red", 2: "</", 3: "think", 4: ">", 5: "<answer>", 6: "."}
    >>> structural((1, 2, 3, 4, 6, 5, 1), lambda ids: "".join(spelled[i] for i in ids))
    (False, True, True, True, False, True, False)
    """
    # One by one: tags are ASCII, and only characters beyond it are ever shared between tokens.
    spelled = {token: decode((token,)) for token in set(tokens)}
    ends = list(accumulate(len(spelled[token]) for token in tokens))
    text = "".join(spelled[token] for token in tokens)
    inside = np.zeros(len(text) + 1, dtype=np.int64)  # how many characters of tags stand before each place
    for tag in _TAG.finditer(text):
        inside[tag.start() + 1 : tag.end() + 1] = 1
    before = np.cumsum(inside)
    starts = [0, *ends][:-1]
    return tuple(bool(before[end] > before[start]) for start, end in zip(starts, ends, strict=True))
