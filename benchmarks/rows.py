"""Measure the memory of reading many rows: each operation over few rows and over many, in separate processes.

    python benchmarks/rows.py [--few 10000] [--many 100000]

The metric is the peak resident set of a process, pyarrow's memory included; subtracting the run over few rows removes
the program and its libraries. Linux only. Exits with 1 if an operation exceeds --bound MiB per 100,000 additional rows,
which hold about 60 MB.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

LETTERS = "ABCD"
OPTIONS = ("a red ball", "a blue box", "a green hat", "a dog")


def rows(count: int) -> Iterator[dict[str, object]]:
    """Yield synthetic rows in the format of VideoMME, each with its own text."""
    for at in range(count):
        yield {
            "video_id": str(at // 3),
            "videoID": f"v{at // 3}",
            "question_id": f"{at}-{at % 3}",
            "duration": "short",
            "domain": "Knowledge",
            "sub_category": "Law",
            "task_type": "Counting",
            "question": f"What is shown at second {at}? " * 10,
            "options": [f"{letter}. {text} {at}" for letter, text in zip(LETTERS, OPTIONS, strict=True)],
            "answer": LETTERS[at % 4],
            "video": "selfqa/a.mp4",
        }


def prepare(folder: Path, count: int) -> None:
    """Write the rows as JSONL and as Parquet, and the one file that they refer to."""
    from pyarrow import Table, parquet

    (folder / "root" / "selfqa").mkdir(parents=True)
    (folder / "root" / "selfqa" / "a.mp4").write_bytes(b"x")
    with (folder / "rows.jsonl").open("w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows(count))
    table = Table.from_pylist(list(rows(count)))
    parquet.write_table(table, folder / "rows.parquet", row_group_size=count)  # the worst case: a single row group


def read_benchmark(folder: Path) -> int:
    """Read every row as a task of a benchmark."""
    from saccade import plugins

    benchmark = plugins.resolve("evaluation.benchmarks", "videomme", {})()
    return sum(1 for _ in benchmark.iterate_tasks(folder / "rows.jsonl"))


def import_rows(folder: Path, ending: str) -> int:
    """Import every row as a task of a file."""
    from saccade import plugins
    from saccade.data.importer import import_dataset

    make = plugins.resolve("data.importers", "plain", {"media": "video", "options": "options", "id": "question_id"})
    file = folder / f"rows.{ending}"
    return sum(
        one.written for one in import_dataset(make, [file], folder / f"tasks.{ending}", media_root=folder / "root")
    )


def rewrite_rows(folder: Path, ending: str) -> int:
    """Every path as a local one."""
    from saccade.data.rewrite_paths import rewrite_paths

    return sum(one.rows for one in rewrite_paths([folder / f"rows.{ending}"], folder / "out", folder / "root"))


WORKS: dict[str, Callable[[Path], int]] = {
    "read a benchmark, JSONL": read_benchmark,
    "import, JSONL": lambda folder: import_rows(folder, "jsonl"),
    "import, Parquet": lambda folder: import_rows(folder, "parquet"),
    "rewrite paths, JSONL": lambda folder: rewrite_rows(folder, "jsonl"),
    "rewrite paths, Parquet": lambda folder: rewrite_rows(folder, "parquet"),
}


def peak(work: str, count: int) -> tuple[int, float]:
    """Return the number of rows that a separate process read, and its peak memory in MiB."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [sys.executable, __file__, "--only", "prepare", "--many", str(count), "--at", folder], check=True
        )
        command = [sys.executable, __file__, "--only", work, "--at", folder]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    read, kibibytes = done.stdout.split()
    return int(read), int(kibibytes) / 1024


def main() -> int:
    options = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    options.add_argument("--few", type=int, default=10_000)
    options.add_argument("--many", type=int, default=100_000)
    options.add_argument("--bound", type=float, default=32.0, help="MiB for each 100,000 rows")
    options.add_argument("--out", type=Path, help="a file for the figures as JSON")
    options.add_argument("--only", help="one work of the list, in this process")
    options.add_argument("--at", type=Path, help="its folder")
    given = options.parse_args()
    if given.only == "prepare":
        prepare(given.at, given.many)
        return 0
    if given.only:
        read = WORKS[given.only](given.at)
        status = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines())
        print(read, status["VmHWM"].split()[0])
        return 0
    table = []
    for work in WORKS:
        (few, low), (many, high) = peak(work, given.few), peak(work, given.many)
        assert (few, many) == (given.few, given.many), f"{work}: {few} and {many} rows were read"
        grown = (high - low) * 100_000 / (many - few)
        table.append({"work": work, f"MiB, {few} rows": low, f"MiB, {many} rows": high, "MiB per 100,000 rows": grown})
    from _common import (  # which bring torch: only now, so that no process that is measured has it
        describe_machine,
        show,
    )

    show("memory of many rows", table, describe_machine(), given.out)
    return int(any(row["MiB per 100,000 rows"] > given.bound for row in table))


if __name__ == "__main__":
    sys.exit(main())
