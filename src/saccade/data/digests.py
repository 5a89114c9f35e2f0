"""Digests of the data that a run trains on, so that a resumed run notices if they have changed.

    rows ───────> id and content of each row ──┐
    media files ─> content of each file ───────┴─> data_digests.json ── compare at resume ──> same, or what differs

A row takes 16 characters (base64): 6 bytes of a digest of its id, 6 of a digest of its content; a million rows take
16 MB. A media file is read again only if its size, times or inode differ from the recorded ones, so a resume reads what
has changed. New files are read whole unless they exceed `MAX_BYTES_READ` together; then large ones are sampled.
"""

import base64
import hashlib
import json
import logging
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from saccade.data.dataset import get_task
from saccade.errors import DataError, MediaError, RunError, convert_errors
from saccade.media.hashing import compute_file_digest
from saccade.media.subtitles import list_media_files
from saccade.types import Demonstration, Task
from saccade.utils.files import write_text
from saccade.utils.hashing import compute_file_sha256
from saccade.utils.jsonl import encode_json_line, read_json
from saccade.utils.text import join_examples, pluralize

DIGESTS_FILE = "data_digests.json"  # of a run
ACCEPT_OPTION = "--accept-changed-data"
MAX_BYTES_READ = 64 * 2**30  # of new media files that are read whole, together
_ID_BYTES, _ROW_BYTES = 6, 12  # per row: of its id, and of its id and content
_NUM_THREADS = 8  # hashing and reading release the GIL
_LOG_SECONDS = 10.0  # between two lines of progress
_logger = logging.getLogger("saccade")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSource:
    """A data file of a run: the recipe's `key`, its path, the folder of its relative media paths, and its rows."""

    key: str
    file: Path
    media_folder: Path
    items: Sequence[Task | Demonstration]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowDigests:
    """The rows of a source at one time: `digest` is of all of them in order, `rows` has 12 bytes of each in base64."""

    recorded_at: str
    count: int
    digest: str
    rows: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaDigest:
    """The content of a media file ("" if it can't be read), and the size, times and inode it had then."""

    sha256: str
    is_sampled: bool  # whether it is `media.hashing.compute_file_digest`, which reads parts of a large file
    identity: tuple[int, int, int, int]  # bytes, times of the last modification and change (ns), inode


@dataclass(frozen=True, slots=True, kw_only=True)
class DataDigests:
    """All digests of a run: of each source by key and each media file by path, what was recorded, the newest last."""

    sources: Mapping[str, tuple[RowDigests, ...]] = field(default_factory=dict)
    media: Mapping[str, tuple[MediaDigest, ...]] = field(default_factory=dict)


def record_data(run_folder: Path, sources: Iterable[DataSource], *, accepts_changes: bool = False) -> None:
    """Compare a run's data with what it has recorded, and record what is new.

    Blocks while it reads media files. Raises RunError, with the source's key and a sentence per kind of change as
    value, if rows or media files have changed; with `accepts_changes` logs that and records the new ones beside the
    old. Raises DataError if the record can't be read.
    """
    path, sources = run_folder / DIGESTS_FILE, list(sources)
    recorded = DataDigests()
    if path.exists():
        hint = "restore it, or delete it to record the data as they are now"
        recorded = read_json(path, DataDigests, hint=hint)
    elif (run_folder / "metrics.jsonl").is_file():
        _logger.warning("%s is missing: whether the data have changed since the run was started is unknown", path)
    rows = {source.key: compute_row_digests(source) for source in sources}
    files = {source.key: _list_files(source, run_folder) for source in sources}
    media = _compute_media_digests({name: file for names in files.values() for name, file in names.items()}, recorded)

    changes: dict[str, list[str]] = {}
    for source in sources:
        old_rows = recorded.sources.get(source.key)
        row_changes = _list_row_changes(source, old_rows[-1], rows[source.key]) if old_rows else []
        changed_files = [
            files[source.key][name] for name in files[source.key] if _has_changed(recorded.media.get(name), media[name])
        ]
        if changed_files:
            count = pluralize(len(changed_files), "media file")
            row_changes.append(f"{count} changed ({join_examples(changed_files, separator='; ')})")
        if row_changes:
            changes[f"{source.key} ({source.file})"] = row_changes
            if not accepts_changes:
                raise RunError(
                    f"{source.key} ({source.file}) has changed since the run {run_folder} was started: "
                    f"{', '.join(row_changes)}; restore it, or resume with {ACCEPT_OPTION}",
                    key=source.key,
                    value=tuple(row_changes),
                )
    for name, texts in changes.items():
        _logger.warning("%s has changed since the run was started, which is accepted: %s", name, ", ".join(texts))
    updated = DataDigests(
        sources={**recorded.sources, **{key: _append_rows(recorded, key, digests) for key, digests in rows.items()}},
        media={**recorded.media, **{name: _append_media(recorded, name, digest) for name, digest in media.items()}},
    )
    if updated != recorded:
        write_text(path, encode_json_line(updated).decode())


