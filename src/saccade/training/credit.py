"""From scored groups to samples: which conversations are trained, and the tokens their advantage lies on."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from saccade.types import Episode, Group, Sample


def samples_of(
    groups: Sequence[Group], credits: Sequence[NDArray[np.float64]], children: Literal["none", "shared"]
) -> list[Sample]:
    """One sample per conversation that is trained; `credits` holds one array [G] of advantages per group.

    Each episode's own conversation is trained, and with `children="shared"` its sub-agents' too, with the advantage of
    their parent. It lies on every token that was sampled, and on nothing else.
    """
    return [
        sample_of(conversation, float(value))
        for group, values in zip(groups, credits, strict=True)
        for member, value in zip(group.members, values, strict=True)
        for conversation in _trained(member.episode, children)
    ]


def _trained(episode: Episode, children: str) -> list[Episode]:
    conversations = list(episode.walk()) if children == "shared" else [episode]
    return [conversation for conversation in conversations if conversation.ledger.sampled_tokens()]


def sample_of(episode: Episode, advantage: float) -> Sample:
    """An episode's own conversation with one advantage on every sampled token."""
    mask = episode.ledger.mask()
    return Sample(ledger=episode.ledger, advantages=tuple(advantage if sampled else 0.0 for sampled in mask))
