"""Write an ablation's report: claim, hypothesis, what was run, tables and plots. It draws no conclusions.

results.json   the numbers of every table, with each seed's mean
report.md      claim, metadata, tables, plots (plots/*.png)
report.html    the same as one self-contained page

A number is written as `0.55 [0.50, 0.60] {0.41, 0.69}`: the mean over seeds, in brackets the interval over clips, in
braces the one over seeds (see `metrics.statistics`).
"""

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from saccade.metrics.statistics import SeedEstimate
from saccade.metrics.tables import Table, format_duration
from saccade.reporting.plots import BeforeAndAfter, assign_styles, plot_curves, plot_means
from saccade.reporting.report import Plot, Report, ReportSection, render_template, write_markdown
from saccade.runs.ablations.results import (
    FINAL_STEPS,
    ResultRow,
    VariantResult,
    compute_rows,
    format_title,
    load_results,
)
from saccade.runs.ablations.schedule import Ablation, estimate_minutes
from saccade.utils.files import read_bytes, write_text
from saccade.utils.jsonl import read_jsonl
from saccade.utils.text import pluralize

INTERVAL_NOTE = (
    "A number is the mean over seeds. In [brackets] is its 95 % interval over clips (same seeds, other clips: "
    "Student's t over the clips of all seeds; questions about one clip are not independent), in {braces} the one over "
    "seeds (other data, weights and training: Student's t over the seeds' means, at least as wide). "
    "A claim about a method needs the second; with few seeds it is wide."
)
HOW_TO_READ = (
    "One column per condition. Curves are means over seeds of running means over about a tenth of the steps; bands "
    "reach from the lowest to the highest seed. Points are hollow before RL and filled after it; thick lines are "
    "intervals over clips, thin lines intervals over seeds."
)
CURVE_TITLES = {
    "accuracy": "Accuracy of training rollouts",
    "format_compliance": "Format compliance of training rollouts",
    "reward": "Reward",
    "calls": "Calls per episode",
    "calls/python_style": "Python-style calls per episode",
    "frac_with_tool_call": "Share of episodes with a call",
    "entropy": "Entropy, nats per token",
    "grad_norm": "Gradient norm before clipping",
    "frac_correct_with_negative_advantage": "Correct episodes with a negative advantage, share",
    "turns": "Turns per episode",
    "response_tokens": "Tokens sampled by the main agent",
    "seconds/rollout": "Seconds of a step's rollouts",
    "reward_std": "Standard deviation of rewards within a group",
    "tis_weight_mean": "Importance weight, mean",
    "staleness_mean": "Staleness of trained tokens, versions",
    "status/length": "Episodes ended by their length, share",
    "status/no_answer": "Episodes that end without an answer, share",
}


def format_curve_title(key: str) -> str:
    """Return the title of a metric's curve.

    >>> format_curve_title("call_reward_diff/K=32")
    'Reward with calls minus without, K=32'
    """
    metric, separator, frames = key.rpartition("/K=")
    if separator:
        titles = {"call_reward_diff": "Reward with calls minus without", "calls": "Calls", "accuracy": "Accuracy"}
        return f"{titles.get(metric, metric)}, K={frames}"
    return CURVE_TITLES.get(key, key)


def write_report(folder: Path, ablation: Ablation, failures: Mapping[str, str]) -> tuple[Path, list[Table]]:
    """Write the report of all results so far; return the HTML page's path and the tables for the terminal."""
    results = load_results(folder, ablation)
    rows = compute_rows(ablation, results)
    tables, plots = build_tables(ablation, rows), build_plots(ablation, results, rows)
    header = ("", "description", "settings")
    components = Table(title="Components", header=header, rows=tuple(describe_components(ablation)))
    report = Report(
        kind="ablation",
        title=ablation.spec.title,
        warnings=tuple(collect_warnings(ablation, results, failures)),
        statements={"Claim": ablation.spec.claim, "Hypothesis": ablation.spec.hypothesis},
        metadata=collect_metadata(folder, ablation),
        sections=(
            ReportSection(title="Components", tables=(components,)),
            ReportSection(title="Plots", notes=(HOW_TO_READ,), plots=tuple(plots), has_wide_plots=True),
            ReportSection(title="Tables", notes=(INTERVAL_NOTE,), tables=tuple(tables)),
        ),
    )
    values = {
        "warnings": report.warnings,
        "ablation": ablation.model_dump(mode="json"),
        "metadata": report.metadata,
        "tables": [
            {
                **{"table": row.table, "condition": row.condition, "variant": row.variant},
                **({} if row.slice is None else {"slice": row.slice}),
                **{name: estimate and asdict(estimate) for name, estimate in row.estimates.items()},
            }
            for row in rows
        ],
    }
    write_text(folder / "results.json", json.dumps(values, indent=1) + "\n")
    write_markdown(report, folder / "report.md", "plots")
    return write_text(folder / "report.html", render_template("report.html.j2", report=report)), tables


