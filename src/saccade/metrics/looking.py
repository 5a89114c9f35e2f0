"""Measure where calls looked, against the evidence of its task. Pure functions.

    task.extras["evidence"]   spans [start, end] in seconds, or boxes [left, top, right, bottom] in pixels of the image
    task.extras["policies"]   accuracy and calls of baseline policies
    task.extras["tool_call_penalty"]  what a call costs, in units of accuracy
    an executed call          what it looked at: its window, its box, or the boxes that its code writes out

Any dataset may have these extras; a task without `evidence` has no metrics of looking.
"""

import ast
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from saccade.types import Call, Episode, ScoredEpisode, Task, ToolResult
from saccade.utils.numbers import to_finite, to_span
from saccade.utils.python_source import parse_python

NO_DECISION = "no_decision"  # the policy that is the ceiling of those that don't decide where to look
POLICY_LABELS = {
    "oracle": "best policy",
    "exhaustive": "looks from the start until its calls are spent",
    "uniform": "looks at random",
    "fixed": "looks where most answers are",
    "constant": "never looks, one answer",
    NO_DECISION: "best that doesn't decide where to look",
}
LOOKING_LABELS = {
    "frac_calls_hit": "calls that hit what must be seen",
    "frac_episodes_hit": "episodes with a hit",
    "first_hit_turn": "turn of the first hit",
    "evidence_recall": "evidence seen",
    "coverage": "part of the media looked at",
    "overlap": "overlap of parallel calls",
    "visual_tokens_per_correct": "visual tokens per correct answer",
    "net_accuracy": "accuracy minus the calls' cost",
    "regret": "regret against the best policy",
}

Region = tuple[float, ...]  # (start, end) or (left, top, right, bottom)

MAX_CODE_CHARS, MAX_BOXES = 20_000, 64  # of a call's code that is searched for boxes, and of the boxes in it


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What one executed call looked at; a call of code may have several regions."""

    turn: int  # from 0
    regions: tuple[Region, ...]
    is_hit: bool  # whether a region overlaps one that the task needs


@dataclass(frozen=True, slots=True, kw_only=True)
class Looking:
    """Where the calls of one episode looked."""

    looks: tuple[Look, ...]
    first_hit_turn: int | None  # from 1; None without a hit
    evidence_recall: float  # fraction of the needed regions that a call overlaps
    coverage: float | None  # fraction of the clip's length or the picture's area; None if its size is unknown
    overlap: float | None  # fraction of the calls of one turn that repeats others of it; None without parallel calls


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselinePolicy:
    """What a baseline policy reaches, averaged over tasks."""

    accuracy: float
    calls: float


def compute_looking(episode: Episode) -> Looking | None:
    """Return where the calls of an episode looked; None if its task doesn't say what must be seen."""
    evidence, extent = parse_evidence(episode.task), _measure_media(episode.task)
    if not evidence:
        return None
    looks, overlaps = list[Look](), list[tuple[float, float]]()
    for number, turn in enumerate(episode.turns):
        regions_by_call = [
            regions
            for call, result in zip(turn.reply.calls, turn.results, strict=False)
            if result.was_executed and (regions := find_regions(call, result, episode.task))
        ]
        for regions in regions_by_call:
            is_hit = any(_overlaps(region, needed) for region in regions for needed in evidence)
            looks.append(Look(turn=number, regions=regions, is_hit=is_hit))
        parallel = list(itertools.chain.from_iterable(regions_by_call))
        if len(parallel) > 1:
            overlaps.append((measure_union(parallel), sum(map(_measure, parallel))))
    seen = list(itertools.chain.from_iterable(look.regions for look in looks))
    total = sum(size for _, size in overlaps)
    return Looking(
        looks=tuple(looks),
        first_hit_turn=next((look.turn + 1 for look in looks if look.is_hit), None),
        evidence_recall=fmean(any(_overlaps(region, needed) for region in seen) for needed in evidence),
        coverage=min(1.0, measure_union(seen) / extent) if extent else None,
        overlap=1 - sum(union for union, _ in overlaps) / total if total else None,
    )


