"""`saccade doctor`: what is wrong with this machine, or with a run of a recipe before it begins."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from saccade.commands._terminal import ModelPath, Settings, print_table
from saccade.config import load_recipe
from saccade.data.hub import HUB
from saccade.errors import ConfigError, RunError

if TYPE_CHECKING:
    from saccade.doctor import Finding


def doctor(
    recipe: Annotated[str | None, typer.Argument(help="A recipe; without one, this machine alone is checked.")] = None,
    settings: Settings = None,
    folder: Annotated[Path | None, typer.Option("--out", help="The run folder that is to be written.")] = None,
    model: ModelPath = None,
    world: Annotated[Path | None, typer.Option(help="A folder that `saccade data world` made.")] = None,
    stage: Annotated[str, typer.Option(help="What is to be run: some of sft,rl,eval.")] = "",
    bench: Annotated[str, typer.Option(help="Benchmarks of its evaluation, such as videomme,mlvu.")] = "",
    data: Annotated[Path, typer.Option(help="A folder with a copy of each, by its name; or hub:main.")] = Path("data"),
) -> None:
    """Check this machine (versions, device, video, disk, the jail for Python), or all that a run of a recipe needs:
    settings, extras, device, model, data, context, memory, disk, servers, sandbox. No weights are loaded.
    """
    if recipe is None:
        from saccade.doctor import examine

        _told(examine(), "this machine can't run Saccade as it is: mend {}")
        return
    from saccade import checkup, stages

    loaded = load_recipe(recipe, settings or ())
    own = Path(recipe).parent if Path(recipe).name == "recipe.yaml" else None
    place = folder or own or Path("runs") / "rl"
    chosen = (
        _stages(stage)
        if stage
        else [each for each in checkup.STAGES if each == "eval" or each in loaded.model_fields_set]
    )
    loaded = stages.with_paths(loaded, folder=place, model=model, world=world)
    case = checkup.Case(recipe=loaded, folder=place, stages=chosen, own_tasks=not bench)
    findings = [checkup.examine(case)]
    if bench:
        from saccade.commands.bench import Copies, examine_benchmarks

        copies = Copies(data=data, subset=False, extractor="official", hub=HUB)
        findings.append(examine_benchmarks(loaded, bench.split(","), copies))
    _told((each for part in findings for each in part), f"a run of {recipe} would fail: mend {{}}")


def _stages(text: str) -> list[str]:
    from saccade.checkup import STAGES

    chosen = [word.strip() for word in text.split(",")]
    for word in chosen:
        if word not in STAGES:
            raise ConfigError(f"--stage can't be {word!r}; name some of {', '.join(STAGES)}")
    return chosen


def _told(findings: "Iterable[Finding]", failed: str) -> None:
    """A line for each finding; RunError names those that are not good."""
    found = list(findings)
    wanted = any(each.wanted for each in found)
    table = Table("", "found", *(["wanted"] if wanted else []), "", box=None)
    for each in found:
        verdict = "[green]ok[/green]" if each.good else "[red]no[/red]"
        bounds = [escape(each.wanted)] if wanted else []
        table.add_row(escape(each.name), escape(each.found), *bounds, verdict)
    bad = [each.name for each in found if not each.good]
    print_table(table)
    if bad:
        raise RunError(failed.format(", ".join(bad)))
