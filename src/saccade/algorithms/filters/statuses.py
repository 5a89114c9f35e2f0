"""Keep episodes by how they ended."""

from saccade.types import EpisodeStatus, ScoredEpisode

_FAILURES = (EpisodeStatus.ENVIRONMENT_ERROR, EpisodeStatus.ABORTED, EpisodeStatus.LENGTH)


def statuses(
    scored: ScoredEpisode,
    *,
    drop: tuple[EpisodeStatus, ...] = _FAILURES,  # statuses whose episodes are dropped
) -> bool:
    """Return whether the episode ended with none of the statuses to drop."""
    return scored.episode.status not in drop
