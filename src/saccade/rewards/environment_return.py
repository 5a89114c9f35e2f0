"""Reward what the environment itself rewarded: a game's score, an OpenEnv server's rewards."""

from saccade.types import Episode, EpisodeStatus, Ungraded

# The environment never received the last reply; if it gave no reward before, the return is 0.
_CUT_SHORT = (EpisodeStatus.LENGTH, EpisodeStatus.CONTEXT_FULL, EpisodeStatus.ENVIRONMENT_ERROR, EpisodeStatus.ABORTED)


def environment_return(episode: Episode) -> float | Ungraded:
    """Return the sum of the rewards that the environment gave the turns; Ungraded if it gave none."""
    rewards = [turn.reward for turn in episode.turns if turn.reward is not None]
    if not rewards and episode.status not in _CUT_SHORT:
        return Ungraded(reason=f"the environment {episode.environment} gave no reward")
    return sum(rewards, 0.0)
