"""Write a report as a PDF: text and tables in a monospaced font, small plots two in a row. Drawn by matplotlib."""

import io
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib.image
from matplotlib.backends.backend_pdf import PdfPages
from matplotlib.figure import Figure

from saccade.metrics.tables import Table
from saccade.reporting.plots import PLOT_DPI
from saccade.reporting.report import EXAMPLES_TITLE, Report
from saccade.utils.files import convert_file_errors, create_folder, write_atomically
from saccade.utils.text import escape_control_characters

PAGE_SIZE = (8.27, 11.69)  # A4, in inches
MARGIN = 0.7
FONT_SIZE = 7.0  # points
LINE_CHARS = 116  # of the font's characters in a line
LINE_HEIGHT = 0.135  # inches
TITLE_HEIGHT = 0.2  # inches of a plot's title
PLOT_HEIGHT = 2.5  # inches that the first plot of a section needs
PLOT_GAP = 0.2
FRAME_DPI = 140  # of the frames of an example: eight in a row take the page's width
LABEL_CHARS = 14  # of the column of labels
MAX_HALF_WIDTH = 4.5  # a plot that is drawn wider than this has a row to itself
MIN_COLUMN_CHARS = 6
HEADING_SIZES = {1: 15.0, 2: 11.0, 3: 8.5}


def write_pdf(report: Report, path: Path) -> Path:
    """Write a report as a PDF of A4 pages; return its path. Raises RunError if the file can't be written."""
    metadata = {"Title": escape_control_characters(report.title)}
    with convert_file_errors(path):
        create_folder(path.parent)
    with (
        warnings.catch_warnings(),  # until the file is closed, which embeds the fonts
        convert_file_errors(path),
        write_atomically(path) as draft,
        PdfPages(draft, metadata=metadata) as pages,
    ):
        warnings.filterwarnings("ignore", message="Glyph")  # a character without one is drawn as a box
        writer = _PageWriter(pages)
        writer.write_heading(report.title, 1)
        for text in (*report.warnings, *(f"{label}. {text}" for label, text in report.statements.items())):
            writer.write_text(text)
        for key, value in report.metadata.items():
            writer.write_text(f"{key}: {value}")
        for section in report.sections:
            if not section.is_shown:
                continue
            writer.write_heading(section.title, 2, room=1.2 if section.tables else PLOT_HEIGHT + 1.2)
            for note in section.notes:
                writer.write_text(note)
            for table in section.all_tables:
                if table.title != section.title:
                    writer.write_heading(table.title, 3)
                for line in format_table(table, LINE_CHARS):
                    writer.write_line(line)
                writer.skip(0.1)
            for plot in section.plots:
                if png := plot.encode("png"):
                    writer.write_plot("" if plot.has_title else plot.title, png)
            writer.end_plots()
        if report.examples:
            writer.write_heading(EXAMPLES_TITLE, 2, room=2.0)
            writer.write_text(report.examples_note)
        for example in report.examples:
            writer.write_heading(example.title, 3, room=2.0)
            for fact in example.facts:
                writer.write_item(*fact)
            if example.draw_frames is not None and (image := example.draw_frames()):
                writer.write_plot("", image, dpi=FRAME_DPI)
                writer.end_plots()
            for step in example.steps:
                writer.write_item(*step)
        writer.close()
    return path


