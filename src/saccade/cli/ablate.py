"""`saccade ablate`: compare variants of tiny recipes."""

import functools
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Column, Table

from saccade.cli.terminal import complete_name, complete_setting, out, print_table, print_tables
from saccade.errors import RunError
from saccade.reporting.console import print_text, show_progress_lines
from saccade.utils.text import pluralize


def _complete_set_or_setting(ctx: typer.Context, incomplete: str) -> list[str]:
    from saccade.runs.ablations.spec import list_spec_names

    return [*complete_name(list_spec_names(), incomplete), *complete_setting(ctx, incomplete)]


def ablate(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[SET] [SETTINGS]...",
            help="A packaged set, or a path to a .yaml; settings for all of its recipes.",
            autocompletion=_complete_set_or_setting,
        ),
    ] = None,
    seeds: Annotated[int | None, typer.Option(help="Number of seeds; 3 by default, 1 with --quick.")] = None,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Run a reduced set with one seed in ten minutes; too little for conclusions."),
    ] = False,
    condition: Annotated[list[str] | None, typer.Option(help="A condition of the set; repeatable.")] = None,
    folder: Annotated[
        Path | None, typer.Option("--out", help="The folder to write; runs/ablations/SET by default.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume an interrupted ablation.")] = False,
    plan: Annotated[bool, typer.Option("--plan", help="Print what would be run and how long it would take.")] = False,
) -> None:
    """Compare variants of tiny recipes on the same data from the same weights; without a SET, list the sets."""
    settings = list(arguments or ())
    if not settings:
        return _list()
    from saccade.runs.ablations.run import format_plan, resolve_ablation, run
    from saccade.runs.ablations.schedule import Ablation

    name = settings.pop(0)
    ablation = Ablation.from_spec(name, quick=quick, settings=settings, seeds=seeds, conditions=condition or ())
    folder = folder or Path("runs/ablations") / (f"{ablation.name}-quick" if quick else ablation.name)
    if not plan:
        keep_selection = seeds is None and not condition
        ablation = resolve_ablation(folder, ablation, resume=resume, keep_selection=keep_selection)
    print_text(out, format_plan(ablation))
    if plan:
        return None
    with show_progress_lines(out) as add_task:
        print_line = functools.partial(print_text, out)
        report_path, tables, failures = run(folder, ablation, add_task=add_task, print_line=print_line)
    print_tables(tables)
    print_text(out, f"Report: {report_path}")
    if failures:
        message = f"{pluralize(len(failures), 'job')} of the ablation in {folder} failed; retry them with --resume"
        raise RunError(message, key=str(folder), value=sorted(failures))
    return None


def _list() -> None:
    from saccade.runs.ablations.schedule import Ablation, estimate_minutes
    from saccade.runs.ablations.spec import list_spec_names, load_spec

    table = Table(Column("set", no_wrap=True), "description", "minutes", "--quick", box=None)
    for name in list_spec_names():
        spec = load_spec(name)
        ablations = (Ablation.from_spec(name, spec=spec, quick=quick, checks_recipes=False) for quick in (False, True))
        minutes = (estimate_minutes(ablation.build_jobs()) for ablation in ablations)
        table.add_row(name, escape(spec.title), *(f"{estimate:.0f}" for estimate in minutes))
    print_table(table)
