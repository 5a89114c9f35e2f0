"""`saccade doctor`: check this machine, or everything that a run of a recipe needs, before it starts."""

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from saccade.cli.terminal import MODEL_OR_SERVER, BenchmarkFolder, Settings, complete_recipe, print_table
from saccade.config.load import load_recipe
from saccade.config.schema import STAGES
from saccade.errors import RunError

if TYPE_CHECKING:
    from saccade.checks.machine import CheckResult


def doctor(
    recipe: Annotated[
        str | None,
        typer.Argument(help="A recipe; without one, only this machine is checked.", autocompletion=complete_recipe),
    ] = None,
    settings: Settings = None,
    folder: Annotated[Path | None, typer.Option("--out", help="The run folder that would be written.")] = None,
    model: Annotated[str | None, MODEL_OR_SERVER] = None,
    data: Annotated[Path | None, typer.Option(help="A folder made by `saccade data synth`.")] = None,
    num_processes: Annotated[
        int, typer.Option("--nproc", min=1, help="Processes that would train, one per GPU; they shard the model.")
    ] = 1,
    stage: Annotated[str, typer.Option(help="The stages to check, of sft,rl,eval.")] = "",
    benchmarks: Annotated[str, typer.Option(help="Benchmarks of the evaluation, such as videomme,mlvu.")] = "",
    benchmark_data: BenchmarkFolder = Path("data"),
) -> None:
    """Check this machine (versions, device, video, disk, sandbox), or everything that a run of a recipe needs:
    settings, extras, device, model, data, context, memory, disk, servers, sandbox. No weights are loaded.
    """
    if recipe is None:
        from saccade.checks.machine import check_machine

        _print_results(check_machine(), "this machine can't run Saccade; fix {}")
        return
    load_recipe(recipe, settings or ())  # before torch is imported: a typo is reported at once
    from saccade.rollouts.components import uses_chat_engine
    from saccade.runs import pipeline
    from saccade.runs.stages import list_stages, parse_stages

    loaded, weights = pipeline.load_with_model(recipe, settings or (), model)
    run_folder = Path(recipe).parent if Path(recipe).name == "recipe.yaml" else None
    folder = folder or run_folder or Path("runs") / "rl"
    loaded = pipeline.with_paths(loaded, folder=folder, model=weights, data=data, downloads=False)
    if stage:
        stages = parse_stages(stage)
    elif uses_chat_engine(loaded):  # a chat API has no weights to train
        stages = ["eval"]
    elif loaded.data.demonstrations or loaded.data.train:
        stages = list_stages(loaded)  # those that `saccade train` would run
    else:
        stages = [name for name in STAGES if name == "eval" or name in loaded.model_fields_set]
    if benchmarks and "eval" not in stages:
        stages = [*stages, "eval"]
    results = [pipeline.check_run(folder, loaded, stages, uses_own_tasks=not benchmarks, num_processes=num_processes)]
    if benchmarks:
        from saccade.cli.benchmark import BenchmarkData, check_benchmarks

        copies = BenchmarkData(source=benchmark_data, allow_incomplete=False, scoring="strict")
        results.append(check_benchmarks(loaded, benchmarks.split(","), copies))
    _print_results(itertools.chain.from_iterable(results), f"a run of {recipe} would fail; fix {{}}")


def _print_results(results: "Iterable[CheckResult]", failure_template: str) -> None:
    """Print a row per result. Raises RunError naming the failed checks."""
    rows = list(results)
    has_expected = any(result.expected for result in rows)
    table = Table("", "found", *(["expected"] if has_expected else []), "", box=None)
    for result in rows:
        verdict = "[green]ok[/green]" if result.is_ok else "[red]no[/red]"
        expected = [escape(result.expected)] if has_expected else []
        table.add_row(escape(result.name), escape(result.message), *expected, verdict)
    failed = [result.name for result in rows if not result.is_ok]
    print_table(table)
    if failed:
        raise RunError(failure_template.format(", ".join(failed)), key=failed[0], value=failed)
