"""Read and compare the records of a results file: one line per sample of a task."""

import functools
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from saccade.errors import RunError
from saccade.media.relocation import map_media_paths
from saccade.metrics.episode_metrics import ERROR_STATUSES
from saccade.types import ScoredEpisode, UngradedEpisode
from saccade.utils.files import convert_file_errors
from saccade.utils.hashing import compute_digest
from saccade.utils.jsonl import parse_json_line, pause_garbage_collection, read_jsonl, write_jsonl

SampleKey = tuple[str, int | None, int]  # task, frame_budget and sample_index of a record


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """Store a line of a results file: one sample of a task.

    `task` is a digest of the task and of the content of its media and subtitles, `frame_budget` the number of frames K.
    `fingerprint` identifies everything else that the result depends on: a name and a digest per part, such as
    "seed=1f…, weights=c0…". `benchmark` is the name of the benchmark, "" for tasks. `checkpoint` is the path of the
    weights in the run, such as "rl/step-000020", "" for weights outside of it, and None in lines of earlier versions.
    `is_void` marks a line that counts no more, since its task has changed (`void_changed_records`).
    """

    task: str
    frame_budget: int | None
    sample_index: int
    fingerprint: str
    outcome: ScoredEpisode | UngradedEpisode
    benchmark: str = ""
    use_tools: bool = True
    checkpoint: str | None = field(default=None, metadata={"omit_none": True})
    is_void: bool | None = field(default=None, metadata={"omit_none": True})

    @property
    def key(self) -> SampleKey:
        """Return what was sampled: lines with the same key are interchangeable."""
        return (self.task, self.frame_budget, self.sample_index)

    @property
    def sample_id(self) -> tuple[str, int]:
        """Return the task id and sample index; of two lines, such as after a video was replaced, the newer counts."""
        return (self.outcome.episode.task.id, self.sample_index)

    @property
    def should_retry(self) -> bool:
        """Return whether the episode failed, or has no score, for a reason that is not the model's."""
        return isinstance(self.outcome, UngradedEpisode) or self.outcome.episode.status in ERROR_STATUSES


def read_records(path: Path, fingerprint: str | None = None) -> list[Record]:
    """Return the newest line of each sample in a results file, in the order of the first ones; [] if there is no file.

    Void lines are left out. Raises RunError, naming the differences, if a line has another fingerprint.
    """
    if not path.exists():
        return []
    records = _read_file(path).records
    for record in records:
        if fingerprint is not None and record.fingerprint != fingerprint:
            changed = find_fingerprint_differences(record.fingerprint, fingerprint)
            raise RunError(
                f"{path} holds results of other {' and '.join(changed)}; delete it or name this evaluation differently",
                key=str(path),
                value=tuple(changed),
            )
    return list(records)


def void_changed_records(path: Path, task_digests: Mapping[str, str], fingerprint: str) -> list[Record]:
    """Mark the lines of tasks that have changed as void, and return those that counted before.

    `task_digests` has the current `Record.task` by task id; lines of other tasks stay as they are. The lines are kept.
    Void lines of this fingerprint count again if their task is what it was. Raises RunError if the file can't be
    written.
    """
    if not path.exists():
        return []
    content = _read_file(path)

    def is_void(record: Record) -> bool:
        current = task_digests.get(record.outcome.episode.task.id)
        if current is None:
            return bool(record.is_void)
        return record.task != current or (bool(record.is_void) and record.fingerprint != fingerprint)

    if any(is_void(record) != bool(record.is_void) for record in (*content.records, *content.void)):
        records = read_jsonl(path, Record, skip_truncated_line=True)
        with convert_file_errors(path):
            write_jsonl(path, (replace(record, is_void=is_void(record) or None) for record in records))
    return [record for record in content.records if is_void(record)]


@dataclass(frozen=True, slots=True)
class _ResultsFile:
    records: tuple[Record, ...]  # the newest of each sample, with resolved media paths
    void: tuple[Record, ...]


def _read_file(path: Path) -> _ResultsFile:
    status = path.stat()
    return _read_relocated_records(path, path.resolve(), status.st_mtime_ns, status.st_size)


@functools.lru_cache(maxsize=8)  # an evaluation and its report read the same files
def _read_relocated_records(path: Path, resolved: Path, modified_ns: int, size: int) -> _ResultsFile:
    """Return the records of a results file; the other arguments identify its content."""
    resolve_path = functools.cache(lambda file: os.path.normpath(path.parent / file))
    with pause_garbage_collection():
        records = read_jsonl(path, Record, skip_truncated_line=True)
        newest = tuple(map_media_paths(record, resolve_path) for record in _select_newest(records))
    return _ResultsFile(newest, tuple(record for record in records if record.is_void))


def parse_record(line: bytes, path: Path) -> Record:
    """Return the record of one line of the results file `path`, its media paths resolved. Raises DataError."""
    record = parse_json_line(line, Record, str(path))
    return map_media_paths(record, lambda file: os.path.normpath(path.parent / file))


def read_newest_records(path: Path) -> list[Record]:
    """Return the newest line of each sample, void ones left out, as stored: with unresolved media paths."""
    return _select_newest(read_jsonl(path, Record, skip_truncated_line=True)) if path.exists() else []


def _select_newest(records: Iterable[Record]) -> list[Record]:
    return list({record.sample_id: record for record in records if not record.is_void}.values())


def format_fingerprint(parts: Mapping[str, Any]) -> str:
    """Return the fingerprint of parts by name: a digest of each.

    >>> format_fingerprint({"seed": 0, "tools": True})
    'seed=d0bca111f8628137, tools=1c28f2eb0958c3d1'
    """
    return ", ".join(f"{name}={compute_digest(value)[:16]}" for name, value in parts.items())


def find_fingerprint_differences(first: str, second: str) -> list[str]:
    """Return the names of the parts in which two fingerprints differ."""
    parts = [*first.split(", "), *second.split(", ")]  # those of both stand here twice
    return list(dict.fromkeys(part.partition("=")[0] for part in parts if parts.count(part) == 1))


def read_scored_episodes(path: Path) -> list[ScoredEpisode]:
    """Return the scored episodes of a results file, one per sample, in the order in which they first ended."""
    return [record.outcome for record in read_records(path) if isinstance(record.outcome, ScoredEpisode)]


def read_ungraded_episodes(path: Path) -> list[UngradedEpisode]:
    """Return the episodes of a results file that could not be graded."""
    return [record.outcome for record in read_records(path) if isinstance(record.outcome, UngradedEpisode)]
