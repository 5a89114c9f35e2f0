"""Compute statistics of tool calls, per tool and per data source, for the metrics of a training step.

    calls of the main agent ──by name──> tool/NAME/…      tools that ran in this step; all other names are `other`
                            ──by task──> source/NAME/…    tasks whose row names its dataset

Names of tools come from the model: only those of tools that exist become keys.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from saccade.types import Episode, ScoredEpisode
from saccade.utils.hashing import compute_digest

OTHER_TOOL = "other"  # calls of a name that no tool of this step has, and malformed ones


@dataclass(frozen=True, slots=True)
class CallRecord:
    """A call of the main agent: its tool, whether it failed, repeated an earlier call, and its seconds."""

    tool: str
    has_failed: bool
    is_duplicate: bool
    seconds: float


def list_calls(episode: Episode) -> list[CallRecord]:
    """Return the main agent's calls in order.

    A call without a result, such as one beside an answer, has failed. A call with the tool and arguments of an earlier
    one is a duplicate.
    """
    records, seen = list[CallRecord](), set[str]()
    for turn in episode.turns:
        for index, call in enumerate(turn.reply.calls):
            result = turn.results[index] if index < len(turn.results) else None
            key = compute_digest(call.name, dict(call.arguments))
            records.append(
                CallRecord(
                    tool=call.name,
                    has_failed=result is None or not result.ok,
                    is_duplicate=key in seen,
                    seconds=0.0 if result is None else result.seconds,
                )
            )
            seen.add(key)
    return records


def compute_tool_metrics(scored: Sequence[ScoredEpisode]) -> dict[str, float]:
    """Return the metrics `tool/NAME/…` and `source/NAME/…` of docs/metrics.md; {} without a call or a source."""
    calls = [list_calls(outcome.episode) for outcome in scored]
    names = {
        call.name
        for outcome in scored
        for turn in outcome.episode.turns
        for call, result in zip(turn.reply.calls, turn.results, strict=False)
        if result.was_executed
    }
    by_tool: defaultdict[str, list[list[CallRecord]]] = defaultdict(lambda: [[] for _ in scored])
    for index, records in enumerate(calls):
        for record in records:
            by_tool[record.tool if record.tool in names else OTHER_TOOL][index].append(record)
    by_source: defaultdict[str, list[int]] = defaultdict(list)
    for index, outcome in enumerate(scored):
        if source := outcome.episode.task.source:
            by_source[source].append(index)
    metrics: dict[str, float] = {}
    for name in sorted(by_tool):
        metrics |= {f"tool/{name}/{key}": value for key, value in _summarize(scored, by_tool[name])}
    for name, indices in sorted(by_source.items()):
        members = [scored[index] for index in indices], [calls[index] for index in indices]
        metrics |= {f"source/{name}/{key}": value for key, value in _summarize(*members)}
    return metrics


def _summarize(scored: Sequence[ScoredEpisode], calls: Sequence[Sequence[CallRecord]]) -> Iterator[tuple[str, float]]:
    """Yield the statistics of the calls of each episode."""
    flat = [record for records in calls for record in records]
    yield "calls", len(flat) / len(scored)
    yield "frac_with_call", fmean(bool(records) for records in calls)
    if not flat:
        return
    yield "frac_failed", fmean(record.has_failed for record in flat)
    yield "frac_duplicate", fmean(record.is_duplicate for record in flat)
    yield "seconds", fmean(record.seconds for record in flat)
    rewards: tuple[list[float], list[float]] = ([], [])
    for outcome, records in zip(scored, calls, strict=True):
        rewards[bool(records)].append(outcome.score.total)
    if all(rewards):  # comparable only if some episodes called and some did not
        yield "reward_diff", fmean(rewards[True]) - fmean(rewards[False])
