"""The tool reward: graded (ParaVT, arXiv 2605.20342) or accumulative (PyVision-RL, arXiv 2602.20739)."""

from typing import Literal

from saccade.rewards._text import visible
from saccade.sections import Whole
from saccade.types import Episode, Task, ToolResult

_Count = Literal["executed", "succeeded", "informative"]


def tools(
    episode: Episode,
    task: Task,
    *,
    mode: Literal["graded", "accumulative", "none"] = "graded",
    count: _Count = "informative",
    bonus: float = 0.1,
    cap: Whole = 4,
    threshold: float | None = None,
    accuracy: float,
) -> float:
    """R_tool, from what the host recorded; text that looks like a tool's response is nothing.

    `graded`: 0 without a call that parsed; else 0.1, or 0.3 if at least one call ran and succeeded, and +0.5 if the
    answer is correct and a call was run. That last condition alone is not the published rule: a call that the host
    refused, or that stood beside the answer, was never run and had no part in what is right. `accumulative`: `bonus`
    per call if the answer is correct, for at most `cap` calls (the turn budget); `count` says which calls: `executed`
    ran, whatever came of it (the published rule), `succeeded` ran without error, `informative` succeeded and returned
    text that can be seen or a picture. `none`: 0.

    Correct means `accuracy` >= `threshold`, by default 0.5 for `graded` and 1.0 for `accumulative`; `accuracy` is what
    the recipe's own accuracy term said of the episode. Calls of sub-agents are not counted.
    """
    if mode == "none":
        return 0.0
    limit = threshold if threshold is not None else (0.5 if mode == "graded" else 1.0)
    correct = accuracy >= limit
    if mode == "accumulative":
        return bonus * min(cap, sum(_counts(result, count) for result in episode.results)) * correct
    if not any(call.ok for turn in episode.turns for call in turn.reply.calls):
        return 0.0
    # a failed call keeps the share for trying, so that exploring is never worse than not calling
    succeeded = any(result.ok for result in episode.results)
    helped = correct and any(result.executed for result in episode.results)
    return (0.3 if succeeded else 0.1) + 0.5 * helped


def _counts(result: ToolResult, count: _Count) -> bool:
    if count == "executed":
        return result.executed
    # `pass` runs and succeeds; it must not earn the bonus
    return result.ok and (count == "succeeded" or bool(visible(result.text) or result.pictures))
