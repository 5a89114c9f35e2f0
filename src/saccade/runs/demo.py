"""The whole pipeline in one run folder: generate data, make a model, SFT, RL, and a report on what each stage gained.

    data ──> model ──> sft ──> evaluation ──> rl ──> evaluation ──> report
                                   └── same questions, frame budgets and seeds ──┘

Every stage writes finished_stages/<stage>.json when it is done and can resume, so the whole demo can: finished stages
are skipped, and the report is rewritten from the files in the folder.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from saccade import plugins
from saccade.chat.renderer import load_renderer
from saccade.config.schema import STAGES, Recipe
from saccade.evaluation.compare import (
    ANSWER_NOT_SHOWN,
    ANSWER_SHOWN,
    Comparison,
    compare_evaluations,
    read_evaluations,
)
from saccade.evaluation.runner import EvaluationProgress, has_tools
from saccade.media.cache import CachingMediaLoader
from saccade.metrics.episode_metrics import get_task_digest
from saccade.metrics.looking import LOOKING_LABELS, NO_DECISION, POLICY_LABELS
from saccade.metrics.tables import (
    Table,
    format_counts,
    format_difference,
    format_duration,
    format_estimate,
    format_optional,
)
from saccade.reporting.comparison_report import build_last_sections
from saccade.reporting.console import UpdateProgress, format_step
from saccade.reporting.evaluation_report import format_policy
from saccade.reporting.examples import summarize_example
from saccade.reporting.run_report import write_report
from saccade.runs import evaluation, pipeline
from saccade.runs.run_folder import RESUMABLE_KEYS, Run
from saccade.runs.run_lock import TRAINING, RunLock
from saccade.training.step_timer import measure_peak_memory
from saccade.types import ScoredEpisode
from saccade.utils.files import convert_file_errors

DATA_DESCRIPTIONS = {"video": "videos with short events", "image": "images with small objects"}
EVALUATED_STAGES = {"sft": "after SFT", "rl": "after RL"}
# An evaluation is called after_STAGE_MODE: at the training temperature, greedy, and greedy without tools.
SAMPLED, GREEDY, NO_TOOLS = "sampled", "greedy", "no_tools"
MODES = {SAMPLED: "sampled", GREEDY: "greedy", NO_TOOLS: "greedy, no tools"}
# Each evaluation before and after RL; each model without its tools and with them.
COMPARED_PAIRS = [(f"after_sft_{mode}", f"after_rl_{mode}") for mode in MODES] + [
    (f"after_{stage}_{NO_TOOLS}", f"after_{stage}_{GREEDY}") for stage in EVALUATED_STAGES
]

Metadata = Mapping[str, Any]
SECTION_STAGES = {"sft": "sft", "evaluation": "sft_evaluation", "rl": "rl"}  # recipe section: first stage that uses it


def run_demo(
    folder: Path,
    recipe: Recipe,
    *,
    resume: bool = False,
    add_task: Callable[[str], UpdateProgress],
    show_text: Callable[[str], None] = lambda text: None,
) -> tuple[Path, list[Table]]:
    """Run or resume the whole pipeline in `folder`; return the report page, and the tables for the terminal.

    After each evaluation `show_text` receives what became of one question, the same before and after RL.
    """
    with RunLock(folder, TRAINING) as lock:
        return _run_demo(folder, recipe, lock, resume=resume, add_task=add_task, show_text=show_text)


def _run_demo(
    folder: Path,
    recipe: Recipe,
    lock: RunLock,
    *,
    resume: bool,
    add_task: Callable[[str], UpdateProgress],
    show_text: Callable[[str], None],
) -> tuple[Path, list[Table]]:
    # Absolute: the relative path demo/model would name a model of the hub as long as there is no such folder.
    model = (folder / "model").absolute()
    recipe = pipeline.with_paths(recipe, folder=folder, model=model, data=folder / "data")
    if resume:  # keep the paths as the run's recipe has them
        existing = Run.open(folder).recipe
        recipe = recipe.with_values({"model.path": existing.model.path, "data": existing.data})
    # The settings of a finished stage may not change, since the recipe must describe what was run.
    unchanged = Run(path=folder, recipe=recipe)
    finished = {section for section, stage in SECTION_STAGES.items() if unchanged.is_done(stage)}
    resumable_keys = [key for key in RESUMABLE_KEYS if key.split(".")[0] not in finished]
    run = pipeline.start_run(
        folder, recipe, STAGES, resume=resume, resumable_keys=resumable_keys, has_model=False, lock=lock
    )
    runner = DemoRunner(run)
    stages = runner.build_stages()
    for number, (name, (description, stage_fn)) in enumerate(stages.items(), 1):
        update_progress = add_task(f"{number}/{len(stages) + 1} {description}")
        if not run.is_done(name):
            runner.run_stage(name, stage_fn, update_progress)
        seconds = run.read_json(f"finished_stages/{name}.json").get("seconds")
        update_progress(None, "done" if seconds is None else f"done, {format_duration(seconds)}")
        stage = name.removesuffix("_evaluation")
        if stage != name and (example := runner.choose_example(stage)):
            show_text(f"    {EVALUATED_STAGES[stage]}: {summarize_example(example)}")
    return runner.write_report(add_task(f"{len(stages) + 1}/{len(stages) + 1} Report: tables, curves, episodes"))


@dataclass(frozen=True, slots=True)
class DemoRunner:
    """The stages of a demo in one run."""

    run: Run

    def build_stages(self) -> dict[str, tuple[str, Callable[[UpdateProgress], Metadata]]]:
        """Return each stage's description and function by name, in order."""
        return {
            "data": (f"Data: {DATA_DESCRIPTIONS[self.run.recipe.synthetic.media]}", self.generate_data),
            "model": ("Model: random weights", self.make_model),
            "sft": ("SFT on demonstrations", lambda update: self.train("sft", update)),
            "sft_evaluation": ("Evaluation after SFT", lambda update: self.evaluate("sft", update)),
            "rl": ("RL on rollouts", lambda update: self.train("rl", update)),
            "rl_evaluation": ("Evaluation after RL", lambda update: self.evaluate("rl", update)),
        }

    def run_stage(
        self, name: str, stage_fn: Callable[[UpdateProgress], Metadata], update_progress: UpdateProgress
    ) -> None:
        """Run a stage and record its status, with its seconds over all invocations and the peak memory (GiB)."""
        start = time.monotonic()
        seconds = self.run.read_json("seconds.json") if (self.run.path / "seconds.json").exists() else {}
        try:
            metadata = stage_fn(update_progress)
        finally:
            seconds[name] = seconds.get(name, 0.0) + time.monotonic() - start
            self.run.write_json("seconds.json", seconds)
        peak = measure_peak_memory(torch.device("cpu"))
        self.run.mark_done(name, {**metadata, "seconds": seconds[name], **peak})

    def generate_data(self, update_progress: UpdateProgress) -> Metadata:
        """Generate and validate videos or images, tasks and demonstrations in `data`."""
        report = pipeline.generate_data(self.run.path / "data", self.run.recipe, on_progress=update_progress)
        baselines = report.constant_baselines
        return {"media": report.num_media, "tasks": report.num_tasks, "constant_baselines": baselines}

    def make_model(self, update_progress: UpdateProgress) -> Metadata:
        """Make a tiny checkpoint in `model` whose tokenizer has the data's words as tokens."""
        recipe, folder = self.run.recipe, self.run.path
        demonstrations = folder / recipe.data.demonstrations
        pipeline.create_tiny_model(folder / recipe.model.path, recipe, demonstrations=demonstrations)
        return {}

    def train(self, name: str, update_progress: UpdateProgress) -> Metadata:
        """Train a stage ("sft" or "rl") and return the path of its last checkpoint."""
        train_fn, steps = {
            "sft": (pipeline.run_sft, self.run.recipe.sft.steps),
            "rl": (pipeline.run_rl, self.run.recipe.rl.steps),
        }[name]

        def report_step(step: int, values: Mapping[str, float]) -> None:
            update_progress(step, format_step(values), steps)

        weights = train_fn(self.run.path, self.run.recipe, run=self.run, on_step=report_step)
        return {"checkpoint": weights.relative_to(self.run.path).as_posix()}

    def evaluate(self, stage: str, update_progress: UpdateProgress) -> Metadata:
        """Evaluate a stage's last weights: at the training temperature, greedily, and greedily without tools."""
        recipe, folder = self.run.recipe, self.run.path
        overrides: dict[str, dict[str, object]] = {
            SAMPLED: {"evaluation.temperature": recipe.sampling.temperature},
            GREEDY: {"evaluation.temperature": 0.0},
            NO_TOOLS: {"evaluation.temperature": 0.0, "evaluation.use_tools": False},
        }
        modes = self.list_modes()
        local: dict[str, object] = {}
        if recipe.rollouts.executor == "processes":  # which take longer to start than they save here
            local = {"rollouts.executor": "local"}
        for number, mode in enumerate(modes):

            def report_progress(progress: EvaluationProgress, index: int = number, label: str = MODES[mode]) -> None:
                remark = ", ".join(filter(None, (label, progress.accuracy_text)))
                update_progress(index * progress.total + progress.done, remark, len(modes) * progress.total)

            evaluation.evaluate(
                folder,
                recipe.with_values({**overrides[mode], **local}),
                name=f"after_{stage}_{mode}",
                weights=pipeline.find_newest_weights(folder, stage),
                on_progress=report_progress,
            )
        return {}

    def choose_example(self, stage: str) -> ScoredEpisode | None:
        """Return a stage's greedy episode of one question: the first, by task digests, that is wrong after SFT."""
        names = [f"after_{name}_{GREEDY}" for name in ("sft", stage)]
        finished = read_evaluations(self.run.path, names=names)
        before, episodes = ({get_task_digest(scored): scored for scored in finished[name].scored} for name in names)
        graded = before.keys() & episodes.keys()
        first = min(graded, key=lambda digest: (before[digest].score.is_correct, digest), default=None)
        return None if first is None else episodes[first]

    def list_modes(self) -> tuple[str, ...]:
        """Return the modes of the evaluations; an environment without tools has no no-tool control."""
        environment = plugins.load("environments", self.run.recipe.environment.name)
        return tuple(MODES) if has_tools(environment) else (SAMPLED, GREEDY)

    def write_report(self, update_progress: UpdateProgress) -> tuple[Path, list[Table]]:
        """Write comparison.json, report.md and report.html; return the page and the tables for the terminal."""
        folder = self.run.path
        finished = read_evaluations(folder)
        names = [f"after_{stage}_{mode}" for stage in EVALUATED_STAGES for mode in self.list_modes()]
        evaluations = {name: finished[name] for name in names}
        pairs = [pair for pair in COMPARED_PAIRS if set(pair) <= set(evaluations)]
        comparison, metadata = compare_evaluations(evaluations, pairs=pairs), self.collect_metadata()
        renderer = load_renderer(str(folder / self.run.recipe.model.path))
        with convert_file_errors(folder):
            page = write_report(
                folder,
                evaluations=evaluations,
                comparison=comparison,
                decode=renderer.decode,
                load_pixels=CachingMediaLoader().load_pixels,
                metadata=metadata,
                more_sections=build_last_sections(folder),
            )
        update_progress(None, "done")
        costs = Table(title="The run", header=("", ""), rows=tuple(metadata.items()))
        return page, [*build_headline_tables(comparison), costs]

    def collect_metadata(self) -> dict[str, str]:
        """Return wall time by stage, peak memory, and the largest logprob difference between engine and trainer."""
        statuses = {name: self.run.read_json(f"finished_stages/{name}.json") for name in self.build_stages()}
        seconds = {name: status["seconds"] for name, status in statuses.items() if "seconds" in status}
        wall_times = {f"{name}, wall time": format_duration(value) for name, value in seconds.items()}
        peak = max(status.get("memory_gib", 0.0) for status in statuses.values())
        values = [row.get("engine_trainer_logprob_diff_max") for row in self.run.read_metrics("rl")]
        differences = [value for value in values if value is not None]
        largest = f"{max(differences):.1e} nats at most" if differences else "not measured"
        return {"engine-trainer logprob difference": largest, "peak memory": f"{peak:.2f} GiB", **wall_times}


