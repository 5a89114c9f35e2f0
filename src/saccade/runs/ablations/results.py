"""The numbers of an ablation: the results of all its jobs, as one row of estimates per table, condition and variant."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from saccade.errors import RunError
from saccade.metrics.statistics import (
    DIFFERENCE_BOUNDS,
    FRACTION_BOUNDS,
    Interval,
    SeedEstimate,
    compute_seed_interval,
    estimate_over_seeds,
)
from saccade.runs.ablations.schedule import Ablation
from saccade.runs.ablations.spec import EvaluationMode, Metric, TableSpec
from saccade.runs.run_folder import Run
from saccade.utils.files import read_text

EpisodeColumns = Mapping[str, list[Any]]  # of one evaluation; see worker.tabulate_episodes
EvaluationsBySeed = Mapping[int, Mapping[EvaluationMode, EpisodeColumns]]
TaskValues = dict[int, dict[str, float]]  # by seed and task
ClipsBySeed = Mapping[int, Mapping[str, str]]  # the clip of each task

FINAL_STEPS = "last third of the steps"  # the title of the table of step metrics
EVALUATION_NAMES: dict[EvaluationMode, str] = {
    "greedy": "greedy",
    "sampled": "sampled as in training",
    "tools_off": "greedy, tools off",
    "batch_size_1": "greedy, one question at a time",
}
METRIC_NAMES: dict[Metric, str] = {
    "accuracy": "accuracy",
    "format_compliance": "format compliance",
    "answered": "share of episodes with an answer",
    "calls": "calls per episode",
    "succeeded": "calls that succeeded, per episode",
    "frac_with_tool_call": "share of episodes with a call",
    "python_style": "Python-style calls per episode",
    "turns": "turns per episode",
    "response_tokens": "tokens sampled by the main agent",
    "sampled_tokens": "tokens sampled, sub-agents included",
    "visual_tokens": "visual tokens per episode",
    "seconds": "seconds per question",
}
FRACTION_METRICS = {"accuracy", "format_compliance", "answered", "frac_with_tool_call"}  # in [0, 1]
SLICE_NAMES = {
    "frame_budget": "by frames in the overview",
    "question_type": "by question type",
    "overview": "by what the overview shows",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantResult:
    """A variant in a condition: by seed, its evaluations before and after RL, and the metrics of its steps."""

    condition: str
    variant: str
    before: EvaluationsBySeed
    after: EvaluationsBySeed
    step_metrics: Mapping[int, Sequence[Mapping[str, Any]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultRow:
    """A variant in a table: "before" and "after" RL, their difference ("gain"), and that "against_baseline"."""

    table: str
    condition: str
    variant: str
    slice: str | None = None  # of the tasks, or the name of a step metric; its row has "after" alone
    estimates: Mapping[str, SeedEstimate | None]  # None for a job that isn't done


def load_results(folder: Path, ablation: Ablation) -> list[VariantResult]:
    """Load the results of every variant in every condition; unfinished seeds are missing."""
    results = []
    for condition, variant in ablation.list_cells():
        before, after, steps = {}, {}, {}
        recipe = ablation.build_recipe(condition, variant)  # the folder's may be of an older version
        for seed in range(ablation.seeds):
            run_folder = folder / f"seed-{seed}/{condition}/{variant}"
            if (run_folder / "results.json").exists():
                after[seed] = json.loads(read_text(run_folder / "results.json"))
                steps[seed] = Run(path=run_folder, recipe=recipe).read_metrics("rl")
                initial = folder / ablation.get_initial_evaluation_folder(condition, variant, seed) / "results.json"
                if initial.exists():
                    before[seed] = json.loads(read_text(initial))
        names = {"condition": condition, "variant": variant}
        results.append(VariantResult(**names, before=before, after=after, step_metrics=steps))
    return results


def compute_rows(ablation: Ablation, results: Sequence[VariantResult]) -> list[ResultRow]:
    """Compute every number of the report, in the order of the spec's tables; the step metrics are last."""
    rows = []
    clips = collect_clips(results)
    for table in ablation.spec.tables:
        bounds, difference_bounds = get_bounds(table)
        baselines = {
            result.condition: collect_values(result.after, table)
            for result in results
            if result.variant == ablation.spec.baseline
        }
        for result in results:
            names = {"table": format_title(table), "condition": result.condition, "variant": result.variant}
            if table.group_by:
                for name, value in find_slices(results, table).items():
                    after = collect_values(result.after, table, value)
                    rows.append(
                        ResultRow(**names, slice=name, estimates={"after": estimate_values(after, clips, bounds)})
                    )
                continue
            before, after = collect_values(result.before, table), collect_values(result.after, table)
            estimates = {
                name: estimate_values(values, clips, bounds) for name, values in (("before", before), ("after", after))
            }
            estimates["gain"] = estimate_difference(after, before, clips, difference_bounds)
            if result.variant != ablation.spec.baseline:
                baseline = baselines.get(result.condition, {})
                estimates["against_baseline"] = estimate_difference(after, baseline, clips, difference_bounds)
            rows.append(ResultRow(**names, estimates=estimates))
    for result in results:
        for metric in ablation.spec.final_metrics:
            estimates = {"after": estimate_final_mean(result, metric)}
            names = {"table": FINAL_STEPS, "condition": result.condition, "variant": result.variant}
            rows.append(ResultRow(**names, slice=metric, estimates=estimates))
    return rows


