"""The numbers of a lab as tables of texts, and as dots for pictures.

A number stands as `0.55 [0.50, 0.60] {0.41, 0.69}`: the mean over seeds, in brackets the interval over tasks, in
braces the one over seeds (see `figures`).
"""

from collections.abc import Callable, Mapping, Sequence

from saccade.evaluation.report import Grid
from saccade.lab.design import Exam, Measure, Table
from saccade.lab.figures import Cell, Columns, Figure, by_task, difference, figure, late, minus
from saccade.lab.plan import Lab
from saccade.view.bands import Dot

INTERVALS = (
    "A number is the mean over seeds. In [brackets] its 95 % interval over tasks (these seeds, other questions: a "
    "bootstrap over each seed's tasks), in {braces} over seeds (other worlds, weights and training: Student's t over "
    "the seeds' means). The second is the one that a claim about a method needs; with few seeds it is wide."
)
EXAMS: dict[Exam, str] = {
    "greedy": "greedy",
    "sampled": "sampled as in training",
    "tools_off": "greedy, tools off",
    "alone": "greedy, one question at a time",
}
MEASURES: dict[Measure, str] = {
    "accuracy": "accuracy",
    "compliance": "format compliance",
    "answered": "share of episodes with an answer",
    "calls": "calls per episode",
    "succeeded": "calls that succeeded, per episode",
    "tool_share": "share of episodes with a call",
    "leaked": "calls in the leaked form, per episode",
    "turns": "turns per episode",
    "response_tokens": "tokens sampled by the main agent",
    "sampled_tokens": "tokens sampled, sub-agents' too",
    "visual_tokens": "visual tokens per episode",
    "seconds": "seconds per question",
}
SLICES = {"frames": "by frames in the overview", "question": "by question", "overview": "by what the overview shows"}

Values = dict[int, dict[str, float]]  # by seed and task


def title_of(table: Table) -> str:
    """What a table shows."""
    less = f" minus {EXAMS[table.less]}" if table.less else ""
    by = f", {SLICES[table.by]}" if table.by else ""
    words = f"{MEASURES[table.measure]}, {EXAMS[table.exam]}{less}{by}"
    return words[0].upper() + words[1:]


# ---- values --------------------------------------------------------------------------------------------------------


def values_of(
    exams: Mapping[int, Mapping[Exam, Columns]], table: Table, where: tuple[str, object] | None = None
) -> Values:
    """A table's measure by seed and task; `where` is a slice (its column and value)."""
    found: Values = {}
    for seed, by_exam in exams.items():
        if table.exam in by_exam and (table.less is None or table.less in by_exam):
            own = by_task(by_exam[table.exam], table.measure, _within(by_exam[table.exam], where))
            found[seed] = minus(own, by_task(by_exam[table.less], table.measure)) if table.less else own
    return found


def _within(exam: Columns, where: tuple[str, object] | None) -> Callable[[int], bool]:
    if where is None:
        return lambda i: True
    column, value = where
    return lambda i: bool(exam[column][i] == value)


def slices_of(cells: Sequence[Cell], table: Table) -> dict[str, object]:
    """The slices of a table by name, in order."""
    found = {value for cell in cells for by_exam in cell.after.values() for value in by_exam[table.exam][table.by]} - {
        None
    }
    ordered = sorted(found, key=lambda value: (isinstance(value, str), value))
    return {f"K={value}" if table.by == "frames" else str(value): value for value in ordered}


# ---- grids ---------------------------------------------------------------------------------------------------------


def grids(lab: Lab, cells: Sequence[Cell]) -> list[Grid]:
    """Every table of the lab, one per condition, in the order of the set."""
    found = []
    for table in lab.set.tables:
        for condition in lab.conditions:
            own = [cell for cell in cells if cell.condition == condition and cell.after]
            if own:
                make = _sliced if table.by else _changes
                header, rows = make(lab, own, table)
                found.append(Grid(title=f"{title_of(table)}: {condition}", header=header, rows=rows))
    for condition in lab.conditions:
        own = [cell for cell in cells if cell.condition == condition and cell.steps]
        if lab.set.late and own:
            rows = tuple((cell.arm, *(shown(late(cell, key)) for key in lab.set.late)) for cell in own)
            title = f"Training rollouts, mean over the last third of the steps: {condition}"
            found.append(Grid(title=title, header=("", *lab.set.late), rows=rows))
    return found


Rows = tuple[tuple[str, ...], ...]


def _changes(lab: Lab, cells: Sequence[Cell], table: Table) -> tuple[tuple[str, ...], Rows]:
    """Arms by row: before, after, what RL changed, and what stands against the baseline."""
    base = next((cell for cell in cells if cell.arm == lab.set.baseline), None)
    against = values_of(base.after, table) if base else {}
    rows = []
    for cell in cells:
        old, new = values_of(cell.before, table), values_of(cell.after, table)
        after = figure(list(new.values()))
        rows.append(
            (
                cell.arm,
                shown(figure(list(old.values()))),
                shown(after),
                shown(difference(new, old), sign=True),
                "" if cell is base else shown(difference(new, against), sign=True),
                f"{after.n} / {len(after.each)}" if after else "–",
            )
        )
    header = ("", "before RL", "after RL", "after − before", f"after, minus {lab.set.baseline}", "tasks / seeds")
    return header, tuple(rows)


def _sliced(lab: Lab, cells: Sequence[Cell], table: Table) -> tuple[tuple[str, ...], Rows]:
    """Arms by row, slices by column, after RL."""
    slices = slices_of(cells, table)
    rows = []
    for cell in cells:
        found = [figure(list(values_of(cell.after, table, (table.by, value)).values())) for value in slices.values()]
        rows.append((cell.arm, *(shown(each, sign=table.less is not None) for each in found)))
    return ("", *slices), tuple(rows)


def shown(found: Figure | None, *, sign: bool = False) -> str:
    """A number with its intervals.

    >>> shown(Figure(mean=0.5, tasks=(0.4, 0.6), seeds=(0.1, 0.9), each=(0.4, 0.6), n=9))
    '0.50 [0.40, 0.60] {0.10, 0.90}'
    """
    if found is None:
        return "–"
    largest = max(abs(value) for value in (found.mean, *(found.tasks or ()), *(found.seeds or ())))
    digits = 0 if largest >= 100 else 1 if largest >= 10 else 2
    style = f"{'+' if sign else ''}.{digits}f"
    text = f"{found.mean:{style}}"
    for pair, (left, right) in ((found.tasks, "[]"), (found.seeds, "{}")):
        text += f" {left}{pair[0]:{style}}, {pair[1]:{style}}{right}" if pair else ""
    return text


# ---- dots ----------------------------------------------------------------------------------------------------------


def dots(lab: Lab, cells: Sequence[Cell], table: Table) -> dict[str, dict[str, list[Dot]]]:
    """By condition and arm, what a picture of a table shows: before (hollow) and after RL."""
    found: dict[str, dict[str, list[Dot]]] = {condition: {} for condition in lab.conditions}
    for cell in cells:
        pairs = ((cell.before, True), (cell.after, False))
        drawn = [(figure(list(values_of(exams, table).values())), hollow) for exams, hollow in pairs]
        found[cell.condition][cell.arm] = [
            Dot(mean=each.mean, tasks=each.tasks, seeds=each.seeds, hollow=hollow) for each, hollow in drawn if each
        ]
    return found
