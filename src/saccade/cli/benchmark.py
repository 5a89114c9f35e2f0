"""`saccade eval RUN --benchmarks videomme,mlvu --benchmark-data FOLDER`: evaluate published benchmarks in turn."""

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from saccade import plugins
from saccade.cli.terminal import out, print_tables
from saccade.config.schema import Recipe
from saccade.data.archives import explain_manual_unpacking, extract_missing, find_archives, list_archive_files, unpack
from saccade.data.hub import (
    DEFAULT_ENDPOINT,
    DEFAULT_REVISION,
    HUB_PREFIX,
    HubClient,
    check_installed,
    compute_relative_paths,
)
from saccade.errors import ConfigError, DataError, convert_errors
from saccade.reporting.console import UpdateProgress, print_text, show_progress_lines
from saccade.utils.text import pluralize

if TYPE_CHECKING:
    from saccade.checks.machine import CheckResult
    from saccade.evaluation.runner import EvaluationProgress
    from saccade.types import Task

# Names for settings of a plugin that implements several benchmarks.
BENCHMARK_ALIASES: dict[str, tuple[str, dict[str, Any]]] = {
    "videomme_subtitles": ("videomme", {"subtitles": True}),
    "longvideobench_subtitles": ("longvideobench", {"subtitles": True}),
    "hrbench_4k": ("hrbench", {"size": "4k"}),
    "hrbench_8k": ("hrbench", {"size": "8k"}),
    "mathvision_mini": ("mathvision", {"mini": True}),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkData:
    """Where the benchmarks' copies are, and how their answers are scored."""

    source: Path  # a folder with a copy of each by name; or hub:REVISION, from which missing files are downloaded
    allow_incomplete: bool
    scoring: str
    hub_endpoint: str = DEFAULT_ENDPOINT


def run_benchmarks(
    folder: Path,
    recipe: Recipe,
    names: Sequence[str],
    benchmark_data: BenchmarkData,
    *,
    suffix: str,
    model: Path | None,
    shard: Any,
    settings: Sequence[str] = (),
) -> None:
    """Evaluate a run on each benchmark, and print and write the reports.

    The evaluation is named after the benchmark and the suffix, such as "videomme_no_tools". A benchmark's settings of
    the recipe (`evaluation.benchmarks`) apply before the command line's `settings`. Before any evaluation,
    raises ConfigError for an unknown benchmark or scoring and for options that can't be shuffled, and DataError for a
    suffix or a benchmark's name that can't be part of a file's name.
    """
    from saccade.evaluation.shards import check_name
    from saccade.reporting.benchmark_report import build_evaluation_tables, write_benchmark_report
    from saccade.runs import evaluation

    scoring, benchmarks = _parse_scoring(benchmark_data.scoring), _resolve_benchmarks(names)
    check_benchmark_names(recipe)
    recipes = [evaluation.apply_benchmark_settings(recipe, benchmark, name, settings) for name, benchmark in benchmarks]
    for (_, benchmark), own in zip(benchmarks, recipes, strict=True):
        evaluation.check_option_shuffle(own, benchmark)
        check_name(format_evaluation_name(benchmark.name, suffix))
    # Prepared first, so that a missing split is reported before hours of another evaluation.
    folders = [
        _prepare_data(benchmark_data, benchmark, name, evaluation.build_subset(own, benchmark, shard))
        for (name, benchmark), own in zip(benchmarks, recipes, strict=True)
    ]
    for (_, benchmark), own, data_folder in zip(benchmarks, recipes, folders, strict=True):
        name = format_evaluation_name(benchmark.name, suffix)
        with show_progress_lines(out) as add_task:
            report = evaluation.evaluate_benchmark(
                folder,
                own,
                benchmark,
                data=data_folder,
                name=name,
                allow_incomplete=benchmark_data.allow_incomplete,
                scoring=scoring,
                weights=model,
                shard=shard,
                on_progress=_build_progress_callback(add_task, f"eval {name}"),
                on_judge_progress=_build_progress_callback(add_task, f"judge {name}"),
            )
        print_tables(build_evaluation_tables(name, report, {}))
        # After each benchmark, so that a kill loses no report; reports of shards are written by the merge.
        page = None if shard else write_benchmark_report(folder)
    if page is not None:
        print_text(out, f"Report: {page}")


def check_benchmarks(recipe: Recipe, names: Sequence[str], benchmark_data: BenchmarkData) -> "Iterator[CheckResult]":
    """Check that each benchmark can be evaluated: its copy, its media, its rule and its judge."""
    from saccade.checks.run_checks import Check, run_check

    for name in names:
        run = functools.partial(_check_benchmark, recipe, name, benchmark_data)
        yield from run_check(Check(f"benchmark {name}", run))


def _check_benchmark(recipe: Recipe, name: str, benchmark_data: BenchmarkData) -> str:
    from saccade.checks.run_checks import open_sample
    from saccade.evaluation.benchmarks.base import check_subtitles, find_missing_media
    from saccade.evaluation.benchmarks.llm_judge import LlmJudge
    from saccade.runs import evaluation

    ((_, benchmark),) = _resolve_benchmarks([name])
    check_benchmark_names(recipe)
    recipe = evaluation.apply_benchmark_settings(recipe, benchmark, name)
    evaluation.check_option_shuffle(recipe, benchmark)
    LlmJudge.from_settings(benchmark, recipe.evaluation.judge)
    if str(benchmark_data.source).startswith(HUB_PREFIX):
        check_installed()
        return f"{benchmark.repo_id} is downloaded from the hub when it is evaluated"
    folder = _resolve_local_folder(benchmark_data, benchmark, name)
    everything = benchmark.load_tasks(folder, allow_incomplete=benchmark_data.allow_incomplete)
    tasks = evaluation.build_subset(recipe, benchmark, None).select(everything)
    missing = [path for paths in find_missing_media(tasks).values() for path in paths]
    archives = list_archive_files(folder)
    if missing and archives:
        source = pluralize(len(archives), "archive")
        return f"{folder}: {len(tasks):,} questions; missing files will be unpacked from {source}"
    if not benchmark_data.allow_incomplete and not archives:
        check_subtitles(benchmark, everything, tasks, folder)
    if missing:
        raise DataError(
            f"{folder}: {benchmark.name} lacks {pluralize(len(missing), 'file')}, first {missing[0]}; put them or the "
            "dataset's archives there",
            key=str(missing[0]),
        )
    _, num_opened = open_sample(tasks)
    return f"{folder}: {len(tasks):,} questions, their files exist, {num_opened} of them were opened"


def merge_benchmarks(
    folder: Path, names: Sequence[str], *, suffix: str, scoring: str, other_folders: Sequence[Path]
) -> None:
    """Merge the shards of a run's evaluations on benchmarks, and print and write the reports."""
    from saccade.reporting.benchmark_report import build_evaluation_tables, write_benchmark_report
    from saccade.runs import evaluation

    checked_scoring, benchmarks = _parse_scoring(scoring), _resolve_benchmarks(names)
    for _, benchmark in benchmarks:
        name = format_evaluation_name(benchmark.name, suffix)
        benchmark_result = evaluation.merge_benchmark_shards(
            folder, benchmark, name=name, scoring=checked_scoring, other_folders=other_folders
        )
        print_tables(build_evaluation_tables(name, benchmark_result, {}))
    print_text(out, f"Report: {write_benchmark_report(folder)}")


def _parse_scoring(scoring: str) -> Any:
    from saccade.evaluation.benchmarks.base import Scoring

    if scoring not in get_args(Scoring):
        raise ConfigError(f"--scoring must be strict or lenient, not {scoring!r}", key="--scoring", value=scoring)
    return scoring


def check_benchmark_names(recipe: Recipe) -> None:
    """Raise ConfigError if `evaluation.benchmarks` names no benchmark."""
    for name in recipe.evaluation.benchmarks:
        _require_benchmark(name, f"evaluation.benchmarks.{name}")


def _require_benchmark(name: str, key: str) -> None:
    known = sorted({*plugins.list_plugins("evaluation.benchmarks"), *BENCHMARK_ALIASES})
    if name not in known and not plugins.get_file(name):
        raise ConfigError(f"there is no benchmark {name!r}; {plugins.suggest(name, known)}", key=key, value=name)


def _resolve_benchmarks(names: Sequence[str]) -> list[tuple[str, Any]]:
    """Return the benchmarks of these names, each with the name of its plugin."""
    names = [name.strip() for name in names]
    for name in names:
        _require_benchmark(name, "--benchmarks")
    resolved = [BENCHMARK_ALIASES.get(name, (name, {})) for name in names]
    return [(name, plugins.resolve("evaluation.benchmarks", name, settings)()) for name, settings in resolved]


def resolve_cluster_key(name: str) -> Callable[["Task"], str]:
    """Return the function that clusters the tasks of a packaged benchmark; else by media files."""
    from saccade.metrics.statistics import get_media_key

    if name not in {*plugins.list_plugins("evaluation.benchmarks"), *BENCHMARK_ALIASES}:
        return get_media_key
    own: Callable[[Task], str] = _resolve_benchmarks([name])[0][1].cluster_key

    def get_cluster_key(task: "Task") -> str:
        with convert_errors(
            DataError,
            f"the task {task.id} is not one of the benchmark {name}; run the evaluation again under another name",
            key="benchmark",
            value=name,
        ):
            return own(task)

    return get_cluster_key


def format_evaluation_name(benchmark: str, suffix: str) -> str:
    """Return the name of an evaluation on a benchmark.

    >>> format_evaluation_name("videomme", ""), format_evaluation_name("videomme", "no_tools")
    ('videomme', 'videomme_no_tools')
    """
    return f"{benchmark}_{suffix}" if suffix else benchmark


def _build_progress_callback(
    add_task: Callable[..., UpdateProgress], label: str
) -> "Callable[[EvaluationProgress], None]":
    """Return a progress callback whose line is added at the first update."""
    get_task = functools.cache(functools.partial(add_task, label))
    return lambda progress: get_task()(progress.done, progress.accuracy_text, progress.total)


def _prepare_data(benchmark_data: BenchmarkData, benchmark: Any, name: str, subset: Any) -> Path:
    """Return the folder of a benchmark's copy, after unpacking or downloading the media of the subset's tasks.

    Each file still missing becomes an error of its question. Raises DataError for a copy without tables, or media that
    only other programs can unpack.
    """
    from saccade.evaluation.benchmarks.base import find_missing_media

    data, client = str(benchmark_data.source), HubClient(endpoint=benchmark_data.hub_endpoint)
    is_remote = data.startswith(HUB_PREFIX)
    with show_progress_lines(out) as add_task:
        get_task = functools.cache(functools.partial(add_task, f"unpack {benchmark.name}"))

        def on_progress(done: int, archive: str) -> None:
            get_task()(done, f"files of {archive}")

        if is_remote:
            revision = data.removeprefix(HUB_PREFIX) or DEFAULT_REVISION
            folder = client.download(benchmark.repo_id, benchmark.file_patterns, revision=revision)
            client.unpack_archives(folder, benchmark.archives, on_progress=on_progress)
        else:
            folder = _resolve_local_folder(benchmark_data, benchmark, name)
            if not list_archive_files(folder) and not list_archive_files(folder, supported=False):
                return folder
            for archive in find_archives(set(list_archive_files(folder)).intersection(benchmark.archives)):
                unpack(folder, archive, folder, on_progress=on_progress)
        tasks = benchmark.load_tasks(folder, allow_incomplete=benchmark_data.allow_incomplete)
        missing = [path for paths in find_missing_media(subset.select(tasks)).values() for path in paths]
        referenced = {media.path for task in tasks for media in task.media}
        if missing and is_remote:
            client.download_missing(folder, missing, referenced=referenced, on_progress=on_progress)
        elif missing:
            extract_missing(
                folder,
                compute_relative_paths(folder, missing),
                referenced=compute_relative_paths(folder, referenced),
                archives=find_archives(list_archive_files(folder)),
                on_progress=on_progress,
            )
    missing = [path for path in missing if not os.path.isfile(path)]
    archives = (str(folder / archive) for archive in list_archive_files(folder, supported=False))
    explanation = explain_manual_unpacking(archives) if missing and not benchmark_data.allow_incomplete else ""
    if explanation:
        raise DataError(
            f"{benchmark.name} lacks {pluralize(len(missing), 'file')}, first {missing[0]}, and {explanation}",
            key=str(missing[0]),
        )
    return folder


def _resolve_local_folder(benchmark_data: BenchmarkData, benchmark: Any, name: str) -> Path:
    """Return the folder of a benchmark's local copy. Raises DataError if its tables are missing."""
    from saccade.evaluation.benchmarks.local_dataset import find_row_files

    folder = benchmark_data.source / (benchmark.name if (benchmark_data.source / benchmark.name).exists() else name)
    find_row_files(folder, benchmark.file_patterns)
    return folder
