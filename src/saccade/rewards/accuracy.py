"""Score the correctness of the final answer, as the task's answer type defines it."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from saccade import plugins
from saccade.errors import ConfigError
from saccade.protocols import RewardResult
from saccade.rewards.answer_types.base import (
    FOLDER,
    find_plugin,
    list_answer_types,
    register_file,
    suggest_answer_type,
)
from saccade.rewards.compose import resolve_reward
from saccade.types import Episode


class Accuracy:
    """Score the final answer as its answer type defines it (`rewards/answer_types`), in [0, 1].

    `answer_types` holds settings of answer types by name, such as `{open: {mode: exact}}`. With `judge`,
    the settings of the reward of that name, an LLM scores the answers of the types in `judged` instead. Only
    `Episode.answer` is read; tool output is never graded.

    Raises ConfigError for invalid settings, and for the first math task if math-verify is not installed.
    """

    def __init__(
        self,
        *,
        # settings of answer types by name, such as {open: {mode: exact}}
        answer_types: Mapping[str, Mapping[str, Any]] | None = None,
        judge: Mapping[str, Any] | None = None,  # settings of the reward `judge`; null = no LLM scores answers
        judged: tuple[str, ...] = ("open",),  # answer types that the judge scores
    ) -> None:
        for name in (*(answer_types or {}), *judged):
            if plugins.get_file(name):
                register_file(name)
            elif name not in list_answer_types():
                message = f"there is no answer type {name!r}; {suggest_answer_type(name)}"
                raise ConfigError(message, key="answer_type", value=name)
        self._rewards_by_plugin: dict[str, Callable[[Episode], RewardResult | Awaitable[RewardResult]]] = {
            name: plugins.resolve(FOLDER, name, settings)() for name, settings in (answer_types or {}).items()
        }
        if judge is not None:
            self._rewards_by_plugin |= dict.fromkeys(judged, resolve_reward("judge", judge))

    def __call__(self, episode: Episode) -> RewardResult | Awaitable[RewardResult]:
        """Return the accuracy of an episode."""
        name = find_plugin(episode.task.answer_type)
        if name not in self._rewards_by_plugin:  # on first use, because math needs the optional package math-verify
            self._rewards_by_plugin[name] = plugins.resolve(FOLDER, name, {})()
        return self._rewards_by_plugin[name](episode)


accuracy = Accuracy
