"""Media that the host serves to workers: images in sealed memory, frames of videos on demand.

A worker maps images and requests frames of videos by number. It holds no descriptor, path or decoder of a media file,
and the workers of several episodes may share images and decoders.
"""

import bisect
import contextlib
import fcntl
import functools
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from saccade.errors import MediaError, SandboxError, convert_errors
from saccade.sandbox.protocol import MAX_BYTES_PER_REQUEST, VideoMetadata
from saccade.sandbox.scheduler import count_cpus

MAX_FRAME_PIXELS, MAX_UPSCALED_PIXELS = 2**26, 2**22  # of one frame: at its own size, and upscaled
MAX_FRAME_SIDE = 2**16  # a scaled frame's; libraries fail beyond
MAX_SLICE_PIXELS = 2**27  # that are decoded at a time for one episode: a fraction of a second
MIN_DECODED_PIXELS = 2**16  # that a smaller frame counts as
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


class Video(Protocol):
    """A video that the host decodes for workers, on the threads of the decoder pool.

    Both methods raise MediaError if the file can't be read. The model reads its text, which must not contain the path.
    """

    def read_metadata(self) -> VideoMetadata:
        """Return the metadata."""

    def load_frames(
        self, numbers: Sequence[int], size: tuple[int, int], is_cancelled: Callable[[], bool]
    ) -> Sequence[NDArray[np.uint8]]:
        """Return frames by number, scaled to `size` (width, height): uint8 RGB [height, width, 3] each.

        Raise MediaError soon after `is_cancelled()` has become true: nothing waits for the frames anymore.
        """


@functools.cache
def get_decoder_pool() -> ThreadPoolExecutor:
    """Return the threads that decode for all workers of this process."""
    return ThreadPoolExecutor(min(4, count_cpus()), thread_name_prefix="saccade-sandbox")


class VideoRequest:
    """What a worker requested of a video: its metadata, or frames by number, in `size` ((0, 0): the video's own).

    The request is loaded in slices of bounded work, so that requests of other episodes are served in between.
    """

    def __init__(self, video: Video, name: str, size: tuple[int, int], numbers: Sequence[int]) -> None:
        self._video, self._name, self._size, self._numbers = video, name, size, numbers
        self._slices: deque[list[int]] | None = None  # those left; None: not yet planned
        self._is_cancelled = False
        self.parts: list[Any] = []  # of the reply

    @property
    def is_loaded(self) -> bool:
        """Whether `parts` is complete."""
        return self._slices is not None and not self._slices

    def cancel(self) -> None:
        """Stop a slice that is being loaded."""
        self._is_cancelled = True

    def load_slice(self) -> None:
        """On a thread of the decoder pool: load the next slice. Raises MediaError, also for too many frames."""
        if self._slices is None:
            self._slices = deque(self._plan_slices())
        if self._slices:
            frames = self._video.load_frames(self._slices[0], self._size, lambda: self._is_cancelled)
            self.parts += [frame.data.cast("B") for frame in frames]
            self._slices.popleft()

    def _plan_slices(self) -> list[list[int]]:
        metadata = self._video.read_metadata()
        if not self._numbers:
            self.parts = [metadata.pack()]
            return []
        own_size, count = (metadata.width, metadata.height), len(metadata.times)
        self._size = self._size if self._size[0] else own_size
        area, own_area = (width * height for width, height in (self._size, own_size))
        max_area = min(MAX_FRAME_PIXELS, max(MAX_UPSCALED_PIXELS, own_area))
        is_large = area > max_area or max(self._size) > MAX_FRAME_SIDE
        if is_large or (len(self._numbers) > 1 and 3 * area * len(self._numbers) > MAX_BYTES_PER_REQUEST):
            message = f"{self._name}: {len(self._numbers)} frames of {self._size[0]}x{self._size[1]} pixels"
            raise MediaError(f"{message} are too much at once", key=self._name, value=self._size)
        if max(self._numbers) >= count:
            raise MediaError(f"{self._name} has {count} frames", key=self._name, value=max(self._numbers))
        max_decoded = max(1, MAX_SLICE_PIXELS // max(own_area, MIN_DECODED_PIXELS))
        return split_frames(self._numbers, metadata.keyframes.tolist(), max_decoded)


def split_frames(numbers: Sequence[int], keyframes: Sequence[int], max_decoded: int) -> list[list[int]]:
    """Split frame numbers into slices that decode about `max_decoded` frames each, from the preceding keyframe on.

    A slice that begins between keyframes decodes the frames before it again. It is longer, so that it spends no more on
    these than on its own: all slices together decode less than four times what one would.

    >>> split_frames([0, 1, 2, 8, 9, 10], keyframes=[0, 8], max_decoded=3)
    [[0, 1, 2], [8, 9, 10]]
    >>> split_frames(range(10), keyframes=[0], max_decoded=2)
    [[0, 1], [2, 3], [4, 5, 6, 7], [8, 9]]
    """
    slices: list[list[int]] = []
    last = repeated = decoded = 0  # the last number of a slice, frames decoded before its first, all that it decodes
    last_key = -1
    for number in numbers:
        key = keyframes[max(0, bisect.bisect_right(keyframes, number) - 1)] if keyframes else 0
        from_key = max(0, number - key) + 1
        continues = bool(slices) and key == last_key and number >= last
        is_full = decoded >= max_decoded and (not continues or decoded - repeated >= repeated)
        if not slices or is_full:
            slices.append([])
            repeated, decoded = from_key - 1, from_key
        else:
            decoded += number - last if continues else from_key
        slices[-1].append(number)
        last, last_key = number, key
    return slices


class SealedMemory:
    """Immutable memory that workers can map: a sealed memfd."""

    def __init__(self, parts: Iterable[bytes]) -> None:
        self.fd = os.memfd_create("saccade-image", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        with os.fdopen(os.dup(self.fd), "wb") as file:
            file.writelines(parts)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)

    @contextlib.contextmanager
    def open_fd(self) -> Iterator[int]:
        """Open a read-only file description.

        Workers could exchange information by the offset of a shared one, and by the time of the last access.
        """
        with convert_errors(SandboxError, "an image can't be shared with an interpreter"):
            fd = os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_NOATIME)
        try:
            yield fd
        finally:
            os.close(fd)

    def __del__(self) -> None:
        os.close(self.fd)


@dataclass(frozen=True, slots=True)
class SealedImage:
    """An image as RGB bytes [height, width, 3] in sealed memory, beginning at `offset`."""

    width: int
    height: int
    memory: SealedMemory
    offset: int = 0

    @property
    def num_bytes(self) -> int:
        """The size of its pixels in bytes."""
        return 3 * self.width * self.height

    def read_bytes(self) -> bytes:
        """Read its pixels."""
        return os.pread(self.memory.fd, self.num_bytes, self.offset)


def seal_images(images: Sequence[Image.Image]) -> list[SealedImage]:
    """Copy images of any mode, converted to RGB, into one sealed memory."""
    if not images:
        return []
    memory = SealedMemory(image.convert("RGB").tobytes() for image in images)
    sealed: list[SealedImage] = []
    for image in images:
        sealed.append(SealedImage(*image.size, memory, sealed[-1].offset + sealed[-1].num_bytes if sealed else 0))
    return sealed
