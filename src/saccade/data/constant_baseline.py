"""What can be known without looking: the score of the best answer that is always the same."""

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from saccade.types import Task

BOUNDS = 24  # at most so many places per axis where the best constant box may begin or end

Counts = Counter[Any]


def blind_floor(tasks: Sequence[Task]) -> dict[str, float]:
    """Per kind of question, the mean score of the best constant answer: exact match, or IoU for spans and boxes."""
    golds: dict[str, Counts] = {}
    for task in tasks:
        golds.setdefault(task.extras["question"], Counter())[_gold(task)] += 1
    return {kind: _best_constant(counter) for kind, counter in sorted(golds.items())}


def _gold(task: Task) -> Any:
    """The gold answer; a box in pixels as parts of its picture, so that pictures of any size can share an answer."""
    if not isinstance(task.gold, tuple) or len(task.gold) != 4 or not {"width", "height"} <= task.extras.keys():
        return task.gold
    size = task.extras["width"], task.extras["height"]
    return tuple(round(value / size[i % 2], 6) for i, value in enumerate(task.gold))


def _best_constant(golds: Counts) -> float:
    total = sum(golds.values())
    if all(isinstance(gold, tuple) and len(gold) == 4 for gold in golds):
        return _best_box(golds) / total
    if not all(isinstance(gold, tuple) for gold in golds):
        return max(golds.values()) / total
    # The best constant span begins and ends where some gold spans do.
    spans = itertools.combinations(sorted({bound for gold in golds for bound in gold}), 2)
    return max(sum(_iou(span, gold) * count for gold, count in golds.items()) for span in spans) / total


def _iou(one: tuple[float, float], other: tuple[float, float]) -> float:
    shared = max(0.0, min(one[1], other[1]) - max(one[0], other[0]))
    return shared / (one[1] - one[0] + other[1] - other[0] - shared)


def _best_box(golds: Counts) -> float:
    """The largest sum of overlaps that one box has with all; its sides are among those of the gold boxes."""
    boxes, counts = np.array(list(golds), dtype=np.float64), np.array(list(golds.values()), dtype=np.float64)
    left, top, right, bottom = boxes.T
    across, down = _stretches((*left, *right)), _stretches((*top, *bottom))
    # Rows are what a constant box may take of one axis, columns the gold boxes.
    tall = np.clip(np.minimum(bottom, down[:, 1:]) - np.maximum(top, down[:, :1]), 0, None)
    best = 0.0
    for start, end in across:
        shared = tall * np.clip(np.minimum(right, end) - np.maximum(left, start), 0, None)
        areas = (right - left) * (bottom - top) + (end - start) * (down[:, 1:] - down[:, :1])
        best = max(best, float((shared / (areas - shared) @ counts).max()))
    return best


def _stretches(bounds: Iterable[float]) -> NDArray[np.float64]:
    """Every stretch between two bounds [stretches, 2]; of very many bounds some, evenly chosen, stand for all."""
    known = sorted(set(bounds))
    step = max(1, -(-len(known) // BOUNDS))
    return np.array(list(itertools.combinations(known[::step], 2)), dtype=np.float64)
