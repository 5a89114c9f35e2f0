"""Build the tables of named evaluations side by side: scores with n and intervals, paired changes, significance."""

from collections.abc import Iterator

from saccade.evaluation.compare import Change, Comparison
from saccade.metrics.episode_metrics import Difference
from saccade.metrics.looking import LOOKING_LABELS, POLICY_LABELS, BaselinePolicy
from saccade.metrics.tables import Table, format_counts, format_difference, format_estimate, format_optional

SLICE_TITLES = {
    "answer_type": "Answer type",
    "question_type": "Question type",
    "frame_budget": "Frames in the overview",
    "overview": "Whether the overview shows the answer",
    "wording": "Question type, answer type and wording",
}


def build_tables(comparison: Comparison) -> list[Table]:
    """Build the tables of a comparison: summary, changes, accuracy by slice."""
    names = tuple(comparison.summaries)
    tables = [Table(title="Evaluation", header=("", *names), rows=tuple(_build_summary_rows(comparison)))]
    if comparison.changes:
        header = ("", "accuracy", "tasks / media", "better / worse", "significant")
        tables.append(Table(title="Changes", header=header, rows=tuple(map(_build_change_row, comparison.changes))))
    for key, title in SLICE_TITLES.items():
        if rows := tuple(_build_slice_rows(comparison, key)):
            tables.append(Table(title=title, header=("", *names, "constant-answer baseline"), rows=rows))
    return tables


def build_pair_tables(comparison: Comparison) -> list[Table]:
    """Build the table of a comparison of two evaluations: its only change in detail."""
    (change,) = comparison.changes
    before, after = comparison.summaries[change.before], comparison.summaries[change.after]
    difference = change.difference
    assumption = ", if tasks were independent" if difference.num_clusters < difference.n else ""
    rows = [
        (f"accuracy of {change.before}", format_estimate(before.accuracy)),
        (f"accuracy of {change.after}", format_estimate(after.accuracy)),
        ("tasks / clusters (files or problems)", format_counts(difference)),
        ("difference, paired", format_difference(difference)),
        ("significant", format_significance(difference)),
        (f"solved only in {change.before} / only in {change.after}", f"{change.only_before} / {change.only_after}"),
        ("McNemar's exact test", f"p = {change.p_value:.3g}{assumption}"),
    ]
    if change.full_set_difference is not None:
        size = before.full_set_size
        rows.insert(0, ("a limited sample", f"{difference.n} of {size} tasks, even over strata"))
        rows += [
            (f"accuracy of {name}, {size} tasks, estimated", format_estimate(summary.full_set_accuracy))
            for name, summary in ((change.before, before), (change.after, after))
            if summary.full_set_accuracy is not None
        ]
        rows.append((f"difference, {size} tasks, estimated", format_difference(change.full_set_difference)))
        if before.full_set_uncovered:
            uncovered = f"{before.full_set_uncovered:.0%}, represented by neighboring strata"
            rows.append(("tasks in strata without a sampled task", uncovered))
    if change.tool_effect is not None:
        effect = change.tool_effect
        rows += [
            (f"tasks with a call in {effect.with_tools} / clusters", format_counts(effect.gain)),
            ("tool gain (fraction of these solved only with tools)", format_estimate(effect.gain)),
            ("tool harm (fraction of these solved only without)", format_estimate(effect.harm)),
        ]
    if before.visual_tokens or after.visual_tokens:
        ratio = f", ratio {after.visual_tokens / before.visual_tokens:.2f}" if before.visual_tokens else ""
        rows.append(("visual tokens per episode", f"{before.visual_tokens:.1f} / {after.visual_tokens:.1f}{ratio}"))
    if before.undecided or after.undecided:
        rows.append(("undecided without a judge, counted as wrong", f"{before.undecided} / {after.undecided}"))
    if change.other_differences:
        rows.append(("other differences", ", ".join(change.other_differences)))
    return [Table(title=f"{change.after} − {change.before}", header=("", ""), rows=tuple(rows))]


