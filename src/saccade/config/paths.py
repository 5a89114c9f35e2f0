"""Resolve the relative paths of recipes: in a file they start at its folder, on the command line where it is run.

A recipe in memory holds absolute paths. A run's own recipe.yaml holds those inside the run's folder relative to it, so
that the folder can be moved.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from saccade.plugins import get_file
from saccade.utils.files import resolve_path

FILE_KEYS = (
    "model.path",
    "synthetic.haystack",
    "media.folder",
    *(f"data.{name}" for name in ("train", "validation", "test", "demonstrations", "media_root")),
)
_YAML_SUFFIXES = (".yaml", ".yml")


def resolve_paths(values: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the plain values of a recipe with relative paths of files and plugins joined to a folder.

    >>> resolve_paths({"data": {"train": "a.jsonl"}, "rewards": {"./mine.py": {"weight": 1}}}, Path("/r"))
    {'data': {'train': '/r/a.jsonl'}, 'rewards': {'/r/mine.py': {'weight': 1}}}
    """
    return _map_paths(values, lambda path: os.path.normpath(folder / Path(path).expanduser()))


def relativize_paths(values: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the plain values of a recipe with the absolute paths inside a folder relative to it.

    >>> relativize_paths({"data": {"train": "/r/a.jsonl", "test": "/b.jsonl"}}, Path("/r"))
    {'data': {'train': 'a.jsonl', 'test': '/b.jsonl'}}
    """
    root = resolve_path(folder)

    def relativize(path: str) -> str:
        is_inside = os.path.isabs(path) and Path(os.path.normpath(path)).is_relative_to(root)
        return os.path.relpath(path, root) if is_inside else path

    return _map_paths(values, relativize)


def list_plugin_files(values: Any) -> Iterator[Path]:
    """Yield the plugin files that plain values name, as keys or as values."""
    if isinstance(values, Mapping):
        for key, value in values.items():
            yield from list_plugin_files(key)
            yield from list_plugin_files(value)
    elif isinstance(values, list | tuple):
        for value in values:
            yield from list_plugin_files(value)
    elif isinstance(values, str) and _is_plugin_path(values):
        yield get_file(values) or Path(values)


def _map_paths(values: Mapping[str, Any], transform: Callable[[str], str]) -> dict[str, Any]:
    mapped = _map_plugin_paths(dict(values), transform)
    for key in FILE_KEYS:
        section_name, _, name = key.partition(".")
        section = mapped.get(section_name)
        value = section.get(name) if isinstance(section, Mapping) else None
        if isinstance(value, str) and value:
            mapped[section_name] = {**section, name: transform(value)}
        elif isinstance(value, Mapping):  # a mixture of files
            files = {transform(file) if isinstance(file, str) else file: weight for file, weight in value.items()}
            mapped[section_name] = {**section, name: files}
    return mapped


def _map_plugin_paths(value: Any, transform: Callable[[str], str]) -> Any:
    if isinstance(value, Mapping):
        return {_map_plugin_paths(key, transform): _map_plugin_paths(item, transform) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_map_plugin_paths(item, transform) for item in value]
    if not isinstance(value, str) or not _is_plugin_path(value):
        return value
    path, separator, object_name = value.partition(".py:")
    return f"{transform(path + '.py')}:{object_name}" if separator else transform(value)


def _is_plugin_path(text: str) -> bool:
    """Return whether a text is the path of a plugin, or of a YAML file such as a prompt format, and no sentence."""
    if len(text.split()) != 1 and not text.startswith(("/", "./", "../", "~/")):
        return False
    is_other = "\n" in text or "=" in text or "://" in text  # an override of a benchmark, an address
    return not is_other and (get_file(text) is not None or text.endswith(_YAML_SUFFIXES))
