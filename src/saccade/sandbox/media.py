"""Media that the host serves to workers: images in sealed memory, frames of videos on demand.

A worker maps images and requests frames of videos by number. It holds no descriptor, path or decoder of a media file,
and the workers of several episodes may share images and decoders.
"""

import contextlib
import fcntl
import functools
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from saccade.errors import MediaError, SandboxError, convert_errors
from saccade.sandbox.protocol import MAX_BYTES_PER_REQUEST, VideoMetadata

MAX_FRAME_PIXELS, MAX_UPSCALED_PIXELS = 2**26, 2**22  # of one frame: at its own size, and upscaled
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


class Video(Protocol):
    """A video that the host decodes for workers, on the threads of the decoder pool.

    Both methods raise MediaError if the file can't be read. The model reads its text, which must not contain the path.
    """

    def read_metadata(self) -> VideoMetadata:
        """Return the metadata."""

    def load_frames(self, numbers: Sequence[int], size: tuple[int, int]) -> Sequence[NDArray[np.uint8]]:
        """Return frames by number, scaled to `size` (width, height): uint8 RGB [height, width, 3] each."""


@functools.cache
def get_decoder_pool() -> ThreadPoolExecutor:
    """Return the threads that decode for all workers of this process."""
    return ThreadPoolExecutor(min(4, os.cpu_count() or 1), thread_name_prefix="saccade-sandbox")


def load_requested_frames(
    video: Video, name: str, size: tuple[int, int], numbers: Sequence[int]
) -> Sequence[NDArray[np.uint8]]:
    """Load frames that a worker requested; `size` (0, 0) is the video's own. Raises MediaError, also for too many."""
    metadata = video.read_metadata()
    own_size, count = (metadata.width, metadata.height), len(metadata.times)
    size = size if size[0] else own_size
    area = size[0] * size[1]
    max_area = min(MAX_FRAME_PIXELS, max(MAX_UPSCALED_PIXELS, own_size[0] * own_size[1]))
    if area > max_area or (len(numbers) > 1 and 3 * area * len(numbers) > MAX_BYTES_PER_REQUEST):
        message = f"{name}: {len(numbers)} frames of {size[0]}x{size[1]} pixels are too much at once"
        raise MediaError(message, key=name, value=size)
    if max(numbers) >= count:
        raise MediaError(f"{name} has {count} frames", key=name, value=max(numbers))
    return video.load_frames(numbers, size)


class SealedMemory:
    """Immutable memory that workers can map: a sealed memfd."""

    def __init__(self, parts: Iterable[bytes]) -> None:
        self.fd = os.memfd_create("saccade-image", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        with os.fdopen(os.dup(self.fd), "wb") as file:
            file.writelines(parts)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)

    @contextlib.contextmanager
    def open_fd(self) -> Iterator[int]:
        """Open a separate read-only file description: workers could exchange information by a shared one's offset."""
        with convert_errors(SandboxError, "an image can't be shared with an interpreter"):
            fd = os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)
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
