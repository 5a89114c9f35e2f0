"""Report a run's benchmarks: all results of its folder, with published scores for reference."""

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from saccade.engines.sampling_filters import NEUTRAL_VALUES
from saccade.evaluation.benchmark_result import BenchmarkResult, read_benchmark_results
from saccade.metrics.statistics import Interval
from saccade.metrics.tables import Bar, Table, format_interval
from saccade.utils.files import convert_file_errors, write_atomically, write_text
from saccade.utils.jsonl import write_json

if TYPE_CHECKING:
    from saccade.reporting.plots import Figure

READING_GUIDE = (
    "Every question stays in the denominator: errors, unparsed and undecided answers count 0. Intervals are 95 %, "
    "over clusters: the questions of one video, or the variants of one problem. A limited sample has equally many "
    "questions of every stratum; the estimate of the full set weights each by its stratum's size. Dotted marks are "
    "published values."
)
COST_NOTE = (
    "Means over all episodes, sub-agents included; text tokens are all prompt and sampled tokens that aren't visual. "
    "Seconds are wall time per question while other questions run concurrently."
)

COMPARABILITY_WARNING = (
    "Published values were measured by others under other conditions (prompts, frames, decoding, answer parsing): "
    "use them for orientation; a difference from them proves nothing."
)
# The conditions that a reader needs beside the score; all of them are in a folded table.
HEADER_CONDITIONS = (
    "environment",
    "environment.prompt_format",
    "tools",
    "temperature",
    *NEUTRAL_VALUES,
    "samples",
    "frames",
)
REFERENCE_SCORES_FILE = Path(__file__).parent / "static" / "reference_scores.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceScore:
    """Record a published value in percent with its source; `is_ablation` marks a variant of a system."""

    benchmark: str
    metric: str
    model: str
    value: float
    source: str
    is_ablation: bool = False
    visual_tokens: float | None = None  # per question; None if unknown
    note: str = ""


References = Mapping[str, Sequence[ReferenceScore]]  # by benchmark


def get_reference_scores(benchmark: str) -> list[ReferenceScore]:
    """Return the published scores of a benchmark, each with its source's full name; [] if there are none."""
    content = json.loads(REFERENCE_SCORES_FILE.read_text(encoding="utf-8"))
    return [
        ReferenceScore(**{**score, "source": content["sources"][score["source"]]})
        for score in content["values"]
        if score["benchmark"] == benchmark
    ]


def write_benchmark_report(folder: Path, *, metadata: Mapping[str, Any] | None = None) -> Path:
    """Write evaluations/benchmarks.json, .md (with a .png) and .html from all *.benchmark_result.json.

    Return the page's path. Raises DataError if no benchmark has been evaluated, RunError if a file can't be written.
    """
    # These import matplotlib, which a score in the terminal doesn't need.
    from saccade.reporting.report import Plot, Report, ReportSection, format_markdown, render_template
    from saccade.reporting.run_report import collect_metadata

    benchmark_results = read_benchmark_results(folder)
    metadata = {**(metadata or {}), **collect_metadata(folder)}
    references = {result.benchmark: get_reference_scores(result.benchmark) for result in benchmark_results.values()}
    path = folder / "evaluations" / "benchmarks"
    scores, costs, *published = build_overview_tables(benchmark_results, references)
    draw = functools.partial(plot_scores, benchmark_results, references)
    plot = Plot(title="Score against visual tokens per question", draw=draw)
    report = Report(
        kind="benchmarks",
        title=folder.resolve().name,
        metadata=metadata,
        sections=(
            ReportSection(title=scores.title, notes=(READING_GUIDE, COMPARABILITY_WARNING), tables=(scores,)),
            ReportSection(title=costs.title, notes=(COST_NOTE,), tables=(costs,), plots=(plot,)),
            *(
                ReportSection(
                    title=name, tables=(*build_evaluation_tables(name, result, references), build_example_table(result))
                )
                for name, result in benchmark_results.items()
            ),
            *(ReportSection(title=table.title, notes=(COMPARABILITY_WARNING,), tables=(table,)) for table in published),
        ),
    )
    values = {"metadata": metadata, "warning": COMPARABILITY_WARNING, "evaluations": benchmark_results}
    write_json(path.with_suffix(".json"), {**values, "reference_scores": references})
    write_text(path.with_suffix(".md"), format_markdown(report, ["benchmarks.png"]))
    picture = path.with_suffix(".png")
    with convert_file_errors(picture), write_atomically(picture, is_durable=False) as partial:
        partial.write_bytes(plot.encode("png") or b"")
    return write_text(path.with_suffix(".html"), render_template("report.html.j2", report=report))


