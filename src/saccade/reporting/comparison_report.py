"""A report of several runs: differences of their recipes, accuracy, curves, cost, versions, and how to repeat them."""

import functools
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from saccade.evaluation.compare import Evaluation, compare_evaluations
from saccade.metrics.tables import Bar, Table, format_counts, format_duration, format_estimate, format_optional
from saccade.reporting.episode_view import PixelLoader
from saccade.reporting.examples import Examples, describe_example
from saccade.reporting.plots import assign_styles, plot_bars, plot_curves
from saccade.reporting.report import Plot, Report, ReportSection
from saccade.reporting.run_report import (
    STAGE_TITLES,
    build_bar,
    build_training_tables,
    collect_metadata,
    compute_step_seconds,
    read_metrics,
)
from saccade.reporting.run_summary import RECIPE_FILE, find_recipe_differences

CURVES = {  # by stage: the metrics that are plotted
    "sft": ("loss",),
    "rl": ("reward", "accuracy", "calls", "format_compliance", "entropy"),
    "rl_validation": ("greedy/accuracy", "sampled/accuracy"),
}
ACCURACY_NOTE = (
    "Accuracy is in [0, 1]; intervals are 95 %, over clips. The runs of one evaluation are side by side. The baseline "
    "is what the best constant answer scores."
)
COST_NOTE = "Seconds are those of the steps. Trained tokens have a loss; packed tokens are all that were computed."
COST_HEADER = (
    "run",
    "stage",
    "steps",
    "time",
    "trained tokens",
    "packed tokens",
    "sampled tokens per episode",
    "visual tokens per episode",
    "tokens per second (RL: sampled, SFT: packed)",
)
REPRODUCTION_NOTE = (
    "A run's recipe is complete, seed and data included; the commands need its model and data at the same paths."
)
Rows = Mapping[str, Sequence[Mapping[str, Any]]]


def build_comparison(
    runs: Mapping[str, Path],
    evaluations: Mapping[str, Mapping[str, Evaluation]],
    examples: Examples,
    load_pixels: PixelLoader | None = None,
) -> Report:
    """Build the report of runs by their names. Raises DataError for a damaged file of a run."""
    metrics = {name: read_metrics(folder) for name, folder in runs.items()}
    differences = tuple((key, *values) for key, values in find_recipe_differences(runs))
    recipes = Table(
        title="Recipes", header=("key", *runs), rows=differences or (("no difference", *("" for _ in runs)),)
    )
    return Report(
        kind="runs",
        title=", ".join(runs),
        sections=(
            ReportSection(title="Recipes", notes=("Keys in which the recipes differ.",), tables=(recipes,)),
            _build_accuracy(evaluations),
            ReportSection(title="Progress", tables=_build_progress(runs, metrics)),
            *_build_curves(metrics),
            build_cost_section(metrics),
            build_reproduction_section(runs),
        ),
        examples=tuple(describe_example(example, load_pixels) for example in examples.items),
        examples_note=examples.note,
    )


def _build_accuracy(evaluations: Mapping[str, Mapping[str, Evaluation]]) -> ReportSection:
    rows: dict[str, list[tuple[str, ...]]] = {}
    bars: dict[str, dict[str, Bar]] = {}
    for name, own in evaluations.items():
        for evaluation, summary in compare_evaluations(own).summaries.items():
            baseline = summary.constant_baseline
            cells = (
                format_estimate(summary.accuracy),
                format_optional(baseline),
                f"{summary.calls:.2f}",
                f"{summary.visual_tokens:.1f}",
                format_counts(summary.accuracy),
            )
            rows.setdefault(evaluation, []).append((evaluation, name, *cells))
            bars.setdefault(evaluation, {})[name] = build_bar(summary.accuracy, baseline)
    header = ("evaluation", "run", "accuracy", "constant-answer baseline", "calls", "visual tokens", "tasks / media")
    table = Table(title="Accuracy", header=header, rows=tuple(row for cells in rows.values() for row in cells))
    plot = Plot(title="Accuracy of each evaluation", draw=functools.partial(plot_bars, bars))
    is_shown = len({name for row in bars.values() for name in row}) > 1
    return ReportSection(
        title="Accuracy",
        notes=(ACCURACY_NOTE,),
        tables=(table,) if rows else (),
        plots=(plot,) if is_shown else (),
        has_wide_plots=True,
    )