def _build_summary_rows(comparison: Comparison) -> Iterator[tuple[str, ...]]:
    """Yield one row per metric, with one column per evaluation."""
    summaries = list(comparison.summaries.values())
    yield "accuracy", *(format_estimate(s.accuracy) for s in summaries)
    if any(s.full_set_accuracy for s in summaries):
        yield (
            "… of all tasks, estimated from a limited sample",
            *(
                "–"
                if s.full_set_accuracy is None
                else f"{format_estimate(s.full_set_accuracy)}, of all {s.full_set_size}"
                for s in summaries
            ),
        )
    yield "constant-answer baseline", *(format_optional(s.constant_baseline) for s in summaries)
    for name in dict.fromkeys(name for s in summaries for name in s.policies):
        yield POLICY_LABELS.get(name, name), *(format_policy(s.policies.get(name)) for s in summaries)
    yield "tasks / media / episodes", *(f"{s.num_tasks} / {s.num_clusters} / {s.num_episodes}" for s in summaries)
    yield "format compliance", *(format_estimate(s.format_compliance) for s in summaries)
    yield "calls per episode", *(f"{s.calls:.2f}" for s in summaries)
    yield "… executed / succeeded", *(f"{s.executed:.2f} / {s.succeeded:.2f}" for s in summaries)
    yield "episodes with a call", *(f"{s.frac_with_tool_call:.0%}" for s in summaries)
    yield "turns", *(f"{s.turns:.2f}" for s in summaries)
    yield "sampled tokens", *(f"{s.sampled_tokens:.0f}" for s in summaries)
    yield "visual tokens", *(f"{s.visual_tokens:.0f}" for s in summaries)
    for name, label in LOOKING_LABELS.items():
        if any(name in s.looking for s in summaries):
            yield label, *(format_optional(s.looking.get(name)) for s in summaries)
    yield "errors / unanswered", *(f"{s.errors} / {s.unanswered}" for s in summaries)
    if any(s.ungraded for s in summaries):
        yield "ungraded", *(str(s.ungraded) for s in summaries)
    if any(s.undecided for s in summaries):
        yield "undecided", *(str(s.undecided) for s in summaries)
    yield "statuses", *(", ".join(f"{name} {f:.0%}" for name, f in s.statuses.items()) for s in summaries)
    for key in dict.fromkeys(key for s in summaries for key in s.at_k):
        yield key, *(format_optional(s.at_k.get(key)) for s in summaries)


def format_policy(policy: BaselinePolicy | None) -> str:
    """Format what a baseline policy reaches: 0.31, 3.00 calls."""
    return "–" if policy is None else f"{policy.accuracy:.2f}, {policy.calls:.2f} calls"


def _build_slice_rows(comparison: Comparison, key: str) -> Iterator[tuple[str, ...]]:
    """Yield the accuracy of each evaluation on every row of a slice, and the row's baseline."""
    slices = [{row.name: row for row in s.slices.get(key, ())} for s in comparison.summaries.values()]
    for name in dict.fromkeys(name for rows in slices for name in rows):
        rows = [rows.get(name) for rows in slices]
        cells = (
            "–" if row is None else f"{format_estimate(row.accuracy)} n={format_counts(row.accuracy)}" for row in rows
        )
        yield name, *cells, format_optional(next(row.constant_baseline for row in rows if row is not None))


def _build_change_row(change: Change) -> tuple[str, ...]:
    difference = change.difference
    visibility = f", answer {change.visibility}" if change.visibility else ""
    unpaired = f" ({difference.unpaired} unpaired)" if difference.unpaired else ""
    return (
        f"{change.after} − {change.before}{visibility}",
        format_difference(difference),
        f"{format_counts(difference)}{unpaired}",
        f"{difference.better} / {difference.worse}",
        format_significance(difference),
    )


def format_significance(difference: Difference) -> str:
    """Return "yes", or "no" with the reason."""
    return "yes" if difference.is_significant else f"no: {difference.insignificance_reason}"
