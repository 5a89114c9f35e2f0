"""Penalize tool calls, to test whether a policy stops looking when each look has a cost."""

from saccade.types import Episode


def tool_call_penalty(
    episode: Episode,
    *,
    penalty: float = 0.05,  # cost of an executed call
) -> float:
    """Return minus `penalty` for each executed call of the main agent; refused and malformed calls cost nothing."""
    # `0.0 - x` rather than `-x`: no calls give 0.0, not -0.0.
    return 0.0 - penalty * sum(result.was_executed for result in episode.results)
