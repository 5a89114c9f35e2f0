"""Media for guests, decoded on the host's side of the wall: still pictures to begin with, frames of videos on demand.

A guest names frames by number; what it gets are pixels. So it holds no descriptor, path or decoder of a file, and the
attempts of a group share what was decoded for one of them.
"""

import contextlib
import fcntl
import functools
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from saccade.errors import MediaError, SandboxError, boundary
from saccade.media import files, image, video
from saccade.media.cache import Lru
from saccade.tools._sandbox.wire import ASK_BYTES, FACTS

MOST_PIXELS, MOST_SCALED = 2**26, 2**22  # of one frame: as it is, and when it is enlarged
_SHARED_BYTES = 256 * 2**20
_MOST_STILLS = 512  # held at a time: each has a descriptor
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE

_frames: Lru[tuple[str, int, int, int], NDArray[np.uint8]] = Lru(_SHARED_BYTES)
_stills: Lru[tuple[str, int, int], "Still"] = Lru(_SHARED_BYTES)


@functools.cache
def pool() -> ThreadPoolExecutor:
    """The threads that decode for all guests of this process."""
    return ThreadPoolExecutor(min(4, os.cpu_count() or 1), thread_name_prefix="saccade-sandbox")


class Sheet:
    """Memory that guests can read and nobody can change."""

    def __init__(self, parts: Iterable[bytes]) -> None:
        self._place = os.memfd_create("saccade-still", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        with os.fdopen(os.dup(self._place), "wb") as file:
            file.writelines(parts)
        fcntl.fcntl(self._place, fcntl.F_ADD_SEALS, _SEALS)

    @contextlib.contextmanager
    def opened(self) -> Iterator[int]:
        """A new descriptor, to read from: who shares one could tell where others read, and change that."""
        with boundary(SandboxError, "a picture can't be shared with an interpreter"):
            place = os.open(f"/proc/self/fd/{self._place}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            yield place
        finally:
            os.close(place)

    def read(self, size: int, offset: int) -> bytes:
        """Some of its bytes."""
        return os.pread(self._place, size, offset)

    def __del__(self) -> None:
        os.close(self._place)


@dataclass(frozen=True, slots=True)
class Still:
    """A picture as RGB in a sheet, beginning at `offset`."""

    width: int
    height: int
    sheet: Sheet
    offset: int = 0

    @property
    def size(self) -> int:
        """The number of its bytes."""
        return 3 * self.width * self.height

    def pixels(self) -> bytes:
        """Its bytes."""
        return self.sheet.read(self.size, self.offset)


def laid_out(pictures: Sequence[Image.Image]) -> list[Still]:
    """Pictures of any mode, side by side in one sheet."""
    if not pictures:
        return []
    sheet = Sheet(picture.convert("RGB").tobytes() for picture in pictures)
    found: list[Still] = []
    for picture in pictures:
        offset = found[-1].offset + found[-1].size if found else 0
        found.append(Still(*picture.size, sheet, offset))
    return found


def still(path: str, name: str) -> Still:
    """The picture in a file, held for a while. Raises MediaError, in which `name` stands for its path."""
    with _told(path, name):
        key = files.identity(path)
        held = _stills.get(key)
        if held is None:
            [held] = laid_out([image.read(path)])
            _stills.put(key, held, max(held.size, _SHARED_BYTES // _MOST_STILLS))
        return held


@contextlib.contextmanager
def _told(path: str, name: str) -> Iterator[None]:
    """Whatever fails is a MediaError without the path, which may tell what is to be found out."""
    try:
        with boundary(MediaError, f"{name} can't be read"):
            yield
    except MediaError as error:
        raise MediaError(str(error).replace(path, name)) from error


@functools.lru_cache(maxsize=256)
def _reel(path: str, changed: int, size: int) -> video.Reel:
    return video.survey(path)


class Film:
    """A video that a guest may ask for; `name` stands for its path in every sentence that a guest reads."""

    def __init__(self, path: str, name: str) -> None:
        self._path, self._name = path, name

    def facts(self) -> bytes:
        """What a guest is told of it, packed (see wire.FACTS). Raises MediaError."""
        reel = self._opened()
        clip, times = reel.clip, reel.times.astype("<f8")
        labels = [pts for pts, _ in reel.keys if pts >= reel.labels[0]] or [int(reel.labels[0])]
        keys = np.unique(np.searchsorted(reel.labels, labels)).astype("<u4")
        fps = clip.frames / clip.duration if clip.duration else 0.0
        head = FACTS.pack(fps, clip.duration, clip.width, clip.height, len(times), len(keys))
        return head + times.tobytes() + keys.tobytes()

    def frames(self, width: int, height: int, numbers: Sequence[int]) -> list[NDArray[np.uint8]]:
        """Frames by number, uint8 [height, width, 3] each; 0 for both sides: as they are. Raises MediaError."""
        reel = self._opened()
        size = (width, height) if width else (reel.clip.width, reel.clip.height)
        area, count = size[0] * size[1], len(reel.times)
        most = min(MOST_PIXELS, max(MOST_SCALED, reel.clip.width * reel.clip.height))
        if area > most or (len(numbers) > 1 and 3 * area * len(numbers) > ASK_BYTES):
            raise MediaError(f"{self._name}: {len(numbers)} frames of {size[0]}x{size[1]} pixels are too much at once")
        if any(number >= count for number in numbers):
            raise MediaError(f"{self._name} has {count} frames")
        found = {number: _frames.get((reel.clip.digest, number, *size)) for number in numbers}
        absent = sorted(number for number, pixels in found.items() if pixels is None)
        if absent:
            fresh = self._decoded(reel, absent, size)
            for number, frame in zip(absent, fresh, strict=True):
                found[number] = frame.pixels
                _frames.put((reel.clip.digest, number, *size), frame.pixels, frame.pixels.nbytes)
        return [pixels for number in numbers if (pixels := found[number]) is not None]

    def _decoded(self, reel: video.Reel, numbers: list[int], size: tuple[int, int]) -> list[video.Frame]:
        with _told(self._path, self._name):
            return video.decode(reel, reel.times[numbers].tolist(), size=size)

    def _opened(self) -> video.Reel:
        with _told(self._path, self._name):
            return _reel(*files.identity(self._path))
