"""Finding files: a plugin is one file that holds one public object of the same name.

    load("rewards", "choice")      src/saccade/rewards/choice.py holds `choice`
    load("rewards", "./mine.py")   a file anywhere holds `mine`
    load("rewards", "theirs")      an installed package's entry point of the group `saccade.rewards`

Files whose names begin with `_` are helpers. There is no list to edit: a new file is found the moment it exists.
"""

import difflib
import functools
import importlib
import importlib.util
import inspect
import math
import pkgutil
from collections.abc import Iterable, Mapping
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import TypeAdapter, ValidationError

from saccade.errors import ConfigError, boundary
from saccade.types import digest_of

AT_CALL = frozenset({"ctx", "accuracy"})  # keyword-only parameters that are given with every call, so never settings


def nearest(name: str, options: Iterable[str]) -> str:
    """The tail of an error on an unknown name: the nearest option, then all of them.

    >>> nearest("chioce", ["choice", "open"])
    "did you mean 'choice'? Found: choice, open"
    """
    found = sorted(options)
    close = difflib.get_close_matches(name, found, n=1, cutoff=0.5)
    listing = f"Found: {', '.join(found) or 'none'}"
    return f"did you mean {close[0]!r}? {listing}" if close else f"{listing[0].lower()}{listing[1:]}"


def names(folder: str) -> tuple[str, ...]:
    """The plugins of a folder such as "rewards" or "chat.families", sorted; nothing is imported but the folder."""
    return tuple(sorted({*_files(folder), *_entries(folder)}))


def load(folder: str, name: str) -> Any:
    """The public object of a plugin, by its name or by the path of its file.

    Raises ConfigError where the name is unknown, the file can't be imported or the object isn't in it.
    """
    if name.endswith(".py"):
        return _public(_from_path(Path(name)), Path(name).stem, name)
    if name in _files(folder):
        with boundary(ConfigError, f"the plugin {folder}/{name} can't be imported"):
            module = importlib.import_module(f"saccade.{folder}.{name}")
        return _public(module, name, f"saccade/{folder.replace('.', '/')}/{name}.py")
    entries = _entries(folder)
    if name not in entries:
        raise ConfigError(f"there is no {name!r} among the {folder}; {nearest(name, names(folder))}")
    with boundary(ConfigError, f"the plugin {name!r} of {folder} can't be imported from {entries[name].value}"):
        return entries[name].load()


def bind(folder: str, name: str, settings: Mapping[str, Any], **given: Any) -> functools.partial[Any]:
    """The plugin with its settings, each checked against the annotation of its keyword-only parameter.

    Of `given` (objects such as a model or a renderer) the plugin receives what its signature names. Raises ConfigError
    for an unknown setting, a missing one, or a value of the wrong type.
    """
    plugin = load(folder, name)
    with boundary(ConfigError, f"the signature of {folder}/{name} can't be read"):
        parameters = inspect.signature(plugin, eval_str=True).parameters
    keyword_only = {key: value for key, value in parameters.items() if value.kind is value.KEYWORD_ONLY}
    # An engine names a backbone, a server's client doesn't: who binds needn't know which.
    wanted = {key: value for key, value in given.items() if key in parameters}
    open_to = {key: value for key, value in keyword_only.items() if key not in wanted and key not in AT_CALL}
    for key in settings:
        if key not in open_to:
            raise ConfigError(f"{folder}/{name} has no setting {key!r}; {nearest(key, open_to)}")
    missing = [key for key, value in open_to.items() if value.default is value.empty and key not in settings]
    if missing:
        raise ConfigError(f"{folder}/{name} needs the setting {missing[0]!r}")
    values = {key: _checked(f"{folder}/{name}", open_to[key], value) for key, value in settings.items()}
    return functools.partial(plugin, **values, **wanted)


def _checked(place: str, parameter: inspect.Parameter, value: Any) -> Any:
    if parameter.annotation is parameter.empty:
        return value
    try:
        checked = TypeAdapter(parameter.annotation).validate_python(value)
    except ValidationError as error:
        expected = error.errors()[0]["msg"]
        raise ConfigError(f"{place}: the setting {parameter.name!r} can't be {value!r}: {expected.lower()}") from error
    if isinstance(checked, float) and not math.isfinite(checked):  # as everywhere in a recipe
        raise ConfigError(
            f"{place}: the setting {parameter.name!r} can't be {value!r}: input should be a finite number"
        )
    return checked


def _files(folder: str) -> tuple[str, ...]:
    # Importing the folder's own __init__ is cheap: it holds no code; the plugins in it stay untouched.
    try:
        package = importlib.import_module(f"saccade.{folder}")
    except ModuleNotFoundError:
        raise ConfigError(f"saccade has no plugin folder {folder!r}") from None
    return tuple(module.name for module in pkgutil.iter_modules(package.__path__) if not module.name.startswith("_"))


def _entries(folder: str) -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=f"saccade.{folder}")}


def _from_path(path: Path) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"there is no plugin file {path}")
    # The name is digested from the whole path, so that two files called mine.py don't meet in sys.modules.
    spec = importlib.util.spec_from_file_location(f"saccade_plugin_{digest_of(str(path.resolve()))[:12]}", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    with boundary(ConfigError, f"the plugin {path} can't be imported"):
        spec.loader.exec_module(module)
    return module


def _public(module: ModuleType, name: str, place: str) -> Any:
    if name not in vars(module):
        raise ConfigError(f"{place} must define one public object called {name!r}")
    return vars(module)[name]
