"""Many rewards to one score: a value to train on, and every part by its name."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path

from saccade import plugins
from saccade.config import Term
from saccade.errors import ConfigError
from saccade.protocols import Reward
from saccade.types import Episode, Score, Task


def compose(terms: Mapping[str, Term]) -> Callable[[Episode, Task], Score]:
    """A function that scores an episode by weighted terms: value = sum of weight * part.

    Each name is a reward of the folder or the path of a file (`./mine.py` holds `mine`, and its part is called
    `mine`). The parts are unweighted. `compliance` is always among them and counts only where it is a term. A reward
    that takes `accuracy` is given the recipe's own accuracy term. Settings are checked now: ConfigError for an
    unknown name, setting or value, and for two terms of one name; later for a reward that is not a finite number.

    >>> from saccade.types import Block, BlockKind, End, Kind, Ledger, Reply, Turn
    >>> score = compose({"accuracy": Term(), "format": Term(weight=0.5)})
    >>> task = Task(id="w", question="?", media=(), kind=Kind.OPEN, gold="red")
    >>> answer = Block(kind=BlockKind.ANSWER, body="red", closed=True)
    >>> episode = Episode(task=task, agent="direct", ledger=Ledger(), end=End.ANSWERED,
    ...     turns=(Turn(reply=Reply(text="<answer>red</answer>", blocks=(answer,))),))
    >>> score(episode, task)
    Score(value=1.3, parts={'accuracy': 1.0, 'format': 0.6, 'compliance': 0.0})
    """
    names = {Path(name).stem if name.endswith(".py") else name: name for name in terms}
    if len(names) < len(terms):
        raise ConfigError(f"two of the reward terms {', '.join(terms)} have one name: rename a file")
    # correctness is decided once: a reward that builds on it can't use other settings than the accuracy term
    stated = names.get("accuracy")
    accuracy = plugins.bind("rewards", stated or "accuracy", terms[stated].settings if stated else {})
    weights = {part: terms[name].weight for part, name in names.items()}
    rewards: dict[str, Reward] = {
        part: plugins.bind("rewards", name, terms[name].settings, accuracy=accuracy) for part, name in names.items()
    }
    rewards.setdefault("compliance", plugins.bind("rewards", "compliance", {}))

    def score(episode: Episode, task: Task) -> Score:
        parts = {part: _finite(part, reward(episode, task), task) for part, reward in rewards.items()}
        return Score(value=sum(weight * parts[part] for part, weight in weights.items()), parts=parts)

    return score


def _finite(part: str, value: float, task: Task) -> float:
    if not math.isfinite(value):
        raise ConfigError(f"the reward {part!r} returned {value} for task {task.id}: it must return a finite number")
    return float(value)
