"""Find and load plugins: a plugin is one file that defines one public object of the same name.

    load("rewards", "choice")      src/saccade/rewards/choice.py defines `def choice`
    load("engines", "local")       src/saccade/engines/local.py defines `class Local`, and `local = Local`
    load("rewards", "./mine.py")   a file anywhere defines `mine` or `Mine`; "./mine.py:other" is its object `other`
    load("rewards", "theirs")      an installed package's entry point of the group `saccade.rewards`

A file of the folder that defines no object of its own name is a helper. There is no registry to edit.
"""

import ast
import difflib
import functools
import importlib
import importlib.util
import inspect
import math
import re
from collections.abc import Iterable, Mapping
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import TypeAdapter, ValidationError

from saccade.errors import ConfigError, convert_errors
from saccade.utils.files import read_text
from saccade.utils.hashing import compute_digest

# keyword-only parameters passed with each call, never settings
CALL_TIME_PARAMS = {"ctx", "correct", "advantage", "correct_G", "greedy_baseline_reward", "whiten"}

# The recipe keys of a folder's plugins: the one that names a plugin, and the one that its settings are below.
_RECIPE_KEYS = {
    "environments": ("environment.name", "environment.settings"),
    "engines": ("engine.name", "engine.settings"),
    "tools": ("environment.settings.tools", "{name}"),
    "chat.families": ("model.family", "{name}"),
    "reporting.loggers": ("loggers", "{name}"),
    "rewards": ("rewards.{name}", "rewards.{name}.settings"),
    "rewards.answer_types": ("answer_type", "rewards.accuracy.settings.answer_types.{name}"),
    "algorithms.advantages": ("rl.advantage.estimator", "rl.advantage.settings"),
    "algorithms.losses": ("rl.loss.name", "rl.loss.settings"),
    "algorithms.filters": ("rl.filters.{name}", "rl.filters.{name}"),
}


def suggest(name: str, candidates: Iterable[str], *, prefix: str = "") -> str:
    """Return the end of an error about an unknown name: the nearest candidate after `prefix`, then all of them.

    >>> suggest("chioce", ["choice", "open"])
    "did you mean 'choice'? Found: choice, open"
    """
    names = sorted(candidates)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    listing = f"Found: {', '.join(names) or 'none'}"
    return f"did you mean {prefix + close[0]!r}? {listing}" if close else f"{listing[0].lower()}{listing[1:]}"


def get_plugin_name(class_name: str) -> str:
    """Return the name of a class's plugin, as a recipe writes it.

    >>> get_plugin_name("SingleTurn")
    'single_turn'
    """
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", class_name).lower()


def get_object_name(name: str) -> str:
    """Return the name of a plugin's object, by the plugin's name or the path of its file.

    >>> get_object_name("length"), get_object_name("./mine.py"), get_object_name("./mine.py:other")
    ('length', 'mine', 'other')
    """
    return name.rpartition(".py:")[2] if ".py:" in name else Path(name).stem


def get_file(name: str) -> Path | None:
    """Return the file of a plugin that is named by a path, with or without the object in it, else None.

    >>> get_file("length"), get_file("./mine.py"), get_file("./mine.py:other")
    (None, PosixPath('mine.py'), PosixPath('mine.py'))
    """
    path, separator, _ = name.partition(".py:")
    return Path(path + ".py") if separator else Path(name) if name.endswith(".py") else None


def list_plugins(folder: str) -> tuple[str, ...]:
    """Return the plugin names of a folder such as "rewards" or "chat.families", sorted; import no plugin."""
    return tuple(sorted({*_list_plugin_modules(folder), *_find_entry_points(folder)}))


