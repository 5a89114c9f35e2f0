"""Evaluate weights on tasks or on a benchmark; the episodes are written to the run's folder.

evaluate(folder, recipe)                     tasks       -> folder/evaluations/<name>.jsonl
evaluate_benchmark(folder, recipe, ...)      a benchmark -> the same, and its result beside it
merge_benchmark_shards(folder, benchmark)    its shards  -> the same
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from saccade.config.load import override_recipe, parse_yaml, resolve_model_path
from saccade.config.schema import MAX_EPISODES_IN_PROGRESS, Recipe
from saccade.data.dataset import load_recipe_data
from saccade.engines.sampling_filters import NEUTRAL_VALUES
from saccade.errors import ConfigError, DataError, RunError
from saccade.evaluation import runner as evaluation_runner
from saccade.evaluation.benchmark_result import (
    LIMITED_SAMPLE,
    RESULT_SUFFIX,
    BenchmarkResult,
    build_benchmark_result,
    describe_conditions,
    read_benchmark_result,
    truncate_text,
    write_benchmark_result,
)
from saccade.evaluation.benchmarks.base import Benchmark, Scoring, build_score_fn, check_subtitles, grade_episodes
from saccade.evaluation.benchmarks.llm_judge import LlmJudge
from saccade.evaluation.judge_results import VERDICTS_SUFFIX, JudgeVerdict, apply_verdicts_to_answers, read_verdicts
from saccade.evaluation.records import read_scored_episodes, read_ungraded_episodes
from saccade.evaluation.shards import get_results_path, get_shard_file, list_shard_manifests, merge_shards
from saccade.evaluation.subset import FULL_SET, Shard, Subset, read_stratified_weights
from saccade.media import hashing
from saccade.metrics.episode_metrics import has_failed
from saccade.models.checkpoint_files import compute_checkpoint_digest, verify_model_files
from saccade.protocols import ScoreFn
from saccade.rollouts.components import apply_evaluation_settings, uses_chat_engine
from saccade.rollouts.executors import connect_executor
from saccade.runs.pipeline import (
    IMAGES_FOLDER,
    connect_server,
    find_newest_weights,
    load_components,
    resolve_checkpoint,
    run_and_close,
)
from saccade.runs.run_folder import Run
from saccade.runs.run_lock import RunLock
from saccade.types import SamplingParams, ScoredEpisode, Task
from saccade.utils.files import convert_file_errors, read_text, resolve_path
from saccade.utils.jsonl import write_jsonl

# Engine settings that change what is sampled.
SAMPLING_SETTINGS = (*NEUTRAL_VALUES, "extra_body", "image_token_size")


def evaluate(
    folder: Path,
    recipe: Recipe,
    *,
    name: str,
    weights: Path | None = None,
    tasks: Path | Sequence[Task] | None = None,
    named_score_fn: tuple[str, ScoreFn] | None = None,
    benchmark: str = "",
    subset: Subset = FULL_SET,
    max_concurrency: int = MAX_EPISODES_IN_PROGRESS,
    is_connected: bool = False,
    prepare: Callable[[], None] = lambda: None,
    on_progress: Callable[[evaluation_runner.EvaluationProgress], None],
) -> list[ScoredEpisode]:
    """Evaluate weights (a run's newest by default) on a `subset` of tasks (of the recipe's test split by default).

    `named_score_fn`, a name and a function, replaces the recipe's rewards; the results record the name of the
    `benchmark`; `is_connected`: whether `connect_server` has already returned this recipe. `prepare` is called before
    the model is loaded, unless an earlier call finished the evaluation. At most `max_concurrency` episodes run at a
    time. The episodes are written to `folder/evaluations/<name>.jsonl`, from which an interrupted
    evaluation resumes. Raises DataError for a name that can't be a file's and for no tasks, and RunError if no episode
    could be graded or every episode failed.
    """
    path = get_results_path(folder, name, subset.shard)
    if tasks is None or isinstance(tasks, Path):
        file = recipe.data.test if tasks is None else str(tasks.absolute())
        tasks = load_recipe_data(folder, recipe, "data.test", file, Task)
    if not tasks:
        raise DataError(f"the evaluation {name!r} has no tasks; give at least one", key="tasks", value=tasks)
    recipe = apply_evaluation_settings(recipe if is_connected else connect_server(recipe))
    checkpoint = resolve_weights(folder, recipe, weights)
    Run(path=folder, recipe=recipe).check_plugin_files()
    with _lock_results(folder, name, subset.shard) as lock:
        lock.acquire()
        evaluation: dict[str, Any] = {
            "settings": recipe.evaluation,
            "results_path": path,
            "identity": {
                **compute_identity(recipe, checkpoint),
                **({"rewards": named_score_fn[0]} if named_score_fn else {}),
            },
            "subset": subset,
        }
        # No model is loaded to read what an earlier call has finished.
        sampling = SamplingParams(
            temperature=recipe.evaluation.temperature, max_tokens=recipe.sampling.max_tokens, seed=recipe.seed
        )
        scored = evaluation_runner.find_finished(tasks, sampling=sampling, **evaluation)
        if scored is None:
            prepare()
            components = load_components(recipe, checkpoint)
            components.media.generated_dir = str(folder.resolve() / IMAGES_FOLDER)
            components = connect_executor(components, folder, has_rewards=named_score_fn is None)
            work = evaluation_runner.evaluate(
                tasks,
                environments=components.environments,
                context=components.build_context(seed=recipe.seed),
                score_fn=named_score_fn[1] if named_score_fn else components.score_fn,
                root=folder,
                benchmark=benchmark,
                checkpoint=name_checkpoint(folder, checkpoint),
                max_concurrency=max_concurrency,
                on_progress=on_progress,
                executor=components.executor,
                **evaluation,
            )
            scored = run_and_close(components, work)
    if not scored:
        reason = read_ungraded_episodes(path)[0].reason
        raise RunError(
            f"no episode of the evaluation {name!r} could be graded ({reason}); fix that and run the command again",
            key=str(path),
        )
    if all(has_failed(item.episode) for item in scored):
        reason = next((item.episode.error for item in scored if item.episode.error), "no reason given")
        raise RunError(f"every episode of the evaluation {name!r} failed, the first with: {reason}", key=str(path))
    return scored


def evaluate_benchmark(
    folder: Path,
    recipe: Recipe,
    benchmark: Benchmark,
    *,
    data: Path,
    name: str = "",
    allow_incomplete: bool = False,
    scoring: Scoring = "strict",
    weights: Path | None = None,
    shard: Shard | None = None,
    on_progress: Callable[[evaluation_runner.EvaluationProgress], None],
    on_judge_progress: Callable[[evaluation_runner.EvaluationProgress], None] = lambda progress: None,
) -> BenchmarkResult:
    """Evaluate weights on a benchmark's local copy in `data`; write the result beside the episodes.

    The evaluation's `name` defaults to the benchmark's. The results file holds the strict rule's scores for either
    `scoring` of the result, so that both rules use one file. The result of a `shard` covers that shard's tasks
    alone. Answers that the rule leaves open go to the judge of `evaluation.judge`, if any, whose verdicts are written
    beside the episodes; `on_judge_progress` receives the judge's progress. Unless `allow_incomplete`, raises DataError
    for an incomplete copy or missing subtitles. Raises ConfigError as `check_option_shuffle` does.
    """
    check_option_shuffle(recipe, benchmark)
    recipe = connect_server(recipe)
    name = name or benchmark.name
    tasks = benchmark.load_tasks(data, allow_incomplete=allow_incomplete)
    subset = build_subset(recipe, benchmark, shard)
    if not allow_incomplete:
        check_subtitles(benchmark, tasks, subset.select(tasks), data)
    judge = LlmJudge.from_settings(benchmark, recipe.evaluation.judge)
    with _lock_results(folder, name, shard) as lock:  # until the judge has ended
        scored = evaluate(
            folder,
            recipe,
            name=name,
            weights=weights,
            tasks=tasks,
            named_score_fn=(f"{benchmark.name} strict", build_score_fn(benchmark, "strict")),
            benchmark=benchmark.name,
            subset=subset,
            is_connected=True,
            on_progress=on_progress,
        )
        lock.acquire()
        path, results = get_results_path(folder, name, shard), grade_episodes(benchmark, scored, scoring)
        earlier: list[JudgeVerdict] = []
        with contextlib.suppress(DataError):  # a damaged file is written anew
            earlier = read_verdicts(path)
        verdicts = judge.collect_verdicts(results, earlier=earlier, on_progress=on_judge_progress)
        with convert_file_errors(path):
            if judge.model:
                write_jsonl(path.with_suffix(VERDICTS_SUFFIX), verdicts)
            else:  # an earlier judge's would give another score than the result's; its cache still holds them
                path.with_suffix(VERDICTS_SUFFIX).unlink(missing_ok=True)
        conditions = describe_conditions(recipe, weights or find_newest_weights(folder))
        if judge.description:
            conditions["graded by"] = judge.description
        if reasons := [verdict.reason for verdict in verdicts if verdict.value is None]:
            reason = truncate_text(reasons[0])
            conditions["no verdict"] = f"on {len(reasons)} answers ({reason}); the same command queries the judge again"
        stratified_weights = subset.compute_weights(tasks)
        if stratified_weights is None:  # the limit left no task out
            conditions.pop(LIMITED_SAMPLE, None)
        if len(tasks) != benchmark.num_tasks:
            conditions["copy"] = f"{len(tasks)} of the {benchmark.num_tasks} questions published"
        result = build_benchmark_result(
            benchmark,
            scored,
            apply_verdicts_to_answers(results, verdicts, benchmark.get_grade_fn(scoring)),
            scoring=scoring,
            judge=judge.model,
            conditions=conditions,
            # A shard isn't a stratified sample of the full set.
            stratified_weights=None if shard else stratified_weights,
        )
        write_benchmark_result(path, result)
    return result


def _lock_results(folder: Path, name: str, shard: Shard | None) -> RunLock:
    """Return the lock of the files of an evaluation, or of a shard of it."""
    stem = get_results_path(folder, name, shard).stem
    return RunLock(folder, f"eval-{stem if shard is None else f'{name}-{stem}'}")


def merge_benchmark_shards(
    folder: Path,
    benchmark: Benchmark,
    *,
    name: str = "",
    scoring: Scoring = "strict",
    other_folders: Sequence[Path] = (),
) -> BenchmarkResult:
    """Merge the shards of an evaluation on a benchmark (see `merge_shards`), and write the full result.

    No episode is run and no judge is queried: judge, verdicts and conditions come from the files beside the shards.
    """
    name = name or benchmark.name
    path = merge_shards(folder, name, other_folders)
    result_paths = [
        get_shard_file(manifest, RESULT_SUFFIX)
        for shard_folder in (folder, *other_folders)
        for manifest in list_shard_manifests(shard_folder, name)
    ]
    shard_results = [read_benchmark_result(file) for file in result_paths if file.exists()]
    scored, verdicts = read_scored_episodes(path), read_verdicts(path)
    results = apply_verdicts_to_answers(
        grade_episodes(benchmark, scored, scoring), verdicts, benchmark.get_grade_fn(scoring)
    )
    judges = ", ".join(dict.fromkeys(shard_result.judge for shard_result in shard_results if shard_result.judge))
    conditions = shard_results[0].conditions if shard_results else {}  # the command's settings are stored nowhere else
    result = build_benchmark_result(
        benchmark,
        scored,
        results,
        scoring=scoring,
        judge=judges,
        conditions=conditions,
        stratified_weights=read_stratified_weights(path),
    )
    write_benchmark_result(path, result)
    return result


def apply_benchmark_settings(
    recipe: Recipe, benchmark: Benchmark, name: str = "", command_line: Sequence[str] = ()
) -> Recipe:
    """Return the recipe with what `evaluation.benchmarks` sets for a benchmark, by its name or its plugin's `name`.

    Overrides of the `command_line` in the same sections apply after them. Raises ConfigError for a bad override.
    """
    by_name = recipe.evaluation.benchmarks
    key = benchmark.name if benchmark.name in by_name else name
    if key not in by_name:
        return recipe
    sections = {override.partition(".")[0] for override in by_name[key]}
    later = [override for override in command_line if override.partition(".")[0].partition("=")[0] in sections]
    return override_recipe(recipe, [*by_name[key], *later], f"evaluation.benchmarks.{key}")


def build_subset(recipe: Recipe, benchmark: Benchmark, shard: Shard | None) -> Subset:
    """Return the subset of a benchmark to evaluate: even over its strata, without splitting tasks scored jointly."""
    limit = recipe.evaluation.num_tasks
    return Subset(limit=limit, strata=tuple(benchmark.strata.values()), joint_key=benchmark.joint_key, shard=shard)


def check_option_shuffle(recipe: Recipe, benchmark: Benchmark) -> None:
    """Raise ConfigError if options are to be shuffled and the benchmark's score depends on their order."""
    if recipe.evaluation.shuffle_options and benchmark.fixed_order_reason:
        raise ConfigError(
            f"the options of {benchmark.name} can't be shuffled: {benchmark.fixed_order_reason}; leave out "
            "--shuffle-options (evaluation.shuffle_options)",
            key="evaluation.shuffle_options",
            value=True,
        )