def compute_looking_metrics(scored: Sequence[ScoredEpisode], accuracies: Sequence[float]) -> dict[str, float]:
    """Return the metrics `looking/…` of docs/metrics.md over the episodes whose tasks say what must be seen.

    `accuracies` are those of `scored`, in order.
    """
    pairs = [
        (outcome.episode, looking, accuracy)
        for outcome, accuracy in zip(scored, accuracies, strict=True)
        if (looking := compute_looking(outcome.episode)) is not None
    ]
    if not pairs:
        return {}
    hits = [look.is_hit for _, looking, _ in pairs for look in looking.looks]
    values: dict[str, list[float]] = {
        "frac_calls_hit": [float(hit) for hit in hits],
        "frac_episodes_hit": [float(looking.first_hit_turn is not None) for _, looking, _ in pairs],
        "first_hit_turn": [looking.first_hit_turn for _, looking, _ in pairs if looking.first_hit_turn is not None],
        "evidence_recall": [looking.evidence_recall for _, looking, _ in pairs],
        "coverage": [looking.coverage for _, looking, _ in pairs if looking.coverage is not None],
        "overlap": [looking.overlap for _, looking, _ in pairs if looking.overlap is not None],
    }
    nets = [
        accuracy - get_tool_call_penalty(episode.task) * sum(result.was_executed for result in episode.results)
        for episode, _, accuracy in pairs
    ]
    values["net_accuracy"] = nets
    values["regret"] = [
        oracle.accuracy - get_tool_call_penalty(episode.task) * oracle.calls - net
        for (episode, _, _), net in zip(pairs, nets, strict=True)
        if (oracle := parse_policies(episode.task).get("oracle")) is not None
    ]
    metrics = {f"looking/{name}": fmean(items) for name, items in values.items() if items}
    correct = sum(accuracy for _, _, accuracy in pairs)
    if correct:
        metrics["looking/visual_tokens_per_correct"] = sum(e.usage.visual_tokens for e, _, _ in pairs) / correct
    return metrics


def average_policies(tasks: Sequence[Task]) -> dict[str, BaselinePolicy]:
    """Return the means of the baseline policies over tasks; {} unless every task has them."""
    rows = [parse_policies(task) for task in tasks]
    names = [name for name in rows[0] if all(name in row for row in rows)] if rows else []
    return {
        name: BaselinePolicy(
            accuracy=fmean(row[name].accuracy for row in rows), calls=fmean(row[name].calls for row in rows)
        )
        for name in names
    }


def parse_policies(task: Task) -> dict[str, BaselinePolicy]:
    """Return the baseline policies in a task's extras by name; entries of another form are left out."""
    entries, policies = task.extras.get("policies"), dict[str, BaselinePolicy]()
    for name, entry in entries.items() if isinstance(entries, Mapping) else ():
        values = [to_finite(value) for value in entry] if isinstance(entry, list | tuple) and len(entry) == 2 else []
        if len(values) == 2 and values[0] is not None and values[1] is not None:
            policies[str(name)] = BaselinePolicy(accuracy=values[0], calls=values[1])
    return policies


def get_tool_call_penalty(task: Task) -> float:
    """Return what a call costs in units of accuracy, from the task's extras; 0 if it has none."""
    return to_finite(task.extras.get("tool_call_penalty")) or 0.0


def parse_evidence(task: Task) -> tuple[Region, ...]:
    """Return the regions that must be seen to answer a task; () if its extras hold none."""
    evidence = task.extras.get("evidence")
    regions = [_to_region(region) for region in evidence] if isinstance(evidence, list | tuple) else []
    known = tuple(region for region in regions if region is not None)
    return known if len(known) == len(regions) and len({*map(len, known)}) <= 1 else ()


