"""Penalize tool calls, to test whether a policy stops looking when each look has a cost."""

from saccade.types import Episode


def tool_call_penalty(
    episode: Episode,
    *,
    penalty: float = 0.05,  # cost of an executed call
) -> float:
    """Return minus `penalty` for every call of the main agent that was executed, whatever its result.

    A call that was refused or failed to parse costs nothing, and neither do the calls of sub-agents.
    """
    # `0.0 - x` rather than `-x`: no calls give 0.0, not -0.0.
    return 0.0 - penalty * sum(result.was_executed for result in episode.results)
