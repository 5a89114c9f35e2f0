"""`saccade recipes`: list recipes, show one, explain a key, and plan the steps of recipes."""

import inspect
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Column, Table

from saccade.cli.terminal import (
    RecipeName,
    Settings,
    complete_recipe,
    complete_recipe_or_setting,
    complete_setting,
    err,
    out,
    print_table,
    print_tables,
)
from saccade.config.load import dump_recipe, find_recipe, format_value, list_recipes, load_recipe
from saccade.config.schema import Recipe
from saccade.errors import ConfigError, SaccadeError
from saccade.reporting.console import print_text


def _complete_key(ctx: typer.Context, incomplete: str) -> list[str]:
    return [text.removesuffix("=") for text in complete_setting(ctx, incomplete)]


_MAX_VIDEO_SIDE = 65_535  # pixels

recipes_app = typer.Typer(help="List recipes, show one in full, explain a key, and plan steps.")


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


@recipes_app.command("explain")
def _explain(
    key: Annotated[
        str, typer.Argument(help="A key, such as rl.group_size or rl.loss.settings.", autocompletion=_complete_key)
    ],
    recipe: Annotated[
        str,
        typer.Option(
            help="The recipe whose value is shown and whose plugins are meant.", autocompletion=complete_recipe
        ),
    ] = "tiny/para_grpo",
) -> None:
    """Explain a key of recipes or a setting of a plugin: its meaning, type, default, and value in a recipe."""
    from saccade.config.reference import explain_key

    description = explain_key(key.rstrip(".="), load_recipe(recipe))
    print_text(out, description.meaning)
    for label, value in (("default", description.default), (f"in {recipe}", description.value)):
        if value is not inspect.Parameter.empty:
            print_text(out, f"{label}: {format_value(value)}")
    if description.type_name:
        print_text(out, f"type: {description.type_name}")
    if description.keys:
        table = Table(Column("key", no_wrap=True), "meaning", box=None)
        for name, meaning in description.keys.items():
            table.add_row(escape(name), escape(meaning))
        print_table(table)


@recipes_app.command("plan")
def _plan(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME|SETTING]...",
            help="Recipes (all packaged ones by default), and settings for them.",
            autocompletion=complete_recipe_or_setting,
        ),
    ] = None,
    gpus: Annotated[
        int, typer.Option(min=1, max=1024, help="GPUs of a node, over which training shards the model.")
    ] = 1,
    nodes: Annotated[int, typer.Option(min=1, max=4096, help="Nodes; each has a copy of the sharded model.")] = 1,
    servers: Annotated[
        int | None,
        typer.Option(min=1, max=4096, help="Servers of the simulated steps, a GPU each; 1, 2, 4, … by default."),
    ] = None,
    up_to: Annotated[
        int,
        typer.Option(
            "--up-to", min=0, max=4096, help="Simulate clusters of 1 to this many GPUs, each split in the best way."
        ),
    ] = 0,
    costs: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="Simulate with the costs that this run measured, not with those of an H100."),
    ] = None,
    costs_gpus: Annotated[
        int | None,
        typer.Option("--costs-gpus", min=1, max=4096, help="GPUs on which the run of --costs trained; 1 by default."),
    ] = None,
    video_size: Annotated[str, typer.Option(help="Size of a video, width x height in pixels.")] = "1920x1080",
    question_tokens: Annotated[int, typer.Option(min=0, help="Tokens of a question with its options.")] = 64,
    reply_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a usual reply; the maximum by default.")
    ] = None,
    calls_per_turn: Annotated[
        int | None, typer.Option(min=0, help="Calls of a usual tool turn; the maximum by default.")
    ] = None,
) -> None:
    """Plan recipes: print the tokens, images and memory of their steps. `doctor` and `data check` validate files.

    With several GPUs, steps per hour on H100s are simulated for recipes with RL on a GPU.
    """
    settings = [word for word in names or () if "=" in word]
    recipe_names = [word for word in names or () if "=" not in word] or list_recipes()
    if costs_gpus is not None and costs is None:
        raise ConfigError("--costs-gpus needs --costs RUN, the run that trained on them", key="--costs-gpus")
    size, failed, recipes = _parse_video_size(video_size), list[str](), dict[str, Recipe]()

    def report_failure(name: str, error: SaccadeError) -> None:  # and continue with the other recipes
        failed.append(name)
        print_text(err, str(error) if name in str(error) else f"{name}: {error}", style="red")

    for name in recipe_names:  # before torch is imported: a typo is reported at once
        try:
            recipes[name] = load_recipe(name, settings)
        except SaccadeError as error:
            report_failure(name, error)
    if not recipes:
        raise typer.Exit(1)
    from saccade.checks.estimates import PlanAssumptions, explain_replaced_assumptions
    from saccade.checks.plan import NOTE, build_plan
    from saccade.checks.run_checks import check_recipe
    from saccade.checks.scaling import explain_missing_simulation, measure_run, simulate_recipe

    assumptions = PlanAssumptions(
        video_size=size, question_tokens=question_tokens, reply_tokens=reply_tokens, calls_per_turn=calls_per_turn
    )
    measured = None if costs is None else measure_run(costs, costs_gpus or 1)
    for name, recipe in recipes.items():
        try:
            check_recipe(recipe)
            ignored = [option for option, value in (("--servers", servers), ("--up-to", up_to)) if value]
            sentences = explain_replaced_assumptions(recipe, assumptions)
            if reason := explain_missing_simulation(recipe, has_costs=measured is not None):
                sentences += [f"{option} has no effect: no steps are simulated, since {reason}" for option in ignored]
            for sentence in sentences:
                print_text(err, f"{name}: {sentence}", style="yellow")
            # The model path of a run's recipe is relative to the run's folder.
            root = Path(name).parent
            print_tables(build_plan(name, recipe, assumptions, gpus=gpus, nodes=nodes, model_root=root))
            if gpus * nodes > 1 or servers or up_to or measured:
                shape = (gpus * nodes, servers, up_to)
                print_tables(simulate_recipe(recipe, assumptions, *shape, model_root=root, measured=measured))
        except SaccadeError as error:
            report_failure(name, error)
    if len(failed) < len(recipe_names):
        print_text(out, f"\n{NOTE.format(question=question_tokens)}", style="dim")
    if failed:
        raise typer.Exit(1)


def _parse_video_size(text: str) -> tuple[int, int]:
    width, _, height = text.partition("x")
    # Longer numbers aren't converted: Python refuses those of thousands of digits.
    sizes = [int(side) for side in (width, height) if side.isdecimal() and len(side) <= len(str(_MAX_VIDEO_SIDE))]
    if len(sizes) < 2 or not all(1 <= side <= _MAX_VIDEO_SIDE for side in sizes):
        raise ConfigError(
            f"--video-size can't be {text!r}; write it as width x height, such as 1920x1080, each at most "
            f"{_MAX_VIDEO_SIDE:,}",
            key="--video-size",
            value=text,
        )
    return sizes[0], sizes[1]