def build_headline_tables(comparison: Comparison) -> list[Table]:
    """Return accuracy before and after RL, the gain from tools, and accuracy by question type."""
    summaries = comparison.summaries
    differences = {(change.before, change.after, change.visibility): change.difference for change in comparison.changes}
    rows: list[tuple[str, ...]] = []
    for mode, label in MODES.items():
        names = [f"after_{stage}_{mode}" for stage in EVALUATED_STAGES]
        if names[-1] in summaries:
            gain = differences.get((names[0], names[1], ""))
            estimates = (format_estimate(summaries[name].accuracy) for name in names)
            gain_text = format_difference(gain) if gain else "–"
            rows.append((label, *estimates, gain_text, format_counts(summaries[names[-1]].accuracy)))
    sampled, greedy = ([summaries[f"after_{stage}_{mode}"] for stage in EVALUATED_STAGES] for mode in (SAMPLED, GREEDY))
    rows += [
        ("constant-answer baseline", *[format_optional(greedy[-1].constant_baseline)] * 2, "", ""),
        *(
            (POLICY_LABELS[name], *[format_policy(greedy[-1].policies[name])] * 2, "", "")
            for name in (NO_DECISION, "oracle")
            if name in greedy[-1].policies
        ),
        *(
            (LOOKING_LABELS[name], *(format_optional(summary.looking.get(name)) for summary in greedy), "", "")
            for name in ("frac_calls_hit", "visual_tokens_per_correct", "net_accuracy")
            if name in greedy[-1].looking
        ),
        ("format, sampled", *(f"{summary.format_compliance.mean:.2f}" for summary in sampled), "", ""),
        ("visual tokens, greedy", *(f"{summary.visual_tokens:.1f}" for summary in greedy), "", ""),
    ]
    tool_gains = [
        (
            part or "all",
            *(
                f"{format_difference(gain)} n={format_counts(gain)}" if gain else "–"
                for gain in (differences.get((*pair, part)) for pair in COMPARED_PAIRS[-len(EVALUATED_STAGES) :])
            ),
        )
        for part in ("", ANSWER_SHOWN, ANSWER_NOT_SHOWN)
    ]
    header = ("", *EVALUATED_STAGES.values(), "gain by RL, paired", "tasks / media")
    tools = Table(
        title="Greedy with tools minus without, by whether the overview shows the answer",
        header=("", *EVALUATED_STAGES.values()),
        rows=tuple(tool_gains),
    )
    return [
        Table(title="Accuracy on held-out questions, 95 % intervals", header=header, rows=tuple(rows)),
        *([tools] if f"after_rl_{NO_TOOLS}" in summaries else []),
        _build_question_table(comparison),
    ]


def _build_question_table(comparison: Comparison) -> Table:
    """Return greedy accuracy by question type, with the constant-answer baseline."""
    columns = {f"after_{stage}_{GREEDY}": label for stage, label in EVALUATED_STAGES.items()}
    columns |= {f"after_rl_{NO_TOOLS}": "after RL, no tools"} if f"after_rl_{NO_TOOLS}" in comparison.summaries else {}
    tables = [{row.name: row for row in comparison.summaries[name].slices["question_type"]} for name in columns]
    rows: list[tuple[str, ...]] = []
    for question, last in tables[1].items():
        cells = [format_estimate(table[question].accuracy) if question in table else "–" for table in tables]
        rows.append((question, *cells, format_optional(last.constant_baseline), format_counts(last.accuracy)))
    return Table(
        title="By question, greedy",
        header=("", *columns.values(), "constant-answer baseline", "tasks / media"),
        rows=tuple(rows),
    )
