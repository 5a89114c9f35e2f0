"""Report a run: metadata, tables, plots, and example episodes token by token.

The page has no scripts and no links, and embeds its images. The template escapes all text from models, tasks and files.
"""

import functools
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from saccade.config.load import load_recipe
from saccade.config.schema import AlarmConfig
from saccade.evaluation.compare import Comparison, Evaluation, compare_evaluations, read_evaluations
from saccade.metrics.looking import NO_DECISION, POLICY_LABELS, BaselinePolicy
from saccade.metrics.metric_log import read_metric_rows
from saccade.metrics.statistics import Estimate
from saccade.metrics.tables import (
    Bar,
    Table,
    format_counts,
    format_difference,
    format_duration,
    format_estimate,
    format_interval,
    format_optional,
)
from saccade.plugins import get_object_name
from saccade.reporting.episode_view import DecodeFn, EpisodeViewer, PixelLoader
from saccade.reporting.evaluation_report import SLICE_TITLES, build_tables, format_policy
from saccade.reporting.examples import Example, Examples, choose_examples_of_runs, describe_example, describe_verdict
from saccade.reporting.plots import (
    PANELS,
    extract_series,
    find_alarm_steps,
    is_finite_number,
    plot_bars,
    plot_panel,
)
from saccade.reporting.report import Plot, Report, ReportSection, render_template, write_markdown
from saccade.training.alarms import ALARM_PREFIX, Alarm, prefix_validation
from saccade.training.checkpoint import BEST_LINK, list_checkpoints
from saccade.training.episode_log import RolloutRecord, list_recorded_steps, read_rollouts
from saccade.types import Episode, Score, ScoredEpisode
from saccade.utils.files import read_text, write_text
from saccade.utils.jsonl import read_json, write_json
from saccade.utils.text import pluralize

FILTERS = ("right", "wrong", "failed", "with a call", "without a call")  # of the page's episodes; then those of runs
NUM_REASONS = 20  # rows of the outcomes of a step's episodes: errors may all differ
STAGE_TITLES = {
    "sft": "Supervised cold start",
    "sft_validation": "Validation during the supervised cold start",
    "rl": "Reinforcement learning",
    "rl_validation": "Validation during reinforcement learning",
}
VALIDATION_STAGES = ("sft_validation", "rl_validation")
# Columns of the tables of tool calls: the end of the metric's key, its label and format.
CALL_COLUMNS = (
    ("calls", "calls per episode", ".2f"),
    ("frac_with_call", "episodes with a call", ".0%"),
    ("frac_failed", "failed, of the calls", ".0%"),
    ("frac_duplicate", "repeated, of the calls", ".0%"),
    ("seconds", "seconds per call", ".2f"),
    ("reward_diff", "reward with − without a call", "+.2f"),
)
EMPTY_RUN_WARNING = "This run holds no training step and no evaluation yet."
RESULTS_NOTE = (
    "Accuracy is in [0, 1]; intervals are 95 %, over clips: all questions about the same files together. The "
    "dotted mark is the constant-answer baseline: what the best constant answer scores. Calls are all that the model "
    "wrote, executed or not. Failed episodes count as wrong, and episodes without a score are in no mean. A change "
    "is significant if there are at least 6 clips, its interval excludes zero, and a sign test over clips agrees."
)


def build_run_report(
    folder: Path,
    *,
    evaluations: Mapping[str, Evaluation],
    comparison: Comparison,
    examples: Examples,
    load_pixels: PixelLoader | None = None,
    metadata: Mapping[str, Any] | None = None,
    more_sections: Sequence[ReportSection] = (),
) -> Report:
    """Build the report of a run; with `load_pixels` its examples have frames. Raises DataError for a damaged file of
    the run.
    """
    stages = read_metrics(folder)
    training = build_training_tables(folder, stages)
    return Report(
        kind="run",
        title=folder.resolve().name,
        statements=summarize_findings(training, evaluations, comparison),
        metadata={**(metadata or {}), **collect_metadata(folder)},
        warnings=() if stages or evaluations else (EMPTY_RUN_WARNING,),
        sections=(
            *training,
            *build_results(comparison),
            *build_rollout_tables(read_newest_rollouts(folder)),
            *build_call_tables(stages.get("rl", ())),
            *build_curves(stages),
            *more_sections,
        ),
        examples=tuple(describe_example(example, load_pixels) for example in examples.items),
        examples_note=examples.note,
    )


