"""One self-contained HTML page of a run: facts, tables, plots, example episodes token by token.

Nothing on the page comes from elsewhere and nothing on it runs: no script, no link, pictures inside. What models, tasks
and files said is escaped by the template, always.
"""

import itertools
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from saccade.runlog import write_text
from saccade.types import Scored
from saccade.view.episodes import Album, Decode, Pixels, answer_text, shown_text, view_of
from saccade.view.plots import PANELS, Bar, bars, curve, themed

STATIC = Path(__file__).parent / "static"
STAGES = {"sft": "Supervised cold start", "rl": "Reinforcement learning"}
SLICES = {
    "question": "Accuracy by question",
    "kind": "Accuracy by kind of answer",
    "frames": "Accuracy by frames shown",
    "overview": "Accuracy where the overview shows the answer, and where not",
}


def write(
    folder: Path,
    *,
    evaluations: Mapping[str, Sequence[Scored]],
    comparison: Mapping[str, Any],
    decode: Decode | None = None,
    pixels: Pixels | None = None,
    facts: Mapping[str, Any] | None = None,
    examples: int = 12,
) -> Path:
    """Write `report.html` into a run folder, from what lies there and what is given; returns its path.

    `evaluations` are scored episodes by name (examples come from the last one that used tools); `comparison` is
    `evaluation.report.Comparison.as_dict()`. `decode` (a renderer's) shows replies token by token, `pixels` (a media
    library's) shows frames. `facts` are added to those of the folder. RunError where the file can't be written.
    """
    text = render(
        title=folder.resolve().name,
        facts={**(facts or {}), **facts_of(folder)},
        recipe=_text(folder / "recipe.yaml"),
        stages=read_metrics(folder),
        evaluations=evaluations,
        comparison=comparison,
        decode=decode,
        pixels=pixels,
        examples=examples,
    )
    return write_text(folder / "report.html", text)


def render(
    *,
    title: str,
    facts: Mapping[str, Any],
    evaluations: Mapping[str, Sequence[Scored]],
    comparison: Mapping[str, Any] | None = None,
    stages: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
    recipe: str = "",
    decode: Decode | None = None,
    pixels: Pixels | None = None,
    examples: int = 12,
) -> str:
    """The page as text; any part of it may be empty. See `write`."""
    album = Album(pixels=pixels)  # filled by the examples; the template then writes each thumbnail once
    compared = comparison or {"summaries": {}, "changes": []}
    return filled(
        "report.html.j2",
        title=title,
        facts={key: str(value) for key, value in facts.items()},
        recipe=recipe,
        summaries=compared["summaries"],
        changes=compared["changes"],
        slices=_slices(compared["summaries"]),
        stages=_plots(stages or {}),
        examples=_examples(evaluations, examples, album, decode),
        album=album,
    )


