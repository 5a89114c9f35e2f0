"""Change the paths of the media files inside tasks, episodes and batches, so that a run folder can be moved."""

import dataclasses
import functools
import operator
from collections.abc import Callable, Hashable
from typing import Any, TypeVar, cast

from saccade.ledger import ImageRef
from saccade.types import Media

ItemT = TypeVar("ItemT")
_PLAIN_TYPES = (str, int, float, type(None), dict)


def map_media_paths(item: ItemT, transform: Callable[[str], str]) -> ItemT:
    """Return the item with `transform` applied to the path of every media file and image in it."""
    changed: Any = item
    if isinstance(item, Media | ImageRef):
        changed = dataclasses.replace(item, path=transform(item.path))
    elif isinstance(item, tuple):
        if item and (isinstance(item[0], str | tuple) or dataclasses.is_dataclass(item[0])):
            members = tuple(map_media_paths(member, transform) for member in item)
            changed = members if any(map(operator.is_not, members, item)) else item
    elif not isinstance(item, type) and (names := _list_fields(cast(Hashable, type(item)))):
        parts = {name: part for name in names if not isinstance(part := getattr(item, name), _PLAIN_TYPES)}
        mapped = {name: map_media_paths(part, transform) for name, part in parts.items()}
        different = {name: part for name, part in mapped.items() if part is not parts[name]}
        changed = dataclasses.replace(cast(Any, item), **different) if different else item  # most parts hold no path
    return cast(ItemT, changed)


@functools.cache
def _list_fields(item_type: Any) -> tuple[str, ...]:
    """Return the names of a dataclass's fields; () for another type."""
    return tuple(field.name for field in dataclasses.fields(item_type)) if dataclasses.is_dataclass(item_type) else ()
