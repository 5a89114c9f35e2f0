"""The command line: `saccade --help`. Heavy modules are imported inside the commands that need them."""

import contextlib
import errno
import functools
import logging
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from typer.core import TyperGroup

from saccade import __version__
from saccade.cli.ablate import ablate
from saccade.cli.bench import bench
from saccade.cli.cluster import cluster_app
from saccade.cli.data import data_app
from saccade.cli.doctor import doctor
from saccade.cli.evaluate import evaluation_app
from saccade.cli.export import export
from saccade.cli.new import new_app
from saccade.cli.recipes import recipes_app
from saccade.cli.serve import serve
from saccade.cli.terminal import (
    MODEL_OR_SERVER,
    Settings,
    complete_recipe,
    complete_recipe_or_setting,
    complete_run,
    err,
    file_option,
    out,
    print_tables,
    show_progress,
)
from saccade.cli.train import OUT_KEY, OutOption, ResumeOption, build_stage_command, train
from saccade.cli.view import list_runs, view
from saccade.config.load import load_recipe
from saccade.errors import ConfigError, DataError, RunError, SaccadeError
from saccade.reporting.console import (
    EpisodePrinter,
    explain_missing_answer,
    print_text,
    show_progress_lines,
    summarize_usage,
)
from saccade.runs.run_folder import Run
from saccade.types import Episode
from saccade.utils.cpus import count_cpus
from saccade.utils.files import convert_file_errors, is_resumable, require_writable
from saccade.utils.jsonl import write_json
from saccade.utils.rank_exit import exit_rank
from saccade.utils.text import escape_control_characters

MAX_REPLY_CHARS = 2000  # of a reply without an answer
DEMO_RECIPE, QUICK_DEMO_RECIPE = "tiny/cue", "tiny/quick"


def configure_environment() -> None:
    """Set the environment variables that libraries read on import; the number of threads is the recipe's."""
    # Threads that spin long make steps 5 times slower beside other busy processes; threads that never spin make them
    # a third slower on an idle machine. So they spin for some microseconds.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    # One sentence reports a lost rank; torch's warnings about its connections, with C++ stacks, would surround it.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


class EscapingFormatter(logging.Formatter):
    """Shows control characters as visible ones: a logged name may come from a file or a server."""

    def format(self, record: logging.LogRecord) -> str:
        """Format a record."""
        return escape_control_characters(super().format(record))


# The commands as the help lists them, the common ones first, by the title of their panel.
COMMAND_PANELS = {
    "Start here": ("demo", "doctor", "recipes"),
    "Train and use a model": ("train", "sft", "rl", "eval", "ask", "view", "runs", "report", "export"),
    "Data, models and plugins": ("data", "model", "new"),
    "Servers and studies": ("serve", "cluster", "ablate", "bench"),
}


# The base of all errors of the command line itself, such as an unknown option; typer exports none but this child.
UsageError: Any = typer.BadParameter.__base__


@contextlib.contextmanager
def _escape_usage_errors() -> Iterator[None]:
    """Make control characters visible in the messages of usage errors, which quote arguments."""
    try:
        yield
    except UsageError as error:
        message = escape_control_characters(error.format_message())
        error.format_message = lambda: message
        raise


def _refuse_empty_values(command: Any) -> None:
    """Make every parameter of a command, and of the commands below it, refuse an empty text.

    As a path it would mean the current folder, which a script with an unset variable doesn't mean.
    """
    for parameter in command.params:
        parameter.consume_value = functools.partial(_consume_value, parameter.consume_value)
    if isinstance(command, TyperGroup):
        for child in command.commands.values():
            _refuse_empty_values(child)


def _consume_value(consume: Callable[[Any, Any], tuple[Any, Any]], ctx: Any, options: Any) -> tuple[Any, Any]:
    value, source = consume(ctx, options)
    is_empty = value == "" or (isinstance(value, list | tuple) and "" in value)
    if is_empty and source.name == "COMMANDLINE" and not ctx.resilient_parsing:
        raise typer.BadParameter("it is empty; give a value")
    return value, source


