"""Media for guests, decoded on the host's side of the wall: still pictures to begin with, frames of videos on demand.

A guest names frames by number; what it gets are pixels. So it holds no descriptor, path or decoder of a file, and the
attempts of a group share what was decoded for one of them.
"""

import fcntl
import functools
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from saccade.errors import MediaError
from saccade.media import files, image, video
from saccade.media.cache import Lru
from saccade.tools._sandbox.wire import ASK_BYTES, FACTS

MOST_PIXELS = 2**26  # of one frame
_SHARED_BYTES = 256 * 2**20
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE

_frames: Lru[tuple[str, int, int, int], NDArray[np.uint8]] = Lru(_SHARED_BYTES)
_stills: Lru[tuple[str, int, int], "Still"] = Lru(_SHARED_BYTES)


@functools.cache
def pool() -> ThreadPoolExecutor:
    """The threads that decode for all guests of this process."""
    return ThreadPoolExecutor(min(4, os.cpu_count() or 1), thread_name_prefix="saccade-sandbox")


class Still:
    """A picture as RGB in memory that guests can map and nobody can change; `place` is its descriptor."""

    def __init__(self, picture: Image.Image) -> None:
        picture = picture.convert("RGB")
        self.width, self.height = picture.size
        self.place = os.memfd_create("saccade-still", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        with os.fdopen(os.dup(self.place), "wb") as file:
            file.write(picture.tobytes())
        fcntl.fcntl(self.place, fcntl.F_ADD_SEALS, _SEALS)

    def __del__(self) -> None:
        os.close(self.place)


def still(path: str) -> Still:
    """The picture in a file, held for a while. Raises MediaError."""
    key = files.identity(path)
    held = _stills.get(key)
    if held is None:
        held = Still(image.read(path))
        _stills.put(key, held, 3 * held.width * held.height)
    return held


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
        if area > MOST_PIXELS or (len(numbers) > 1 and 3 * area * len(numbers) > ASK_BYTES):
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
        try:
            return video.decode(reel, reel.times[numbers].tolist(), size=size)
        except MediaError as error:
            raise MediaError(str(error).replace(self._path, self._name)) from error

    def _opened(self) -> video.Reel:
        try:
            return _reel(*files.identity(self._path))
        except MediaError as error:
            raise MediaError(str(error).replace(self._path, self._name)) from error
