"""The command line: `saccade --help`. Whatever is heavy is imported inside the command that needs it."""

import contextlib
import os
import shlex
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from typer.core import TyperGroup

from saccade import __version__
from saccade.config import dump, load_recipe, recipe_names, recipe_path
from saccade.errors import DataError, RunError, SaccadeError
from saccade.runlog import Run, writing
from saccade.view.live import Advance, Watcher, lines, say, summary

LOG_WIDTH = 120  # columns of tables where there is no terminal

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


def settle() -> None:
    """What has to be said before torch is imported; the number of threads is the recipe's."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that spin make steps 5 to 10 times slower
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


class Commands(TyperGroup):
    """The commands, and the one place where their errors become a sentence and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command: 1 for what the user can mend, 130 for Ctrl-C."""
        try:
            return super().invoke(ctx)
        except SaccadeError as error:
            err.print(escape(str(error)), style="red", soft_wrap=True)
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            command = self.get_command(ctx, ctx.invoked_subcommand or "")
            resumable = command is not None and any("--resume" in option.opts for option in command.params)
            again = shlex.join([_name(), *(word for word in sys.argv[1:] if word != "--resume"), "--resume"])
            err.print("\nStopped." + (f" Go on with: {escape(again)}" if resumable else ""), soft_wrap=True)
            raise typer.Exit(130) from None


def _name() -> str:
    """How this program can be called again: not everybody has its folder on the path."""
    own, found = Path(sys.argv[0]), shutil.which("saccade")
    if own.name != "saccade" or not own.exists() or (found is not None and own.samefile(found)):
        return "saccade"
    return os.path.relpath(own)


app = typer.Typer(cls=Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
recipes_app = typer.Typer(help="The recipes: list them, or show one in full.")
model_app = typer.Typer(no_args_is_help=True, help="Make models.")
data_app = typer.Typer(no_args_is_help=True, help="Make data.")
app.add_typer(recipes_app, name="recipes")
app.add_typer(model_app, name="model")
app.add_typer(data_app, name="data")

Settings = Annotated[list[str] | None, typer.Argument(help="Settings of the recipe, such as rl.optim.lr=1e-6.")]
RecipeName = Annotated[str, typer.Argument(help="A packaged recipe, such as tiny/para_grpo, or a path to a .yaml.")]
RunFolder = Annotated[Path, typer.Argument(help="A run folder.")]
Out = Annotated[Path, typer.Option("--out", help="The run folder to write.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with the run where it stopped.")]
ModelPath = Annotated[Path | None, typer.Option("--model", help="A checkpoint, or a run whose newest one is meant.")]
WorldPath = Annotated[Path | None, typer.Option("--world", help="A folder that `saccade data world` made.")]


def main() -> None:
    """The entry point of `saccade`."""
    settle()
    app()


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """Train vision-language models that decide where to look."""
    if version:
        print(f"saccade {__version__}")
        raise typer.Exit


# ---- looking around ------------------------------------------------------------------------------------------------


@recipes_app.callback(invoke_without_command=True)
def recipes(ctx: typer.Context) -> None:
    """List the packaged recipes."""
    if ctx.invoked_subcommand is not None:
        return
    table = Table("recipe", "what it is", box=None)
    for name in recipe_names():
        first = recipe_path(name).read_text(encoding="utf-8").splitlines()[0]
        table.add_row(name, escape(first.removeprefix("# ")))
    out.print(table)


@recipes_app.command("show")
def recipes_show(name: RecipeName, settings: Settings = None) -> None:
    """Print a recipe with everything it extends and every default."""
    print(dump(load_recipe(name, settings or ())), end="")


@app.command()
def doctor() -> None:
    """Check this machine: versions against their bounds, threads, device, video, disk."""
    from saccade.doctor import examine

    table, bad = Table("", "found", "wanted", "", box=None), []
    for each in examine():
        verdict = "[green]ok[/green]" if each.good else "[red]no[/red]"
        table.add_row(each.name, escape(each.found), escape(each.wanted), verdict)
        bad += [] if each.good else [each.name]
    out.print(table)
    if bad:
        raise RunError(f"this machine can't run Saccade as it is: mend {', '.join(bad)}")


# ---- making models and data ----------------------------------------------------------------------------------------


@model_app.command("tiny")
def model_tiny(
    folder: Annotated[Path, typer.Argument(help="Where the checkpoint goes.")],
    family: Annotated[str, typer.Option(help="The model family.")] = "qwen3_vl",
    seed: Annotated[int, typer.Option(help="The seed of its random weights.")] = 0,
) -> None:
    """Make a randomly initialised checkpoint of about a million parameters."""
    from saccade.model.tiny import make_tiny

    # Weights that were trained must not be lost to a repeated command.
    if (folder / "config.json").exists():
        raise RunError(f"{folder} already holds a model; choose another folder")
    with writing(folder):
        make_tiny(str(folder), family=family, seed=seed)
    out.print(f"wrote {escape(str(folder))}", soft_wrap=True)


@data_app.command("world")
def data_world(
    folder: Annotated[Path, typer.Argument(help="Where the world goes.")],
    settings: Settings = None,
    recipe: Annotated[str, typer.Option(help="The recipe whose `world` and `seed` are used.")] = "tiny/base",
) -> None:
    """Make a needle world: clips with events at known times, tasks with exact labels, traces to learn from."""
    from saccade import stages

    loaded = load_recipe(recipe, settings or ())
    world = loaded.world
    with progress("world", world.train + world.validation + world.test) as advance:
        found = stages.world(folder, loaded, told=advance)
    out.print(f"wrote {escape(str(folder))}: {found.clips} clips, {found.tasks} tasks, sound", soft_wrap=True)


# ---- learning and judging ------------------------------------------------------------------------------------------


@app.command()
def sft(
    recipe: RecipeName,
    settings: Settings = None,
    folder: Out = Path("runs/sft"),
    model: ModelPath = None,
    world: WorldPath = None,
    resume: Resume = False,
) -> None:
    """Supervised fine-tuning on traces: the cold start."""
    from saccade import stages

    loaded = stages.with_paths(load_recipe(recipe, settings or ()), model=model, world=world)
    with progress("sft", loaded.sft.steps) as advance:
        weights = stages.sft(
            folder, loaded, resume=resume, on_step=lambda step, values: advance(step, f"loss {values['loss']:.3f}")
        )
    out.print(f"wrote {escape(str(weights))}", soft_wrap=True)


@app.command()
def train(
    recipe: RecipeName,
    settings: Settings = None,
    folder: Out = Path("runs/rl"),
    model: ModelPath = None,
    world: WorldPath = None,
    resume: Resume = False,
) -> None:
    """Reinforcement learning on tasks, from a model or from a run's newest checkpoint."""
    from saccade import stages

    loaded = stages.with_paths(load_recipe(recipe, settings or ()), model=model, world=world)
    with progress("train", loaded.rl.steps) as advance:
        weights = stages.rl(
            folder, loaded, resume=resume, on_step=lambda step, values: advance(step, f"reward {values['reward']:.3f}")
        )
    out.print(f"wrote {escape(str(weights))}", soft_wrap=True)


