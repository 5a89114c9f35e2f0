"""Score visual search: the IoU of a box with the ground-truth box."""

import json
import math
import re
from typing import Any, ClassVar, Literal

from saccade.errors import DataError
from saccade.rewards.answer_types.base import BaseAnswerType, GroundTruth, parse_numbers
from saccade.rewards.answer_types.denials import Denials, is_retracted
from saccade.rewards.answer_types.reader import clean_text
from saccade.rewards.text_normalization import normalize_text
from saccade.types import Episode, Task
from saccade.utils.numbers import to_finite

Sides = tuple[float, ...]
Coordinates = Literal["auto", "pixel", "shown", "unit", "percent", "thousand"]

_NUMBER = r"-?(?:\d{1,9}(?:\.\d{1,18})?|\.\d{1,18})(?:[eE][+-]?\d{1,3})?"
# Matches [x1, y1, x2, y2] or (x, y) in any brackets; _CORNER_PAIR an answer that is (x1, y1), (x2, y2), called a box.
_COORDINATE_LIST = re.compile(rf"[\[(<{{]\s*({_NUMBER}(?:\s*,\s*{_NUMBER}){{1,3}})\s*[\])>}}]")
_LABEL = r"(?:\W|\b(?:the|final|answer|is|bounding|box|bbox|boxed|box_start|box_end|left|right)\b)*?"
_CORNER_PAIR = re.compile(
    rf"{_LABEL}[(\[]\s*({_NUMBER}\s*,\s*{_NUMBER})\s*[)\]]\s*,?\s*[(\[]\s*({_NUMBER}\s*,\s*{_NUMBER})\s*[)\]]{_LABEL}",
    re.IGNORECASE,
)
_BOX_NAME = re.compile(r"\b(?:box|bbox|box_start)\b", re.IGNORECASE)
# Matches an answer whose only numbers are one unbracketed list.
_UNBRACKETED_NUMBERS = re.compile(rf"[^\d.,+-]*({_NUMBER}(?:\s*,\s*{_NUMBER}){{1,3}})\.?(?!\d)[^\d%]*")
_POINT_TAG = re.compile(rf"""<point\s+x=["']({_NUMBER})["']\s+y=["']({_NUMBER})["'][^>]*>""", re.IGNORECASE)
_COORDINATE_RANGES = {"unit": 1.0, "percent": 100.0, "thousand": 1000.0}


class BoxAnswer(BaseAnswerType):
    """Visual search: the IoU with the ground-truth box, in [0, 1].

    The ground truth is (x1, y1, x2, y2): left, top, right, bottom, in pixels of the file if `task.extras` has its
    `width` and `height`, else as fractions of the image between 0 and 1. `coordinates` is the unit the model writes:
    `pixel` of the file, pixels of the image as first `shown` to the model, fractions of 1 (`unit`), 100 (`percent`) or
    1000 (`thousand`); `auto` means unit if no number is above 1, else pixel.

    Accepted boxes: `[x1, y1, x2, y2]`, JSON (`{"bbox_2d": [...]}`), and corners that the answer calls a box, with
    nothing beside them: `<|box_start|>(x1, y1),(x2, y2)<|box_end|>`. Two points are no box. Boxes are clipped to the
    image. An answer with two different boxes, a denied, inverted or empty box, a point, or anything else scores 0.
    """

    names: ClassVar[tuple[str, ...]] = ("box", "bbox")
    expected = "left, top, right and bottom of a box"
    example: ClassVar[tuple[GroundTruth, str]] = ((0.25, 0.25, 0.75, 0.5), "[0.25, 0.25, 0.75, 0.5]")

    def __init__(
        self,
        *,
        coordinates: Coordinates = "auto",  # unit in which the model writes boxes
    ) -> None:
        self._coordinates = coordinates

    def __call__(self, episode: Episode) -> float:
        """Return the score. Raises DataError for an invalid box, and for `pixel` if the image's size is unknown."""
        self.require_valid(episode.task)
        expected = _scale_ground_truth(episode.task)
        raw = _parse_box_or_point(episode.answer or "", joins_corners=2 not in self.accepted_lengths)
        if raw is None or len(raw) not in self.accepted_lengths:
            return 0.0
        scale = _resolve_scale(raw, episode, self._coordinates)
        if scale is None:
            return 0.0
        predicted = tuple(value / scale[i % 2] for i, value in enumerate(raw))
        if len(predicted) == 4 and not (predicted[0] < predicted[2] and predicted[1] < predicted[3]):
            return 0.0
        return self.compare(predicted, expected)

    accepted_lengths: ClassVar[tuple[int, ...]] = (4,)  # numbers of an answer: a box has 4, a point 2

    def compare(self, predicted: Sides, expected: Sides) -> float:
        """Return the score of a box (or a point) as fractions of the image."""
        return _compute_iou(tuple(min(1.0, max(0.0, value)) for value in predicted), expected)

    @classmethod
    def is_valid(cls, ground_truth: object) -> bool:
        """Return whether it is left, top, and a right and bottom beyond them."""
        return (
            isinstance(ground_truth, tuple)
            and len(ground_truth) == 4
            and all(map(math.isfinite, ground_truth))
            and ground_truth[0] < ground_truth[2]
            and ground_truth[1] < ground_truth[3]
        )

    @classmethod
    def find_problem(cls, task: Task) -> tuple[str, str] | None:
        """Check that the box lies in its image."""
        if problem := super().find_problem(task):
            return problem
        size, fractions = _get_image_size(task), _scale_ground_truth(task)
        if all(0 <= value <= 1 + 1e-6 for value in fractions):
            return None
        bounds = "between 0 and 1 (extras has no width and height)" if size is None else f"within {size[0]}x{size[1]}"
        return "ground_truth", f"ground truth {task.ground_truth!r} is not a box x1, y1, x2, y2 {bounds}"

    @classmethod
    def parse_ground_truth(cls, value: Any) -> Sides | None:
        """Return the sides that a published row lists."""
        sides = parse_numbers(value)
        return sides if cls.is_valid(sides) else None


