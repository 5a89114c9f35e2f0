"""Bands over seeds, and dots with two intervals."""

import xml.etree.ElementTree as ET

import pytest

from saccade.view.bands import Dot, band, curves, dots, looks
from saccade.view.plots import themed


def rows(*values):
    return [{"step": step, "accuracy": value} for step, value in enumerate(values, 1)]


def test_a_band_goes_from_the_lowest_to_the_highest_run():
    found = band([rows(0.0, 0.0, 0.0), rows(1.0, 1.0, 1.0), rows(0.5, 0.5, 0.5)], "accuracy")
    assert found == ([1.0, 2.0, 3.0], [0.0] * 3, [0.5] * 3, [1.0] * 3)


def test_only_steps_that_every_run_has_are_shown():
    steps, _, mean, _ = band([rows(0.0, None, 0.0), rows(1.0, 1.0, 1.0, 1.0)], "accuracy")
    assert steps == [1.0, 3.0]
    assert mean == [0.5, 0.5]
    assert band([rows(None, None)], "accuracy") is None
    assert band([], "accuracy") is None
    assert band([rows(0.1), [{"step": 2, "accuracy": 0.5}]], "accuracy") is None


def test_an_arm_looks_the_same_wherever_it_stands():
    look = looks([f"arm {i}" for i in range(12)])
    assert len({(each.colour, str(each.style)) for each in look.values()}) == 12
    columns = {"one": {"arm 3": [rows(0.1, 0.2)]}, "two": {"arm 0": [rows(0.3, 0.4)], "arm 3": [rows(0.2, 0.2)]}}
    svg = curves(columns, "accuracy", look).decode()
    ET.fromstring(svg)
    assert look["arm 3"].colour in svg
    assert look["arm 1"].colour not in svg


def test_what_has_nothing_to_show_is_not_drawn():
    assert curves({"one": {"a": [rows(None)]}}, "accuracy", looks(["a"])) is None
    assert curves({}, "accuracy", {}) is None
    assert dots({"one": {"a": []}}, looks(["a"])) is None
    assert curves({"one": {"a": [rows(0.5)]}, "two": {}}, "accuracy", looks(["a"]), fmt="png").startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["<script>", "$x$ & $y", "_hidden", "a b"])
def test_any_name_can_stand_in_a_picture(name):
    each = [Dot(mean=0.2, tasks=(0.1, 0.3), seeds=None, hollow=True), Dot(mean=0.5, tasks=None, seeds=(-0.5, 1.5))]
    svg = dots({name: {name: each}}, looks([name]), zero=True)
    ET.fromstring(svg)
    assert b"<script" not in svg
    assert svg == dots({name: {name: each}}, looks([name]), zero=True)


def test_what_is_hollow_is_as_dark_as_the_page():
    svg = dots({"a": {"b": [Dot(mean=0.5, tasks=None, seeds=None, hollow=True)]}}, looks(["b"]))
    assert b"#ffffff" in svg
    assert "fill: #ffffff" not in themed(svg)
