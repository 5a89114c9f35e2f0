"""Decide whether frames at given times are sufficient to answer a synthetic task."""

from collections.abc import Sequence

from saccade.types import Task


def is_answerable(task: Task, times: Sequence[float]) -> bool:
    """Whether frames at these times (seconds) determine the answer."""
    extras = task.extras
    if not all(any(start <= time < end for time in times) for start, end in extras["needs"]):
        return False
    length = extras["event_seconds"]
    start, end = extras["cover"]
    slots = [start + i * length for i in range(int((end - start) / length + 1e-9))]
    return all(any(slot <= time < slot + length for time in times) for slot in slots)
