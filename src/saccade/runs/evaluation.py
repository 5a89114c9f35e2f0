"""An exam: weights, tasks and what marks the answers; its episodes stay in the run's folder.

evaluate(folder, recipe)  tasks       -> folder/evaluations/<name>.jsonl
examine(folder, recipe)   a benchmark -> the same, and its scorecard beside
joined(folder, benchmark) its shards  -> the same
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from saccade.config import Recipe, parsed
from saccade.data.record import write_jsonl
from saccade.data.rows import read_tasks
from saccade.engines._distribution import NEUTRAL
from saccade.errors import ConfigError, DataError, RunError
from saccade.evaluation import run as evaluation_run
from saccade.evaluation.benchmarks._benchmark import Benchmark, Extractor, check_subtitles
from saccade.evaluation.benchmarks._episodes import results_of, scorer
from saccade.evaluation.benchmarks._judging import Referee
from saccade.evaluation.expansion import read_expansion
from saccade.evaluation.merge import merge
from saccade.evaluation.metrics import failed
from saccade.evaluation.portions import EVERYTHING, Portion
from saccade.evaluation.scorecard import CARD, LIMITED, Scorecard, conditions, cut, keep, read_card, scorecard
from saccade.evaluation.shards import Shard, of_shard, shard_path, shards_of
from saccade.evaluation.verdicts import VERDICTS, Verdict, decided, read_verdicts
from saccade.media import files
from saccade.model.digest import weights_digest
from saccade.protocols import Scorer
from saccade.rollouts.stage import examined, takes_text
from saccade.runlog import writing
from saccade.stages import PICTURES, attempting, finish, met, model_of, named, newest, weights_of
from saccade.types import Scored, Task

# Settings of an engine that change what is sampled.
FILTERS = (*NEUTRAL, "body", "factor")


def evaluate(
    folder: Path,
    recipe: Recipe,
    *,
    name: str,
    weights: Path | None = None,
    tasks: Path | Sequence[Task] | None = None,
    score: tuple[str, Scorer] | None = None,
    portion: Portion = EVERYTHING,
    at_once: int = 512,
    known: bool = False,
    on_done: Callable[[evaluation_run.Tally], None],
) -> list[Scored]:
    """Evaluate weights (a run's newest by default) on a `portion` of tasks (of the recipe's test split by default),
    `at_once` at a time.

    `score`, with what it is called, is asked in place of the recipe's rewards; a `known` recipe's server was asked
    before what model it has (`met`). The episodes are kept in
    `folder/evaluations/<name>.jsonl`, and an interrupted evaluation goes on from there.
    Raises DataError for a name that is no file's, and RunError where no attempt could be graded or every one broke.
    """
    if not name or Path(name).name != name:
        raise DataError(f"an evaluation can't be called {name!r}; give it a name without slashes")
    given = tasks or named(folder, recipe.data.test, "data.test")
    rows = read_tasks(given) if isinstance(given, Path) else given
    recipe = examined(recipe if known else met(recipe))
    chosen = weights_for(folder, recipe, weights)
    stage = attempting(recipe, chosen)
    stage.media.made = str(folder.resolve() / PICTURES)
    path = shard_path(folder, name, portion.shard)
    work = evaluation_run.evaluate(
        rows,
        agent=stage.agent,
        base=stage.context(seed=recipe.seed),
        score=score[1] if score else stage.score,
        settings=recipe.evaluation,
        path=path,
        root=folder,
        identity={**identity(recipe, chosen), **({"rewards": score[0]} if score else {})},
        portion=portion,
        at_once=at_once,
        on_done=on_done,
    )
    found = finish(stage, work)
    if not found:
        reason = evaluation_run.read_ungraded(path)[0].reason
        raise RunError(f"no attempt of the evaluation {name!r} could be graded ({reason}); mend that and try again")
    if all(failed(each.episode) for each in found):
        reason = next((each.episode.error for each in found if each.episode.error), "no reason given")
        raise RunError(f"every attempt of the evaluation {name!r} broke, the first with: {reason}")
    return found


def examine(
    folder: Path,
    recipe: Recipe,
    benchmark: Benchmark,
    *,
    data: Path,
    name: str = "",
    subset: bool = False,
    extractor: Extractor = "official",
    weights: Path | None = None,
    shard: Shard | None = None,
    on_done: Callable[[evaluation_run.Tally], None],
    on_judged: Callable[[evaluation_run.Tally], None] = lambda tally: None,
) -> Scorecard:
    """Evaluate weights on a benchmark's local copy in `data`; the scorecard is written beside the episodes.

    The evaluation is called as the benchmark, unless there is a `name`. The file's scores are the official rule's
    whatever the `extractor`, by which the card's answers are marked, so that both rules read one file.
    The card of a `shard` speaks of its tasks alone. What the rule leaves open goes to the judge of
    `evaluation.judge`, if there is one, whose verdicts are written there as well; `on_judged` is told how far that is.
    Raises DataError for a copy that is not whole, or lacks subtitles of what is asked, unless a `subset` is wanted; see
    `check_order` as well.
    """
    check_order(recipe, benchmark)
    recipe = met(recipe)
    tasks, portion = benchmark.tasks(data, subset=subset), portion_of(recipe, benchmark, shard)
    if not subset:
        check_subtitles(benchmark, tasks, portion.of(tasks), data)
    referee, name = Referee.of(benchmark, recipe.evaluation.judge), name or benchmark.name
    scored = evaluate(
        folder,
        recipe,
        name=name,
        weights=weights,
        tasks=tasks,
        score=(f"{benchmark.name} official", scorer(benchmark, "official")),
        portion=portion,
        known=True,
        on_done=on_done,
    )
    path, results = shard_path(folder, name, shard), results_of(benchmark, scored, extractor)
    said = referee.verdicts(results, told=on_judged)
    _keep_verdicts(path, said if referee.model else None)
    known, expansion = conditions(recipe, weights or newest(folder)), portion.expansion(tasks)
    if expansion is None:  # whatever the limit is, it left nothing out
        known.pop(LIMITED, None)
    if len(tasks) != benchmark.count:
        known["copy"] = f"{len(tasks)} of the {benchmark.count} questions published"
    card = scorecard(
        benchmark,
        scored,
        decided(results, said, benchmark.rule(extractor)),
        extractor=extractor,
        judge=referee.model,
        known={**known, **_judging(referee, said)},
        expansion=None if shard else expansion,  # a shard is not even over the rows of all
    )
    keep(path, card)
    return card


def _keep_verdicts(results: Path, said: Sequence[Verdict] | None) -> None:
    """Write what a judge said beside the results; where none judges, what an earlier one said goes.

    It would be another score than the card's. Judges' own caches keep it.
    """
    with writing(results):
        if said is None:
            results.with_suffix(VERDICTS).unlink(missing_ok=True)
        else:
            write_jsonl(results.with_suffix(VERDICTS), said)


def _judging(referee: Referee, said: Sequence[Verdict]) -> dict[str, str]:
    """Who marked, and why a judge said nothing where it didn't, as conditions of a score."""
    lost = [each.reason for each in said if each.value is None]
    why = {"no verdict": f"on {len(lost)} answers ({cut(lost[0])}); the same command asks again"} if lost else {}
    return {**({"marked by": referee.part} if referee.part else {}), **why}