def write_report(
    folder: Path,
    *,
    evaluations: Mapping[str, Evaluation] | None = None,
    comparison: Comparison | None = None,
    decode: DecodeFn | None = None,
    load_pixels: PixelLoader | None = None,
    metadata: Mapping[str, Any] | None = None,
    page_path: Path | None = None,
    more_sections: Sequence[ReportSection] = (),
) -> Path:
    """Write comparison.json, report.md with its plots, and report.html into a run's folder; return the page's path.

    `evaluations` default to the run's, and `comparison` to theirs. `decode` (a renderer's) lets the page show replies
    token by token, `load_pixels` (a media loader's) the frames. All files contain the `metadata`. With a
    `page_path` only one file is written, there: the page, Markdown or a PDF, by its ending.

    Raises DataError for a damaged file of the run, and RunError if a file can't be written.
    """
    evaluations = read_evaluations(folder) if evaluations is None else evaluations
    comparison = comparison or compare_evaluations(evaluations)
    values = {"summaries": comparison.summaries, "changes": comparison.changes, "metadata": dict(metadata or {})}
    recipe = folder / "recipe.yaml"
    examples = read_examples({"": folder}, {"": evaluations})
    report = build_run_report(
        folder,
        evaluations=evaluations,
        comparison=comparison,
        examples=examples,
        load_pixels=load_pixels,
        metadata=metadata,
        more_sections=more_sections,
    )
    if page_path is not None and page_path.suffix != ".html":
        return write_report_file(report, page_path)
    if page_path is None:
        write_json(folder / "comparison.json", values)
        write_markdown(report, folder / "report.md")
    page = render_run_page(
        report,
        examples,
        recipe=read_text(recipe, errors="replace") if recipe.is_file() else "",
        decoders={"": decode},
        load_pixels=load_pixels,
    )
    return write_text(page_path or folder / "report.html", page)


def write_report_file(report: Report, path: Path) -> Path:
    """Write a report as Markdown or PDF, by the file's ending; return its path."""
    if path.suffix == ".md":
        return write_markdown(report, path)
    from saccade.reporting.pdf import write_pdf

    return write_pdf(report, path)


def read_examples(runs: Mapping[str, Path], evaluations: Mapping[str, Mapping[str, Evaluation]]) -> Examples:
    """Choose the examples of runs by name: of their evaluations, or else of their newest episodes on disk."""
    rollouts = {name: [] if evaluations[name] else read_newest_rollouts(folder) for name, folder in runs.items()}
    weights = {name: read_reward_weights(folder / "recipe.yaml") for name, folder in runs.items()}
    return choose_examples_of_runs(evaluations, rollouts, weights=weights)


def render_run_page(
    report: Report,
    examples: Examples,
    *,
    recipe: str = "",
    decoders: Mapping[str, DecodeFn | None],
    load_pixels: PixelLoader | None = None,
    is_graded: bool = True,
) -> str:
    """Render a report with its examples; `decoders` are the renderers' by the runs' names, "" in the report of one."""
    thumbnails: dict[str, tuple[str, str]] = {}
    viewers = {run: EpisodeViewer(decode, load_pixels, thumbnails) for run, decode in decoders.items()}
    views = [
        {**viewers[example.run].build_view(example.scored), "example": example, "filters": list_filters(example)}
        for example in examples.items
    ]
    counts = Counter(name for view in views for name in view["filters"])
    names = (*FILTERS, *(f"run {run}" for run in decoders))
    return render_template(
        "run.html.j2",
        report=report,
        recipe=recipe,
        examples=views,
        is_graded=is_graded,
        thumbnails=thumbnails,
        error=next((viewer.error for viewer in viewers.values() if viewer.error), None),
        filters={name: counts[name] for name in names if 0 < counts[name] < len(views)},
        choice_note=examples.note,
    )


def render_episode_page(
    episode: Episode, *, decode: DecodeFn | None = None, load_pixels: PixelLoader | None = None
) -> str:
    """Render one episode that nothing graded."""
    example = Example(scored=ScoredEpisode(episode=episode, score=Score(value=0.0)), source="")
    report = Report(kind="episode", title=episode.task.question)
    examples = Examples(items=(example,))
    return render_run_page(report, examples, decoders={"": decode}, load_pixels=load_pixels, is_graded=False)


