"""What calls cost: to try whether a policy stops looking where looking has a price."""

from saccade.types import Episode, Task


def call_cost(episode: Episode, task: Task, *, price: float = 0.05) -> float:
    """Minus `price` for every call of the main agent that was run, whatever came of it.

    A call that was refused or could not be read costs nothing, nor do the calls of sub-agents.
    """
    # A price of 0 is no reward at all, and not minus nothing.
    return 0.0 - price * sum(result.executed for result in episode.results)