def joined(
    folder: Path,
    benchmark: Benchmark,
    *,
    name: str = "",
    extractor: Extractor = "official",
    others: Sequence[Path] = (),
) -> Scorecard:
    """Join the shards of an evaluation on a benchmark (see `merge`), and write the scorecard of all of them.

    Nothing is attempted and nobody is asked: who judged what the rule leaves open, what was said, and how the
    questions were asked is taken from what lies beside the shards.
    """
    name = name or benchmark.name
    path = merge(folder, name, others)
    beside = [of_shard(part, CARD) for place in (folder, *others) for part in shards_of(place, name)]
    cards = [read_card(each) for each in beside if each.exists()]
    scored, said = evaluation_run.read_results(path), read_verdicts(path)
    results = decided(results_of(benchmark, scored, extractor), said, benchmark.rule(extractor))
    judges = ", ".join(dict.fromkeys(each.judge for each in cards if each.judge))
    known = cards[0].conditions if cards else {}  # settings of a command are written nowhere else
    card = scorecard(
        benchmark, scored, results, extractor=extractor, judge=judges, known=known, expansion=read_expansion(path)
    )
    keep(path, card)
    return card


def portion_of(recipe: Recipe, benchmark: Benchmark, shard: Shard | None) -> Portion:
    """The part of a benchmark that is asked: its strata evenly, and whole what its metric reads together."""
    limit = recipe.evaluation.limit
    return Portion(limit=limit, strata=tuple(benchmark.strata.values()), unit=benchmark.together, shard=shard)


