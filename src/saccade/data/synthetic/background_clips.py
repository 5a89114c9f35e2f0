"""Haystack: a user's videos as backgrounds, assigned so that no frame appears in two splits.

Three or more files are assigned to splits as a whole. Fewer files are divided by time: the first part is for training,
the next for validation, the last for testing.
"""

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from saccade.data.synthetic.render import Frames
from saccade.errors import DataError
from saccade.media import hashing, video
from saccade.types import VIDEO_SUFFIXES

SPLIT_RANGES = {"train": (0.0, 0.6), "validation": (0.6, 0.8), "test": (0.8, 1.0)}  # fractions of a divided file
MIN_PART_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BackgroundVideo:
    """A video file, its content digest, and the fraction of its frames (from, to) that a split may show."""

    path: Path
    digest: str
    share_range: tuple[float, float] = (0.0, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class BackgroundSpan:
    """The background of a clip: the frames of a file whose times are from `start` to `end` (seconds, inclusive)."""

    file: str
    digest: str
    start: float
    end: float


def list_background_videos(folder: str) -> list[Path]:
    """List the videos of a haystack folder, sorted by name. Raises DataError if there is none."""
    paths = sorted(path for path in Path(folder).glob("*") if path.suffix.lower() in VIDEO_SUFFIXES)
    if not paths:
        problem = f"there is no folder {folder} that contains a video ({', '.join(sorted(VIDEO_SUFFIXES))})"
        raise DataError(f"synthetic.haystack: {problem}", key="synthetic.haystack", value=folder)
    return paths


def assign_to_splits(paths: Sequence[Path]) -> dict[str, list[BackgroundVideo]]:
    """Return, per split, the files or parts of files that it may show. Raises DataError for too short files."""
    path_by_digest: dict[str, Path] = {}
    for path in paths:
        path_by_digest.setdefault(hashing.compute_file_digest(str(path)), path)
    videos = [BackgroundVideo(path=path, digest=digest) for digest, path in path_by_digest.items()]
    if not videos:
        return {split: [] for split in SPLIT_RANGES}
    if len(videos) < len(SPLIT_RANGES):
        return {split: [_take_part(source, part) for source in videos] for split, part in SPLIT_RANGES.items()}
    # About a sixth of the videos each for test and validation.
    count = max(1, len(videos) // 6)
    return {"train": videos[2 * count :], "validation": videos[count : 2 * count], "test": videos[:count]}


def _take_part(source: BackgroundVideo, share_range: tuple[float, float]) -> BackgroundVideo:
    part = replace(source, share_range=share_range)
    start, end = _compute_bounds(part)
    if end - start < MIN_PART_SECONDS:
        duration = _load_video_index(source.path).info.duration
        problem = f"{source.path} lasts {duration:.1f} s, too short for three splits"
        message = f"synthetic.haystack: {problem}; give longer videos, or at least three of them"
        raise DataError(message, key="synthetic.haystack", value=str(source.path))
    return part


def select_background(
    sources: Sequence[BackgroundVideo], seed: int, *, count: int, fps: float
) -> tuple[BackgroundVideo, tuple[float, ...]]:
    """Draw a source and the times (s) of `count` frames by the seed; a short source plays forward and back in turn.

    Raises MediaError for one that can't be read.
    """
    rng = random.Random(seed)
    source = rng.choice(sources)
    begin, end = _compute_bounds(source)
    length = end - begin
    start = max(0.0, length - count / fps) * rng.random()
    phases = ((start + i / fps) % (2 * length) for i in range(count))
    return source, tuple(begin + min(phase, 2 * length - phase) for phase in phases)


def compute_span(source: BackgroundVideo, times: Sequence[float]) -> BackgroundSpan:
    """Return the span of a source that contains the frames at these times (seconds)."""
    index = _load_video_index(source.path)
    first, last = index.snap_to_frame_time(min(times)), index.snap_to_frame_time(max(times))
    return BackgroundSpan(file=source.path.name, digest=source.digest, start=first, end=last)


def decode_frames(source: BackgroundVideo, times: Sequence[float], pixels: int) -> Frames:
    """Decode frames at times (s), cropped to the center: uint8 RGB [times, pixels, pixels, 3]. Raises MediaError."""
    index = _load_video_index(source.path)
    info = index.info
    scale = pixels / min(info.width, info.height)
    width, height = max(pixels, round(info.width * scale)), max(pixels, round(info.height * scale))
    top, left = (height - pixels) // 2, (width - pixels) // 2
    frames = video.decode_frames(index, times, size=(width, height), threads=2)
    return np.stack([frame.pixels[top : top + pixels, left : left + pixels] for frame in frames])


def find_overlaps(spans_by_split: Mapping[str, Mapping[str, BackgroundSpan]]) -> list[str]:
    """Find backgrounds with common frames in two splits: one line per file and pair of splits."""
    entries = (
        (span.digest, span.start, split, name, span)
        for split, spans in spans_by_split.items()
        for name, span in spans.items()
    )
    # Spans in order of their start; per file and split, the earlier span with the latest end.
    latest: dict[str, dict[str, tuple[str, BackgroundSpan]]] = defaultdict(dict)
    lines: dict[tuple[str, frozenset[str]], str] = {}
    for digest, start, split, name, span in sorted(entries):
        for other, (other_name, other_span) in latest[digest].items():
            if other != split and start <= other_span.end:
                clips = f"{other}/clips/{other_name}, {split}/clips/{name}"
                line = f"{clips}: the same frames of {span.file} are the background in more than one split"
                lines.setdefault((digest, frozenset((split, other))), line)
        if split not in latest[digest] or latest[digest][split][1].end < span.end:
            latest[digest][split] = name, span
    return list(lines.values())


def _compute_bounds(source: BackgroundVideo) -> tuple[float, float]:
    """Return the times (seconds) of the first and last frame that may be shown, or the end of the file."""
    index = _load_video_index(source.path)
    first, end = (round(share * len(index.times)) for share in source.share_range)
    # A part ends with its last frame; later frames belong to the next part.
    last = index.info.duration if end >= len(index.times) else float(index.times[max(first, end - 1)])
    return float(index.times[min(first, len(index.times) - 1)]), last


def _load_video_index(path: Path) -> video.VideoIndex:
    """Return the (cached) index of a file, which many clips are cut from."""
    return _load_cached_video_index(hashing.get_file_identity(str(path)))


@lru_cache(maxsize=64)
def _load_cached_video_index(identity: tuple[str, int, int]) -> video.VideoIndex:
    return video.index_video(identity[0])