def summarize_findings(
    training: Sequence[ReportSection], evaluations: Mapping[str, Evaluation], comparison: Comparison
) -> dict[str, str]:
    """Return the head's sentences: how far the training is, and the accuracy of the newest evaluation.

    Evaluations without tools are controls; one of them counts only if there is no other.
    """
    progress = [
        row for section in training for table in section.tables if table.title == "Progress" for row in table.rows
    ]
    statements = {}
    if progress:
        statements["Training"] = "; ".join(f"{stage}: {steps} steps, {status}" for stage, steps, status, _ in progress)
    if comparison.summaries:
        names = list(comparison.summaries)
        with_tools = [other for other in names if other in evaluations and evaluations[other].use_tools]
        name = (with_tools or names)[-1]
        summary = comparison.summaries[name]
        baseline = summary.constant_baseline
        text = f"{name}: accuracy {format_estimate(summary.accuracy)} over {pluralize(summary.num_clusters, 'clip')}"
        text += "" if baseline is None else f"; the best constant answer scores {baseline:.2f}"
        ceiling = summary.policies.get(NO_DECISION)
        text += "" if ceiling is None else f"; the {POLICY_LABELS[NO_DECISION]} scores {ceiling.accuracy:.2f}"
        statements["Result"] = text
        change = next((change for change in comparison.changes if change.after == name and not change.visibility), None)
        if change is not None:
            significance = "significant" if change.difference.is_significant else "not significant"
            statements["Change"] = f"{format_difference(change.difference)} from {change.before}, {significance}"
    return statements


def read_reward_weights(recipe_file: Path) -> dict[str, float]:
    """Return the weights of a recipe's reward terms by the names of their scores; those of environments are left out
    where they differ.
    """
    if not recipe_file.is_file():
        return {}
    recipe, weights = load_recipe(str(recipe_file)), defaultdict[str, set[float]](set)
    for terms in recipe.reward_sections.values():
        for name, term in terms.items():
            weights[get_object_name(name)].add(term.weight)
    return {name: next(iter(values)) for name, values in weights.items() if len(values) == 1}


def collect_metadata(folder: Path) -> dict[str, Any]:
    """Return seed, versions and machine of the last invocation, and each stage's wall time by its status or steps."""
    path, hint = folder / "invocations.json", "delete it to continue without the record of earlier invocations"
    invocations = (read_json(path, list[dict[str, Any]], hint=hint) if path.exists() else []) or [{}]
    metadata = {key: value for key, value in invocations[-1].items() if value is not None}
    if "commit" in metadata:
        metadata["commit"] = str(metadata["commit"])[:12]
    if len(invocations) > 1:
        metadata["invocations"] = len(invocations)
    wall_times = {stage: sum(map(compute_step_seconds, rows)) for stage, rows in read_metrics(folder).items()}
    for path in sorted(folder.glob("finished_stages/*.json")):
        hint = "delete it, and repeat the command that wrote it with --resume"
        seconds = read_json(path, dict[str, Any], hint=hint).get("seconds")
        wall_times |= {path.stem: seconds} if isinstance(seconds, int | float) else {}
    metadata |= {f"{stage}, wall time": format_duration(value) for stage, value in wall_times.items() if value > 0}
    return metadata


