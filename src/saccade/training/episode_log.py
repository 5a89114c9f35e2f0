"""The episodes that a run samples, on disk: one compressed file per step, bounded in bytes, readable after any kill.

    collect_batch ──records──> EpisodeWriter ──thread──> episodes/rl-000012.jsonl.gz ──> delete the oldest files
    update_policy ──values───────┘                                  └──> read_rollouts

A file is written under another name and renamed, so a step that is sampled again replaces its file. Images and videos
are stored as paths. Episodes are diagnostics: if they can't be written, the writer logs one warning and writes no more,
and the training continues.
"""

import asyncio
import functools
import gzip
import logging
import os
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from saccade.errors import DataError, RunError, SaccadeError, convert_errors
from saccade.media.relocation import map_media_paths
from saccade.training.token_log import SUFFIX, StoredValues, TokenValues, read_token_values, write_token_values
from saccade.types import Episode, Score
from saccade.utils.files import convert_file_errors, open_file, read_bytes, write_atomically
from saccade.utils.jsonl import encode_json_line, parse_json_line, relativize_path, require_file

EPISODES_FOLDER = "episodes"  # of a run
Outcome = Literal["kept", "dropped", "ungraded", "greedy_baseline", "discarded", "cancelled", "validation"]
_FILE_NAME = re.compile(r"(\w+)-(\d+)\.jsonl\.gz")
_CHUNK_BYTES = 2**16  # decompressed at a time: what precedes a damaged chunk is read
_COMPRESSION_LEVEL = 1  # tokens and logprobs compress little better at higher levels, which take several times as long
_logger = logging.getLogger("saccade")


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRecord:
    """An episode that a run sampled, what became of it and why."""

    stage: str  # "rl", or "sft_validation" and "rl_validation"
    step: int  # the training step, from 1; of a validation the number of finished steps
    group: int  # index of its group among those started for the step
    index: int  # its index among the group's records
    # kept = it is in the rollout batch (filters that read advantages run later); dropped = a filter that runs before
    # removed it, or its group was surplus; ungraded = it has no score; greedy_baseline = its reward is subtracted from
    # the others'; discarded = it had ended when its group was cancelled (rl.selection.over_provision,
    # rl.on_stale_group); cancelled = it had not ended then, so it has no turns; validation = an episode of a validation
    outcome: Outcome
    reason: str = ""  # filter that dropped it, `surplus` or `too_few_episodes`; or why it has no score
    mode: str = ""  # of a validation: greedy or sampled
    episode: Episode  # the rollout; of a failed one `status` and `error` give the reason
    score: Score | None = None  # None unless the rewards scored it


class EpisodeWriter:
    """Writes records to the folder of a run, in a thread and at most one step at a time."""

    def __init__(self, run_folder: Path, max_bytes: int) -> None:
        self._folder, self._root, self._max_bytes = run_folder / EPISODES_FOLDER, run_folder, max_bytes
        self._is_enabled, self._pending = max_bytes > 0, asyncio.Lock()
        for leftover in self._folder.glob("*.part"):  # of a kill
            leftover.unlink(missing_ok=True)

    async def write(self, stage: str, step: int, records: Sequence[RolloutRecord]) -> None:
        """Write the records of a step in a thread, without blocking the event loop; return when they are on disk."""
        async with self._pending:
            if self._is_enabled:
                path = self._folder / f"{stage}-{step:06d}.jsonl.gz"
                await asyncio.to_thread(self._write, path, lambda part: self._write_records(part, records))

    async def write_tokens(self, step: int, values: Sequence[TokenValues]) -> None:
        """Write what RL computed for the tokens of a step whose episodes are on disk, as `write` does."""
        async with self._pending:
            path = _get_token_path(self._folder, "rl", step)
            if self._is_enabled and values and path.with_name(f"rl-{step:06d}.jsonl.gz").exists():
                await asyncio.to_thread(self._write, path, lambda part: write_token_values(part, values))

    def _write_records(self, part: Path, records: Sequence[RolloutRecord]) -> None:
        # No time and no name in the header: equal episodes make equal files.
        with (
            open_file(part, "wb") as file,
            gzip.GzipFile(filename="", mode="wb", compresslevel=_COMPRESSION_LEVEL, fileobj=file, mtime=0) as archive,
        ):
            relocate = functools.partial(relativize_path, self._folder, root=self._root)
            for record in records:
                archive.write(encode_json_line(map_media_paths(record, relocate)))

    def _write(self, path: Path, write: Callable[[Path], None]) -> None:
        try:
            # Whatever fails here, it must not fail the training.
            with convert_errors(RunError, f"{path} can't be written", key=str(path)), convert_file_errors(path):
                self._folder.mkdir(exist_ok=True)
                with write_atomically(path) as part:
                    write(part)
                self._delete_oldest(path)
        except SaccadeError as error:
            self._is_enabled = False
            _logger.warning("%s. The training continues and writes no more episodes", str(error).rstrip("."))

    def _delete_oldest(self, newest: Path) -> None:
        """Delete the files of the oldest steps until all take at most `max_bytes`; those of the newest one stay."""
        steps: dict[str, list[Path]] = {}
        for path in self._folder.glob("*-*.*"):
            steps.setdefault(path.name.partition(".")[0], []).append(path)
        size = sum(path.stat().st_size for paths in steps.values() for path in paths)
        newest_step = newest.name.partition(".")[0]
        ages = {name: min(path.stat().st_mtime_ns for path in paths) for name, paths in steps.items()}
        for name in sorted(steps, key=lambda name: (ages[name], name)):
            if size <= self._max_bytes:
                return
            for path in steps[name] if name != newest_step else ():
                size -= path.stat().st_size
                path.unlink()


