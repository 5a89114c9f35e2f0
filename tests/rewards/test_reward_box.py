"""Boxes and points in every format that models write, and in all coordinates."""

import json
from dataclasses import replace

import pytest
from error_cases import raises
from hypothesis import given, settings
from hypothesis import strategies as st
from reward_cases import answer_episode

from saccade.errors import DataError
from saccade.ledger import ImageRef, ImageSlot, Ledger
from saccade.rewards.answer_types.base import get_answer_type
from saccade.rewards.answer_types.box import BoxAnswer
from saccade.rewards.answer_types.point import PointAnswer
from saccade.types import AnswerType, Task

GROUND_TRUTH = (100.0, 50.0, 300.0, 150.0)  # of an image of 400 x 200
SIZE = {"width": 400, "height": 200}


def score(body, ground_truth=GROUND_TRUTH, kind=AnswerType.BOX, extras=SIZE, ledger=None, **rule):
    episode = answer_episode(body, ground_truth=ground_truth, kind=kind)
    task = replace(episode.task, extras=extras)
    return get_answer_type(kind)(**rule)(replace(episode, task=task, ledger=ledger or Ledger()))


def score_point(body, **more):
    return score(body, kind=AnswerType.POINT, **more)


TWO_POINTS = [
    "(100,50),(300,150)",
    "(100, 50) (300, 150)",
    "[100, 50], [300, 150]",
    "[[100, 50], [300, 150]]",
    "The answer is (100, 50), (300, 150).",
    "\\boxed{(100, 50), (300, 150)}",
    "\\left(100, 50\\right), \\left(300, 150\\right)",
    "<point x='100' y='50'><point x='300' y='150'>",
    '[{"point_2d": [100, 50]}, {"point_2d": [300, 150]}]',
    "The points are (100, 50), (300, 150)",
    "(100, 50) and (300, 150)",
    "box one: (100, 50), (300, 150)",
]


@pytest.mark.parametrize(
    "body",
    [
        "[100, 50, 300, 150]",
        "[100.0,50.0,300.0,150.0]",
        "(100, 50, 300, 150)",
        "100, 50, 300, 150",
        "100, 50, 300, 150.",
        "Answer: 100, 50, 300, 150",
        "<bbox>100, 50, 300, 150</bbox>",
        "Bounding box: [100, 50], [300, 150]",
        "\\left[100, 50, 300, 150\\right]",
        "bbox: (100, 50) (300, 150)",
        "<box>(100,50),(300,150)</box>",
        "<|box_start|>(100,50),(300,150)<|box_end|>",
        '{"bbox_2d": [100, 50, 300, 150]}',
        '{"bbox_2d": [100, 50, 300, 150], "label": "cat 7"}',
        '[{"bbox_2d": [100, 50, 300, 150], "label": "the cat"}]',
        '```json\n[\n{"bbox_2d": [100, 50, 300, 150]}\n]\n```',
        '{"bbox": [100, 50, 300, 150]}',
        "[[100, 50, 300, 150]]",
        "The cat is at [100, 50, 300, 150].",
        "\\boxed{[100, 50, 300, 150]}",
        "<box>[100, 50, 300, 150]</box>",
        "[0.25, 0.25, 0.75, 0.75]",
        "[.25, .25, .75, .75]",
        "[100, 50, 300, 150] and again [100, 50, 300, 150]",
        "［100，50，300，150］",
    ],
)
def test_box_formats(body):
    assert score(body) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("[100, 50, 200, 150]", 0.5),
        ("[200, 50, 400, 150]", 1 / 3),
        ("[0, 0, 400, 200]", 0.25),
        ("[-50, -9, 9999, 400]", 0.25),  # clipped to the image
        ("[0, 0, 100, 50]", 0.0),  # they touch
        ("[0, 0, 10, 10]", 0.0),
        ("[500, 300, 600, 400]", 0.0),
        ("[300, 150, 100, 50]", 0.0),  # inverted
        ("[100, 50, 100, 150]", 0.0),  # empty
        ("[\u2212100, 50, 300, 150]", 2 / 3),
        ("[1e2, 50, 3.0E+2, 150]", 1.0),
        ("[100, 50, 1e999, 1e999]", 4 / 9),
        ("[100, 50, 300]", 0.0),
        ("[100, 50, 300, 150, 1]", 0.0),
        ("[100, 50, 300, 150] or [0, 0, 10, 10]", 0.0),
        ('[{"bbox_2d": [100, 50, 300, 150]}, {"bbox_2d": [0, 0, 9, 9]}]', 0.0),
        ("(200, 100)", 0.0),  # a point is no box
        *((pair, 0.0) for pair in TWO_POINTS),
        ('{"bbox_2d": [NaN, 50, 300, 150]}', 0.0),
        ('{"bbox_2d": ["100", 50, 300, 150]}', 0.0),
        ('{"bbox_2d": [true, 50, 300, 150]}', 0.0),
        ("[1f2, 50, 300, 150]", 0.0),
        ("100 50 300 150", 0.0),
        ("all of it", 0.0),
        ("", 0.0),
        ("[" * 5000, 0.0),
    ],
)
def test_iou_of_boxes(body, expected):
    assert score(body) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("(200, 100)", 1.0),
        ("[200, 100]", 1.0),
        ("200, 100", 1.0),
        ('{"point_2d": [200, 100], "label": "cat"}', 1.0),
        ('<point x="200" y="100" alt="cat">cat</point>', 1.0),
        ("click(200, 100)", 1.0),
        ("(0.5, 0.5)", 1.0),
        ("(100, 50)", 1.0),  # the edge belongs to the box
        ("(99, 100)", 0.0),
        ("(200, 151)", 0.0),
        ("(-200, 100)", 0.0),
        ("(200, 100) or (10, 10)", 0.0),
        ("[100, 50, 300, 150]", 1.0),  # the center of a box
        ("[0, 0, 150, 60]", 0.0),
        ("(200)", 0.0),
        ("(200, 100, 7)", 0.0),
        ('{"point_2d": [NaN, 100]}', 0.0),
        ("", 0.0),
    ],
)
def test_points(body, expected):
    assert score_point(body) == expected


