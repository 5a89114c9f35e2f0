"""`saccade view`: runs in the browser. `saccade runs`: a list of them."""

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from saccade.cli.terminal import complete_recipe, complete_run, complete_setting, file_option, out, print_table
from saccade.config.load import load_recipe
from saccade.errors import RunError
from saccade.reporting.console import print_text

DEFAULT_FOLDER = Path("runs")


def view(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[RUN]...",
            help="Run folders, or folders of runs; runs by default.",
            autocompletion=complete_run,
        ),
    ] = None,
    host: Annotated[
        str, typer.Option(help="The address to serve; any other than this machine's is public.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port; 0 is any unused one.", min=0, max=65535)] = 0,
    ask: Annotated[
        str, typer.Option(metavar="MODEL", help="A checkpoint, a run or a chat server's URL that a page asks.")
    ] = "",
    recipe: Annotated[
        str,
        typer.Option(
            help="The recipe of --ask; by default the run's, or one that suits the model.",
            autocompletion=complete_recipe,
        ),
    ] = "",
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="A setting of --ask, such as engine.settings.model=NAME; repeatable.",
            autocompletion=complete_setting,
        ),
    ] = None,
    export: Annotated[
        Path | None,
        file_option(suffix=".html", metavar="FILE.html", help_text="Write one run as a single page of at most 5 MB."),
    ] = None,
    open_browser: Annotated[bool, typer.Option("--open/--no-open", help="Open a browser.")] = False,
) -> None:
    """Look at runs in the browser: curves, steps, episodes with their frames and videos, comparisons, benchmarks.

    Live while a run trains. The address holds a token, without which the server answers nothing.
    """
    if (recipe or settings) and not ask:
        raise RunError("--recipe and --set are of a model that the page asks; give --ask MODEL", key="ask")
    if ask:
        load_recipe(recipe or "tiny/base", settings or ())  # before torch is imported: a typo is reported at once
    paths = [] if ask and not runs and not DEFAULT_FOLDER.is_dir() else require_run_paths(runs)
    from saccade.runs.view import export_page, view_runs

    if export is not None:
        note = export_page(paths, export)
        print_text(out, f"wrote {export} ({export.stat().st_size / 1e6:.1f} MB). {note}")
        return
    view_runs(
        paths,
        host=host,
        port=port,
        open_browser=open_browser,
        ask_model=ask,
        ask_recipe=recipe,
        ask_settings=settings or (),
        on_ready=lambda address: print_text(out, f"{address}\nCtrl-C stops the viewer."),
    )


def list_runs(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[FOLDER]...", help="Folders of runs; runs by default.", autocompletion=complete_run),
    ] = None,
) -> None:
    """List runs with their state, newest metrics and best validation; the newest run is first."""
    paths = require_run_paths(folders)
    from saccade.reporting.run_summary import describe_summary, find_runs, summarize_run
    from saccade.runs.run_lock import TRAINING, is_locked

    summaries = [(name, summarize_run(path, lambda run: is_locked(run, TRAINING))) for path, name in find_runs(paths)]
    if not summaries:
        print_text(out, f"no run in {', '.join(map(str, paths))}")
        return
    view = Table("run", "state", "steps", "newest", "best validation", "evaluations", box=None, header_style="dim")
    for name, summary in sorted(summaries, key=lambda item: -item[1].modified):
        view.add_row(*map(escape, (name, summary.state, *describe_summary(summary))))
    print_table(view)
    for name, summary in summaries:
        if summary.problem:
            print_text(out, f"{name}: {summary.problem}", style="red")


def require_run_paths(runs: list[Path] | None) -> list[Path]:
    """Return the given folders, or the default one. Raises RunError for one that doesn't exist."""
    paths = runs or [DEFAULT_FOLDER]
    for path in paths:
        if not path.is_dir():
            raise RunError(f"there is no folder {path}; name a run, or a folder of runs", key=str(path))
    return paths
