"""Compute metrics from episodes: means with intervals, tables by slice, and one row of numbers per training step.

Pure functions: the same episodes give the same numbers, in any order. Denominators are fixed: a failed or unanswered
episode scores 0 and is counted. Intervals are over files: see `metrics.statistics`.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean

import numpy as np

from saccade.data.option_shuffle import restore_options
from saccade.errors import DataError
from saccade.metrics.looking import BaselinePolicy, average_policies, compute_looking_metrics
from saccade.metrics.statistics import (
    DIFFERENCE_BOUNDS,
    Estimate,
    average_by_cluster,
    count_signs,
    estimate_clustered_mean,
    explain_insignificance,
    get_media_key,
)
from saccade.metrics.tool_metrics import compute_tool_metrics
from saccade.types import CallFormat, Episode, EpisodeStatus, Group, ScoredEpisode, Task

SOLVED_THRESHOLD = 0.5  # an accuracy of this or more counts as solved
ERROR_STATUSES = frozenset({EpisodeStatus.ENVIRONMENT_ERROR, EpisodeStatus.ABORTED})

SliceFn = Callable[[ScoredEpisode], str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference(Estimate):
    """Record after minus before over the `n` tasks in both evaluations, in `num_clusters` clusters.

    `insignificance_reason` is why the difference is not significant, "" if it is
    (`statistics.explain_insignificance`); `unpaired` counts tasks in only one evaluation.
    """

    is_significant: bool
    insignificance_reason: str
    better: int
    worse: int
    unpaired: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceRow:
    """Record the accuracy on a slice of the tasks; `constant_baseline` is the best constant answer's, if known."""

    name: str
    accuracy: Estimate
    constant_baseline: float | None
    calls: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Summarize an evaluation; rates are per episode, `statuses` are fractions of the episodes."""

    num_tasks: int
    num_clusters: int
    num_episodes: int
    accuracy: Estimate
    constant_baseline: float | None
    format_compliance: Estimate
    calls: float
    executed: float
    succeeded: float
    frac_with_tool_call: float
    turns: float
    sampled_tokens: float
    visual_tokens: float
    seconds: float
    errors: int
    unanswered: int
    ungraded: int
    statuses: Mapping[str, float]
    slices: Mapping[str, tuple[SliceRow, ...]]
    at_k: Mapping[str, float] = field(default_factory=dict)
    undecided: int = 0  # answers that need a judge and have no verdict: they count 0
    full_set_accuracy: Estimate | None = None  # over all `full_set_size` tasks, if a limit selected some
    full_set_size: int = 0
    full_set_uncovered: float = 0.0  # the fraction of all tasks in strata without a sampled task
    # means of the metrics `looking/NAME`, by NAME; {} unless a task has `extras.evidence`
    looking: Mapping[str, float] = field(default_factory=dict)
    # baseline policies by name; {} unless every task has them
    policies: Mapping[str, BaselinePolicy] = field(default_factory=dict)


def has_failed(episode: Episode) -> bool:
    """Return whether the episode failed for a reason other than the model, or its prompt exceeded the context."""
    return episode.status in ERROR_STATUSES or (episode.status is EpisodeStatus.CONTEXT_FULL and not episode.turns)


def has_usable_episode(groups: Iterable[Group]) -> bool:
    """Return whether an episode has a score and didn't fail; one whose prompt exceeded the context has no turn."""
    return any(not has_failed(scored.episode) for group in groups for scored in group.scored_episodes)


def count_tokens(groups: Iterable[Group]) -> int:
    """Return the tokens of all conversations, a measure of their memory; images are on disk."""
    episodes = (episode for group in groups for scored in group.members for episode in scored.episode.walk())
    return sum(len(episode.ledger) for episode in episodes)


def get_task_digest(scored: ScoredEpisode) -> str:
    """Return the digest of the task, the same for all orders of its options."""
    return restore_options(scored.episode.task).digest


def get_accuracy(scored: ScoredEpisode) -> float:
    """Return the accuracy of an episode in [0, 1]; 0 if it failed."""
    return 0.0 if has_failed(scored.episode) else scored.score.correct or 0.0


def get_format_compliance(scored: ScoredEpisode) -> float:
    """Return 1.0 if every turn of the episode is well formed (`rewards.format_compliance`), else 0.0."""
    return scored.score.parts.get("format_compliance", 0.0)


def count_calls(episode: Episode) -> int:
    """Count the calls that the main agent wrote, malformed ones included."""
    return sum(len(turn.reply.calls) for turn in episode.turns)


