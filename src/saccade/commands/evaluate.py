"""`saccade eval RUN`: a run's newest checkpoint on its test split, on a file of tasks, on published benchmarks."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from saccade.commands._terminal import ModelPath, RunFolder, Settings, out, progress, show
from saccade.commands.bench import run_benchmarks
from saccade.config import load_recipe
from saccade.errors import ConfigError
from saccade.runlog import Run
from saccade.view.live import say


def evaluate(
    folder: RunFolder,
    settings: Settings = None,
    model: ModelPath = None,
    tasks: Annotated[Path | None, typer.Option(help="A file of tasks; the recipe's test split by default.")] = None,
    name: Annotated[str, typer.Option(help="What the evaluation is called.")] = "test",
    bench: Annotated[str, typer.Option(help="Benchmarks instead of tasks, such as videomme,mlvu.")] = "",
    data: Annotated[Path, typer.Option(help="The folder that holds a copy of each, by its name.")] = Path("data"),
    extractor: Annotated[str, typer.Option(help="How a benchmark reads answers: official or tolerant.")] = "official",
    subset: Annotated[bool, typer.Option("--subset", help="Let a copy hold fewer questions than published.")] = False,
    limit: Annotated[int | None, typer.Option(help="Tasks at most, spread evenly over the strata; 0 = all.")] = None,
    repeat: Annotated[int | None, typer.Option(help="Attempts at each task: reports avg@k and pass@k.")] = None,
    seed: Annotated[int | None, typer.Option(help="The seed of the sampling.")] = None,
    shuffle: Annotated[
        bool, typer.Option("--shuffle-options", help="Each attempt has the options in its own order.")
    ] = False,
    tools: Annotated[str | None, typer.Option(help="on, or off for the no-tool control.")] = None,
) -> None:
    """Evaluate a run's newest checkpoint; results stay in its folder, and are compared with the others there.

    --limit, --repeat, --shuffle-options and --tools stand for the settings of these names of `evaluation`, --seed for
    `seed`.
    """
    if bench and tasks is not None:
        raise ConfigError("--bench brings its own tasks: leave out --tasks, or --bench")
    given = {"evaluation.limit": limit, "evaluation.repeat": repeat, "seed": seed, "evaluation.tools": tools}
    given |= {"evaluation.shuffle_options": shuffle or None}
    words = [*(settings or ()), *_settings(given)]
    if bench:
        run_benchmarks(folder, words, bench.split(","), data=data, model=model, extractor=extractor, subset=subset)
        return
    from saccade import exams
    from saccade.evaluation import report
    from saccade.evaluation.metrics import failed
    from saccade.evaluation.run import read_ungraded

    loaded = load_recipe(str(Run.open(folder).path / "recipe.yaml"), words)
    with progress(f"eval {name}") as advance:
        scored = exams.evaluate(
            folder,
            loaded,
            name=name,
            weights=model,
            tasks=tasks,
            on_done=lambda tally: advance(tally.done, tally.remark, tally.total),
        )
    found = report.read_evaluations(folder)
    pairs = [(other, name) for other in found if other != name]
    whole = report.compare(found, pairs=pairs, ungraded=report.count_ungraded(folder))
    show(report.grids(report.Comparison(summaries={name: whole.summaries[name]}, changes=whole.changes)))
    broken = [str(each.episode.error) for each in scored if failed(each.episode)]
    lost = [each.reason for each in read_ungraded(folder / "evaluations" / f"{name}.jsonl")]
    for what, reasons in (("broke and count as wrong", broken), ("could not be graded", lost)):
        if reasons:
            count = f"{len(reasons)} of {len(scored) + len(lost)}"
            say(out, f"{count} attempts {what} ({reasons[0]}); the same command tries them again")


def _settings(given: Mapping[str, Any]) -> list[str]:
    """Options as settings of the recipe, as far as they were given."""
    return [f"{key}={value}" for key, value in given.items() if value is not None]
