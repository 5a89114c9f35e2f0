"""`saccade eval RUN`: a run's newest checkpoint on its test split, on a file of tasks, on published benchmarks.

`saccade eval merge RUN`: shards of an evaluation that several machines made, joined.
`saccade eval compare A B`: two evaluations of the same tasks.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from saccade.commands._terminal import MODEL_OR_SERVER, RunFolder, Settings, out, progress, show
from saccade.commands.bench import Copies, merge_benchmarks, run_benchmarks, unit_of_results
from saccade.config import Recipe, load_recipe, recipe_names
from saccade.data.hub import HUB
from saccade.errors import ConfigError, DataError, RunError
from saccade.plugins import nearest
from saccade.runlog import Run, write_text
from saccade.view.live import say

if TYPE_CHECKING:
    from saccade.evaluation.shards import Shard
    from saccade.types import Scored


class Evaluating(TyperGroup):
    """The commands of `saccade eval`, of which the first goes without its name."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read `saccade eval RUN` as `saccade eval of RUN`."""
        # A run whose folder is called like a command is given as ./merge.
        known = not args or args[0] in self.commands or args[0] == "--help"
        return super().parse_args(ctx, args if known else ["of", *args])


HOME = Path("runs") / "eval"  # of models that were never trained here

evaluation = typer.Typer(
    cls=Evaluating,
    no_args_is_help=True,
    help="Evaluate a run (saccade eval RUN; its options: saccade eval of --help), join shards, compare evaluations.",
)


@evaluation.command("of")
def evaluate(
    run: Annotated[Path, typer.Argument(help="A run, or a recipe for --model, of which one is begun in --out.")],
    settings: Settings = None,
    model: Annotated[str | None, MODEL_OR_SERVER] = None,
    home: Annotated[Path, typer.Option("--out", help="The run folder to write, where a recipe is given.")] = HOME,
    tasks: Annotated[Path | None, typer.Option(help="A file of tasks; the recipe's test split by default.")] = None,
    name: Annotated[
        str | None,
        typer.Option(help="What the evaluation is called: test by default; of a benchmark, its own and this."),
    ] = None,
    bench: Annotated[str, typer.Option(help="Benchmarks instead of tasks, such as videomme,mlvu.")] = "",
    data: Annotated[Path, typer.Option(help="A folder with a copy of each, by its name; or hub:main.")] = Path("data"),
    extractor: Annotated[str, typer.Option(help="How a benchmark reads answers: official or tolerant.")] = "official",
    subset: Annotated[bool, typer.Option("--subset", help="Let a copy hold fewer questions than published.")] = False,
    limit: Annotated[int | None, typer.Option(help="Tasks at most, spread evenly over the strata; 0 = all.")] = None,
    repeat: Annotated[int | None, typer.Option(help="Attempts at each task: reports avg@k and pass@k.")] = None,
    seed: Annotated[int | None, typer.Option(help="The seed of the sampling.")] = None,
    shard: Annotated[
        str, typer.Option(help="Of n equal parts the i-th alone, i/n; `saccade eval merge` joins them.")
    ] = "",
    shuffle: Annotated[
        bool, typer.Option("--shuffle-options", help="Each attempt has the options in its own order.")
    ] = False,
    tools: Annotated[str | None, typer.Option(help="on, or off for the no-tool control.")] = None,
    hub: Annotated[str, typer.Option(help="Where --data hub:main fetches from: the hub, or a mirror.")] = HUB,
) -> None:
    """Evaluate a run's newest checkpoint, or a model by a recipe; results stay in the run's folder.

    --limit, --repeat, --shuffle-options and --tools stand for the settings of these names of `evaluation`, --seed for
    `seed`.
    """
    if bench and tasks is not None:
        raise ConfigError("--bench brings its own tasks: leave out --tasks, or --bench")
    given = {"evaluation.limit": limit, "evaluation.repeat": repeat, "seed": seed, "evaluation.tools": tools}
    given |= {"evaluation.shuffle_options": shuffle or None}
    words = [*(settings or ()), *_settings(given)]
    from saccade import exams
    from saccade.evaluation.portions import Portion
    from saccade.evaluation.shards import Shard

    part = Shard.read(shard) if shard else None
    folder, loaded, weights = _begun(run, words, home, model)
    if (asked := loaded.evaluation).repeat > 1 and not asked.temperature and not asked.shuffle_options:
        say(out, f"At temperature 0 the {asked.repeat} attempts at a task are alike; set evaluation.temperature=1")
    if bench:
        copies = Copies(data=data, subset=subset, extractor=extractor, hub=hub)
        run_benchmarks(folder, loaded, bench.split(","), copies=copies, called=name or "", model=weights, shard=part)
        return
    name = name if name is not None else "test"
    with progress(f"eval {name}") as advance:
        scored = exams.evaluate(
            folder,
            loaded,
            name=name,
            weights=weights,
            tasks=tasks,
            portion=Portion(shard=part),
            on_done=lambda tally: advance(tally.done, tally.remark, tally.total),
        )
    _show(folder, name, scored, part)