def collect_clips(results: Sequence[VariantResult]) -> ClipsBySeed:
    """Return the clip of each task by seed; every seed has its own dataset. Raises RunError for older results."""
    clips: dict[int, dict[str, str]] = {}
    for result in results:
        for evaluations_by_seed in (result.before, result.after):
            for seed, evaluations in evaluations_by_seed.items():
                for name, columns in evaluations.items():
                    if "clip" not in columns:
                        raise RunError(
                            f"the evaluation {name} of {result.variant} was stored by an older version, without the "
                            "clips of its tasks; run the ablation again, in another folder",
                            key="clip",
                            value=name,
                        )
                    clips.setdefault(seed, {}).update(zip(columns["task"], columns["clip"], strict=True))
    return clips


def get_bounds(table: TableSpec) -> tuple[Interval | None, Interval | None]:
    """Return the bounds of a table's values and of their differences; None for counts and times."""
    if table.metric not in FRACTION_METRICS:
        return None, None
    return (DIFFERENCE_BOUNDS, (-2.0, 2.0)) if table.minus else (FRACTION_BOUNDS, DIFFERENCE_BOUNDS)


def format_title(table: TableSpec) -> str:
    """Return the title of a table."""
    minus = f" minus {EVALUATION_NAMES[table.minus]}" if table.minus else ""
    group_by = f", {SLICE_NAMES[table.group_by]}" if table.group_by else ""
    title = f"{METRIC_NAMES[table.metric]}, {EVALUATION_NAMES[table.evaluation]}{minus}{group_by}"
    return title[0].upper() + title[1:]


def find_slices(results: Sequence[VariantResult], table: TableSpec) -> dict[str, object]:
    """Return the slices of a table by name, in order."""
    slices = {
        value
        for result in results
        for by_evaluation in result.after.values()
        for value in by_evaluation[table.evaluation][table.group_by]
    } - {None}
    ordered = sorted(slices, key=lambda value: (isinstance(value, str), value))
    return {f"K={value}" if table.group_by == "frame_budget" else str(value): value for value in ordered}


def collect_values(evaluations_by_seed: EvaluationsBySeed, table: TableSpec, slice_value: object = None) -> TaskValues:
    """Return a table's metric by seed and task, of one slice if a value of `group_by` is given."""
    values: TaskValues = {}
    for seed, evaluations in evaluations_by_seed.items():
        if table.evaluation in evaluations and (table.minus is None or table.minus in evaluations):
            slice_key = None if slice_value is None else (table.group_by, slice_value)
            values[seed] = compute_task_means(evaluations[table.evaluation], table.metric, slice_key)
            if table.minus:
                values[seed] = _subtract(values[seed], compute_task_means(evaluations[table.minus], table.metric))
    return values


def compute_task_means(
    columns: EpisodeColumns, metric: str, slice_key: tuple[str, object] | None = None
) -> dict[str, float]:
    """Return the mean of a metric over each task's episodes, of one slice (column, value) if given."""
    values_by_task: dict[str, list[float]] = {}
    for i, (task, value) in enumerate(zip(columns["task"], columns[metric], strict=True)):
        if slice_key is None or columns[slice_key[0]][i] == slice_key[1]:
            values_by_task.setdefault(task, []).append(float(value))
    return {task: fmean(values) for task, values in values_by_task.items()}


def _subtract(first: Mapping[str, float], second: Mapping[str, float]) -> dict[str, float]:
    """Return first minus second, on the tasks of both."""
    return {task: first[task] - second[task] for task in first.keys() & second.keys()}


def estimate_values(values: TaskValues, clips: ClipsBySeed, bounds: Interval | None) -> SeedEstimate | None:
    """Estimate the mean of values within `bounds`; see `estimate_over_seeds`."""
    return estimate_over_seeds(list(values.values()), [clips[seed] for seed in values], bounds=bounds)


def estimate_difference(
    first: TaskValues, second: TaskValues, clips: ClipsBySeed, bounds: Interval | None
) -> SeedEstimate | None:
    """Estimate first minus second, paired by task within each seed of both."""
    seeds = sorted(first.keys() & second.keys())
    return estimate_values({seed: _subtract(first[seed], second[seed]) for seed in seeds}, clips, bounds)


def estimate_final_mean(result: VariantResult, key: str) -> SeedEstimate | None:
    """Estimate the mean of a step metric over the last third of the steps; steps without the metric are left out."""
    means = []
    for rows in result.step_metrics.values():
        last = rows[-max(1, len(rows) // 3) :]
        values = [float(row[key]) for row in last if isinstance(row.get(key), int | float)]
        means += [fmean(values)] if values else []
    if not means:
        return None
    return SeedEstimate(mean=fmean(means), seed_interval=compute_seed_interval(means), seed_means=tuple(means))