def filled(template: str, **words: Any) -> str:
    """A page from a template of `static`; whatever stands in it is escaped, but for what is Markup already."""
    environment = Environment(
        loader=FileSystemLoader(STATIC),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    css = Markup((STATIC / "report.css").read_text(encoding="utf-8"))
    page = environment.get_template(template).render(css=css, **words)
    return shown_text("\n".join(line.rstrip() for line in page.strip().split("\n"))) + "\n"


# ---- what lies in the folder ---------------------------------------------------------------------------------------


def facts_of(folder: Path) -> dict[str, Any]:
    """Seed, versions and machine of the last start, and how long each stage took, by its mark or its steps."""
    starts = _json(folder / "versions.json", [])
    last = starts[-1] if isinstance(starts, list) and starts else starts or {}
    found = {key: str(value)[:12] if key == "commit" else value for key, value in last.items() if value is not None}
    if isinstance(starts, list) and len(starts) > 1:
        found["starts"] = len(starts)
    took = {stage: sum(map(_seconds, rows)) for stage, rows in read_metrics(folder).items()}
    for mark in sorted(folder.glob("done/*.json")):
        seconds = _json(mark, {}).get("seconds")
        took |= {mark.stem: seconds} if isinstance(seconds, int | float) else {}
    found |= {f"{stage}, wall time": spent(seconds) for stage, seconds in took.items() if seconds > 0}
    return found


def read_metrics(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The metrics by stage, of the run's metrics.jsonl and of those in its folders; a step's last line counts."""
    found: defaultdict[str, dict[Any, dict[str, Any]]] = defaultdict(dict)
    for path in sorted([*folder.glob("metrics.jsonl"), *folder.glob("*/metrics.jsonl")]):
        home = path.parent.name if path.parent != folder else "run"
        for row in _lines(path):
            stage = home if home in STAGES else str(row.get("stage", home))
            found[stage][row.get("step", len(found[stage]))] = row
    order = [*(stage for stage in STAGES if stage in found), *(stage for stage in found if stage not in STAGES)]
    return {stage: [found[stage][step] for step in sorted(found[stage])] for stage in order}


def _seconds(row: Mapping[str, Any]) -> float:
    """The seconds of a step: "seconds" where it is logged, else the sum of its parts."""
    whole = row.get("seconds")
    parts = [whole] if whole is not None else [value for key, value in row.items() if key.startswith("seconds/")]
    return sum(value for value in parts if isinstance(value, int | float))


def spent(seconds: float) -> str:
    """A length of time for people.

    >>> spent(42.4), spent(200), spent(7500)
    ('42 s', '3 min 20 s', '2 h 5 min')
    """
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _json(path: Path, otherwise: Any) -> Any:
    """The value of a JSON file; a file that isn't there or isn't whole is left out of a page, not an error."""
    try:
        return json.loads(_text(path) or "null") or otherwise
    except ValueError:
        return otherwise


def _lines(path: Path) -> list[dict[str, Any]]:
    rows = []
    for line in _text(path).splitlines():
        try:
            row = json.loads(line)
        except ValueError:  # a line that a kill tore
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows


# ---- plots ---------------------------------------------------------------------------------------------------------


def _plots(stages: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Per stage its title, number of steps and filled panels."""
    found = []
    for stage, rows in stages.items():
        drawn = [svg for panel in PANELS if (svg := curve(panel, rows)) is not None]
        if drawn:
            plots = [Markup(themed(svg)) for svg in drawn]
            found.append({"title": STAGES.get(stage, stage), "steps": len(rows), "plots": plots})
    return found


def _slices(summaries: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Per table of accuracy by slice its title, plot, and numbers."""
    found = []
    for key, title in SLICES.items():
        rows: defaultdict[str, dict[str, dict[str, Any]]] = defaultdict(dict)
        for name, summary in summaries.items():
            for row in summary["slices"].get(key, ()):
                rows[row["name"]][name] = row
        if len(rows) > 1:  # a single row says what the headline says
            drawn = {slice_: {name: _bar(row) for name, row in each.items()} for slice_, each in rows.items()}
            found.append({"title": title, "plot": Markup(themed(bars(drawn))), "rows": rows})
    return found


def _bar(row: Mapping[str, Any]) -> Bar:
    accuracy = row["accuracy"]
    return Bar(value=accuracy["mean"], low=accuracy["low"], high=accuracy["high"], floor=row["floor"])


# ---- examples ------------------------------------------------------------------------------------------------------


def choose(scored: Sequence[Scored], count: int) -> list[Scored]:
    """Examples of every sort in turn: right and wrong, with calls and without, broken; kinds of question mixed."""
    sorts: defaultdict[tuple[bool, bool, bool], list[Scored]] = defaultdict(list)
    for each in scored:
        right = each.score.parts.get("accuracy", 0.0) >= 0.5
        sorts[each.episode.error is not None, not each.episode.results, right].append(each)
    for group in sorts.values():
        group.sort(key=lambda each: each.episode.task.digest)
        seen: defaultdict[str, int] = defaultdict(int)
        ranks = {}
        for each in group:
            kind = str(each.episode.task.extras.get("question"))
            ranks[id(each)], seen[kind] = seen[kind], seen[kind] + 1
        group.sort(key=lambda each: ranks[id(each)])
    # One of each sort in turn, so that a few examples already show every way an episode can go.
    turns = itertools.zip_longest(*(sorts[sort] for sort in sorted(sorts)))
    return [each for turn in turns for each in turn if each is not None][:count]


def _looked(scored: Scored) -> bool:
    return any(result.executed for result in scored.episode.results)


def _examples(
    evaluations: Mapping[str, Sequence[Scored]], count: int, album: Album, decode: Decode | None
) -> list[dict[str, Any]]:
    # A call that was refused, as with the tools off, looked at nothing.
    with_tools = [name for name, scored in evaluations.items() if any(map(_looked, scored))]
    # The last evaluation that looked: the newest weights, doing what they were trained for.
    name = (with_tools or list(evaluations) or [""])[-1]
    others: defaultdict[str, list[tuple[str, str, float]]] = defaultdict(list)
    for other, scored in evaluations.items():
        for each in scored if other != name else ():
            said = each.episode.answer
            verdict = (other, "no answer" if said is None else answer_text(said))
            others[each.episode.task.digest].append((*verdict, each.score.parts.get("accuracy", 0.0)))
    return [
        {**view_of(each, album, decode), "evaluation": name, "others": others[each.episode.task.digest][:4]}
        for each in choose(evaluations.get(name, ()), count)
    ]
