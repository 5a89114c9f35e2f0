"""The command line: `saccade --help`. Whatever is heavy is imported inside the command that needs it."""

import asyncio
import contextlib
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from typer.core import TyperGroup

from saccade import __version__
from saccade.config import Recipe, dump, load_recipe, recipe_names, recipe_path
from saccade.errors import DataError, RunError, SaccadeError
from saccade.runlog import Run, version_of, writing

if TYPE_CHECKING:
    from saccade.rollouts.stage import Stage

QUIET_SECONDS = 10.0  # between two lines of progress where there is no terminal

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
            again = shlex.join(["saccade", *(word for word in sys.argv[1:] if word != "--resume"), "--resume"])
            err.print("\nStopped." + (f" Go on with: {escape(again)}" if resumable else ""), soft_wrap=True)
            raise typer.Exit(130) from None


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
    table, bad = Table("", "found", "wanted", "", box=None), []
    for name, found, wanted, good in _symptoms():
        table.add_row(name, escape(found), escape(wanted), "[green]ok[/green]" if good else "[red]no[/red]")
        bad += [] if good else [name]
    out.print(table)
    if bad:
        raise RunError(f"this machine can't run Saccade as it is: mend {', '.join(bad)}")


def _symptoms() -> Iterator[tuple[str, str, str, bool]]:
    """Name, what was found, what is wanted, whether that is good."""
    import importlib.metadata
    import platform

    from packaging.requirements import Requirement

    python = platform.python_version()
    yield "python", python, ">=3.11", sys.version_info >= (3, 11)
    for line in importlib.metadata.requires("saccade") or []:
        wanted = Requirement(line)
        if wanted.marker is None:
            found = version_of(wanted.name)
            good = found is not None and wanted.specifier.contains(found, prereleases=True)
            yield wanted.name, found or "not installed", str(wanted.specifier), good
    import torch

    policy = os.environ.get("OMP_WAIT_POLICY", "not set")
    yield "threads", f"{torch.get_num_threads()} of {os.cpu_count()} cores, waiting {policy}", "", True
    cuda = torch.cuda.is_available()
    yield "device", torch.cuda.get_device_name() if cuda else "cpu", "", True
    for name, check in (("video", _films), ("this folder", _writes)):
        try:
            yield name, check(), "", True
        except SaccadeError as error:
            yield name, str(error), "", False


def _films() -> str:
    """Write a clip and read it back. Raises MediaError."""
    import numpy as np

    from saccade.data.world.film import write_clip
    from saccade.media import video

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "clip.mp4"
        write_clip(path, np.zeros((8, 32, 32, 3), np.uint8), 4.0)
        clip = video.probe(str(path))
    return f"H.264 written and read back, {clip.frames} frames"


def _writes() -> str:
    with writing(Path.cwd()), tempfile.TemporaryFile(dir=Path.cwd()):
        return f"{Path.cwd()} can be written"


# ---- making models and data ----------------------------------------------------------------------------------------


@model_app.command("tiny")
def model_tiny(
    folder: Annotated[Path, typer.Argument(help="Where the checkpoint goes.")],
    family: Annotated[str, typer.Option(help="The model family.")] = "qwen3_vl",
    seed: Annotated[int, typer.Option(help="The seed of its random weights.")] = 0,
) -> None:
    """Make a randomly initialised checkpoint of about a million parameters."""
    from saccade.model.tiny import make_tiny

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
    from saccade.data.world import make_world

    loaded = load_recipe(recipe, settings or ())
    world = loaded.world
    with progress("world", world.train + world.validation + world.test) as advance, writing(folder):
        made = dict.fromkeys(("train", "validation", "test"), 0)

        def told(split: str, done: int, total: int) -> None:
            made[split] = done
            advance(sum(made.values()), f"{split} {done}/{total}")

        make_world(folder, world, seed=loaded.seed, progress=told)
    out.print(f"wrote {escape(str(folder))}", soft_wrap=True)


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
    from saccade.data.rows import read_demos
    from saccade.training import sft as training

    loaded = _with_paths(load_recipe(recipe, settings or ()), model, world)
    demos = read_demos(_named(folder / loaded.data.traces, loaded.data.traces, "data.traces"))
    run = Run.create(folder, loaded, resume=resume)
    stage = _stage(loaded, _newest(folder) or Path(loaded.model.path))
    with progress("sft", loaded.sft.steps) as advance:

        def log(values: Mapping[str, float]) -> None:
            run.log("sft", int(values["step"]), values)
            advance(int(values["step"]), f"loss {values['loss']:.3f}")

        _finish(stage, training.train(stage, demos, folder=folder / "sft", log=log))
    run.mark_done("sft", {"checkpoint": str(_newest(folder))})
    out.print(f"wrote {escape(str(_newest(folder)))}", soft_wrap=True)


