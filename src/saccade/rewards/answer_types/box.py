"""Search in pictures: the overlap of a box with the gold box, or whether a point lies in it."""

import json
import re
from typing import Literal

from saccade.errors import DataError
from saccade.rewards._text import tidy
from saccade.types import Episode, Kind, Task

Box = tuple[float, ...]
Coordinates = Literal["auto", "pixel", "shown", "unit", "percent", "thousand"]

_NUMBER = r"-?(?:\d{1,9}(?:\.\d{1,18})?|\.\d{1,18})(?:[eE][+-]?\d{1,3})?"
# [x1, y1, x2, y2] or (x, y) in any brackets, or (x1, y1), (x2, y2).
_LIST = re.compile(rf"[\[(<{{]\s*({_NUMBER}(?:\s*,\s*{_NUMBER}){{1,3}})\s*[\])>}}]")
_CORNERS = re.compile(
    rf"[(\[]\s*({_NUMBER}\s*,\s*{_NUMBER})\s*[)\]]\s*,?\s*[(\[]\s*({_NUMBER}\s*,\s*{_NUMBER})\s*[)\]]"
)
_BARE = re.compile(
    rf"[^\d.,+-]*({_NUMBER}(?:\s*,\s*{_NUMBER}){{1,3}})\.?(?!\d)[^\d%]*"
)  # the only numbers of an answer
_POINT = re.compile(rf"""<point\s+x=["']({_NUMBER})["']\s+y=["']({_NUMBER})["'][^>]*>""", re.IGNORECASE)
_PARTS = {"unit": 1.0, "percent": 100.0, "thousand": 1000.0}


def box(
    episode: Episode,
    task: Task,
    *,
    coordinates: Coordinates = "auto",
) -> float:
    """Kind BOX: intersection over union in [0, 1]; kind POINT: 1.0 if the point lies in the gold box, else 0.0.

    The gold is (x1, y1, x2, y2), left, top, right, bottom: in pixels of the file where `task.extras` has its `width`
    and `height`, else as parts of the picture between 0 and 1. `coordinates` says what the model writes: `pixel` of the
    file, pixels of the picture as it was first `shown` to the model, parts of 1 (`unit`), 100 (`percent`) or 1000
    (`thousand`); `auto` is unit where no number is above 1, else pixel. Boxes are read as `[x1, y1, x2, y2]`,
    `(x1, y1), (x2, y2)` or JSON (`{"bbox_2d": [...]}`), points as `(x, y)`, `[x, y]`, JSON (`{"point_2d": [...]}`) or
    `<point x="1" y="2">`; of a box where a point is wanted, its centre counts. Boxes are cut to the picture.

    An answer with two different boxes or points, an inverted or empty box and all else is worth 0. DataError for a gold
    that is no box, and for pixels of a picture whose size nobody knows.
    """
    gold = _gold(task)
    found = _read(episode.answer or "")
    if found is None or (task.kind is Kind.BOX and len(found) == 2):
        return 0.0
    width, height = _scale(found, episode, task, coordinates)
    said = tuple(value / (width, height)[i % 2] for i, value in enumerate(found))
    if len(said) == 4 and not (said[0] < said[2] and said[1] < said[3]):
        return 0.0
    if task.kind is not Kind.POINT:
        return _overlap(tuple(min(1.0, max(0.0, value)) for value in said), gold)
    x, y = said if len(said) == 2 else ((said[0] + said[2]) / 2, (said[1] + said[3]) / 2)
    return float(gold[0] <= x <= gold[2] and gold[1] <= y <= gold[3])


def _overlap(one: Box, other: Box) -> float:
    sides = [min(one[i + 2], other[i + 2]) - max(one[i], other[i]) for i in (0, 1)]
    shared = max(0.0, sides[0]) * max(0.0, sides[1])
    areas = [(each[2] - each[0]) * (each[3] - each[1]) for each in (one, other)]
    return shared / (sum(areas) - shared)


def _gold(task: Task) -> Box:
    """The gold box as parts of the picture."""
    gold = task.gold if isinstance(task.gold, tuple) and len(task.gold) == 4 else (1.0, 1.0, 0.0, 0.0)
    size = _size(task)
    parts = gold if size is None else tuple(value / size[i % 2] for i, value in enumerate(gold))
    if not (0 <= parts[0] < parts[2] <= 1 + 1e-6 and 0 <= parts[1] < parts[3] <= 1 + 1e-6):
        where = "between 0 and 1 (extras holds no width and height)" if size is None else f"within {size[0]}x{size[1]}"
        raise DataError(f"task {task.id}: the gold must be a box x1, y1, x2, y2 {where}, it is {task.gold!r}")
    return parts


def _size(task: Task) -> tuple[float, float] | None:
    size = [task.extras.get(side) for side in ("width", "height")]
    known = [float(value) for value in size if isinstance(value, int | float) and value > 0]
    return (known[0], known[1]) if len(known) == 2 else None


def _scale(found: Box, episode: Episode, task: Task, coordinates: str) -> tuple[float, float]:
    """What 1 is in the answer's own coordinates, across and down."""
    if coordinates == "auto":
        coordinates = "unit" if all(abs(value) <= 1 for value in found) else "pixel"
    if coordinates in _PARTS:
        return _PARTS[coordinates], _PARTS[coordinates]
    shown = [(float(picture.width), float(picture.height)) for picture in episode.ledger.pictures()[:1]]
    size = _size(task) if coordinates == "pixel" else None
    if size is None and not shown:
        raise DataError(f"task {task.id}: an answer in pixels needs the picture's width and height in extras")
    return size or shown[0]


def _read(answer: str) -> Box | None:
    """The one box (4 numbers) or point (2) of an answer, or None."""
    text = tidy(answer).strip()
    found = _objects(text)
    if not found:
        text = _CORNERS.sub(lambda match: f"[{match[1]},{match[2]}]", text)
        lists = [match[1] for match in _LIST.finditer(text)] or [
            ",".join(match.groups()) for match in _POINT.finditer(text)
        ]
        if not lists and (bare := _BARE.fullmatch(text)):
            lists = [bare[1]]
        found = {tuple(float(number) for number in each.split(",")) for each in lists}
    only = found.pop() if len(found) == 1 else ()
    return only if len(only) in (2, 4) else None


def _objects(text: str) -> set[Box]:
    """The boxes and points of an answer in JSON, as {"bbox_2d": [...]}, alone, in a list, or in a code block."""
    bare = re.sub(r"^```(?:json)?|```$", "", text).strip()
    try:
        value = json.loads(bare, parse_int=float)
    except (ValueError, RecursionError):
        return set()
    items = [item for item in (value if isinstance(value, list) else [value]) if isinstance(item, dict)]
    keys = ("bbox_2d", "bbox", "box_2d", "box", "point_2d", "point")
    lists = [item[key] for item in items for key in keys if isinstance(item.get(key), list)]
    return {tuple(each) for each in lists if all(isinstance(number, float) for number in each)}