box = BoxAnswer


def _compute_iou(first: Sides, second: Sides) -> float:
    overlap = [min(first[i + 2], second[i + 2]) - max(first[i], second[i]) for i in (0, 1)]
    intersection = max(0.0, overlap[0]) * max(0.0, overlap[1])
    areas = [(box[2] - box[0]) * (box[3] - box[1]) for box in (first, second)]
    return intersection / (sum(areas) - intersection)


def _scale_ground_truth(task: Task) -> Sides:
    """Return the ground-truth box as fractions of the image."""
    truth, size = task.ground_truth, _get_image_size(task)
    assert isinstance(truth, tuple)  # checked before
    return truth if size is None else tuple(value / size[i % 2] for i, value in enumerate(truth))


def _get_image_size(task: Task) -> tuple[float, float] | None:
    width, height = (to_finite(task.extras.get(side)) or 0.0 for side in ("width", "height"))
    return (width, height) if min(width, height) > 0 else None


def _resolve_scale(predicted: Sides, episode: Episode, coordinates: str) -> tuple[float, float] | None:
    """Return the full width and height in the answer's coordinates; None if only an answer in fractions can be scored.

    Raises DataError if the recipe says that answers are in pixels, and the image's size is unknown.
    """
    unit = coordinates
    if coordinates == "auto":
        unit = "unit" if all(abs(value) <= 1 for value in predicted) else "pixel"
    if unit in _COORDINATE_RANGES:
        return _COORDINATE_RANGES[unit], _COORDINATE_RANGES[unit]
    task = episode.task
    shown_sizes = [(float(image.width), float(image.height)) for image in episode.ledger.images()[:1]]
    size = _get_image_size(task) if unit == "pixel" else None
    if size is None and not shown_sizes:
        if coordinates == "auto":
            return None
        raise DataError(
            f"task {task.id}: the answer is in pixels and the image size is unknown; add width and height to extras",
            key="extras.width",
            value=task.extras.get("width"),
        )
    return size or shown_sizes[0]


def _parse_box_or_point(answer: str, *, joins_corners: bool) -> Sides | None:
    """Return the only box (4 numbers) or point (2 numbers) of an answer, or None if it has none, several or denies it.

    With `joins_corners` an answer that calls two points a box, and is nothing else, is one.
    """
    text = normalize_text(clean_text(answer)).strip()
    boxes = _parse_json_boxes(text)
    if not boxes:
        if joins_corners and (corners := _CORNER_PAIR.fullmatch(text)) and _BOX_NAME.search(text):
            text = f"[{corners[1]},{corners[2]}]"
        matches = list(_COORDINATE_LIST.finditer(text)) or list(_POINT_TAG.finditer(text))
        denials = Denials(text)
        if any(denials.cover(match.start(), match.end()) for match in matches) or is_retracted(text):
            return None
        lists = [",".join(match.groups()) for match in matches]
        if not lists and (unbracketed := _UNBRACKETED_NUMBERS.fullmatch(text)):
            lists = [unbracketed[1]]
        boxes = {tuple(float(number) for number in numbers.split(",")) for numbers in lists}
    box = boxes.pop() if len(boxes) == 1 else ()
    return box if len(box) in (2, 4) else None


def _parse_json_boxes(text: str) -> set[Sides]:
    """Return the boxes and points of a JSON answer: {"bbox_2d": [...]} alone, in a list, or in a code block."""
    stripped = re.sub(r"^```(?:json)?|```$", "", text).strip()
    try:
        value = json.loads(stripped, parse_int=float)
    except (ValueError, RecursionError):
        return set()
    items = [item for item in (value if isinstance(value, list) else [value]) if isinstance(item, dict)]
    keys = ("bbox_2d", "bbox", "box_2d", "box", "point_2d", "point")
    lists = [item[key] for item in items for key in keys if isinstance(item.get(key), list)]
    return {tuple(numbers) for numbers in lists if all(isinstance(number, float) for number in numbers)}
