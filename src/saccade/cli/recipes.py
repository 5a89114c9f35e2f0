"""`saccade recipes`: list them, show one, check them and plan a step of each."""

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Column, Table

from saccade.commands._terminal import RecipeName, Settings, err, out, print_table, show
from saccade.config import dump, load_recipe, recipe_names, recipe_path
from saccade.errors import ConfigError, SaccadeError
from saccade.view.live import say

recipes = typer.Typer(help="The recipes: list them, show one in full, check them and plan a step of each.")


@recipes.callback(invoke_without_command=True)
def _list(ctx: typer.Context) -> None:
    """List the packaged recipes."""
    if ctx.invoked_subcommand is not None:
        return
    table = Table(Column("recipe", no_wrap=True), "what it is", box=None)
    for name in recipe_names():
        first = recipe_path(name).read_text(encoding="utf-8").splitlines()[0]
        table.add_row(name, escape(first.removeprefix("# ")))
    print_table(table)


@recipes.command("show")
def _show(name: RecipeName, settings: Settings = None) -> None:
    """Print a recipe with everything it extends and every default."""
    typer.echo(dump(load_recipe(name, settings or ())), nl=False)


@recipes.command("check")
def _check(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME|SETTING]...", help="Recipes (all packaged ones by default), and settings for them."
        ),
    ] = None,
    gpus: Annotated[int, typer.Option(min=1, help="GPUs that training is divided over.")] = 1,
    video: Annotated[str, typer.Option(help="The size of a video, width x height in pixels.")] = "1920x1080",
    question: Annotated[int, typer.Option(min=0, help="Tokens of a question with its options.")] = 64,
    reply: Annotated[int | None, typer.Option(min=1, help="Tokens of a usual reply; the most by default.")] = None,
    calls: Annotated[int | None, typer.Option(min=0, help="Calls of a usual tool turn; the most by default.")] = None,
) -> None:
    """Check recipes, and say what a step of each takes: tokens, pictures, memory; nothing is loaded."""
    from saccade import preflight
    from saccade.planning.tables import NOTE, plan
    from saccade.planning.talks import Assumed
    from saccade.rollouts.stage import trainable

    words = list(names or ())
    settings = [word for word in words if "=" in word]
    chosen = [word for word in words if "=" not in word] or recipe_names()
    assumed = Assumed(video=_size(video), question=question, reply=reply, calls=calls)
    bad: list[str] = []
    for name in chosen:
        try:
            recipe = load_recipe(name, settings)
            preflight.check(trainable(recipe))
            # A run's recipe names its model by a path that starts at the run's folder.
            show(plan(name, recipe, assumed, gpus=gpus, root=Path(name).parent))
        except SaccadeError as error:  # the others are checked all the same
            bad.append(name)
            err.print(escape(str(error) if name in str(error) else f"{name}: {error}"), style="red", soft_wrap=True)
    if len(bad) < len(chosen):
        say(out, f"\n{NOTE.format(question=question)}", style="dim")
    if bad:
        raise typer.Exit(1)


def _size(text: str) -> tuple[int, int]:
    width, _, height = text.partition("x")
    if not (width.isdecimal() and height.isdecimal() and int(width) and int(height)):
        raise ConfigError(f"--video can't be {text!r}; write it as width x height, such as 1920x1080")
    return int(width), int(height)
