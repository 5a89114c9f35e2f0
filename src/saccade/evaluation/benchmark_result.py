"""The report on a run's benchmarks: all scorecards of its folder, beside what others published.

page = write_scores(run)       evaluations/benchmarks.json, .md (with a .png) and .html, of every *.report.json there
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from saccade.evaluation.published import WARNING, Published, published
from saccade.evaluation.report import Grid, drawn, inert
from saccade.evaluation.scorecard import Interval, Scorecard, read_cards
from saccade.runlog import write_text, writing

NAME = "benchmarks"
READING = (
    "Every question stays in the denominator: errors, unparsed and undecided answers count 0. Intervals are 95 %, by a "
    "bootstrap over units: the questions of one video, or the variants of one problem; where all score the same, the "
    "interval is a point, and means little where they are few. A limited sample has equally many questions of every "
    "stratum; the estimate of the whole weighs each by how many there are of its stratum."
)


def write_scores(folder: Path, *, facts: Mapping[str, Any] | None = None) -> Path:
    """Write the report on the cards of a run as JSON, Markdown and HTML (returned); `facts` stand in all three.

    DataError where no benchmark was evaluated yet, RunError where a file can't be written.
    """
    from saccade.view import page, scores_page  # bring matplotlib, which a score in the terminal doesn't need

    cards = read_cards(folder)
    known = {**(facts or {}), **page.facts_of(folder)}
    # By benchmark, since several evaluations may be of one.
    others = {name: published(name) for name in dict.fromkeys(card.benchmark for card in cards.values())}
    plain_cards = {name: asdict(card) for name, card in cards.items()}
    plain_others = {name: [asdict(each) for each in some] for name, some in others.items()}
    title, place = folder.resolve().name, folder / "evaluations"
    whole = {"facts": known, "warning": WARNING, "evaluations": plain_cards, "published": plain_others}
    write_text(place / f"{NAME}.json", json.dumps(whole, indent=1) + "\n")
    write_text(place / f"{NAME}.md", markdown(title, known, cards, others))
    with writing(place / f"{NAME}.png"):
        (place / f"{NAME}.png").write_bytes(scores_page.plot(plain_cards, plain_others, fmt="png") or b"")
    text = scores_page.render(title=title, facts=known, cards=plain_cards, published=plain_others, warning=WARNING)
    return write_text(place / f"{NAME}.html", text)


# ---- as tables -----------------------------------------------------------------------------------------------------


def grids(cards: Mapping[str, Scorecard], others: Mapping[str, Sequence[Published]]) -> list[Grid]:
    """Scores, costs, then what each evaluation's own tables say, and what was published."""
    found = [_scores(cards, others), _costs(cards)]
    for name, card in cards.items():
        found += grids_of(name, card, others)
    listed = tuple(
        (each.benchmark, each.metric, each.model, str(each.value), _count(each.visual_tokens), each.source, each.note)
        for some in others.values()
        for each in some
    )
    header = ("", "metric", "model", "%", "visual tokens", "source", "note")
    return [*found, *([Grid(title="Published by others", header=header, rows=listed)] if listed else [])]


def grids_of(name: str, card: Scorecard, others: Mapping[str, Sequence[Published]]) -> list[Grid]:
    """What one evaluation's card says: its metrics beside what `others` published, counts, conditions and strata."""
    rows = [
        (metric, ranged(value, card.intervals[metric]), _estimate(card, metric), _models(others, card, metric))
        for metric, value in card.metrics.items()
    ]
    rows += [(rate, f"{value:.2f}", "–", "–") for rate, value in card.at_k.items()]
    if card.undecided:
        rows.append((f"{card.headline}, at most", f"{card.at_most[card.headline]:.2f}", "–", "–"))
    # Without anything to stand in it, a column is left out.
    header = ("", "%" if card.whole is None else f"% of the {card.n} asked", _of_whole(card), "published by others")
    columns = [0, 1, *([2] if card.whole else []), *([3] if others else [])]
    lines = tuple(tuple(row[at] for at in columns) for row in rows)
    found = [Grid(title=f"{name} ({card.read_by})", header=tuple(header[at] for at in columns), rows=lines)]
    found.append(Grid(title=f"{name}, counted", header=("", ""), rows=tuple(_counts(card))))
    if card.conditions:
        found.append(Grid(title=f"{name}, how", header=("", ""), rows=tuple(card.conditions.items())))
    for stratum, cells in card.strata.items():
        bounds = card.bounds[stratum]
        table = tuple((row, str(cell.n), ranged(cell.value, bounds[row])) for row, cell in cells.items())
        found.append(Grid(title=f"{name}, by {stratum}", header=("", "questions", "mean, %"), rows=table))
    return found


