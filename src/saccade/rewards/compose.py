"""Combine rewards into one score: a value to train on, every part by name, correctness, and credits.

episode ──terms on episodes──> Score ─┐
episode ──terms on episodes──> Score ─┴─ Group ──terms on groups──> one more part per score
"""

import inspect
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from saccade import plugins
from saccade.config.schema import RewardTerm
from saccade.errors import ConfigError, convert_errors
from saccade.protocols import GroupRewardResult, RewardResult, ScoreFn, ScoreResult
from saccade.types import Episode, Group, Score, ScoredEpisode, Ungraded, UngradedEpisode
from saccade.utils.async_utils import gather_or_cancel, maybe_await


def compose_rewards(terms: Mapping[str, RewardTerm]) -> ScoreFn:
    """Return a function that scores the episodes of a task by weighted terms: value = sum of weight * part.

    Each name is a reward plugin or the path of a file (`./mine.py` defines `mine`, and its part is called `mine`).
    Parts are unweighted; `reasons` has the reasons that rewards gave. `format_compliance` is always among the parts and
    adds to the value only if it is a term. The value of the term with `is_accuracy: true` is the score's `correct`, and
    rewards with a parameter `correct` receive it. The credits of a reward are NOT in the value; they are multiplied by
    its weight. Terms whose first parameter is `group` run once all episodes have the other terms' scores. If a reward
    returns `Ungraded`, so does the function.

    Raises ConfigError now for an unknown name, setting or value, for two terms with the same name and for correctness
    that is needed and not marked, or marked twice; the returned function raises it if a reward fails or returns a value
    that is not finite.

    >>> import asyncio
    >>> from saccade.types import AnswerType, Block, BlockKind, EpisodeStatus, Ledger, Reply, Task, Turn
    >>> score = compose_rewards({"accuracy": RewardTerm(is_accuracy=True), "format_reward": RewardTerm(weight=0.5)})
    >>> task = Task(id="w", question="?", media=(), answer_type=AnswerType.OPEN, ground_truth="red")
    >>> answer = Block(kind=BlockKind.ANSWER, body="red", is_closed=True)
    >>> episode = Episode(task=task, environment="direct", ledger=Ledger(), status=EpisodeStatus.ANSWERED,
    ...     turns=(Turn(reply=Reply(text="<answer>red</answer>", blocks=(answer,))),))
    >>> [result] = asyncio.run(score([episode]))
    >>> result.value, result.correct, dict(result.parts)
    (1.3, 1.0, {'accuracy': 1.0, 'format_reward': 0.6, 'format_compliance': 0.0})
    """
    names = {plugins.get_object_name(name): name for name in terms}
    if len(names) < len(terms):
        message = f"two of the reward terms {', '.join(terms)} have the same name; rename a file"
        raise ConfigError(message, key="rewards", value=tuple(terms))
    weights = {part: terms[name].weight for part, name in names.items()}
    rewards = {part: resolve_reward(name, terms[name].settings) for part, name in names.items()}
    rewards.setdefault("format_compliance", resolve_reward("format_compliance", {}))
    group_rewards = {part: rewards.pop(part) for part in list(rewards) if _is_group_reward(rewards[part])}
    needs_correct = {part for part, reward in rewards.items() if "correct" in inspect.signature(reward).parameters}
    marked = [part for part in weights if terms[names[part]].is_accuracy]
    if len(marked) > 1:
        both = tuple(names[part] for part in marked)
        message = f"the reward terms {' and '.join(both)} are both marked `is_accuracy: true`; mark one"
        raise ConfigError(message, key="rewards", value=both)
    correct = marked[0] if marked else None
    if correct in needs_correct:
        raise ConfigError(
            f"the reward term {names[correct]} is marked `is_accuracy: true`, and reads the correctness that another "
            "term decides; mark that one, as in `accuracy: {is_accuracy: true}`",
            key=f"rewards.{names[correct]}.is_accuracy",
            value=True,
        )
    if correct in group_rewards or (needs_correct and correct is None):
        raise ConfigError(
            f"{', '.join(sorted(needs_correct)) or 'rewards'}: no reward term that scores single episodes is marked as "
            "correctness; mark one, as in `accuracy: {is_accuracy: true}`",
            key="rewards",
            value=correct,
        )

    async def score_episode(episode: Episode) -> ScoreResult:
        grades: dict[str, Score] = {}
        for part in sorted(rewards, key=lambda part: part != correct):  # first, so that the others can receive it
            extra = {"correct": grades[correct].value} if part in needs_correct and correct else {}
            grade = await _run_reward(part, rewards[part], episode, **extra)
            if isinstance(grade, Ungraded):
                return grade
            grades[part] = grade
        parts = {part: grades[part].value for part in rewards}
        for part, grade in grades.items():
            parts |= {f"{part}/{name}": amount for name, amount in grade.parts.items()}
        reasons = {part: grade.reason for part, grade in grades.items() if grade.reason}
        for part, grade in grades.items():
            reasons |= {f"{part}/{name}": reason for name, reason in grade.reasons.items()}
        return Score(
            value=sum(weight * parts[part] for part, weight in weights.items() if part in rewards),
            parts=parts,
            correct=grades[correct].value if correct else None,
            credits=tuple(
                replace(credit, value=weights.get(part, 0.0) * credit.value)
                for part, grade in grades.items()
                for credit in grade.credits
            ),
            reasons=reasons,
        )

    async def score_group(
        episodes: Sequence[Episode], graded: Sequence[ScoreResult] | None = None
    ) -> Sequence[ScoreResult]:
        results = await score_each(score_episode)(episodes, graded)
        group = build_group(episodes, results)
        scores = [scored.score for scored in group.scored_episodes]
        for part, reward in group_rewards.items() if scores else ():
            values = await _run_group_reward(part, reward, group)
            if isinstance(values, Ungraded):
                return [values if isinstance(result, Score) else result for result in results]
            scores = [
                replace(score, value=score.value + weights[part] * value, parts={**score.parts, part: value})
                for score, value in zip(scores, values, strict=True)
            ]
        rest = iter(scores)
        return [next(rest) if isinstance(result, Score) else result for result in results]

    return score_group if group_rewards else score_each(score_episode)


