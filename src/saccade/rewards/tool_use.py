"""Reward tool use: graded (ParaVT, arXiv 2605.20342) or accumulative (PyVision-RL, arXiv 2602.20739)."""

import ast
import json
from collections.abc import Mapping
from typing import Any, Literal

from saccade.config.schema import NonNegativeInt
from saccade.rewards.text_normalization import strip_invisible
from saccade.types import Episode, Score
from saccade.utils.numbers import to_finite
from saccade.utils.python_source import parse_python


def tool_use(
    episode: Episode,
    *,
    mode: Literal["graded", "accumulative", "none"] = "graded",  # rule of the reward
    count: Literal["executed", "succeeded", "informative"] = "informative",  # calls that earn the bonus of accumulative
    bonus: float = 0.1,  # reward per counted call, of accumulative
    cap: NonNegativeInt = 4,  # maximum number of counted calls
    threshold: float | None = None,  # least value of a correct answer; null = 0.5 for graded, 1.0 for accumulative
    correct: float,
) -> Score:
    """Return R_tool from the recorded tool results; text that only looks like a tool response counts nothing.

    `graded`: 0 without a call that parsed; else 0.1, or 0.3 if at least one call ran and succeeded, plus 0.5 if the
    answer is correct and a call was executed. The last condition deviates from the published rule: a call that was
    refused, or was in the same turn as the answer, was never executed and can't have contributed. `accumulative`:
    `bonus` per call if the answer is correct, for at most `cap` calls (the turn budget); `count` selects the calls:
    `executed` (the published rule), `succeeded` without error, or `informative`: succeeded and returned visible
    text or an image. The last two count equal calls once: the same tool with the same arguments, ignoring case and
    blanks of texts, how numbers are written, and comments of code. `none`: 0.

    The answer is correct if `correct`, the value of the recipe's correctness term, is at least `threshold`, by default
    0.5 for `graded` and 1.0 for `accumulative`. Calls of sub-agents are not counted.
    """
    if mode == "none":
        return Score(value=0.0)
    minimum = threshold if threshold is not None else (0.5 if mode == "graded" else 1.0)
    is_correct = correct >= minimum
    if mode == "accumulative":
        num_calls = _count_calls(episode, count)
        reason = (
            f"{num_calls} {count} calls count, at most {cap}, and the answer is {'right' if is_correct else 'wrong'}"
        )
        return Score(value=bonus * min(cap, num_calls) * is_correct, reason=reason)
    if not any(call.ok for turn in episode.turns for call in turn.reply.calls):
        return Score(value=0.0, reason="no call parsed")
    # A failed call still earns 0.1, so that exploring is never worse than not calling.
    succeeded = any(result.ok for result in episode.results)
    contributed = is_correct and any(result.was_executed for result in episode.results)
    reason = f"{'a call succeeded' if succeeded else 'no call succeeded'} {0.3 if succeeded else 0.1}, " + (
        "right answer with an executed call 0.5" if contributed else "no right answer with an executed call 0"
    )
    return Score(value=(0.3 if succeeded else 0.1) + 0.5 * contributed, reason=reason)


def _count_calls(episode: Episode, count: str) -> int:
    if count == "executed":
        return sum(result.was_executed for result in episode.results)
    # The code `pass` runs and succeeds; it is not informative.
    counted = [
        json.dumps([call.name, _normalize_argument(dict(call.arguments))], sort_keys=True, default=str)
        for turn in episode.turns
        for call, result in zip(turn.reply.calls, turn.results, strict=False)
        if result.ok and (count == "succeeded" or strip_invisible(result.text) or result.images)
    ]
    return len({*counted})


def _normalize_argument(value: Any, name: str = "") -> Any:
    if isinstance(value, Mapping):
        return {str(key): _normalize_argument(item, str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_normalize_argument(item) for item in value]
    if not isinstance(value, str):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return to_finite(value) if is_number else value  # None: an integer beyond all floats
    if name == "code":
        try:
            return ast.unparse(parse_python(value))  # without comments and blanks
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return value.strip()
    try:
        return float(value)
    except ValueError:
        return " ".join(strip_invisible(value).casefold().split())
