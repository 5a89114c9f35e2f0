"""Whether the final answer is right, judged by the kind of the task."""

import functools
from collections.abc import Awaitable, Mapping
from typing import Any, Literal

from saccade.errors import ConfigError
from saccade.protocols import Grade, Reward
from saccade.rewards._compose import bind
from saccade.rewards.box import Coordinates
from saccade.rewards.box import box as by_box
from saccade.rewards.choice import choice as by_choice
from saccade.rewards.grounding import grounding as by_grounding
from saccade.rewards.number import number as by_number
from saccade.rewards.open import open as by_open
from saccade.sections import NotNegative
from saccade.types import Episode, Kind, Task


class accuracy:
    """The reward choice, open, grounding, number, math or box, as the task's kind says; in [0, 1].

    `open` and `number` are the modes of those rewards, `tolerance` is that of exact numbers, `coordinates` those of
    boxes and points. `open: judge` asks the reward judge, whose settings stand in `judge`; those of math stand in
    `math`. Only `Episode.answer` is read: what tools printed is never graded. ConfigError for settings that can't be
    used, and for the first task of the kind math where math-verify isn't installed.
    """

    def __init__(
        self,
        *,
        open: Literal["f1", "exact", "judge"] = "f1",
        number: Literal["mra", "exact"] = "mra",
        tolerance: NotNegative = 0.0,
        coordinates: Coordinates = "auto",
        judge: Mapping[str, Any] | None = None,
        math: Mapping[str, Any] | None = None,
    ) -> None:
        if (open == "judge") != (judge is not None):
            raise ConfigError(
                "rewards/accuracy: `open: judge` and the judge's settings, `judge: {url, model}`, go together"
            )
        located = functools.partial(by_box, coordinates=coordinates)
        # rewards are called as functions: this file names them, so a new kind is a line here and a member of Kind
        self._by: dict[Kind, Reward] = {
            Kind.CHOICE: by_choice,
            Kind.OPEN: functools.partial(by_open, mode=open) if open != "judge" else bind("judge", judge or {}),
            Kind.GROUNDING: by_grounding,
            Kind.NUMBER: functools.partial(by_number, mode=number, tolerance=tolerance),
            Kind.BOX: located,
            Kind.POINT: located,
        }
        if math is not None:
            self._by[Kind.MATH] = bind("math", math)

    def __call__(self, episode: Episode, task: Task) -> Grade | Awaitable[Grade]:
        """The accuracy of an episode."""
        if task.kind is Kind.MATH and Kind.MATH not in self._by:
            self._by[Kind.MATH] = bind("math", {})  # not before it is wanted: it needs a package of its own
        return self._by[task.kind](episode, task)
