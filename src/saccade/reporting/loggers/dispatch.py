"""Telling trackers of each step, without ever waiting for them; metrics.jsonl stays the record.

    training ──log──> a queue per tracker ──> its own thread: open, log, log, …, close
       │                                         └── fails: one warning, and it is told nothing more
       └── goes on at once; only at the end it waits, for at most CLOSING seconds, until the queues are empty

A queue is filled by the training and emptied by its thread alone; the last thing in it tells the thread to end.
"""

import contextlib
import importlib.util
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from queue import SimpleQueue
from typing import Any, Protocol

from saccade import plugins
from saccade.errors import ConfigError, RunError, SaccadeError, boundary
from saccade.runlog import Run

CLOSING = 30.0  # seconds that trackers are waited for at the end of a stage
Tell = Callable[[str, int, Mapping[str, Any]], None]
_logger = logging.getLogger("saccade")


class Tracker(Protocol):
    """What a file of this folder holds: a class made with the run; any of its methods may raise anything."""

    package: str  # what must be installed, by the name it is imported by; "" for nothing

    def log(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        """A step of a stage ("sft", "rl") is done; steps come in order, and again after a resume."""

    def close(self) -> None:
        """The stage is over."""


def check_trackers(names: Sequence[str]) -> None:
    """See that each tracker exists and what it needs is installed. Raises ConfigError."""
    for name in names:
        package = plugins.load("trackers", name).package
        if package and importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"the tracker {name} needs the package {package}; pip install 'saccade[track]', or take it out of track"
            )


@contextlib.contextmanager
def telling(run: Run) -> Iterator[Tell]:
    """A function that tells all trackers of the run's recipe of a step. Raises ConfigError as `check_trackers` does.

    A tracker that fails is left out after one warning; one that is still busy at the end is left behind with another.
    """
    check_trackers(run.recipe.track)
    desks = [Desk(name, run) for name in run.recipe.track]

    def tell(stage: str, step: int, values: Mapping[str, Any]) -> None:
        for desk in desks:
            desk.take(stage, step, values)

    try:
        yield tell
    finally:
        until = time.monotonic() + CLOSING
        for desk in desks:
            desk.close(until)


class Desk:
    """A tracker in its thread, and the queue of what it has not been told yet."""

    def __init__(self, name: str, run: Run) -> None:
        self._name, self._run, self._left = name, run, False
        self._queue: SimpleQueue[tuple[str, int, dict[str, float]] | None] = SimpleQueue()
        # A daemon: a tracker that hangs must not keep the process alive.
        self._thread = threading.Thread(target=self._work, name=f"saccade-{name}", daemon=True)
        self._thread.start()

    def take(self, stage: str, step: int, values: Mapping[str, Any]) -> None:
        """Put a step in the queue: its numbers, without those that are not finite."""
        numbers = {name: float(value) for name, value in values.items() if isinstance(value, int | float)}
        self._queue.put((stage, step, {name: value for name, value in numbers.items() if math.isfinite(value)}))

    def close(self, until: float) -> None:
        """Wait until the queue is empty, or `until` (of the monotonic clock)."""
        self._queue.put(None)
        self._thread.join(max(0.0, until - time.monotonic()))
        if self._thread.is_alive():
            self._left = True
            _logger.warning("the tracker %s is not done yet and is left behind; metrics.jsonl is whole", self._name)

    def _work(self) -> None:
        try:
            with boundary(RunError, f"the tracker {self._name} failed"):
                tracker: Tracker = plugins.load("trackers", self._name)(self._run)
                while (step := self._queue.get()) is not None:
                    tracker.log(*step)
                tracker.close()
        except SaccadeError as error:
            if not self._left:
                reason = str(error).rstrip(".")
                _logger.warning("%s; it is told nothing more, and metrics.jsonl goes on", reason)
