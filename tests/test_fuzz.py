"""Mutated inputs of every surface that reads files, servers or models: each is used or refused in one sentence.

`python tests/test_fuzz.py SECONDS SEED [SURFACE...]` mutates each surface for so many CPU seconds in a process of its
own, and prints the rows for docs/reliability.md and every kind of failure once. `--media FOLDER` adds clips to mutate.
"""

import argparse
import contextlib
import faulthandler
import functools
import gc
import multiprocessing
import os
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

import fuzz_targets
import pytest
from fuzz_targets import REFUSALS, SURFACES

pytestmark = pytest.mark.slow

COUNTS = {
    "files of a run (report)": 20,
    "recipe files": 40,
    "OpenEnv messages": 40,
}  # the slow ones; others: COUNT
COUNT = 60  # mutations of each surface
MAX_SECONDS, MAX_GROWTH = 10, 2**30  # of one input: its CPU time, and the address space that it may add
HANG_SECONDS = 300  # on the clock, after which a process that no signal interrupts ends; other programs may be busy


def read_mutation(surface, folder: Path, seed: int, number: int) -> bool:
    """Read one mutation; return whether it was used. Errors that aren't refusals in one sentence are raised."""
    try:
        surface(random.Random(f"{seed}/{number}"), folder)
    except REFUSALS as error:
        sentence = str(error)
    else:
        return True
    assert sentence
    assert "\n" not in sentence
    return False


@pytest.mark.parametrize("name", SURFACES)
def test_mutations_are_used_or_refused(name, tmp_path):
    for number in range(COUNTS.get(name, COUNT)):
        try:
            read_mutation(SURFACES[name], tmp_path, 0, number)
        except Exception as error:
            error.add_note(f"mutation {number} of seed 0")
            raise


def count_cached_results() -> dict[str, int]:
    """Return how many results each unbounded cache of Saccade's functions holds."""
    caches = [item for item in gc.get_objects() if type(item) is functools._lru_cache_wrapper]
    return {
        f"{cache.__module__}.{cache.__qualname__}": cache.cache_info().currsize
        for cache in caches
        if cache.__module__.startswith("saccade.") and cache.cache_parameters()["maxsize"] is None
    }


@pytest.mark.parametrize("name", SURFACES)
def test_no_unbounded_cache_keeps_inputs(name, tmp_path):
    count = COUNTS.get(name, COUNT)
    for seed in (1, 2):
        before = count_cached_results()
        for number in range(count):
            read_mutation(SURFACES[name], tmp_path, seed, number)
    # What plugins and files of the package are read may differ.
    grown = {key: size - before.get(key, 0) for key, size in count_cached_results().items()}
    assert all(growth < count / 5 for growth in grown.values()), grown


# ---- the driver ----------------------------------------------------------------------------------------------------


class _TooSlow(BaseException):
    """An input took more CPU time than MAX_SECONDS."""


def _raise_too_slow(*_):
    raise _TooSlow


def fuzz(name: str, seconds: float, seed: int, media: str) -> None:
    """Mutate one surface and print its row; bound the time and the memory of each input."""
    fuzz_targets.MEDIA_FOLDER = media
    signal.signal(signal.SIGPROF, _raise_too_slow)
    used = refused = number = 0
    failures: dict[tuple, str] = {}
    counts: dict[tuple, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        read_once(name, Path(folder), seed)
        limit = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + MAX_GROWTH
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        start, half_memory = time.process_time(), 0
        while (elapsed := time.process_time() - start) < seconds:
            if not half_memory and elapsed > seconds / 2:  # before, what surfaces build on demand counts, too
                half_memory = _measure_memory()
            signal.setitimer(signal.ITIMER_PROF, MAX_SECONDS)
            faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
            try:
                if read_mutation(SURFACES[name], Path(folder), seed, number):
                    used += 1
                else:
                    refused += 1
            except (Exception, _TooSlow) as error:  # noqa: BLE001 (it counts them)
                key = _identify(error)
                counts[key] = counts.get(key, 0) + 1
                failures.setdefault(key, f"mutation {number}:\n{''.join(traceback.format_exception(error)[-9:])}")
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
            number += 1
        faulthandler.cancel_dump_traceback_later()
        growth = _measure_memory() - half_memory
    for key, text in failures.items():
        print(f"--- {name}, {counts[key]} times, {text}")
    cells = [name, f"{number:,}", f"{used:,}", f"{refused:,}", str(len(failures)), f"{seconds:.0f}"]
    print(f"| {' | '.join(cells)} | {growth / 2**20:+.0f} MiB in the second half", flush=True)


def read_once(name: str, folder: Path, seed: int) -> None:
    """Read one mutation, so that what a surface imports and builds doesn't count as growth."""
    with contextlib.suppress(Exception):
        read_mutation(SURFACES[name], folder, seed, -1)


def _identify(error: BaseException) -> tuple:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "saccade/" in frame.filename]
    return type(error), *((frames[-1].filename, frames[-1].lineno) if frames else ())


def _measure_memory() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("seconds", type=float)
    parser.add_argument("seed", type=int)
    parser.add_argument("surfaces", nargs="*", default=[*SURFACES])
    parser.add_argument("--media", default="")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for surface in options.surfaces:
        process = multiprocessing.get_context("fork").Process(
            target=fuzz, args=(surface, options.seconds, options.seed, options.media)
        )
        process.start()
        process.join()
        if process.exitcode:
            print(f"--- {surface}: the process ended with {process.exitcode}")
    sys.exit()
