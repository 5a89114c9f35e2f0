"""The folder of a world, of either medium: whose it is, and its JSON files."""

import json
import os
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import saccade
from saccade.errors import DataError

SPLITS = ("train", "validation", "test")
FORMAT = 2


def claim(root: Path, given: Mapping[str, Any], packages: tuple[str, ...]) -> None:
    """Write world.json, or make sure that the one there is this world's; `packages` are those its files depend on.

    Raises DataError for a folder that holds another world, or something else.
    """
    identity = {"format": FORMAT, **given}
    path = root / "world.json"
    if path.exists():
        there = read_json(path)
        changed = [key for key, value in identity.items() if there.get(key) != value]
        if changed:
            raise DataError(f"{root} holds another world (its {', '.join(changed)} differ); give a new folder")
        return
    # Never write into a folder that is something else.
    if root.exists() and any(root.iterdir()):
        raise DataError(f"{root} is not empty and holds no world; give a new folder")
    root.mkdir(parents=True, exist_ok=True)
    versions = {"saccade": saccade.__version__, **{package: version(package) for package in packages}}
    write_json(path, {**identity, "versions": versions})


def medium(folder: str | os.PathLike[str]) -> str:
    """What the world in a folder is made of: "video" or "image"."""
    settings = read_json(Path(folder) / "world.json").get("settings")
    # Worlds of videos don't say so: they are as they were before there were others.
    return str(settings.get("media", "video")) if isinstance(settings, dict) else "video"


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """A JSON object as a file; it appears complete or not at all."""
    partial = path.with_name(path.name + ".part")
    partial.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    os.replace(partial, path)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a world. Raises DataError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} can't be read; is the world complete? Make it again in the same folder") from error
    if not isinstance(value, dict):
        raise DataError(f"{path} is not a JSON object")
    return value
