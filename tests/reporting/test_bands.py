"""Bands over seeds, and means with two intervals."""

import xml.etree.ElementTree as ET

import pytest
from page_cases import draw_svg

from saccade.metrics.statistics import SeedEstimate
from saccade.reporting.plots import assign_styles, compute_seed_band, plot_curves, plot_means, theme_svg


def rows(*values):
    return [{"step": step, "accuracy": value} for step, value in enumerate(values, 1)]


def test_band_spans_the_lowest_to_the_highest_run():
    band = compute_seed_band([rows(0.0, 0.0, 0.0), rows(1.0, 1.0, 1.0), rows(0.5, 0.5, 0.5)], "accuracy")
    assert band == ([1.0, 2.0, 3.0], [0.0] * 3, [0.5] * 3, [1.0] * 3)


def test_only_steps_of_every_run_are_included():
    steps, _, mean, _ = compute_seed_band([rows(0.0, None, 0.0), rows(1.0, 1.0, 1.0, 1.0)], "accuracy")
    assert steps == [1.0, 3.0]
    assert mean == [0.5, 0.5]
    assert compute_seed_band([rows(None, None)], "accuracy") is None
    assert compute_seed_band([], "accuracy") is None
    assert compute_seed_band([rows(0.1), [{"step": 2, "accuracy": 0.5}]], "accuracy") is None


def test_variant_has_one_style():
    styles = assign_styles([f"variant {i}" for i in range(12)])
    assert len({str(style) for style in styles.values()}) == 12
    columns = {
        "one": {"variant 3": [rows(0.1, 0.2)]},
        "two": {"variant 0": [rows(0.3, 0.4)], "variant 3": [rows(0.2, 0.2)]},
    }
    svg = draw_svg(plot_curves, columns, "accuracy", styles).decode()
    ET.fromstring(svg)
    assert styles["variant 3"]["color"] in svg
    assert styles["variant 1"]["color"] not in svg


def test_plots_without_values_are_none():
    assert plot_curves({"one": {"a": [rows(None)]}}, "accuracy", assign_styles(["a"])) is None
    assert plot_curves({}, "accuracy", {}) is None
    assert plot_means({"one": {"a": (None, None)}}, assign_styles(["a"])) is None
    assert plot_curves({"one": {"a": [rows(0.5)]}, "two": {}}, "accuracy", assign_styles(["a"])) is not None


@pytest.mark.slow
@pytest.mark.parametrize("name", ["<script>", "$x$ & $y", "_hidden", "a b"])
def test_any_label_is_valid(name):
    points = (
        SeedEstimate(mean=0.2, clip_interval=(0.1, 0.3), seed_means=(0.2,)),
        SeedEstimate(mean=0.5, seed_interval=(-0.5, 1.5), seed_means=(0.4, 0.6)),
    )
    svg = draw_svg(plot_means, {name: {name: points}}, assign_styles([name]), mark_zero=True)
    ET.fromstring(svg)
    assert b"<script" not in svg
    assert svg == draw_svg(plot_means, {name: {name: points}}, assign_styles([name]), mark_zero=True)


def test_hollow_points_take_the_pages_background():
    svg = draw_svg(
        plot_means,
        {"a": {"b": (SeedEstimate(mean=0.5, seed_means=(0.5,)), None)}},
        assign_styles(["b"]),
    )
    assert b"#ffffff" in svg
    assert "fill: #ffffff" not in theme_svg(svg, "means")
