"""`saccade new KIND NAME`: write a plugin that works, and its test."""

import keyword
import re
import sys
import sysconfig
from importlib.machinery import PathFinder
from pathlib import Path
from string import Template
from typing import Annotated

import typer

from saccade.cli.terminal import out
from saccade.errors import ConfigError, RunError
from saccade.plugins import list_plugins
from saccade.reporting.console import print_text
from saccade.utils.files import convert_file_errors, write_text

FILES_FOLDER = Path(__file__).parent / "new_files"
# By kind: the folder of the packaged plugins, and what a recipe writes to use the file.
KINDS = {
    "reward": ("rewards", "rewards:\n  {path}: {{ weight: 0.1, settings: {{ tokens: 128 }} }}"),
    "tool": ("tools", "environment:\n  settings:\n    tools:\n      {path}: {{}}"),
    "environment": ("environments", "environment: {{ name: {path} }}"),
}

new_app = typer.Typer(no_args_is_help=True, help="Write a plugin of your own that works, with its test.")
Name = Annotated[str, typer.Argument(help="Its name: a Python identifier, such as brevity.")]
Folder = Annotated[Path, typer.Option("--out", help="The folder to write NAME.py and test_NAME.py to.")]


@new_app.command("reward")
def _write_reward(name: Name, folder: Folder = Path()) -> None:
    """Write a reward, a function of an episode."""
    write_plugin("reward", name, folder)


@new_app.command("tool")
def _write_tool(name: Name, folder: Folder = Path()) -> None:
    """Write a tool, a function that the model calls."""
    write_plugin("tool", name, folder)


@new_app.command("environment")
def _write_environment(name: Name, folder: Folder = Path()) -> None:
    """Write an environment: the prompt, what follows each reply, and when an episode ends."""
    write_plugin("environment", name, folder)


def write_plugin(kind: str, name: str, folder: Path) -> None:
    """Write the plugin and its test, and print how to use them.

    Raises ConfigError for a name that no plugin of the kind can have, RunError if one of the files exists.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise ConfigError(
            f"{name!r} can't be the name of a plugin; use lower-case letters, digits and _, such as my_{kind}",
            key="NAME",
            value=name,
        )
    plugin_folder, usage = KINDS[kind]
    if name in list_plugins(plugin_folder):
        raise ConfigError(f"there is a packaged {kind} {name!r}; choose another name", key="NAME", value=name)
    paths = {folder / f"{name}.py": f"{kind}.txt", folder / f"test_{name}.py": f"{kind}_test.txt"}
    existing = next((path for path in paths if path.exists()), None)
    if existing is not None:
        raise RunError(f"{existing} exists; delete it, or choose another name or --out", key=str(existing))
    installed = PathFinder.find_spec(name, [sysconfig.get_path(scheme) for scheme in ("purelib", "platlib")])
    if name in sys.stdlib_module_names or installed is not None:
        raise ConfigError(
            f"Python would import this {kind} in place of its module {name!r}; choose another name, such as my_{name}",
            key="NAME",
            value=name,
        )
    values = {"name": name, "class_name": name.title().replace("_", "")}
    with convert_file_errors(folder):
        for path, file in paths.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, Template((FILES_FOLDER / file).read_text(encoding="utf-8")).substitute(values))
            print_text(out, f"wrote {path}")
    plugin_path = str(folder / f"{name}.py") if folder.is_absolute() else f"./{folder / name}.py"
    print_text(out, f"Test it: python -m pytest {folder / f'test_{name}.py'}")
    print_text(out, f"Use it in a recipe in this folder:\n{usage.format(path=plugin_path)}")
