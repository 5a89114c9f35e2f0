"""`saccade eval RUN`: evaluate a run's newest checkpoint on its test split, a file of tasks, or published benchmarks.

`saccade eval merge RUN`: merge the shards of an evaluation from several machines.
`saccade eval compare A B`: compare two evaluations of the same tasks.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from saccade.cli.benchmark import (
    BENCHMARK_ALIASES,
    BenchmarkData,
    merge_benchmarks,
    resolve_cluster_key,
    run_benchmarks,
)
from saccade.cli.terminal import (
    MODEL_OR_SERVER,
    BenchmarkFolder,
    RunFolder,
    Settings,
    complete_name,
    complete_recipe,
    err,
    file_option,
    out,
    print_tables,
    show_progress,
)
from saccade.config.load import list_recipes, load_recipe
from saccade.config.schema import Recipe
from saccade.data.hub import DEFAULT_ENDPOINT
from saccade.errors import ConfigError, DataError, RunError
from saccade.plugins import list_plugins, suggest
from saccade.reporting.console import print_text
from saccade.runs.run_folder import Run
from saccade.utils.jsonl import write_json
from saccade.utils.text import pluralize

if TYPE_CHECKING:
    from saccade.evaluation.subset import Shard
    from saccade.types import ScoredEpisode


_DEFAULT_COMMAND = "<run>"  # not the name of a folder


class EvaluationGroup(TyperGroup):
    """The commands of `saccade eval`; without one of their names, the default command runs."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read `saccade eval RUN` and `saccade eval --help` as the default command's."""
        # A run whose folder has a command's name is given as ./merge.
        is_command = bool(args) and args[0] in self.commands
        return super().parse_args(ctx, args if is_command else [_DEFAULT_COMMAND, *(args or ["--help"])])

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Leave the default command's name out of its usage."""
        name, command, rest = super().resolve_command(ctx, args)
        return ("" if name == _DEFAULT_COMMAND else name), command, rest


def _complete_benchmark(incomplete: str) -> list[str]:
    return complete_name([*list_plugins("evaluation.benchmarks"), *BENCHMARK_ALIASES], incomplete)


ScoringMode = Annotated[
    str, typer.Option(help="How a benchmark reads answers: strict (the published rule) or lenient.")
]
DEFAULT_FOLDER = Path("runs") / "eval"  # for models that were trained elsewhere

evaluation_app = typer.Typer(
    cls=EvaluationGroup, help="Evaluate a run (saccade eval RUN), merge shards, compare evaluations."
)


