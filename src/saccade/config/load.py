"""Load recipes from YAML, with `extends` and dotted overrides; errors name the nearest key."""

import copy
import difflib
import functools
import math
import re
from collections.abc import Container, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

import yaml
from pydantic_core import to_jsonable_python

from saccade.config.paths import relativize_paths, resolve_paths
from saccade.config.schema import DataBuildRecipe, Recipe, Section, parse_section
from saccade.errors import ConfigError, RunError, convert_errors
from saccade.plugins import suggest
from saccade.utils.files import read_text

RECIPES_DIR = Path(__file__).resolve().parents[1] / "recipes"
PLUGIN_NAME_KEYS = ("name", "estimator")  # keys that name the plugin of the `settings` beside them
RecipeT = TypeVar("RecipeT", bound=Recipe)
_MAX_YAML_CHARS, _MAX_YAML_VALUES, _MAX_YAML_DEPTH = 2**20, 100_000, 64  # of a file: far above any recipe
_UNUSABLE_CHARS = re.compile("[\\0\ud800-\udfff]")  # in no path, and in no file
_MAX_INTEGER_BITS = 1000  # such a number is a float, too, and Python prints all its digits
SECTIONS_WITH_NULL_VALUES = ("rl.filters.",)  # null is a value of their keys; elsewhere it removes a mapping


def list_recipes() -> tuple[str, ...]:
    """Return the names of the packaged recipes, such as "tiny/para_grpo", sorted."""
    return list_yaml_files(RECIPES_DIR)


def find_recipe(name_or_path: str, *, base_dir: Path = Path()) -> Path:
    """Return the file of a recipe, by packaged name or by path. Raises ConfigError if there is none."""
    return find_yaml_file(name_or_path, RECIPES_DIR, kind="recipe", base_dir=base_dir)


