"""Published rows into a file of tasks or demonstrations, one row at a time.

    file ──read_rows──> Row ──source──> Task, Demo ──their files found?──> draft ──at the end──> target
                                                    └── missing: counted by source, and listed row by row

Nothing is held but ids, so that memory stays flat however many rows there are.
"""

import hashlib
import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from saccade.data.draft import Draft
from saccade.data.raw import Row, each_row, kept
from saccade.data.record import need_file, seen_from
from saccade.data.rows import problem_of
from saccade.errors import DataError
from saccade.types import Demo, Media, Task

Source = Callable[[Row], Iterator[Task | Demo]]
Policy = Literal["error", "skip"]
NOTED = 2048  # rows after which it is noted how far an import is
SHOWN = 5  # ids that a report names; the whole list is a file


@dataclass(slots=True)
class Found:
    """What came of one file: rows read, items written, rows left out for missing files or because they are bad."""

    file: str
    rows: int = 0
    written: int = 0
    missing_rows: int = 0
    missing_files: Counter[str] = field(default_factory=Counter)  # by the first folder of their paths
    missing_ids: list[str] = field(default_factory=list)  # the first few
    bad_rows: int = 0
    bad: list[str] = field(default_factory=list)  # the first few sentences


def gather(
    source: Source,
    files: Sequence[Path],
    target: Path,
    *,
    root: Path | None = None,
    on_missing: Policy = "error",
    on_bad: Policy = "error",
    identity: Any = None,
    told: Callable[[int], None] = lambda rows: None,
) -> list[Found]:
    """Write what `source` makes of the rows of `files` to `target` (.jsonl or .parquet); what came of each file.

    Relative paths of media start at `root`, else at their file's folder. Rows with missing files are listed in
    `<target>.missing.jsonl`; with "error" all are looked for, then nothing is written. Pictures that stand in rows
    become files in `<target>.media/`. Where `identity` says what the source is (JSON: its name, its settings), the next
    call of the same identity goes on where one was stopped, and ends with the same file. Raises DataError.
    """
    for file in files:
        need_file(file)
    if target.suffix not in (".jsonl", ".parquet"):
        raise DataError(f"{target}: a file of tasks ends in .jsonl or .parquet")
    target.parent.mkdir(parents=True, exist_ok=True)
    is_file.cache_clear()  # there may be more files than a moment ago
    read = [(os.path.abspath(file), os.stat(file).st_mtime_ns, os.stat(file).st_size) for file in files]
    whole = None if identity is None else [identity, read, os.path.abspath(root or ""), on_bad]
    # Row by row while reading: a file of millions of rows with nothing in place must not fill the memory.
    with Draft(target, whole, root) as draft:
        work = _Work(source=source, target=target, root=root, on_bad=on_bad, draft=draft, told=told)
        reports = [_found(each) for each in draft.note.get("reports", [])] or [Found(file=str(file)) for file in files]
        work.recall()
        for place in range(draft.note.get("place", 0), len(files)):
            work.read(files[place], place, reports)
        _refuse(reports, on_missing, draft.listing)
        draft.finish()
    return reports


def _plain(report: Found) -> dict[str, Any]:
    return {each.name: getattr(report, each.name) for each in fields(report)}


def _found(noted: dict[str, Any]) -> Found:
    return Found(**{**noted, "missing_files": Counter(noted["missing_files"])})


def _refuse(reports: Sequence[Found], policy: Policy, listing: Path) -> None:
    """An error, so that nothing is written, where files are missing and may not be."""
    lacking = [report for report in reports if report.missing_rows]
    if lacking and policy == "error":
        one = lacking[0]
        folders = ", ".join(f"{count} in {folder}" for folder, count in one.missing_files.most_common(SHOWN))
        what = f"{one.file}: {one.missing_rows} of {one.rows} rows lack files ({folders}), first {one.missing_ids[0]}"
        more = f"; so do rows of {len(lacking) - 1} other files" if lacking[1:] else ""
        mend = "give --root their folder, or leave the rows out with --on-missing skip"
        raise DataError(f"{what}{more}; {listing} lists them: {mend}")
    if not sum(report.written for report in reports):
        raise DataError("no row is left to be written; check --root and the source")


