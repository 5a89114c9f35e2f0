"""The main job in one run folder: make a world, make a model, teach it, reinforce it, and say what each step was worth.

    world ──> model ──> sft ──> exams ──> rl ──> exams ──> report
                                  └── same questions, frame budgets and seeds ──┘

Every part leaves a mark when it is done and can go on where it was stopped, so the whole can: parts with a mark are
passed over, and the report is written anew from what lies in the folder.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from saccade import exams, plugins, preflight, stages
from saccade.chat.render import load_renderer
from saccade.config import Recipe
from saccade.evaluation import report
from saccade.evaluation.report import TOOLS_OFF, Comparison, Grid
from saccade.evaluation.run import Tally, has_tools
from saccade.media.cache import Library
from saccade.rollouts.stage import examined, trainable
from saccade.runlog import MAY_CHANGE, Run, writing
from saccade.training.clock import memory
from saccade.view.page import spent

WORLDS = {"video": "films with flashes in them", "image": "pictures with small cards in them"}
SAMPLED = ", sampled"  # the exam at the temperature of training
BEFORE, AFTER = "after SFT", "after RL"
EXAMS = (SAMPLED, "", TOOLS_OFF)
# What is compared: each exam before and after RL; each model with its tools and without.
PAIRS = [(BEFORE + exam, AFTER + exam) for exam in EXAMS] + [(name + TOOLS_OFF, name) for name in (BEFORE, AFTER)]

Tell = Callable[..., None]  # (done, remark, total): how far a part is; see view.live.Advance
Begin = Callable[[str], Tell]  # a line for a part, and how to tell it how far the part is
Facts = Mapping[str, Any]
ENDS = {"sft": "sft", "evaluation": "sft_exams", "rl": "rl"}  # a recipe's section, and the first part that used it up


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a demo leaves: the page, and the tables to show at its end."""

    page: Path
    tables: Sequence[Grid]