def plot_scores(benchmark_results: Mapping[str, BenchmarkResult], references: References) -> "Figure | None":
    """Plot score against visual tokens per question; published scores with known tokens are hollow points."""
    from saccade.reporting.plots import Point, plot_points

    points = []
    for name, result in benchmark_results.items():
        label = f"{name}, estimated" if result.full_set else name
        score = result.full_set.get_score(result.primary_metric) if result.full_set else (result.score, result.interval)
        tokens, (value, (low, high)) = result.costs["visual_tokens"], score
        points.append(Point(name=label, group=result.benchmark, x=tokens, y=value, low=low, high=high))
    for benchmark, metric in {result.benchmark: result.primary_metric for result in benchmark_results.values()}.items():
        for reference in references[benchmark]:
            if reference.visual_tokens is not None and reference.metric == metric:
                label = f"{benchmark}: {reference.model} (published)"
                x, y = reference.visual_tokens, reference.value
                points.append(Point(name=label, group=benchmark, x=x, y=y, low=y, high=y, is_hollow=True))
    x_label, y_label = "visual tokens per question", "score, %, with its 95 % interval"
    return plot_points(points, x_label=x_label, y_label=y_label)


def build_overview_tables(benchmark_results: Mapping[str, BenchmarkResult], references: References) -> list[Table]:
    """Build the tables over all evaluations: scores, costs and, if there are any, published scores."""
    tables = [_build_score_table(benchmark_results, references), _build_cost_table(benchmark_results)]
    rows = []
    for score in (score for scores in references.values() for score in scores):
        tokens = "–" if score.visual_tokens is None else f"{score.visual_tokens:.0f}"
        row = (score.benchmark, score.metric, score.model, str(score.value), tokens, score.source, score.note)
        rows.append(row)
    if rows:
        header = ("", "metric", "model", "%", "visual tokens", "source", "note")
        tables.append(Table(title="Published by others", header=header, rows=tuple(rows)))
    return tables


def _build_score_table(benchmark_results: Mapping[str, BenchmarkResult], references: References) -> Table:
    rows, bars = list[tuple[str, ...]](), list[Bar]()

    def add_row(name: str, label: str, score: float, interval: Interval, others: Sequence[ReferenceScore]) -> None:
        rows.append((name, label, format_interval(score, interval), _format_models(others)))
        marks = tuple((f"{other.model} {other.value} (published)", other.value) for other in others)
        bars.append(Bar(value=score, low=interval[0], high=interval[1], maximum=100.0, marks=marks))

    for name, result in benchmark_results.items():
        metric, others = result.primary_metric, _find_others(references, result, result.primary_metric)
        upper_bound = f" (at most {result.upper_bounds[metric]:.2f})" if result.undecided else ""
        # Published scores are of the full set, so they are in the row of its estimate.
        label = f"{metric}, {result.scoring_label}{upper_bound}"
        add_row(name, label, result.score, result.interval, [] if result.full_set else others)
        counts = (
            result.num_tasks,
            result.num_answers,
            result.num_clusters,
            result.errors,
            result.unparsed,
            result.undecided,
        )
        rows[-1] += tuple(map(str, counts))
        if result.full_set:
            label = f"{metric}, {result.scoring}, of all {result.full_set.num_questions}, estimated"
            add_row(name, label, *result.full_set.get_score(metric), others)
            rows[-1] += ("",) * len(counts)
    columns = ("questions", "answers", "clusters", "errors", "unparsed", "undecided")
    header = ("", "metric", "%", "published by others", *columns)
    return Table(title="Scores", header=header, rows=tuple(rows), bars=tuple(bars))


def _build_cost_table(benchmark_results: Mapping[str, BenchmarkResult]) -> Table:
    columns = {
        "calls": ("tool calls", ".2f"),
        "frac_with_tool_call": ("with calls", ".0%"),
        "turns": ("turns", ".2f"),
        "visual_tokens": ("visual tokens", ".0f"),
        "text_tokens": ("text tokens", ".0f"),
        "seconds": ("seconds", ".2f"),
    }
    rows = tuple(
        (name, *(format(result.costs[key], style) for key, (_, style) in columns.items()))
        for name, result in benchmark_results.items()
    )
    return Table(title="Cost per question", header=("", *(label for label, _ in columns.values())), rows=rows)


