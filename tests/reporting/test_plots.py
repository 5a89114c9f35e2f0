"""Curves and bars: what they draw, and what they leave out."""

import math
import xml.etree.ElementTree as ET

import pytest

from saccade.view.plots import PANELS, Bar, Panel, bars, curve, running_mean, series_of, themed

ROWS = [
    {"stage": "rl", "step": step, "reward": 1.0 + step, "reward/accuracy": 0.5, "accuracy": 0.5, "entropy": None}
    | {f"accuracy/K={k}": 0.4 for k in (16, 4, 8)}
    | {"logprob_gap_mean": 1e-6, "logprob_gap_max": 0.0, "end/answered": 1.0}
    for step in range(12)
]
BY_TITLE = {panel.title: panel for panel in PANELS}


def test_a_panel_takes_its_keys_and_names_them_shortly():
    assert list(series_of(BY_TITLE["Reward and its parts"], ROWS)) == ["all", "accuracy"]
    assert list(series_of(BY_TITLE["Accuracy by frames shown"], ROWS)) == ["K=4", "K=8", "K=16"]
    assert series_of(BY_TITLE["Accuracy"], ROWS)["all"] == ([float(step) for step in range(12)], [0.5] * 12)


def test_what_is_not_a_finite_number_is_left_out():
    rows = [{"step": i, "entropy": value} for i, value in enumerate([0.1, None, math.nan, math.inf, "no", True, 0.2])]
    assert series_of(BY_TITLE["Entropy"], rows)["entropy"] == ([0.0, 6.0], [0.1, 0.2])


def test_a_panel_without_data_is_not_drawn():
    assert curve(BY_TITLE["Loss"], ROWS) is None
    assert curve(BY_TITLE["Loss"], [{"step": 0}]) is None


@pytest.mark.slow
def test_every_panel_draws_svg_and_png():
    for panel in PANELS:
        key = panel.keys[0].replace("*", "x")
        svg = curve(panel, [{"step": 0, key: 0.5}, {"step": 1, key: 0.5}])
        ET.fromstring(svg)
        assert curve(panel, [{"step": 0, key: 0.5}], fmt="png").startswith(b"\x89PNG")


def test_the_same_numbers_give_the_same_picture():
    assert curve(BY_TITLE["Accuracy"], ROWS) == curve(BY_TITLE["Accuracy"], ROWS)


def test_the_running_mean_keeps_the_length_and_a_constant():
    assert running_mean([2.0] * 50) == [2.0] * 50
    assert running_mean([4.0]) == [4.0]
    assert len(running_mean([float(i) for i in range(101)])) == 101


@pytest.mark.slow
@pytest.mark.parametrize("name", ["<script>alert(1)</script>", "$x$ & $y", "_hidden", "é漢"])
def test_any_name_can_stand_in_a_picture(name):
    bar = Bar(value=0.5, low=0.25, high=0.75, floor=0.2)
    svg = themed(bars({name: {name: bar, "other": bar}}))
    ET.fromstring(svg)
    assert "<script" not in svg
    ET.fromstring(curve(Panel(title="t", unit="", keys=("reward/*",)), [{f"reward/{name}": 1.0, "reward/b": 2.0}]))


def test_a_themed_picture_takes_its_colours_from_the_page():
    svg = themed(curve(BY_TITLE["Reward and its parts"], ROWS))
    assert "var(--s1, #0072b2)" in svg
    assert "currentColor" in svg
    assert "#1a1b1c" not in svg
    assert "<?xml" not in svg
