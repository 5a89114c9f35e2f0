"""Format compliance, the metric: one fixed definition for every recipe."""

from saccade.rewards._grammar import compliant_turns
from saccade.types import Episode, Task


def compliance(episode: Episode, task: Task) -> float:
    """1.0 if every turn of the main agent is well formed, else 0.0; an episode without a turn is not.

    Well formed is exactly one closed think (opened by the model or by the forced prefix), then either one or more
    closed calls that parsed and are in the trained form, or one closed non-blank answer; only blank text besides. A
    think may quote tags, as long as they open and close; an answer holds none; a call is data, and may hold any.
    """
    turns = compliant_turns(episode)
    return float(bool(turns) and all(turns))
