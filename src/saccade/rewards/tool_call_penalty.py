"""Penalize tool calls, to test whether a policy stops looking when each look has a cost."""

from saccade.types import Episode, Score


def tool_call_penalty(
    episode: Episode,
    *,
    penalty: float = 0.05,  # cost of an executed call
) -> Score:
    """Return minus `penalty` for each executed call of the main agent; refused and malformed calls cost nothing."""
    num_calls = sum(result.was_executed for result in episode.results)
    # `0.0 - x` rather than `-x`: no calls give 0.0, not -0.0.
    return Score(value=0.0 - penalty * num_calls, reason=f"{num_calls} executed calls")
