"""JSON that a browser reads and that shows hostile texts harmlessly."""

import json
import math
from collections.abc import Mapping
from typing import Any

from saccade.utils.text import escape_control_characters


def dump_json(value: Any) -> str:
    """Return plain values as JSON; control characters and marks of text direction become visible characters."""
    return json.dumps(_clean(value), ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return escape_control_characters(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {escape_control_characters(str(key)): _clean(item) for key, item in value.items()}
    return [_clean(item) for item in value] if isinstance(value, list | tuple) else value
