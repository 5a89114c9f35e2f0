"""Reward exploration: an episode that does something else than the others of its group."""

from typing import Literal

from saccade.types import Group
from saccade.utils.hashing import compute_digest


def diversity(
    group: Group,
    *,
    of: Literal["calls", "answer"] = "calls",  # what is compared: calls (names and arguments in order) or the answer
    only_correct: bool = False,  # an episode that is not correct gets 0
) -> list[float]:
    """Return for each episode the fraction of the group's other episodes whose calls (or answer) differ from its own.

    Calls are compared by name and arguments, in order. With `only_correct` an episode that is not correct gets 0. An
    episode alone in its group gets 0.
    """
    actions = [
        (scored.episode.answer or "").casefold()
        if of == "answer"
        else compute_digest([[call.name, call.arguments] for turn in scored.episode.turns for call in turn.reply.calls])
        for scored in group.scored_episodes
    ]
    return [
        sum(other != own for other in actions) / max(1, len(actions) - 1)
        if scored.score.is_correct or not only_correct
        else 0.0
        for scored, own in zip(group.scored_episodes, actions, strict=True)
    ]
