"""Decide whether an overview shows what a task needs, from extras that any dataset may have.

needs            spans in seconds, a frame of each of which must be seen
cover            [start, end) in seconds in which every slot of `event_seconds` must be seen
cards and looks  of an image: its objects, and those that must be inspected
"""

from collections.abc import Sequence

from saccade.types import Task


def is_answerable(task: Task, times: Sequence[float]) -> bool | None:
    """Return whether frames at these times (seconds) suffice to know the answer; None if the task doesn't specify it.

    An image is answerable if no object must be inspected, at any time.
    """
    extras = task.extras
    if {"cards", "looks"} <= extras.keys():
        return not extras["looks"]
    if not {"needs", "cover", "event_seconds"} <= extras.keys():
        return None
    if not all(any(start <= time < end for time in times) for start, end in extras["needs"]):
        return False
    length = extras["event_seconds"]
    start, end = extras["cover"]
    slots = [start + i * length for i in range(int((end - start) / length + 1e-9))]
    return all(any(slot <= time < slot + length for time in times) for slot in slots)