class CommandGroup(TyperGroup):
    """The root command, which turns errors into one line and an exit code, and refuses empty values."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _refuse_empty_values(self)

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of the commands in the order of the help."""
        order = [name for names in COMMAND_PANELS.values() for name in names]
        return sorted(self.commands, key=order.index)

    def get_command(self, ctx: Any, name: str) -> Any:
        """Return a command, with the title of its panel in the help."""
        command: Any = super().get_command(ctx, name)
        if command is not None:
            command.rich_help_panel = next(title for title, names in COMMAND_PANELS.items() if name in names)
        return command

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        """Parse the arguments before the command's name."""
        with _escape_usage_errors():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        """Run a command; exit with 1 on a SaccadeError or OSError (3: an alarm stopped the training), 130 on Ctrl-C."""
        try:
            with _escape_usage_errors():
                return super().invoke(ctx)
        except SaccadeError as error:
            err.print(escape(str(error)), style="red", soft_wrap=True)
            raise typer.Exit(error.exit_code) from None
        except OSError as error:  # a path that no file can have, or that can't be read: the command names it
            if error.errno == errno.EPIPE:
                raise
            name = f"{error.filename!s:.80}: " if error.filename else ""
            err.print(escape(f"{name}{(error.strerror or str(error)).lower()}"), style="red", soft_wrap=True)
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            command = self.get_command(ctx, ctx.invoked_subcommand or "")
            has_resume = command is not None and any("--resume" in option.opts for option in command.params)
            folder = ctx.meta.get(OUT_KEY)
            arguments = (argument for argument in sys.argv[1:] if argument != "--resume")
            resume_command = shlex.join([_resolve_program_name(), *arguments, "--resume"])
            hint = f" Resume with: {escape(resume_command)}" if has_resume else ""
            if has_resume and folder is not None and not is_resumable(folder):
                hint = " Nothing is saved yet; repeat the command."
            err.print(f"\nInterrupted.{hint}", soft_wrap=True)
            raise typer.Exit(130) from None


def _resolve_program_name() -> str:
    """Return how this program can be called again: its path if it isn't the `saccade` on PATH."""
    program, on_path = Path(sys.argv[0]), shutil.which("saccade")
    if program.name != "saccade" or not program.exists() or (on_path is not None and program.samefile(on_path)):
        return "saccade"
    return os.path.relpath(program)


app = typer.Typer(cls=CommandGroup, no_args_is_help=True, pretty_exceptions_enable=False)
model_app = typer.Typer(no_args_is_help=True, help="Make models.")
app.add_typer(recipes_app, name="recipes")
app.add_typer(model_app, name="model")
app.add_typer(data_app, name="data")
app.command("ablate")(ablate)
app.command("bench")(bench)
app.add_typer(evaluation_app, name="eval")
app.add_typer(new_app, name="new")
app.add_typer(cluster_app, name="cluster")
app.command("serve")(serve)
app.command("export")(export)
app.command("doctor")(doctor)
app.command("train")(train)
app.command("view")(view)
app.command("runs")(list_runs)
app.command("sft", help="Supervised fine-tuning on demonstrations: the cold start.")(build_stage_command("sft"))
app.command("rl", help="Reinforcement learning on tasks, from a model or from a run's newest checkpoint.")(
    build_stage_command("rl")
)


def main() -> None:
    """The entry point of `saccade`."""
    configure_environment()
    if logging.lastResort is not None:  # prints the warnings of a command that has no handler of its own
        logging.lastResort.setFormatter(EscapingFormatter())
    try:
        app()
    except SystemExit as request:
        if "TORCHELASTIC_RUN_ID" not in os.environ:  # set by torchrun
            raise
        exit_rank(request.code if isinstance(request.code, int) else int(request.code is not None))


@app.callback(invoke_without_command=True)
def _handle_root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """Train vision-language models that decide where to look."""
    if version:
        print(f"saccade {__version__}")
        raise typer.Exit


@model_app.command("tiny")
def make_model(
    folder: Annotated[Path, typer.Argument(help="The checkpoint folder to write.")],
    family: Annotated[str, typer.Option(help="The model family.")] = "qwen3_vl",
    seed: Annotated[int, typer.Option(help="Seed of its random weights.")] = 0,
    tied: Annotated[bool, typer.Option("--tied/--untied", help="Whether input and output share embeddings.")] = True,
) -> None:
    """Make a randomly initialized checkpoint of about a million parameters."""
    from saccade.models.tiny import make_tiny_model

    # A repeated command must not overwrite trained weights.
    if (folder / "config.json").exists():
        raise RunError(f"{folder} already holds a model; choose another folder", key=str(folder))
    with convert_file_errors(folder):
        make_tiny_model(str(folder), family=family, seed=seed, tie_word_embeddings=tied)
    out.print(f"wrote {escape(str(folder))}", soft_wrap=True)


@data_app.command("synth")
def generate_dataset(
    folder: Annotated[Path, typer.Argument(help="The folder to write.")],
    settings: Settings = None,
    recipe: Annotated[
        str, typer.Option(help="The recipe whose `synthetic` and `seed` are used.", autocompletion=complete_recipe)
    ] = "tiny/base",
) -> None:
    """Generate synthetic data: videos with short events at known times (or, with synthetic.media=image, images with
    small objects at known places), tasks with exact labels, and demonstrations for SFT.
    """
    loaded = load_recipe(recipe, settings or ())
    from saccade.runs import pipeline

    with show_progress("synth", loaded.synthetic.num_files) as update_progress:
        report = pipeline.generate_data(folder, loaded, on_progress=update_progress)
    splits = ", ".join(f"{count} {split}" for split, count in report.num_media.items())
    media = f"{sum(report.num_media.values())} {loaded.synthetic.media}s ({splits})"
    counts = f"{media}, {sum(report.num_tasks.values())} tasks, validated"
    out.print(f"wrote {escape(str(folder))}: {counts}", soft_wrap=True)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders.", autocompletion=complete_run)],
    page: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="A file .html, .md or .pdf to write; RUN/report.html by default."),
    ] = None,
) -> None:
    """Write a report about a run, finished or not: progress, alarms, validations, evaluations, curves, episodes, cost.

    Of several runs it compares recipes, accuracy, curves and cost; they need --out.
    """
    from saccade.runs.report import report_run, report_runs

    if len(runs) == 1:
        print_text(out, f"wrote {report_run(runs[0], page)}")
        return
    if page is None:
        raise RunError("a report of several runs needs a file; give --out FILE.html", key="--out")
    print_text(out, f"wrote {report_runs(runs, page)}")


