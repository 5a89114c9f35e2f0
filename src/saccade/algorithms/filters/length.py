"""Keep episodes whose conversations are short enough."""

from saccade.config.schema import PositiveInt
from saccade.types import ScoredEpisode


def length(
    scored: ScoredEpisode,
    *,
    max_tokens: PositiveInt,  # longest conversation, expanded tokens
) -> bool:
    """Return whether no conversation, sub-agents' included, has more than `max_tokens` expanded tokens."""
    return all(len(conversation.ledger) <= max_tokens for conversation in scored.episode.walk())
