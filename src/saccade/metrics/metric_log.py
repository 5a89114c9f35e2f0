"""Read metrics.jsonl, the record of a run's steps."""

import os
import sys
from pathlib import Path
from typing import Any

from saccade.errors import DataError
from saccade.utils.jsonl import read_jsonl


def read_metric_rows(path: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl, without a last line that a kill truncated; [] without a file.

    Raises DataError for a file that can't be read, or a line without a stage and a step or with a number that no float
    can hold.
    """
    rows = read_jsonl(path, dict[str, Any], skip_truncated_line=True) if os.path.lexists(path) else []
    for row in rows:
        is_step = isinstance(row.get("stage"), str) and type(row.get("step")) is int
        if not is_step or any(isinstance(value, int) and abs(value) > sys.float_info.max for value in row.values()):
            message = f"{path} has a line without a stage, a step or numbers: {row!r:.80}; delete the line"
            raise DataError(message, key=str(path), value=row)
    return rows