def find_regions(call: Call, result: ToolResult, task: Task) -> tuple[Region, ...]:
    """Return what a call looked at: boxes of the images in its result, else its window, else the boxes in its code."""
    boxes = tuple(tuple(map(float, image.box)) for image in result.images if image.box is not None)
    if boxes:
        return boxes
    window = parse_window(call.arguments)
    if window is not None:
        return (window,)
    code = call.arguments.get("code")
    return tuple(itertools.islice(find_boxes_in_code(code, task), MAX_BOXES)) if isinstance(code, str) else ()


def parse_window(arguments: Mapping[str, Any]) -> tuple[float, float] | None:
    """Parse the window (seconds) of a call's arguments; None if they have no valid one."""
    bounds = []
    for name, position in (("start_time", "0"), ("end_time", "1")):
        try:
            bounds.append(float(arguments.get(name, arguments.get(position))))
        except (TypeError, ValueError, OverflowError):
            return None
    return to_span(bounds)


def find_boxes_in_code(code: str, task: Task) -> Iterator[Region]:
    """Yield the boxes that code writes out as four numbers, in pixels; numbers up to 1 are fractions of the image.

    Boxes that code computes are unknown.
    """
    size = [to_finite(task.extras.get(side)) for side in ("width", "height")]
    try:
        tree = parse_python(code[:MAX_CODE_CHARS])
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    for node in ast.walk(tree):
        if not isinstance(node, ast.Tuple | ast.List) or len(node.elts) != 4:
            continue
        sides = [to_finite(item.value) if isinstance(item, ast.Constant) else None for item in node.elts]
        box = _to_region(sides)
        if box is None:
            continue
        if max(box) > 1:
            yield box
        elif size[0] and size[1]:
            yield tuple(side * (size[index % 2] or 0.0) for index, side in enumerate(box))


def measure_union(regions: Sequence[Region]) -> float:
    """Return the length of a union of spans, or the area of a union of boxes; all have the same number of sides.

    >>> measure_union([(0, 4), (2, 6), (8, 9)]), measure_union([(0, 0, 2, 2), (1, 1, 3, 3)])
    (7.0, 7.0)
    """
    if not regions:
        return 0.0
    if len(regions[0]) == 2:
        total, end = 0.0, float("-inf")
        for start, stop in sorted(regions):
            total += max(0.0, stop - max(start, end))
            end = max(end, stop)
        return total
    lefts = sorted({side for left, _, right, _ in regions for side in (left, right)})
    return sum(
        (right - left) * measure_union([(r[1], r[3]) for r in regions if r[0] <= left and right <= r[2]])
        for left, right in itertools.pairwise(lefts)
    )


def _to_region(value: Any) -> Region | None:
    """Return a span or a box of finite numbers in order; None for anything else."""
    sides = [to_finite(side) for side in value] if isinstance(value, list | tuple) else []
    known = [side for side in sides if side is not None]
    if len(known) != len(sides) or len(known) not in (2, 4):
        return None
    half = len(known) // 2
    return tuple(known) if all(known[i] <= known[i + half] for i in range(half)) else None


def _measure_media(task: Task) -> float | None:
    """Return the length (seconds) or the area (pixels) of what the regions are in; None if it is unknown."""
    evidence = parse_evidence(task)
    names = ("seconds",) if evidence and len(evidence[0]) == 2 else ("width", "height")
    sizes = [to_finite(task.extras.get(name)) or 0.0 for name in names]
    extent = sizes[0] * (sizes[1] if len(sizes) > 1 else 1.0)
    return extent if extent > 0 else None


def _overlaps(region: Region, other: Region) -> bool:
    half = len(other) // 2
    return len(region) == len(other) and all(
        region[i] < other[i + half] and other[i] < region[i + half] for i in range(half)
    )


def _measure(region: Region) -> float:
    return measure_union([region])
