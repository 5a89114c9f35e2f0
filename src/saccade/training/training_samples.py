"""From scored groups to samples: which conversations are trained, and the tokens their advantage lies on."""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from saccade.algorithms.anchoring import structural
from saccade.types import Episode, Group, Sample, Scored

Decode = Callable[[Sequence[int]], str]
Credits = Sequence[NDArray[np.float64]]  # one array [G] of advantages per group


def samples_of(
    groups: Sequence[Group],
    credits: Credits,
    children: Literal["none", "shared"],
    *,
    anchors: Credits | None = None,
    decode: Decode | None = None,
    leave_out: Callable[[Scored, float], bool] = lambda member, advantage: False,
) -> list[Sample]:
    """One sample per conversation that is trained.

    Each episode's own conversation is trained, and with `children="shared"` its sub-agents' too, with the advantage of
    their parent. `credits` lie on every token that was sampled, `anchors` on top of them on structural tokens (see
    `algorithms.anchoring`; `decode` tells them), and nothing lies on anything else. Members of which `leave_out(member,
    advantage of its structural tokens)` is true are not trained.
    """
    anchors = [np.zeros_like(values) for values in credits] if anchors is None else anchors
    return [
        sample_of(conversation, value, anchor=anchor, decode=decode)
        for group, values, tops in zip(groups, credits, anchors, strict=True)
        for member, value, anchor in zip(group.members, _plain(values), _plain(tops), strict=True)
        if not leave_out(member, value + anchor)
        for conversation in _trained(member.episode, children)
    ]


def _plain(values: NDArray[np.float64]) -> list[float]:
    return [float(value) for value in values]


def _trained(episode: Episode, children: str) -> list[Episode]:
    conversations = list(episode.walk()) if children == "shared" else [episode]
    return [conversation for conversation in conversations if conversation.ledger.sampled_tokens()]


def sample_of(episode: Episode, advantage: float, *, anchor: float = 0.0, decode: Decode | None = None) -> Sample:
    """An episode's own conversation: `advantage` on every sampled token, plus `anchor` on structural ones.

    ValueError for an anchor without a `decode` that tells which those are.
    """
    if anchor and decode is None:
        raise ValueError("an anchor needs to know how tokens are spelled")
    return Sample(ledger=episode.ledger, advantages=tuple(_laid(episode, advantage, anchor, decode)))


def _laid(episode: Episode, advantage: float, anchor: float, decode: Decode | None) -> Iterator[float]:
    # A reply over new weights has a segment per version; its tags are those of the whole reply.
    for sampled, run in groupby(episode.ledger.segments, key=lambda segment: segment.sampled):
        tokens = [token for segment in run for token in segment.expanded()]
        if not sampled:
            yield from (0.0 for _ in tokens)
        elif anchor and decode is not None:
            yield from (advantage + anchor * marked for marked in structural(tuple(tokens), decode))
        else:
            yield from (advantage for _ in tokens)