def count_python_style_calls(episode: Episode) -> int:
    """Count the main agent's calls written in Python style instead of the native format."""
    return sum(call.call_format is CallFormat.PYTHON_STYLE for turn in episode.turns for call in turn.reply.calls)


def get_question_type(task: Task) -> str | None:
    """Return the question type that the dataset names, if any."""
    question_type = task.extras.get("question")
    return question_type if isinstance(question_type, str) else None


def has_run_tools(scored: Iterable[ScoredEpisode]) -> bool:
    """Return whether any call was executed: a model can write calls without having tools."""
    return any(result.was_executed for outcome in scored for result in outcome.episode.results)


def get_overview_times(episode: Episode) -> tuple[float, ...]:
    """Return the times (seconds) of the frames in the prompt."""
    slots = episode.ledger.segments[0].slots if episode.ledger.segments else ()
    frames = [frame for slot in slots for frame in slot.image.frames]
    return tuple(frame.time for frame in frames if frame.time is not None)


def is_undecided(scored: ScoredEpisode) -> bool:
    """Return whether the answer needs a judge and has no verdict; its accuracy is 0 until then."""
    return bool(scored.score.parts.get("undecided"))


def compute_paired_difference(
    before: Sequence[ScoredEpisode],
    after: Sequence[ScoredEpisode],
    *,
    weights: Mapping[str, float] | None = None,
    clusters: Mapping[str, str] | None = None,
) -> Difference:
    """Return the difference in accuracy, after minus before, with an interval over the clusters of the shared tasks.

    Samples of one task are averaged first; `weights` and `clusters` are those of `estimate_clustered_mean`; tasks about
    the same files form a cluster by default. Raises DataError if no task is in both.
    """
    # Pairing removes the variance between tasks, which is most of it.
    old, new = average_by_task(before), average_by_task(after)
    shared = sorted(old.keys() & new.keys())
    if not shared:
        raise DataError(
            "the two evaluations share no task, so they can't be paired; compare evaluations of the same tasks",
            key="tasks",
        )
    deltas = [new[task] - old[task] for task in shared]
    clusters = clusters or assign_clusters(before)
    estimate = estimate_clustered_mean(deltas, shared, weights=weights, clusters=clusters, bounds=DIFFERENCE_BOUNDS)
    deltas_C, _ = average_by_cluster(deltas, shared, weights=weights, clusters=clusters)
    insignificance_reason, (better, worse) = (
        explain_insignificance(deltas_C, (estimate.low, estimate.high)),
        count_signs(deltas),
    )
    return Difference(
        **asdict(estimate),
        is_significant=not insignificance_reason,
        insignificance_reason=insignificance_reason,
        better=better,
        worse=worse,
        unpaired=len(old.keys() ^ new.keys()),
    )


def average_by_task(scored: Iterable[ScoredEpisode]) -> dict[str, float]:
    """Return the accuracy of each task, by its digest, averaged over its samples."""
    return {task: fmean(map(get_accuracy, samples)) for task, samples in group_by_task(scored).items()}


def assign_clusters(
    scored: Iterable[ScoredEpisode], cluster_key: Callable[[Task], str] = get_media_key
) -> dict[str, str]:
    """Return the cluster of each task, by digest; by default all tasks about the same files form one."""
    return {get_task_digest(outcome): cluster_key(restore_options(outcome.episode.task)) for outcome in scored}


def group_by_task(scored: Iterable[ScoredEpisode]) -> dict[str, list[ScoredEpisode]]:
    """Return the samples of each task, by its digest, in order."""
    groups: defaultdict[str, list[ScoredEpisode]] = defaultdict(list)
    for outcome in scored:
        groups[get_task_digest(outcome)].append(outcome)
    return groups


