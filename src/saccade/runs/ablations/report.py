"""A lab's report: what was claimed, what was run, numbers and pictures; what follows is the reader's to say.

results.json   the numbers of every table, the seeds' own means among them
report.md      claim, facts, tables, pictures (plots/*.png)
report.html    the same on one page that needs nothing else
"""

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from saccade.evaluation.report import Grid
from saccade.lab.figures import Cell, Figure, difference, figure, late, read_cells
from saccade.lab.plan import Job, Lab, minutes
from saccade.lab.tables import INTERVALS, dots, grids, slices_of, title_of, values_of
from saccade.runlog import write_text, writing
from saccade.view import bands, lab_page
from saccade.view.page import spent

READING = (
    "A column per condition. Curves are means over seeds of running means over about a tenth of the steps, bands from "
    "the lowest to the highest seed. Dots: hollow before RL, filled after it; thick lines are intervals over tasks, "
    "thin ones over seeds."
)
CURVES = {
    "accuracy": "Accuracy of training rollouts",
    "compliance": "Format compliance of training rollouts",
    "reward": "Reward",
    "calls": "Calls per episode",
    "calls/leaked": "Calls in the leaked form, per episode",
    "tool_share": "Share of episodes with a call",
    "entropy": "Entropy, nats per token",
    "grad_norm": "Gradient norm before clipping",
    "punished": "Correct episodes with a negative advantage, share",
    "turns": "Turns per episode",
    "response_tokens": "Tokens sampled by the main agent",
    "seconds/rollout": "Seconds of a step's rollouts",
    "spread": "Spread of rewards within a group",
    "importance_mean": "Importance weight, mean",
    "staleness_mean": "Staleness of trained tokens, versions",
    "groups/dropped/spread": "Groups without spread, dropped",
    "end/length": "Episodes cut by their length, share",
    "end/no_answer": "Episodes that end without an answer, share",
}


def title_of_curve(key: str) -> str:
    """What a curve shows.

    >>> title_of_curve("call_gain/K=32")
    'Reward of calling over skipping, K=32'
    """
    start, slash, frames = key.rpartition("/K=")
    if slash:
        named = {"call_gain": "Reward of calling over skipping", "calls": "Calls", "accuracy": "Accuracy"}
        return f"{named.get(start, start)}, K={frames}"
    return CURVES.get(key, key)


def write_report(folder: Path, lab: Lab, failed: Mapping[str, str]) -> tuple[Path, list[Grid]]:
    """Write the report of what there is; returns the page, and the tables for the terminal."""
    cells = read_cells(folder, lab)
    tables = grids(lab, cells)
    facts = facts_of(folder, lab)
    words: dict[str, Any] = {
        "title": lab.set.title,
        "name": lab.name,
        "warnings": warnings_of(lab, cells, failed),
        "claim": lab.set.claim,
        "asks": lab.set.asks,
        "facts": facts,
        "parts": parts_of(lab),
        "reading": READING,
        "intervals": INTERVALS,
        "tables": [asdict(table) for table in tables],
    }
    pictures = pictures_of(lab, cells)
    with writing(folder):
        (folder / "plots").mkdir(exist_ok=True)
        for old in (folder / "plots").glob("*.png"):
            old.unlink()
        for place, (_, draw) in enumerate(pictures):
            (folder / "plots" / f"{place:02d}.png").write_bytes(draw("png"))
    plain = {"warnings": words["warnings"], "lab": lab.as_dict(), "facts": facts, "tables": results(lab, cells)}
    write_text(folder / "results.json", json.dumps(plain, indent=1) + "\n")
    titles = [title for title, _ in pictures]
    write_text(folder / "report.md", markdown(words, titles))
    page = lab_page.render(**words, pictures=[(title, draw("svg")) for title, draw in pictures])
    return write_text(folder / "report.html", page), tables


# ---- words ---------------------------------------------------------------------------------------------------------


def warnings_of(lab: Lab, cells: Sequence[Cell], failed: Mapping[str, str]) -> list[str]:
    """What a reader must know before anything else."""
    found = []
    if lab.quick:
        found.append(
            f"QUICK: {lab.seeds} seed(s), short cold starts and few steps, to see that everything works. "
            "No figure here is evidence for or against anything."
        )
    if lab.seeds < 3 and not lab.quick:
        found.append(f"{lab.seeds} seed(s): no interval over seeds can be trusted with so few.")
    short = [f"{cell.arm} in {cell.condition} ({len(cell.after)})" for cell in cells if len(cell.after) < lab.seeds]
    if short:
        found.append(f"Not every arm has all {lab.seeds} seeds: {', '.join(short)}.")
    return [*found, *(f"{name} failed: {reason}" for name, reason in failed.items())]


def facts_of(folder: Path, lab: Lab) -> dict[str, str]:
    """How the numbers came about: seeds, tasks, steps, command, versions, time."""
    starts = [json.loads(line) for line in (folder / "starts.jsonl").read_text(encoding="utf-8").splitlines()]
    last = starts[-1]
    jobs = lab.jobs()
    took = {job.name: _took(folder, job) for job in jobs}
    recipe = lab.recipe(*lab.cells()[0])
    commits = dict.fromkeys(_short(start["versions"]["commit"]) for start in starts)
    return {
        "seeds": ", ".join(map(str, range(lab.seeds))),
        "held-out tasks": f"{_tasks(lab)} per seed, on {recipe.world.test} clips",
        "RL": f"{recipe.rl.steps} steps of {recipe.rl.prompts} groups of {recipe.rl.group}",
        "command": "; ".join(dict.fromkeys(start["command"] for start in starts)),
        "commit": ", ".join(commits),
        "versions": ", ".join(f"{name} {last['versions'][name]}" for name in ("saccade", "torch", "transformers")),
        "machine": f"{platform.machine()}, {last['cores']} cores; two processes of one thread each",
        "time": f"{spent(sum(took.values()))} of all processes together; planned {minutes(jobs):.0f} min with two",
    }