@app.command("eval")
def evaluate(
    folder: RunFolder,
    settings: Settings = None,
    model: ModelPath = None,
    tasks: Annotated[Path | None, typer.Option(help="A file of tasks; the recipe's test split by default.")] = None,
    name: Annotated[str, typer.Option(help="What the evaluation is called.")] = "test",
) -> None:
    """Evaluate a run's newest checkpoint; results stay in its folder, and all of them are shown side by side."""
    from saccade.data.rows import read_tasks
    from saccade.evaluation import report, run

    loaded = load_recipe(str(Run.open(folder).path / "recipe.yaml"), settings or ())
    rows = read_tasks(tasks or _named(folder / loaded.data.test, loaded.data.test, "data.test"))
    weights = _weights(model) if model else _newest(folder) or Path(loaded.model.path)
    stage = _stage(loaded, weights)
    chosen = len(run.choose(rows, loaded.evaluation.limit))
    with progress(f"eval {name}", chosen) as advance:
        work = run.evaluate(
            rows,
            agent=stage.agent,
            base=stage.context(seed=loaded.seed),
            score=stage.score,
            settings=loaded.evaluation,
            path=folder / "evaluations" / f"{name}.jsonl",
            identity={"weights": str(weights.resolve()), "agent": loaded.agent.model_dump(mode="json")},
            on_done=lambda done, _: advance(done, ""),
        )
        _finish(stage, work)
    for grid in report.grids(report.compare(report.read_evaluations(folder))):
        table = Table(*grid.header, title=grid.title)
        for row in grid.rows:
            table.add_row(*map(escape, row))
        out.print(table)


@app.command()
def ask(
    folder: RunFolder,
    video: Annotated[Path, typer.Argument(help="A video.")],
    question: Annotated[str, typer.Argument(help="What to ask about it.")],
    settings: Settings = None,
    model: ModelPath = None,
) -> None:
    """Ask a run's newest checkpoint about a video, and watch it look."""
    from saccade.rollouts.run import run_episode
    from saccade.types import Kind, Media, Task

    loaded = load_recipe(str(Run.open(folder).path / "recipe.yaml"), settings or ())
    stage = _stage(loaded, _weights(model) if model else _newest(folder) or Path(loaded.model.path))
    task = Task(id="ask", question=question, media=(Media(path=str(video)),), kind=Kind.OPEN, gold="")
    context = stage.context(seed=loaded.seed, temperature=loaded.evaluation.temperature, watch=_say)
    episode = _finish(stage, run_episode(task, stage.agent, context))
    if episode.error is not None:
        raise DataError(f"the question could not be answered: {episode.error}")
    out.print(f"[bold]{escape(episode.answer or 'no answer')}[/bold] ({episode.end.value})")


def _say(event: str, data: Mapping[str, Any]) -> None:
    """Show what an episode does while it does it."""
    if event == "reply":
        out.print(escape(data["reply"].text), style="cyan")
    elif event == "result":
        result = data["result"]
        out.print(f"  {escape(result.error or result.text)}", style="dim")


# ---- what commands share -------------------------------------------------------------------------------------------


def _with_paths(recipe: Recipe, model: Path | None, world: Path | None) -> Recipe:
    """The recipe with the places that options name, made absolute so that the run can be resumed from anywhere."""
    if model is not None:
        path = str(_weights(model).resolve())
        recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"path": path})})
    if world is not None:
        root = world.resolve()
        places = {split: str(root / split / "tasks.jsonl") for split in ("train", "validation", "test")}
        data = recipe.data.model_copy(update={**places, "traces": str(root / "train" / "traces.jsonl")})
        recipe = recipe.model_copy(update={"data": data})
    return recipe


def _named(path: Path, setting: str, key: str) -> Path:
    if not setting:
        raise DataError(f"the recipe names no {key}; give --world, or set {key}=FILE")
    return path


def _newest(folder: Path) -> Path | None:
    """The newest checkpoint of a run: of its RL if there is one, else of its SFT."""
    from saccade.training import checkpoint

    found = checkpoint.newest(folder / "rl") or checkpoint.newest(folder / "sft")
    return found.folder if found else None


def _weights(path: Path) -> Path:
    if not (path / "recipe.yaml").exists():
        return path
    newest = _newest(path)
    if newest is None:
        raise RunError(f"the run {path} has no checkpoint yet")
    return newest


def _stage(recipe: Recipe, weights: Path) -> "Stage":
    from saccade.rollouts.stage import Stage

    if weights == Path():
        raise RunError("the recipe names no model; give --model, such as a folder that `saccade model tiny` made")
    model = recipe.model.model_copy(update={"path": str(weights)})
    return Stage.of(recipe.model_copy(update={"model": model}))


def _finish(stage: "Stage", work: Coroutine[Any, Any, Any]) -> Any:
    """Run the work of a stage to its end, and close the engine whatever happens."""

    async def run() -> Any:
        try:
            return await work
        finally:
            await stage.engine.close()

    return asyncio.run(run())


@contextlib.contextmanager
def progress(label: str, total: int) -> Iterator[Callable[[int, str], None]]:
    """A bar on a terminal, a line every ten seconds elsewhere; the function takes what is done and a remark."""
    if out.is_terminal:
        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        with Progress(TextColumn("{task.description}"), *columns, TextColumn("{task.fields[remark]}")) as bar:
            task = bar.add_task(label, total=total, remark="")
            yield lambda done, remark: bar.update(task, completed=done, remark=remark)
        return
    told = 0.0

    def tell(done: int, remark: str) -> None:
        nonlocal told
        if done >= total or time.monotonic() - told > QUIET_SECONDS:
            told = time.monotonic()
            print(f"{label} {done}/{total} {remark}".rstrip(), flush=True)

    yield tell