@app.command("eval")
def evaluate(
    folder: RunFolder,
    settings: Settings = None,
    model: ModelPath = None,
    tasks: Annotated[Path | None, typer.Option(help="A file of tasks; the recipe's test split by default.")] = None,
    name: Annotated[str, typer.Option(help="What the evaluation is called.")] = "test",
) -> None:
    """Evaluate a run's newest checkpoint; results stay in its folder, and are compared with the others there."""
    from saccade import stages
    from saccade.evaluation import report

    loaded = load_recipe(str(Run.open(folder).path / "recipe.yaml"), settings or ())
    with progress(f"eval {name}") as advance:
        stages.evaluate(
            folder, loaded, name=name, weights=model, tasks=tasks, on_done=lambda done, all_: advance(done, "", all_)
        )
    found = report.read_evaluations(folder)
    whole = report.compare(found, pairs=[(other, name) for other in found if other != name])
    show(report.grids(report.Comparison(summaries={name: whole.summaries[name]}, changes=whole.changes)))


@app.command()
def ask(
    question: Annotated[str, typer.Argument(help="What to ask about the video.")],
    video: Annotated[Path, typer.Option("--video", help="A video file.")],
    model: Annotated[Path, typer.Option("--model", help="A checkpoint, or a run whose newest one is meant.")],
    settings: Settings = None,
    recipe: Annotated[str | None, typer.Option(help="A recipe; by default the run's, or one that fits.")] = None,
) -> None:
    """Ask a model about a video, and watch it think, look and answer."""
    if not video.exists():
        raise DataError(f"there is no file {video}; give --video the path of a video")
    from saccade import stages
    from saccade.media.video import probe
    from saccade.rollouts.run import run_episode
    from saccade.types import Kind, Media, Task

    probe(str(video))  # whatever is wrong with it is said before a model is loaded
    home = stages.run_of(model)
    name = recipe or (str(home / "recipe.yaml") if home else stages.fitting(model))
    loaded = load_recipe(name, settings or ())
    stage = stages.load(loaded, stages.weights_of(model))
    task = Task(id="ask", question=question, media=(Media(path=str(video)),), kind=Kind.OPEN, gold="")
    with contextlib.closing(Watcher(out)) as watcher:
        context = stage.context(seed=loaded.seed, temperature=loaded.evaluation.temperature, watch=watcher)
        episode = stages.finish(stage, run_episode(task, stage.agent, context))
    if episode.error is not None:
        raise DataError(f"the question could not be answered: {episode.error}")
    said = f"Answer: {episode.answer}" if episode.answer else f"No answer ({episode.end.value})"
    say(out, said, style="bold")
    say(out, summary(episode), style="dim")