def resolve_weights(folder: Path, recipe: Recipe, weights: Path | None) -> Path | None:
    """Return the weights (a run's newest by default), None for a chat API.

    Raises ConfigError, RunError, and ModelError for a checkpoint whose files have changed.
    """
    if not uses_chat_engine(recipe):
        newest = None if weights else find_newest_weights(folder)
        checkpoint = resolve_checkpoint(weights) if weights else newest or resolve_model_path(folder, recipe)
        verify_model_files(checkpoint)
        return checkpoint
    if weights:
        message = f"the engine {recipe.engine.name} queries its server, which can't load {weights}; leave out --model"
        raise ConfigError(message, key="engine.name", value=recipe.engine.name)
    return None


def name_checkpoint(folder: Path, checkpoint: Path | None) -> str:
    """Return the path of weights in a run's folder, such as "rl/step-000020"; "" for weights outside of it."""
    if checkpoint is None or not resolve_path(checkpoint).is_relative_to(resolve_path(folder)):
        return ""
    return resolve_path(checkpoint).relative_to(resolve_path(folder)).as_posix()


def compute_identity(recipe: Recipe, weights: Path | None) -> dict[str, Any]:
    """Return what an evaluation's results depend on besides its own settings; paths of files are no part of it."""
    # Batch sizes and URLs of an engine change no result; the choice of engine may, in the last digits. Sampling filters
    # do, and are included only where they are set, as named environments and pairs of frames are.
    filters = {name: recipe.engine.settings[name] for name in SAMPLING_SETTINGS if name in recipe.engine.settings}
    values = recipe.model_dump(mode="json", include={"environment", "environments", "rewards"})
    if not values["environments"]:
        del values["environments"]
    if recipe.media.frame_pairs:
        values["frame_pairs"] = True
    # Two servers may serve different weights under one name: only the URL distinguishes them.
    server = [recipe.engine.settings.get(name) for name in ("url", "model")]
    return {
        "weights": compute_checkpoint_digest(weights) if weights else server,
        "precision": (recipe.model.dtype, recipe.model.device.partition(":")[0]),
        "engine": _digest_plugin_files([recipe.engine.name, filters] if filters else recipe.engine.name),
        **{name: _digest_plugin_files(value) for name, value in values.items()},
    }


def _digest_plugin_files(value: Any) -> Any:
    """Return the value with the path of every plugin file, such as `./mine.py`, replaced by a digest of its content.

    A YAML file, such as a prompt format, is digested together with the plugin files it names, relative to its folder.
    """
    if isinstance(value, Mapping):
        return {_digest_plugin_files(key): _digest_plugin_files(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_digest_plugin_files(item) for item in value]
    if isinstance(value, str) and ".py:" in value:  # an object of a plugin file
        path, _, object_name = value.partition(".py:")
        return f"{_digest_plugin_files(path + '.py')}:{object_name}"
    if isinstance(value, str) and value.endswith((".py", ".yaml", ".yml")):
        if not Path(value).is_file():
            raise ConfigError(f"there is no plugin file {value}", key=value)
        digest = f"{Path(value).name} {hashing.compute_file_digest(value)}"
        if value.endswith(".py"):
            return digest
        content = parse_yaml(read_text(Path(value)), value)
        values = content.values() if isinstance(content, Mapping) else ()
        files = [Path(value).parent / name for name in values if isinstance(name, str) and name.endswith(".py")]
        return [digest, *(_digest_plugin_files(str(file)) for file in files)] if files else digest
    return value