@pytest.mark.parametrize(
    ("coordinates", "body"),
    [
        ("pixel", "[100, 50, 300, 150]"),
        ("unit", "[0.25, 0.25, 0.75, 0.75]"),
        ("percent", "[25, 25, 75, 75]"),
        ("thousand", "[250, 250, 750, 750]"),
        ("shown", "[16, 8, 48, 24]"),
        ("auto", "[100, 50, 300, 150]"),
    ],
)
def test_coordinates(coordinates, body):
    image = ImageRef(path="a.png", digest="d", time=None, width=64, height=32)
    ledger = Ledger().observe((1, 2), slots=(ImageSlot(index=0, image=image, num_tokens=2),))
    assert score(body, ledger=ledger, coordinates=coordinates) == pytest.approx(1.0)
    fractions = tuple(value / side for value, side in zip(GROUND_TRUTH, (400, 200, 400, 200), strict=True))
    if coordinates in ("unit", "percent", "thousand", "shown"):  # these don't need the image size
        assert score(body, ground_truth=fractions, extras={}, ledger=ledger, coordinates=coordinates) == pytest.approx(
            1.0
        )
    assert score("[16, 8, 48, 24]", ground_truth=fractions, extras={}, ledger=ledger) == pytest.approx(1.0)


def test_invalid_ground_truth_raises():
    for ground_truth in ((100.0, 50.0), (300.0, 50.0, 100.0, 150.0), (100.0, 50.0, 500.0, 150.0), "[1, 2, 3, 4]", 4.0):
        with raises(DataError, key="ground_truth", value=ground_truth):
            score("[1, 2, 3, 4]", ground_truth=ground_truth)
    with raises(DataError, key="ground_truth", value=GROUND_TRUTH):
        score("[1, 2, 3, 4]", extras={})


def test_pixels_of_an_image_of_unknown_size():
    whole = {"ground_truth": (0.0, 0.0, 1.0, 1.0), "extras": {}}
    assert score("[1, 2, 30, 40]", **whole) == 0.0  # the model's choice: no reason to stop a training
    with raises(DataError, key="extras.width", value=None):  # the recipe's
        score("[1, 2, 30, 40]", **whole, coordinates="pixel")


def test_a_box_outside_of_its_image_is_found_before_training():
    task = Task(
        id="0", question="?", media=(), answer_type=AnswerType.BOX, ground_truth=GROUND_TRUTH, extras={"width": 400}
    )
    for kind in (BoxAnswer, PointAnswer):
        assert kind.find_problem(task)[0] == "ground_truth"
        assert kind.find_problem(replace(task, extras={"width": 400, "height": 200})) is None


SIDES = st.tuples(*[st.floats(0, 1, allow_nan=False)] * 4)


@settings(deadline=None)
@given(SIDES, SIDES)
def test_overlap_is_symmetric_and_bounded(one, other):
    one, other = (tuple(round(value, 6) for value in box) for box in (one, other))
    if not (one[0] < one[2] and one[1] < one[3] and other[0] < other[2] and other[1] < other[3]):
        return
    values = [score(json.dumps({"bbox_2d": a}), ground_truth=b, extras={}) for a, b in ((one, other), (other, one))]
    assert values[0] == pytest.approx(values[1])
    assert 0.0 <= values[0] <= 1.0
    assert score(json.dumps(one), ground_truth=one, extras={}, coordinates="unit") == pytest.approx(1.0)


@settings(deadline=None)
@given(st.text(alphabet='0123456789.,-+e[](){}<> "bx:NaIty', max_size=60))
def test_any_answer_has_a_value(body):
    assert 0.0 <= score(body) <= 1.0
    assert score_point(body) in (0.0, 1.0)