def check_order(recipe: Recipe, benchmark: Benchmark) -> None:
    """Raises ConfigError where options are to be shuffled, and the benchmark's score depends on their order."""
    if recipe.evaluation.shuffle_options and benchmark.ordered:
        why = f"the options of {benchmark.name} can't be shuffled: {benchmark.ordered}"
        raise ConfigError(f"{why}; leave out --shuffle-options (evaluation.shuffle_options)")


def weights_for(folder: Path, recipe: Recipe, weights: Path | None) -> Path | None:
    """The weights that are evaluated, a run's newest by default; None where the engine's server has its own.

    Raises ConfigError for weights that such a server was never told of, RunError where there are none.
    """
    if not takes_text(recipe):
        return weights_of(weights) if weights else newest(folder) or model_of(folder, recipe)
    if weights:
        raise ConfigError(f"the engine {recipe.engine.name} asks a server, not {weights}; leave out --model")
    return None


def identity(recipe: Recipe, weights: Path | None) -> dict[str, Any]:
    """What an evaluation's results depend on besides its own settings; where the files lie is no part of it."""
    # Batch sizes and addresses of an engine change no result; which engine it is may, in the last digits. What it
    # leaves out of the distribution does, and is named only where there is something: older results go on.
    filters = {name: recipe.engine.settings[name] for name in FILTERS if name in recipe.engine.settings}
    return {
        # A server may have any weights: of two with one name, only the address tells which.
        "weights": weights_digest(weights) if weights else [recipe.engine.settings[name] for name in ("url", "model")],
        "precision": (recipe.model.dtype, recipe.model.device.partition(":")[0]),
        "engine": _contents([recipe.engine.name, filters] if filters else recipe.engine.name),
        "agent": _contents(recipe.agent.model_dump(mode="json")),
        "rewards": _contents(recipe.model_dump(mode="json")["rewards"]),
    }


def _contents(value: Any) -> Any:
    """The value with the path of every plugin file, as `./mine.py`, replaced by a digest of what it holds; of a file of
    YAML, as a prompt protocol, with the plugin files that it names, whose paths start at its folder.
    """
    if isinstance(value, Mapping):
        return {_contents(key): _contents(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_contents(each) for each in value]
    if isinstance(value, str) and value.endswith((".py", ".yaml", ".yml")):
        held = f"{Path(value).name} {files.digest(value)}"
        inside = [] if value.endswith(".py") else _plugins(Path(value))
        return [held, *map(_contents, inside)] if inside else held
    return value


def _plugins(path: Path) -> list[str]:
    """The plugin files that a file of YAML names."""
    found = parsed(path.read_text(encoding="utf-8"), str(path))
    values = found.values() if isinstance(found, Mapping) else ()
    return [str(path.parent / each) for each in values if isinstance(each, str) and each.endswith(".py")]
