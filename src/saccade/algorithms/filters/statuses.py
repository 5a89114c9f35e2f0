"""Keep episodes by how they ended."""

from saccade.types import EpisodeStatus, ScoredEpisode

# Failures that aren't the model's doing, and replies cut at `sampling.max_tokens`, as published by PyVision-RL.
_FAILED_OR_TRUNCATED = (EpisodeStatus.ENVIRONMENT_ERROR, EpisodeStatus.ABORTED, EpisodeStatus.LENGTH)


def statuses(
    scored: ScoredEpisode,
    *,
    drop: tuple[EpisodeStatus, ...] = _FAILED_OR_TRUNCATED,  # statuses whose episodes are dropped
) -> bool:
    """Return whether the episode ended with none of the statuses to drop.

    By default episodes whose reply was truncated are dropped, too: with `drop: [environment_error, aborted]` they count
    as the model's mistakes.
    """
    return scored.episode.status not in drop
