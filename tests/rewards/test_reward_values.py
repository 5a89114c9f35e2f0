"""The rewards open, grounding, number and accuracy."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reward_cases import RAN, answer, call, episode, said, task, text, think, turn

from saccade.errors import DataError
from saccade.rewards.accuracy import accuracy
from saccade.rewards.grounding import grounding
from saccade.rewards.number import number
from saccade.rewards.open import open as open_reward
from saccade.types import Kind


def opened(body, gold, mode="f1"):
    return open_reward(*said(body, gold=gold), mode=mode)


@pytest.mark.parametrize(
    ("body", "gold", "expected"),
    [
        ("red", "red", 1.0),
        ("The RED ball!", "a red ball", 1.0),
        ("red ball", "red", 2 / 3),  # P 1/2, R 1
        ("red red", "red", 2 / 3),  # multisets: the second red matches nothing
        ("red", "red red", 2 / 3),
        ("blue green red", "red", 0.5),
        ("blue", "red", 0.0),
        ("the", "the red ball", 0.0),
        ("a an the", "the red ball", 0.0),
        ("...", "red", 0.0),
        ("-5", "5", 0.0),
        ("5", "-5", 0.0),
        ("- 5", "5", 0.0),
        ("minus 5", "5", 0.0),
        ("negative 5 degrees", "-5 degrees", 1.0),
        ("\u22125", "-5", 1.0),
        ("0.5", "5", 0.0),
        (".5", "0.5", 1.0),
        ("-.5", "-0.5", 1.0),
        ("1.5", "15", 0.0),
        ("1,000", "1000", 1.0),
        ("3-5", "3 5", 1.0),  # between numbers it is no sign
        ("5.", "5", 1.0),
        ("A", "A", 1.0),  # the gold is itself an article
        ("the", "A", 0.0),
    ],
)
def test_f1(body, gold, expected):
    assert opened(body, gold) == pytest.approx(expected)


def test_exact_is_all_or_nothing_and_ordered():
    assert opened("The red ball.", "red ball", "exact") == 1.0
    assert opened("ball red", "red ball", "exact") == 0.0
    assert opened("red or blue", "red", "exact") == 0.0


@settings(deadline=None)
@given(st.text(max_size=40), st.text(max_size=40))
def test_f1_is_symmetric_and_bounded(left, right):
    value = opened(left, right)
    assert 0.0 <= value <= 1.0
    assert value == 0.0 or opened(left, left) == 1.0


def grounded(body, gold=(4.0, 8.0)):
    return grounding(*said(body, gold=gold, kind=Kind.GROUNDING))


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("4 - 8", 1.0),
        ("4.0s to 8.0s", 1.0),
        ("From 4 to 8 seconds.", 1.0),
        ("[4, 8]", 1.0),
        ("(4.0,8.0)", 1.0),
        ("between 4 and 8", 1.0),
        ("00:04 - 00:08", 1.0),
        ("00:00:04\u201300:00:08.0", 1.0),
        ("start: 4, end: 8", 1.0),
        ('{"start_time": 4.0, "end_time": 8.0}', 1.0),
        ("6-10", 2 / 6),
        ("4-6", 0.5),
        ("0 to 16", 0.25),
        ("8-12", 0.0),
        ("20 to 30", 0.0),
        ("8-4", 0.0),  # inverted
        ("6-6", 0.0),  # empty
        ("8-4, no: 4-8", 0.0),  # the first well-formed span counts
        ("0-1, 4-8", 0.0),
        ("-4 to 8", 0.0),
        ("4 to -8", 0.0),
        ("4:75 to 8:00", 0.0),
        ("4 to 8 minutes", 0.0),
        ("frames 4 to 8 frames", 0.0),
        ("4", 0.0),
        ("", 0.0),
        ("nan to inf", 0.0),
    ],
)
def test_iou(body, expected):
    assert grounded(body) == pytest.approx(expected)


def test_minutes_and_hours():
    assert grounded("01:04 to 1:08", (64.0, 68.0)) == 1.0
    assert grounded("1:01:04 to 1:01:08.5", (3664.0, 3668.5)) == 1.0


@pytest.mark.parametrize("gold", [(8.0, 4.0), "4-8", 4.0])
def test_a_gold_that_is_no_span_is_named(gold):
    with pytest.raises(DataError, match="task t: "):
        grounded("4-8", gold)


@settings(deadline=None)
@given(st.floats(0, 1000), st.floats(0, 1000))
def test_iou_is_bounded(start, end):
    assert 0.0 <= grounded(f"{start:.3f} to {end:.3f}") <= 1.0


def numbered(body, gold, **settings):
    return number(*said(body, gold=gold, kind=Kind.NUMBER), **settings)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("100", 1.0),
        ("105", 1.0),
        ("95", 1.0),
        ("110", 0.9),
        ("90", 0.9),
        ("125", 0.6),
        ("150", 0.1),
        ("151", 0.0),
        ("-100", 0.0),
    ],
)
def test_mra_has_the_official_values(body, expected):
    assert numbered(body, 100.0) == pytest.approx(expected)


@pytest.mark.parametrize(
    "body",
    [
        "4",
        "four",
        "Four chairs",
        "4.0 m",
        "4.0m",
        "+4",
        "\\boxed{4}",
        "4 (four)",
        "4e0",
        "4 m²",
        "4 m^2",
        "There are 4.",
    ],
)
def test_ways_to_write_a_number(body):
    assert numbered(body, 4.0, mode="exact") == 1.0


@pytest.mark.parametrize(
    "body",
    [
        "3 or 4",
        "3-4",
        "4/1",
        "-4",
        "minus four",
        "0.4",
        "40",
        "4, 5",
        "x4",
        "",
        "none",
        "1e999",
        "4^2",
        "4²",
        "4 million",
        "forty-four",
        "14^2",
    ],
)
def test_ways_to_be_wrong(body):
    assert numbered(body, 4.0, mode="exact") == 0.0


def test_signs_thousands_tolerance_and_zero():
    assert numbered("\u22124", -4.0, mode="exact") == 1.0
    assert numbered("1,234.5", 1234.5, mode="exact") == 1.0
    assert numbered("3.1", "3.0", mode="exact", tolerance=0.1) == 1.0
    assert numbered("3.11", "3.0", mode="exact", tolerance=0.1) == 0.0
    assert numbered("0", 0.0) == 1.0
    assert numbered("0.001", 0.0) == 0.0
    with pytest.raises(DataError, match="must be a number"):
        numbered("4", "four or so")


def test_accuracy_follows_the_kind():
    assert accuracy(*said("B", gold="B", kind=Kind.CHOICE, choices=("x", "y"))) == 1.0
    assert accuracy(*said("4-6", gold=(4.0, 8.0), kind=Kind.GROUNDING)) == 0.5
    assert accuracy(*said("110", gold=100, kind=Kind.NUMBER)) == pytest.approx(0.9)
    assert accuracy(*said("110", gold=100, kind=Kind.NUMBER), number="exact") == 0.0
    assert accuracy(*said("110", gold=100, kind=Kind.NUMBER), number="exact", tolerance=10) == 1.0
    assert accuracy(*said("red ball", gold="red")) == pytest.approx(2 / 3)
    assert accuracy(*said("red ball", gold="red"), open="exact") == 0.0


def test_only_the_last_closed_answer_is_graded():
    of = task("red")
    assert accuracy(episode(turn(think(), answer("red"), answer("blue")), of=of), of) == 0.0
    assert accuracy(episode(turn(think(), answer("red"), answer(" ")), of=of), of) == 1.0
    assert accuracy(episode(turn(think(), answer("red", closed=False)), of=of), of) == 0.0
    printed = episode(turn(think(), call(), results=[RAN]), turn(think(), text("red")), of=of)
    assert accuracy(printed, of) == 0.0