def collect_warnings(ablation: Ablation, results: Sequence[VariantResult], failures: Mapping[str, str]) -> list[str]:
    """Return the warnings at the head of the report."""
    warnings = []
    if ablation.quick:
        warnings.append(
            f"QUICK: {pluralize(ablation.seeds, 'seed')}, short cold starts and few steps, to test that everything "
            "works. Draw no conclusion from these numbers."
        )
    elif ablation.seeds < 3:
        warnings.append(f"{pluralize(ablation.seeds, 'seed')}: too few for a reliable interval over seeds.")
    incomplete = [result for result in results if len(result.after) < ablation.seeds]
    if incomplete:
        names = ", ".join(f"{result.variant} in {result.condition} ({len(result.after)})" for result in incomplete)
        warnings.append(f"Not every variant has all {ablation.seeds} seeds: {names}.")
    return [*warnings, *(f"{name} failed: {reason}" for name, reason in failures.items())]


def collect_metadata(folder: Path, ablation: Ablation) -> dict[str, str]:
    """Return seeds, tasks, steps, commands, versions and time."""
    invocations, jobs = read_jsonl(folder / "invocations.jsonl", dict[str, Any]), ablation.build_jobs()
    last, done_files = invocations[-1], [folder / "jobs" / f"{job.name}.done.json" for job in jobs]
    seconds = sum(json.loads(read_bytes(file))["seconds"] for file in done_files if file.exists())
    recipe = ablation.build_recipe(*ablation.list_cells()[0])
    # A commit's hash is shortened; the suffix `-dirty` of changed sources is kept.
    parts = [(invocation["versions"]["commit"] or "unknown").partition("-") for invocation in invocations]
    commits = dict.fromkeys(name[:10] + dash + suffix for name, dash, suffix in parts)
    return {
        "seeds": ", ".join(map(str, range(ablation.seeds))),
        "held-out tasks": f"{ablation.count_tasks(recipe)} per seed, on {recipe.synthetic.test} clips",
        "RL": f"{recipe.rl.steps} steps of {recipe.rl.prompts_per_step} groups of {recipe.rl.group_size}",
        "command": "; ".join(dict.fromkeys(invocation["command"] for invocation in invocations)),
        "commit": ", ".join(commits),
        "versions": ", ".join(f"{name} {last['versions'][name]}" for name in ("saccade", "torch", "transformers")),
        "machine": f"{platform.machine()}, {last['cores']} cores; two processes of one thread each",
        "time": f"{format_duration(seconds)} over all processes; planned {estimate_minutes(jobs):.0f} min with two",
    }


def describe_components(ablation: Ablation) -> list[tuple[str, str, str]]:
    """Return name, description and settings of each condition, initial checkpoint and variant."""
    rows = []
    for name in ablation.conditions:
        condition = ablation.spec.conditions[name]
        settings = (f"initial checkpoint: {condition.initial_checkpoint}", *condition.settings)
        rows.append((f"condition: {name}", condition.description, ", ".join(settings)))
    for name in ablation.list_initial_checkpoints():
        checkpoint = ablation.spec.initial_checkpoints[name]
        steps = f"{ablation.build_initial_checkpoint_recipe(name).sft.steps} steps of SFT"
        styles = checkpoint.model_dump(exclude={"description", "settings", "steps"}, exclude_defaults=True)
        settings = (steps, *(f"{key}: {value}" for key, value in styles.items()), *checkpoint.settings)
        rows.append((f"initial checkpoint: {name}", checkpoint.description, ", ".join(settings)))
    for name in dict.fromkeys(variant for _, variant in ablation.list_cells()):
        variant = ablation.spec.variants[name]
        initial = (f"initial checkpoint: {variant.initial_checkpoint}",) if variant.initial_checkpoint else ()
        settings = (ablation.spec.get_recipe(name), *initial, *variant.settings)
        rows.append((f"variant: {name}", variant.description, ", ".join(settings)))
    return rows


