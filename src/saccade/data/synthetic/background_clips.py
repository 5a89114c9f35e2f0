"""A haystack: stretches of a user's own clips as background, no frame of which stands behind two splits.

Three files or more are given to the splits whole. Of fewer each is divided by time: its first part is for training,
the next for validation, the last for the test.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from saccade.data.world.paint import Frames
from saccade.errors import DataError
from saccade.media import files, video

SUFFIXES = (".mp4", ".mkv", ".mov", ".webm", ".avi", ".m4v")
PARTS = {"train": (0.0, 0.6), "validation": (0.6, 0.8), "test": (0.8, 1.0)}  # shares of a file that is divided
SHORTEST = 1.0  # seconds that a part must last


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A file, and which share of its frames (from, to) a split may show.

    >>> Source(path=Path("hay/walk.mp4"), digest="9f2c", part=(0.6, 0.8)).path.name
    'walk.mp4'
    """

    path: Path
    digest: str
    part: tuple[float, float] = (0.0, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """What stands behind a clip: frames of a file from `start` to `end`, the seconds of the first and the last of them.

    >>> Stretch(file="walk.mp4", digest="9f2c", start=0.0, end=64.0).meets(
    ...     Stretch(file="copy.mp4", digest="9f2c", start=60.0, end=70.0))
    True
    """

    file: str
    digest: str
    start: float
    end: float

    def meets(self, other: "Stretch") -> bool:
        """Whether both show a frame of the same content."""
        return self.digest == other.digest and self.start <= other.end and other.start <= self.end


def hay(folder: str) -> list[Path]:
    """The clips of a haystack folder, by name. Raises DataError where there is none."""
    root = Path(folder)
    if not root.is_dir():
        raise DataError(f"world.haystack: there is no folder {folder}")
    found = sorted(path for path in root.iterdir() if path.suffix.lower() in SUFFIXES)
    if not found:
        raise DataError(f"world.haystack: {folder} holds no clip ({', '.join(SUFFIXES)})")
    return found


def divided(paths: Sequence[Path]) -> dict[str, list[Source]]:
    """Per split, what it may show of these files. Copies of a file count once.

    Raises DataError for a file that must be divided by time and is too short for that.
    """
    once: dict[str, Path] = {}
    for path in paths:
        once.setdefault(files.digest(str(path)), path)
    whole = [Source(path=path, digest=digest) for digest, path in once.items()]
    if not whole:
        return {split: [] for split in PARTS}
    if len(whole) < len(PARTS):
        return {split: [_part(source, part) for source in whole] for split, part in PARTS.items()}
    # About a sixth of the sources each for test and validation.
    some = max(1, len(whole) // 6)
    return {"train": whole[2 * some :], "validation": whole[some : 2 * some], "test": whole[:some]}


def _part(source: Source, part: tuple[float, float]) -> Source:
    found = Source(path=source.path, digest=source.digest, part=part)
    start, end = _bounds(found)
    if end - start < SHORTEST:
        lasts = f"{source.path} lasts {_surveyed(source.path).clip.duration:.1f} s"
        raise DataError(f"world.haystack: {lasts}, too little for three splits; give longer clips, or three of them")
    return found


def chosen(sources: Sequence[Source], seed: int, *, count: int, fps: float) -> tuple[Source, tuple[float, ...]]:
    """A source and the times (seconds) of `count` frames of it at `fps`, drawn by the seed.

    A source that is too short is played forwards and backwards in turn. Raises MediaError for one that can't be read.
    """
    rng = random.Random(seed)
    source = rng.choice(sources)
    return source, _times(source, rng.random(), count=count, fps=fps)


def _times(source: Source, share: float, *, count: int, fps: float) -> tuple[float, ...]:
    """Begins at `share` of what the source has more than is needed."""
    since, until = _bounds(source)
    start = max(0.0, until - since - count / fps) * share
    return tuple(since + _folded(start + i / fps, until - since) for i in range(count))


def shown(source: Source, times: Sequence[float]) -> Stretch:
    """The stretch of a source that frames at these times are from."""
    reel = _surveyed(source.path)
    first, last = reel.moment(min(times)), reel.moment(max(times))
    return Stretch(file=source.path.name, digest=source.digest, start=first, end=last)


def frames_of(source: Source, times: Sequence[float], pixels: int) -> Frames:
    """The frames at these times, their middle cut to a square: uint8 RGB [times, pixels, pixels, 3].

    Raises MediaError for a clip that can't be decoded.
    """
    reel = _surveyed(source.path)
    clip = reel.clip
    scale = pixels / min(clip.width, clip.height)
    width, height = max(pixels, round(clip.width * scale)), max(pixels, round(clip.height * scale))
    top, left = (height - pixels) // 2, (width - pixels) // 2
    frames = video.decode(reel, times, size=(width, height), threads=2)
    return np.stack([frame.pixels[top : top + pixels, left : left + pixels] for frame in frames])


def overlaps(splits: Mapping[str, Mapping[str, Stretch]]) -> list[str]:
    """Where the same frames stand behind clips of two splits: one line per file and pair of splits."""
    every = [
        (one.digest, one.start, split, name, one) for split, clips in splits.items() for name, one in clips.items()
    ]
    latest: dict[tuple[str, str], tuple[str, Stretch]] = {}  # per file and split, of those before: what ends last
    found: dict[tuple[str, frozenset[str]], str] = {}
    for digest, _, split, name, one in sorted(every, key=lambda each: each[:4]):
        for other, (second, two) in [(key[1], latest[key]) for key in latest if key[0] == digest and key[1] != split]:
            if one.meets(two):
                clips = f"{other}/clips/{second}, {split}/clips/{name}"
                line = f"{clips}: the same frames of {one.file} behind clips of more than one split"
                found.setdefault((digest, frozenset((split, other))), line)
        if (digest, split) not in latest or latest[digest, split][1].end < one.end:
            latest[digest, split] = name, one
    return list(found.values())


def _bounds(source: Source) -> tuple[float, float]:
    """The times (seconds) from the first frame that may be shown to the last, or to the end of the file."""
    reel = _surveyed(source.path)
    first, end = (round(share * len(reel.times)) for share in source.part)
    whole = end >= len(reel.times)
    # A part ends with its last frame: whatever is shown later is the next part's.
    last = reel.clip.duration if whole else float(reel.times[max(first, end - 1)])
    return float(reel.times[min(first, len(reel.times) - 1)]), last


def _surveyed(path: Path) -> video.Reel:
    """The timeline of a file, which many clips are cut from."""
    return _survey(files.identity(str(path)))


@lru_cache(maxsize=64)
def _survey(identity: tuple[str, int, int]) -> video.Reel:
    return video.survey(identity[0])


def _folded(time: float, length: float) -> float:
    """A time beyond the end, folded back into the clip."""
    around = time % (2 * length)
    return min(around, 2 * length - around)
