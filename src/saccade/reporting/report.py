"""Describe a report once, as sections of tables and plots; render it as Markdown and as one self-contained HTML page.

A page has no scripts and no links, its images are embedded, and every text is escaped. The terminal prints the same
tables (`cli.terminal.print_tables`).
"""

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from saccade.metrics.tables import Table, escape_markdown, format_markdown_table
from saccade.reporting.episode_view import format_answer, to_percent
from saccade.reporting.plots import Figure, ImageFormat, apply_style, encode_figure, theme_svg
from saccade.utils.files import convert_file_errors, write_atomically, write_text
from saccade.utils.text import escape_control_characters

EXAMPLES_TITLE = "Episodes"
STATIC_FOLDER = Path(__file__).parent / "static"
_ESTIMATE = re.compile(r"([+-]?\d[\d.]*) (\[[^\]]*\])(.*)", re.DOTALL)
_IMAGE_NAME = re.compile(r"\d{2,3}\.(png|jpg)")
_NUMBER = re.compile(r"[^A-Za-z]{0,40}( s)?")


@dataclass(frozen=True, kw_only=True)
class Plot:
    """A plot that `draw` draws, with the table of its numbers if that is not shown elsewhere.

    `has_title` if the drawing contains the title.
    """

    title: str
    draw: Callable[[], Figure | None]
    numbers: Table | None = None
    has_title: bool = False

    @functools.cached_property
    def figure(self) -> Figure | None:
        """Return the drawing, of which every file is made; None without a value."""
        return self.draw()

    def encode(self, fmt: ImageFormat) -> bytes | None:
        """Return the drawing as a file."""
        if self.figure is None:
            return None
        with apply_style():
            return encode_figure(self.figure, fmt)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportSection:
    """A part of a report; plots are small and side by side unless `has_wide_plots`."""

    title: str
    notes: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()
    plots: tuple[Plot, ...] = ()
    has_wide_plots: bool = False

    @property
    def all_tables(self) -> tuple[Table, ...]:
        """Return the tables, and those of the plots' numbers."""
        return (*self.tables, *(plot.numbers for plot in self.plots if plot.numbers))

    @property
    def is_shown(self) -> bool:
        """Return whether a page shows the section."""
        return bool(self.tables or self.plots)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleText:
    """An episode as texts: labeled facts, then labeled steps; `draw_frames` draws what the model saw, as JPEG."""

    title: str
    facts: tuple[tuple[str, str], ...]
    steps: tuple[tuple[str, str], ...]
    draw_frames: Callable[[], bytes | None] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A report of a `kind`; `statements` are labeled sentences of its head, such as a claim.

    `examples` end a Markdown file and a PDF, below `examples_note`; a page shows its own views of the same episodes.
    """

    kind: str
    title: str
    warnings: tuple[str, ...] = ()
    statements: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    sections: tuple[ReportSection, ...] = ()
    examples: tuple[ExampleText, ...] = ()
    examples_note: str = ""


def format_markdown(report: Report, plot_paths: Sequence[str | None] = ()) -> str:
    """Format a report as Markdown; `plot_paths` are the images of its plots, then of its examples, in order.

    A plot without an image is left out.
    """
    paths = iter(plot_paths)
    parts = [
        f"# {escape_markdown(report.title)}",
        *(f"> **{escape_markdown(warning)}**" for warning in report.warnings),
        *(f"**{escape_markdown(label)}.** {escape_markdown(text)}" for label, text in report.statements.items()),
        "\n".join(f"- {escape_markdown(key)}: {escape_markdown(value)}" for key, value in report.metadata.items()),
    ]
    for section in report.sections:
        images = [(plot, path) for plot, path in zip(section.plots, paths, strict=False) if path is not None]
        if not images and not section.all_tables:
            continue
        parts += [f"## {escape_markdown(section.title)}", *map(escape_markdown, section.notes)]
        for table in section.all_tables:
            heading = [f"### {escape_markdown(table.title)}"] if table.title != section.title else []
            parts += [*heading, format_markdown_table(table)]
        for plot, path in images:
            title = escape_markdown(plot.title)
            parts += [*([] if plot.has_title else [f"### {title}"]), f"![{title}]({path})"]
    if report.examples:
        parts += [f"## {EXAMPLES_TITLE}", escape_markdown(report.examples_note)]
    for example in report.examples:
        parts += [
            f"### {escape_markdown(example.title)}",
            "\n".join(_format_markdown_item(*fact) for fact in example.facts),
            *([f"![the frames that the model saw]({image})"] if (image := next(paths, None)) else []),
            "\n".join(_format_markdown_item(*step) for step in example.steps),
        ]
    return "\n\n".join(filter(None, parts)) + "\n"


def _format_markdown_item(label: str, text: str) -> str:
    return f"- **{escape_markdown(label)}**: {escape_markdown(text)}"


def write_markdown(report: Report, path: Path, plot_folder: str | None = None) -> Path:
    """Write a report as Markdown with its plots and frames, as images in `plot_folder` beside it; return its path.

    The folder of report.md is report_plots by default; images that it had are deleted. Raises RunError if a file can't
    be written.
    """
    folder = path.parent / (plot_folder or f"{path.stem}_plots")
    plots = [plot for section in report.sections for plot in section.plots]
    images: list[tuple[str, Callable[[], bytes | None]]] = [
        (".png", functools.partial(plot.encode, "png")) for plot in plots
    ]
    images += [(".jpg", example.draw_frames or (lambda: None)) for example in report.examples]
    plot_paths: list[str | None] = []
    with convert_file_errors(path):
        for old in folder.glob("[0-9]*"):
            if _IMAGE_NAME.fullmatch(old.name):
                old.unlink()
        for number, (suffix, draw) in enumerate(images):
            image, name = draw(), f"{number:02d}{suffix}"
            plot_paths.append(None if image is None else f"{quote(folder.name)}/{name}")
            if image is not None:
                folder.mkdir(parents=True, exist_ok=True)
                with write_atomically(folder / name, is_durable=False) as partial:
                    partial.write_bytes(image)
    return write_text(path, format_markdown(report, plot_paths))


def render_template(template: str, **context: Any) -> str:
    """Render a template of `static`; every value is escaped unless it is Markup."""
    css = Markup((STATIC_FOLDER / "report.css").read_text(encoding="utf-8"))
    page = _get_environment().get_template(template).render(css=css, **context)
    return escape_control_characters("\n".join(line.rstrip() for line in page.strip().split("\n"))) + "\n"


@functools.cache  # it keeps the compiled templates, which take longer than most pages
def _get_environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(STATIC_FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "svg": lambda plot: Markup(theme_svg(plot.encode("svg"), plot.title)),
        "estimate": _emphasize_mean,
        "answer": format_answer,
        "percent_of": to_percent,
        "is_text": lambda cell: _ESTIMATE.match(cell) is None and _NUMBER.fullmatch(cell) is None,
    }
    return environment


def _emphasize_mean(cell: str) -> Markup:
    """Render a mean with an interval, `0.50 [0.25, 0.75]`, with the mean in bold; other text as it is."""
    estimate = _ESTIMATE.fullmatch(cell)
    return Markup("<b>{}</b> <small>{}</small>{}").format(*estimate.groups()) if estimate else escape(cell)
