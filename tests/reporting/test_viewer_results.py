"""What takes minutes is computed in a process of its own, once, and ends with the viewer."""

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from error_cases import raises
from viewer_cases import make_run

from saccade.errors import DataError, RunError
from saccade.reporting.viewer.library import Library, RecentResults
from saccade.reporting.viewer.results import NICENESS, ResultsWorker, compute_pair, compute_results

WAIT_SECONDS = 60
pytestmark = pytest.mark.slow


def test_the_worker_is_another_process_of_low_priority():
    worker = ResultsWorker()
    assert worker.run(os.getpid) != os.getpid()
    assert worker.run(os.nice, 0) == min(os.nice(0) + NICENESS, 19)
    # Ctrl-C in the terminal reaches the worker, too.
    assert signal.SIGINT in worker.run(signal.pthread_sigmask, signal.SIG_BLOCK, ())
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_an_error_of_the_worker_is_raised_here(tmp_path):
    worker, path = ResultsWorker(), tmp_path / "a.jsonl"
    path.touch()
    with raises(DataError, key=str(path)):
        worker.run(compute_pair, path, path)
    with raises(RunError):
        worker.run(signal.raise_signal, signal.SIGKILL)
    assert worker.run(os.getpid) != os.getpid()


def test_a_closed_worker_ends_at_once(tmp_path):
    worker, pipe = ResultsWorker(), tmp_path / "pipe"
    os.mkfifo(pipe)
    with ThreadPoolExecutor(1) as threads:
        result = threads.submit(worker.run, Path.read_text, pipe)
        with pipe.open("w"):  # when the worker reads it
            worker.close()
            with raises(RunError):
                result.result(WAIT_SECONDS)
    with raises(RunError):
        worker.run(os.getpid)


def test_results_and_pairs_are_what_the_worker_computes(tmp_path):
    folder = make_run(tmp_path / "a", num_steps=1)
    calls = []

    def compute(function, *arguments):
        calls.append(function)
        return function(*arguments)

    library = Library([folder], compute=compute)
    library.refresh()
    here = Library([folder])
    here.refresh()
    sides = [("a", "before", 0), ("a", "after", 0)]
    for _ in range(2):
        assert library.build_tables("a") == here.build_tables("a")
        assert library.compare_evaluations(*sides) == here.compare_evaluations(*sides)
    assert calls == [compute_results, compute_pair]
    assert "Accuracy" in str(here.build_tables("a"))


def test_a_result_that_two_threads_need_is_computed_once():
    results, computed, is_first_waiting, may_end = RecentResults(4), [], threading.Event(), threading.Event()
    has_found_the_first = threading.Event()

    class Stamp:
        def __ne__(self, other):
            has_found_the_first.set()  # the second request compares it, before the first may fail
            return False

    stamp = Stamp()

    def compute():
        computed.append(1)
        is_first_waiting.set()
        may_end.wait(WAIT_SECONDS)
        if len(computed) == 1:
            raise DataError("damaged", key="a")
        return "computed"

    def request():
        return results.keep("key", stamp, compute)

    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(request)
        assert is_first_waiting.wait(WAIT_SECONDS)
        second = threads.submit(request)
        assert has_found_the_first.wait(WAIT_SECONDS)
        may_end.set()
        for result in (first, second):
            with raises(DataError, key="a"):
                result.result(WAIT_SECONDS)
    assert len(computed) == 1
    assert request() == request() == "computed"  # an error isn't kept
    assert len(computed) == 2
