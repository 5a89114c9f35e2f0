"""Named evaluations side by side: what changed, by how much, and how sure that is.

Every number stands with its n, its 95 % interval and, where it is known, the blind floor: what the best constant
answer scores. Differences are paired over tasks; those whose interval holds zero are not called a change.
"""

import html
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from saccade.data.world.floors import blind_floor
from saccade.data.world.questions import visible
from saccade.errors import DataError
from saccade.evaluation.expansion import Expansion, read_expansion
from saccade.evaluation.intervals import Estimate, estimate
from saccade.evaluation.metrics import (
    Difference,
    Row,
    Summary,
    accuracy_of,
    overview_times,
    paired_difference,
    question_of,
    summarize,
    task_of,
    units_of,
)
from saccade.evaluation.run import read_ungraded
from saccade.evaluation.verdicts import read_judged, results_files
from saccade.ledger import Picture
from saccade.runlog import write_text
from saccade.types import Scored, Task

ESTIMATED = "… of all tasks, estimated from a limited sample"
TOOLS_OFF = ", tools off"  # "X, tools off" is the no-tool control of "X"
SHOWS, HIDES = "shown", "not shown"
TITLES = {
    "kind": "Kind of answer",
    "question": "Question",
    "frames": "Frames in the overview",
    "overview": "The answer in the overview",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One evaluation minus another; `where` names the part of the tasks that it speaks of ("": all).

    >>> delta = Difference(mean=0.2, low=0.1, high=0.3, n=8, better=3, worse=1, unpaired=0)
    >>> Change(before="after SFT", after="after RL", difference=delta).clear
    True
    """

    before: str
    after: str
    difference: Difference
    where: str = ""

    @property
    def clear(self) -> bool:
        """Whether the interval leaves zero out."""
        return self.difference.low > 0 or self.difference.high < 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Evaluations by name, in the order they were given, and the changes between them.

    >>> Comparison(summaries={}, changes=()).as_dict()
    {'summaries': {}, 'changes': []}
    """

    summaries: Mapping[str, Summary]
    changes: tuple[Change, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON and for the page."""
        summaries = {name: asdict(summary) for name, summary in self.summaries.items()}
        return {"summaries": summaries, "changes": [{**asdict(each), "sure": each.clear} for each in self.changes]}


def compare(
    evaluations: Mapping[str, Sequence[Scored]],
    *,
    pairs: Sequence[tuple[str, str]] | None = None,
    ungraded: Mapping[str, int] | None = None,
    expansions: Mapping[str, Expansion] | None = None,
) -> Comparison:
    """Compare named evaluations. `pairs` are (before, after); by default each with the first, and each with its
    control of the name "<name>, tools off". A control is compared where the overview shows the answer and where it does
    not as well. Pairs that share no task are left out. `ungraded` are the attempts, by evaluation, that have no score,
    `expansions` say of limited ones how they stand for the whole. DataError for an empty evaluation.
    """
    lost, limited = ungraded or {}, expansions or {}
    summaries = {}
    for name, scored in evaluations.items():
        if not scored:
            raise DataError(f"the evaluation {name!r} holds no episode")
        floors = floors_of([each.episode.task for each in scored])
        cut = {"overview": shown_by_overview}
        summary = summarize(scored, floors=floors, slices=cut, ungraded=lost.get(name, 0))
        summaries[name] = _expanded(summary, scored, limited.get(name))
    changes = []
    for before, after in _default_pairs(list(evaluations)) if pairs is None else pairs:
        # Where nothing more can be learned by looking, tools can only be worth nothing: the two parts say which it is.
        for where in ("", SHOWS, HIDES) if before == after + TOOLS_OFF else ("",):
            old, new = _part(evaluations[before], where), _part(evaluations[after], where)
            if {*map(task_of, old)} & {*map(task_of, new)}:
                difference = paired_difference(old, new)
                changes.append(Change(before=before, after=after, difference=difference, where=where))
    return Comparison(summaries=summaries, changes=tuple(changes))


def _expanded(summary: Summary, scored: Sequence[Scored], expansion: Expansion | None) -> Summary:
    """A summary with what it says of all tasks, where only those of a limit were attempted."""
    weights = weights_of(scored, expansion)
    if expansion is None or not weights:
        return summary
    tasks = list(map(task_of, scored))
    whole = estimate(list(map(accuracy_of, scored)), tasks, weights=weights, units=units_of(scored))
    return replace(summary, whole=whole, whole_tasks=expansion.whole)


def weights_of(scored: Sequence[Scored], expansion: Expansion | None) -> dict[str, float]:
    """For how many tasks of the whole each task stands, by digest; {} where they aren't those of a limit."""
    tasks = {task_of(each): each.episode.task.id for each in scored}
    if expansion is None or not expansion.covers({*tasks.values()}):
        return {}
    return {digest: expansion.weights[name] for digest, name in tasks.items()}


def _part(scored: Sequence[Scored], where: str) -> list[Scored]:
    return [each for each in scored if not where or shown_by_overview(each) == where]


def _default_pairs(names: Sequence[str]) -> list[tuple[str, str]]:
    controls = [(name + TOOLS_OFF, name) for name in names if name + TOOLS_OFF in names]
    firsts = [(names[0], name) for name in names[1:]]
    # What the tools are worth comes first; the same pair is not shown again the other way round.
    return controls + [pair for pair in firsts if pair not in controls and pair[::-1] not in controls]


def floors_of(tasks: Sequence[Task]) -> dict[str, float]:
    """The blind floor by question kind; empty unless every task names its kind of question."""
    unique = {task.digest: task for task in tasks}
    return blind_floor(list(unique.values())) if all(question_of(task) for task in tasks) else {}


def shown_by_overview(scored: Scored) -> str | None:
    """Whether the frames of the prompt are enough to know the answer; None where the task can't tell."""
    task = scored.episode.task
    # Worlds say what must be seen; other data sets do not, and then nothing is claimed.
    if {"cards", "looks"} <= task.extras.keys():  # of pictures: which cards must be looked at closely
        return HIDES if task.extras["looks"] else SHOWS
    if not {"needs", "cover", "event_seconds"} <= task.extras.keys():
        return None
    return SHOWS if visible(task, overview_times(scored.episode)) else HIDES


# ---- as tables -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """A table of texts, for whoever draws it: the terminal, a Markdown file.

    >>> Grid(title="Question", header=("", "after RL"), rows=(("when", "0.50"),)).rows[0][1]
    '0.50'
    """

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def grids(comparison: Comparison) -> list[Grid]:
    """The comparison as tables: headline, changes, accuracy by slice."""
    names = tuple(comparison.summaries)
    found = [Grid(title="Evaluation", header=("", *names), rows=tuple(map(tuple, _headline(comparison))))]
    if comparison.changes:
        rows = tuple((_label(each), *_change(each)) for each in comparison.changes)
        header = ("", "accuracy", "tasks", "better / worse", "clear of zero")
        found.append(Grid(title="Changes", header=header, rows=rows))
    for title, lines in _slices(comparison):
        found.append(Grid(title=title, header=("", *names, "blind floor"), rows=tuple(map(tuple, lines))))
    return found


def markdown(comparison: Comparison) -> str:
    """The comparison as Markdown."""
    parts = ["Accuracy is in [0, 1]; intervals are 95 %, by a bootstrap over files (all questions about one together)."]
    for grid in grids(comparison):
        parts += [f"### {inert(grid.title)}", drawn(grid)]
    return "\n\n".join(parts) + "\n"


def drawn(grid: Grid) -> str:
    """A table as Markdown, without its title."""
    lines = [
        tuple(map(inert, grid.header)),
        ("---",) * len(grid.header),
        *(tuple(map(inert, row)) for row in grid.rows),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def inert(text: Any) -> str:
    r"""Text for a cell of Markdown, where neither HTML nor Markdown nor a line break in it has a meaning.

    >>> inert("a|b <b>[x](y)</b>")
    'a\\|b &lt;b&gt;\\[x\\](y)&lt;/b&gt;'
    """
    plain = html.escape(" ".join(str(text).encode("utf-8", "replace").decode().split()), quote=False)
    return "".join(f"\\{letter}" if letter in _MARKS else letter for letter in plain)


_MARKS: Iterable[str] = "\\`*_[]|~$"


def _headline(comparison: Comparison) -> list[list[str]]:
    """One row per measure, one column per evaluation."""
    found = list(comparison.summaries.values())
    rows = [
        ["accuracy", *(ranged(each.accuracy) for each in found)],
        *([[ESTIMATED, *map(_whole, found)]] if any(each.whole for each in found) else []),
        ["blind floor", *(_maybe(each.floor) for each in found)],
        ["tasks / episodes", *(f"{each.tasks} / {each.episodes}" for each in found)],
        ["format compliance", *(ranged(each.compliance) for each in found)],
        ["calls per episode", *(f"{each.calls:.2f}" for each in found)],
        ["… executed / succeeded", *(f"{each.executed:.2f} / {each.succeeded:.2f}" for each in found)],
        ["episodes with a call", *(f"{each.tool_share:.0%}" for each in found)],
        ["turns", *(f"{each.turns:.2f}" for each in found)],
        ["sampled tokens", *(f"{each.sampled_tokens:.0f}" for each in found)],
        ["visual tokens", *(f"{each.visual_tokens:.0f}" for each in found)],
        ["errors / unanswered", *(f"{each.errors} / {each.unanswered}" for each in found)],
        *([["ungraded", *(str(each.ungraded) for each in found)]] if any(each.ungraded for each in found) else []),
        *([["undecided", *(str(each.undecided) for each in found)]] if any(each.undecided for each in found) else []),
        ["ends", *(", ".join(f"{end} {share:.0%}" for end, share in each.ends.items()) for each in found)],
    ]
    for key in dict.fromkeys(key for each in found for key in each.at_k):
        rows.append([key, *(_maybe(each.at_k.get(key)) for each in found)])
    return rows


def _whole(summary: Summary) -> str:
    """What a limited evaluation says of all tasks; of another that it speaks of them already."""
    return "–" if summary.whole is None else f"{ranged(summary.whole)}, of all {summary.whole_tasks}"


def _slices(comparison: Comparison) -> list[tuple[str, list[list[str]]]]:
    """Title and rows of each table of accuracy by slice; tables without a row are left out."""
    found = []
    for key, title in TITLES.items():
        tables = [{row.name: row for row in each.slices.get(key, ())} for each in comparison.summaries.values()]
        names = list(dict.fromkeys(name for table in tables for name in table))
        if names:
            found.append((title, [_slice_row(name, [table.get(name) for table in tables]) for name in names]))
    return found


def _slice_row(name: str, rows: Sequence[Row | None]) -> list[str]:
    cells = ["–" if row is None else f"{ranged(row.accuracy)} n={row.accuracy.n}" for row in rows]
    floors = [row.floor for row in rows if row is not None]
    return [name, *cells, _maybe(floors[0])]


def _label(change: Change) -> str:
    where = f", answer {change.where}" if change.where else ""
    return f"{change.after} − {change.before}{where}"


def _change(change: Change) -> list[str]:
    delta, mean = change.difference, gained(change.difference)
    left_out = f" ({delta.unpaired} unpaired)" if delta.unpaired else ""
    return [mean, f"{delta.n}{left_out}", f"{delta.better} / {delta.worse}", "yes" if change.clear else "no"]


def ranged(estimate: Estimate) -> str:
    """A mean with its interval: 0.50 [0.25, 0.75]."""
    return f"{estimate.mean:.2f} [{estimate.low:.2f}, {estimate.high:.2f}]"


def gained(difference: Difference) -> str:
    """A difference with its interval: +0.20 [+0.10, +0.30]."""
    return f"{difference.mean:+.2f} [{difference.low:+.2f}, {difference.high:+.2f}]"


def _maybe(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


# ---- of a run ------------------------------------------------------------------------------------------------------


def read_evaluations(folder: Path) -> dict[str, list[Scored]]:
    """The results files of a run's `evaluations` folder by name, the oldest first, with what judges
    said of their answers. DataError where there is none.
    """
    paths = sorted(results_files(folder), key=lambda path: (path.stat().st_mtime_ns, path.name))
    found = {path.stem: read_judged(path) for path in paths}
    found = {name: scored for name, scored in found.items() if scored}
    if not found:
        raise DataError(f"{folder} holds no evaluation: evaluations/*.jsonl is missing or empty")
    return found


def count_ungraded(folder: Path) -> dict[str, int]:
    """How many attempts of each evaluation of a run nobody could grade yet."""
    return {path.stem: len(read_ungraded(path)) for path in results_files(folder)}


def read_expansions(folder: Path) -> dict[str, Expansion]:
    """How each evaluation of a run that was limited stands for the whole."""
    return {path.stem: found for path in results_files(folder) if (found := read_expansion(path))}


def write_report(
    folder: Path,
    *,
    evaluations: Mapping[str, Sequence[Scored]] | None = None,
    comparison: Comparison | None = None,
    decode: Callable[[Sequence[int]], str] | None = None,
    pixels: Callable[[Picture], Any] | None = None,
    facts: Mapping[str, Any] | None = None,
) -> Path:
    """Write comparison.json, report.md and report.html (returned) into a run's folder.

    `evaluations` are the run's by default, `comparison` theirs. `decode` (a renderer's) lets the page show replies
    token by token, `pixels` (a media library's) the frames. `facts` stand in all three.
    """
    from saccade.view import page  # brings matplotlib, which a comparison in the terminal doesn't need

    evaluations = read_evaluations(folder) if evaluations is None else evaluations
    if comparison is None:
        comparison = compare(evaluations, ungraded=count_ungraded(folder), expansions=read_expansions(folder))
    plain, known = comparison.as_dict(), dict(facts or {})
    write_text(folder / "comparison.json", json.dumps({**plain, "facts": known}, indent=1) + "\n")
    listed = "".join(f"- {inert(key)}: {inert(value)}\n" for key, value in known.items())
    write_text(folder / "report.md", "\n".join(filter(None, (listed, markdown(comparison)))))
    return page.write(folder, evaluations=evaluations, comparison=plain, decode=decode, pixels=pixels, facts=known)
