"""Summarize a run from its small files: stages, state, newest metrics, best validation.

No checkpoint, episode or evaluation is read, so a folder of hundreds of runs is listed in seconds.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from saccade.config.load import check_run_recipe, read_yaml
from saccade.errors import ConfigError, DataError, SaccadeError
from saccade.evaluation.judge_results import list_results_files
from saccade.metrics.metric_log import read_metric_rows
from saccade.utils.files import resolve_path
from saccade.utils.jsonl import read_json

RECIPE_FILE = "recipe.yaml"
MAX_DEPTH = 3  # of runs below a folder
STAGES = ("sft", "rl")
HEADLINES = ("loss", "reward", "accuracy", "calls", "format_compliance")  # metrics of a list of runs


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """What a list of runs shows; `state` is running, finished, stopped or new."""

    path: Path
    state: str
    progress: Mapping[str, tuple[int, int]]  # by stage: steps done and planned
    newest: Mapping[str, float]  # means of the newest stage's HEADLINES over its last tenth of steps
    best: tuple[str, float, int] | None  # of the validations: mode, accuracy, step
    evaluations: tuple[str, ...]  # names
    seed: int | None
    modified: float  # when the run last wrote metrics, in seconds since 1970
    problem: str = ""  # why a file of the run can't be read


def find_runs(paths: Sequence[Path]) -> Iterator[tuple[Path, str]]:
    """Yield each run at or below the paths, and its name: the path from the given one."""
    for given in paths:
        if (given / RECIPE_FILE).is_file():
            yield given, resolve_path(given).name
            continue
        level = [given]
        for _ in range(MAX_DEPTH):
            level = sorted(child for folder in level for child in _list_folders(folder))
            runs = [child for child in level if (child / RECIPE_FILE).is_file()]
            yield from ((run, run.relative_to(given).as_posix()) for run in runs)
            level = [child for child in level if child not in runs]


def _list_folders(folder: Path) -> list[Path]:
    try:
        return [child for child in folder.iterdir() if child.is_dir() and not child.name.startswith(".")]
    except OSError:
        return []


def summarize_run(folder: Path, is_running: Callable[[Path], bool]) -> RunSummary:
    """Summarize a run; a damaged file is named as its `problem`."""
    problem, rows, recipe = "", list[dict[str, Any]](), dict[str, Any]()
    try:
        recipe = read_run_recipe(folder)
        check_run_recipe(folder / RECIPE_FILE, recipe)
        rows = read_metric_rows(folder / "metrics.jsonl")
    except SaccadeError as error:
        problem = str(error)
    by_stage = {stage: [row for row in rows if row["stage"] == stage] for stage in STAGES}
    progress = {stage: (own[-1]["step"], _get_number(recipe, stage, "steps")) for stage, own in by_stage.items() if own}
    last = next((by_stage[stage] for stage in reversed(STAGES) if by_stage[stage]), [])
    evaluations = [path.stem for path in list_results_files(folder)]
    unfinished = [stage for stage in progress if not (folder / "finished_stages" / f"{stage}.json").is_file()]
    if is_running(folder):
        state = "running"
    elif unfinished:
        state = "stopped"
    else:
        state = "finished" if progress or evaluations else "new"
    metrics = folder / "metrics.jsonl"
    newest = metrics if metrics.exists() else folder / RECIPE_FILE
    return RunSummary(
        path=folder,
        state=state,
        progress=progress,
        newest=compute_final_means(last, HEADLINES),
        best=_find_best_validation(rows),
        evaluations=tuple(evaluations),
        seed=_read_seed(folder),
        modified=newest.stat().st_mtime if newest.exists() else 0.0,
        problem=problem,
    )


def read_run_recipe(folder: Path) -> dict[str, Any]:
    """Return the plain values of a run's recipe. Raises ConfigError for one that can't be read."""
    path = folder / RECIPE_FILE
    recipe = read_yaml(path, "recipe") or {}
    if not isinstance(recipe, dict):
        raise ConfigError(f"the recipe {path} must be a mapping of keys", key=str(path))
    return recipe


def describe_summary(summary: RunSummary) -> tuple[str, str, str, str]:
    """Return the texts of a list of runs: steps, newest metrics, best validation, number of evaluations."""
    steps = [
        f"{stage} {done}" + (f"/{planned}" if planned else "") for stage, (done, planned) in summary.progress.items()
    ]
    shown = [
        key for key in HEADLINES[:-1] if key in summary.newest and not (key == "loss" and "reward" in summary.newest)
    ]
    newest = [f"{key} {summary.newest[key]:.3f}" for key in shown if key in summary.newest]
    best = "–"
    if summary.best is not None:
        mode, accuracy, step = summary.best
        best = f"{accuracy:.3f} ({mode}, step {step})"
    return ", ".join(steps) or "–", ", ".join(newest) or "–", best, str(len(summary.evaluations) or "–")


def compute_final_means(rows: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> dict[str, float]:
    """Return the means of metrics over the last tenth of a stage's steps."""
    newest, means = rows[-max(1, len(rows) // 10) :], {}
    for key in keys:
        values = [row[key] for row in newest if isinstance(row.get(key), int | float)]
        if values:
            means[key] = fmean(values)
    return means


def _find_best_validation(rows: Sequence[Mapping[str, Any]]) -> tuple[str, float, int] | None:
    found = [
        (row[key], mode, row["step"])
        for row in rows
        if row["stage"].endswith("_validation")
        for mode in ("greedy", "sampled")
        if isinstance(row.get(key := f"{mode}/accuracy"), int | float)
    ]
    if not found:
        return None
    value, mode, step = max(found, key=lambda item: (item[0], -item[2]))
    return mode, value, step


def _get_number(recipe: Mapping[str, Any], section: str, key: str) -> int:
    value = recipe[section].get(key) if isinstance(recipe.get(section), Mapping) else None
    return value if isinstance(value, int) else 0


def _read_seed(folder: Path) -> int | None:
    try:
        invocations = read_json(folder / "invocations.json", list[dict[str, Any]], hint="")
    except DataError:
        return None
    seed = invocations[-1].get("seed") if invocations else None
    return seed if isinstance(seed, int) else None


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Return the leaves of nested mappings by their dotted keys; lists are leaves.

    >>> flatten({"rl": {"steps": 3, "optim": {"lr": 0.1}}})
    {'rl.steps': 3, 'rl.optim.lr': 0.1}
    """
    if not isinstance(value, Mapping) or not value:
        return {prefix: value}
    leaves: dict[str, Any] = {}
    for name, item in value.items():
        leaves |= flatten(item, f"{prefix}.{name}" if prefix else str(name))
    return leaves


def find_recipe_differences(folders: Mapping[str, Path]) -> list[tuple[str, list[str]]]:
    """Return each recipe key in which runs differ, with its value in each of them; "–" where a recipe lacks the key."""
    recipes = {}
    for name, folder in folders.items():
        try:
            recipes[name] = flatten(read_run_recipe(folder))
        except SaccadeError:
            recipes[name] = {}
    keys = dict.fromkeys(key for recipe in recipes.values() for key in recipe)
    rows = [(key, [str(recipe.get(key, "–")) for recipe in recipes.values()]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1]