@app.command()
def ask(
    question: Annotated[str, typer.Argument(help="The question.")],
    model: Annotated[str, MODEL_OR_SERVER],
    settings: Settings = None,
    video: Annotated[list[Path] | None, typer.Option("--video", help="A video; repeatable.")] = None,
    image: Annotated[list[Path] | None, typer.Option("--image", help="An image; repeatable.")] = None,
    recipe: Annotated[
        str | None, typer.Option(help="A recipe; by default the run's, or one that suits the model.")
    ] = None,
    json_file: Annotated[
        Path | None, file_option("--json", suffix=".json", help_text="A JSON file to write the episode to.")
    ] = None,
    page: Annotated[
        Path | None, file_option(suffix=".html", help_text="An HTML page to write, with every frame and token.")
    ] = None,
) -> None:
    """Ask a model about videos or images, and print its reasoning, tool calls and answer."""
    load_recipe(recipe or "tiny/base", settings or ())  # before torch is imported: a typo is reported at once
    for path in filter(None, (json_file, page)):
        require_writable(path)
    from saccade.runs import api

    with contextlib.closing(EpisodePrinter(out)) as printer:
        episode = api.ask(
            question,
            model=model,
            videos=video or (),
            images=image or (),
            recipe=recipe or "",
            settings=settings or (),
            on_event=printer,
        )
    if episode.error is None:
        _print_answer(episode)
    if json_file is not None:
        print_text(out, f"wrote {write_json(json_file, episode)}")
    if page is not None:
        from saccade.runs.report import write_episode_page

        print_text(out, f"wrote {write_episode_page(episode, model, page)}")
    if episode.error is not None:
        raise DataError(f"the episode failed: {episode.error}")


def _print_answer(episode: Episode) -> None:
    if episode.answer:
        print_text(out, f"Answer: {episode.answer}", style="bold")
    else:
        if episode.turns:
            print_text(out, f"The last reply: {episode.turns[-1].reply.text.strip()[:MAX_REPLY_CHARS] or '(nothing)'}")
        print_text(out, f"No answer: {explain_missing_answer(episode.status)}", style="bold")
    print_text(out, summarize_usage(episode), style="dim")


@app.command()
def demo(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RECIPE] [SETTINGS]...",
            help=f"{DEMO_RECIPE} by default, and settings for it.",
            autocompletion=complete_recipe_or_setting,
        ),
    ] = None,
    folder: OutOption = Path("runs/demo"),
    seed: Annotated[int | None, typer.Option(help="Seed of data, weights and sampling.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help=f"Run {QUICK_DEMO_RECIPE}, in a few minutes.")] = False,
    resume: ResumeOption = False,
) -> None:
    """Run the whole pipeline with data and a model of its own, and write a report."""
    settings = list(arguments or ())
    name = settings.pop(0) if settings and "=" not in settings[0] else None
    if quick and name is not None:
        raise ConfigError(f"--quick runs {QUICK_DEMO_RECIPE}; leave out {name}, or --quick", key="--quick", value=name)
    settings += [] if seed is None else [f"seed={seed}"]
    # A demo interrupted before its folder became a run starts from the beginning.
    resume = resume and (folder / "recipe.yaml").exists()
    recipe = Run.open(folder).recipe if resume and not (name or settings) else None
    is_new = recipe is None
    if recipe is None:
        recipe = load_recipe(name or (QUICK_DEMO_RECIPE if quick else DEMO_RECIPE), settings)
    from saccade.rollouts.components import runs_model_here
    from saccade.runs.demo import run_demo

    has_choice = name is not None or any(text.startswith("rollouts") for text in settings)
    has_cores = recipe.model.device == "cpu" and count_cpus() > 1
    if is_new and not has_choice and has_cores and runs_model_here(recipe):
        recipe = recipe.with_values({"rollouts.executor": "processes"})  # RL then samples on two cores
    with show_progress_lines(out) as add_task:
        report_path, tables = run_demo(
            folder, recipe, resume=resume, add_task=add_task, show_text=functools.partial(print_text, out)
        )
    print_tables(tables)
    print_text(out, f"Report: {report_path}")