@functools.cache
def list_yaml_files(folder: Path) -> tuple[str, ...]:
    """Return the (cached) paths of all YAML files in a folder, relative to it and without their suffix, sorted."""
    return tuple(sorted(path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.yaml")))


def find_yaml_file(name_or_path: str, packaged: Path, *, kind: str, base_dir: Path = Path()) -> Path:
    """Return a file by its name in `packaged`, or its path (.yaml) in `base_dir`. Raises ConfigError for neither."""
    if name_or_path.endswith((".yaml", ".yml")):
        path = base_dir / Path(name_or_path).expanduser()
        if not path.is_file():
            raise ConfigError(f"there is no {kind} file {path}", key=str(path), value=name_or_path)
        return path
    names = list_yaml_files(packaged)
    if name_or_path not in names:
        message = f"there is no {kind} {name_or_path!r}; {suggest(name_or_path, names)}"
        raise ConfigError(message, key=kind, value=name_or_path)
    return packaged / f"{name_or_path}.yaml"


def load_recipe(name_or_path: str, overrides: Sequence[str] = ()) -> Recipe:
    """Load a recipe by packaged name or path and apply dotted overrides (`rl.optim.lr=1e-6`, values in YAML).

    Mappings are merged key by key; other values are replaced. `null` removes a mapping, which is how a recipe drops a
    reward term of its base, and turns a filter off. A different plugin name drops the settings of the previous plugin.
    Relative paths of files and plugins start at the folder of the recipe that names them; those of overrides start at
    the working directory.
    Raises ConfigError, with the dotted key and the rejected value, for a file, key or value that can't be used.

    >>> load_recipe("tiny/base", ["rl.optim.lr=1e-6"]).rl.optim.lr
    1e-06
    """
    values = _load_with_bases(find_recipe(name_or_path), (), Recipe)
    return _apply_overrides(values, overrides, name_or_path, Recipe)


def load_data_build_recipe(name_or_path: str, overrides: Sequence[str] = ()) -> DataBuildRecipe:
    """Load a recipe that may have the section `data_build`; else as `load_recipe`."""
    values = _load_with_bases(find_recipe(name_or_path), (), DataBuildRecipe)
    return _apply_overrides(values, overrides, name_or_path, DataBuildRecipe)


def override_recipe(recipe: Recipe, overrides: Sequence[str], source: str) -> Recipe:
    """Return a recipe with overrides such as those of `load_recipe`. Raises ConfigError that names their `source`.

    >>> override_recipe(Recipe(), ["evaluation.num_samples=32"], "mine").evaluation.num_samples
    32
    """
    return _apply_overrides(recipe.model_dump(mode="json"), overrides, source, Recipe) if overrides else recipe


def _apply_overrides(
    values: dict[str, Any], overrides: Sequence[str], source: str, recipe_type: type[RecipeT]
) -> RecipeT:
    for override in _order_overrides(overrides):
        values = _merge(values, resolve_paths(_parse_override(override, recipe_type), Path.cwd()))
    return parse_section(recipe_type, values, source)


def dump_recipe(recipe: Recipe, folder: Path | None = None) -> str:
    """Return the recipe as YAML with every default; `load_recipe` reads it back to an equal recipe.

    With the `folder` that the file is written to, paths inside it become relative.
    """
    values = recipe.model_dump(mode="json")
    values = values if folder is None else relativize_paths(values, folder)
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


def check_run_recipe(path: Path, sections: Container[str]) -> None:
    """Raise RunError if the recipe in a run folder lacks the last section, since `dump_recipe` writes every section."""
    if tuple(Recipe.model_fields)[-1] not in sections:
        message = f"{path} is cut off: a run's recipe has every section; restore it"
        raise RunError(message, key=str(path))


def format_value(value: Any) -> str:
    """Return a value as an override writes it, in YAML.

    >>> format_value(None), format_value((1, 2)), format_value({"a": True})
    ('null', '[1, 2]', '{a: true}')
    """
    plain = to_jsonable_python(value)
    return (
        yaml.safe_dump(plain, default_flow_style=True, sort_keys=False, width=math.inf, allow_unicode=True)
        .removesuffix("...\n")
        .strip()
    )


def resolve_model_path(folder: Path, recipe: Recipe) -> Path:
    """Return the path of the model that a run in `folder` starts from. Raises RunError if the recipe names none."""
    if not recipe.model.path:
        memory_plan_model = recipe.model.memory_plan_model
        example = f"a folder with {memory_plan_model}" if memory_plan_model else "a folder made by `saccade model tiny`"
        raise RunError(f"the recipe names no model; give --model, such as {example}", key="model.path", value="")
    return folder / recipe.model.path


class _Loader(yaml.SafeLoader):
    """A YAML loader that reads 1e-6 as a number and rejects duplicate keys and merge keys, which may explode."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        if any(key.tag == "tag:yaml.org,2002:merge" for key, _ in node.value):
            raise yaml.constructor.ConstructorError(problem="merge keys (<<) aren't read; repeat their values")
        seen: set[Any] = set()
        for key in (self.construct_object(key, deep=True) for key, _ in node.value):
            if isinstance(key, Hashable):  # another key is an error below
                if key in seen:
                    raise yaml.constructor.ConstructorError(problem=f"the key {key!r} is duplicated")
                seen.add(key)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), [*"-+0123456789"]
)


def parse_yaml(text: str, source: str, *, key: str = "") -> Any:
    """Parse YAML into plain values. Raises ConfigError, naming `source` and with `key` (default: `source`)."""
    with convert_errors(ConfigError, f"{source} isn't valid YAML", key=key or source):
        if len(text) > _MAX_YAML_CHARS:
            raise ValueError(f"it is longer than {_MAX_YAML_CHARS} characters")
        value = yaml.load(text, _Loader)
        _measure(value, {})
        return value


def _measure(value: Any, sizes: dict[int, tuple[int, int]], depth: int = 0) -> tuple[int, int]:
    """Return the number of values in a value with all its aliases expanded, and its depth. Raises ValueError.

    A few lines of aliases may stand for billions of values, or for themselves; `sizes` holds the results by identity.
    """
    if depth > _MAX_YAML_DEPTH:
        raise ValueError(f"it is nested deeper than {_MAX_YAML_DEPTH} levels, or refers to itself")
    if isinstance(value, str) and _UNUSABLE_CHARS.search(value):
        raise ValueError("a text contains a null character, or half of one (a surrogate)")
    if isinstance(value, int) and value.bit_length() > _MAX_INTEGER_BITS:  # hexadecimal, or base 60: 59:59:59
        raise ValueError(f"a number has more than {_MAX_INTEGER_BITS} bits")
    if not isinstance(value, dict | list):
        return 1, 0
    if id(value) not in sizes:
        items = [*value, *value.values()] if isinstance(value, dict) else value
        measured = [_measure(item, sizes, depth + 1) for item in items]
        height = max((height for _, height in measured), default=0) + 1
        sizes[id(value)] = 1 + sum(size for size, _ in measured), height
    size, height = sizes[id(value)]
    if size > _MAX_YAML_VALUES:
        raise ValueError(f"it holds more than {_MAX_YAML_VALUES} values, aliases expanded")
    if depth + height > _MAX_YAML_DEPTH:
        raise ValueError(f"it is nested deeper than {_MAX_YAML_DEPTH} levels")
    return size, height


def read_yaml(path: Path, kind: str) -> Any:
    """Read a YAML file. Raises ConfigError, with its path as key, if it can't be read or is invalid."""
    with convert_errors(ConfigError, f"the {kind} {path} can't be read", key=str(path)):
        return parse_yaml(read_text(path), str(path))


def _load_with_bases(path: Path, extending_paths: tuple[Path, ...], recipe_type: type[Recipe]) -> dict[str, Any]:
    """Load a recipe file merged over the recipes it extends; `extending_paths` are the files that extend it."""
    path = path.resolve()
    if path in extending_paths:
        chain = " -> ".join(file.name for file in (*extending_paths, path))
        raise ConfigError(f"the recipe {path} extends itself: {chain}", key="extends", value=str(path))
    # Packaged recipes don't change, and are extended by most others.
    read = _read_packaged_recipe if path.is_relative_to(RECIPES_DIR) else _read_recipe
    own, bases = read(path, recipe_type)
    merged: dict[str, Any] = {}
    for base in bases:
        base_path = find_recipe(base, base_dir=path.parent)
        merged = _merge(merged, _load_with_bases(base_path, (*extending_paths, path), recipe_type))
    return _merge(merged, copy.deepcopy(own))  # a plugin may change its settings, which must not change the cache


def _read_recipe(path: Path, recipe_type: type[Recipe]) -> tuple[dict[str, Any], list[str]]:
    """Read a recipe file: its own values, with absolute paths, and the recipes that it extends."""
    own = read_yaml(path, "recipe")
    if own is None:  # such as that of a run after a power cut
        raise ConfigError(f"the recipe {path} is empty; write some keys, or restore it", key=str(path))
    if not isinstance(own, dict):
        raise ConfigError(f"the recipe {path} must be a mapping of keys", key=str(path), value=own)
    extends = own.pop("extends", [])
    bases = [extends] if isinstance(extends, str) else extends
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        message = f"{path}: extends can't be {extends!r}: it should be a recipe's name or path, or a list of them"
        raise ConfigError(message, key="extends", value=extends)
    _check_keys(own, str(path), recipe_type)
    return resolve_paths(own, path.parent), bases


_read_packaged_recipe = functools.cache(_read_recipe)


def _order_overrides(overrides: Sequence[str]) -> list[str]:
    """Move each plugin's name before the settings given ahead of it: settings apply to the final plugin.

    >>> _order_overrides(["engine.settings.request_timeout=9", "seed=1", "engine.name=vllm"])
    ['engine.name=vllm', 'engine.settings.request_timeout=9', 'seed=1']
    >>> _order_overrides(["rl.advantage.settings.scale=2", "rl.advantage.estimator=./mine.py"])
    ['rl.advantage.estimator=./mine.py', 'rl.advantage.settings.scale=2']
    """
    ordered: list[str] = []
    for text in overrides:
        owner, _, last = text.partition("=")[0].rpartition(".")
        settings = (f"{owner}.settings.", f"{owner}.settings=")
        others = (*(f"{owner}.{key}=" for key in PLUGIN_NAME_KEYS), f"{owner}=")
        index = len(ordered)
        if last in PLUGIN_NAME_KEYS and not any(override.startswith(others) for override in ordered):
            index = next((i for i, override in enumerate(ordered) if override.startswith(settings)), index)
        ordered.insert(index, text)
    return ordered


@functools.lru_cache(maxsize=1024)  # most recipes of an ablation have the same overrides; callers copy the values
def _parse_override(text: str, recipe_type: type[Recipe]) -> dict[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not all(key.split(".")):
        raise ConfigError(f"the override {text!r} must have the form key=value, such as rl.optim.lr=1e-6", key=key)
    if key.count(".") >= _MAX_YAML_DEPTH:
        raise ConfigError(f"the override {text!r:.80}… is nested deeper than {_MAX_YAML_DEPTH} levels", key=key)
    nested: Any = parse_yaml(value, f"the override {text!r}", key=key)
    for part in reversed(key.split(".")):
        nested = {part: nested}
    _check_keys(nested, f"the override {text!r}", recipe_type)
    return nested


def _merge(base: Mapping[str, Any], override: Mapping[str, Any], section: str = "") -> dict[str, Any]:
    result = dict(base)
    for key, value in override.items():
        old = result.get(key)
        if isinstance(old, dict) and value is None and section not in SECTIONS_WITH_NULL_VALUES:
            del result[key]
        elif isinstance(old, dict) and isinstance(value, dict):
            # Settings belong to the plugin they were written for.
            is_renamed = any(value.get(name, old.get(name)) != old.get(name) for name in PLUGIN_NAME_KEYS)
            kept_values = {**old, "settings": {}} if is_renamed and "settings" in old else old
            result[key] = _merge(kept_values, value, f"{section}{key}.")
        else:
            result[key] = value
    return result


def _check_keys(data: Mapping[str, Any], source: str, recipe_type: type[Recipe]) -> None:
    for key, value, section, siblings in _find_unknown_keys(data, recipe_type, ""):
        if key.partition(".")[0] in DataBuildRecipe.model_fields.keys() - recipe_type.model_fields.keys():
            raise ConfigError(
                f"{source}: only `saccade data build` reads {key!r}; write it into a recipe for that command, "
                "which may extend the one of your training",
                key=key,
                value=value,
            )
        keys, name = list(list_keys(recipe_type)), key.removeprefix(section)
        in_section = [section + sibling for sibling in difflib.get_close_matches(name, siblings, n=1)]
        close = difflib.get_close_matches(key, keys, n=1, cutoff=0.85) or in_section
        close = close or difflib.get_close_matches(key, keys, n=2)
        hint = f"did you mean {' or '.join(close)}? The keys there are" if close else "the keys there are"
        raise ConfigError(f"{source}: there is no key {key!r}; {hint} {', '.join(siblings)}", key=key, value=value)


def _find_unknown_keys(data: Any, schema: Any, prefix: str) -> Iterator[tuple[str, Any, str, list[str]]]:
    """Yield the dotted keys of `data` that `schema` lacks, each with its value, its section and the keys of that."""
    if get_origin(schema) is dict and isinstance(data, Mapping):
        inner = get_args(schema)[1]
        yield from (key for name, value in data.items() for key in _find_unknown_keys(value, inner, f"{prefix}{name}."))
    if not (isinstance(schema, type) and issubclass(schema, Section) and isinstance(data, Mapping)):
        return
    for key, value in data.items():
        if key in schema.model_fields:
            yield from _find_unknown_keys(value, schema.model_fields[key].annotation, f"{prefix}{key}.")
        else:
            leaf_key, leaf_value = _find_first_leaf(f"{prefix}{key}", value)
            yield leaf_key, leaf_value, prefix, list(schema.model_fields)


def _find_first_leaf(key: str, value: Any) -> tuple[str, Any]:
    names = [key]
    while isinstance(value, Mapping) and value:
        name, value = next(iter(value.items()))
        names.append(str(name))
    return ".".join(names), value


def list_keys(schema: type[Section] = Recipe, prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys of a schema, such as "rl.optim.lr", without those below names of the user's choice."""
    for name, field in schema.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, Section):
            yield from list_keys(inner, f"{prefix}{name}.")
        else:
            yield prefix + name
