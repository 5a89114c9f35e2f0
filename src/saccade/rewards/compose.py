"""Many rewards to one score: a value to train on, and every part by its name."""

import inspect
import math
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

from saccade import plugins
from saccade.config import Term
from saccade.errors import ConfigError, boundary
from saccade.protocols import Grade, Settled
from saccade.types import Episode, Score, Task, Ungraded
from saccade.waiting import settled


def compose(terms: Mapping[str, Term]) -> Callable[[Episode, Task], Coroutine[Any, Any, Settled]]:
    """A function that scores an episode by weighted terms: value = sum of weight * part.

    Each name is a reward of the folder or the path of a file (`./mine.py` holds `mine`, and its part is called
    `mine`). The parts are unweighted. `compliance` is always among them and counts only where it is a term. A reward
    that takes `accuracy` is given what the recipe's own accuracy term said. Where one reward can't tell, there is no
    score: the first `Ungraded` is returned.

    A reward that returns a `Score` has parts that are credited apart: they are NOT in the value, and each is kept under
    its own name, times the reward's weight. `format` with `anchor_credit: tokens` names such a part `anchor`: it is
    weight * lam * anchor, for whoever gives credit to lay on structural tokens alone; without it there is no such part.

    Settings are checked now: ConfigError for an unknown name, setting or value, and for two terms of one name; later
    for a reward that is not a finite number, or that fails.

    >>> import asyncio
    >>> from saccade.types import Block, BlockKind, End, Kind, Ledger, Reply, Turn
    >>> score = compose({"accuracy": Term(), "format": Term(weight=0.5)})
    >>> task = Task(id="w", question="?", media=(), kind=Kind.OPEN, gold="red")
    >>> answer = Block(kind=BlockKind.ANSWER, body="red", closed=True)
    >>> episode = Episode(task=task, agent="direct", ledger=Ledger(), end=End.ANSWERED,
    ...     turns=(Turn(reply=Reply(text="<answer>red</answer>", blocks=(answer,))),))
    >>> asyncio.run(score(episode, task))
    Score(value=1.3, parts={'accuracy': 1.0, 'format': 0.6, 'compliance': 0.0})
    """
    names = {Path(name).stem if name.endswith(".py") else name: name for name in terms}
    if len(names) < len(terms):
        raise ConfigError(f"two of the reward terms {', '.join(terms)} have one name: rename a file")
    weights = {part: terms[name].weight for part, name in names.items()}
    rewards = {part: bind(name, terms[name].settings) for part, name in names.items()}
    rewards.setdefault("compliance", bind("compliance", {}))
    waiting = {part for part, reward in rewards.items() if "accuracy" in inspect.signature(reward).parameters}
    # correctness is decided once, and first: a reward that builds on it can't use another measure than the recipe's
    accuracy = rewards.get("accuracy") or (bind("accuracy", {}) if waiting else None)

    async def score(episode: Episode, task: Task) -> Settled:
        grades: dict[str, Score] = {}
        right = Score(value=0.0, parts={}) if accuracy is None else await _graded("accuracy", accuracy, episode, task)
        if isinstance(right, Ungraded):
            return right
        for part, reward in rewards.items():
            given = {"accuracy": right.value} if part in waiting else {}
            grade = right if part == "accuracy" else await _graded(part, reward, episode, task, **given)
            if isinstance(grade, Ungraded):
                return grade
            grades[part] = grade
        parts = {part: grade.value for part, grade in grades.items()}
        for part, grade in grades.items():
            if clash := sorted(parts.keys() & grade.parts.keys()):
                raise ConfigError(f"the reward {part!r} calls a part {clash[0]!r}, as another reward does: rename one")
            parts |= {name: weights.get(part, 0.0) * amount for name, amount in grade.parts.items()}
        return Score(value=sum(weight * parts[part] for part, weight in weights.items()), parts=parts)

    return score


def bind(name: str, settings: Mapping[str, Any]) -> Callable[..., Any]:
    """A reward with its settings; of a class, an instance. Raises ConfigError for what can't be used."""
    bound = plugins.bind("rewards", name, settings)
    return bound() if inspect.isclass(bound.func) else bound


async def _graded(
    part: str, reward: Callable[..., Any], episode: Episode, task: Task, **given: float
) -> Score | Ungraded:
    with boundary(ConfigError, f"the reward {part!r} failed on task {task.id}"):
        grade: Grade = await settled(reward(episode, task, **given))
        if isinstance(grade, Ungraded):
            return grade
        found = grade if isinstance(grade, Score) else Score(value=float(grade), parts={})
    for name, value in {**found.parts, part: found.value}.items():
        if not math.isfinite(value):
            raise ConfigError(f"the reward {name!r} returned {value} for task {task.id}: it must be a finite number")
    return found