@dataclass(slots=True)
class _Work:
    source: Source
    target: Path
    root: Path | None
    on_bad: Policy
    draft: Draft
    told: Callable[[int], None]
    ids: set[bytes] = field(default_factory=set)
    kind: type[Any] | None = None

    def recall(self) -> None:
        """Know again what a call that was stopped had written."""
        for item in self.draft.items():
            self.kind = type(item)
            self.ids.add(_mark(item.task.id if isinstance(item, Demo) else item.id))
        self.ids.update(_mark(row["id"]) for row in self.draft.lacking())

    def read(self, file: Path, place: int, reports: Sequence[Found]) -> None:
        """Write what the rows of the file at this place give, but for those that were read before."""
        folder = file.parent if self.root is None else self.root
        report = reports[place]
        for row in itertools.islice(each_row(file, self.keep), report.rows, None):
            report.rows += 1
            for item in self.made(row, report):
                located = self.located(item, folder, report)
                if located is not None:
                    report.written += 1
                    self.draft.add(located)
            self.told(report.rows)
            if report.rows % NOTED == 0:
                self.draft.mark({"place": place, "reports": [_plain(each) for each in reports]})

    def made(self, row: Row | DataError, report: Found) -> list[Task | Demo]:
        """What the source makes of a row, sound and with ids of their own."""
        try:
            if isinstance(row, DataError):
                raise row
            items = list(self.source(row))
            for item in items:
                self.check(row, item)
        except DataError as error:
            if self.on_bad == "error":
                raise
            report.bad_rows += 1
            report.bad += [str(error)] if len(report.bad) < SHOWN else []
            return []
        return items

    def check(self, row: Row, item: Task | Demo) -> None:
        task = item.task if isinstance(item, Demo) else item
        problem = problem_of(task)
        if problem:
            raise DataError(f"{row.file}, row {row.number}: {problem}")
        if type(item) is not (self.kind or type(item)):
            raise DataError(f"{row.file}, row {row.number}: a file can't hold both tasks and demonstrations")
        self.kind = type(item)
        mark = _mark(task.id)
        if mark in self.ids and not isinstance(item, Demo):  # a task may be shown in several ways
            raise DataError(f"{row.file}, row {row.number}: the id {task.id!r} was used before")
        self.ids.add(mark)

    def located(self, item: Task | Demo, folder: Path, report: Found) -> Task | Demo | None:
        """The item with its files as seen from the target's folder; None, and noted, where one is missing."""
        task = item.task if isinstance(item, Demo) else item
        paths = {one.path: os.path.join(folder, one.path) for one in task.media}
        gone = [one.path for one in task.media if not is_file(paths[one.path])]
        if gone:
            report.missing_rows += 1
            report.missing_files.update(bucket_of(path) for path in gone)
            report.missing_ids += [task.id] if len(report.missing_ids) < SHOWN else []
            self.draft.lack({"file": report.file, "row": report.rows, "id": task.id, "paths": gone})
            return None
        home = self.target.parent
        media = tuple(Media(path=seen_from(home, paths[one.path], home), kind=one.kind) for one in task.media)
        task = replace(task, media=media)
        return replace(item, task=task) if isinstance(item, Demo) else task

    def keep(self, content: bytes) -> str:
        """The path of a file with these bytes."""
        return str(kept(content, self.target.with_name(f"{self.target.name}.media").resolve()))


def _mark(id: str) -> bytes:
    # eight bytes of a digest for each id: a million rows are some ten megabytes
    return hashlib.sha256(id.encode()).digest()[:8]


@lru_cache(maxsize=65536)  # many rows share a file
def is_file(path: str) -> bool:
    """Whether a path is that of a file; a web address isn't."""
    return os.path.isfile(path)


def bucket_of(path: str) -> str:
    """The folders of a path that tell which archive it is from: two, where it has as many.

    >>> bucket_of("museg/charades/1.mp4"), bucket_of("selfqa/2.mp4"), bucket_of("3.mp4")
    ('museg/charades', 'selfqa', '.')
    """
    parts = [part for part in path.split("/")[:-1] if part]
    return "/".join(parts[:2]) or "."
