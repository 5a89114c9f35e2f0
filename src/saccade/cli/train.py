"""`saccade sft`, `saccade rl`, and `saccade train`, which runs the whole recipe."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer

from saccade.cli.evaluate import print_evaluation
from saccade.cli.terminal import ModelPath, RecipeName, Settings, err, out, show_progress
from saccade.config.load import load_recipe
from saccade.config.schema import Recipe
from saccade.protocols import OnStep
from saccade.reporting.console import print_text

ResumeOption = Annotated[bool, typer.Option("--resume", help="Resume an interrupted run.")]
AcceptOption = Annotated[
    bool, typer.Option("--accept-changed-data", help="Resume although tasks or media files have changed.")
]
OUT_KEY = "saccade.out"  # of the run folder in a context's `meta`, for the root command


def _remember_out(ctx: typer.Context, folder: Path) -> Path:
    ctx.meta[OUT_KEY] = folder
    return folder


OutOption = Annotated[Path, typer.Option("--out", help="The run folder to write.", callback=_remember_out)]
DataPath = Annotated[Path | None, typer.Option("--data", help="A folder made by `saccade data synth`.")]
NumProcesses = Annotated[
    int | None, typer.Option("--nproc", help="Processes of this machine that divide the model: one per GPU.", min=1)
]
ProfileStep = Annotated[
    int | None, typer.Option(help="A step to trace: writes profile/*.json for chrome://tracing.", min=1)
]


def build_stage_command(stage: str) -> Callable[..., None]:
    """Return the command of one training stage, "sft" or "rl"."""

    def run_stage(
        recipe: RecipeName,
        settings: Settings = None,
        folder: OutOption = Path("runs") / stage,
        model: ModelPath = None,
        data: DataPath = None,
        resume: ResumeOption = False,
        accept_changed_data: AcceptOption = False,
        profile: ProfileStep = None,
        num_processes: NumProcesses = None,
    ) -> None:
        loaded = load_recipe(recipe, settings or ())  # before torch is imported: a typo is reported at once
        with _join_processes(loaded, num_processes, folder) as is_main:
            if not is_main:
                return
            from saccade.runs import api

            train_fns: dict[str, Callable[..., Path]] = {
                "sft": functools.partial(api.sft, on_message=functools.partial(print_text, out)),
                "rl": api.rl,
            }
            with _show_stage(loaded, stage, folder) as (on_step, on_validation):
                weights = train_fns[stage](
                    loaded,
                    out=folder,
                    model=model,
                    data=data,
                    resume=resume,
                    accept_changed_data=accept_changed_data,
                    profile_step=profile or 0,
                    on_step=on_step,
                    on_validation=on_validation,
                )
        print_text(out, f"wrote {weights}")

    return run_stage


def train(
    recipe: RecipeName,
    settings: Settings = None,
    folder: OutOption = Path("runs") / "train",
    model: ModelPath = None,
    data: DataPath = None,
    resume: ResumeOption = False,
    accept_changed_data: AcceptOption = False,
    stage: Annotated[
        str, typer.Option(help="The stages to run, of sft,rl,eval; by default those that the recipe names data for.")
    ] = "",
    num_processes: NumProcesses = None,
) -> None:
    """Run a whole recipe in one run folder: SFT, RL, and an evaluation of the result on the test split.

    A stage runs if the recipe has its section and names its data: data.demonstrations, data.train, data.test.
    """
    loaded = load_recipe(recipe, settings or ())
    with _join_processes(loaded, num_processes, folder) as is_main:
        if not is_main:
            return
        from saccade.runs import api, stages
        from saccade.training.distributed.launch import end_other_ranks

        filled = api.fill_paths(loaded, folder, model, data, resume=resume)
        names = stages.parse_stages(stage) if stage else stages.list_stages(filled)
        print_text(out, f"stages: {', '.join(names)}")
        with contextlib.ExitStack() as stack:

            def start_stage(name: str, steps: int) -> tuple[OnStep, OnStep]:
                stack.close()  # one view at a time: the end of an inner one would erase it
                return stack.enter_context(_show_stage(filled, name, folder))

            weights = stages.run_stages(
                folder,
                filled,
                names,
                resume=resume,
                accept_changed_data=accept_changed_data,
                start_stage=start_stage,
            )
        print_text(out, f"wrote {weights}")
        if "eval" in names:
            end_other_ranks()
            evaluation_name = stages.name_evaluation(weights)
            with show_progress(f"eval {evaluation_name}") as update_progress:
                scored = api.evaluate(
                    folder,
                    name=evaluation_name,
                    on_progress=lambda report: update_progress(report.done, report.accuracy_text, report.total),
                )
            print_evaluation(folder, evaluation_name, scored, None)


@contextlib.contextmanager
def _join_processes(recipe: Recipe, num_processes: int | None, folder: Path) -> Iterator[bool]:
    """Yield whether this process runs the training's loop; with `--nproc` the processes that it starts do."""
    from saccade.training.distributed.launch import is_launched, join_training_processes, launch_processes

    if num_processes is not None and not is_launched():
        on_restart = functools.partial(print_text, err, style="red")
        launch_processes(num_processes, recipe.model, folder, on_restart=on_restart)
        yield False
        return
    with join_training_processes(recipe.model) as is_main:
        yield is_main


@contextlib.contextmanager
def _show_stage(recipe: Recipe, stage: str, folder: Path) -> Iterator[tuple[OnStep, OnStep]]:
    """Show a stage's progress and warnings; yield its callbacks for steps and for validations."""
    from saccade.reporting.training_view import show_training, summarize_warnings

    is_graded = any(term.is_accuracy for terms in recipe.reward_sections.values() for term in terms.values())
    steps = {"sft": recipe.sft.steps, "rl": recipe.rl.steps}[stage]
    with summarize_warnings(err), show_training(out, stage, steps, folder, is_graded=is_graded) as callbacks:
        yield callbacks
