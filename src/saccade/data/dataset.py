"""Files of tasks or of demonstrations, JSONL or Parquet, with media paths relative to the file's folder.

Parquet has the columns `id`, `question`, `answer_type`, `options` and `environment`, and as JSON `media`,
`ground_truth` and `extras`, whose types differ between rows; demonstrations have also `frame_budget`, `replies`,
`children`, `is_auxiliary` and, as JSON, `results`.
"""

import dataclasses
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from saccade.config.schema import Recipe
from saccade.data import parquet
from saccade.data.source_row import SourceRow, iterate_rows_with_errors, read_rows
from saccade.errors import DataError
from saccade.media.relocation import map_media_paths
from saccade.plugins import get_file, suggest
from saccade.rewards.answer_types.base import get_answer_type, register_file
from saccade.types import Demonstration, Media, Task
from saccade.utils.files import write_atomically
from saccade.utils.jsonl import to_jsonable, validate_as, write_jsonl
from saccade.utils.text import pluralize

ItemT = TypeVar("ItemT", bound=Task | Demonstration)

TASK_COLUMNS = {
    **dict.fromkeys(("id", "question", "media", "answer_type", "ground_truth"), "string"),
    "options": "list of strings",
    "extras": "string",
    "environment": "string",
}
DEMONSTRATION_COLUMNS = {
    **TASK_COLUMNS,
    "frame_budget": "integer",
    "replies": "list of strings",
    "children": "list of lists of strings",
    "is_auxiliary": "boolean",
    "results": "string",
}
# The options, besides the settings, by which commands name these files.
DATA_OPTIONS = {
    "data.test": ", or give --tasks to `saccade eval`, or --data to `saccade train`",
    **dict.fromkeys(("data.train", "data.validation", "data.demonstrations"), ", or give --data"),
}
JSON_COLUMNS = ("media", "ground_truth", "extras", "results")


def load_recipe_data(
    folder: Path, recipe: Recipe, key: str, file: str, item_type: type[ItemT], *, limit: int | None = None
) -> list[ItemT]:
    """Load a data file of a recipe, or its first `limit` rows; `file` is the value of `key`, such as `data.test`.

    Tasks may have the answer types whose files the rewards of the recipe or of its environments name. Relative paths
    start at `folder`. Raises ConfigError for a file that defines no answer type, DataError if the recipe names no data
    file, and what `load_tasks` and `load_demonstrations` raise.
    """
    for terms in recipe.reward_sections.values():
        for term in terms.values():
            for name in term.settings.get("answer_types") or {}:
                if get_file(name):
                    register_file(name)
    if not file:
        raise DataError(f"the recipe names no {key}; set {key}=FILE{DATA_OPTIONS.get(key, '')}", key=key, value=file)
    media_root = folder / recipe.data.media_root if recipe.data.media_root else None
    load: Any = load_demonstrations if item_type is Demonstration else load_tasks
    return load(folder / file, media_root=media_root, limit=limit)


def load_tasks(
    path: str | os.PathLike[str], *, media_root: str | os.PathLike[str] | None = None, limit: int | None = None
) -> list[Task]:
    """Load every task of a file, or the first `limit`, with media paths joined to `media_root` or the file's folder.

    Raises DataError for an empty file, an invalid row, a repeated id, a missing media file, or a ground truth that
    doesn't fit the answer type.
    """
    tasks = _load_items(path, Task, media_root, limit)
    seen_ids: set[str] = set()
    for task in tasks:
        require_gradable(task, f"{path}, task {task.id}")
        if task.id in seen_ids:
            problem = f"{path}, task {task.id}: the id is used twice; ids must be unique"
            raise DataError(problem, key="id", value=task.id)
        seen_ids.add(task.id)
    return tasks


def load_demonstrations(
    path: str | os.PathLike[str], *, media_root: str | os.PathLike[str] | None = None, limit: int | None = None
) -> list[Demonstration]:
    """Load every demonstration of a file, or the first `limit`; `media_root` as in `load_tasks`.

    Raises DataError for an empty file, an invalid row, or a missing media file.
    """
    return _load_items(path, Demonstration, media_root, limit)


def _load_items(
    path: str | os.PathLike[str], item_type: type[ItemT], media_root: str | os.PathLike[str] | None, limit: int | None
) -> list[ItemT]:
    folder, is_file = Path(media_root or Path(path).parent), cache(os.path.isfile)  # many tasks share a media file
    items = []
    for item in itertools.islice(iterate_items(path, item_type), limit):
        items.append(resolve_media_paths(item, folder))
        task = get_task(items[-1])
        for file in (media.path for media in items[-1].media if not is_file(media.path)):
            raise DataError(f"{path}, task {task.id}: media file {file} is missing", key="media", value=file)
    return items


def resolve_media_paths(item: ItemT, folder: Path) -> ItemT:
    """Join the media paths of an item to a folder, without checking that the files exist."""
    return map_media_paths(item, lambda path: str(folder / path))


def get_task(item: Task | Demonstration) -> Task:
    """Return a task itself, or the task of a demonstration."""
    return item.task if isinstance(item, Demonstration) else item