def summarize(
    scored: Sequence[ScoredEpisode],
    *,
    constant_baselines: Mapping[str, float] | None = None,
    slices: Mapping[str, SliceFn] | None = None,
    ungraded: int = 0,
    clusters: Mapping[str, str] | None = None,
) -> Summary:
    """Summarize an evaluation. `constant_baselines` are by task digest; `slices` adds tables to those by answer type,
    question type and frame budget: a function returns the row of an episode, or None. `ungraded` episodes are counted
    but in none of the means; `clusters` are those of `assign_clusters` by default. Raises DataError without an episode.
    """
    clusters, baselines = clusters or assign_clusters(scored), constant_baselines or {}
    slice_fns: dict[str, SliceFn] = {
        "answer_type": lambda outcome: outcome.episode.task.answer_type,
        "question_type": lambda outcome: get_question_type(outcome.episode.task),
        "frame_budget": lambda outcome: (
            None if outcome.episode.frame_budget is None else f"K={outcome.episode.frame_budget}"
        ),
        **(slices or {}),
    }
    return Summary(
        num_tasks=len({*map(get_task_digest, scored)}),
        num_clusters=len({clusters[get_task_digest(outcome)] for outcome in scored}),
        num_episodes=len(scored),
        accuracy=estimate_mean(scored, get_accuracy, clusters),
        constant_baseline=_average_constant_baseline(scored, baselines),
        format_compliance=estimate_mean(scored, get_format_compliance, clusters),
        slices={name: _tabulate_slices(scored, by, baselines, clusters) for name, by in slice_fns.items()},
        at_k=estimate_at_k([[*map(get_accuracy, samples)] for samples in group_by_task(scored).values()]),
        statuses=_compute_status_fractions(scored),
        errors=sum(has_failed(outcome.episode) for outcome in scored),
        unanswered=sum(outcome.episode.answer is None and not has_failed(outcome.episode) for outcome in scored),
        ungraded=ungraded,
        undecided=sum(map(is_undecided, scored)),
        seconds=fmean(outcome.episode.usage.seconds for outcome in scored),
        full_set_accuracy=None,
        full_set_size=0,
        looking={
            key.removeprefix("looking/"): value
            for key, value in compute_looking_metrics(scored, [*map(get_accuracy, scored)]).items()
        },
        policies=average_policies([restore_options(outcome.episode.task) for outcome in scored]),
        **average_behavior(scored),
    )


def _tabulate_slices(
    scored: Sequence[ScoredEpisode],
    slice_fn: SliceFn,
    constant_baselines: Mapping[str, float],
    clusters: Mapping[str, str],
) -> tuple[SliceRow, ...]:
    """Return one row per name that `slice_fn` returns, ordered by name, with frame budgets by value."""
    rows: defaultdict[str, list[ScoredEpisode]] = defaultdict(list)
    for outcome in scored:
        if (name := slice_fn(outcome)) is not None:
            rows[name].append(outcome)
    return tuple(
        SliceRow(
            name=name,
            accuracy=estimate_mean(rows[name], get_accuracy, clusters),
            constant_baseline=_average_constant_baseline(rows[name], constant_baselines),
            calls=fmean(count_calls(outcome.episode) for outcome in rows[name]),
        )
        for name in sorted(rows, key=lambda name: (len(name) if name.startswith("K=") else 0, name))
    )


def estimate_mean(
    scored: Sequence[ScoredEpisode],
    metric: Callable[[ScoredEpisode], float],
    clusters: Mapping[str, str],
    weights: Mapping[str, float] | None = None,
) -> Estimate:
    """Return the mean of a metric in [0, 1] over episodes; see `estimate_clustered_mean`."""
    tasks = list(map(get_task_digest, scored))
    return estimate_clustered_mean(list(map(metric, scored)), tasks, clusters=clusters, weights=weights)


def _average_constant_baseline(
    scored: Sequence[ScoredEpisode], constant_baselines: Mapping[str, float]
) -> float | None:
    """Return the mean baseline of these episodes' questions; None unless it is known for each."""
    baselines = [constant_baselines.get(get_task_digest(outcome)) for outcome in scored]
    return None if None in baselines else fmean(value for value in baselines if value is not None)


def average_behavior(scored: Sequence[ScoredEpisode]) -> dict[str, float]:
    """Return the mean number of calls, turns and tokens."""
    episodes = [outcome.episode for outcome in scored]
    results = [episode.results for episode in episodes]
    return {
        "calls": fmean(count_calls(episode) for episode in episodes),
        "executed": fmean(sum(result.was_executed for result in episode_results) for episode_results in results),
        "succeeded": fmean(sum(result.ok for result in episode_results) for episode_results in results),
        "frac_with_tool_call": fmean(count_calls(episode) > 0 for episode in episodes),
        "turns": fmean(len(episode.turns) for episode in episodes),
        "sampled_tokens": fmean(episode.usage.sampled_tokens for episode in episodes),
        "visual_tokens": fmean(episode.usage.visual_tokens for episode in episodes),
    }


def _compute_status_fractions(scored: Sequence[ScoredEpisode]) -> dict[str, float]:
    counts = Counter(outcome.episode.status.value for outcome in scored)
    return {status.value: counts[status.value] / len(scored) for status in EpisodeStatus if counts[status.value]}