@evaluation_app.command(_DEFAULT_COMMAND, hidden=True)
def evaluate(
    run: Annotated[
        Path,
        typer.Argument(
            help="A run, or a recipe for --model, for which --out becomes a run.", autocompletion=complete_recipe
        ),
    ],
    settings: Settings = None,
    model: Annotated[str | None, MODEL_OR_SERVER] = None,
    output_folder: Annotated[
        Path, typer.Option("--out", help="The run folder to write, for a recipe.")
    ] = DEFAULT_FOLDER,
    tasks: Annotated[Path | None, typer.Option(help="A file of tasks; the recipe's test split by default.")] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the evaluation: test by default; for a benchmark, a suffix.")
    ] = None,
    benchmarks: Annotated[
        str,
        typer.Option(help="Benchmarks instead of tasks, such as videomme,mlvu.", autocompletion=_complete_benchmark),
    ] = "",
    benchmark_data: BenchmarkFolder = Path("data"),
    scoring: ScoringMode = "strict",
    allow_incomplete: Annotated[
        bool, typer.Option("--allow-incomplete", help="Accept a copy with fewer questions than published.")
    ] = False,
    num_tasks: Annotated[int | None, typer.Option(help="Tasks, spread evenly over the strata; 0 = all.")] = None,
    num_samples: Annotated[int | None, typer.Option(help="Episodes per task: reports avg@k and pass@k.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the sampling.")] = None,
    shard: Annotated[
        str, typer.Option(help="Only the i-th of n equal parts, as i/n; merge them with `saccade eval merge`.")
    ] = "",
    shuffle_options: Annotated[
        bool, typer.Option("--shuffle-options", help="Shuffle the options of each episode.")
    ] = False,
    use_tools: Annotated[str | None, typer.Option(help="on, or off for the no-tool control.")] = None,
    hub: Annotated[str, typer.Option(help="The hub, or a mirror, for --benchmark-data hub:main.")] = DEFAULT_ENDPOINT,
) -> None:
    """Evaluate a run's newest checkpoint, or a model by a recipe; the results are written to the run's folder.

    --num-tasks, --num-samples, --shuffle-options and --use-tools set `evaluation`'s settings of these names, --seed
    `seed`.

    `saccade eval merge RUN COPY...` merges the shards of several machines; `saccade eval compare A B` compares two
    evaluations.
    """
    if benchmarks and tasks is not None:
        raise ConfigError(
            "--benchmarks has its own tasks; leave out --tasks, or --benchmarks", key="--tasks", value=str(tasks)
        )
    overrides = {
        "evaluation.num_tasks": num_tasks,
        "evaluation.num_samples": num_samples,
        "seed": seed,
        "evaluation.use_tools": use_tools,
        "evaluation.shuffle_options": shuffle_options or None,
    }
    given = [f"{key}={value}" for key, value in overrides.items() if value is not None]
    command_line = [*(settings or ()), *given]
    load_recipe(_find_recipe(run), command_line)  # before torch is imported: a typo is reported at once
    from saccade.evaluation.subset import Shard, Subset
    from saccade.runs import evaluation

    parsed_shard = Shard.parse(shard) if shard else None
    folder, loaded, weights, prepare = _prepare_run(run, command_line, output_folder, model)
    config = loaded.evaluation
    if config.num_samples > 1 and not config.temperature and not config.shuffle_options:
        count = config.num_samples
        print_text(out, f"At temperature 0 a task's {count} episodes are identical; set evaluation.temperature=1")
    if benchmarks:
        prepare()
        copies = BenchmarkData(
            source=benchmark_data, allow_incomplete=allow_incomplete, scoring=scoring, hub_endpoint=hub
        )
        names, suffix = benchmarks.split(","), name or ""
        run_benchmarks(
            folder,
            loaded,
            names,
            copies,
            suffix=suffix,
            model=weights,
            shard=parsed_shard,
            settings=command_line,
        )
        return
    name = name if name is not None else "test"
    with show_progress(f"eval {name}") as update_progress:
        scored = evaluation.evaluate(
            folder,
            loaded,
            name=name,
            weights=weights,
            tasks=tasks,
            subset=Subset(shard=parsed_shard),
            prepare=prepare,
            on_progress=lambda report: update_progress(report.done, report.accuracy_text, report.total),
        )
    print_evaluation(folder, name, scored, parsed_shard)


def _find_recipe(run_or_recipe: Path) -> str:
    """Return the name or path of a recipe, of a run or given itself. Raises RunError if there is neither."""
    if run_or_recipe.is_dir():
        Run.open(run_or_recipe)
        return str(run_or_recipe / "recipe.yaml")
    if run_or_recipe.suffix not in (".yaml", ".yml") and str(run_or_recipe) not in list_recipes():
        name, suggestion = str(run_or_recipe), suggest(str(run_or_recipe), list_recipes())
        raise RunError(f"there is no run at {name}, nor a recipe of that name; {suggestion}", key=name)
    return str(run_or_recipe)


def _prepare_run(
    run_or_recipe: Path, settings: Sequence[str], output_folder: Path, model: str | None
) -> tuple[Path, Recipe, Path | None, Callable[[], None]]:
    """Return the run folder (that of a recipe becomes a run), recipe, weights (None: the newest, or a server's).

    The last item makes the checks of a recipe before its first episode, which import torch.
    """
    from saccade.rollouts.components import apply_evaluation_settings, uses_chat_engine
    from saccade.runs import pipeline

    if run_or_recipe.is_dir():
        run = run_or_recipe, *pipeline.load_with_model(_find_recipe(run_or_recipe), settings, model)
        return *run, lambda: None

    recipe, weights = pipeline.load_with_model(str(run_or_recipe), settings, model)
    # The run is created with the recipe's own settings; the results record those of this evaluation.
    run_recipe = pipeline.with_paths(load_recipe(str(run_or_recipe)), folder=output_folder, model=weights)
    is_run = (output_folder / "recipe.yaml").exists()

    def prepare() -> None:
        from saccade.checks.run_checks import PlannedRun, require_checks, start_sandboxes
        from saccade.runs.run_lock import CREATION, hold_lock

        checked, has_model = recipe.with_values({"model.path": run_recipe.model.path}), not uses_chat_engine(recipe)
        require_checks(PlannedRun(recipe=checked, folder=output_folder, stages=["eval"], has_model=has_model))
        isolations = start_sandboxes(apply_evaluation_settings(run_recipe))
        with hold_lock(output_folder, CREATION, waits=True):  # several shards may start at once
            exists = (output_folder / "recipe.yaml").exists()
            Run.create(output_folder, run_recipe, resume=exists, metadata=isolations)

    is_unchanged = is_run and not Run(path=output_folder, recipe=run_recipe).diff_recipe()
    if not is_unchanged:
        prepare()
    run = output_folder, *pipeline.load_with_model(str(output_folder / "recipe.yaml"), settings, model)
    return *run, (prepare if is_unchanged else lambda: None)


