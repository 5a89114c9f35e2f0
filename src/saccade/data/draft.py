"""A file of tasks while it is written: a call that was stopped goes on behind the last row that is noted.

    rows ──items──> FILE.draft.jsonl  lines of JSON, whatever FILE's own form will be
           └─lost─> FILE.missing.jsonl
    every so many rows: FILE.draft.json   how far the rows were read, and how long both files were then
    at the end: FILE, whole; the draft is gone

What a kill leaves behind the noted lengths is cut off. A note that was made with other files or settings is void, and
so is one whose missing files have come since: another file would follow from them.
"""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from saccade.data import native
from saccade.data.raw import Row, read_rows
from saccade.data.record import iterate_jsonl, line, whole
from saccade.errors import SaccadeError
from saccade.types import Demo, Task


class Draft:
    """A draft of `target`, opened with `with`; `identity` (JSON) is all that it depends on, None: never gone on with.

    Inside, `note` is what was noted last ({} at first). Whatever can be mended in the rows or settings voids it.
    """

    def __init__(self, target: Path, identity: Any, root: Path | None = None) -> None:
        self.target, self.listing = target, target.with_name(f"{target.name}.missing.jsonl")
        self.note: Mapping[str, Any] = {}
        self._identity, self._root = json.loads(json.dumps(identity)), root
        self._path = target.with_name(f"{target.name}.draft.jsonl")
        self._about = target.with_name(f"{target.name}.draft.json")
        self._files: list[BinaryIO] = []

    def __enter__(self) -> "Draft":
        self.note = self._known()
        lengths = self.note.get("lengths", [0, 0])
        for path, length in zip((self._path, self.listing), lengths, strict=True):
            self._files.append(path.open("r+b" if length else "w+b"))
            self._files[-1].truncate(length)
            self._files[-1].seek(length)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # on a disk that is full what is held can't be written either; the first error says so
        with contextlib.suppress(*[OSError] if error else []), contextlib.ExitStack() as both:
            for file in self._files:
                both.callback(file.close)
        if not self.listing.stat().st_size:
            self.listing.unlink()
        if isinstance(error, SaccadeError):
            self._drop()

    def add(self, item: Task | Demo) -> None:
        """One more item."""
        self._files[0].write(line(item))

    def lack(self, row: Mapping[str, Any]) -> None:
        """One more row that lacks files, which are its `paths`."""
        self._files[1].write(json.dumps(row).encode() + b"\n")

    def items(self) -> Iterator[Task | Demo]:
        """What the draft holds already."""
        if self.note.get("lengths", [0])[0]:
            kind: Any = native.kind_of(self._path)
            yield from iterate_jsonl(self._path, kind)

    def lacking(self) -> Iterator[Mapping[str, Any]]:
        """The rows that were noted to lack files."""
        if self.note.get("lengths", [0, 0])[1]:
            yield from (row.values for row in read_rows(self.listing))

    def mark(self, note: Mapping[str, Any]) -> None:
        """Note how far things are."""
        if self._identity is None:
            return
        for file in self._files:
            file.flush()
        lengths = [file.tell() for file in self._files]
        with whole(self._about) as partial:
            partial.write_text(json.dumps({**note, "lengths": lengths, "identity": self._identity}), encoding="utf-8")

    def finish(self) -> None:
        """Make the draft the file."""
        self._files[0].flush()
        if self.target.suffix == ".jsonl":
            os.replace(self._path, self.target)
        else:
            kind: Any = native.kind_of(self._path)
            native.write(self.target, iterate_jsonl(self._path, kind))
        self._drop()

    def _known(self) -> Mapping[str, Any]:
        """The note, where it holds."""
        try:
            note = json.loads(self._about.read_text(encoding="utf-8"))
            drafted, listed = note["lengths"]
            short = self._path.stat().st_size < drafted or self.listing.stat().st_size < listed
            if short or note["identity"] != self._identity:
                return {}
        except (OSError, ValueError, KeyError, TypeError):
            return {}
        os.truncate(self.listing, listed)
        return {} if listed and any(map(self._come, read_rows(self.listing))) else note

    def _come(self, row: Row) -> bool:
        """Whether a file that a row lacked is there now."""
        folder = self._root or Path(row.text("file")).parent
        return any(os.path.isfile(folder / path) for path in row.list("paths"))

    def _drop(self) -> None:
        self._path.unlink(missing_ok=True)
        self._about.unlink(missing_ok=True)