def _estimate(card: Scorecard, metric: str) -> str:
    """What a limited sample says of the whole benchmark."""
    return ranged(card.whole.metrics[metric], card.whole.intervals[metric]) if card.whole else "–"


def _of_whole(card: Scorecard) -> str:
    return f"% of all {card.whole.questions}, estimated" if card.whole else ""


def _counts(card: Scorecard) -> Iterator[tuple[str, str]]:
    """What was asked and what went wrong; who decided what the rule left open."""
    yield "questions", f"{card.n} of {card.whole.questions}" if card.whole else str(card.n)
    if card.whole and card.whole.unseen:
        yield "in strata of which none was asked", f"{card.whole.unseen:.0%}, for which their neighbours stand"
    if card.attempts != card.n:
        yield "answers", str(card.attempts)
    yield "errors, counted as wrong", str(card.errors)
    if card.reason:
        yield "the first error", card.reason
    yield "unparsed", str(card.unparsed)
    if card.judge:
        yield "judge", card.judge
    if card.undecided:
        yield "without a verdict" if card.judge else "for a judge to decide", str(card.undecided)


def _scores(cards: Mapping[str, Scorecard], others: Mapping[str, Sequence[Published]]) -> Grid:
    rows = []
    for name, card in cards.items():
        best = f", at most {card.at_most[card.headline]:.2f}" if card.undecided else ""
        score = ranged(card.score, card.interval) + best
        counts = (card.n, card.attempts, card.units, card.errors, card.unparsed, card.undecided)
        metric, models = f"{card.headline}, {card.read_by}", _models(others, card, card.headline)
        # What others published is of the whole benchmark, and stands beside what is said of that.
        rows.append((name, metric, score, "–" if card.whole else models, *map(str, counts)))
        if card.whole:
            metric = f"{card.headline}, {card.extractor}, {_of_whole(card).removeprefix('% ')}"
            rows.append((name, metric, _estimate(card, card.headline), models, *("",) * len(counts)))
    counted = ("questions", "answers", "units", "errors", "unparsed", "undecided")
    return Grid(title="Scores", header=("", "metric", "%", "published by others", *counted), rows=tuple(rows))


def _costs(cards: Mapping[str, Scorecard]) -> Grid:
    rows = []
    for name, card in cards.items():
        costs = card.costs
        tokens = (_count(costs.visual_tokens), _count(costs.text_tokens))
        share = f"{costs.tool_share:.0%}"
        rows.append((name, f"{costs.calls:.2f}", share, f"{costs.turns:.2f}", *tokens, f"{costs.seconds:.2f}"))
    header = ("", "tool calls", "with calls", "turns", "visual tokens", "text tokens", "seconds")
    return Grid(title="What a question took", header=header, rows=tuple(rows))


def _models(others: Mapping[str, Sequence[Published]], card: Scorecard, metric: str) -> str:
    known = [each for each in others.get(card.benchmark, ()) if each.metric == metric and not each.ablation]
    return "; ".join(f"{each.model} {each.value}" for each in known) or "–"


def _count(value: float | None) -> str:
    return "–" if value is None else f"{value:.0f}"


def ranged(value: float, interval: Interval) -> str:
    """A number with its interval.

    >>> ranged(39.8, (37.5, 42.1))
    '39.80 [37.50, 42.10]'
    """
    return f"{value:.2f} [{interval[0]:.2f}, {interval[1]:.2f}]"


# ---- Markdown ------------------------------------------------------------------------------------------------------


def markdown(
    title: str,
    facts: Mapping[str, Any],
    cards: Mapping[str, Scorecard],
    others: Mapping[str, Sequence[Published]],
) -> str:
    """The report as Markdown."""
    listed = "\n".join(f"- {inert(key)}: {inert(value)}" for key, value in facts.items())
    picture = f"![Score against visual tokens per question]({NAME}.png)"
    parts = [f"# {inert(title)}: benchmarks", listed, READING, WARNING, picture]
    for grid in grids(cards, others):
        parts += [f"## {inert(grid.title)}", drawn(grid)]
    return "\n\n".join(filter(None, parts)) + "\n"