def build_tables(ablation: Ablation, rows: Sequence[ResultRow]) -> list[Table]:
    """Build the tables of the report, one per title and condition: of variants with results, in the spec's order."""
    signed = {format_title(table) for table in ablation.spec.tables if table.minus}
    baseline = f"after, minus {ablation.spec.baseline}"
    tables = []
    for title in dict.fromkeys(row.table for row in rows):
        for condition in ablation.conditions:
            by_variant: dict[str, dict[str | None, Mapping[str, SeedEstimate | None]]] = {}
            for row in rows:
                if (row.table, row.condition) == (title, condition):
                    by_variant.setdefault(row.variant, {})[row.slice] = row.estimates
            finished = {
                variant: slices
                for variant, slices in by_variant.items()
                if any(estimates["after"] for estimates in slices.values())
            }
            if not finished:
                continue
            columns = list(dict.fromkeys(name for slices in finished.values() for name in slices if name is not None))
            if columns:
                header = ("", *columns)
                cells = [
                    (variant, *(_format_slice(slices[name]["after"], title in signed) for name in columns))
                    for variant, slices in finished.items()
                ]
            else:
                header = ("", "before RL", "after RL", "after − before", baseline, "tasks / media / seeds")
                cells = [_format_change(variant, slices[None]) for variant, slices in finished.items()]
            name = "Training rollouts, mean over the last third of the steps" if title == FINAL_STEPS else title
            tables.append(Table(title=f"{name}: {condition}", header=header, rows=tuple(cells)))
    return tables


def _format_change(variant: str, estimates: Mapping[str, SeedEstimate | None]) -> tuple[str, ...]:
    after, against = estimates["after"], "against_baseline"
    return (
        variant,
        format_estimate(estimates["before"]),
        format_estimate(after),
        format_estimate(estimates["gain"], show_sign=True),
        format_estimate(estimates[against], show_sign=True) if against in estimates else "",
        format_counts(after) if after else "–",
    )


def format_estimate(estimate: SeedEstimate | None, *, show_sign: bool = False) -> str:
    """Format a number with its intervals.

    >>> format_estimate(SeedEstimate(mean=0.5, clip_interval=(0.4, 0.6), seed_interval=(0.1, 0.9), seed_means=()))
    '0.50 [0.40, 0.60] {0.10, 0.90}'
    """
    if estimate is None:
        return "–"
    intervals = {("[", "]"): estimate.clip_interval, ("{", "}"): estimate.seed_interval}
    largest = max(map(abs, (estimate.mean, *(bound for interval in intervals.values() for bound in interval or ()))))
    style = f"{'+' if show_sign else ''}.{0 if largest >= 100 else 1 if largest >= 10 else 2}f"
    text = f"{estimate.mean:{style}}"
    for (left, right), interval in intervals.items():
        text += f" {left}{interval[0]:{style}}, {interval[1]:{style}}{right}" if interval else ""
    return text


def format_counts(estimate: SeedEstimate) -> str:
    """Return the numbers of tasks, clips and seeds behind an estimate: 576 / 72 / 3."""
    return f"{estimate.num_tasks} / {estimate.num_clips} / {len(estimate.seed_means)}"


def _format_slice(estimate: SeedEstimate | None, show_sign: bool) -> str:
    if estimate is None:
        return format_estimate(None)
    # A metric of training steps has no tasks.
    counts = format_counts(estimate) if estimate.num_tasks else pluralize(len(estimate.seed_means), "seed")
    return f"{format_estimate(estimate, show_sign=show_sign)} n={counts}"


def build_plots(ablation: Ablation, results: Sequence[VariantResult], rows: Sequence[ResultRow]) -> list[Plot]:
    """Return every plot with at least one value."""
    styles = assign_styles(list(ablation.spec.variants))
    runs: dict[str, dict[str, list[Any]]] = {name: {} for name in ablation.conditions}
    for result in results:
        runs[result.condition][result.variant] = list(result.step_metrics.values())
    plots = []
    for table in ablation.spec.tables:
        if not table.group_by:
            estimates: dict[str, dict[str, BeforeAndAfter]] = {condition: {} for condition in ablation.conditions}
            for row in rows:
                if row.table == format_title(table):
                    estimates[row.condition][row.variant] = (row.estimates["before"], row.estimates["after"])
            draw = partial(plot_means, estimates, styles, mark_zero=table.minus is not None)
            plots.append(Plot(title=format_title(table), draw=draw))
    for key in ablation.spec.curves:
        plots.append(Plot(title=format_curve_title(key), draw=partial(plot_curves, runs, key, styles)))
    return [plot for plot in plots if plot.figure is not None]
