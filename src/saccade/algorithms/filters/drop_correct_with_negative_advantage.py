"""Drop correct episodes with a negative advantage."""

from saccade.types import ScoredEpisode


def drop_correct_with_negative_advantage(scored: ScoredEpisode, *, advantage: float) -> bool:
    """Return False for a correct episode with an advantage below 0 (PyVision-RL, arXiv 2602.20739)."""
    return advantage >= 0 or not scored.score.is_correct
