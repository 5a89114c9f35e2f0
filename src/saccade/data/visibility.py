"""Decide whether an overview shows what a task needs, from extras that any dataset may have.

evidence         spans in seconds, a frame of each of which must be seen
cover            [start, end) in seconds in which every slot of `event_seconds` must be seen
cards and looks  of an image: its objects, and those that must be inspected
"""

from collections.abc import Sequence

from saccade.types import Task
from saccade.utils.numbers import to_finite, to_span


def is_answerable(task: Task, times: Sequence[float]) -> bool | None:
    """Return whether frames at these times (seconds) suffice to know the answer.

    None if the task doesn't specify it, or if its extras of these names have other types.

    An image is answerable if no object must be inspected, at any time.
    """
    extras = task.extras
    if {"cards", "looks"} <= extras.keys():
        return not extras["looks"]
    cover, length, evidence = (
        to_span(extras.get("cover")),
        to_finite(extras.get("event_seconds")),
        extras.get("evidence"),
    )
    if cover is None or length is None or length <= 0 or not isinstance(evidence, list | tuple):
        return None
    spans = [to_span(region) for region in evidence]
    if None in spans:
        return None
    if not all(any(start <= time < end for time in times) for start, end in filter(None, spans)):
        return False
    num_slots = (cover[1] - cover[0]) / length + 1e-9
    if num_slots >= len(times) + 1:  # a frame shows one slot
        return False
    slots = [cover[0] + i * length for i in range(int(num_slots))]
    return all(any(slot <= time < slot + length for time in times) for slot in slots)
