"""Credits: which sampled tokens of a reply receive the reward of a span.

A credit of a score is not in its value: the value is credited to every sampled token, a credit to the tokens of its
span. The structural tags carry the anchor of Exploration Anchoring (ParaVT, arXiv 2605.20342):

    tokens    <think>   It    was red  </think>   <answer>   red   </answer>
    value        A       A     A   A      A           A       A        A
    tags                                  B           B                B      (`<think>` may be prefilled: not a tag)
"""

import re
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

import numpy as np

from saccade.types import Reply, Span

Decode = Callable[[Sequence[int]], str]
STRUCTURAL_TAGS = ("</think>", "<tool_call>", "</tool_call>", "<answer>", "</answer>")
_TAG_PATTERN = re.compile("|".join(map(re.escape, STRUCTURAL_TAGS)))


def build_span_token_mask(
    span: Span, tokens: Sequence[int], decode: Decode, *, turn: int, reply: Reply | None
) -> tuple[bool, ...]:
    """Return, for each sampled token of a reply, whether it overlaps the span.

    `turn` is the index of the reply; `reply`, its blocks, is needed for a call (None: it has no such call). A call
    includes its tags. `decode` maps ids to text, like a renderer's.
    """
    if span.kind == "tags":
        return build_structural_token_mask(tokens, decode)
    if span.turn != turn:
        return (False,) * len(tokens)
    if span.kind == "turn":
        return (True,) * len(tokens)
    return _mask_overlapping(tokens, decode, lambda text: _find_call(text, reply, span.call))


def build_structural_token_mask(tokens: Sequence[int], decode: Decode) -> tuple[bool, ...]:
    """Return, for each sampled token of one reply, whether it overlaps one of `STRUCTURAL_TAGS`.

    A tag may span several tokens; a token that also holds other text counts as structural.

    >>> vocabulary = {1: "Red", 2: "</", 3: "think", 4: ">", 5: "<answer>", 6: "."}
    >>> build_structural_token_mask((1, 2, 3, 4, 6, 5, 1), lambda ids: "".join(vocabulary[i] for i in ids))
    (False, True, True, True, False, True, False)
    """
    return _mask_overlapping(tokens, decode, lambda text: (tag.span() for tag in _TAG_PATTERN.finditer(text)))


def _find_call(text: str, reply: Reply | None, call: int | None) -> Iterable[tuple[int, int]]:
    position, index = 0, -1
    for block in reply.blocks if reply else ():
        # Tokens are decoded one by one, so a character that is split between tokens reads as replacement characters.
        body = re.sub(r"[^\x00-\x7f]+", "\x00", block.body.strip())
        pattern = re.escape(body).replace("\x00", r"[^\x00-\x7f]+")
        match = re.compile(rf"(?:<\w+>\s*)?{pattern}(?:\s*</\w+>)?").search(text, position) if body else None
        index += block.call is not None
        if block.call is not None and index == call:
            return [match.span()] if match else []
        position = match.end() if match else position
    return []


def _mask_overlapping(
    tokens: Sequence[int], decode: Decode, find_ranges: Callable[[str], Iterable[tuple[int, int]]]
) -> tuple[bool, ...]:
    # Tokens are decoded one by one: tags are ASCII, and only non-ASCII characters are split between tokens.
    token_text = {token: decode((token,)) for token in set(tokens)}
    ends = list(accumulate(len(token_text[token]) for token in tokens))
    text = "".join(token_text[token] for token in tokens)
    is_inside = np.zeros(len(text) + 1, dtype=np.int64)  # shifted by one for the cumulative sum
    for start, end in find_ranges(text):
        is_inside[start + 1 : end + 1] = 1
    num_before = np.cumsum(is_inside)
    starts = [0, *ends][:-1]
    return tuple(bool(num_before[end] > num_before[start]) for start, end in zip(starts, ends, strict=True))
