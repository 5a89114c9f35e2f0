"""The command line: `saccade --help`. Whatever is heavy is imported inside the command that needs it."""

import contextlib
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from typer.core import TyperGroup

from saccade import __version__
from saccade.commands._terminal import MODEL_OR_SERVER, ModelPath, RecipeName, Settings, err, out, progress, show
from saccade.commands.data import data
from saccade.commands.doctor import doctor
from saccade.commands.evaluate import evaluation
from saccade.commands.lab import lab
from saccade.commands.recipes import recipes
from saccade.commands.serve import serve
from saccade.config import load_recipe
from saccade.errors import DataError, MediaError, RunError, SaccadeError
from saccade.runlog import Run, writing
from saccade.view.live import Watcher, lines, say, summary


def settle() -> None:
    """What has to be said before torch is imported; the number of threads is the recipe's."""
    # Threads that spin long make steps 5 times slower where other processes compute; threads that never do, a third
    # slower where none does. So they spin for some microseconds.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
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
model_app = typer.Typer(no_args_is_help=True, help="Make models.")
app.add_typer(recipes, name="recipes")
app.add_typer(model_app, name="model")
app.add_typer(data, name="data")
app.command("lab")(lab)
app.add_typer(evaluation, name="eval")
app.command("serve")(serve)
app.command("doctor")(doctor)

Out = Annotated[Path, typer.Option("--out", help="The run folder to write.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with the run where it stopped.")]
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


# ---- making models and data ----------------------------------------------------------------------------------------


@model_app.command("tiny")
def model_tiny(
    folder: Annotated[Path, typer.Argument(help="Where the checkpoint goes.")],
    family: Annotated[str, typer.Option(help="The model family.")] = "qwen3_vl",
    seed: Annotated[int, typer.Option(help="The seed of its random weights.")] = 0,
    tied: Annotated[bool, typer.Option("--tied/--untied", help="Whether input and output share embeddings.")] = True,
) -> None:
    """Make a randomly initialised checkpoint of about a million parameters."""
    from saccade.model.tiny import make_tiny

    # Weights that were trained must not be lost to a repeated command.
    if (folder / "config.json").exists():
        raise RunError(f"{folder} already holds a model; choose another folder")
    with writing(folder):
        make_tiny(str(folder), family=family, seed=seed, tied=tied)
    out.print(f"wrote {escape(str(folder))}", soft_wrap=True)


@data.command("world")
def data_world(
    folder: Annotated[Path, typer.Argument(help="Where the world goes.")],
    settings: Settings = None,
    recipe: Annotated[str, typer.Option(help="The recipe whose `world` and `seed` are used.")] = "tiny/base",
) -> None:
    """Make a needle world: clips with events at known times (or, with world.media=image, pictures with small cards at
    known places), tasks with exact labels, traces to learn from.
    """
    from saccade import stages

    loaded = load_recipe(recipe, settings or ())
    world = loaded.world
    with progress("world", world.files) as advance:
        found = stages.world(folder, loaded, told=advance)
    what = {"video": "clips", "image": "pictures"}[world.media]
    splits = ", ".join(f"{count} {split}" for split, count in found.clips.items())
    counts = f"{sum(found.clips.values())} {what} ({splits}), {sum(found.tasks.values())} tasks, sound"
    out.print(f"wrote {escape(str(folder))}: {counts}", soft_wrap=True)


# ---- learning and judging ------------------------------------------------------------------------------------------


def learning(stage: str, shown: str) -> Callable[..., None]:
    """The command of a stage of training, which shows one of its metrics as it goes."""

    def command(
        recipe: RecipeName,
        settings: Settings = None,
        folder: Out = Path("runs") / stage,
        model: ModelPath = None,
        world: WorldPath = None,
        resume: Resume = False,
    ) -> None:
        from saccade import stages

        loaded = stages.with_paths(load_recipe(recipe, settings or ()), folder=folder, model=model, world=world)
        learn, steps = {"sft": (stages.sft, loaded.sft.steps), "rl": (stages.rl, loaded.rl.steps)}[stage]
        with progress(stage, steps) as advance:
            weights = learn(
                folder, loaded, resume=resume, on_step=lambda step, row: advance(step, f"{shown} {row[shown]:.3f}")
            )
        out.print(f"wrote {escape(str(weights))}", soft_wrap=True)

    return command


app.command("sft", help="Supervised fine-tuning on traces: the cold start.")(learning("sft", "loss"))
app.command("train", help="Reinforcement learning on tasks, from a model or from a run's newest checkpoint.")(
    learning("rl", "reward")
)


@app.command()
def ask(
    question: Annotated[str, typer.Argument(help="What to ask.")],
    model: Annotated[str, MODEL_OR_SERVER],
    settings: Settings = None,
    video: Annotated[list[Path] | None, typer.Option("--video", help="A video; may be given again.")] = None,
    image: Annotated[list[Path] | None, typer.Option("--image", help="A still picture; may be given again.")] = None,
    recipe: Annotated[str | None, typer.Option(help="A recipe; by default the run's, or one that fits.")] = None,
) -> None:
    """Ask a model about videos or pictures, and watch it think, look and answer."""
    for option, path in [*(("video", path) for path in video or ()), *(("image", path) for path in image or ())]:
        if not path.exists():
            raise DataError(f"there is no file {path}; give --{option} the path of a file")
    if not question.strip():
        raise DataError("the question is empty; say what you want to know")
    if not video and not image:
        raise DataError("there is nothing to look at; give --video or --image a file")
    from saccade import stages
    from saccade.rollouts.run import run_episode
    from saccade.types import Kind, Task

    media = _media(video or (), image or ())  # whatever is wrong with it is said before a model is loaded
    stage = stages.asking(model, recipe=recipe or "", settings=settings or ())
    task = Task(id="ask", question=question, media=media, kind=Kind.OPEN, gold="")
    with contextlib.closing(Watcher(out)) as watcher:
        context = stage.context(seed=stage.recipe.seed, temperature=stage.recipe.evaluation.temperature, watch=watcher)
        episode = stages.finish(stage, run_episode(task, stage.agent, context))
    if episode.error is not None:
        raise DataError(f"the question could not be answered: {episode.error}")
    said = f"Answer: {episode.answer}" if episode.answer else f"No answer ({episode.end.value})"
    say(out, said, style="bold")
    say(out, summary(episode), style="dim")


def _media(videos: Iterable[Path], images: Iterable[Path]) -> Any:
    """The files as media of a task, each opened once. Raises MediaError for what is not what it is given as."""
    from saccade.media import image, video
    from saccade.types import Media, MediaKind

    tries: dict[str, Callable[[str], Any]] = {"video": video.probe, "image": image.read}
    words = {"video": "a video", "image": "a still picture"}
    given = [*(("video", str(path)) for path in videos), *(("image", str(path)) for path in images)]
    for kind, path in given:
        other = "image" if kind == "video" else "video"
        try:
            tries[kind](path)
        except MediaError:
            with contextlib.suppress(MediaError):
                tries[other](path)
                raise DataError(f"{path} is {words[other]}; give it with --{other}") from None
            raise
    return tuple(Media(path=path, kind=MediaKind(kind)) for kind, path in given)


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