def estimate_at_k(values: Sequence[Sequence[float]]) -> dict[str, float]:
    """Return avg@n and pass@k for k = 2, 4, 8, … and n, the smallest number of samples of any task; {} if that is one.

    `values` holds the accuracies of each task's samples. pass@k is the unbiased estimator 1 - C(m-c, k) / C(m, k) (Chen
    et al. 2021, arXiv 2107.03374, equation 1) with c of m samples solved.

    >>> estimate_at_k([(1, 0, 0), (0, 0, 0)])
    {'avg@3': 0.16666666666666666, 'pass@2': 0.33333333333333337, 'pass@3': 0.5}
    """
    n = min(map(len, values), default=1)
    if n < 2:
        return {}
    solved = [(len(accuracies), sum(value >= SOLVED_THRESHOLD for value in accuracies)) for accuracies in values]
    metrics = {f"avg@{n}": fmean(map(fmean, values))}
    # An estimate with k below the number of samples has less variance.
    for k in sorted({n, *(2**power for power in range(1, n.bit_length()) if 2**power < n)}):
        metrics[f"pass@{k}"] = fmean(1 - math.comb(m - c, k) / math.comb(m, k) for m, c in solved)
    return metrics


def compute_step_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Return the metrics of one RL step's rollouts by their keys in docs/metrics.md; {} without a scored episode."""
    scored = [member for group in groups for member in group.scored_episodes]
    if not scored:
        return {}
    graded, ungraded = (
        [group for group in groups if group.scored_episodes],
        sum(len(group.ungraded) for group in groups),
    )
    behavior = average_behavior(scored)
    metrics = {"reward": fmean(outcome.score.total for outcome in scored), "accuracy": fmean(map(get_accuracy, scored))}
    # Format compliance is its own metric, whether or not the recipe rewards it.
    parts = sorted({part for outcome in scored for part in outcome.score.parts} - {"format_compliance"})
    for part in parts:  # episodes of an environment with other rewards don't have it
        values = [outcome.score.parts[part] for outcome in scored if part in outcome.score.parts]
        metrics[f"reward/{part}"] = fmean(values)
    if any(outcome.score.credits for outcome in scored):
        metrics["credit"] = fmean(sum(credit.value for credit in outcome.score.credits) for outcome in scored)
    metrics |= _compute_slice_metrics(scored)
    metrics |= compute_tool_metrics(scored)
    metrics |= compute_looking_metrics(scored, [*map(get_accuracy, scored)])
    metrics |= {
        "format_compliance": fmean(map(get_format_compliance, scored)),
        "calls/executed": behavior.pop("executed"),
        "calls/succeeded": behavior.pop("succeeded"),
        **behavior,
        "calls/python_style": fmean(count_python_style_calls(outcome.episode) for outcome in scored),
        "response_tokens": fmean(outcome.episode.ledger.num_sampled_tokens for outcome in scored),
        **{f"status/{status}": fraction for status, fraction in _compute_status_fractions(scored).items()},
        "frac_errors": fmean(has_failed(outcome.episode) for outcome in scored),
        "frac_unanswered": fmean(
            outcome.episode.answer is None and not has_failed(outcome.episode) for outcome in scored
        ),
        "frac_ungraded": ungraded / (ungraded + len(scored)),
        "solve_rate": fmean(group.solve_rate for group in graded),
        "solved/all": fmean(group.solve_rate == 1.0 for group in graded),
        "solved/none": fmean(group.solve_rate == 0.0 for group in graded),
        "reward_std": fmean(float(np.std(group.total_rewards)) for group in graded),
    }
    return {key: float(value) for key, value in metrics.items()}


def _compute_slice_metrics(scored: Sequence[ScoredEpisode]) -> dict[str, float]:
    """Return accuracy by answer type, question type and frame budget, and calls and call gain by frame budget."""
    metrics: defaultdict[str, list[float]] = defaultdict(list)
    rewards_by_call: defaultdict[int, tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
    for outcome in scored:
        episode, accuracy, calls = outcome.episode, get_accuracy(outcome), count_calls(outcome.episode)
        metrics[f"accuracy/{episode.task.answer_type}"].append(accuracy)
        if episode.task.source:
            metrics[f"source/{episode.task.source}/accuracy"].append(accuracy)
        if (question_type := get_question_type(episode.task)) is not None:
            metrics[f"accuracy/question_type/{question_type}"].append(accuracy)
        if episode.frame_budget is not None:
            metrics[f"accuracy/K={episode.frame_budget}"].append(accuracy)
            metrics[f"calls/K={episode.frame_budget}"].append(calls)
            rewards_by_call[episode.frame_budget][calls > 0].append(outcome.score.total)
    means = {key: fmean(values) for key, values in sorted(metrics.items())}
    for budget, (skipped, called) in sorted(rewards_by_call.items()):
        if called and skipped:  # comparable only if some episodes called and some did not
            means[f"call_reward_diff/K={budget}"] = fmean(called) - fmean(skipped)
    return means