def require_gradable(task: Task, location: str) -> None:
    """Raise DataError, whose text begins with the location, if a task is impossible to grade."""
    problem = find_task_problem(task)
    if problem is not None:
        field, sentence = problem
        raise DataError(f"{location}: {sentence}", key=field, value=getattr(task, field))


def find_task_problem(task: Task) -> tuple[str, str] | None:
    """Return the field that makes a task impossible to grade, and a sentence about it; None for a valid task."""
    try:
        return get_answer_type(task.answer_type).find_problem(task)
    except DataError as error:
        return "answer_type", str(error)


def iterate_items(path: str | os.PathLike[str], item_type: type[ItemT]) -> Iterator[ItemT]:
    """Yield the tasks or demonstrations of a file unchanged. Raises DataError, naming file, row and field."""
    for row in read_rows(Path(path)):
        yield parse_item(row, item_type)


def find_item(path: Path, row_number: int, task_id: str | None = None) -> Task | Demonstration:
    """Return the item with a row number (from 1), or with a task id. Raises DataError if there is none."""
    item_type: Any = detect_item_type(path)
    num_rows = 0
    for row in read_rows(path):
        num_rows = row.number
        task = row.values.get("task")
        own_id = task.get("id") if isinstance(task, Mapping) else row.values.get("id")
        if own_id == task_id if task_id is not None else num_rows == row_number:
            return parse_item(row, item_type)
    row_name = f"with the id {task_id!r}" if task_id else row_number
    problem = f"{path} has no row {row_name}; it has {pluralize(num_rows, 'row')}"
    raise DataError(problem, key=str(path), value=task_id or row_number)


def parse_item(row: SourceRow, item_type: type[ItemT]) -> ItemT:
    """Convert a row of our own format to an item. Raises DataError, naming file, row and field."""
    location = f"{row.file}, row {row.number}"
    value = dict(row.values)
    if row.file.suffix.lower() == ".parquet":
        value = _parse_parquet_row(value, item_type, location)
    _reject_unknown_fields(value, item_type, location)
    return validate_as(value, item_type, location)


def write_items(path: str | os.PathLike[str], items: Iterable[Any]) -> None:
    """Write tasks or demonstrations (or their JSON values) as JSONL or Parquet (by suffix), atomically."""
    target = Path(path)
    if target.suffix.lower() != ".parquet":
        write_jsonl(target, items)
        return
    rows = map(_build_parquet_row, items)
    first = list(itertools.islice(rows, 1))
    columns = DEMONSTRATION_COLUMNS if first and "replies" in first[0] else TASK_COLUMNS
    with write_atomically(target) as partial:
        parquet.write_parquet(partial, columns, itertools.chain(first, rows))


def detect_item_type(path: str | os.PathLike[str]) -> type[Task] | type[Demonstration]:
    """Detect from the first valid row whether a file holds tasks or demonstrations. Raises DataError for neither."""
    first_error = None
    for row in iterate_rows_with_errors(Path(path)):
        if isinstance(row, SourceRow):
            values = row.values
            break
        first_error = first_error or row
    else:
        assert first_error is not None  # a file without rows raises
        raise first_error
    if "replies" in values:
        return Demonstration
    if {"question", "ground_truth"} <= values.keys():
        return Task
    message = f"{path} holds neither tasks nor demonstrations; convert it with `saccade data import`"
    raise DataError(message, key=str(path))


def _reject_unknown_fields(value: Any, item_type: type[Any], location: str) -> None:
    """Raise DataError for a field that a type, or a nested one, doesn't have, so that typos don't go unnoticed."""
    if not isinstance(value, Mapping):
        return
    names = {field.name for field in dataclasses.fields(item_type)}
    unknown = next((str(name) for name in value if name not in names), None)
    if unknown is not None:
        problem = f"{location}, field {unknown}: a {item_type.__name__} has no such field"
        raise DataError(f"{problem}; {suggest(unknown, names)}", key=unknown)
    if item_type is Demonstration:
        _reject_unknown_fields(value.get("task"), Task, f"{location}, task")
    media = value.get("media") if item_type is Task else None
    for item in media if isinstance(media, list) else ():
        _reject_unknown_fields(item, Media, f"{location}, media")


def _build_parquet_row(item: Any) -> dict[str, Any]:
    value = to_jsonable(item)
    flat = {**value.pop("task", {}), **value}
    return {**flat, **{name: json.dumps(flat[name]) for name in JSON_COLUMNS if name in flat}}


def _parse_parquet_row(flat: dict[str, Any], item_type: type[Any], location: str) -> dict[str, Any]:
    if not flat.get("results"):  # the column is younger than the format
        flat.pop("results", None)
    for name in JSON_COLUMNS if "results" in flat else JSON_COLUMNS[:-1]:
        try:
            flat[name] = json.loads(flat.get(name) or "")
        except (ValueError, TypeError) as error:
            problem = f"{location}, field {name}: not valid JSON: {error} (read as {item_type.__name__})"
            raise DataError(problem, key=name, value=flat.get(name)) from error
    if item_type is Task:
        return flat
    return {"task": {name: flat.pop(name) for name in TASK_COLUMNS if name in flat}, **flat}