def score_each(score_episode: Callable[[Episode], ScoreResult | Awaitable[ScoreResult]]) -> ScoreFn:
    """Return a function that scores each episode on its own, all of them concurrently."""

    async def score_all(
        episodes: Sequence[Episode], graded: Sequence[ScoreResult] | None = None
    ) -> Sequence[ScoreResult]:
        if graded is not None:
            return graded

        async def score(episode: Episode) -> ScoreResult:
            return await maybe_await(score_episode(episode))

        return await gather_or_cancel([score(episode) for episode in episodes])

    return score_all


def build_group(episodes: Sequence[Episode], results: Sequence[ScoreResult]) -> Group:
    """Return the episodes of one task as a group: those with a score, and those without one."""
    pairs = list(zip(episodes, results, strict=True))
    return Group(
        task=episodes[0].task,
        scored_episodes=tuple(
            ScoredEpisode(episode=episode, score=result) for episode, result in pairs if isinstance(result, Score)
        ),
        ungraded=tuple(
            UngradedEpisode(episode=episode, group_index=index, reason=result.reason)
            for index, (episode, result) in enumerate(pairs)
            if isinstance(result, Ungraded)
        ),
    )


def select_episode_rewards(terms: Mapping[str, RewardTerm]) -> dict[str, RewardTerm]:
    """Return the terms that score single episodes. Raises ConfigError for a bad name or setting."""
    return {name: term for name, term in terms.items() if not _is_group_reward(resolve_reward(name, term.settings))}


def _is_group_reward(reward: Callable[..., Any]) -> bool:
    return list(inspect.signature(reward).parameters)[:1] == ["group"]


def resolve_reward(name: str, settings: Mapping[str, Any]) -> Callable[..., Any]:
    """Return a reward with its settings; for a class, an instance. Raises ConfigError for a bad name or setting."""
    bound = plugins.resolve("rewards", name, settings)
    if not inspect.isclass(bound.func):
        return bound
    with convert_errors(ConfigError, f"the reward {name!r} can't be made", key=f"rewards.{name}"):
        return bound()


async def _run_reward(part: str, reward: Callable[..., Any], episode: Episode, **extra: float) -> Score | Ungraded:
    task = episode.task
    with convert_errors(
        ConfigError, f"the reward {part!r} failed on task {task.id}", key=f"rewards.{part}", value=task.id
    ):
        grade: RewardResult = await maybe_await(reward(episode, **extra))
        if isinstance(grade, Ungraded):
            return grade
        score = grade if isinstance(grade, Score) else Score(value=float(grade))
    _require_finite(part, task.id, [score.value, *score.parts.values(), *(credit.value for credit in score.credits)])
    for span in (credit.span for credit in score.credits):
        has_turn = span.turn is not None and 0 <= span.turn < len(episode.turns)
        calls = episode.turns[span.turn].reply.calls if has_turn and span.turn is not None else ()
        has_call = span.call is not None and 0 <= span.call < len(calls)
        if not (span.kind == "tags" or (span.kind == "turn" and has_turn) or has_call):
            raise ConfigError(
                f"the reward {part!r} credits {span}, which the episode of task {task.id} lacks; it has "
                f"{len(episode.turns)} turns",
                key=f"rewards.{part}",
                value=span,
            )
    return score


async def _run_group_reward(part: str, reward: Callable[..., Any], group: Group) -> list[float] | Ungraded:
    task = group.task
    with convert_errors(
        ConfigError, f"the reward {part!r} failed on task {task.id}", key=f"rewards.{part}", value=task.id
    ):
        result: GroupRewardResult = await maybe_await(reward(group))
        if isinstance(result, Ungraded):
            return result
        values = [float(value) for value in result]
    if len(values) != len(group.scored_episodes):
        raise ConfigError(
            f"the reward {part!r} returned {len(values)} values for the {len(group.scored_episodes)} episodes of task "
            f"{task.id}; it must return one per episode",
            key=f"rewards.{part}",
            value=len(values),
        )
    _require_finite(part, task.id, values)
    return values


def _require_finite(part: str, task_id: str, values: Sequence[float]) -> None:
    for value in values:
        if not math.isfinite(value):
            message = f"the reward {part!r} returned {value} for task {task_id}; it must return a finite number"
            raise ConfigError(message, key=f"rewards.{part}", value=value)
