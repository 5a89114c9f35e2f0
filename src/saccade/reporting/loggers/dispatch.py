"""Dispatch training steps to loggers without ever blocking the training; metrics.jsonl stays the record.

    training ──log──> one queue per logger ──> its thread: open, log, log, …, close
       │                                          └── on an error: one warning, and the logger gets no more steps
       └── continues at once; only at the end it waits, at most CLOSE_TIMEOUT seconds, until the queues are empty

Only the training fills a queue and only its thread empties it; a final None ends the thread.
"""

import contextlib
import importlib.util
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol

from saccade import plugins
from saccade.config.schema import Recipe
from saccade.errors import ConfigError, RunError, SaccadeError, convert_errors
from saccade.utils.hashing import compute_digest
from saccade.utils.jsonl import read_json, write_json

CLOSE_TIMEOUT = 30.0  # seconds to wait for all loggers at the end of a stage
LogStepFn = Callable[[str, int, Mapping[str, Any]], None]
_logger = logging.getLogger("saccade")


class Logger(Protocol):
    """A logger plugin: a class constructed with a run's folder and recipe; any of its methods may raise anything."""

    package: str  # the package it needs, by its import name; may be left out

    def __init__(self, folder: Path, recipe: Recipe) -> None: ...

    def log(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        """Log one step of a stage ("sft", "rl"); steps come in order, and are repeated after a resume."""

    def close(self) -> None:
        """Finish: the stage is over."""


def check_loggers(names: Sequence[str]) -> None:
    """Check that each logger exists and its package is installed. Raises ConfigError."""
    for name in names:
        plugin = plugins.load("reporting.loggers", name)
        package = plugin.package if hasattr(plugin, "package") else ""
        if package and importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"the logger {name} needs the package {package}; pip install {package}, or remove it from loggers",
                key="loggers",
                value=name,
            )


@contextlib.contextmanager
def open_loggers(folder: Path, recipe: Recipe) -> Iterator[LogStepFn]:
    """Start the recipe's loggers for the run in `folder`; yield a function that logs a step to all of them.

    A logger that fails is dropped after one warning; one that is still busy at the end is abandoned with another.
    """
    check_loggers(recipe.loggers)
    threads = [LoggerThread(name, folder, recipe) for name in recipe.loggers]

    def log_step(stage: str, step: int, values: Mapping[str, Any]) -> None:
        for thread in threads:
            thread.enqueue(stage, step, values)

    try:
        yield log_step
    finally:
        deadline = time.monotonic() + CLOSE_TIMEOUT
        for thread in threads:
            thread.close(deadline)


def read_or_create_id(folder: Path, file: Path, *, length: int) -> str:
    """Return the id of a run at a tracking service, stored in a file of the run's folder.

    A new run at the same path has a new id.
    """
    if not file.exists():
        write_json(file, {"id": compute_digest(str(folder.resolve()), os.urandom(8).hex())[:length]})
    return read_json(file, dict[str, str], hint="delete it")["id"]


class LoggerThread:
    """A logger in its own thread, with the queue of steps it has not logged yet."""

    def __init__(self, name: str, folder: Path, recipe: Recipe) -> None:
        self._name, self._folder, self._recipe, self._is_abandoned = name, folder, recipe, False
        self._queue: SimpleQueue[tuple[str, int, dict[str, float]] | None] = SimpleQueue()
        # A daemon, so that a logger that hangs can't keep the process alive.
        self._thread = threading.Thread(target=self._log_queued_steps, name=f"saccade-{name}", daemon=True)
        self._thread.start()

    def enqueue(self, stage: str, step: int, values: Mapping[str, Any]) -> None:
        """Queue the finite numbers of a step."""
        numbers = {name: float(value) for name, value in values.items() if isinstance(value, int | float)}
        self._queue.put((stage, step, {name: value for name, value in numbers.items() if math.isfinite(value)}))

    def close(self, deadline: float) -> None:
        """Wait until the queue is empty, or until `deadline` (monotonic clock, seconds)."""
        self._queue.put(None)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._is_abandoned = True
            _logger.warning("the logger %s is still busy and is abandoned; metrics.jsonl is complete", self._name)

    def _log_queued_steps(self) -> None:
        try:
            with convert_errors(RunError, f"the logger {self._name} failed"):
                logger: Logger = plugins.load("reporting.loggers", self._name)(self._folder, self._recipe)
                while (step := self._queue.get()) is not None:
                    logger.log(*step)
                logger.close()
        except SaccadeError as error:
            if not self._is_abandoned:
                reason = str(error).rstrip(".")
                _logger.warning("%s; it gets no more steps, and metrics.jsonl continues", reason)
