"""Train on no correct episode whose advantage is negative."""

from saccade.algorithms.group_advantages import is_correct_with_negative_advantage
from saccade.types import ScoredEpisode


def correct_negative(scored: ScoredEpisode, *, advantage: float) -> bool:
    """Return False for a correct episode with an advantage below 0 (PyVision-RL, arXiv 2602.20739)."""
    return not is_correct_with_negative_advantage(scored, advantage)
