"""What the benchmarks share: alternating measurements, medians, and how results are shown."""

import argparse
import contextlib
import gc
import itertools
import json
import os
import platform
import resource
import statistics
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

Seconds = tuple[float, float]  # by the clock, of CPU time
T = TypeVar("T")
TICKS = os.sysconf("SC_CLK_TCK")  # of /proc, per second


def parser(text: str | None, *, rounds: int = 5) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    options = argparse.ArgumentParser(description=(text or "").split("\n")[0])
    options.add_argument("--rounds", type=int, default=rounds, help="measurements per side; the median counts")
    options.add_argument("--threads", type=int, default=2, help="of torch, on the CPU")
    options.add_argument("--out", type=Path, help="a file for the figures as JSON")
    return options


def measure(function: Callable[[], Any]) -> Seconds:
    """Seconds by the clock and seconds of this process's CPU time."""
    begun = time.perf_counter(), time.process_time()
    function()
    return time.perf_counter() - begun[0], time.process_time() - begun[1]


def alternate_sides(sides: Mapping[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """What each side returns, called in turn; the first round warms up and is not counted.

    Other load on the machine therefore affects all sides alike.
    """
    values: dict[str, list[T]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name, side in sides.items():
            value = side()
            if number:
                values[name].append(value)
    return values


def alternate(sides: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[Seconds]]:
    """The seconds of each side, measured in turn."""
    return alternate_sides({name: partial(measure, side) for name, side in sides.items()}, rounds)


def list_descendants(root: int) -> Iterator[tuple[int, list[str]]]:
    """Yield the pid and the fields of /proc/PID/stat, from the state on, of a process and all its descendants."""
    stats: dict[int, list[str]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            stats[int(folder.name)] = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
        except OSError:
            continue  # it has exited
    pids = [root]
    while pids:
        pid = pids.pop()
        if pid in stats:
            yield pid, stats[pid]
        pids += [child for child, fields in stats.items() if int(fields[1]) == pid]


def sum_cpu_seconds(root: int) -> float:
    """Return the CPU seconds of a process and all its descendants, ended ones that were waited for included."""
    return sum(int(ticks) for _, fields in list_descendants(root) for ticks in fields[11:15]) / TICKS


def find_environment(name: str) -> Path | None:
    """The interpreter of `.venv-NAME`, the environment of a baseline; None if it wasn't made."""
    interpreter = Path(__file__).parents[1] / f".venv-{name}" / "bin" / "python"
    return interpreter if interpreter.exists() else None


class BaselineProcess:
    """A script that runs in `.venv-NAME`; a request is a line of JSON, and so is its answer.

    Exits with a sentence if the environment is missing.
    """

    def __init__(self, environment: str, script: str, *arguments: str) -> None:
        interpreter = find_environment(environment)
        if interpreter is None:
            raise SystemExit(f".venv-{environment} is missing; make it with scripts/bootstrap --{environment}")
        command = [interpreter, Path(__file__).with_name(script), *arguments]
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by close()
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True
        )

    def request(self, request: Mapping[str, Any]) -> Any:
        """Return the answer. Exits with what the process wrote to stderr if it ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            self._errors.seek(0)
            raise SystemExit(f"{self._process.args[1]} ended:\n{self._errors.read()[-4000:]}")
        return json.loads(answer)

    def close(self) -> None:
        """End the process."""
        self._process.communicate()
        self._errors.close()


def build_comparison_row(
    name: str, seconds: Mapping[str, Sequence[Seconds]], *, tokens: int | None = None
) -> dict[str, Any]:
    """One line of a comparison: medians, how many times faster ours (the first) is, and tokens/s where they count.

    The spread of a ratio is its least and greatest value over the rounds. `saccade bench --compare` reads the first
    column that ends with "CPU s".
    """
    row: dict[str, Any] = {"case": name}
    for index, (unit, ratio) in enumerate((("s", "times faster"), ("CPU s", "times less CPU"))):
        ours, theirs = ([each[index] for each in values] for values in seconds.values())
        ratios = [baseline / own for own, baseline in zip(ours, theirs, strict=True)]
        for side, values in zip(seconds, (ours, theirs), strict=True):
            row[f"{side} {unit}"] = statistics.median(values)
        row[ratio] = statistics.median(theirs) / statistics.median(ours)
        row[f"{ratio}, spread"] = f"{min(ratios):.2f}–{max(ratios):.2f}"
    if tokens is not None:
        row |= {f"{side} tokens/CPU s": tokens / row[f"{side} CPU s"] for side in seconds}
    return row | {"rounds": min(len(values) for values in seconds.values())}


def describe_machine(device: str = "cpu") -> dict[str, str]:
    """What the figures were measured on."""
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else f"{torch.get_num_threads()} CPU threads"
    return {
        "device": name,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
    }


def peak_gib(device: str) -> float:
    """Most memory so far, in GiB: the device's since its counter was reset, or the process's since it began."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def count_stored_bytes() -> int:
    """Return the bytes of all tensors that exist."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # looking at an object may
        tensors = [item for item in gc.get_objects() if isinstance(item, torch.Tensor)]
    tensors = [item for item in tensors if not is_traceable_wrapper_subclass(item)]  # made of other tensors
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def measure_peak(step: Callable[[], None], device: str) -> int:
    """Return the most bytes that torch has allocated at a time during a step."""
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats(device)
        step()
        return torch.cuda.max_memory_allocated(device)
    stored = count_stored_bytes()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    events: Any = profiler.profiler
    changes = [event for event in events.kineto_results.events() if event.name() == "[memory]"]
    changes.sort(key=lambda event: event.start_ns())
    return stored + max(itertools.accumulate(event.nbytes() for event in changes))


def show(title: str, rows: Sequence[Mapping[str, Any]], about: Mapping[str, str], out: Path | None) -> None:
    """Print the rows as tables of at most ten columns, and write them, with the machine, as JSON."""
    first, *others = rows[0]
    for start in range(0, len(others), 9):
        table = Table(title=title, caption=", ".join(f"{key} {value}" for key, value in about.items()))
        for key in (columns := [first, *others[start : start + 9]]):
            table.add_column(key, justify="right")
        for row in rows:
            values = (row[key] for key in columns)
            table.add_row(*(f"{value:,.4g}" if isinstance(value, float) else str(value) for value in values))
        Console(width=160).print(table)
    write_figures(title, rows, about, out)


def write_figures(title: str, rows: Sequence[Mapping[str, Any]], about: Mapping[str, str], out: Path | None) -> None:
    """Write the rows, with the machine, as JSON, if there is a file for them."""
    if out is not None:
        out.write_text(json.dumps({"title": title, "machine": dict(about), "rows": list(rows)}, indent=2) + "\n")