def list_recorded_steps(run_folder: Path, stage: str) -> list[int]:
    """Return the steps of a stage whose episodes are on disk, in order."""
    return [step for _, name, step in list_rollout_files(run_folder) if name == stage]


def read_rollouts(run_folder: Path, stage: str, step: int) -> list[RolloutRecord]:
    """Return the records of a step, in the order of groups and episodes.

    The end of a damaged file is left out. Raises DataError if the step has no file, or if a line isn't a record.
    """
    path = run_folder / EPISODES_FOLDER / f"{stage}-{step:06d}.jsonl.gz"
    if not path.exists():
        steps = list_recorded_steps(run_folder, stage)
        known = f"it has those of {len(steps)} steps from {steps[0]} to {steps[-1]}" if steps else "it has none"
        raise DataError(
            f"{run_folder} has no episodes of step {step} of {stage}; {known}. `episodes.max_gib` limits them",
            key="step",
            value=step,
        )
    require_file(path)
    return [
        parse_rollout(line, path, f"line {number}") for number, line in enumerate(read_rollout_lines(path), start=1)
    ]


def read_step_token_values(run_folder: Path, stage: str, step: int) -> Mapping[str, StoredValues]:
    """Return what RL computed for the trained tokens of a step, as `read_token_values` does."""
    return read_token_values(_get_token_path(run_folder / EPISODES_FOLDER, stage, step))


def _get_token_path(folder: Path, stage: str, step: int) -> Path:
    return folder / f"{stage}-{step:06d}{SUFFIX}"


def list_rollout_files(run_folder: Path) -> list[tuple[Path, str, int]]:
    """Return the path, stage and step of each file of episodes, in order of stages and steps."""
    paths = (run_folder / EPISODES_FOLDER).glob("*.jsonl.gz")
    names = [(path, _FILE_NAME.fullmatch(path.name)) for path in paths]
    return sorted(((path, name[1], int(name[2])) for path, name in names if name), key=lambda file: file[1:])


def read_rollout_lines(path: Path, problems: list[str] | None = None) -> list[bytes]:
    """Return the whole lines of a file of episodes, in order; the end of a damaged file is left out.

    A list of `problems` receives a sentence about such a file.
    """
    data, is_whole = _decompress(read_bytes(path))
    lines = [line for line in data.splitlines(keepends=True) if line.endswith(b"\n")]
    if problems is not None and not is_whole:
        problems.append(f"the end of the file is damaged: {len(lines)} whole lines can be read")
    return lines


def parse_rollout(line: bytes, path: Path, name: str) -> RolloutRecord:
    """Return the record of a line of the file `path`, its media paths resolved; `name` is the line's in an error.

    Raises DataError if the line isn't a record.
    """
    record = parse_json_line(line, RolloutRecord, f"{path}, {name}")
    return map_media_paths(record, lambda file: os.path.normpath(path.parent / file))


def _decompress(data: bytes) -> tuple[bytes, bool]:
    """Decompress what is readable of a gzip file; return whether that is all of it."""
    decompressor, parts = zlib.decompressobj(wbits=31), []
    for start in range(0, len(data), _CHUNK_BYTES):
        try:
            parts.append(decompressor.decompress(data[start : start + _CHUNK_BYTES]))
        except zlib.error:
            break
    return b"".join(parts), decompressor.eof
