"""Change the paths of the media files inside tasks, episodes and batches, so that a run folder can be moved."""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar, cast

from saccade.ledger import ImageRef
from saccade.types import Media

ItemT = TypeVar("ItemT")


def map_media_paths(item: ItemT, transform: Callable[[str], str]) -> ItemT:
    """Return the item with `transform` applied to the path of every media file and image in it."""
    changed: Any = item
    if isinstance(item, Media | ImageRef):
        changed = dataclasses.replace(item, path=transform(item.path))
    elif isinstance(item, tuple) and item and (dataclasses.is_dataclass(item[0]) or isinstance(item[0], str | tuple)):
        changed = tuple(map_media_paths(member, transform) for member in item)
    elif dataclasses.is_dataclass(item) and not isinstance(item, type):
        parts = {field.name: getattr(item, field.name) for field in dataclasses.fields(item)}
        changed = dataclasses.replace(item, **{name: map_media_paths(part, transform) for name, part in parts.items()})
    return cast(ItemT, changed)
