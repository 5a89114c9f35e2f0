"""What the benchmarks share: alternating measurements, medians, and how results are shown."""

import argparse
import json
import platform
import resource
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table


def parser(text: str | None, *, rounds: int = 5) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    options = argparse.ArgumentParser(description=(text or "").split("\n")[0])
    options.add_argument("--rounds", type=int, default=rounds, help="measurements per side; the median counts")
    options.add_argument("--threads", type=int, default=2, help="of torch, on the CPU")
    options.add_argument("--out", type=Path, help="a file for the figures as JSON")
    return options


def alternate(sides: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Seconds by the clock and seconds of this process's CPU time, of each side, measured in turn.

    Other load on the machine therefore affects all sides alike. The first round warms up and is not counted.
    """
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name, side in sides.items():
            begun = time.perf_counter(), time.process_time()
            side()
            if number:
                seconds[name].append((time.perf_counter() - begun[0], time.process_time() - begun[1]))
    return seconds


def build_comparison_row(
    name: str, seconds: Mapping[str, Sequence[tuple[float, float]]], *, tokens: int | None = None
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


def show(title: str, rows: Sequence[Mapping[str, Any]], about: Mapping[str, str], out: Path | None) -> None:
    """Print the rows as a table and write them, with the machine, as JSON."""
    table = Table(title=title, caption=", ".join(f"{key} {value}" for key, value in about.items()))
    for key in rows[0]:
        table.add_column(key, justify="right")
    for row in rows:
        table.add_row(*(f"{value:,.4g}" if isinstance(value, float) else str(value) for value in row.values()))
    Console(width=160).print(table)
    if out is not None:
        out.write_text(json.dumps({"title": title, "machine": dict(about), "rows": list(rows)}, indent=2) + "\n")
