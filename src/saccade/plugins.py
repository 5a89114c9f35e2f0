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
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import TypeAdapter, ValidationError

from saccade.errors import ConfigError, convert_errors
from saccade.utils.files import read_bytes, read_text
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
    bases = _list_classes(f"saccade.{folder}.{stem}", _get_class_name(stem))[1:]
    return (base.__module__, base.__name__) in {(module, node.name) for module, node in bases}


# ---- plugins that are read, not imported ----------------------------------------------------------------------------

# The packaged plugins of these folders import torch, which takes seconds.
_READ_FOLDERS = ("engines", "algorithms.losses")


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginSignature:
    """What a plugin takes and means: its parameters by name, its docstring, and its source for their comments."""

    parameters: Mapping[str, inspect.Parameter]
    doc: str
    read_source: Callable[[], str]  # of the function or the `__init__` with the parameters
    settings_type: type | None = None  # the fields of this class are the settings


def get_signature(folder: str, name: str) -> PluginSignature:
    """Return a plugin's signature, without torch for a packaged one. Raises ConfigError if it can't be read."""
    if stem := _find_read_stem(folder, name):
        return _read_signature(f"saccade.{folder}.{stem}", stem)
    plugin = load(folder, name)
    message = f"the signature of {folder}/{name} can't be read"
    with convert_errors(ConfigError, message, key=_get_name_key(folder, name), value=name):
        parameters = inspect.signature(plugin, eval_str=True).parameters
    return PluginSignature(
        parameters=parameters,
        doc=inspect.getdoc(plugin) or "",
        read_source=functools.partial(_get_source, plugin),
        settings_type=plugin.settings_type if hasattr(plugin, "settings_type") else None,
    )


def get_attribute(folder: str, name: str, attribute: str) -> Any:
    """Return an attribute of a plugin's class, without torch for a packaged one. Raises ConfigError as `load` does."""
    stem = _find_read_stem(folder, name)
    for module, node in _list_classes(f"saccade.{folder}.{stem}", _get_class_name(stem)) if stem else ():
        for statement in node.body:
            if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == attribute:
                return _evaluate(module, statement.value)
    return getattr(load(folder, name), attribute)


def _get_source(plugin: Any) -> str:
    function = inspect.unwrap(plugin)
    if isinstance(plugin, type):
        function = next(vars(base)["__init__"] for base in plugin.__mro__ if "__init__" in vars(base))
    return inspect.getsource(function)


def _find_read_stem(folder: str, name: str) -> str:
    """Return the module of a packaged plugin that is read, not imported, else ""."""
    return _list_plugin_modules(folder).get(name, "") if folder in _READ_FOLDERS and not get_file(name) else ""


@functools.cache
def _read_signature(module: str, stem: str) -> PluginSignature:
    tree = _read_module(module)[0]
    owner: Any = next((node for node in tree.body if isinstance(node, _FUNCTIONS) and node.name == stem), None)
    function, doc = owner, "" if owner is None else ast.get_docstring(owner)
    if owner is None:
        classes = _list_classes(module, _get_class_name(stem))
        doc = next(filter(None, (ast.get_docstring(node) for _, node in classes)), "")
        methods = ((where, node) for where, owner in classes for node in owner.body if isinstance(node, _FUNCTIONS))
        module, function = next((where, node) for where, node in methods if node.name == "__init__")
    names, arguments = [argument.arg for argument in function.args.args], function.args
    parameters = {
        name: inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names if name != "self"
    }
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        parameters[argument.arg] = inspect.Parameter(
            argument.arg,
            inspect.Parameter.KEYWORD_ONLY,
            annotation=_evaluate(module, argument.annotation),
            default=inspect.Parameter.empty if default is None else _evaluate(module, default),
        )
    lines = _read_module_source(module).splitlines()[function.lineno - 1 : function.end_lineno]
    return PluginSignature(parameters=parameters, doc=doc or "", read_source=lambda: "\n".join(lines))


_FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef


def _evaluate(module: str, expression: ast.expr) -> Any:
    """Return the value of an annotation or a default in a module that isn't imported."""
    return eval(compile(ast.Expression(expression), module, "eval"), {}, _ModuleNames(module))


class _ModuleNames(dict[str, Any]):
    """The names of a module that isn't imported: what it imports from others, and its constants."""

    def __init__(self, module: str) -> None:
        self._module = module

    def __missing__(self, name: str) -> Any:
        tree, imported = _read_module(self._module)
        if name in imported:
            source, attribute = imported[name]
            return getattr(importlib.import_module(source), attribute)
        for node in tree.body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
                return _evaluate(self._module, node.value)
        raise KeyError(name)  # a built-in


@functools.cache
def _read_module_source(module: str) -> str:
    path = Path(__file__).parent.joinpath(*module.split(".")[1:])  # of a module of Saccade
    return read_text(path / "__init__.py" if path.is_dir() else path.with_suffix(".py"))


