"""Shared by all commands: consoles, progress bars, tables, and common arguments."""

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.markup import escape
from rich.segment import Segment
from rich.table import Table

from saccade.config.load import list_keys, list_recipes
from saccade.config.reference import list_values
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


def complete_recipe(incomplete: str) -> list[str]:
    """Return the packaged recipes, and the YAML files and folders, whose name begins with a text."""
    names = [name for name in list_recipes() if name.startswith(incomplete)]
    files = [f"{path}/" if path.is_dir() else str(path) for path in _list_paths(incomplete)]
    return [*names, *(file for file in files if file.endswith(("/", ".yaml", ".yml")))]


def _list_paths(incomplete: str) -> list[Path]:
    folder, start = os.path.split(incomplete)
    with contextlib.suppress(OSError):
        return sorted(path for path in Path(folder).iterdir() if path.name.startswith(start))
    return []


def complete_setting(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the keys of a recipe that begin with a text, up to their next dot or with an equals sign; then values.

    Bash makes the equals sign a word of its own, which click leaves out if it is the last, and expects the value alone.
    """
    words = ["", ""] + [word for value in ctx.params.values() if isinstance(value, list | tuple) for word in value]
    if not incomplete and (values := list_values(words[-1])):
        return values
    if words[-1] == "=":
        return [value for value in list_values(words[-2]) if value.startswith(incomplete)]
    key, equals, start = incomplete.partition("=")
    if equals:
        return [f"{key}={value}" for value in list_values(key) if value.startswith(start)]
    prefix = incomplete.rpartition(".")[0]
    start = f"{prefix}." if prefix else ""
    keys = (key.removeprefix(start) for key in list_keys() if key.startswith(incomplete))
    return list(dict.fromkeys(start + (key.partition(".")[0] + "." if "." in key else f"{key}=") for key in keys))


def complete_recipe_or_setting(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return what `complete_recipe` and `complete_setting` return."""
    return [*complete_recipe(incomplete), *complete_setting(ctx, incomplete)]


def complete_run(incomplete: str) -> list[str]:
    """Return the runs, and the folders that may hold some, whose path begins with a text; "" means `runs/`."""
    folders = [path for path in _list_paths(incomplete or "runs/") if path.is_dir() and not path.name.startswith(".")]
    return [str(path) if (path / "recipe.yaml").is_file() else f"{path}/" for path in folders]


def complete_name(names: Iterable[str], incomplete: str) -> list[str]:
    """Return the names that begin with a text; of several joined by commas, the last one is completed."""
    head, comma, start = incomplete.rpartition(",")
    return [f"{head}{comma}{name}" for name in names if name.startswith(start)]


Settings = Annotated[
    list[str] | None,
    typer.Argument(help="Settings of the recipe, such as rl.optim.lr=1e-6.", autocompletion=complete_setting),
]
BenchmarkFolder = Annotated[Path, typer.Option(help="A folder with a copy of each by name; or hub:main.")]
RunFolder = Annotated[Path, typer.Argument(help="A run folder.", autocompletion=complete_run)]
ModelPath = Annotated[
    str | None, typer.Option("--model", help="A checkpoint, a run for its newest one, or a model of the hub.")
]
MODEL_OR_SERVER = typer.Option("--model", help="A checkpoint, a run, a model of the hub, or a chat server's URL.")
RecipeName = Annotated[
    str,
    typer.Argument(
        help="A packaged recipe, such as tiny/para_grpo, or a path to a .yaml.", autocompletion=complete_recipe
    ),
]


def file_option(*names: str, suffix: str, help_text: str, **arguments: Any) -> Any:
    """Return an option for a file to write in one format, which refuses names that claim another."""

    def require_suffix(ctx: Any, option: Any, path: Path | None) -> Path | None:
        if path is not None and path.suffix.lower() != suffix:
            name = escape_control_characters(str(path))
            raise typer.BadParameter(f"{name} would hold {suffix[1:].upper()}; give it a name that ends in {suffix}")
        return path

    return typer.Option(*names, help=help_text, callback=require_suffix, **arguments)


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