def _build_progress(runs: Mapping[str, Path], metrics: Mapping[str, Rows]) -> tuple[Table, ...]:
    rows = [
        (name, *row)
        for name, folder in runs.items()
        for section in build_training_tables(folder, {stage: list(own) for stage, own in metrics[name].items()})
        for table in section.tables
        if table.title == "Progress"
        for row in table.rows
    ]
    header = ("run", "stage", "steps", "status", "checkpoints")
    return (Table(title="Progress", header=header, rows=tuple(rows)),) if rows else ()


def _build_curves(metrics: Mapping[str, Rows]) -> list[ReportSection]:
    """Return a section per stage: each metric with a line per run, a running mean over about a tenth of the steps."""
    sections, styles = [], assign_styles(list(metrics))
    for stage, keys in CURVES.items():
        rows = {name: list(own.get(stage, ())) for name, own in metrics.items() if own.get(stage)}
        shown = [key for key in keys if any(key in row for own in rows.values() for row in own)]
        columns = {"": {name: [own] for name, own in rows.items()}}
        plots = tuple(
            Plot(title=key.replace("_", " "), draw=functools.partial(plot_curves, columns, key, styles))
            for key in shown
        )
        if plots:
            note = "Lines are running means over about a tenth of the steps."
            sections.append(ReportSection(title=STAGE_TITLES[stage], notes=(note,), plots=plots))
    return sections


def build_last_sections(folder: Path) -> tuple[ReportSection, ...]:
    """Build what ends the report of one run: its cost, versions, and the command that repeats it."""
    name = folder.resolve().name
    return build_cost_section({name: read_metrics(folder)}), build_reproduction_section({name: folder})


def build_cost_section(metrics: Mapping[str, Rows]) -> ReportSection:
    """Build the table of what the stages of runs cost: seconds, and tokens where they are logged."""
    rows = []
    for name, stages in metrics.items():
        for stage, own in stages.items():
            seconds = sum(map(compute_step_seconds, own))
            totals = (_sum(own, "trained_tokens"), _sum(own, "packed_tokens"))
            means = (
                _average(own, "sampled_tokens"),
                _average(own, "visual_tokens"),
                _average(own, f"{'sampled' if stage == 'rl' else 'packed'}_tokens_per_second"),
            )
            rows.append((name, stage, str(len(own)), format_duration(seconds) if seconds else "–", *totals, *means))
    table = Table(title="Cost", header=COST_HEADER, rows=tuple(rows))
    return ReportSection(title="Cost", notes=(COST_NOTE,), tables=(table,) if rows else ())


def _list_values(rows: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    return [row[key] for row in rows if isinstance(row.get(key), int | float)]


def _sum(rows: Sequence[Mapping[str, Any]], key: str) -> str:
    values = _list_values(rows, key)
    return f"{sum(values):,.0f}" if values else "–"


def _average(rows: Sequence[Mapping[str, Any]], key: str) -> str:
    values = _list_values(rows, key)
    return f"{fmean(values):.1f}" if values else "–"


def build_reproduction_section(runs: Mapping[str, Path]) -> ReportSection:
    """Build the tables of the runs' versions, and of the commands that repeat their trainings."""
    metadata = {name: collect_metadata(folder) for name, folder in runs.items()}
    keys = dict.fromkeys(key for own in metadata.values() for key in own if "wall time" not in key)
    versions = tuple((key, *(str(own.get(key, "–")) for own in metadata.values())) for key in keys)
    commands = []
    for name, folder in runs.items():
        stages = [stage for stage in ("sft", "rl") if read_metrics(folder).get(stage)]
        command = "train" if len(stages) == 2 else stages[0] if stages else "eval"
        again = f"{folder}-again"
        commands.append((name, shlex.join(["saccade", command, str(folder / RECIPE_FILE), "--out", again])))
    tables = (
        Table(title="Commands", header=("run", "command"), rows=tuple(commands)),
        Table(title="Versions", header=("", *runs), rows=versions),
    )
    return ReportSection(title="Repeat", notes=(REPRODUCTION_NOTE,), tables=tables)
