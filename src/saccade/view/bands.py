"""Arms side by side: curves with a band over seeds, and means with two intervals, a column of pictures per condition.

An arm has the same colour and line in every picture of a lab (`Look`), whichever arms a condition has.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from saccade.view.plots import COLOURS, INK, LOOK, STYLES, Format, finite, plain, running_mean, saved

PANEL = (3.3, 2.2)  # inches
ROW = 0.22  # inches of an arm in a picture of means

Pair = tuple[float, float]
Steps = Sequence[Mapping[str, Any]]  # the lines of one run


@dataclass(frozen=True, slots=True, kw_only=True)
class Dot:
    """A mean with an interval over tasks (thick) and one over seeds (thin); a hollow one is from before.

    >>> Dot(mean=0.5, tasks=(0.4, 0.6), seeds=None).hollow
    False
    """

    mean: float
    tasks: Pair | None
    seeds: Pair | None
    hollow: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """The colour and line of an arm."""

    colour: str
    style: Any


def looks(names: Sequence[str]) -> dict[str, Look]:
    """A look for each name, in order.

    >>> looks(["vanilla"])["vanilla"].colour
    '#0072b2'
    """
    count = len(COLOURS)
    return {
        name: Look(colour=COLOURS[i % count], style=STYLES[(i // count + i % count) % len(STYLES)])
        for i, name in enumerate(names)
    }


# ---- curves --------------------------------------------------------------------------------------------------------


def band(runs: Sequence[Steps], key: str) -> tuple[list[float], list[float], list[float], list[float]] | None:
    """Steps, and the lowest, mean and highest over runs of a key's running mean; None where no run has the key.

    Only steps that every run has are shown, so that a mean is always of the same runs.
    """
    series = []
    for rows in runs:
        points = {float(row["step"]): float(row[key]) for row in rows if finite(row.get(key))}
        if points:
            series.append(dict(zip(points, running_mean(list(points.values())), strict=True)))
    shared = sorted(set.intersection(*(set(each) for each in series))) if series else []
    if not shared:
        return None
    values = np.array([[each[step] for step in shared] for each in series])
    return shared, values.min(axis=0).tolist(), values.mean(axis=0).tolist(), values.max(axis=0).tolist()


def curves(
    columns: Mapping[str, Mapping[str, Sequence[Steps]]],
    key: str,
    look: Mapping[str, Look],
    *,
    unit: str = "",
    fmt: Format = "svg",
) -> bytes | None:
    """One picture per condition, side by side: `columns[condition][arm]` are an arm's runs, one per seed.

    Lines are means over seeds of running means over about a tenth of the steps, bands the lowest and highest seed.
    None where no run has the key.
    """
    filled = {
        name: {arm: found for arm, runs in arms.items() if (found := band(runs, key)) is not None}
        for name, arms in columns.items()
    }
    if not any(filled.values()):
        return None
    with matplotlib.rc_context(LOOK):
        figure = Figure(figsize=(PANEL[0] * len(filled), PANEL[1] + 0.4), layout="constrained")
        places = figure.subplots(1, len(filled), squeeze=False, sharey=True)[0]
        for axes, (name, arms) in zip(places, filled.items(), strict=True):
            for arm, found in arms.items():
                _draw_band(axes, found, look[arm], plain(arm))
            axes.set_title(plain(name))
            axes.set_xlabel("step")
            axes.grid(axis="y")
        places[0].set_ylabel(unit or plain(key))
        _legend(figure, places)
        return saved(figure, fmt)


def _draw_band(
    axes: Axes, found: tuple[list[float], list[float], list[float], list[float]], look: Look, name: str
) -> None:
    steps, low, mean, high = found
    axes.fill_between(steps, low, high, color=look.colour, alpha=0.15, linewidth=0)
    axes.plot(steps, mean, color=look.colour, linestyle=look.style, linewidth=1.6, label=name)


def _legend(figure: Figure, places: Sequence[Axes]) -> None:
    """One legend for all pictures: an arm stands in it once."""
    known: dict[str, Any] = {}
    for axes in places:
        handles, labels = axes.get_legend_handles_labels()
        known |= dict(zip(labels, handles, strict=True))
    # About 40 letters fit under one picture.
    widest = max(map(len, known), default=1) + 6
    columns = max(1, min(len(known), 44 * len(places) // widest))
    figure.legend(
        known.values(), known.keys(), loc="outside lower center", fontsize=7.5, ncols=columns, handlelength=2.2
    )


# ---- means ---------------------------------------------------------------------------------------------------------


def dots(
    columns: Mapping[str, Mapping[str, Sequence[Dot]]],
    look: Mapping[str, Look],
    *,
    unit: str = "",
    zero: bool = False,
    fmt: Format = "svg",
) -> bytes | None:
    """One picture per condition, side by side, a line per arm: `columns[condition][arm]` are its dots, from before to
    after. With `zero` a line marks 0. None where there is no dot.
    """
    filled = {name: {arm: each for arm, each in arms.items() if each} for name, arms in columns.items()}
    filled = {name: arms for name, arms in filled.items() if arms}
    if not filled:
        return None
    tallest = max(map(len, filled.values()))
    with matplotlib.rc_context(LOOK):
        figure = Figure(figsize=(PANEL[0] * len(filled), 0.85 + ROW * 1.3 * tallest), layout="constrained")
        places = figure.subplots(1, len(filled), squeeze=False, sharex=True)[0]
        for axes, (name, arms) in zip(places, filled.items(), strict=True):
            for at, (arm, each) in enumerate(arms.items()):
                _draw_dots(axes, at, each, look[arm].colour)
            axes.set_yticks(range(len(arms)), [plain(arm) for arm in arms])
            axes.set_ylim(tallest - 0.4, -0.6)
            axes.set_title(plain(name))
            axes.set_xlabel(unit)
            axes.grid(axis="x")
            if zero:
                axes.axvline(0.0, color=INK, linewidth=0.6)
        return saved(figure, fmt)


def _draw_dots(axes: Axes, at: int, each: Sequence[Dot], colour: str) -> None:
    for i, dot in enumerate(each):
        height = at + (i - (len(each) - 1) / 2) * 0.3
        for pair, width in ((dot.seeds, 0.8), (dot.tasks, 2.6)):
            if pair is not None:
                axes.hlines(height, *pair, color=colour, linewidth=width, alpha=0.5 if dot.hollow else 0.9)
        axes.plot(
            dot.mean, height, "o", markersize=4.6, color=colour, markerfacecolor="white" if dot.hollow else colour
        )
