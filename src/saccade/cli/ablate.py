"""`saccade lab`: sets of small runs, side by side."""

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Column, Table

from saccade.commands._terminal import out, print_table, show
from saccade.errors import RunError
from saccade.view.live import lines, say


def lab(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[SET] [SETTINGS]...", help="A packaged set, or a path to a .yaml; settings for all."),
    ] = None,
    seeds: Annotated[int | None, typer.Option(help="Seeds 0, 1, …; 3 by default, 1 with --quick.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="See that it works, in ten minutes; no evidence.")] = False,
    condition: Annotated[list[str] | None, typer.Option(help="A condition of the set; may be given again.")] = None,
    folder: Annotated[Path | None, typer.Option("--out", help="The folder to write; runs/lab/SET by default.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where it stopped.")] = False,
    plan: Annotated[bool, typer.Option("--plan", help="Say what would be done, and how long it takes.")] = False,
) -> None:
    """Compare arms of tiny recipes on the same worlds from the same weights; without a SET, list the sets."""
    from saccade.lab.plan import Lab
    from saccade.lab.run import planned, prepare, run

    given = list(words or ())
    if not given:
        return _list()
    name = given.pop(0)
    chosen = Lab.of(name, quick=quick, settings=given, seeds=seeds, conditions=condition or ())
    folder = folder or Path("runs/lab") / (f"{chosen.name}-quick" if quick else chosen.name)
    chosen = chosen if plan else prepare(folder, chosen, resume=resume, again=seeds is None and not condition)
    say(out, planned(chosen))
    if plan:
        return None
    with lines(out) as begin:
        outcome = run(folder, chosen, begin=begin, say=lambda text: say(out, text))
    show(outcome.tables)
    say(out, f"The report: {outcome.page}")
    if outcome.failed:
        raise RunError(f"{len(outcome.failed)} of the lab's jobs failed; try them again with --resume")
    return None


def _list() -> None:
    from saccade.lab.design import read_set, set_names
    from saccade.lab.plan import Lab, minutes

    table = Table(Column("set", no_wrap=True), "what it is", "minutes", "--quick", box=None)
    for name in set_names():
        costs = [f"{minutes(Lab.of(name, quick=quick).jobs()):.0f}" for quick in (False, True)]
        table.add_row(name, escape(read_set(name).title), *costs)
    print_table(table)
