"""What commands share: two consoles, bars, tables, and arguments that mean the same everywhere."""

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from saccade.view.live import Advance, lines

LOG_WIDTH = 120  # columns of tables where there is no terminal

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)

Settings = Annotated[list[str] | None, typer.Argument(help="Settings of the recipe, such as rl.optim.lr=1e-6.")]
RunFolder = Annotated[Path, typer.Argument(help="A run folder.")]
ModelPath = Annotated[Path | None, typer.Option("--model", help="A checkpoint, or a run whose newest one is meant.")]
MODEL_OR_SERVER = typer.Option("--model", help="A checkpoint, a run, or the address of a server of chat completions.")
RecipeName = Annotated[str, typer.Argument(help="A packaged recipe, such as tiny/para_grpo, or a path to a .yaml.")]


@contextlib.contextmanager
def progress(label: str, total: int | None = None) -> Iterator[Advance]:
    """A bar on a terminal, a line every ten seconds elsewhere."""
    with lines(out) as begin:
        yield begin(label, total)


def print_table(table: Table) -> None:
    """A table as wide as the terminal, or as a log is."""
    if not out.is_terminal:
        out.width = LOG_WIDTH  # a width that is given to print can only be less than the console's own
    out.print(table)


def show(grids: Iterable[Any]) -> None:
    """Tables of texts (`evaluation.report.Grid`)."""
    for grid in grids:
        table = Table(
            *map(escape, grid.header), title=escape(grid.title), title_justify="left", box=None, header_style="dim"
        )
        for row in grid.rows:
            table.add_row(*map(escape, row))
        out.print()
        print_table(table)
