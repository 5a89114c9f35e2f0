"""Constant-answer baselines: the score of the best answer that ignores the media.

A model that sees no media still reads the question: its best answer is constant per wording, not per question type.
"How many flashes?" and "How many red flashes?" are one type, but not one wording.
"""

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from saccade.types import Task
from saccade.utils.numbers import to_finite

MAX_BOUNDS_PER_AXIS = 24  # coordinates per axis that the search for the best constant box considers
MAX_BOUNDS_OF_SPANS = 192  # times that the search for the best constant span considers

MIN_TASKS_PER_WORDING = 8  # the best answer to few questions would be right by chance
OTHER_WORDINGS = "other wordings"
MAX_WORDING_CHARS = 80
_NUMBER = re.compile(r"\d+(?:[.,:]\d+)*")

AnswerCounts = Counter[Any]


def compute_constant_baselines(tasks: Sequence[Task]) -> dict[str, float]:
    """Return, per kind of question, the mean score of the best constant answer: exact match, or IoU (spans, boxes)."""
    counts_by_kind: dict[str, AnswerCounts] = {}
    for task in tasks:
        counts_by_kind.setdefault(task.extras["question"], Counter())[_normalize_ground_truth(task)] += 1
    return {kind: _score_best_constant(counts) for kind, counts in sorted(counts_by_kind.items())}


def assign_wordings(tasks: Sequence[Task]) -> dict[str, str]:
    """Return the wording of each task by digest: question type, answer type, and the question without what varies.

    Numbers and the question's `extras.target` vary. Wordings of fewer than MIN_TASKS_PER_WORDING tasks are one, per
    question type and answer type. Tasks without a question type are left out.
    """
    wordings = {
        task.digest: _normalize_question(task) for task in tasks if isinstance(task.extras.get("question"), str)
    }
    kinds = {task.digest: f"{task.extras['question']}, {task.answer_type}" for task in tasks if task.digest in wordings}
    counts = Counter((kinds[digest], wording) for digest, wording in wordings.items())
    return {
        digest: f"{kinds[digest]}: "
        + (wording if counts[kinds[digest], wording] >= MIN_TASKS_PER_WORDING else OTHER_WORDINGS)
        for digest, wording in wordings.items()
    }


def compute_wording_baselines(tasks: Sequence[Task]) -> dict[str, float]:
    """Return, by the digest of each task that has a wording, the score of the best constant answer to this wording."""
    wordings, counts_by_wording = assign_wordings(tasks), dict[str, AnswerCounts]()
    for task in tasks:
        if task.digest in wordings:
            counts = counts_by_wording.setdefault(wordings[task.digest], Counter())
            counts[_normalize_ground_truth(task)] += 1
    baselines = {wording: _score_best_constant(counts) for wording, counts in counts_by_wording.items()}
    return {digest: baselines[wording] for digest, wording in wordings.items()}


def _normalize_question(task: Task) -> str:
    """Return a question without its numbers and its target: `How many … flashes?`."""
    target, text = task.extras.get("target"), task.question
    if isinstance(target, str) and target:
        text = re.sub(rf"\b{re.escape(target)}\b", "…", text)
    text = " ".join(_NUMBER.sub("#", text).split())
    return text if len(text) <= MAX_WORDING_CHARS else text[:MAX_WORDING_CHARS] + "…"


def _normalize_ground_truth(task: Task) -> Any:
    """Return the ground truth; a box in pixels as fractions of its image, so that all image sizes can share one."""
    if not isinstance(task.ground_truth, tuple) or len(task.ground_truth) != 4:
        return task.ground_truth
    size = [to_finite(task.extras.get(side)) or 0.0 for side in ("width", "height")]
    if min(size) <= 0:  # missing, or no size
        return task.ground_truth
    return tuple(round(value / size[i % 2], 6) for i, value in enumerate(task.ground_truth))


def _score_best_constant(answer_counts: AnswerCounts) -> float:
    total = sum(answer_counts.values())
    if all(isinstance(answer, tuple) and len(answer) == 4 for answer in answer_counts):
        return _sum_best_box_iou(answer_counts) / total
    if not all(isinstance(answer, tuple) for answer in answer_counts):
        return max(answer_counts.values()) / total
    return _sum_best_span_iou(answer_counts) / total


def _sum_best_span_iou(answer_counts: AnswerCounts) -> float:
    """Return the largest sum of IoUs that one span has with all spans; its bounds are taken from theirs."""
    start, end = np.array(list(answer_counts), dtype=np.float64).T
    counts = np.array(list(answer_counts.values()), dtype=np.float64)
    spans = _build_intervals((*start, *end), MAX_BOUNDS_OF_SPANS)
    best = 0.0
    for first, last in spans:
        overlap = np.clip(np.minimum(end, last) - np.maximum(start, first), 0, None)
        best = max(best, float(overlap / (end - start + last - first - overlap) @ counts))
    return best


def _sum_best_box_iou(answer_counts: AnswerCounts) -> float:
    """Return the largest sum of IoUs that one box has with all boxes; its sides are taken from theirs."""
    left, top, right, bottom = np.array(list(answer_counts), dtype=np.float64).T
    counts = np.array(list(answer_counts.values()), dtype=np.float64)
    x_intervals = _build_intervals((*left, *right), MAX_BOUNDS_PER_AXIS)
    y_intervals = _build_intervals((*top, *bottom), MAX_BOUNDS_PER_AXIS)
    if not (x_intervals.size and y_intervals.size):  # the rounded boxes are lines
        return 0.0
    # Arrays are [vertical intervals of the constant box, ground-truth boxes].
    height = np.clip(np.minimum(bottom, y_intervals[:, 1:]) - np.maximum(top, y_intervals[:, :1]), 0, None)
    best = 0.0
    for start, end in x_intervals:
        overlap = height * np.clip(np.minimum(right, end) - np.maximum(left, start), 0, None)
        areas = (right - left) * (bottom - top) + (end - start) * (y_intervals[:, 1:] - y_intervals[:, :1])
        best = max(best, float((overlap / (areas - overlap) @ counts).max()))
    return best


def _build_intervals(bounds: Iterable[float], max_bounds: int) -> NDArray[np.float64]:
    """Return every interval between two bounds [intervals, 2]; many bounds are thinned out evenly."""
    unique = sorted(set(bounds))
    step = max(1, -(-len(unique) // max_bounds))
    return np.array(list(itertools.combinations(unique[::step], 2)), dtype=np.float64)
