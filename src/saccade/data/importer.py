"""Convert published rows to a file of tasks or demonstrations, one row at a time.

    file ──read_rows──> SourceRow ─importer─> Task, Demonstration ──media exist──> FILE.partial.jsonl
                                                       └── media missing ──────────┘ one line per row
    at the end: FILE, written atomically, and FILE.missing.jsonl, the rows whose media are missing

An interrupted call resumes after the last complete line of the partial file, unless it was made from other files or
settings, or media that were missing exist by now: the result would be another file. Only hashes of ids stay in memory,
so that memory use hardly depends on the number of rows.
"""

import functools
import hashlib
import itertools
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from saccade.data.dataset import get_task, require_gradable, write_items
from saccade.data.parquet import import_pyarrow
from saccade.data.source_row import SourceRow, iterate_rows_with_errors, store_media_file
from saccade.errors import DataError, SaccadeError
from saccade.media.relocation import map_media_paths
from saccade.types import Demonstration, Task
from saccade.utils.files import open_file, resolve_path
from saccade.utils.jsonl import encode_json_line, relativize_path, require_file, write_jsonl
from saccade.utils.text import pluralize

Importer = Callable[[SourceRow], Iterator[Task | Demonstration]]
ErrorPolicy = Literal["error", "skip"]
MAX_REPORTED = 5  # ids in a report; the complete list is a file


@dataclass(slots=True)
class ImportReport:
    """Counts for one imported file: rows read, items written, rows skipped for missing media or because of errors."""

    file: str
    rows: int = 0
    written: int = 0
    missing_rows: int = 0
    missing_files: Counter[str] = field(default_factory=Counter)  # by archive folder
    missing_ids: list[str] = field(default_factory=list)  # the first MAX_REPORTED
    bad_rows: int = 0
    bad_row_errors: list[str] = field(default_factory=list)  # the first MAX_REPORTED messages

    def add(self, line: Mapping[str, Any]) -> None:
        """Count a row by its line in the partial file."""
        self.rows += 1
        self.written += len(line["items"])
        self.missing_rows += len(line["missing"])
        self.missing_files.update(get_archive_folder(path) for entry in line["missing"] for path in entry["paths"])
        self.missing_ids = [*self.missing_ids, *(entry["id"] for entry in line["missing"])][:MAX_REPORTED]
        if line["error"]:
            self.bad_rows += 1
            self.bad_row_errors = [*self.bad_row_errors, line["error"]][:MAX_REPORTED]


def import_dataset(
    importer: Importer,
    files: Sequence[Path],
    target: Path,
    *,
    media_root: Path | None = None,
    on_missing: ErrorPolicy = "error",
    on_bad: ErrorPolicy = "error",
    identity: Any = None,
    on_progress: Callable[[int], None] = lambda rows: None,
) -> list[ImportReport]:
    """Convert the rows of `files` with `importer`, write `target` (.jsonl or .parquet), and return a report per file.

    Relative media paths start at `media_root`, or at the folder of their file. Rows with missing media are listed in
    `<target>.missing.jsonl`; with `on_missing="error"` all rows are checked, then DataError is raised. Images embedded
    in rows become files in `<target>.media/`. With an `identity` (JSON: name and settings of the importer) an
    interrupted import resumes at the next call with the same identity and gives the same file. Raises DataError.
    """
    for file in files:
        require_file(file)
    if target.suffix not in (".jsonl", ".parquet"):
        raise DataError(f"{target}: the name of a file of tasks must end in .jsonl or .parquet", key=str(target))
    if target.suffix == ".parquet":
        import_pyarrow()  # before the rows are converted
    target.parent.mkdir(parents=True, exist_ok=True)
    job = _ImportJob(importer=importer, files=files, target=target, media_root=media_root, on_bad=on_bad)
    sources = [(os.path.abspath(file), os.stat(file).st_mtime_ns, os.stat(file).st_size) for file in files]
    job.restore(None if identity is None else [identity, sources, os.path.abspath(media_root or ""), on_bad])
    try:
        with open_file(job.partial_path, "ab") as partial:
            for report, line in job.convert_rows():
                partial.write(encode_json_line(line))
                on_progress(report.rows)
        missing_path = target.with_name(f"{target.name}.missing.jsonl")
        missing_path.unlink(missing_ok=True)
        if any(report.missing_rows for report in job.reports):
            write_jsonl(missing_path, (entry for line in job.read_lines() for entry in line["missing"]))
        _check_reports(job.reports, on_missing, missing_path)
        write_items(target, (item for line in job.read_lines() for item in line["items"]))
    except SaccadeError:  # the user may fix rows or settings
        job.partial_path.unlink()
        raise
    job.partial_path.unlink()
    return job.reports


def _check_reports(reports: Sequence[ImportReport], policy: ErrorPolicy, missing_list_path: Path) -> None:
    """Raise DataError for rows with missing media if the policy is "error", and for an import without any item."""
    incomplete = [report for report in reports if report.missing_rows]
    if incomplete and policy == "error":
        first = incomplete[0]
        folders = ", ".join(f"{count} in {folder}" for folder, count in first.missing_files.most_common(MAX_REPORTED))
        counts = f"{first.file}: {first.missing_rows} of {first.rows} rows lack media files ({folders})"
        others = f"; so do rows of {pluralize(len(incomplete) - 1, 'other file')}" if incomplete[1:] else ""
        fix = "give --root their folder, or skip the rows with --on-missing skip"
        message = f"{counts}, first {first.missing_ids[0]}{others}; {missing_list_path} lists them: {fix}"
        raise DataError(message, key="media", value=first.missing_rows)
    if not sum(report.written for report in reports):
        raise DataError("no row could be imported; check --root and the importer", key="media")