def demo(folder: Path, recipe: Recipe, *, resume: bool = False, begin: Begin) -> Outcome:
    """Do, or go on with, the whole job in `folder`. Raises SaccadeError for what the user can mend."""
    recipe = stages.with_paths(recipe, folder=folder, model=folder / "model", world=folder / "world")
    if resume:  # a run keeps its own way of saying where its parts lie
        own = Run.open(folder).recipe
        model = recipe.model.model_copy(update={"path": own.model.path})
        recipe = recipe.model_copy(update={"model": model, "data": own.data})
    preflight.check(trainable(recipe))
    # What a finished part did is done; the recipe must go on saying how.
    before = Run(path=folder, recipe=recipe)
    ended = {part for part, mark in ENDS.items() if before.is_done(mark)}
    may_change = [key for key in MAY_CHANGE if key.split(".")[0] not in ended]
    facts = preflight.jails(recipe, examined(recipe))
    run = Run.create(folder, recipe, resume=resume, may_change=may_change, facts=facts)
    job = Job(run=run)
    works = job.parts()
    for place, (name, (says, work)) in enumerate(works.items(), 1):
        tell = begin(f"{place}/{len(works) + 1} {says}")
        if not run.is_done(name):
            job.timed(name, work, tell)
        took = job.mark(name).get("seconds")
        tell(None, "done" if took is None else f"done, {spent(took)}")
    return job.report(begin(f"{len(works) + 1}/{len(works) + 1} Report: tables, curves, episodes"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The parts of a demo in one run."""

    run: Run

    def parts(self) -> dict[str, tuple[str, Callable[[Tell], Facts]]]:
        """By name, in order: what a part does in plain words, and its work."""
        return {
            "world": (f"World: {WORLDS[self.run.recipe.world.media]}", self.make_world),
            "model": ("Model: random weights", self.make_model),
            "sft": ("Cold start: learn from examples", lambda tell: self.learn("sft", tell)),
            "sft_exams": ("Exams after the cold start", lambda tell: self.examine(BEFORE, "sft", tell)),
            "rl": ("Reinforcement: learn from attempts", lambda tell: self.learn("rl", tell)),
            "rl_exams": ("Exams after reinforcement", lambda tell: self.examine(AFTER, "rl", tell)),
        }

    def timed(self, name: str, work: Callable[[Tell], Facts], tell: Tell) -> None:
        """Do a part and mark it, with its seconds (of all starts) and the peak of memory (GiB)."""
        begun, earlier = time.monotonic(), self.seconds()
        try:
            facts = work(tell)
        finally:
            earlier[name] = earlier.get(name, 0.0) + time.monotonic() - begun
            self.run.write_json("seconds.json", earlier)
        peak = memory(torch.device("cpu"))
        self.run.mark_done(name, {**facts, "seconds": earlier[name], **peak})

    def seconds(self) -> dict[str, float]:
        """What each part has taken so far."""
        found: dict[str, float] = {}
        if (self.run.path / "seconds.json").exists():
            found.update(self.run.read_json("seconds.json"))
        return found

    def mark(self, name: str) -> dict[str, Any]:
        """What a finished part left for later."""
        found: dict[str, Any] = self.run.read_json(f"done/{name}.json")
        return found

    # ---- the parts -------------------------------------------------------------------------------------------------

    def make_world(self, tell: Tell) -> Facts:
        """Videos or pictures, tasks and traces in OUT/world, checked; some of them in OUT/world/sheet.png."""
        found = stages.world(self.run.path / "world", self.run.recipe, told=tell)
        return {"clips": found.clips, "tasks": found.tasks, "floors": found.floors}

    def make_model(self, tell: Tell) -> Facts:
        """A tiny checkpoint in OUT/model that has the world's words as tokens."""
        recipe, folder = self.run.recipe, self.run.path
        stages.tiny_model(folder / recipe.model.path, recipe, traces=folder / recipe.data.traces)
        return {}

    def learn(self, name: str, tell: Tell) -> Facts:
        """A stage of training; its last checkpoint stays in OUT/sft or OUT/rl, so that RL leaves SFT's as it was."""
        learn, steps, shown = {
            "sft": (stages.sft, self.run.recipe.sft.steps, "loss"),
            "rl": (stages.rl, self.run.recipe.rl.steps, "accuracy"),
        }[name]

        def told(step: int, values: Mapping[str, float]) -> None:
            tell(step, f"{shown} {values[shown]:.2f}", steps)

        weights = learn(self.run.path, self.run.recipe, run=self.run, on_step=told)
        return {"checkpoint": weights.relative_to(self.run.path).as_posix()}

    def examine(self, name: str, stage: str, tell: Tell) -> Facts:
        """Three evaluations of a stage's last weights: at the training temperature, greedy, greedy without tools."""
        recipe, folder = self.run.recipe, self.run.path
        changed: dict[str, dict[str, Any]] = {
            SAMPLED: {"temperature": recipe.sampling.temperature},
            "": {"temperature": 0.0},
            TOOLS_OFF: {"temperature": 0.0, "tools": False},
        }
        names = self.exams()
        for place, exam in enumerate(names):
            settings = recipe.evaluation.model_copy(update=changed[exam])

            def told(tally: Tally, place: int = place, exam: str = exam) -> None:
                remark = ", ".join(filter(None, (_called(exam), tally.remark)))
                tell(place * tally.total + tally.done, remark, len(names) * tally.total)

            exams.evaluate(
                folder,
                recipe.model_copy(update={"evaluation": settings}),
                name=name + exam,
                weights=stages.latest(folder, stage),
                on_done=told,
            )
        return {}

    def exams(self) -> tuple[str, ...]:
        """The exams that this agent can sit: one that has no tools can't be without them."""
        agent = plugins.load("agents", self.run.recipe.agent.name)
        return EXAMS if has_tools(agent) else (SAMPLED, "")

    def report(self, tell: Tell) -> Outcome:
        """comparison.json, report.md and report.html, and the tables for the terminal."""
        folder = self.run.path
        found = report.read_evaluations(folder)
        evaluations = {name + exam: found[name + exam] for name in (BEFORE, AFTER) for exam in self.exams()}
        pairs = [pair for pair in PAIRS if set(pair) <= set(evaluations)]
        comparison = report.compare(evaluations, pairs=pairs, ungraded=report.count_ungraded(folder))
        facts = self.facts()
        renderer = load_renderer(str(folder / self.run.recipe.model.path))
        with writing(folder):
            page = report.write_report(
                folder,
                evaluations=evaluations,
                comparison=comparison,
                decode=renderer.decode,
                pixels=Library().pixels,
                facts=facts,
            )
        tell(None, "done")
        costs = Grid(title="The run", header=("", ""), rows=tuple((key, str(value)) for key, value in facts.items()))
        return Outcome(page=page, tables=[*headline(comparison), costs])

    def facts(self) -> dict[str, str]:
        """Seconds by part, peak memory, and how far the engine's logprobs ever were from the trainer's."""
        marks = {name: self.mark(name) for name in self.parts()}
        took = {f"{name}, wall time": spent(mark["seconds"]) for name, mark in marks.items() if "seconds" in mark}
        peak = max((mark.get("memory_gib", 0.0) for mark in marks.values()), default=0.0)
        gaps = [row["logprob_gap_max"] for row in self.run.metrics("rl") if row.get("logprob_gap_max") is not None]
        gap = f"{max(gaps):.1e} nats at most" if gaps else "not measured"
        return {"engine-trainer gap": gap, "peak memory": f"{peak:.2f} GiB", **took}


# ---- the headline --------------------------------------------------------------------------------------------------


def headline(comparison: Comparison) -> list[Grid]:
    """Before and after RL, with tools and without, at the training temperature; tools' worth; question by question."""
    found = comparison.summaries
    changes = {(each.before, each.after, each.where): report.gained(each.difference) for each in comparison.changes}
    rows: list[tuple[str, ...]] = []
    for exam in (exam for exam in EXAMS if AFTER + exam in found):
        before, after = (report.ranged(found[name + exam].accuracy) for name in (BEFORE, AFTER))
        gain = changes.get((BEFORE + exam, AFTER + exam, ""), "–")
        rows.append((_called(exam), before, after, gain, str(found[AFTER + exam].tasks)))
    rows.append(("blind floor", *[_plain(found[AFTER].floor)] * 2, "", ""))
    formats = [f"{found[name + SAMPLED].compliance.mean:.2f}" for name in (BEFORE, AFTER)]
    looks = [f"{found[name].visual_tokens:.1f}" for name in (BEFORE, AFTER)]
    rows += [("format, sampled", *formats, "", ""), ("visual tokens, greedy", *looks, "", "")]
    worth = [
        (says, *(changes.get((name + TOOLS_OFF, name, where), "–") for name in (BEFORE, AFTER)))
        for says, where in (("all", ""), *((where, where) for where in (report.SHOWS, report.HIDES)))
    ]
    header = ("", BEFORE, AFTER, "gain by RL, paired", "n")
    tools = Grid(
        title="Greedy with tools minus without, by whether the overview shows the answer",
        header=("", BEFORE, AFTER),
        rows=tuple(worth),
    )
    return [
        Grid(title="Accuracy on held-out questions, 95 % intervals", header=header, rows=tuple(rows)),
        *([tools] if AFTER + TOOLS_OFF in found else []),
        _by_question(comparison),
    ]


def _by_question(comparison: Comparison) -> Grid:
    """Greedy accuracy by kind of question, the blind floor beside."""
    names = [name for name in (BEFORE, AFTER, AFTER + TOOLS_OFF) if name in comparison.summaries]
    tables = [{row.name: row for row in comparison.summaries[name].slices["question"]} for name in names]
    rows: list[tuple[str, ...]] = []
    for kind, last in tables[1].items():
        cells = [report.ranged(table[kind].accuracy) if kind in table else "–" for table in tables]
        rows.append((kind, *cells, _plain(last.floor), str(last.accuracy.n)))
    return Grid(title="By question, greedy", header=("", *names, "blind", "n"), rows=tuple(rows))


def _called(exam: str) -> str:
    return exam.removeprefix(", ") or "greedy"


def _plain(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"
