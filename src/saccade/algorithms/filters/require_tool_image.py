"""Keep episodes in which a tool showed an image."""

from saccade.types import ScoredEpisode


def require_tool_image(scored: ScoredEpisode) -> bool:
    """Return whether a tool returned an image, to the model or to a sub-agent (PyVision-RL, arXiv 2602.20739)."""
    episode = scored.episode
    was_shown = any(result.images for result in episode.results)
    return was_shown or any(child.ledger.images() for child in episode.children)
