"""`saccade bench`: measure speed beside baselines with the scripts of a checkout's `benchmarks` folder.

Published benchmarks, which measure answers, are in `benchmark.py`.
"""

import ast
import os
import platform
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Column, Table

from saccade import plugins
from saccade.cli.terminal import complete_name, err, file_option, out, print_table
from saccade.errors import ConfigError, DataError, RunError
from saccade.reporting.console import print_text
from saccade.utils.files import read_text
from saccade.utils.jsonl import read_json, write_json
from saccade.utils.versions import collect_versions

SCRIPTS_FOLDER = Path(__file__).parents[3] / "benchmarks"
MAX_CPU_GROWTH = 0.15
CPU_KEY = "CPU s"  # how the columns of CPU seconds end; the first of a row is of Saccade's side
_HAS_COMMON_OPTIONS = re.compile(r"from _common import (?:\([^)]*|.*)\bparser\b")


def bench(
    names: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME,...]",
            help="Scripts, such as local_engine,packing; without names they are listed.",
            autocompletion=lambda incomplete: complete_name(_find_scripts(SCRIPTS_FOLDER), incomplete),
        ),
    ] = None,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- OPTION...]", help="Options of the script itself, such as -- --rows 8."),
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Measurements per side; the script's own number by default.")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads of torch; the script's own number by default.")
    ] = None,
    file: Annotated[
        Path, file_option("--out", "-o", suffix=".json", help_text="A JSON file for figures, machine and commit.")
    ] = Path("runs/bench.json"),
    compare: Annotated[
        Path | None,
        typer.Option(
            metavar="OLD.json",
            help="An earlier file: measure its scripts again; exit with 1 if a row takes 15 % more CPU seconds.",
        ),
    ] = None,
    folder: Annotated[Path, typer.Option(help="The folder with the scripts.")] = SCRIPTS_FOLDER,
) -> None:
    """Measure speed beside baselines: run scripts of a checkout's `benchmarks` folder and print their tables."""
    scripts = _find_scripts(folder)
    if compare is not None and file.resolve() == compare.resolve():
        raise ConfigError(
            f"--out {file} would overwrite the file that --compare reads; give another file", key="--out", value=file
        )
    old_cpu, old = ("", {}) if compare is None else _read_figures(compare)
    chosen = names.split(",") if names else list(old)
    if not chosen:
        print_table(_build_list(scripts))
        return
    for name in chosen:
        if name not in scripts:
            raise ConfigError(
                f"there is no benchmark script {name!r}; {plugins.suggest(name, scripts)}", key="NAME", value=name
            )
    given = [
        text
        for option, value in (("--rounds", rounds), ("--threads", threads))
        if value
        for text in (option, str(value))
    ]
    measured: dict[str, Any] = {}
    for name in chosen:
        # Of an option that is repeated the last value counts.
        script_arguments = [*(old[name]["arguments"] if name in old else ()), *given, *(arguments or ())]
        measured[name] = {**_run_script(scripts[name], script_arguments), "arguments": script_arguments}
        write_json(file, {"versions": collect_versions(), "cpu": _find_cpu(), "benchmarks": measured})
    print_text(out, f"wrote {file}")
    if compare is not None:
        if old_cpu != _find_cpu():
            print_text(err, f"{compare} was measured on another machine: {old_cpu}; this one has {_find_cpu()}")
        repeated = {name: old[name] for name in chosen if name in old}
        for name, figures in repeated.items():
            load, new_load = figures["load_average"][0], measured[name]["load_average"][0]
            print_text(out, f"{name}: load average {load} then, {new_load} now; load raises CPU seconds, too")
        problems = find_slower_rows(repeated, measured)
        for problem in problems:
            print_text(err, problem, style="red")
        if problems:
            raise typer.Exit(1)


def find_slower_rows(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Return a sentence per row of `old` that takes over 15 % more CPU seconds of Saccade's side, or is missing.

    Raises RunError if there is no row with CPU seconds to compare.
    """
    before, after = _collect_cpu_seconds(old), _collect_cpu_seconds(new)
    if not before:
        raise RunError("the old file has no row with CPU seconds of the scripts that ran", key="--compare")
    problems = []
    for (name, case), seconds in before.items():
        now = after.get((name, case))
        if now is None:
            problems.append(f"{name}: the row {case!r} of the old file wasn't measured; give its script's options")
        elif now > seconds * (1 + MAX_CPU_GROWTH):
            growth = f"{now / seconds - 1:.0%} more than {seconds:.3g}"
            problems.append(f"{name}: {case} took {now:.3g} CPU s, {growth}; the limit is {MAX_CPU_GROWTH:.0%}")
    return problems


def _collect_cpu_seconds(benchmarks: dict[str, Any]) -> dict[tuple[str, str], float]:
    """Return the CPU seconds of Saccade's side by script and first column."""
    found = {}
    for name, figures in benchmarks.items():
        for row in figures["rows"]:
            seconds = next((value for key, value in row.items() if key.endswith(CPU_KEY)), None)
            if isinstance(seconds, float | int):
                found[name, str(next(iter(row.values())))] = float(seconds)
    return found


def _find_scripts(folder: Path) -> dict[str, Path]:
    """Return the scripts that have the common options, by name. Raises RunError without any."""
    paths = (path for path in sorted(folder.glob("*.py")) if not path.name.startswith("_"))
    scripts = {path.stem: path for path in paths if _HAS_COMMON_OPTIONS.search(read_text(path))}
    if not scripts:
        raise RunError(
            f"{folder} has no benchmark scripts; `saccade bench` runs those of a checkout of Saccade's repository, "
            "not of an installed package: make one, run scripts/bootstrap there, and use its .venv/bin/saccade",
            key=str(folder),
        )
    return scripts


def _build_list(scripts: dict[str, Path]) -> Table:
    table = Table(Column("script", no_wrap=True), "what it measures", box=None)
    for name, path in scripts.items():
        description = ast.get_docstring(ast.parse(read_text(path))) or ""
        table.add_row(name, description.partition("\n")[0])
    return table


def _run_script(script: Path, arguments: list[str]) -> dict[str, Any]:
    """Run a script, which prints its tables, and return the figures it wrote. Raises RunError if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        figures = Path(folder, "figures.json")
        done = subprocess.run([sys.executable, script, *arguments, "--out", figures])
        if done.returncode or not figures.exists():
            raise RunError(f"{script} failed with exit code {done.returncode}; its output is above", key=script.stem)
        load = [round(value, 1) for value in os.getloadavg()]
        return {**read_json(figures, dict[str, Any], hint="correct the script"), "load_average": load}


def _read_figures(path: Path) -> tuple[str, dict[str, Any]]:
    """Return the CPU and the figures by script of an earlier file. Raises DataError for any other file."""
    hint = "give a file that `saccade bench` wrote"
    content = read_json(path, dict[str, Any], hint=hint)
    if not {"cpu", "benchmarks"} <= content.keys():
        raise DataError(f"{path} holds no benchmarks; {hint}", key=str(path))
    return content["cpu"], content["benchmarks"]


def _find_cpu() -> str:
    """Return the CPU's name and the number of its cores."""
    found = None
    if (path := Path("/proc/cpuinfo")).exists():
        found = re.search(r"^model name\s*: (.*)$", read_text(path), re.M)
    return f"{found[1] if found else platform.machine()}, {os.cpu_count()} cores"
