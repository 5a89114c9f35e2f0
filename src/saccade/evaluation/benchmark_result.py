"""Compute the result of a benchmark: its metrics with intervals, the cost per question, and example answers.

Intervals are 95 % intervals over the benchmark's clusters (`Benchmark.cluster_key`): questions about one video, or
variants of one problem, form one cluster, so that dependent questions don't narrow the interval. The jackknife
recomputes the published metrics without each cluster, so the intervals hold for every metric, not only for means.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean

import numpy as np

from saccade.config.schema import Recipe
from saccade.engines.sampling_filters import NEUTRAL_VALUES
from saccade.errors import DataError
from saccade.evaluation.benchmarks.answer_extraction import extract_final_answer
from saccade.evaluation.benchmarks.base import (
    Benchmark,
    Grade,
    GradedAnswer,
    MetricsFn,
    Scoring,
    StratumScore,
    group_by_label,
    tabulate,
)
from saccade.evaluation.subset import StratifiedWeights
from saccade.metrics.episode_metrics import average_behavior, estimate_at_k
from saccade.metrics.statistics import Interval, compute_interval, estimate_clustered_mean
from saccade.rollouts.components import apply_evaluation_settings, uses_chat_engine
from saccade.types import ScoredEpisode
from saccade.utils.hashing import compute_digest
from saccade.utils.jsonl import read_json, write_json

MAX_JACKKNIFE_GROUPS = 1000  # each recomputes every metric of the benchmark
PERCENT_BOUNDS: Interval = (0.0, 100.0)
NUM_EXAMPLES = 4  # answers per category
ANSWER_CATEGORIES = ("error", "unparsed", "undecided", "wrong", "partly", "right")
RESULT_SUFFIX = ".benchmark_result.json"
RESULT_HINT = "delete it and evaluate again"
BEHAVIOR_COSTS = ("calls", "frac_with_tool_call", "turns", "visual_tokens")
COSTS = (*BEHAVIOR_COSTS, "text_tokens", "seconds")
LIMITED_SAMPLE = "a limited sample"
LIMITED_SAMPLE_NOTE = (
    "rows of a table have equally many questions, regardless of their sizes; "
    "an estimate of the full set weights them by size"
)
MAX_TEXT_CHARS = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerExample:
    """Show one answer: `category` is one of `ANSWER_CATEGORIES`, `extracted` is what the grading rule parsed."""

    category: str
    task_id: str
    question: str
    ground_truth: str
    response: str
    extracted: str | None
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FullSetEstimate:
    """Estimate the metrics of the full benchmark of `num_questions` from a limited sample, in percent, with intervals.

    `uncovered` is the fraction of questions in strata without a sampled question; see `evaluation.subset`.
    """

    num_questions: int
    uncovered: float
    metrics: Mapping[str, float]
    intervals: Mapping[str, Interval]

    def get_score(self, metric: str) -> tuple[float, Interval]:
        """Return the estimate of a metric with its interval."""
        return self.metrics[metric], self.intervals[metric]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkResult:
    """Report a benchmark's numbers over the `num_answers` answers to its `num_tasks` tasks in `num_clusters` clusters.

    If some answers are `undecided`, `metrics` is the lower bound and `upper_bounds` the upper (else both are equal).
    With several samples per task the metrics are means over samples, errors and the like are counted over all samples,
    and `at_k` holds avg@k and pass@k of the tasks' values. `intervals` belong to `metrics`, `stratum_intervals` and
    the numbers of clusters `stratum_clusters` to `strata`, all metrics in percent. `conditions` describe the
    evaluation; `costs` are means per answer, failed episodes included, where `text_tokens` are all tokens that are not
    visual. If a limit selected the questions, `full_set` estimates the metrics over all of them.
    """

    benchmark: str
    scoring: str
    num_tasks: int
    num_answers: int
    errors: int
    unparsed: int
    undecided: int
    primary_metric: str
    metrics: Mapping[str, float]
    upper_bounds: Mapping[str, float]
    strata: Mapping[str, Mapping[str, StratumScore]]
    at_k: Mapping[str, float] = field(default_factory=dict)
    judge: str = ""  # the model that decided undecided answers
    reason: str = ""  # the first error
    num_clusters: int = 0  # 0 without intervals
    conditions: Mapping[str, str] = field(default_factory=dict)
    intervals: Mapping[str, Interval] = field(default_factory=dict)
    stratum_intervals: Mapping[str, Mapping[str, Interval]] = field(default_factory=dict)
    stratum_clusters: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    costs: Mapping[str, float] = field(default_factory=dict)
    examples: tuple[AnswerExample, ...] = ()
    full_set: FullSetEstimate | None = None

    @property
    def score(self) -> float:
        """Return the primary metric."""
        return self.metrics[self.primary_metric]

    @property
    def interval(self) -> Interval:
        """Return the interval of the primary metric."""
        return self.intervals[self.primary_metric]

    @property
    def scoring_label(self) -> str:
        """Return the scoring mode, marked as a limited sample if a limit applied: such a score is not comparable."""
        return f"{self.scoring}, {LIMITED_SAMPLE}" if LIMITED_SAMPLE in self.conditions else self.scoring


def build_plain_result(
    benchmark: Benchmark, results: Sequence[GradedAnswer], *, scoring: Scoring = "strict", judge: str = ""
) -> BenchmarkResult:
    """Compute metrics and tables; several results of one task are its samples. Raises DataError without a result."""
    if not results:
        raise DataError(f"{benchmark.name} has no result to report; run the evaluation first", key=benchmark.name)
    values: defaultdict[str, list[float]] = defaultdict(list)  # by task
    for result in results:
        values[result.task.id].append(result.value)
    # The upper bound: every undecided answer is right.
    best = [
        replace(result, grade=Grade(extracted=result.grade.extracted, value=1.0)) if result.is_undecided else result
        for result in results
    ]
    errors = [result.answer.error for result in results if result.answer.error is not None]
    return BenchmarkResult(
        benchmark=benchmark.name,
        scoring=scoring,
        num_tasks=len(values),
        num_answers=len(results),
        errors=len(errors),
        unparsed=sum(result.is_unparsed for result in results),
        undecided=sum(result.is_undecided for result in results),
        primary_metric=benchmark.primary_metric,
        metrics=average_over_samples(benchmark.compute_metrics, results),
        upper_bounds=average_over_samples(benchmark.compute_metrics, best),
        strata={name: tabulate(results, stratum_fn) for name, stratum_fn in benchmark.strata.items()},
        at_k={name: 100 * rate for name, rate in estimate_at_k([*values.values()]).items()},
        judge=judge,
        reason=truncate_text(errors[0]) if errors else "",
    )


def build_benchmark_result(
    benchmark: Benchmark,
    scored: Sequence[ScoredEpisode],
    results: Sequence[GradedAnswer],
    *,
    scoring: Scoring = "strict",
    judge: str = "",
    conditions: Mapping[str, str] | None = None,
    stratified_weights: StratifiedWeights | None = None,
) -> BenchmarkResult:
    """Build the whole result; `conditions` describe the evaluation. Raises DataError without a result."""
    benchmark_result = build_plain_result(benchmark, results, scoring=scoring, judge=judge)
    rows_by_stratum = {name: group_by_label(results, fn) for name, fn in benchmark.strata.items()}
    clusters, full_set = [benchmark.cluster_key(result.task) for result in results], None
    if stratified_weights is not None:
        weighted = [replace(result, weight=stratified_weights.weights[result.task.id]) for result in results]
        full_set = FullSetEstimate(
            num_questions=stratified_weights.full_set_size,
            uncovered=stratified_weights.uncovered,
            metrics=average_over_samples(benchmark.compute_metrics, weighted),
            intervals=compute_intervals(weighted, clusters, benchmark.compute_metrics),
        )
    return replace(
        benchmark_result,
        num_clusters=len({*clusters}),
        conditions=dict(conditions or {}),
        intervals=compute_intervals(results, clusters, benchmark.compute_metrics),
        stratum_intervals={
            name: {label: _compute_row_interval(row, benchmark) for label, row in rows.items()}
            for name, rows in rows_by_stratum.items()
        },
        stratum_clusters={
            name: {label: len({benchmark.cluster_key(result.task) for result in row}) for label, row in rows.items()}
            for name, rows in rows_by_stratum.items()
        },
        costs=compute_costs(scored),
        examples=select_examples(results),
        full_set=full_set,
    )


def describe_conditions(recipe: Recipe, checkpoint: Path | None) -> dict[str, str]:
    """Describe the model and the settings of a benchmark's evaluation, which a reader needs to compare scores.

    A benchmark's tasks name no environment, so they use the default one.
    """
    evaluation = recipe.evaluation
    environment_settings = apply_evaluation_settings(recipe).environment.settings
    engine = recipe.engine.settings
    neutral_values = {**NEUTRAL_VALUES, "extra_body": {}}
    is_chat = uses_chat_engine(recipe)
    conditions = {
        "model": f"{engine['model']} at {engine['url']}" if is_chat else str(checkpoint or recipe.model.path),
        **({"tokens": "estimated: the server has a chat API"} if is_chat else {}),
        "environment": recipe.environment.name,
        **{f"environment.{name}": truncate_text(str(value)) or "none" for name, value in environment_settings.items()},
        "tools": "on" if evaluation.use_tools else "off",
        "temperature": f"{evaluation.temperature:g}",
        **{name: str(engine[name]) for name, neutral in neutral_values.items() if engine.get(name, neutral) != neutral},
        "tokens per reply": str(recipe.sampling.max_tokens),
        "seed": str(recipe.seed),
    }
    if evaluation.frame_budgets:
        conditions["frames"] = ", ".join(map(str, evaluation.frame_budgets))
    if evaluation.num_samples > 1:
        conditions["samples"] = f"{evaluation.num_samples} per question"
    if evaluation.shuffle_options:
        conditions["options"] = "shuffled for each sample"
    if evaluation.num_tasks:
        conditions |= {"at most": f"{evaluation.num_tasks} questions", LIMITED_SAMPLE: LIMITED_SAMPLE_NOTE}
    return conditions


def write_benchmark_result(results: Path, benchmark_result: BenchmarkResult) -> Path:
    """Write the result of an evaluation next to its results file."""
    return write_json(results.with_suffix(RESULT_SUFFIX), benchmark_result)


def read_benchmark_results(folder: Path) -> dict[str, BenchmarkResult]:
    """Return a run's results of benchmarks by the names of their evaluations, in order.

    Raises DataError for none or a bad one.
    """
    paths = sorted((folder / "evaluations").glob(f"*{RESULT_SUFFIX}"))
    if not paths:
        raise DataError(
            f"{folder} contains no benchmark evaluation; run `saccade eval {folder} --benchmarks …` first",
            key=str(folder),
        )
    return {path.name.removesuffix(RESULT_SUFFIX): read_benchmark_result(path) for path in paths}


def read_benchmark_result(path: Path) -> BenchmarkResult:
    """Return the result of a file. Raises DataError if it is invalid, or lacks a number that its tables show."""
    result = read_json(path, BenchmarkResult, hint=RESULT_HINT)
    if missing := _find_missing(result):
        raise DataError(f"{path} has no {missing}; {RESULT_HINT}", key=str(path), value=missing)
    return result


def _find_missing(result: BenchmarkResult) -> str:
    """Return the first number that the tables of a result need and it lacks, such as "costs.turns"; "" for none."""
    metrics = (result.primary_metric, *result.metrics)
    parts: list[tuple[str, Collection[str], Iterable[str]]] = [
        ("metrics", result.metrics, metrics),
        ("upper_bounds", result.upper_bounds, metrics[:1]),
        ("intervals", result.intervals, metrics),
        ("costs", result.costs, COSTS),
        ("stratum_intervals", result.stratum_intervals, result.strata),
    ]
    parts += [
        (f"stratum_intervals.{name}", result.stratum_intervals.get(name, {}), rows)
        for name, rows in result.strata.items()
    ]
    if result.full_set is not None:
        parts += [
            ("full_set.metrics", result.full_set.metrics, metrics),
            ("full_set.intervals", result.full_set.intervals, metrics),
        ]
    return next((f"{part}.{name}" for part, values, names in parts for name in names if name not in values), "")


def average_over_samples(metrics_fn: MetricsFn, results: Sequence[GradedAnswer]) -> dict[str, float]:
    """Compute the metrics over the first samples of all tasks, over the second ones and so on, and average them.

    A rate, such as accuracy over answered questions, is then the mean of the rates of single evaluations.
    """
    by_sample: defaultdict[int, list[GradedAnswer]] = defaultdict(list)
    for result in results:
        by_sample[result.sample_index].append(result)
    values_by_metric: defaultdict[str, list[float]] = defaultdict(list)
    for sample in by_sample.values():
        for name, value in metrics_fn(sample).items():
            values_by_metric[name].append(value)
    return {name: fmean(values) for name, values in values_by_metric.items()}


def compute_intervals(
    results: Sequence[GradedAnswer], clusters: Sequence[str], metrics_fn: MetricsFn
) -> dict[str, Interval]:
    """Return the 95 % interval of each number of `metrics_fn`; `clusters[i]` is the cluster of `results[i]`.

    `metrics.statistics.compute_interval` over the clusters' pseudo-values of the jackknife (Efron and Tibshirani 1993,
    section 11.5): x_c = T + (C - 1) (mean of T_-c over c - T_-c), where T is the metric and T_-c the metric without
    cluster c. For a mean over equally large clusters, x_c is the cluster's mean. More than MAX_JACKKNIFE_GROUPS
    clusters are left out in groups. A metric that doesn't exist without one of them has this single cluster.
    """
    names, metrics = sorted({*clusters}), average_over_samples(metrics_fn, results)
    num_groups = min(len(names), MAX_JACKKNIFE_GROUPS)
    group_of = {name: index % num_groups for index, name in enumerate(names)}
    metrics_without = [
        average_over_samples(
            metrics_fn, [result for result, name in zip(results, clusters, strict=True) if group_of[name] != group]
        )
        for group in range(num_groups if num_groups > 1 else 0)
    ]
    intervals = {}
    for name, value in metrics.items():
        pseudo_values = np.array([value])
        if metrics_without and all(name in others for others in metrics_without):
            left_out = np.array([others[name] for others in metrics_without])
            pseudo_values = value + (num_groups - 1) * (left_out.mean() - left_out)
        intervals[name] = compute_interval(pseudo_values, bounds=PERCENT_BOUNDS)
    return intervals


def _compute_row_interval(row: Sequence[GradedAnswer], benchmark: Benchmark) -> Interval:
    """Return the interval of a row of a stratum's table."""
    clusters = [benchmark.cluster_key(result.task) for result in row]
    estimate = estimate_clustered_mean([100 * result.value for result in row], clusters, bounds=PERCENT_BOUNDS)
    return estimate.low, estimate.high