def _begun(place: Path, words: Sequence[str], home: Path, model: str | None) -> tuple[Path, Recipe, Path | None]:
    """The run to evaluate, with what recipe and weights (None: the run's newest, or a server's); of a model that was
    never trained here a run is begun, or gone on with.
    """
    from saccade import preflight, stages
    from saccade.chat.render import load_renderer
    from saccade.rollouts.stage import examined

    if place.is_dir():
        return place, *stages.aimed(load_recipe(str(Run.open(place).path / "recipe.yaml"), words), model)
    if place.suffix not in (".yaml", ".yml") and str(place) not in recipe_names():
        raise RunError(f"there is no run at {place}, nor a recipe of that name; {nearest(str(place), recipe_names())}")
    recipe = load_recipe(str(place), words)
    preflight.check(recipe, graded=False)
    # What a run is begun with are the recipe's own settings: those of this evaluation are told by its results.
    _, weights = stages.aimed(recipe, model)
    own = stages.with_paths(load_recipe(str(place)), folder=home, model=weights)
    if weights or not model:  # before there is a run, which a mistake would leave behind
        load_renderer(str(stages.model_of(home, own)))
    Run.create(home, own, resume=(home / "recipe.yaml").exists(), facts=preflight.jails(examined(own)))
    return home, *stages.aimed(load_recipe(str(home / "recipe.yaml"), words), model)


@evaluation.command("merge")
def merge(
    folder: RunFolder,
    others: Annotated[list[Path] | None, typer.Argument(help="Copies of the run, of other machines.")] = None,
    name: Annotated[str, typer.Option(help="What the evaluation is called: test by default.")] = "",
    bench: Annotated[str, typer.Option(help="Benchmarks whose shards are joined and reported.")] = "",
    extractor: Annotated[str, typer.Option(help="How a benchmark reads answers: official or tolerant.")] = "official",
) -> None:
    """Join the shards of an evaluation into the results that one machine would have written.

    With --bench the report on these benchmarks is written as well, and nothing is attempted; --name is then what was
    given beside it.
    """
    from saccade.evaluation.merge import merge as join
    from saccade.evaluation.run import read_results

    for place in (folder, *(others or ())):
        Run.open(place)
    if bench:
        merge_benchmarks(folder, bench.split(","), called=name, extractor=extractor, others=others or ())
        return
    name = name or "test"
    path = join(folder, name, others or ())
    say(out, f"wrote {path}")
    _show(folder, name, read_results(path), None)


@evaluation.command("compare")
def compare(
    first: Annotated[Path, typer.Argument(help="A results file, or a run.")],
    second: Annotated[Path, typer.Argument(help="Another, of the same tasks.")],
    name: Annotated[str, typer.Option(help="What the evaluation of a run is called.")] = "test",
    json_file: Annotated[Path | None, typer.Option("--json", help="A file for the numbers.")] = None,
) -> None:
    """Say how a second evaluation differs from a first one: paired interval, McNemar's test, tool gain and harm."""
    from saccade.evaluation.paired import compare_files, grids
    from saccade.evaluation.shards import shard_path

    files = []
    for place in (first, second):
        path = shard_path(place, name, None) if place.is_dir() else place
        if not path.is_file():
            raise DataError(f"there is no evaluation {path}; name a results file, or a run and --name")
        files.append(path)
    pair = compare_files(files[0], files[1], unit=unit_of_results(files[0]))
    show(grids(pair))
    if json_file is not None:
        write_text(json_file, json.dumps(pair.as_dict(), indent=1) + "\n")


def _show(folder: Path, name: str, scored: "list[Scored]", shard: "Shard | None") -> None:
    """An evaluation beside the others of its run, or a shard by itself; and what broke."""
    from saccade.evaluation import report
    from saccade.evaluation.metrics import failed
    from saccade.evaluation.run import read_ungraded
    from saccade.evaluation.shards import shard_path

    lost = [each.reason for each in read_ungraded(shard_path(folder, name, shard))]
    # A shard's tasks are others than those of the evaluations beside it.
    if shard is None:
        found, ungraded = report.read_evaluations(folder), report.count_ungraded(folder)
        # it shows what was asked for now, of which a file may hold more
        expansions = report.read_expansions(folder)
    else:
        found, ungraded, expansions = {name: scored}, {name: len(lost)}, {}
    pairs = [(other, name) for other in found if other != name]
    whole = report.compare(found, pairs=pairs, ungraded=ungraded, expansions=expansions)
    show(report.grids(report.Comparison(summaries={name: whole.summaries[name]}, changes=whole.changes)))
    broken = [str(each.episode.error) for each in scored if failed(each.episode)]
    for what, reasons in (("broke and count as wrong", broken), ("could not be graded", lost)):
        if reasons:
            count = f"{len(reasons)} of {len(scored) + len(lost)}"
            say(out, f"{count} attempts {what} ({reasons[0]}); the same command tries them again")


def _settings(given: Mapping[str, Any]) -> list[str]:
    """Options as settings of the recipe, as far as they were given."""
    return [f"{key}={value}" for key, value in given.items() if value is not None]
