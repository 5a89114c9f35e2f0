"""`saccade recipes`: list recipes, show one, check them, and plan their steps."""

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Column, Table

from saccade.cli.terminal import RecipeName, Settings, err, out, print_table, print_tables
from saccade.config.load import dump_recipe, find_recipe, list_recipes, load_recipe
from saccade.errors import ConfigError, SaccadeError
from saccade.reporting.console import print_text

recipes_app = typer.Typer(help="List recipes, show one in full, check them, and plan their steps.")


@recipes_app.callback(invoke_without_command=True)
def _list(ctx: typer.Context) -> None:
    """List the packaged recipes."""
    if ctx.invoked_subcommand is not None:
        return
    table = Table(Column("recipe", no_wrap=True), "description", box=None)
    for name in list_recipes():
        first_line = find_recipe(name).read_text(encoding="utf-8").splitlines()[0]
        table.add_row(name, escape(first_line.removeprefix("# ")))
    print_table(table)


@recipes_app.command("show")
def _show(name: RecipeName, settings: Settings = None) -> None:
    """Print a recipe with everything it inherits and every default."""
    typer.echo(dump_recipe(load_recipe(name, settings or ())), nl=False)


@recipes_app.command("check")
def _check(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME|SETTING]...", help="Recipes (all packaged ones by default), and settings for them."
        ),
    ] = None,
    gpus: Annotated[int, typer.Option(min=1, help="GPUs that training is sharded over.")] = 1,
    video: Annotated[str, typer.Option(help="Size of a video, width x height in pixels.")] = "1920x1080",
    question: Annotated[int, typer.Option(min=0, help="Tokens of a question with its options.")] = 64,
    reply: Annotated[int | None, typer.Option(min=1, help="Tokens of a usual reply; the maximum by default.")] = None,
    calls: Annotated[
        int | None, typer.Option(min=0, help="Calls of a usual tool turn; the maximum by default.")
    ] = None,
) -> None:
    """Check recipes, and print the tokens, images and memory of their steps; no weights are loaded."""
    from saccade.checks.estimates import PlanAssumptions
    from saccade.checks.plan import NOTE, build_plan
    from saccade.checks.run_checks import check_recipe

    settings = [word for word in names or () if "=" in word]
    recipe_names = [word for word in names or () if "=" not in word] or list_recipes()
    assumptions = PlanAssumptions(
        video_size=_parse_video_size(video), question_tokens=question, reply_tokens=reply, calls_per_turn=calls
    )
    failed: list[str] = []
    for name in recipe_names:
        try:
            recipe = load_recipe(name, settings)
            check_recipe(recipe)
            # The model path of a run's recipe is relative to the run's folder.
            print_tables(build_plan(name, recipe, assumptions, gpus=gpus, model_root=Path(name).parent))
        except SaccadeError as error:  # continue with the other recipes
            failed.append(name)
            err.print(escape(str(error) if name in str(error) else f"{name}: {error}"), style="red", soft_wrap=True)
    if len(failed) < len(recipe_names):
        print_text(out, f"\n{NOTE.format(question=question)}", style="dim")
    if failed:
        raise typer.Exit(1)


def _parse_video_size(text: str) -> tuple[int, int]:
    width, _, height = text.partition("x")
    if not (width.isdecimal() and height.isdecimal() and int(width) and int(height)):
        raise ConfigError(
            f"--video can't be {text!r}; write it as width x height, such as 1920x1080", key="--video", value=text
        )
    return int(width), int(height)
