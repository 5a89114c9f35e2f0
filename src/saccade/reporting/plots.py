"""Plot curves, bars and points in one style; encode them as SVG or PNG.

The colors are those of Okabe and Ito (2008), which most color-blind readers can distinguish. `theme_svg` makes an SVG
take its colors from the surrounding page, so that one image serves a light and a dark page.
"""

import contextlib
import html
import io
import math
import textwrap
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Figure  # the type of a plot
from matplotlib.ticker import LogLocator, NullLocator
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from saccade.metrics.statistics import SeedEstimate
from saccade.metrics.tables import Bar

TEXT_COLOR, GRID_COLOR = "#1a1b1c", "#8a8b8c"
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7a6f5d", "#b3a600")
LINE_STYLES = ("-", (0, (4, 1.5)), (0, (1, 1)))
PANEL_SIZE = (3.6, 2.35)  # inches
COLUMN_SIZE = (3.3, 2.2)  # inches
PLOT_DPI = 160  # of PNGs
BAR_HEIGHT = 0.2  # inches of a row in a plot of bars
ROW_HEIGHT = 0.22  # inches of a variant in a plot of means
FRAME_SIZE = (112, 84)  # pixels of a frame, at most
FRAME_GAP, FRAME_LABEL_WIDTH, FRAME_TEXT_HEIGHT = 6, 64, 22  # pixels beside a frame, of a row's label, below a frame
RC_PARAMS: dict[Any, Any] = {  # matplotlib's stubs type the keys as literals
    "figure.dpi": PLOT_DPI,
    "svg.fonttype": "none",
    "svg.hashsalt": "saccade",
    "font.family": "sans-serif",
    "font.size": 8.5,
    "axes.edgecolor": GRID_COLOR,
    "axes.labelcolor": TEXT_COLOR,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlecolor": TEXT_COLOR,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "axes.formatter.useoffset": False,
    "text.color": TEXT_COLOR,
    "xtick.color": TEXT_COLOR,
    "ytick.color": TEXT_COLOR,
    "grid.color": GRID_COLOR,
    "grid.linewidth": 0.4,
    "grid.alpha": 0.35,
    "legend.frameon": False,
}

