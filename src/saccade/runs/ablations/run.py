"""A lab from its plan to its report, in one folder.

lab.json        the set as it is run: whoever goes on must mean the same one
starts.jsonl    one line per start: command, versions, commit
seed-N/…        worlds, weights, cold starts, and a run folder per arm
jobs/…          how far each job is, and what it said
results.json, report.md, report.html, plots/
"""

import json
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from saccade.errors import RunError
from saccade.evaluation.report import Grid
from saccade.lab.plan import Lab, minutes
from saccade.lab.pool import Pool, Tell, alone
from saccade.lab.report import write_report
from saccade.runlog import versions, write_text, writing


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a lab leaves: the page, its tables, and why some jobs could not be done."""

    page: Path
    tables: Sequence[Grid]
    failed: Mapping[str, str]


def prepare(folder: Path, lab: Lab, *, resume: bool, again: bool = False) -> Lab:
    """The lab as `folder` will hold it. Raises RunError where the folder holds something else.

    With `again` seeds and conditions are those that it was started with; else they may differ, since what is done for
    one of them doesn't depend on the others.
    """
    if not (folder / "lab.json").exists():
        if folder.exists() and any(path.name != ".lock" for path in folder.iterdir()):
            raise RunError(f"{folder} is not empty and holds no lab; choose another folder with --out")
        return lab
    there = Lab.open(folder)
    if not resume:
        raise RunError(f"{folder} holds a lab already; go on with --resume, or choose another folder with --out")
    if there.name != lab.name:
        raise RunError(f"{folder} holds the lab {there.name}, not {lab.name}; choose another folder with --out")
    for what, one, other in _differences(there.as_dict(), lab.as_dict()):
        raise RunError(
            f"the lab {folder} was started with {what} {one}, not {other}; go on with the same, or choose another "
            "folder with --out"
        )
    return replace(lab, seeds=there.seeds, conditions=there.conditions) if again else lab


def _differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """What must be the same in both, and is not."""
    found = [
        (key, json.dumps(one[key]), json.dumps(other[key]))
        for key in ("format", "quick", "settings")
        if one[key] != other[key]
    ]
    sets = [key for key in one["set"] if one["set"][key] != other["set"].get(key)]
    return [*found, *((f"another {key} in its set:", "that", "this one") for key in sets)]


def run(
    folder: Path, lab: Lab, *, begin: Callable[..., Tell], say: Callable[[str], None], command: str = ""
) -> Outcome:
    """Do what is not done yet, and write the report. RunError where another process is at work in the folder."""
    with alone(folder):
        write_text(folder / "lab.json", json.dumps(lab.as_dict(), indent=1) + "\n")
        note_start(folder, command)
        pool = Pool(folder=folder, jobs=lab.jobs())
        failed = dict(pool.run(begin, say))
        page, tables = write_report(folder, lab, failed)
    return Outcome(page=page, tables=tables, failed=failed)


def note_start(folder: Path, command: str = "") -> None:
    """Remember how, and with which versions, the lab was started or gone on with."""
    words = command or shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
    line = {"command": words, "cores": os.cpu_count(), "versions": versions()}
    path = folder / "starts.jsonl"
    with writing(path), path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def planned(lab: Lab) -> str:
    """What will be done, in a sentence."""
    jobs = lab.jobs()
    arms = sum(job.kind == "arm" for job in jobs)
    steps = lab.recipe(*lab.cells()[0]).rl.steps
    quick = "QUICK (no evidence): " if lab.quick else ""
    return (
        f"{quick}{lab.name}: {len(lab.cells())} arms and conditions x {lab.seeds} seed(s) = {arms} runs of {steps} RL "
        f"steps after {sum(job.kind == 'start' for job in jobs)} cold start(s): about {minutes(jobs):.0f} minutes with "
        "two processes on two cores"
    )