def _short(commit: str | None) -> str:
    """A commit as people write it; `-dirty` stays, since it says that the source was changed."""
    name, dash, changed = (commit or "unknown").partition("-")
    return name[:10] + dash + changed


def _took(folder: Path, job: Job) -> float:
    path = folder / "jobs" / f"{job.name}.done.json"
    return float(json.loads(path.read_text(encoding="utf-8"))["seconds"]) if path.exists() else 0.0


def _tasks(lab: Lab) -> int:
    recipe = lab.recipe(*lab.cells()[0])
    every = recipe.world.test * recipe.world.tasks_per_video
    return min(every, recipe.evaluation.limit or every)


def parts_of(lab: Lab) -> list[tuple[str, str, str]]:
    """Conditions, starts and arms: what each is, and the settings that make it so."""
    found = []
    for name in lab.conditions:
        condition = lab.set.conditions[name]
        settings = (f"start: {condition.start}", *condition.settings)
        found.append((f"condition: {name}", condition.about, ", ".join(settings)))
    for name in lab.starts():
        start = lab.set.starts[name]
        made = start.model_dump(exclude={"about", "settings", "steps"}, exclude_defaults=True)
        settings = (f"{lab.start_recipe(name).sft.steps} steps of SFT", *(f"{key}: {made[key]}" for key in made))
        found.append((f"start: {name}", start.about, ", ".join((*settings, *start.settings))))
    for name in dict.fromkeys(arm for _, arm in lab.cells()):
        arm = lab.set.arms[name]
        starts = (f"start: {arm.start}",) if arm.start else ()
        found.append((f"arm: {name}", arm.about, ", ".join((arm.recipe, *starts, *arm.settings))))
    return found


def markdown(words: Mapping[str, Any], pictures: Sequence[str]) -> str:
    """The report as Markdown; pictures lie in plots/."""
    warnings = [f"> **{text}**" for text in words["warnings"]]
    facts = "\n".join(f"- {key}: {_code(key, value)}" for key, value in words["facts"].items())
    parts = _rows(("", "what it is", "settings"), [(one, two, f"`{three}`") for one, two, three in words["parts"]])
    sections = [
        f"# {words['title']}",
        *warnings,
        f"**What is claimed.** {words['claim']}",
        f"**What is asked.** {words['asks']}",
        facts,
        parts,
        "## Pictures",
        READING,
        *(f"### {title}\n\n![{title}](plots/{place:02d}.png)" for place, title in enumerate(pictures)),
        "## Numbers",
        words["intervals"],
        *(f"### {table['title']}\n\n{_rows(table['header'], table['rows'])}" for table in words["tables"]),
    ]
    return "\n\n".join(sections) + "\n"


def _code(key: str, value: str) -> str:
    return f"`{value}`" if key in ("command", "commit") else value


def _rows(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


# ---- numbers and pictures ------------------------------------------------------------------------------------------


def results(lab: Lab, cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """Every number of the report as plain values: one row per table, condition, arm and slice."""
    found = []
    for table in lab.set.tables:
        slices = slices_of(cells, table) if table.by else {}
        baselines = {cell.condition: values_of(cell.after, table) for cell in cells if cell.arm == lab.set.baseline}
        for cell in cells:
            row = {"table": title_of(table), "condition": cell.condition, "arm": cell.arm}
            old, new = values_of(cell.before, table), values_of(cell.after, table)
            whole = {"before": figure([*old.values()]), "after": figure([*new.values()]), "gain": difference(new, old)}
            if cell.arm != lab.set.baseline:
                whole["against_baseline"] = difference(new, baselines.get(cell.condition, {}))
            found += [] if table.by else [{**row, **{key: _plain(value) for key, value in whole.items()}}]
            for name, value in slices.items():
                part = figure([*values_of(cell.after, table, (table.by, value)).values()])
                found.append({**row, "slice": name, "after": _plain(part)})
    for cell in cells:
        row = {"table": "last third of the steps", "condition": cell.condition, "arm": cell.arm}
        found += [{**row, "slice": key, "after": _plain(late(cell, key))} for key in lab.set.late]
    return found


def _plain(found: Figure | None) -> dict[str, Any] | None:
    return None if found is None else asdict(found)


def pictures_of(lab: Lab, cells: Sequence[Cell]) -> list[tuple[str, Any]]:
    """Title and drawing (a function of the format) of every picture that has something to show."""
    look = bands.looks(list(lab.set.arms))
    runs: dict[str, dict[str, list[Any]]] = {name: {} for name in lab.conditions}
    for cell in cells:
        runs[cell.condition][cell.arm] = list(cell.steps.values())
    found = []
    for table in lab.set.tables:
        if not table.by:
            drawn = dots(lab, cells, table)
            found.append((title_of(table), _drawing(bands.dots, drawn, look, zero=table.less is not None)))
    for key in lab.set.curves:
        found.append((title_of_curve(key), _drawing(bands.curves, runs, key, look)))
    return [(title, draw) for title, draw in found if draw("svg") is not None]


def _drawing(make: Any, *arguments: Any, **settings: Any) -> Any:
    return lambda fmt: make(*arguments, **settings, fmt=fmt)
