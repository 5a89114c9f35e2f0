"""Format tables of texts and estimates; the terminal, Markdown and HTML pages render the same tables."""

import html
import re
from dataclasses import dataclass
from typing import Any

from saccade.metrics.episode_metrics import Difference
from saccade.metrics.statistics import Estimate
from saccade.utils.numbers import to_finite
from saccade.utils.text import escape_control_characters


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A number with its interval on a scale from 0 to `maximum`, and labeled numbers to compare it with."""

    value: float
    low: float
    high: float
    maximum: float = 1.0
    marks: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Hold a table of texts. A page draws the `bars`, one per row, and hides a folded table until it is opened."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    bars: tuple[Bar, ...] = ()
    is_folded: bool = False


def format_markdown_table(table: Table) -> str:
    """Return a table as Markdown, without its title."""
    header, *rows = ([*map(escape_markdown, row)] for row in (table.header, *table.rows))
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows))


def escape_markdown(text: Any) -> str:
    r"""Escape text for a Markdown cell, so that no HTML, Markdown, line break or control character has an effect."""
    plain = html.escape(escape_control_characters(" ".join(str(text).split())), quote=False)
    return re.sub(r"([\\`*_\[\]|~$])", r"\\\1", plain)


def format_interval(value: float, interval: tuple[float, float]) -> str:
    """Return a number with its interval: 39.80 [37.50, 42.10]."""
    return f"{value:.2f} [{interval[0]:.2f}, {interval[1]:.2f}]"


def format_estimate(estimate: Estimate) -> str:
    """Return a mean with its interval: 0.50 [0.25, 0.75]."""
    return format_interval(estimate.mean, (estimate.low, estimate.high))


def format_counts(estimate: Estimate | Difference) -> str:
    """Return the numbers of tasks and of clusters behind an interval: 12 / 4."""
    return f"{estimate.n} / {estimate.num_clusters}"


def format_optional(value: float | None) -> str:
    """Return a number with two decimals; a dash for None."""
    return "–" if value is None else f"{value:.2f}"


def format_difference(difference: Difference) -> str:
    """Return a difference with its interval: +0.20 [+0.10, +0.30]."""
    return f"{difference.mean:+.2f} [{difference.low:+.2f}, {difference.high:+.2f}]"


def format_duration(seconds: float) -> str:
    """Format a duration in seconds; "–" for one that is infinite or exceeds a float, as in damaged metrics.

    >>> format_duration(42.4), format_duration(200), format_duration(7500), format_duration(float("inf"))
    ('42 s', '3 min 20 s', '2 h 5 min', '–')
    >>> format_duration(10**400)
    '–'
    """
    if to_finite(seconds) is None:
        return "–"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