def compute_row_digests(source: DataSource) -> RowDigests:
    """Return the digests of a source's rows; they don't depend on the folder of the media."""
    # A dataset may be moved as a whole: its rows are those of the file, without the folder that loading joined.
    folder = json.dumps(f"{source.media_folder}{os.sep}")[1:-1].encode()
    counts = Counter[str]()
    digests = bytearray()
    for item in source.items:
        task_id = get_task(item).id
        counts[task_id] += 1  # a task has several demonstrations
        digests += hashlib.sha256(f"{counts[task_id]} {task_id}".encode("utf-8", "surrogatepass")).digest()[:_ID_BYTES]
        content = encode_json_line(item, sort_keys=True).replace(folder, b"")
        digests += hashlib.sha256(content).digest()[: _ROW_BYTES - _ID_BYTES]
    return RowDigests(
        recorded_at=datetime.now(UTC).isoformat(timespec="seconds"),
        count=len(source.items),
        digest=hashlib.sha256(digests).hexdigest(),
        rows=base64.b64encode(digests).decode(),
    )


def _list_row_changes(source: DataSource, old: RowDigests, new: RowDigests) -> list[str]:
    """Return a text for each kind of change from old rows to a source's: edited, added, missing, in another order."""
    if old.digest == new.digest:
        return []
    with convert_errors(DataError, f"the record of {source.key} in {DIGESTS_FILE} is damaged; restore it"):
        old_rows = dict(_decode_rows(old))  # content by id, in order
    new_rows = dict(_decode_rows(new))
    by_id = {
        row_id: f"row {number}, task {get_task(item).id}"
        for number, ((row_id, _), item) in enumerate(zip(_decode_rows(new), source.items, strict=True), start=1)
    }
    edited = [name for row_id, name in by_id.items() if row_id in old_rows and old_rows[row_id] != new_rows[row_id]]
    added = [name for row_id, name in by_id.items() if row_id not in old_rows]
    missing = [f"row {number} before" for number, row_id in enumerate(old_rows, start=1) if row_id not in new_rows]
    order = (row_id for row_id in old_rows if row_id in new_rows)
    new_order = (row_id for row_id in new_rows if row_id in old_rows)
    moved = [by_id[now] for before, now in zip(order, new_order, strict=True) if before != now]
    kinds = ((edited, "edited"), (added, "added"), (missing, "missing"), (moved, "in another place"))
    return [
        f"{pluralize(len(rows), 'row')} {kind} ({join_examples(rows, separator='; ')})" for rows, kind in kinds if rows
    ]


def _decode_rows(digests: RowDigests) -> Iterator[tuple[bytes, bytes]]:
    content = base64.b64decode(digests.rows, validate=True)
    for start in range(0, len(content), _ROW_BYTES):
        yield content[start : start + _ID_BYTES], content[start + _ID_BYTES : start + _ROW_BYTES]


def _list_files(source: DataSource, run_folder: Path) -> dict[str, str]:
    """Return the media and subtitle files of a source by their names in the record, relative if inside the run."""
    root = f"{os.path.abspath(run_folder)}{os.sep}"
    files = dict.fromkeys(
        file for item in source.items for file in (*list_media_files(get_task(item)), *(m.path for m in item.media))
    )
    return {os.path.abspath(file).removeprefix(root): file for file in files}


def _compute_media_digests(files: Mapping[str, str], recorded: DataDigests) -> dict[str, MediaDigest]:
    """Return the digest of each file; of one whose size, times and inode are the recorded ones, that of the record."""
    identities = {name: _get_identity(file) for name, file in files.items()}
    digests = {
        name: known[-1]
        for name, identity in identities.items()
        if (known := recorded.media.get(name)) and known[-1].identity == identity and known[-1].sha256
    }
    unread = [name for name in files if name not in digests]
    new_bytes = sum(identities[name][0] for name in unread if name not in recorded.media)
    # A file is compared in the way in which it was recorded.
    is_sampled = {
        name: recorded.media[name][-1].is_sampled if name in recorded.media else new_bytes > MAX_BYTES_READ
        for name in unread
    }

    def compute(name: str) -> MediaDigest:
        try:
            hash_file = compute_file_digest if is_sampled[name] else compute_file_sha256
            content = hash_file(files[name])
        except (MediaError, OSError):  # the episodes of its tasks report it
            content = ""
        return MediaDigest(sha256=content, is_sampled=is_sampled[name], identity=identities[name])

    total, num_read, last_line = sum(identities[name][0] for name in unread), 0, time.monotonic()
    pool = ThreadPoolExecutor(_NUM_THREADS)
    try:
        for name, digest in zip(unread, pool.map(compute, unread), strict=True):
            digests[name] = digest
            num_read += digest.identity[0]
            if time.monotonic() - last_line > _LOG_SECONDS:
                last_line = time.monotonic()
                _logger.warning("Digests of media files: %.1f of %.1f GB", num_read / 1e9, total / 1e9)
    finally:
        pool.shutdown(cancel_futures=True)  # Ctrl-C waits for the current files alone
    return digests


def _get_identity(file: str) -> tuple[int, int, int, int]:
    try:
        status = os.stat(file)
    except OSError:
        return (0, 0, 0, 0)
    # ctime, too: unlike mtime, it can't be set back.
    return (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)


def _has_changed(known: Sequence[MediaDigest] | None, digest: MediaDigest) -> bool:
    return bool(known and known[-1].sha256 and known[-1].sha256 != digest.sha256)


def _append_rows(recorded: DataDigests, key: str, digests: RowDigests) -> tuple[RowDigests, ...]:
    known = recorded.sources.get(key, ())
    return known if known and known[-1].digest == digests.digest else (*known, digests)


def _append_media(recorded: DataDigests, name: str, digest: MediaDigest) -> tuple[MediaDigest, ...]:
    known = recorded.media.get(name, ())
    return (*known, digest) if _has_changed(known, digest) else (*known[:-1], digest)