# ---- everything at once --------------------------------------------------------------------------------------------


@app.command()
def demo(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RECIPE] [SETTINGS]...", help="tiny/para_grpo by default, and settings for it."),
    ] = None,
    folder: Out = Path("runs/demo"),
    seed: Annotated[int | None, typer.Option(help="The seed of everything: world, weights, sampling.")] = None,
    resume: Resume = False,
) -> None:
    """From nothing to a trained agent and a report: world, model, SFT, exams, RL, the same exams.

    The model and the data are the demo's own, whatever the recipe names.
    """
    given = list(words or ())
    name = given.pop(0) if given and "=" not in given[0] else None
    settings = given if seed is None else [*given, f"seed={seed}"]
    # A run knows its own recipe; one that was stopped before it began is begun.
    resume = resume and (folder / "recipe.yaml").exists()
    recipe = Run.open(folder).recipe if resume and not (name or settings) else None
    if recipe is None:
        recipe = load_recipe(name or "tiny/para_grpo", settings)
    if (folder / "recipe.yaml").exists() and not resume:
        raise RunError(f"{folder} holds a run already; go on with --resume, or choose another folder with --out")
    from saccade.demo import demo as whole

    with lines(out) as begin:
        outcome = whole(folder, recipe, resume=resume, begin=begin)
    show(outcome.tables)
    say(out, f"The report: {outcome.page}")


# ---- what commands share -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def progress(label: str, total: int | None = None) -> Iterator[Advance]:
    """A bar on a terminal, a line every ten seconds elsewhere."""
    with lines(out) as begin:
        yield begin(label, total)


def show(grids: Iterable[Any]) -> None:
    """Tables of texts (`evaluation.report.Grid`)."""
    if not out.is_terminal:
        out.width = LOG_WIDTH
    for grid in grids:
        table = Table(*grid.header, title=grid.title, title_justify="left", box=None, header_style="dim")
        for row in grid.rows:
            table.add_row(*map(escape, row))
        out.print()
        out.print(table)