def load(folder: str, name: str) -> Any:
    """Return a plugin's object, by name or file (`./mine.py`, `./mine.py:object`). Raises ConfigError without one."""
    if file := get_file(name):
        return _get_public_object(_import_file(file), get_object_name(name), str(file))
    key = _get_name_key(folder, name)
    if stem := _list_plugin_modules(folder).get(name):
        with convert_errors(ConfigError, f"the plugin {folder}/{name} can't be imported", key=key, value=name):
            module = importlib.import_module(f"saccade.{folder}.{stem}")
        return _get_public_object(module, stem, f"saccade/{folder.replace('.', '/')}/{stem}.py")
    entries = _find_entry_points(folder)
    if name not in entries:
        suggestion = suggest(name, list_plugins(folder))
        raise ConfigError(f"there is no {name!r} among the {folder}; {suggestion}", key=key, value=name)
    message = f"the plugin {name!r} of {folder} can't be imported from {entries[name].value}"
    with convert_errors(ConfigError, message, key=key, value=name):
        return entries[name].load()


def is_subclass(folder: str, name: str, base: type) -> bool:
    """Return whether a plugin is a class derived from one of Saccade's; a packaged plugin is read, not imported.

    So the kind of an engine is known without torch. Raises ConfigError as `load` does.
    """
    stem = None if get_file(name) else _list_plugin_modules(folder).get(name)
    if stem is None:
        plugin = load(folder, name)
        return inspect.isclass(plugin) and issubclass(plugin, base)
    return f"{base.__module__}.{base.__name__}" in _list_bases(f"saccade.{folder}.{stem}", _get_class_name(stem))


@functools.cache
def _list_bases(module: str, class_name: str) -> tuple[str, ...]:
    """Return the dotted names of the bases of a class of Saccade, and of their bases; () for what isn't a class."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        return ()
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    imported = {
        alias.asname or alias.name: (node.module or "", alias.name)
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    bases = []
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == class_name:
            for base in node.bases:
                source, name = imported.get(ast.unparse(base), (module, ast.unparse(base)))
                bases += [f"{source}.{name}", *(_list_bases(source, name) if source.startswith("saccade.") else ())]
    return tuple(bases)


def resolve(folder: str, name: str, settings: Mapping[str, Any], **dependencies: Any) -> functools.partial[Any]:
    """Bind a plugin to its settings, each validated against the annotation of its keyword-only parameter.

    `dependencies` are objects such as a model or a renderer; the plugin receives those that its signature names. Raises
    ConfigError for an unknown setting, a missing one, or a value of the wrong type; its key is as in a recipe
    ("engine.settings.servers", "rewards.judge.settings.url"), or "plugin.setting" for other folders.
    """
    plugin = load(folder, name)
    message = f"the signature of {folder}/{name} can't be read"
    with convert_errors(ConfigError, message, key=_get_name_key(folder, name), value=name):
        parameters = inspect.signature(plugin, eval_str=True).parameters
    # The local engine names a backbone, a server's client doesn't: the caller needn't distinguish them.
    used_dependencies = {key: value for key, value in dependencies.items() if key in parameters}
    allowed = {
        key: parameter
        for key, parameter in parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY and key not in used_dependencies and key not in CALL_TIME_PARAMS
    }
    for key, value in settings.items():
        if key not in allowed:
            message = f"{folder}/{name} has no setting {key!r}; {suggest(key, allowed)}"
            raise ConfigError(message, key=_get_setting_key(folder, name, key), value=value)
    for key, parameter in allowed.items():
        if parameter.default is parameter.empty and key not in settings:
            raise ConfigError(f"{folder}/{name} needs the setting {key!r}", key=_get_setting_key(folder, name, key))
    values = {key: _validate_setting(folder, name, allowed[key], value) for key, value in settings.items()}
    return functools.partial(plugin, **values, **used_dependencies)


def _get_name_key(folder: str, name: str) -> str:
    """Return the recipe key that names a plugin; the folder if a recipe names none of its plugins."""
    return _RECIPE_KEYS.get(folder, (folder, ""))[0].format(name=name)


def _get_setting_key(folder: str, name: str, setting: str) -> str:
    """Return the recipe key of a plugin's setting; "plugin.setting" if a recipe has no section for its folder."""
    return f"{_RECIPE_KEYS.get(folder, ('', '{name}'))[1].format(name=name)}.{setting}"