def read_metrics(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of metrics.jsonl by stage; of a repeated step, the last row. Raises DataError."""
    stages: dict[str, dict[int, dict[str, Any]]] = {stage: {} for stage in STAGE_TITLES}
    for row in read_metric_rows(folder / "metrics.jsonl"):
        stages.setdefault(row["stage"], {})[row["step"]] = row
    return {stage: [rows[step] for step in sorted(rows)] for stage, rows in stages.items() if rows}


def compute_step_seconds(row: Mapping[str, Any]) -> float:
    """Return the seconds of a step: "seconds" if it is logged, else the sum of "seconds/*"."""
    total = row.get("seconds")
    parts = [total] if total is not None else [value for key, value in row.items() if key.startswith("seconds/")]
    return sum(value for value in parts if isinstance(value, int | float))


def build_results(comparison: Comparison) -> list[ReportSection]:
    """Build the tables of all evaluations, and a plot of each table of accuracy by slice; [] without an evaluation."""
    summaries = comparison.summaries
    if not summaries:
        return []
    ceiling_header = [POLICY_LABELS[NO_DECISION]] if any(s.policies for s in summaries.values()) else []
    accuracy = Table(
        title="Accuracy",
        header=("", "accuracy", "constant-answer baseline", *ceiling_header, "tasks / media"),
        rows=tuple(
            (
                name,
                format_estimate(summary.accuracy),
                format_optional(summary.constant_baseline),
                *([format_policy(summary.policies.get(NO_DECISION))] if ceiling_header else []),
                format_counts(summary.accuracy),
            )
            for name, summary in summaries.items()
        ),
        bars=tuple(
            build_bar(summary.accuracy, summary.constant_baseline, summary.policies.get(NO_DECISION))
            for summary in summaries.values()
        ),
    )
    tables = {table.title: table for table in build_tables(comparison)}
    plots = []
    for key, title in SLICE_TITLES.items():
        bars: dict[str, dict[str, Bar]] = {}
        for name, summary in summaries.items():
            rows = {row.name: build_bar(row.accuracy, row.constant_baseline) for row in summary.slices.get(key, ())}
            bars |= {name: rows} if rows else {}
        # A single row repeats the overall accuracy; wordings are too long for a plot.
        if len({row for rows in bars.values() for row in rows}) > 1 and key != "wording":
            plots.append(Plot(title=title, draw=functools.partial(plot_bars, bars), numbers=tables.pop(title)))
    return [
        ReportSection(title="Results", notes=(RESULTS_NOTE,), tables=(accuracy, *tables.values()), plots=tuple(plots))
    ]


def build_bar(accuracy: Estimate, constant_baseline: float | None, ceiling: BaselinePolicy | None = None) -> Bar:
    """Build the bar of an accuracy, with the constant-answer baseline and the policy without a decision as marks."""
    marks = [] if constant_baseline is None else [("constant-answer baseline", constant_baseline)]
    marks += [] if ceiling is None else [(POLICY_LABELS[NO_DECISION], ceiling.accuracy)]
    return Bar(value=accuracy.mean, low=accuracy.low, high=accuracy.high, marks=tuple(marks))


def build_curves(stages: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[ReportSection]:
    """Build a section per stage: the plots of the panels that have values in its metrics."""
    sections = []
    for stage, rows in stages.items():
        is_validation = stage in VALIDATION_STAGES
        draw = functools.partial(plot_panel, rows=rows, is_smoothed=not is_validation)
        panels = [panel for panel in PANELS if extract_series(panel, rows)]
        plots = tuple(Plot(title=panel.title, draw=functools.partial(draw, panel), has_title=True) for panel in panels)
        if not plots:
            continue
        note = f"{pluralize(len(rows), 'step')}. Points are steps, lines a running mean over about a tenth of them."
        if is_validation:
            note = f"{pluralize(len(rows), 'validation')}, a point each. Bands are 95 % intervals over clips."
        note += " Dotted lines are alarms." if find_alarm_steps(rows) else ""
        sections.append(ReportSection(title=STAGE_TITLES.get(stage, stage), notes=(note,), plots=plots))
    return sections


def list_filters(example: Example) -> list[str]:
    """Return the filters that show an episode."""
    scored = example.scored
    calls = "with a call" if scored.episode.results else "without a call"
    return [describe_verdict(scored), calls, *([f"run {example.run}"] if example.run else [])]


def read_newest_rollouts(folder: Path) -> list[RolloutRecord]:
    """Return the records of the newest step whose episodes are on disk: of RL, else of a validation; [] without any."""
    for stage in ("rl", "rl_validation", "sft_validation"):
        if steps := list_recorded_steps(folder, stage):
            return read_rollouts(folder, stage, steps[-1])
    return []


def build_rollout_tables(records: Sequence[RolloutRecord]) -> list[ReportSection]:
    """Build a table of the outcomes of a step's episodes, with their most frequent reasons; [] without a record."""
    if not records:
        return []
    counts = Counter((record.outcome, record.reason or record.episode.error or "") for record in records)
    frequent = counts.most_common(NUM_REASONS)
    rows: list[tuple[str, ...]] = [(outcome, str(count), reason) for (outcome, reason), count in sorted(frequent)]
    if num_others := counts.total() - sum(count for _, count in frequent):
        rows.append(("other reasons", str(num_others), f"{len(counts) - len(frequent)} of them"))
    title = f"Episodes of {records[0].stage}, step {records[0].step}"
    table = Table(title="Outcomes", header=("outcome", "episodes", "reason"), rows=tuple(rows))
    return [ReportSection(title=title, tables=(table,))]


def build_call_tables(rows: Sequence[Mapping[str, Any]]) -> list[ReportSection]:
    """Build the tables of tool calls, per tool and per data source: means over the last tenth of the steps."""
    newest = rows[-max(1, len(rows) // 10) :]
    tables = []
    for kind, title in (("tool", "By tool"), ("source", "By data source")):
        # A name may hold slashes; its key ends with the name of a column.
        pattern = re.compile(rf"{kind}/(.+)/({'|'.join(name for name, _, _ in CALL_COLUMNS)})")
        values: defaultdict[str, defaultdict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for row in newest:
            for key, value in row.items():
                if (match := pattern.fullmatch(key)) and is_finite_number(value):
                    values[match[1]][match[2]].append(value)
        cells = tuple(
            (name, *(format(fmean(own[key]), style) if own[key] else "–" for key, _, style in CALL_COLUMNS))
            for name, own in sorted(values.items())
        )
        if cells:
            tables.append(Table(title=title, header=("", *(label for _, label, _ in CALL_COLUMNS)), rows=cells))
    if not tables:
        return []
    steps = f"step {newest[-1]['step']}" if len(newest) == 1 else f"steps {newest[0]['step']} to {newest[-1]['step']}"
    note = (
        f"Means over {steps} of RL, in training rollouts. The last column is no effect: the model chooses when to call."
    )
    return [ReportSection(title="Tool calls", notes=(note,), tables=tuple(tables))]


def build_training_tables(folder: Path, stages: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[ReportSection]:
    """Build tables of a run's progress, alarms and validations; [] for a run without a training."""
    recipe_file = folder / "recipe.yaml"
    trained = [stage for stage in ("sft", "rl") if stages.get(stage) or stages.get(f"{stage}_validation")]
    if not trained or not recipe_file.is_file():
        return []
    recipe = load_recipe(str(recipe_file))
    planned = {"sft": recipe.sft.steps, "rl": recipe.rl.steps}
    progress, alarms, validations = list[tuple[str, ...]](), list[tuple[str, ...]](), list[tuple[str, ...]]()
    for stage in trained:
        steps, validation_rows = stages.get(stage, ()), stages.get(f"{stage}_validation", ())
        raised = find_alarms(recipe.alarms, steps, validation_rows)
        alarms += [(stage, str(step), name, text, recipe.alarms[name].action) for step, name, text in raised]
        validations += [(stage, *cells) for row in validation_rows for cells in _format_validation(row)]
        is_finished = (folder / "finished_stages" / f"{stage}.json").is_file()
        last = steps[-1]["step"] if steps else 0
        # A validation beside the training may raise an alarm some steps later: its mark then begins in the last row.
        marks = [{name for name in recipe.alarms if row.get(f"{ALARM_PREFIX}{name}")} for row in steps[-2:]]
        begun = marks[-1].difference(*marks[:-1]) if marks else set[str]()
        stops = [
            name for step, name, _ in raised if (step == last or name in begun) and recipe.alarms[name].action == "stop"
        ]
        status = f"stopped by the alarm {stops[0]}" if stops else "unfinished"
        best = folder / stage / BEST_LINK
        kept = ", ".join(str(saved.step) for saved in list_checkpoints(folder / stage))
        kept += f"; best: {best.resolve().name}" if best.is_symlink() and best.exists() else ""
        done = f"{last} of {planned[stage]}"
        progress.append((stage, done, "finished" if is_finished else status, kept or "none"))
    tables = [Table(title="Progress", header=("stage", "steps", "status", "checkpoints"), rows=tuple(progress))]
    if alarms:
        columns = ("stage", "step", "alarm", "reason", "action")
        tables.append(Table(title="Alarms", header=columns, rows=tuple(alarms)))
    if validations:
        names = ("stage", "step", "mode", "accuracy", "format compliance", "tasks / media")
        tables.append(Table(title="Validations", header=names, rows=tuple(validations)))
    return [ReportSection(title="Training", tables=tuple(tables))]


def find_alarms(
    rules: Mapping[str, AlarmConfig],
    rows: Sequence[Mapping[str, Any]],
    validation_rows: Sequence[Mapping[str, Any]] = (),
) -> list[tuple[int, str, str]]:
    """Return step, name and reason of each alarm that a stage's rows raise, in order of steps."""
    # The validation of a step follows the step's own row.
    ordered = [*((row["step"], 0, row) for row in rows)]
    ordered += [(row["step"], 1, prefix_validation(row)) for row in validation_rows]
    alarms = {name: Alarm(rule) for name, rule in rules.items()}
    return [
        (step, name, alarm.describe())
        for step, _, row in sorted(ordered, key=lambda item: item[:2])
        for name, alarm in alarms.items()
        if alarm.update(row)
    ]


def _format_validation(row: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return step, mode, accuracy, format compliance, and tasks / media of each mode of a validation."""
    modes = [name.partition("/")[0] for name in row if name.endswith("/episodes")]
    return [
        (
            str(row["step"]),
            mode,
            _format_interval(row, f"{mode}/accuracy"),
            _format_interval(row, f"{mode}/format_compliance"),
            f"{row.get(f'{mode}/tasks', 0):g} / {row.get(f'{mode}/clusters', 0):g}",
        )
        for mode in modes
    ]


def _format_interval(row: Mapping[str, Any], name: str) -> str:
    mean, low, high = (row.get(key) for key in (name, f"{name}/low", f"{name}/high"))
    return "–" if mean is None or low is None or high is None else format_interval(mean, (low, high))