def compute_costs(scored: Sequence[ScoredEpisode]) -> dict[str, float]:
    """Return the mean costs over episodes, including those of their sub-agents."""
    behavior, usages = average_behavior(scored), [outcome.episode.usage for outcome in scored]
    return {
        **{name: behavior[name] for name in BEHAVIOR_COSTS},
        "text_tokens": fmean(usage.unsampled_tokens + usage.sampled_tokens - usage.visual_tokens for usage in usages),
        "seconds": fmean(usage.seconds for usage in usages),
    }


def select_examples(results: Sequence[GradedAnswer]) -> tuple[AnswerExample, ...]:
    """Select a few answers per category, failures first; the selection depends only on the tasks."""
    by_category: dict[str, list[GradedAnswer]] = {category: [] for category in ANSWER_CATEGORIES}
    for result in sorted(results, key=lambda result: compute_digest("shown", result.task.id, result.sample_index)):
        by_category[_classify_answer(result)].append(result)
    return tuple(
        _build_example(category, result) for category, row in by_category.items() for result in row[:NUM_EXAMPLES]
    )


def _classify_answer(result: GradedAnswer) -> str:
    if result.answer.error is not None:
        return "error"
    if result.is_undecided:
        return "undecided"
    if result.is_unparsed:
        return "unparsed"
    return "wrong" if result.value <= 0 else "right" if result.value >= 1 else "partly"


def _build_example(category: str, result: GradedAnswer) -> AnswerExample:
    ground_truth, extracted, text = result.task.ground_truth, result.grade.extracted, result.answer.text
    bounds = ground_truth if isinstance(ground_truth, tuple) else (ground_truth,)
    return AnswerExample(
        category=category,
        task_id=result.task.id,
        question=truncate_text(result.task.question),
        ground_truth=truncate_text(" – ".join(map(str, bounds))),
        response=truncate_text(result.answer.error or extract_final_answer(text) or text),
        extracted=None if extracted is None else truncate_text(extracted),
        value=result.value,
    )


def truncate_text(text: str) -> str:
    """Shorten a text of a model or dataset for display and replace lone surrogates, which no file can hold."""
    # Lone surrogates can't be written to a file.
    plain = text.strip().encode("utf-8", "replace").decode()
    return plain if len(plain) <= MAX_TEXT_CHARS else plain[:MAX_TEXT_CHARS] + "…"
