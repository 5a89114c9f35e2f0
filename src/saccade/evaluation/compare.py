"""Compare named evaluations: how well each did, what changed between two of them, and whether that is significant.

A change is over tasks: samples of one task are averaged first, and a task is solved from an average of one half.
"""

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from saccade.data.constant_baseline import assign_wordings, compute_wording_baselines
from saccade.data.option_shuffle import restore_options
from saccade.data.visibility import is_answerable
from saccade.errors import DataError, SaccadeError
from saccade.evaluation.judge_results import apply_verdicts, list_results_files, read_verdicts
from saccade.evaluation.records import find_fingerprint_differences, read_records
from saccade.evaluation.subset import StratifiedWeights, read_stratified_weights
from saccade.metrics.episode_metrics import (
    SOLVED_THRESHOLD,
    Difference,
    Summary,
    assign_clusters,
    average_by_task,
    compute_paired_difference,
    count_calls,
    estimate_mean,
    get_accuracy,
    get_overview_times,
    get_task_digest,
    group_by_task,
    has_run_tools,
    summarize,
)
from saccade.metrics.statistics import (
    Estimate,
    compute_sign_test_p_value,
    estimate_clustered_mean,
    get_media_key,
)
from saccade.types import ScoredEpisode, Task, UngradedEpisode

