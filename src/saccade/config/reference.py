"""Explain the keys of recipes and the settings of plugins: the comment behind a field or a parameter is its meaning."""

import ast
import functools
import inspect
import io
import itertools
import tokenize
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from saccade import plugins
from saccade.config.load import PLUGIN_NAME_KEYS
from saccade.config.schema import AdvantageConfig, LossConfig, PluginConfig, Recipe, Section
from saccade.errors import ConfigError

_PLUGIN_FOLDERS = {"environment": "environments", "engine": "engines", "rewards": "rewards"}
_ALGORITHM_FOLDERS = {
    "advantage": "algorithms.advantages",
    "loss": "algorithms.losses",
    "filters": "algorithms.filters",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyDescription:
    """The meaning of a key, its type and default as text, and the keys below it, with their meanings."""

    key: str
    meaning: str
    type_name: str = ""
    default: Any = inspect.Parameter.empty
    value: Any = inspect.Parameter.empty  # of the recipe
    keys: Mapping[str, str] | None = None


@functools.cache
def read_field_comments(path: Path) -> dict[tuple[str, str], str]:
    """Return the (cached) comment behind each field of a file's settings classes, or the lines of comment above it."""
    source, found = path.read_text(encoding="utf-8"), {}
    find_text = index_comments(source)
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef):
            for statement in node.body:
                if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                    lines = statement.lineno, statement.end_lineno or statement.lineno
                    found[node.name, statement.target.id] = find_text(*lines)
    return found


def index_comments(source: str) -> Callable[[int, int], str]:
    """Return a function of a first and a last line: the comments behind these lines, or the lines of comment above."""
    tokens = [t for t in tokenize.generate_tokens(io.StringIO(source).readline) if t.type == tokenize.COMMENT]
    comments = {token.start[0]: token.string.lstrip("# ") for token in tokens}
    alone = {token.start[0] for token in tokens if not token.line[: token.start[1]].strip()}

    def find_text(first: int, last: int) -> str:
        above = list(itertools.takewhile(alone.__contains__, range(first - 1, 0, -1)))
        text = " ".join(comments[line] for line in range(first, last + 1) if line in comments)
        return text or " ".join(comments[line] for line in reversed(above))

    return find_text


