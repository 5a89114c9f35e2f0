"""Curves, bars and points as SVG or PNG, and how all plots look.

The colours are those of Okabe and Ito (2008), told apart by most colour-blind readers. `themed` makes an SVG take its
colours from the page around it, so that one picture serves a light and a dark page.
"""

import io
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator
from PIL import Image

INK, FAINT = "#1a1b1c", "#8a8b8c"
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7a6f5d", "#b3a600")
STYLES = ("-", (0, (4, 1.5)), (0, (1, 1)))
SIZE = (3.6, 2.35)  # inches of one panel
LOOK: dict[Any, Any] = {  # matplotlib's types want its key names, one by one
    "svg.fonttype": "none",
    "svg.hashsalt": "saccade",
    "font.family": "sans-serif",
    "font.size": 8.5,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlecolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "axes.formatter.useoffset": False,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": FAINT,
    "grid.linewidth": 0.4,
    "grid.alpha": 0.35,
    "legend.frameon": False,
}

Format = Literal["svg", "png"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """What one small picture shows: keys of the metrics ("reward/*" takes all that begin so), and its axis.

    >>> Panel(title="Entropy", unit="nats per token", keys=("entropy",)).top is None
    True
    """

    title: str
    unit: str
    keys: tuple[str, ...]
    log: bool = False
    top: float | None = None  # of an axis that begins at 0


PANELS = (
    Panel(title="Loss", unit="nats per token", keys=("loss",)),
    Panel(title="Reward and its parts", unit="per episode", keys=("reward", "reward/*")),
    Panel(title="Accuracy", unit="mean, training rollouts", keys=("accuracy", *(f"accuracy/{kind}" for kind in (
        "choice", "open", "number", "grounding"))), top=1.0),
    Panel(title="Accuracy by question", unit="mean", keys=("accuracy/question/*",), top=1.0),
    Panel(title="Accuracy by frames shown", unit="mean", keys=("accuracy/K=*",), top=1.0),
    Panel(title="Format compliance", unit="share of episodes", keys=("compliance",), top=1.0),
    Panel(title="Tool calls", unit="per episode", keys=("calls", "calls/executed", "calls/succeeded")),
    Panel(title="Tool calls by frames shown", unit="per episode", keys=("calls/K=*",)),
    Panel(title="Reward of calling over skipping", unit="difference", keys=("call_gain/*",)),
    Panel(title="How episodes end", unit="share of episodes", keys=("end/*",), top=1.0),
    Panel(title="Without an answer or a grade", unit="share of episodes", keys=("errors", "unanswered", "ungraded")),
    Panel(title="Groups solved", unit="share", keys=("solved", "solved/*"), top=1.0),
    Panel(title="Tokens sampled", unit="per episode", keys=("response_tokens", "sampled_tokens")),
    Panel(title="Visual tokens", unit="per episode", keys=("visual_tokens",)),
    Panel(title="Entropy", unit="nats per token", keys=("entropy",)),
    Panel(title="Gradient norm", unit="before clipping", keys=("grad_norm",)),
    Panel(title="Learning rate", unit="", keys=("lr",)),
    Panel(title="Engine–trainer gap", unit="|Δ logprob|, nats", keys=("logprob_gap_mean", "logprob_gap_max"), log=True),
    Panel(title="Clipped tokens", unit="share", keys=("clip_fraction",)),
    Panel(title="Importance weights", unit="trainer / engine", keys=("importance_mean", "importance_max")),
    Panel(title="Staleness", unit="versions", keys=("staleness_mean", "staleness_max")),
    Panel(title="KL", unit="nats per token", keys=("kl", "kl/*")),
    Panel(title="Seconds per step", unit="s", keys=("seconds/*",)),
    Panel(title="Throughput", unit="tokens per second", keys=("tokens_per_second",)),
    Panel(title="Peak memory", unit="GiB", keys=("memory_gib", "memory_device_gib")),
)  # fmt: skip

Series = dict[str, tuple[list[float], list[float]]]


# ---- curves --------------------------------------------------------------------------------------------------------


def series_of(panel: Panel, rows: Sequence[Mapping[str, Any]]) -> Series:
    """The panel's series by short name, each as steps and values; what isn't a finite number is left out."""
    names = dict.fromkeys(key for row in rows for key in row)
    ordered = sorted(names, key=lambda key: (len(key), key) if "/K=" in key else (0, ""))
    chosen = [key for pattern in panel.keys for key in ordered if _matches(key, pattern)]
    found: Series = {}
    for key in dict.fromkeys(chosen):
        points = [(row.get("step", i), row[key]) for i, row in enumerate(rows) if finite(row.get(key))]
        if points:
            steps, values = zip(*points, strict=True)
            found[_short(key, panel)] = ([float(step) for step in steps], [float(value) for value in values])
    return found


def _matches(key: str, pattern: str) -> bool:
    return key.startswith(pattern[:-1]) if pattern.endswith("*") else key == pattern


def _short(key: str, panel: Panel) -> str:
    """A key as the legend says it: without what the title says already."""
    whole = len(panel.keys) > 1 and key == panel.keys[0] and "/" not in key and f"{key}/" in " ".join(panel.keys)
    return "all" if whole else key.rpartition("/")[2].replace("_", " ")


def finite(value: Any) -> bool:
    """Whether a value of a log is a number that can be drawn."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def running_mean(values: Sequence[float]) -> list[float]:
    """A centred mean over about a tenth of the points (at least 3), narrower at both ends.

    >>> running_mean([0.0, 3.0, 0.0])
    [1.5, 1.0, 1.5]
    """
    half = max(1, len(values) // 20)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    bounds = [(max(0, i - half), min(len(values), i + half + 1)) for i in range(len(values))]
    return [float(sums[end] - sums[start]) / (end - start) for start, end in bounds]


def curve(panel: Panel, rows: Sequence[Mapping[str, Any]], *, fmt: Format = "svg") -> bytes | None:
    """One panel over the steps: faint raw points, a running mean over them. None where no row has its keys."""
    series = series_of(panel, rows)
    if not series:
        return None
    with matplotlib.rc_context(LOOK):
        figure = Figure(figsize=SIZE, layout="constrained")
        _draw(figure.subplots(), panel, series)
        return saved(figure, fmt)


def _draw(axes: Axes, panel: Panel, series: Series) -> None:
    for i, (name, (steps, values)) in enumerate(series.items()):
        colour, style = COLOURS[i % len(COLOURS)], STYLES[i // len(COLOURS) % len(STYLES)]
        axes.plot(steps, values, ".", color=colour, markersize=4.0, alpha=0.35, markeredgewidth=0)
        axes.plot(steps, running_mean(values), color=colour, linestyle=style, linewidth=1.6, label=plain(name))
    axes.set_title(panel.title)
    axes.set_ylabel(panel.unit)
    axes.set_xlabel("step")
    axes.grid(axis="y")
    _limit(axes, panel, [value for _, values in series.values() for value in values])
    if len(series) > 1:
        axes.legend(fontsize=7.5, ncols=2 if len(series) > 3 else 1, handlelength=1.4, columnspacing=1.0)


def _limit(axes: Axes, panel: Panel, values: Sequence[float]) -> None:
    positive = [value for value in values if value > 0]
    if panel.log and positive:
        axes.set_ylim(min(positive) / 2, max(positive) * 2)
        axes.set_yscale("log")
    elif panel.top is not None:
        axes.set_ylim(-0.03, panel.top * 1.03)
    elif math.isclose(min(values), max(values), rel_tol=1e-6):  # a constant: show where it is, not rounding errors
        axes.set_ylim(min(0.0, 1.5 * min(values)), max(0.0, 1.5 * max(values)) or 1.0)


# ---- bars ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A value with its interval and, where known, the floor that knowing nothing reaches.

    >>> Bar(value=0.5, low=0.3, high=0.7, floor=0.2).value
    0.5
    """

    value: float
    low: float
    high: float
    floor: float | None = None


def bars(rows: Mapping[str, Mapping[str, Bar]], *, unit: str = "accuracy, 95 % interval", fmt: Format = "svg") -> bytes:
    """Horizontal bars with intervals: `rows[row][series]`. A dotted tick marks the floor; the axis is [0, 1]."""
    names = list(dict.fromkeys(name for row in rows.values() for name in row))
    height = 0.8 / max(len(names), 1)
    with matplotlib.rc_context(LOOK):
        figure = Figure(figsize=(5.4, 0.95 + 0.2 * len(rows) * (len(names) + 0.7)), layout="constrained")
        axes = figure.subplots()
        for i, name in enumerate(names):
            shift = (i - (len(names) - 1) / 2) * height
            places = [(at + shift, row[name]) for at, row in enumerate(rows.values()) if name in row]
            _draw_bars(axes, places, plain(name), COLOURS[i % len(COLOURS)], height)
        axes.set_yticks(range(len(rows)), [plain(row) for row in rows])
        axes.invert_yaxis()
        axes.set_xlim(0, 1)
        axes.set_xlabel(unit)
        axes.grid(axis="x")
        axes.set_axisbelow(True)
        axes.margins(y=0.02)
        if len(names) > 1:
            figure.legend(loc="outside lower center", fontsize=7.5, ncols=4, handlelength=1.2)
        return saved(figure, fmt)


def _draw_bars(axes: Axes, places: Sequence[tuple[float, Bar]], name: str, colour: str, height: float) -> None:
    heights = [at for at, _ in places]
    axes.barh(heights, [bar.value for _, bar in places], height=height * 0.86, color=colour, alpha=0.75, label=name)
    axes.hlines(heights, [bar.low for _, bar in places], [bar.high for _, bar in places], color=INK, linewidth=1.0)
    floors = [(at, bar.floor) for at, bar in places if bar.floor is not None]
    known = "blind floor" in axes.get_legend_handles_labels()[1]
    if floors:
        axes.vlines(
            [floor for _, floor in floors],
            [at - height / 2 for at, _ in floors],
            [at + height / 2 for at, _ in floors],
            color=INK,
            linewidth=1.2,
            linestyle=(0, (1, 1)),
            label="_nolegend_" if known else "blind floor",
        )


# ---- points --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A value over what it cost; points of one `group` share a colour, a `hollow` one is somebody else's.

    >>> Point(name="lvbench", group="lvbench", x=900.0, y=39.8, low=37.5, high=42.1).hollow
    False
    """

    name: str
    group: str
    x: float
    y: float
    low: float
    high: float
    hollow: bool = False


MARKERS = ("o", "s", "^", "D")


def points(given: Sequence[Point], *, across: str, unit: str, fmt: Format = "svg") -> bytes | None:
    """Points with intervals, `unit` over `across`, in a legend by name. None where there is no point.

    The axis across is logarithmic where the values span more than a factor of ten.
    """
    groups = list(dict.fromkeys(each.group for each in given))
    if not groups:
        return None
    with matplotlib.rc_context(LOOK):
        rows = -(-len(given) // 2)
        figure = Figure(figsize=(5.4, 3.2 + 0.16 * rows), layout="constrained")
        axes = figure.subplots()
        for each in given:
            place = groups.index(each.group)
            colour, marker = COLOURS[place % len(COLOURS)], MARKERS[place // len(COLOURS) % len(MARKERS)]
            axes.vlines(each.x, each.low, each.high, color=colour, linewidth=1.4, alpha=0.7)
            [drawn] = axes.plot([each.x], [each.y], marker, label=plain(each.name), color=colour, zorder=3)
            drawn.set(markerfacecolor="none" if each.hollow else colour, clip_on=False)
        least, most = min(each.x for each in given), max(each.x for each in given)
        # No token at all, as of an agent that is shown nothing, has no place on a logarithm.
        if least > 0 and most > 10 * least:
            axes.set_xscale("log")
            axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
            axes.xaxis.set_minor_locator(NullLocator())
        else:
            axes.set_xlim(0, 1.08 * most or 1.0)
        axes.set_ylim(0, 100)
        axes.set_xlabel(across)
        axes.set_ylabel(unit)
        axes.grid(axis="y")
        figure.legend(loc="outside lower center", fontsize=7.5, ncols=2, handlelength=1.2)
        return saved(figure, fmt)


def plain(name: str) -> str:
    """A name that matplotlib neither reads as a formula nor hides from a legend, and that XML can hold."""
    text = name.replace("$", r"\$").replace("_", " ")
    return "".join(letter if letter.isprintable() else "·" for letter in text)


# ---- files ---------------------------------------------------------------------------------------------------------


def saved(figure: Figure, fmt: Format) -> bytes:
    """The picture as a file; the same numbers give the same bytes."""
    buffer = io.BytesIO()
    plain: dict[str, Any] = {"Date": None, "Creator": None} if fmt == "svg" else {"Software": None}
    with warnings.catch_warnings():  # the reader's fonts draw an SVG's text, so a glyph missing here does no harm
        warnings.filterwarnings("ignore", message="Glyph")
        figure.savefig(buffer, format=fmt, dpi=160, transparent=fmt == "svg", metadata=plain)
    if fmt == "svg":
        return buffer.getvalue()
    small = io.BytesIO()
    # Overlapping bands have thousands of shades, which 256 show as well in a third of the bytes.
    Image.open(buffer).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(small, "png", optimize=True)
    return small.getvalue()


def themed(svg: bytes) -> str:
    """An SVG to stand inside a page: its colours are the page's text colour and its variables --s1, --s2, ...

    Where the page doesn't define a variable, the colour stays as drawn.
    """
    text = svg.decode()
    text = text[text.index("<svg") :]
    text = text.replace(INK, "currentColor").replace(FAINT, "var(--line, #8a8b8c)")
    text = text.replace("#ffffff", "var(--card, #ffffff)")  # what is hollow
    for i, colour in enumerate(COLOURS, start=1):
        text = text.replace(colour, f"var(--s{i}, {colour})")
    return text.replace("<svg ", '<svg role="img" ', 1)
