"""Shared by all commands: consoles, progress bars, tables, and common arguments."""

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.markup import escape
from rich.segment import Segment
from rich.table import Table

from saccade.reporting.console import UpdateProgress, show_progress_lines
from saccade.utils.text import escape_control_characters

LOG_WIDTH = 120  # columns of tables without a terminal


class SafeConsole(Console):
    """A console whose texts, wherever they come from, can't control the terminal; rich's own styles can."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield the segments of what is printed, with control characters in their texts made visible."""
        for segment in super().render(renderable, options):
            text = segment.text if segment.control else escape_control_characters(segment.text)
            yield Segment(text, segment.style, segment.control)


out = SafeConsole(highlight=False)
err = SafeConsole(stderr=True, highlight=False)

Settings = Annotated[list[str] | None, typer.Argument(help="Settings of the recipe, such as rl.optim.lr=1e-6.")]
RunFolder = Annotated[Path, typer.Argument(help="A run folder.")]
ModelPath = Annotated[str | None, typer.Option("--model", help="A checkpoint, or a run for its newest one.")]
MODEL_OR_SERVER = typer.Option("--model", help="A checkpoint, a run, or the URL of a chat completions server.")
RecipeName = Annotated[str, typer.Argument(help="A packaged recipe, such as tiny/para_grpo, or a path to a .yaml.")]


@contextlib.contextmanager
def show_progress(label: str, total: int | None = None) -> Iterator[UpdateProgress]:
    """Show a progress bar on a terminal, a line every ten seconds in a log."""
    with show_progress_lines(out) as add_task:
        yield add_task(label, total)


def print_table(table: Table) -> None:
    """Print a table as wide as the terminal, or LOG_WIDTH."""
    if not out.is_terminal:
        out.width = LOG_WIDTH  # print's own width argument can only be smaller than the console's
    out.print(table)


def print_tables(tables: Iterable[Any]) -> None:
    """Print tables of texts (`metrics.tables.Table`)."""
    for table in tables:
        title = escape(table.title)
        view = Table(*map(escape, table.header), title=title, title_justify="left", box=None, header_style="dim")
        for row in table.rows:
            view.add_row(*map(escape, row))
        out.print()
        print_table(view)