@functools.cache
def _read_module(module: str) -> tuple[ast.Module, Mapping[str, tuple[str, str]]]:
    """Return a module's syntax tree, and the module and name of each object that it imports by name."""
    tree = ast.parse(_read_module_source(module))
    imported = {
        alias.asname or alias.name: (node.module or "", alias.name)
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    return tree, imported


@functools.cache
def _list_classes(module: str, class_name: str) -> tuple[tuple[str, ast.ClassDef], ...]:
    """Return a class of Saccade, its bases and their bases, each with its module; () for what isn't a class."""
    if not module.startswith("saccade."):
        return ()
    tree, imported = _read_module(module)
    classes: list[tuple[str, ast.ClassDef]] = []
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == class_name:
            classes.append((module, node))
            for base in node.bases:
                classes += _list_classes(*imported.get(ast.unparse(base), (module, ast.unparse(base))))
    return tuple(classes)


# ---- settings -------------------------------------------------------------------------------------------------------


def resolve(folder: str, name: str, settings: Mapping[str, Any], **dependencies: Any) -> functools.partial[Any]:
    """Bind a plugin to its settings, each validated against the annotation of its keyword-only parameter.

    `dependencies` are objects such as a model or a renderer; the plugin receives those that its signature names. Raises
    ConfigError for an unknown setting, a missing one, or a value of the wrong type; its key is as in a recipe
    ("engine.settings.servers", "rewards.judge.settings.url"), or "plugin.setting" for other folders.
    """
    values = check_settings(folder, name, settings, dependencies)
    # The local engine takes the model (`vlm`), a server's client doesn't: the caller needn't distinguish them.
    parameters = get_signature(folder, name).parameters
    used_dependencies = {key: value for key, value in dependencies.items() if key in parameters}
    return functools.partial(load(folder, name), **values, **used_dependencies)


def check_settings(
    folder: str, name: str, settings: Mapping[str, Any], dependencies: Collection[str] = ()
) -> dict[str, Any]:
    """Return the settings of a plugin, validated and converted, without torch; `dependencies` are no settings.

    Raises what `resolve` raises.
    """
    allowed = {
        key: parameter
        for key, parameter in get_signature(folder, name).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY and key not in dependencies and key not in CALL_TIME_PARAMS
    }
    for key, value in settings.items():
        if key not in allowed:
            message = f"{folder}/{name} has no setting {key!r}; {suggest(key, allowed)}"
            raise ConfigError(message, key=_get_setting_key(folder, name, key), value=value)
    for key, parameter in allowed.items():
        if parameter.default is parameter.empty and key not in settings:
            raise ConfigError(f"{folder}/{name} needs the setting {key!r}", key=_get_setting_key(folder, name, key))
    return {key: _validate_setting(folder, name, allowed[key], value) for key, value in settings.items()}


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
        checked = _build_adapter(parameter.annotation).validate_python(refuse_bool(value, parameter.annotation))
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


def _build_adapter(annotation: Any) -> TypeAdapter[Any]:
    # Each episode validates its tools' settings, and building an adapter takes far longer than using it.
    try:
        return _build_cached_adapter(annotation, repr(annotation))
    except TypeError:  # an annotation that can't be hashed
        return TypeAdapter(annotation)


@functools.cache
def _build_cached_adapter(annotation: Any, text: str) -> TypeAdapter[Any]:
    # The text tells `int | float` from `float | int`, which are equal but convert a number to another type.
    return TypeAdapter(annotation)


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


# The modules of plugin files by name, each with the source that it was executed from.
_file_modules: dict[str, tuple[bytes, ModuleType]] = {}
_import_lock = threading.RLock()  # a plugin file may load another


def _import_file(path: Path) -> ModuleType:
    """Return the module of a plugin file, executed once unless the file has changed since."""
    if not path.is_file():
        raise ConfigError(f"there is no plugin file {path}", key=str(path))
    # The module name has a digest of the whole path: two files called mine.py must not collide in sys.modules.
    name = f"saccade_plugin_{compute_digest(str(path.resolve()))[:12]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None  # since the path ends in .py
    with _import_lock, convert_errors(ConfigError, f"the plugin {path} can't be imported", key=str(path)):
        source = read_bytes(path)
        if name in _file_modules and _file_modules[name][0] == source:
            return _file_modules[name][1]
        code = compile(source, str(path), "exec", dont_inherit=True)  # a .pyc may be of an edit in the same second
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # dataclasses, annotations that are strings, and pickle look it up
        try:
            exec(code, vars(module))
        except BaseException:
            sys.modules.pop(name, None)  # it may load itself
            _file_modules.pop(name, None)
            raise
        _file_modules[name] = source, module
    return module


def _get_class_name(name: str) -> str:
    return name.title().replace("_", "")


def _get_public_object(module: ModuleType, name: str, source: str) -> Any:
    class_name = _get_class_name(name)
    if name not in vars(module) and class_name not in vars(module):
        raise ConfigError(f"{source} must define {name!r}, or a class {class_name!r}", key=source, value=name)
    return vars(module).get(name, vars(module).get(class_name))