ImageFormat = Literal["svg", "png"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """The metrics of one small plot ("reward/*" matches every key with that prefix), and its axis."""

    title: str
    unit: str
    keys: tuple[str, ...]
    is_log: bool = False
    axis_max: float | None = None  # of an axis that starts at 0
    # first and last part of a key, between slashes, that label its series; the last one is excluded
    label_parts: tuple[int | None, int | None] = (-1, None)


PANELS = (
    Panel(title="Loss", unit="nats per token", keys=("loss",)),
    Panel(title="Reward and its parts", unit="per episode", keys=("reward", "reward/*", "credit")),
    Panel(title="Accuracy", unit="mean, training rollouts", keys=("accuracy", *(f"accuracy/{kind}" for kind in (
        "choice", "open", "number", "grounding"))), axis_max=1.0),
    Panel(title="Accuracy by question type", unit="mean", keys=("accuracy/question_type/*",), axis_max=1.0),
    Panel(title="Accuracy by frames shown", unit="mean", keys=("accuracy/K=*",), axis_max=1.0),
    Panel(title="Format compliance", unit="share of episodes", keys=("format_compliance",), axis_max=1.0),
    Panel(title="Tool calls", unit="per episode", keys=("calls", "calls/executed", "calls/succeeded")),
    Panel(title="Where calls look", unit="share", keys=("looking/frac_calls_hit", "looking/frac_episodes_hit",
          "looking/evidence_recall", "looking/coverage", "looking/overlap"), axis_max=1.0, label_parts=(1, 2)),
    Panel(title="Accuracy minus the calls' cost, and regret", unit="per episode", keys=(
        "looking/net_accuracy", "looking/regret"), label_parts=(1, 2)),
    Panel(title="Tool calls by frames shown", unit="per episode", keys=("calls/K=*",)),
    Panel(title="Reward with calls minus without", unit="difference", keys=("call_reward_diff/*",)),
    Panel(title="Episode status", unit="share of episodes", keys=("status/*",), axis_max=1.0),
    Panel(
        title="Errors, unanswered, ungraded",
        unit="share of episodes",
        keys=("frac_errors", "frac_unanswered", "frac_ungraded"),
    ),
    Panel(title="Groups solved", unit="share", keys=("solve_rate", "solved/*"), axis_max=1.0),
    Panel(title="Tokens sampled", unit="per episode", keys=("response_tokens", "sampled_tokens")),
    Panel(title="Visual tokens", unit="per episode", keys=("visual_tokens",)),
    Panel(title="Entropy", unit="nats per token", keys=("entropy",)),
    Panel(title="Gradient norm", unit="before clipping", keys=("grad_norm",)),
    Panel(title="Learning rate", unit="", keys=("lr",)),
    Panel(title="Engine–trainer difference", unit="|Δ logprob|, nats", keys=(
        "engine_trainer_logprob_diff_mean", "engine_trainer_logprob_diff_max"), is_log=True),
    Panel(title="Clipped tokens", unit="share", keys=("clip_fraction",)),
    Panel(title="Importance weights", unit="trainer / engine", keys=("tis_weight_mean", "tis_weight_max")),
    Panel(title="Staleness", unit="versions", keys=("staleness_mean", "staleness_max")),
    Panel(title="KL", unit="nats per token", keys=("kl", "kl/*")),
    Panel(title="Seconds per step", unit="s", keys=("seconds/*", "rollout/reward_seconds")),
    Panel(title="Throughput", unit="tokens per second", keys=(
        "sampled_tokens_per_second", "packed_tokens_per_second", "packed_tokens_per_second/train")),
    Panel(title="Model FLOPs utilization", unit="fraction of the GPU's peak", keys=("mfu",), axis_max=1.0),
    Panel(title="Peak memory", unit="GiB", keys=("memory_gib", "memory_device_gib")),
    Panel(title="Tool calls by tool", unit="per episode", keys=("tool/*/calls",), label_parts=(1, -1)),
    Panel(title="Failed calls by tool", unit="share of calls", keys=("tool/*/frac_failed",), axis_max=1.0,
          label_parts=(1, -1)),
    Panel(title="Repeated calls by tool", unit="share of calls", keys=("tool/*/frac_duplicate",), axis_max=1.0,
          label_parts=(1, -1)),
    Panel(title="Accuracy by data source", unit="mean", keys=("source/*/accuracy",), axis_max=1.0, label_parts=(1, -1)),
    Panel(title="Tool calls by data source", unit="per episode", keys=("source/*/calls",), label_parts=(1, -1)),
    Panel(title="Held-out accuracy", unit="mean, 95 % interval", keys=("greedy/accuracy", "sampled/accuracy"),
          axis_max=1.0, label_parts=(0, 1)),
    Panel(title="Held-out reward", unit="per episode", keys=("greedy/reward", "sampled/reward"), label_parts=(0, 1)),
    Panel(title="Held-out format compliance", unit="share of episodes, 95 % interval", keys=(
        "greedy/format_compliance", "sampled/format_compliance"), axis_max=1.0, label_parts=(0, 1)),
    Panel(title="Held-out tool calls", unit="per episode", keys=("greedy/calls", "sampled/calls"), label_parts=(0, 1)),
)  # fmt: skip

Series = dict[str, tuple[list[float], list[float]]]
Style = dict[str, Any]  # color and linestyle of a variant
StepMetrics = Sequence[Mapping[str, Any]]  # the metrics of one run's steps
BeforeAndAfter = tuple[SeedEstimate | None, SeedEstimate | None]  # RL


@contextlib.contextmanager
def apply_style() -> Iterator[None]:
    """Plot and encode figures in the style of reports; warn of no glyph, since an SVG has the fonts of its reader."""
    with matplotlib.rc_context(RC_PARAMS), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")
        yield


def extract_series(panel: Panel, rows: Sequence[Mapping[str, Any]]) -> Series:
    """Return the panel's series by label, each as steps and finite values."""
    series: Series = {}
    for label, key in _match_keys(panel, rows).items():
        points = [(row.get("step", i), row[key]) for i, row in enumerate(rows) if is_finite_number(row.get(key))]
        if points:
            steps, values = zip(*points, strict=True)
            series[label] = ([float(step) for step in steps], [float(value) for value in values])
    return series


def extract_bands(
    panel: Panel, rows: Sequence[Mapping[str, Any]]
) -> dict[str, tuple[list[float], list[float], list[float]]]:
    """Return the intervals of the panel's series that have some, by label: steps, lower and upper ends."""
    bands: dict[str, tuple[list[float], list[float], list[float]]] = {}
    for label, key in _match_keys(panel, rows).items():
        points = [
            (float(row.get("step", i)), float(row[f"{key}/low"]), float(row[f"{key}/high"]))
            for i, row in enumerate(rows)
            if is_finite_number(row.get(f"{key}/low")) and is_finite_number(row.get(f"{key}/high"))
        ]
        if points:
            steps, lows, highs = zip(*points, strict=True)
            bands[label] = ([*steps], [*lows], [*highs])
    return bands


def _match_keys(panel: Panel, rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the keys of the panel's series by label."""
    names = dict.fromkeys(key for row in rows for key in row)
    ordered = sorted(names, key=lambda key: (len(key), key) if "/K=" in key else (0, ""))
    matches = [key for pattern in panel.keys for key in ordered if fnmatchcase(key, pattern)]
    return {_format_label(key, panel): key for key in dict.fromkeys(matches)}


def _format_label(key: str, panel: Panel) -> str:
    """Return a key's legend label, without the part that the title repeats."""
    is_total = len(panel.keys) > 1 and key == panel.keys[0] and "/" not in key and f"{key}/" in " ".join(panel.keys)
    return "all" if is_total else "/".join(key.split("/")[slice(*panel.label_parts)]).replace("_", " ")


def is_finite_number(value: Any) -> bool:
    """Return whether a logged value is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def compute_running_mean(values: Sequence[float]) -> list[float]:
    """Return a centered mean over about a tenth of the points (at least 3), narrower at both ends."""
    half = max(1, len(values) // 20)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    bounds = [(max(0, i - half), min(len(values), i + half + 1)) for i in range(len(values))]
    return [float(sums[end] - sums[start]) / (end - start) for start, end in bounds]


def plot_panel(panel: Panel, rows: Sequence[Mapping[str, Any]], *, is_smoothed: bool = True) -> Figure | None:
    """Plot one panel over the steps: faint raw points and their running mean, or, unless `is_smoothed`, points that are
    joined, with bands where they have intervals. None if no row has its keys.
    """
    series, bands = extract_series(panel, rows), extract_bands(panel, rows)
    if not series:
        return None
    with apply_style():
        figure = Figure(figsize=PANEL_SIZE, layout="constrained")
        axes = figure.subplots()
        styles = assign_styles(list(series))  # a print without colors still has the line styles
        for name, (steps, values) in series.items():
            color = styles[name]["color"]
            markersize, alpha = (4.0, 0.35) if is_smoothed else (6.0, 1.0)
            axes.plot(steps, values, ".", color=color, markersize=markersize, alpha=alpha, markeredgewidth=0)
            label = sanitize_label(name)
            line = compute_running_mean(values) if is_smoothed else values
            axes.plot(steps, line, linewidth=1.6, label=label, **styles[name])
            if name in bands and not is_smoothed:
                band_steps, lows, highs = bands[name]
                axes.fill_between(band_steps, lows, highs, color=color, alpha=0.15, linewidth=0)
        axes.set(title=panel.title, xlabel="step", ylabel=panel.unit)
        axes.grid(axis="y")
        _set_limits(axes, panel, [value for _, values in series.values() for value in values])
        for step in find_alarm_steps(rows):
            axes.axvline(step, color=TEXT_COLOR, linestyle=(0, (2, 2)), linewidth=0.9)
        if len(series) > 1:
            axes.legend(fontsize=7.5, ncols=2 if len(series) > 3 else 1, handlelength=2.0, columnspacing=1.0)
        return _lay_out(figure)


def find_alarm_steps(rows: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the steps at which an alarm becomes active.

    >>> find_alarm_steps([{"step": 1, "alarm/kl": 0.0}, {"step": 2, "alarm/kl": 1.0}, {"step": 3, "alarm/kl": 1.0}])
    [2]
    """
    steps, active = list[int](), set[str]()
    for row in rows:
        marked = {key for key, value in row.items() if key.startswith("alarm/") and value}
        steps += [row["step"]] if marked - active else []
        active = marked
    return steps


def _set_limits(axes: Axes, panel: Panel, values: Sequence[float]) -> None:
    positive = [value for value in values if value > 0]
    if panel.is_log and positive:
        axes.set_ylim(min(positive) / 2, max(positive) * 2)
        axes.set_yscale("log")
    elif panel.axis_max is not None:
        axes.set_ylim(-0.03, panel.axis_max * 1.03)
    elif math.isclose(min(values), max(values), rel_tol=1e-6):  # a constant: show its value, not rounding errors
        axes.set_ylim(min(0.0, 1.5 * min(values)), max(0.0, 1.5 * max(values)) or 1.0)


def plot_bars(methods: Mapping[str, Mapping[str, Bar]]) -> Figure:
    """Plot one subplot per method from `methods[method][row]`: horizontal bars on [0, 1] with intervals and values.

    All subplots have the same rows, so that a row compares the methods. Dotted ticks are the bars' marks.
    """
    rows = list(dict.fromkeys(row for bars in methods.values() for row in bars))
    ncols = min(len(methods), 2 if len(methods) == 4 else 3)
    nrows = -(-len(methods) // ncols)
    width = min(6.4, 2.6 + 1.6 * ncols)
    with apply_style():
        height = 0.6 + (0.4 + BAR_HEIGHT * len(rows)) * nrows
        figure = Figure(figsize=(width, height), layout="constrained")
        subplots = figure.subplots(nrows, ncols, squeeze=False, sharex=True, sharey=True)
        for number, (axes, (name, bars)) in enumerate(zip(subplots.flat, methods.items(), strict=False)):
            _draw_bars(axes, [bars.get(row) for row in rows])
            axes.set_title(textwrap.fill(sanitize_label(name), 60 // ncols), size=8.5)
            if number + ncols >= len(methods):  # no subplot is below
                axes.tick_params(axis="x", labelbottom=True)
                axes.set_xlabel("accuracy, 95 % interval", size=7.5)
        for axes in subplots.flat[len(methods) :]:
            axes.set_axis_off()
        first = subplots[0, 0]
        first.set_yticks(range(len(rows)), [textwrap.fill(sanitize_label(row), 26) for row in rows])
        first.set(xlim=(0, 1), xticks=(0, 0.5, 1), ylim=(len(rows) - 0.4, -0.6))
        if marks := _collect_legend(subplots.flat):
            figure.legend(marks.values(), marks, loc="outside lower center", fontsize=7.5, ncols=2, handlelength=1.6)
        return _lay_out(figure)


def _draw_bars(axes: Axes, bars: Sequence[Bar | None]) -> None:
    axes.grid(axis="x")
    axes.set_axisbelow(True)
    axes.tick_params(axis="y", length=0)
    for y, bar in enumerate(bars):
        if bar is None:
            continue
        axes.barh(y, bar.value, height=0.62, color=COLORS[0], alpha=0.45, linewidth=0)
        axes.hlines(y, bar.low, bar.high, color=TEXT_COLOR, linewidth=1.0)
        axes.plot(bar.value, y, "o", color=COLORS[0], markersize=3.6, markeredgewidth=0)
        place: dict[str, Any] = {"transform": axes.get_yaxis_transform(), "ha": "left", "va": "center", "size": 7.5}
        axes.text(1.02, y, f"{bar.value:.2f}", **place)
        for number, (label, value) in enumerate(bar.marks):
            style = LINE_STYLES[2 - number % 2]
            axes.vlines(value, y - 0.42, y + 0.42, color=TEXT_COLOR, linewidth=1.4, linestyle=style, label=label)


def _collect_legend(subplots: Iterable[Axes]) -> dict[str, Any]:
    """Return the drawn lines by label, each label once: one legend for all subplots."""
    legends = (axes.get_legend_handles_labels() for axes in subplots)
    return {label: handle for handles, labels in legends for handle, label in zip(handles, labels, strict=True)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A score over its cost; points of one `group` share a color, and published scores are hollow."""

    name: str
    group: str
    x: float
    y: float
    low: float
    high: float
    is_hollow: bool = False


MARKERS = ("o", "s", "^", "D")


def plot_points(entries: Sequence[Point], *, x_label: str, y_label: str) -> Figure | None:
    """Plot points with intervals; x is logarithmic if it spans more than a factor of ten. None without points."""
    groups = list(dict.fromkeys(point.group for point in entries))
    if not groups:
        return None
    with apply_style():
        rows = -(-len(entries) // 2)
        figure = Figure(figsize=(5.4, 3.2 + 0.16 * rows), layout="constrained")
        axes = figure.subplots()
        for point in entries:
            index = groups.index(point.group)
            color, marker = COLORS[index % len(COLORS)], MARKERS[index // len(COLORS) % len(MARKERS)]
            axes.vlines(point.x, point.low, point.high, color=color, linewidth=1.4, alpha=0.7)
            [line] = axes.plot([point.x], [point.y], marker, label=sanitize_label(point.name), color=color, zorder=3)
            line.set(markerfacecolor="none" if point.is_hollow else color, clip_on=False)
        least, most = min(point.x for point in entries), max(point.x for point in entries)
        # Zero tokens, as of a model that is shown nothing, can't be drawn on a logarithmic axis.
        if least > 0 and most > 10 * least:
            axes.set_xscale("log")
            axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
            axes.xaxis.set_minor_locator(NullLocator())
        else:
            axes.set_xlim(0, 1.08 * most or 1.0)
        axes.set(ylim=(0, 100), xlabel=x_label, ylabel=y_label)
        axes.grid(axis="y")
        figure.legend(loc="outside lower center", fontsize=7.5, ncols=2, handlelength=1.2)
        return _lay_out(figure)


def assign_styles(names: Sequence[str]) -> dict[str, Style]:
    """Assign a color and a line style to each name, in order."""
    count = len(COLORS)
    return {
        name: {"color": COLORS[i % count], "linestyle": LINE_STYLES[(i // count + i % count) % len(LINE_STYLES)]}
        for i, name in enumerate(names)
    }


def compute_seed_band(
    runs: Sequence[StepMetrics], key: str
) -> tuple[list[float], list[float], list[float], list[float]] | None:
    """Return steps, and lowest, mean and highest running mean of a key over runs; None if no run has the key.

    Only steps of every run are included, so that each mean is over the same runs.
    """
    series = []
    for rows in runs:
        points = {float(row["step"]): float(row[key]) for row in rows if is_finite_number(row.get(key))}
        if points:
            series.append(dict(zip(points, compute_running_mean(list(points.values())), strict=True)))
    shared = sorted(set.intersection(*map(set, series))) if series else []
    if not shared:
        return None
    values = np.array([[points[step] for step in shared] for points in series])
    return shared, values.min(axis=0).tolist(), values.mean(axis=0).tolist(), values.max(axis=0).tolist()


def plot_curves(
    columns: Mapping[str, Mapping[str, Sequence[StepMetrics]]],
    key: str,
    styles: Mapping[str, Style],
) -> Figure | None:
    """Plot one subplot per condition from `columns[condition][variant]`, the runs of a variant, one per seed.

    Lines are means over seeds of running means over about a tenth of the steps; bands reach from the lowest to the
    highest seed. None if no run has the key.
    """
    bands = {
        condition: {
            variant: band for variant, runs in variants.items() if (band := compute_seed_band(runs, key)) is not None
        }
        for condition, variants in columns.items()
    }
    if not any(bands.values()):
        return None
    with apply_style():
        figure = Figure(figsize=(COLUMN_SIZE[0] * len(bands), COLUMN_SIZE[1] + 0.4), layout="constrained")
        subplots = figure.subplots(1, len(bands), squeeze=False, sharey=True)[0]
        for axes, (condition, variants) in zip(subplots, bands.items(), strict=True):
            for variant, (steps, low, mean, high) in variants.items():
                axes.fill_between(steps, low, high, color=styles[variant]["color"], alpha=0.15, linewidth=0)
                axes.plot(steps, mean, linewidth=1.6, label=sanitize_label(variant), **styles[variant])
            axes.set(title=sanitize_label(condition), xlabel="step")
            axes.grid(axis="y")
        subplots[0].set_ylabel(sanitize_label(key))
        lines = _collect_legend(subplots)
        # About 40 characters fit under one subplot.
        widest = max(map(len, lines), default=1) + 6
        ncols = max(1, min(len(lines), 44 * len(subplots) // widest))
        figure.legend(lines.values(), lines, loc="outside lower center", fontsize=7.5, ncols=ncols, handlelength=2.2)
        return _lay_out(figure)


def plot_means(
    columns: Mapping[str, Mapping[str, BeforeAndAfter]],
    styles: Mapping[str, Style],
    *,
    mark_zero: bool = False,
) -> Figure | None:
    """Plot one subplot per condition and one row per variant from `columns[condition][variant]`, its two estimates.

    The point before RL is hollow; the interval over tasks is a thick line, the one over seeds a thin line.
    """
    filled = {
        condition: shown
        for condition, variants in columns.items()
        if (shown := {variant: estimates for variant, estimates in variants.items() if any(estimates)})
    }
    if not filled:
        return None
    num_rows = max(map(len, filled.values()))
    with apply_style():
        height = 0.85 + ROW_HEIGHT * 1.3 * num_rows
        figure = Figure(figsize=(COLUMN_SIZE[0] * len(filled), height), layout="constrained")
        subplots = figure.subplots(1, len(filled), squeeze=False, sharex=True)[0]
        for axes, (condition, variants) in zip(subplots, filled.items(), strict=True):
            for row, (variant, estimates) in enumerate(variants.items()):
                _draw_estimates(axes, row, estimates, styles[variant]["color"])
            axes.set_yticks(range(len(variants)), [sanitize_label(variant) for variant in variants])
            axes.set(title=sanitize_label(condition), ylim=(num_rows - 0.4, -0.6))
            axes.grid(axis="x")
            if mark_zero:
                axes.axvline(0.0, color=TEXT_COLOR, linewidth=0.6)
        return _lay_out(figure)


def _draw_estimates(axes: Axes, row: int, estimates: BeforeAndAfter, color: str) -> None:
    for estimate, is_hollow, shift in ((estimates[0], True, -0.15), (estimates[1], False, 0.15)):
        if estimate is None:
            continue
        y = row + shift if all(estimates) else row
        for interval, width in ((estimate.seed_interval, 0.8), (estimate.clip_interval, 2.6)):
            if interval is not None:
                axes.hlines(y, *interval, color=color, linewidth=width, alpha=0.5 if is_hollow else 0.9)
        face = "white" if is_hollow else color
        axes.plot(estimate.mean, y, "o", markersize=4.6, color=color, markerfacecolor=face)


def sanitize_label(name: str) -> str:
    """Return a label that matplotlib neither parses as a formula nor hides from a legend, and that XML can hold."""
    text = name.replace("$", r"\$").replace("_", " ")
    return "".join(char if char.isprintable() else "·" for char in text)


def _lay_out(figure: Figure) -> Figure:
    """Apply the layout once, for every format: it takes longer than drawing."""
    engine = figure.get_layout_engine()
    assert engine is not None, "a plot needs a layout"
    engine.execute(figure)
    figure.set_layout_engine(None)
    return figure


def encode_figure(figure: Figure, fmt: ImageFormat) -> bytes:
    """Encode a figure as a file; the same numbers give the same bytes."""
    buffer = io.BytesIO()
    if fmt == "svg":
        metadata: dict[str, Any] = {"Date": None, "Creator": None}
        figure.savefig(buffer, format=fmt, dpi=PLOT_DPI, transparent=True, metadata=metadata)
        return buffer.getvalue()
    canvas = FigureCanvasAgg(figure)
    figure.set_dpi(PLOT_DPI)
    canvas.draw()  # type: ignore[no-untyped-call]
    # Overlapping bands have thousands of shades; 256 look the same in a third of the bytes.
    image = Image.fromarray(np.asarray(canvas.buffer_rgba()))  # type: ignore[no-untyped-call]
    image.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(buffer, "png", optimize=True)
    return buffer.getvalue()


def plot_frames(rows: Sequence[tuple[str, Sequence[tuple[str | None, NDArray[Any]]]]]) -> bytes:
    """Draw labeled rows of frames (uint8 RGB [height, width, 3]), each with its time below, as JPEG."""
    parts = [(label, [_fit_frame(pixels) for _, pixels in frames], frames) for label, frames in rows]
    heights = [max(image.height for image in images) + FRAME_TEXT_HEIGHT for _, images, _ in parts]
    step = FRAME_SIZE[0] + FRAME_GAP
    size = (FRAME_LABEL_WIDTH + step * max(len(frames) for _, frames in rows), sum(heights))
    sheet = Image.new("RGB", size, "white")
    draw, font, top = ImageDraw.Draw(sheet), ImageFont.load_default(size=12), 0
    for (label, images, frames), height in zip(parts, heights, strict=True):
        draw.text((0, top), label, fill=TEXT_COLOR, font=font)
        for column, (image, (time, _)) in enumerate(zip(images, frames, strict=True)):
            left = FRAME_LABEL_WIDTH + column * step
            sheet.paste(image, (left, top))
            draw.text((left, top + image.height), time or "", fill=TEXT_COLOR, font=font)
        top += height
    buffer = io.BytesIO()
    sheet.save(buffer, "jpeg", quality=80, optimize=True)
    return buffer.getvalue()


def _fit_frame(pixels: NDArray[Any]) -> Image.Image:
    """Return a frame that fits in FRAME_SIZE; the pixels of a small one become squares."""
    image = Image.fromarray(pixels)
    image.thumbnail(FRAME_SIZE)
    factor = min(limit // size for limit, size in zip(FRAME_SIZE, image.size, strict=True))
    return image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)


def theme_svg(svg: bytes, title: str) -> str:
    """Return an SVG in a page's text color and its variables --s1, --s2, ...; without them the colors as drawn.

    The title is what a screen reader reads.
    """
    text = svg.decode()
    text = text[text.index("<svg") :]
    text = text.replace(TEXT_COLOR, "currentColor").replace(GRID_COLOR, "var(--line, #8a8b8c)")
    text = text.replace("#ffffff", "var(--card, #ffffff)")  # hollow points
    for i, color in enumerate(COLORS, start=1):
        text = text.replace(color, f"var(--s{i}, {color})")
    return text.replace("<svg ", f'<svg role="img" aria-label="{html.escape(title)}" ', 1)