def _validate_setting(folder: str, name: str, parameter: inspect.Parameter, value: Any) -> Any:
    if parameter.annotation is parameter.empty:
        return value
    try:
        checked = TypeAdapter(parameter.annotation).validate_python(refuse_bool(value, parameter.annotation))
        expected = ""
    except ValidationError as error:
        checked, expected = None, error.errors()[0]["msg"].lower()
    except ValueError as error:
        checked, expected = None, str(error)
    if isinstance(checked, float) and not math.isfinite(checked):  # recipes reject infinities and NaN everywhere
        expected = "input should be a finite number"
    if expected:
        message = f"{folder}/{name}: the setting {parameter.name!r} can't be {value!r}: {expected}"
        raise ConfigError(message, key=_get_setting_key(folder, name, parameter.name), value=value)
    return checked


def refuse_bool(value: Any, annotation: Any) -> Any:
    """Return the value. Raises ValueError if it, or an item of it, is a bool where the annotation has only numbers."""
    if isinstance(value, list | tuple):
        for item in value:
            refuse_bool(item, annotation)
    elif isinstance(value, bool):
        types = _list_types(annotation)
        if not types.isdisjoint({int, float}) and types.isdisjoint({bool, Any, object}):
            raise ValueError("it should be a number")
    return value


def _list_types(annotation: Any) -> set[Any]:
    """Return the types that an annotation is made of."""
    arguments = [argument for argument in get_args(annotation) if isinstance(argument, type) or get_origin(argument)]
    if get_origin(annotation) is Annotated:
        arguments = [get_args(annotation)[0]]
    elif get_origin(annotation) is Literal:
        return {type(argument) for argument in get_args(annotation)}
    return set().union(*map(_list_types, arguments)) if arguments else {annotation}


@functools.cache
def _list_plugin_modules(folder: str) -> dict[str, str]:
    """Return the module of each packaged plugin; it ends in `_` where Python has a module or function of that name."""
    # Importing the folder's own __init__ is cheap: it holds no code. The plugin files are read, not imported.
    try:
        package = importlib.import_module(f"saccade.{folder}")
    except ModuleNotFoundError:
        raise ConfigError(f"saccade has no plugin folder {folder!r}", key=folder) from None
    files = sorted(file for package_dir in package.__path__ for file in Path(package_dir).glob("*.py"))
    # A plugin defines its own name at the top level, a helper doesn't.
    definition = r"^(?:async )?def {name}\b|^{name}\b[^=\n]*=(?!=)"
    return {
        file.stem.rstrip("_"): file.stem
        for file in files
        if re.search(definition.format(name=file.stem), read_text(file), re.MULTILINE)
    }


def _find_entry_points(folder: str) -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=f"saccade.{folder}")}


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"there is no plugin file {path}", key=str(path))
    # The module name has a digest of the whole path: two files called mine.py must not collide in sys.modules.
    spec = importlib.util.spec_from_file_location(f"saccade_plugin_{compute_digest(str(path.resolve()))[:12]}", path)
    assert spec is not None  # since the path ends in .py
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with convert_errors(ConfigError, f"the plugin {path} can't be imported", key=str(path)):
        spec.loader.exec_module(module)
    return module


def _get_class_name(name: str) -> str:
    return name.title().replace("_", "")


def _get_public_object(module: ModuleType, name: str, source: str) -> Any:
    class_name = _get_class_name(name)
    if name not in vars(module) and class_name not in vars(module):
        raise ConfigError(f"{source} must define {name!r}, or a class {class_name!r}", key=source, value=name)
    return vars(module).get(name, vars(module).get(class_name))