@dataclass(slots=True)
class _ImportJob:
    importer: Importer
    files: Sequence[Path]
    target: Path
    media_root: Path | None
    on_bad: ErrorPolicy
    reports: list[ImportReport] = field(init=False)
    seen_ids: set[bytes] = field(default_factory=set)  # hashes
    item_type: type[Task] | type[Demonstration] | None = None
    is_file: Callable[[str], bool] = field(default_factory=lambda: functools.lru_cache(65536)(os.path.isfile))

    @property
    def partial_path(self) -> Path:
        return self.target.with_name(f"{self.target.name}.partial.jsonl")

    def get_media_folder(self, file: Path) -> Path:
        return file.parent if self.media_root is None else self.media_root

    def read_lines(self) -> Iterator[dict[str, Any]]:
        """Yield the lines of the partial file after the first, which holds the identity, up to an incomplete one."""
        with open_file(self.partial_path) as file:
            for line in itertools.islice(file, 1, None):
                if line.endswith(b"\n"):
                    yield json.loads(line)

    def restore(self, identity: Any) -> None:
        """Restore counts and ids from the partial file of an interrupted call; begin a new file if it is outdated."""
        header = encode_json_line(identity)
        self.reports = [ImportReport(file=str(file)) for file in self.files]
        if identity is not None and self.partial_path.is_file() and self._is_current(header):
            for line in self.read_lines():
                self.reports[line["file_index"]].add(line)
                for item in line["items"]:
                    self.item_type = Demonstration if "replies" in item else Task
                ids = [item.get("task", item)["id"] for item in line["items"]]
                self.seen_ids.update(_hash_id(name) for name in (*ids, *(entry["id"] for entry in line["missing"])))
            with open_file(self.partial_path, "r+b") as file:
                file.truncate(sum(map(len, filter(lambda line: line.endswith(b"\n"), file))))
        else:
            with open_file(self.partial_path, "wb") as file:
                file.write(header)

    def _is_current(self, header: bytes) -> bool:
        """Return whether the partial file has the same identity and the media that its rows lack are still missing."""
        with open_file(self.partial_path) as file:
            if file.readline() != header:
                return False
        return not any(
            self.is_file(os.path.join(self.get_media_folder(Path(entry["file"])), path))
            for line in self.read_lines()
            for entry in line["missing"]
            for path in entry["paths"]
        )

    def convert_rows(self) -> Iterator[tuple[ImportReport, dict[str, Any]]]:
        """Yield the line of every row that the partial file lacks, with the report that counts it."""
        first = max((index for index, report in enumerate(self.reports) if report.rows), default=0)
        for file_index, (file, report) in enumerate(zip(self.files[first:], self.reports[first:], strict=True), first):
            for row in itertools.islice(iterate_rows_with_errors(file, self.save_media), report.rows, None):
                line: dict[str, Any] = {"file_index": file_index, "items": [], "missing": [], "error": ""}
                try:
                    items = self.convert_row(row)
                except DataError as error:
                    if self.on_bad == "error":
                        raise
                    items, line["error"] = [], str(error)
                for item in items:
                    task, folder = get_task(item), self.get_media_folder(file)
                    paths = [media.path for media in item.media if not self.is_file(os.path.join(folder, media.path))]
                    if paths:
                        entry = {"file": report.file, "row": report.rows + 1, "id": task.id, "paths": paths}
                        line["missing"].append(entry)
                    else:
                        line["items"].append(map_media_paths(item, functools.partial(self.relativize_path, folder)))
                report.add(line)
                yield report, line

    def relativize_path(self, folder: Path, path: str) -> str:
        return relativize_path(self.target.parent, os.path.join(folder, path), self.target.parent)

    def convert_row(self, row: SourceRow | DataError) -> list[Task | Demonstration]:
        if isinstance(row, DataError):
            raise row
        items = list(self.importer(row))
        location = f"{row.file}, row {row.number}"
        for item in items:
            task = get_task(item)
            require_gradable(task, location)
            if type(item) is not (self.item_type or type(item)):
                raise DataError(f"{location}: a file can't hold both tasks and demonstrations", key=str(row.file))
            self.item_type = type(item)
            id_hash = _hash_id(task.id)
            if id_hash in self.seen_ids and self.item_type is Task:  # a task may have several demonstrations
                raise row.build_field_error("id", f"{task.id!r} is used twice; ids must be unique", value=task.id)
            self.seen_ids.add(id_hash)
        return items

    def save_media(self, content: bytes) -> str:
        return str(store_media_file(content, resolve_path(self.target.with_name(f"{self.target.name}.media"))))


def _hash_id(task_id: str) -> bytes:
    # 8 bytes per id: a million ids take some ten megabytes
    return hashlib.sha256(task_id.encode("utf-8", "surrogatepass")).digest()[:8]


def get_archive_folder(path: str) -> str:
    """Return the first two folders of a path, which name the archive that it comes from.

    >>> get_archive_folder("museg/charades/1.mp4"), get_archive_folder("selfqa/2.mp4"), get_archive_folder("3.mp4")
    ('museg/charades', 'selfqa', '.')
    """
    parts = [part for part in path.split("/")[:-1] if part]
    return "/".join(parts[:2]) or "."
