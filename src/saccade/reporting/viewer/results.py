"""What the viewer computes from whole evaluations: for 100,000 episodes a minute of CPU and gigabytes of memory.

    page ──thread──> Library ──ResultsWorker──> a process of low priority: read, compare ──plain values──> page

In the server's process this work would hold Python's lock, and each pause of its garbage collector would stop every
request for seconds. So `saccade view` runs it in a process of its own, which ends with the result.
"""

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from saccade.errors import RunError
from saccade.metrics.tables import Table

NICENESS = 5  # of the process: requests and the browser come first
Result = TypeVar("Result")


def compute_results(folder: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the sections of a run's results as plain values, and why some evaluations are left out."""
    from saccade.evaluation.compare import compare_evaluations, read_evaluations
    from saccade.reporting.run_report import build_results

    damaged = list[str]()
    evaluations = read_evaluations(folder, damaged)
    sections = build_results(compare_evaluations(evaluations)) if evaluations else []
    return [describe_section(section) for section in sections], damaged


def compute_pair(first: Path, second: Path) -> list[dict[str, Any]]:
    """Return the tables of the paired difference of two results files. Raises DataError if their tasks differ."""
    from saccade.evaluation.compare import compare_files
    from saccade.reporting.evaluation_report import build_pair_tables

    return [describe_table(table) for table in build_pair_tables(compare_files(first, second))]


def describe_section(section: Any) -> dict[str, Any]:
    """Return a section of a report as plain values; its plots are tables of their numbers."""
    tables = [describe_table(table) for table in section.all_tables]
    return {"title": section.title, "notes": list(section.notes), "tables": tables}


def describe_table(table: Table) -> dict[str, Any]:
    """Return a table as plain values."""
    values = asdict(table)
    is_folded = values.pop("is_folded")
    return {**values, "folded": is_folded}


class ResultsWorker:
    """Run functions in processes of low priority, one at a time. `close` ends the one that runs."""

    def __init__(self) -> None:
        self._running = threading.Lock()
        self._pid: int | None = None
        self._is_closed = False

    def run(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Return the function's result; its errors are raised here. Raises RunError if the process was killed."""
        context = multiprocessing.get_context("spawn")  # the server has threads, so it can't fork
        with self._running, ProcessPoolExecutor(1, context, os.nice, (NICENESS,)) as pool:
            try:
                if self._is_closed:
                    raise RunError("the viewer has ended")
                with _block_interrupts():
                    started = pool.submit(os.getpid)
                self._pid = started.result()
                if self._is_closed:
                    raise RunError("the viewer has ended")
                return pool.submit(function, *arguments).result()
            except BrokenProcessPool as error:
                raise RunError("the process that computes results was killed; it may need more memory") from error
            finally:
                self._pid = None

    def close(self) -> None:
        """End the process that runs, and refuse later ones."""
        self._is_closed = True
        if (pid := self._pid) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def _block_interrupts() -> Iterator[None]:
    """Let a process that starts here inherit that Ctrl-C is blocked: the server ends it, without a traceback."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