def read_parameter_comments(source: str) -> dict[str, str]:
    """Return the comment of each keyword-only parameter in the source of a function."""
    source = inspect.cleandoc(f"\n{source}")
    find_text = index_comments(source)
    node = next(n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
    return {
        argument.arg: find_text(argument.lineno, (default or argument).end_lineno or argument.lineno)
        for argument, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
    }


def find_comment(section: type, name: str) -> str:
    """Return the comment of a field, which a base class may define."""
    comments = (_read_class_comments(base).get((base.__name__, name), "") for base in section.__mro__)
    return next(filter(None, comments), "")


def _read_class_comments(settings_class: type) -> dict[tuple[str, str], str]:
    path = inspect.getsourcefile(settings_class) if settings_class.__module__.startswith("saccade.") else None
    return read_field_comments(Path(path)) if path else {}


def list_settings(signature: plugins.PluginSignature) -> dict[str, tuple[inspect.Parameter, str]]:
    """Return the settings of a plugin by name, each with its parameter and its meaning."""
    given = {*plugins.CALL_TIME_PARAMS, "settings"}
    parameters = [
        parameter
        for parameter in signature.parameters.values()
        if parameter.kind is parameter.KEYWORD_ONLY and parameter.name not in given
    ]
    if settings_type := signature.settings_type:
        return {item.name: (item, find_comment(settings_type, item.name)) for item in parameters}
    comments = read_parameter_comments(signature.read_source()) if parameters else {}
    return {item.name: (item, comments.get(item.name, "")) for item in parameters}


def is_section(annotation: Any) -> bool:
    """Return whether a field's annotation is a section of the recipe."""
    return isinstance(annotation, type) and issubclass(annotation, Section)


def explain_key(key: str, recipe: Recipe) -> KeyDescription:
    """Explain a dotted key of recipes, or of the settings of a plugin that the recipe names.

    Raises ConfigError for a key that there isn't, with the nearest one.

    >>> explain_key("rl.group_size", Recipe()).default
    8
    """
    section: Any = type(recipe)
    inner: Any
    value: Any = recipe
    prefix, parts = "", key.split(".")
    while parts:
        name = parts.pop(0)
        if name not in section.model_fields:
            raise _build_unknown_key_error(key, f"{prefix}{name}", section.model_fields)
        field, owner = section.model_fields[name], section
        owner_value, value = value, None if value is None else getattr(value, name)
        if name == "settings" and (settings_folder := _find_folder(prefix)):
            plugin_name = recipe.environment.name if settings_folder == "environments" else prefix.split(".")[-2]
            if isinstance(owner_value, PluginConfig | LossConfig):
                plugin_name = owner_value.name
            elif isinstance(owner_value, AdvantageConfig):
                plugin_name = owner_value.estimator
            return _explain_setting(key, settings_folder, plugin_name, parts, value or {})
        if prefix == "rl." and name == "filters" and parts:
            values = (value or {}).get(parts[0]) or {}
            return _explain_setting(key, "algorithms.filters", parts[0], parts[1:], values)
        prefix += f"{name}."
        if is_section(field.annotation):
            section = field.annotation
            continue
        inner = get_args(field.annotation)[-1] if get_origin(field.annotation) is dict else None
        if is_section(inner) and parts:
            section, name = inner, parts.pop(0)
            value = (value or {}).get(name)
            prefix += f"{name}."
            continue
        if parts:
            raise ConfigError(f"{prefix.rstrip('.')} has no keys below it", key=key)
        return KeyDescription(
            key=key,
            meaning=find_comment(owner, name),
            type_name=_format_type(field.annotation),
            default=(
                inspect.Parameter.empty
                if field.is_required()
                else field.get_default(call_default_factory=True, validated_data={})
            ),
            value=value,
            keys={f"NAME.{own}": find_comment(inner, own) for own in inner.model_fields} if is_section(inner) else None,
        )
    return KeyDescription(
        key=key,
        meaning=(inspect.getdoc(section) or "").split("\n\n")[0],
        keys={
            name: find_comment(section, name) or (inspect.getdoc(field.annotation) or "").split("\n\n")[0]
            for name, field in section.model_fields.items()
        },
    )


def list_values(key: str) -> list[str]:
    """Return the values that a key can have, if they are known: plugins' names, words, true and false.

    >>> list_values("rl.kl.penalty_estimator"), list_values("seed")
    (['k1', 'k3'], [])
    """
    owner, _, name = key.rpartition(".")
    if name in PLUGIN_NAME_KEYS and (folder := _find_folder(f"{owner}.")):
        return list(plugins.list_plugins(folder))
    section: Any = Recipe
    for part in owner.split(".") if owner else ():
        field = section.model_fields.get(part)
        if field is None or not is_section(field.annotation):
            return []
        section = field.annotation
    return _list_annotated_values(section.model_fields[name].annotation) if name in section.model_fields else []


def _list_annotated_values(annotation: Any) -> list[str]:
    if annotation is bool:
        return ["true", "false"]
    if get_origin(annotation) is Literal:
        return [str(value) for value in get_args(annotation)]
    return [value for inner in get_args(annotation) for value in _list_annotated_values(inner)]


def _find_folder(prefix: str) -> str:
    """Return the folder of the plugin whose settings are below a prefix such as "rl.loss."; "" for none."""
    first, *rest = prefix.rstrip(".").split(".")
    if first == "environments":
        return "rewards" if "rewards" in rest else "environments"
    return _ALGORITHM_FOLDERS.get(rest[0], "") if first == "rl" and rest else _PLUGIN_FOLDERS.get(first, "")


def _explain_setting(key: str, folder: str, name: str, parts: list[str], values: Mapping[str, Any]) -> KeyDescription:
    """Explain a setting of a plugin, or the plugin if there are no `parts` left."""
    signature = plugins.get_signature(folder, name)
    settings = list_settings(signature)
    if not parts:
        meaning = signature.doc.split("\n\n")[0]
        return KeyDescription(
            key=key, meaning=f"{name}: {meaning}", keys={own: text for own, (_, text) in settings.items()}
        )
    setting, *rest = parts
    if setting not in settings:
        unknown = key.removesuffix("".join(f".{part}" for part in rest))
        raise _build_unknown_key_error(key, unknown, settings, of=f"{folder}/{name}")
    parameter, meaning = settings[setting]
    own = values.get(setting, inspect.Parameter.empty)
    if folder == "environments" and setting == "tools" and rest:
        tools = own if isinstance(own, Mapping) else {}
        return _explain_setting(key, "tools", rest[0], rest[1:], tools.get(rest[0]) or {})
    return KeyDescription(
        key=key,
        meaning=meaning,
        type_name=_format_type(parameter.annotation),
        default=parameter.default,
        value=own,
    )


def _build_unknown_key_error(key: str, name: str, names: Mapping[str, Any], of: str = "") -> ConfigError:
    owner = f"{of} has no setting" if of else "there is no key"
    section, dot, last = name.rpartition(".")
    hint = plugins.suggest(last, names, prefix=section + dot)
    return ConfigError(f"{owner} {last if of else name!r}; {hint}", key=key)


def _format_type(annotation: Any) -> str:
    """Return an annotation as text, without its constraints.

    >>> _format_type(dict[str, int]), _format_type(int)
    ('dict[str, int]', 'int')
    """
    if isinstance(annotation, type) and not get_args(annotation):
        return annotation.__name__
    if hasattr(annotation, "__metadata__"):
        return _format_type(annotation.__origin__)
    return str(annotation).replace("typing.", "")
