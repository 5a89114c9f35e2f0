"""Score the correctness of the final answer, as the task's answer type defines it."""

from collections.abc import Awaitable, Mapping
from dataclasses import replace
from typing import Any

from saccade import plugins
from saccade.config.schema import Fraction
from saccade.errors import ConfigError
from saccade.protocols import RewardResult
from saccade.rewards.answer_types.base import (
    FOLDER,
    BaseAnswerType,
    find_plugin,
    list_answer_types,
    quote_answer,
    register_file,
    suggest_answer_type,
)
from saccade.rewards.compose import resolve_reward
from saccade.types import AnswerType, Episode, Score, Ungraded
from saccade.utils.async_utils import maybe_await

EQUALITY_RULES = {AnswerType.CHOICE, AnswerType.MATH}  # types whose value of 1.0 means an equal answer


class Accuracy:
    """Score the final answer as its answer type defines it (`rewards/answer_types`), in [0, 1].

    `answer_types` holds settings of answer types by name, such as `{open: {mode: exact}}`. With `judge`,
    the settings of the reward of that name, an LLM scores the answers of the types in `judged` instead; with
    `skip_judge_if_equal`, except for those that a rule finds equal to the ground truth: the same words in the same
    order, the same option, an equal formula. With `threshold` every value becomes 0 or 1. Only `Episode.answer` is
    read; tool output is never graded.

    Raises ConfigError for invalid settings, and for the first math task if math-verify is not installed.
    """

    def __init__(
        self,
        *,
        # settings of answer types by name, such as {open: {mode: exact}}
        answer_types: Mapping[str, Mapping[str, Any]] | None = None,
        judge: Mapping[str, Any] | None = None,  # settings of the reward `judge`; null = no LLM scores answers
        judged: tuple[str, ...] = ("open",),  # answer types that the judge scores
        skip_judge_if_equal: bool = False,  # score 1 without a request where a rule finds the answer equal
        threshold: Fraction | None = None,  # an accuracy of this or more counts 1, any other 0; null = fractions
    ) -> None:
        for name in (*(answer_types or {}), *judged):
            if plugins.get_file(name):
                register_file(name)
            elif name not in list_answer_types():
                message = f"there is no answer type {name!r}; {suggest_answer_type(name)}"
                raise ConfigError(message, key="answer_type", value=name)
        self._rewards_by_plugin: dict[str, BaseAnswerType] = {
            name: plugins.resolve(FOLDER, name, settings)() for name, settings in (answer_types or {}).items()
        }
        self._threshold, self._skip_judge_if_equal = threshold, skip_judge_if_equal
        if judge is not None:
            self._judge = resolve_reward("judge", judge)
        self._judged = frozenset(judged if judge is not None else ())
        self._equality = plugins.resolve(FOLDER, find_plugin(AnswerType.OPEN), {"mode": "exact"})()

    def __call__(self, episode: Episode) -> RewardResult | Awaitable[RewardResult]:
        """Return the accuracy of an episode."""
        name = find_plugin(episode.task.answer_type)
        result = self._judge_answer(name, episode) if name in self._judged else self._get_rule(name)(episode)
        if isinstance(result, Awaitable):
            return self._await_grade(name, episode, result)
        return self._explain(name, episode, result)

    async def _await_grade(self, name: str, episode: Episode, result: Awaitable[RewardResult]) -> RewardResult:
        return self._explain(name, episode, await result)

    def _explain(self, name: str, episode: Episode, grade: RewardResult) -> RewardResult:
        """Add the reason of a grade, and apply the threshold."""
        if isinstance(grade, Ungraded):
            return grade
        score = grade if isinstance(grade, Score) else Score(value=float(grade))
        reason = score.reason or self._get_rule(name).explain(episode)
        if self._threshold is None:
            return replace(score, reason=reason)
        comparison = f"{score.value:.3g} {'reaches' if score.value >= self._threshold else 'is below'} the threshold"
        return replace(
            score,
            value=float(score.value >= self._threshold),
            reason=f"{reason}; {comparison} {self._threshold:g}",
        )

    async def _judge_answer(self, name: str, episode: Episode) -> RewardResult:
        """Return the judge's verdict, unless it isn't needed."""
        if self._skip_judge_if_equal and await self._is_equal(name, episode):
            return Score(value=1.0, reason=f"{quote_answer(episode)} equals the ground truth, so no judge was needed")
        return await maybe_await(self._judge(episode))

    def _get_rule(self, name: str) -> BaseAnswerType:
        if name not in self._rewards_by_plugin:  # on first use, because math needs the optional package math-verify
            self._rewards_by_plugin[name] = plugins.resolve(FOLDER, name, {})()
        return self._rewards_by_plugin[name]

    async def _is_equal(self, name: str, episode: Episode) -> bool:
        """Return whether a rule that tolerates nothing finds the answer equal to the ground truth."""
        # A fraction of words, or a number within a tolerance, may score 1 without being equal.
        rule = self._get_rule(name) if episode.task.answer_type in EQUALITY_RULES else self._equality
        return await maybe_await(rule(episode)) == 1.0


accuracy = Accuracy