ANSWER_SHOWN, ANSWER_NOT_SHOWN = "shown", "not shown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Hold an evaluation: its scored episodes, the number of episodes without a score, the weights of a limit, and the
    settings that its records hold.
    """

    scored: Sequence[ScoredEpisode]
    ungraded: int = 0
    weights: StratifiedWeights | None = None
    benchmark: str = ""
    use_tools: bool = True
    fingerprint: str = ""

    def is_control_of(self, other: "Evaluation") -> bool:
        """Return whether this is the no-tool control of `other`: the same weights and settings, without tools."""
        differences = find_fingerprint_differences(self.fingerprint, other.fingerprint)
        return other.use_tools and not self.use_tools and set(differences) <= {"tools"}

    def weigh_tasks(self) -> dict[str, float]:
        """Return by task digest how many tasks of the full set each represents; {} unless these are a limit's tasks."""
        tasks = {get_task_digest(outcome): outcome.episode.task.id for outcome in self.scored}
        if self.weights is None or not self.weights.covers({*tasks.values()}):
            return {}
        return {digest: self.weights.weights[task_id] for digest, task_id in tasks.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolEffect:
    """Measure the effect of tools over the tasks with a call in the evaluation `with_tools`.

    `gain` is the fraction of them solved only with tools, `harm` that solved only without, `net` the difference.
    """

    with_tools: str
    num_tasks_with_call: int
    gain: Estimate
    harm: Estimate
    net: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Record one evaluation minus another over the tasks of both, with a paired interval over clusters.

    `visibility` names the subset of tasks it covers ("": all). `only_before` and `only_after` count the tasks solved in
    one evaluation alone; `p_value` is McNemar's exact test of these two counts, which assumes independent tasks.
    `tool_effect` is None unless exactly one of the two ran tools. `full_set_difference` estimates the difference over
    all tasks if a limit selected some. `other_differences` names what else differs, such as weights.
    """

    before: str
    after: str
    difference: Difference
    only_before: int
    only_after: int
    p_value: float
    visibility: str = ""
    tool_effect: ToolEffect | None = None
    full_set_difference: Difference | None = None
    other_differences: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Hold the summaries of named evaluations, in the given order, and the changes between them."""

    summaries: Mapping[str, Summary]
    changes: tuple[Change, ...]


def compare_evaluations(
    evaluations: Mapping[str, Evaluation],
    *,
    pairs: Sequence[tuple[str, str]] | None = None,
    cluster_key: Callable[[Task], str] = get_media_key,
    summarized: Collection[str] | None = None,
) -> Comparison:
    """Compare named evaluations; tasks with the same `cluster_key` are not independent.

    The summaries are of the evaluations named by `summarized`, by default of all.

    `pairs` are (before, after); by default each evaluation is compared with the first, and with its no-tool control. A
    control is also compared separately on the tasks whose overview shows the answer and on the others. Pairs that share
    no task are left out. Raises DataError for an empty evaluation.
    """
    summaries = {
        name: _summarize(name, evaluation, cluster_key)
        for name, evaluation in evaluations.items()
        if summarized is None or name in summarized
    }
    if pairs is None:
        names = list(evaluations)
        controls = [
            (control, name)
            for name in names
            for control in names
            if evaluations[control].is_control_of(evaluations[name])
        ]
        firsts = [(names[0], name) for name in names[1:]]
        # Controls come first; the same pair is not repeated in the other direction.
        pairs = controls + [pair for pair in firsts if pair not in controls and pair[::-1] not in controls]
    changes = []
    for before, after in pairs:
        # Tools can't help where the overview already shows the answer, so a control is also compared on each subset.
        is_control = evaluations[before].is_control_of(evaluations[after])
        for visibility in ("", ANSWER_SHOWN, ANSWER_NOT_SHOWN) if is_control else ("",):
            old, new = (_select_visibility(evaluations[name], visibility) for name in (before, after))
            if {*map(get_task_digest, old.scored)} & {*map(get_task_digest, new.scored)}:
                change = _compute_change((before, old), (after, new), cluster_key)
                changes.append(replace(change, visibility=visibility))
    return Comparison(summaries=summaries, changes=tuple(changes))


def _select_visibility(evaluation: Evaluation, visibility: str) -> Evaluation:
    if not visibility:
        return evaluation
    scored = [outcome for outcome in evaluation.scored if classify_overview(outcome) == visibility]
    return replace(evaluation, scored=scored)


def _summarize(name: str, evaluation: Evaluation, cluster_key: Callable[[Task], str]) -> Summary:
    scored = evaluation.scored
    if not scored:
        raise DataError(
            f"the evaluation {name!r} holds no episode; run it first or leave it out", key="evaluations", value=name
        )
    clusters = assign_clusters(scored, cluster_key)
    tasks = list({get_task_digest(outcome): restore_options(outcome.episode.task) for outcome in scored}.values())
    wordings = assign_wordings(tasks)
    baselines = compute_wording_baselines(tasks)
    if evaluation.weights is not None:  # of the whole file: in a small sample, a constant answer is right by chance
        known = evaluation.weights.constant_baselines
        baselines |= {task.digest: known[task.id] for task in tasks if task.id in known}
    summary = summarize(
        scored,
        constant_baselines=baselines,
        slices={"overview": classify_overview, "wording": lambda outcome: wordings.get(get_task_digest(outcome))},
        ungraded=evaluation.ungraded,
        clusters=clusters,
    )
    weights = evaluation.weigh_tasks()
    if evaluation.weights is None or not weights:
        return summary
    return replace(
        summary,
        full_set_accuracy=estimate_mean(scored, get_accuracy, clusters, weights),
        full_set_size=evaluation.weights.full_set_size,
        full_set_uncovered=evaluation.weights.uncovered,
    )


def _compute_change(
    before: tuple[str, Evaluation], after: tuple[str, Evaluation], cluster_key: Callable[[Task], str]
) -> Change:
    (old_name, old), (new_name, new) = before, after
    clusters = assign_clusters([*new.scored, *old.scored], cluster_key)
    difference = compute_paired_difference(old.scored, new.scored, clusters=clusters)
    solved_before, solved_after = _find_solved(old.scored), _find_solved(new.scored)
    shared = solved_before.keys() & solved_after.keys()
    only_before = sum(solved_before[task] and not solved_after[task] for task in shared)
    only_after = sum(solved_after[task] and not solved_before[task] for task in shared)
    full_set_difference, weights = None, old.weigh_tasks()
    if weights and not difference.unpaired:
        full_set_difference = compute_paired_difference(old.scored, new.scored, weights=weights, clusters=clusters)
    return Change(
        before=old_name,
        after=new_name,
        difference=difference,
        only_before=only_before,
        only_after=only_after,
        p_value=compute_sign_test_p_value(only_before, only_after),
        tool_effect=_compare_tools(before, after, clusters),
        full_set_difference=full_set_difference,
    )


def _find_solved(scored: Sequence[ScoredEpisode]) -> dict[str, bool]:
    return {task: accuracy >= SOLVED_THRESHOLD for task, accuracy in average_by_task(scored).items()}


def _compare_tools(
    before: tuple[str, Evaluation], after: tuple[str, Evaluation], clusters: Mapping[str, str]
) -> ToolEffect | None:
    """Return the effect of tools; None unless only one evaluation ran them, with a call in a task of both."""
    if has_run_tools(before[1].scored) == has_run_tools(after[1].scored):
        return None
    (name, with_tools), (_, without_tools) = (before, after) if has_run_tools(before[1].scored) else (after, before)
    solved, control = _find_solved(with_tools.scored), _find_solved(without_tools.scored)
    called = [
        task
        for task, samples in group_by_task(with_tools.scored).items()
        if task in control and any(count_calls(sample.episode) for sample in samples)
    ]
    if not called:
        return None
    gained = [float(solved[task] and not control[task]) for task in called]
    harmed = [float(control[task] and not solved[task]) for task in called]
    gain, harm = (estimate_clustered_mean(values, called, clusters=clusters) for values in (gained, harmed))
    net = round(gain.mean - harm.mean, 12)
    return ToolEffect(with_tools=name, num_tasks_with_call=len(called), gain=gain, harm=harm, net=net)


def classify_overview(scored: ScoredEpisode) -> str | None:
    """Return whether the frames of the prompt suffice to know the answer; None if the task doesn't specify it."""
    is_shown = is_answerable(scored.episode.task, get_overview_times(scored.episode))
    return None if is_shown is None else ANSWER_SHOWN if is_shown else ANSWER_NOT_SHOWN


def read_evaluations(
    folder: Path, problems: list[str] | None = None, *, names: Collection[str] | None = None
) -> dict[str, Evaluation]:
    """Return the evaluations of a run by name, with judge verdicts applied, in the order of `list_results_files`.

    Reads those of `names`, by default all. Raises DataError for none, and for a damaged file; with a list of
    `problems`, appends why a file is left out.
    """
    read = {}
    for path in list_results_files(folder):
        if names is not None and path.stem not in names:
            continue
        try:
            read[path.stem] = _read_evaluation(path)[0]
        except SaccadeError as error:
            if problems is None:
                raise
            problems.append(str(error))
    evaluations = {name: evaluation for name, evaluation in read.items() if evaluation.scored}
    if not evaluations and problems is None:
        raise DataError(
            f"{folder} contains no evaluation: evaluations/*.jsonl is missing or empty; run `saccade eval` first",
            key=str(folder),
        )
    return evaluations


def _read_evaluation(path: Path) -> tuple[Evaluation, str]:
    """Return the evaluation of a results file, and why the first ungraded episode has no score."""
    records = read_records(path)
    scored = [record.outcome for record in records if isinstance(record.outcome, ScoredEpisode)]
    reasons = [record.outcome.reason for record in records if isinstance(record.outcome, UngradedEpisode)]
    evaluation = Evaluation(
        scored=apply_verdicts(scored, read_verdicts(path)),
        ungraded=len(reasons),
        weights=read_stratified_weights(path),
    )
    if records:
        fields = {name: getattr(records[0], name) for name in ("benchmark", "use_tools", "fingerprint")}
        evaluation = replace(evaluation, **fields)
    return evaluation, reasons[0] if reasons else ""


def compare_files(
    first: Path,
    second: Path,
    *,
    get_cluster_key: Callable[[str], Callable[[Task], str]] = lambda benchmark: get_media_key,
) -> Comparison:
    """Compare two results files with their judge verdicts. Raises DataError if one is empty, or their tasks differ.

    `get_cluster_key` returns the function that clusters the tasks of a benchmark, whose name is "" for other tasks.
    """
    # The files of two runs often have the same name; then their paths distinguish them.
    names = (first.stem, second.stem) if first.stem != second.stem else (str(first), str(second))
    evaluations = {}
    for name, path in zip(names, (first, second), strict=True):
        evaluations[name], reason = _read_evaluation(path)
        if not evaluations[name].scored:
            cause = f" (first reason: {reason})" if reason else ""
            raise DataError(f"{path} holds no result{cause}; run the evaluation first", key=str(path))
    require_same_tasks(evaluations)
    # Both have the same tasks, and so the same sample of the full set.
    weights = next((evaluation.weights for evaluation in evaluations.values() if evaluation.weights), None)
    comparison = compare_evaluations(
        {name: replace(evaluation, weights=weights) for name, evaluation in evaluations.items()},
        pairs=[(names[0], names[-1])],
        cluster_key=get_cluster_key(evaluations[names[0]].benchmark),
    )
    other = find_fingerprint_differences(evaluations[names[0]].fingerprint, evaluations[names[-1]].fingerprint)
    if bool(read_verdicts(first)) != bool(read_verdicts(second)):
        other.append("a judge in only one of them")
    return replace(comparison, changes=(replace(comparison.changes[0], other_differences=tuple(other)),))


def require_same_tasks(evaluations: Mapping[str, Evaluation]) -> None:
    """Raise DataError if one of two evaluations has a task that the other lacks or has in another version."""
    ids = {
        name: {get_task_digest(outcome): outcome.episode.task.id for outcome in evaluation.scored}
        for name, evaluation in evaluations.items()
    }
    for name, other in itertools.permutations(ids, 2):
        missing = [task_id for digest, task_id in ids[name].items() if digest not in ids[other]]
        if not missing:
            continue
        # The same id with another digest: its question, ground truth or options changed in between.
        reason = f"the task {missing[0]} differs between {name!r} and {other!r}"
        if missing[0] not in ids[other].values():
            count = f"{len(missing)} of the {len(ids[name])} tasks"
            reason = f"{count} of {name!r} are not in {other!r}, such as {missing[0]}"
        raise DataError(
            f"{reason}; compare evaluations of the same tasks (--num-tasks, --shard and --tasks select them)",
            key="tasks",
            value=missing[0],
        )