@evaluation_app.command("merge")
def merge(
    folder: RunFolder,
    others: Annotated[list[Path] | None, typer.Argument(help="Copies of the run from other machines.")] = None,
    name: Annotated[str, typer.Option(help="Name of the evaluation: test by default.")] = "",
    benchmarks: Annotated[str, typer.Option(help="Benchmarks whose shards are merged and reported.")] = "",
    scoring: ScoringMode = "strict",
) -> None:
    """Merge the shards of an evaluation into the results that one machine would have written.

    With --benchmarks, the report on these benchmarks is written too, without running episodes; --name is then the
    suffix given to the evaluation.
    """
    from saccade.evaluation.records import read_scored_episodes
    from saccade.evaluation.shards import merge_shards

    for run_folder in (folder, *(others or ())):
        Run.open(run_folder)
    if benchmarks:
        merge_benchmarks(folder, benchmarks.split(","), suffix=name, scoring=scoring, other_folders=others or ())
        return
    name = name or "test"
    path = merge_shards(folder, name, others or ())
    print_text(out, f"wrote {path}")
    print_evaluation(folder, name, read_scored_episodes(path), None)


@evaluation_app.command("compare")
def compare(
    first: Annotated[Path, typer.Argument(help="A results file, or a run.")],
    second: Annotated[Path, typer.Argument(help="A second one, of the same tasks.")],
    name: Annotated[str, typer.Option(help="Name of a run's evaluation.")] = "test",
    json_file: Annotated[Path | None, file_option("--json", suffix=".json", help_text="A JSON file to write.")] = None,
) -> None:
    """Compare a second evaluation with a first one: paired interval, McNemar's test, tool gain and harm."""
    from saccade.evaluation.compare import compare_files
    from saccade.evaluation.shards import get_results_path
    from saccade.reporting.evaluation_report import build_pair_tables

    files = []
    for given in (first, second):
        path = get_results_path(given, name, None) if given.is_dir() else given
        if not path.is_file():
            raise DataError(f"there is no evaluation {path}; name a results file, or a run and --name", key=str(path))
        files.append(path)
    comparison = compare_files(files[0], files[1], get_cluster_key=resolve_cluster_key)
    print_tables(build_pair_tables(comparison))
    if json_file is not None:
        write_json(json_file, comparison)


def print_evaluation(folder: Path, name: str, scored_episodes: "list[ScoredEpisode]", shard: "Shard | None") -> None:
    """Print an evaluation, its changes from the run's other evaluations, and its failures; a shard by itself."""
    from saccade.evaluation.compare import Evaluation, compare_evaluations, read_evaluations
    from saccade.evaluation.records import read_ungraded_episodes
    from saccade.evaluation.shards import get_results_path
    from saccade.metrics.episode_metrics import has_failed
    from saccade.reporting import evaluation_report

    ungraded = [episode.reason for episode in read_ungraded_episodes(get_results_path(folder, name, shard))]
    # A shard's tasks differ from those of the run's other evaluations.
    own = {name: Evaluation(scored=scored_episodes, ungraded=len(ungraded))}
    problems: list[str] = []  # of other, damaged files
    evaluations = read_evaluations(folder, problems) if shard is None else own
    pairs = [(other, name) for other in evaluations if other != name]
    print_tables(evaluation_report.build_tables(compare_evaluations(evaluations, pairs=pairs, summarized=[name])))
    for problem in problems:
        print_text(err, problem, style="yellow")
    failed = [str(scored.episode.error) for scored in scored_episodes if has_failed(scored.episode)]
    for outcome, reasons in (("failed and count as wrong", failed), ("could not be graded", ungraded)):
        if reasons:
            count = f"{len(reasons)} of {pluralize(len(scored_episodes) + len(ungraded), 'episode')}"
            print_text(out, f"{count} {outcome} ({reasons[0]}); the same command retries them")
