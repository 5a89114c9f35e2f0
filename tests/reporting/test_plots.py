"""Plots of curves and bars."""

import math
import xml.etree.ElementTree as ET
from functools import partial

import pytest
from page_cases import draw_svg

from saccade.metrics.tables import Bar
from saccade.reporting.plots import (
    PANELS,
    Panel,
    compute_running_mean,
    extract_bands,
    extract_series,
    plot_bars,
    plot_panel,
    theme_svg,
)
from saccade.reporting.report import Plot

ROWS = [
    {"stage": "rl", "step": step, "reward": 1.0 + step, "reward/accuracy": 0.5, "accuracy": 0.5, "entropy": None}
    | {f"accuracy/K={k}": 0.4 for k in (16, 4, 8)}
    | {"engine_trainer_logprob_diff_mean": 1e-6, "engine_trainer_logprob_diff_max": 0.0, "status/answered": 1.0}
    for step in range(12)
]
BY_TITLE = {panel.title: panel for panel in PANELS}


def test_panel_selects_and_labels_its_keys():
    assert list(extract_series(BY_TITLE["Reward and its parts"], ROWS)) == ["all", "accuracy"]
    assert list(extract_series(BY_TITLE["Accuracy by frames shown"], ROWS)) == ["K=4", "K=8", "K=16"]
    assert extract_series(BY_TITLE["Accuracy"], ROWS)["all"] == ([float(step) for step in range(12)], [0.5] * 12)


def test_statistics_of_tools_and_sources_have_panels_of_their_own():
    row = {"step": 0, "greedy/accuracy": 0.5, "source/a/b/accuracy": 0.4, "source/a/c/accuracy": 0.6, "calls": 1.0}
    row |= {"tool/crop_video/calls": 2.0, "tool/crop_video/frac_failed": 0.25, "source/a/b/calls": 1.0}
    labels = {panel.title: [*extract_series(panel, [row])] for panel in PANELS}
    assert {title: names for title, names in labels.items() if names} == {
        "Tool calls": ["all"],
        "Tool calls by tool": ["crop video"],
        "Failed calls by tool": ["crop video"],
        "Accuracy by data source": ["a/b", "a/c"],
        "Tool calls by data source": ["a/b"],
        "Held-out accuracy": ["greedy"],
    }


def test_validations_have_bands():
    panel = BY_TITLE["Held-out accuracy"]
    rows = [
        {"step": step, "greedy/accuracy": 0.5, "greedy/accuracy/low": 0.2, "greedy/accuracy/high": high}
        for step, high in ((0, 0.8), (4, None), (8, 0.9))
    ]
    assert extract_bands(panel, rows) == {"greedy": ([0.0, 8.0], [0.2, 0.2], [0.8, 0.9])}
    assert extract_bands(BY_TITLE["Accuracy"], ROWS) == {}
    without = [{key: value for key, value in row.items() if not key.endswith(("low", "high"))} for row in rows]
    assert draw_svg(plot_panel, panel, rows, is_smoothed=False) != draw_svg(
        plot_panel, panel, without, is_smoothed=False
    )


def test_values_that_are_not_finite_numbers_are_left_out():
    rows = [{"step": i, "entropy": value} for i, value in enumerate([0.1, None, math.nan, math.inf, "no", True, 0.2])]
    assert extract_series(BY_TITLE["Entropy"], rows)["entropy"] == ([0.0, 6.0], [0.1, 0.2])


def test_panel_without_values_is_not_drawn():
    assert plot_panel(BY_TITLE["Loss"], ROWS) is None
    assert plot_panel(BY_TITLE["Loss"], [{"step": 0}]) is None


@pytest.mark.slow
def test_every_panel_as_svg_and_png():
    for panel in PANELS:
        key = panel.keys[0].replace("*", "x")
        plot = Plot(title="", draw=partial(plot_panel, panel, [{"step": 0, key: 0.5}, {"step": 1, key: 0.5}]))
        ET.fromstring(plot.encode("svg"))
        assert plot.encode("png").startswith(b"\x89PNG")


@pytest.mark.slow
def test_plots_are_deterministic():
    """Also if the figure has been drawn as another format before."""
    first, second = (Plot(title="", draw=partial(plot_panel, BY_TITLE["Accuracy"], ROWS)) for _ in range(2))
    svg, png = first.encode("svg"), first.encode("png")
    assert (second.encode("png"), second.encode("svg")) == (png, svg)


def test_running_mean_keeps_length_and_constants():
    assert compute_running_mean([2.0] * 50) == [2.0] * 50
    assert compute_running_mean([4.0]) == [4.0]
    assert len(compute_running_mean([float(i) for i in range(101)])) == 101


@pytest.mark.slow
@pytest.mark.parametrize("name", ["<script>alert(1)</script>", "$x$ & $y", "_hidden", "é漢"])
def test_any_label_is_valid(name):
    bar = Bar(value=0.5, low=0.25, high=0.75, marks=((name, 0.2),))
    svg = theme_svg(draw_svg(plot_bars, {name: {name: bar, "other": bar}}), name)
    ET.fromstring(svg)
    assert "<script" not in svg
    panel = Panel(title="t", unit="", keys=("reward/*",))
    ET.fromstring(draw_svg(plot_panel, panel, [{f"reward/{name}": 1.0, "reward/b": 2.0}]))


def test_themed_svg_takes_its_colors_from_the_page():
    svg = theme_svg(draw_svg(plot_panel, BY_TITLE["Reward and its parts"], ROWS), "a title")
    assert 'aria-label="a title"' in svg
    assert "var(--s1, #0072b2)" in svg
    assert "currentColor" in svg
    assert "#1a1b1c" not in svg
    assert "<?xml" not in svg


def test_bars_are_grouped_by_method():
    bar = Bar(value=0.5, low=0.25, high=0.75, marks=(("the baseline", 0.2),))
    rows = {"count": bar, "when": bar}
    svg = draw_svg(plot_bars, {"before": rows, "after": {"count": bar}, "without tools": rows}).decode()
    for label, count in (
        ("before", 1),
        ("after", 1),
        ("without tools", 1),
        ("count", 1),
        ("when", 1),
        ("the baseline", 1),
    ):
        assert svg.count(f">{label}</text>") == count, label  # rows are labeled once for all methods
    assert svg.count(">0.50</text>") == 5


@pytest.mark.slow
def test_series_differ_without_colors():
    svg = draw_svg(plot_panel, BY_TITLE["Reward and its parts"], [{"reward/a": 1.0, "reward/b": 2.0}] * 3).decode()
    assert svg.count("stroke-dasharray") >= 1
