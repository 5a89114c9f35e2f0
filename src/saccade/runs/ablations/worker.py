"""One job in a process of its own: `python -m saccade.lab.work FOLDER JOB PARENT`, the id of the process to work for.

    jobs/<name>.now.json     how far it is, rewritten at most once a second; the parent looks
    jobs/<name>.done.json    that it is done: what it took
    jobs/<name>.log          what the process said; its last line is the reason where it failed
    jobs/<name>.lock         held by the process that works

A job that was stopped goes on where its stages' own marks and checkpoints are. One whose parent is gone stops at the
end of its step; whoever goes on with it waits for that.
"""

import json
import os
import resource
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from saccade import exams, stages
from saccade.config import Recipe
from saccade.errors import RunError, SaccadeError
from saccade.evaluation.metrics import accuracy_of, calls_leaked, calls_made, question_of, response_tokens
from saccade.evaluation.report import shown_by_overview
from saccade.evaluation.run import Tally
from saccade.lab.plan import Job, Lab, examined
from saccade.lab.pool import held
from saccade.lab.starts import begin_of, checkpoint_of, make_start, make_world, with_files
from saccade.runlog import write_text, writing
from saccade.training.checkpoint import checkpoints
from saccade.types import Scored

QUIET = 1.0  # seconds between two writings of how far a job is


def main(words: Sequence[str]) -> None:
    """Do a job; 1 with one sentence for what can be mended, 130 where it was stopped."""
    folder, name, parent = words
    try:
        work(Path(folder), name, int(parent))
    except SaccadeError as error:
        raise SystemExit(str(error)) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def work(folder: Path, name: str, parent: int) -> None:
    """Do a job of the lab in `folder`, unless it is done by now, and mark it as done."""
    lab = Lab.open(folder)
    job = next((job for job in lab.jobs() if job.name == name), None)
    if job is None:
        raise RunError(f"the lab {folder} has no job {name!r}")
    marks = folder / "jobs"
    with held(marks / f"{name}.lock", wait=True):
        if (marks / f"{name}.done.json").exists():
            return
        told = Told(path=marks / f"{name}.now.json", parent=parent)
        told.look()
        do(lab, job, folder, told)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        done = {"seconds": told.seconds, "memory_gib": peak}
        write_text(marks / f"{name}.done.json", json.dumps(done) + "\n")


def do(lab: Lab, job: Job, folder: Path, told: "Told") -> None:
    """What a job is, by its kind."""
    place = folder / job.name
    if job.kind == "world":
        make_world(place.parent, lab.start_recipe("usual", job.seed), told=told)
    elif job.kind == "start":
        start = lab.set.starts[job.start]
        make_start(place, lab.start_recipe(job.start, job.seed), start, begin_of(place.parents[1], start), told=told)
    else:
        attempt(lab, job, folder, told)
    tidy(place)


def attempt(lab: Lab, job: Job, folder: Path, told: "Told") -> None:
    """An arm: RL from its start, then the exams; or the exams of a start as it is."""
    place = folder / job.name
    with writing(place):  # paths that lead up and out of a folder need the folder
        place.mkdir(parents=True, exist_ok=True)
    begin = checkpoint_of(folder / f"seed-{job.seed}", job.start)
    recipe = with_files(lab.recipe(job.condition, job.arm, job.seed), model=begin)
    if job.kind == "arm":
        steps = recipe.rl.steps
        stages.rl(
            place,
            recipe,
            resume=(place / "recipe.yaml").exists(),
            on_step=lambda step, row: told(step, f"RL, accuracy {row['accuracy']:.2f}", steps),
        )
    # The exams before RL lie one level deeper than a run, and name the very same files.
    where = place if job.kind == "arm" else place.parent
    weights = stages.latest(place, "rl") or (where / begin).resolve()
    found = {}
    for exam in lab.set.exams:

        def told_of(tally: Tally, exam: str = exam) -> None:
            told(tally.done, f"exam, {exam.replace('_', ' ')}", tally.total)

        found[exam] = columns(
            exams.evaluate(
                place,
                absolute(examined(recipe, exam, lab.set.lone), where),
                name=exam,
                weights=weights,
                at_once=1 if exam == "alone" else 512,
                on_done=told_of,
            )
        )
    write_text(place / "facts.json", json.dumps(found) + "\n")


def absolute(recipe: Recipe, folder: Path) -> Recipe:
    """The recipe with absolute paths of tasks, wherever an exam is written."""
    return recipe.model_copy(
        update={"data": recipe.data.model_copy(update={"test": str((folder / recipe.data.test).resolve())})}
    )


def columns(scored: Sequence[Scored]) -> dict[str, list[Any]]:
    """What the report has to know of every attempt, by name: `task` is its digest, the rest measures and slices."""
    episodes = [each.episode for each in scored]
    return {
        "task": [episode.task.digest for episode in episodes],
        "question": [question_of(episode.task) for episode in episodes],
        "frames": [episode.frames for episode in episodes],
        "overview": [shown_by_overview(each) for each in scored],
        "accuracy": [accuracy_of(each) for each in scored],
        "compliance": [each.score.parts.get("compliance", 0.0) for each in scored],
        "calls": [calls_made(episode) for episode in episodes],
        "succeeded": [sum(result.ok for result in episode.results) for episode in episodes],
        "tool_share": [float(calls_made(episode) > 0) for episode in episodes],
        "leaked": [calls_leaked(episode) for episode in episodes],
        "answered": [float(episode.answer is not None) for episode in episodes],
        "turns": [len(episode.turns) for episode in episodes],
        "response_tokens": [response_tokens(episode) for episode in episodes],
        "sampled_tokens": [episode.usage.sampled_tokens for episode in episodes],
        "visual_tokens": [episode.usage.visual_tokens for episode in episodes],
        "seconds": [episode.usage.seconds for episode in episodes],
    }


def tidy(place: Path) -> None:
    """Drop all checkpoints of a finished job but the last."""
    for stage in ("sft", "rl"):
        for old in checkpoints(place / stage)[:-1]:
            shutil.rmtree(old.folder, ignore_errors=True)


@dataclass(kw_only=True)
class Told:
    """Says how far the job is, in a file that the parent reads; stops the job where the parent is gone."""

    path: Path
    parent: int
    earlier: float = 0.0  # seconds of starts that were stopped
    begun: float = field(default_factory=time.monotonic)
    written: float = 0.0

    def __post_init__(self) -> None:
        if self.path.exists():
            self.earlier = float(json.loads(self.path.read_text(encoding="utf-8"))["seconds"])

    @property
    def seconds(self) -> float:
        """What the job has taken so far, all its starts together."""
        return self.earlier + time.monotonic() - self.begun

    def look(self) -> None:
        """Stop where the parent is gone."""
        if os.getppid() != self.parent:
            raise KeyboardInterrupt

    def __call__(self, done: int, remark: str, total: int) -> None:
        """Be told how far the job is."""
        self.look()
        if time.monotonic() - self.written < QUIET and done < total:
            return
        self.written = time.monotonic()
        write_text(
            self.path, json.dumps({"done": done, "total": total, "remark": remark, "seconds": self.seconds}) + "\n"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