def build_evaluation_tables(name: str, benchmark_result: BenchmarkResult, references: References) -> list[Table]:
    """Build the tables of one evaluation: metrics, counts, conditions and strata."""
    rows = [
        [
            metric,
            format_interval(value, benchmark_result.intervals[metric]),
            format_interval(*benchmark_result.full_set.get_score(metric)) if benchmark_result.full_set else "",
            _format_models(_find_others(references, benchmark_result, metric)),
        ]
        for metric, value in benchmark_result.metrics.items()
    ]
    rows += [[rate, f"{value:.2f}", "–", "–"] for rate, value in benchmark_result.at_k.items()]
    if benchmark_result.undecided:
        upper_bound = f"{benchmark_result.upper_bounds[benchmark_result.primary_metric]:.2f}"
        rows.append([f"{benchmark_result.primary_metric}, at most", upper_bound, "–", "–"])
    size = benchmark_result.full_set.num_questions if benchmark_result.full_set else 0
    label = f"% of the {benchmark_result.num_tasks} evaluated" if size else "%"
    header = ["", label, f"% of all {size}, estimated", "published by others"]
    columns = [0, 1, *([2] if size else []), *([3] if references else [])]
    header, *rows = ([line[column] for column in columns] for line in (header, *rows))
    metrics = Table(
        title=f"{name} ({benchmark_result.scoring_label})", header=tuple(header), rows=tuple(map(tuple, rows))
    )
    tables = [metrics, Table(title=f"{name}, counts", header=("", ""), rows=tuple(_iterate_counts(benchmark_result)))]
    if benchmark_result.conditions:
        conditions = tuple(benchmark_result.conditions.items())
        tables.append(Table(title=f"{name}, conditions", header=("", ""), rows=conditions, is_folded=True))
    for stratum, cells in benchmark_result.strata.items():
        intervals, clusters = (
            benchmark_result.stratum_intervals[stratum],
            benchmark_result.stratum_clusters.get(stratum, {}),
        )
        cell_rows = tuple(
            (row, f"{cell.n} / {clusters.get(row, '–')}", format_interval(cell.value, intervals[row]))
            for row, cell in cells.items()
        )
        tables.append(
            Table(title=f"{name}, by {stratum}", header=("", "questions / clusters", "mean, %"), rows=cell_rows)
        )
    return tables


def build_example_table(benchmark_result: BenchmarkResult) -> Table:
    """Build the table of example answers, failures first."""
    rows = []
    for example in benchmark_result.examples:
        extracted = "–" if example.extracted is None else example.extracted
        question = (example.task_id, example.category, example.question, example.ground_truth)
        rows.append((*question, extracted, example.response))
    header = ("id", "", "question", "ground truth", "extracted", "response")
    return Table(title="Example answers, failures first", header=header, rows=tuple(rows), is_folded=True)


def _iterate_counts(benchmark_result: BenchmarkResult) -> Iterator[tuple[str, str]]:
    """Yield the main settings, counts of questions, answers and failures, and the judge."""
    full_set, conditions = benchmark_result.full_set, benchmark_result.conditions
    if settings := [f"{name} {conditions[name]}" for name in HEADER_CONDITIONS if name in conditions]:
        yield "settings", ", ".join(settings)
    yield "questions", f"{benchmark_result.num_tasks}{f' of {full_set.num_questions}' if full_set else ''}"
    yield "clusters (videos or problems)", str(benchmark_result.num_clusters)
    if full_set and full_set.uncovered:
        yield "in strata that the sample leaves out", f"{full_set.uncovered:.0%}, estimated from neighboring strata"
    if benchmark_result.num_answers != benchmark_result.num_tasks:
        yield "answers", str(benchmark_result.num_answers)
    yield "errors, counted as wrong", str(benchmark_result.errors)
    if benchmark_result.reason:
        yield "the first error", benchmark_result.reason
    yield "unparsed", str(benchmark_result.unparsed)
    if benchmark_result.judge:
        yield "judge", benchmark_result.judge
    if benchmark_result.undecided:
        yield (
            "without a verdict" if benchmark_result.judge else "for a judge to decide",
            str(benchmark_result.undecided),
        )


def _find_others(references: References, benchmark_result: BenchmarkResult, metric: str) -> list[ReferenceScore]:
    scores = references.get(benchmark_result.benchmark, ())
    return [score for score in scores if score.metric == metric and not score.is_ablation]


def _format_models(scores: Sequence[ReferenceScore]) -> str:
    return "; ".join(f"{score.model} {score.value}" for score in scores) or "–"