class _PageWriter:
    """Places lines and plots from the top of a page to its end, then starts another one."""

    def __init__(self, pages: PdfPages) -> None:
        self._pages, self._figure, self._y = pages, Figure(figsize=PAGE_SIZE), PAGE_SIZE[1] - MARGIN
        self._plot_left = self._row_height = 0.0  # of the row of plots

    def _require(self, height: float) -> None:
        if self._y - height < MARGIN:
            self.close()
            self._figure, self._y = Figure(figsize=PAGE_SIZE), PAGE_SIZE[1] - MARGIN

    def _place(self, text: str, size: float, *, left: float = 0.0, **style: Any) -> None:
        x, y = (MARGIN + left) / PAGE_SIZE[0], self._y / PAGE_SIZE[1]
        clean = escape_control_characters(text)
        self._figure.text(x, y, clean, size=size, va="top", parse_math=False, **style)

    def write_heading(self, text: str, level: int, room: float = 0.6) -> None:
        size = HEADING_SIZES[level]
        self._require(room)  # a heading isn't the last line of a page
        self.skip(0.12)
        for line in textwrap.wrap(text, int(700 / size)) or [""]:
            self._place(line, size, weight="bold")
            self._y -= size / 72 * 1.5

    def write_text(self, text: str) -> None:
        for line in textwrap.wrap(text, LINE_CHARS):
            self.write_line(line)

    def write_item(self, label: str, text: str) -> None:
        """Write a labeled text; its further lines are indented."""
        start = f"{label:<{LABEL_CHARS}}  "
        indent = " " * len(start)
        for line in textwrap.wrap(text, LINE_CHARS, initial_indent=start, subsequent_indent=indent):
            self.write_line(line)

    def write_line(self, text: str) -> None:
        self._require(LINE_HEIGHT)
        self._place(text, FONT_SIZE, family="monospace")
        self._y -= LINE_HEIGHT

    def skip(self, height: float) -> None:
        self._y -= height

    def write_plot(self, title: str, data: bytes, dpi: int = PLOT_DPI) -> None:
        """Place a plot, a PNG or JPEG, beside the previous one if both fit, at most as large as it was drawn."""
        image = matplotlib.image.imread(io.BytesIO(data), format="jpg" if data.startswith(b"\xff\xd8") else "png")
        height, width = (size / dpi for size in image.shape[:2])
        page_width, page_height = (size - 2 * MARGIN for size in PAGE_SIZE)
        scale = min(1.0, page_width / width, (page_height - TITLE_HEIGHT) / height)
        if width <= MAX_HALF_WIDTH:
            scale = min(scale, (page_width - PLOT_GAP) / 2 / width)
        width, height = width * scale, height * scale
        if self._plot_left + width > page_width or self._y - TITLE_HEIGHT - height < MARGIN:
            self.end_plots()
        self._require(TITLE_HEIGHT + height)
        self._place(title, HEADING_SIZES[3], left=self._plot_left, weight="bold")
        box = (MARGIN + self._plot_left, self._y - TITLE_HEIGHT - height, width, height)
        axes = self._figure.add_axes(tuple(size / PAGE_SIZE[axis % 2] for axis, size in enumerate(box)))
        axes.imshow(image, interpolation="antialiased")
        axes.set_axis_off()
        self._plot_left += width + PLOT_GAP
        self._row_height = max(self._row_height, TITLE_HEIGHT + height + PLOT_GAP)

    def end_plots(self) -> None:
        """Continue below the plots."""
        self._y -= self._row_height
        self._plot_left = self._row_height = 0.0

    def close(self) -> None:
        self._pages.savefig(self._figure)  # type: ignore[no-untyped-call]


def format_table(table: Table, width: int) -> Iterator[str]:
    """Yield the lines of a table in at most `width` characters; the widest columns are wrapped until it fits."""
    rows = [list(map(str, row)) for row in (table.header, *table.rows) if any(row)]
    if not rows:
        return
    count = max(map(len, rows))
    rows = [row + [""] * (count - len(row)) for row in rows]
    widths = [max(1, *(len(row[column]) for row in rows)) for column in range(count)]
    while sum(widths) + 2 * (count - 1) > width and max(widths) > MIN_COLUMN_CHARS:
        widths[widths.index(max(widths))] -= 1
    for index, row in enumerate(rows):
        if index == 1 and any(table.header):
            yield "─" * min(sum(widths) + 2 * (count - 1), width)
        cells = [textwrap.wrap(cell, size) or [""] for cell, size in zip(row, widths, strict=True)]
        for number in range(max(map(len, cells))):
            parts = [cell[number] if number < len(cell) else "" for cell in cells]
            yield "  ".join(part.ljust(size) for part, size in zip(parts, widths, strict=True)).rstrip()[:width]
