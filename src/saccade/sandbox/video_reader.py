"""Videos in a worker, with the interface of decord's `VideoReader`; the host decodes every frame.

The worker has no descriptor, path or decoder of a video: it requests frames by number and receives pixels. Sequential
reads prefetch frames, since each request makes the host decode from the preceding keyframe.
"""

import functools
import operator
import sys
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from saccade.sandbox.protocol import VideoMetadata

MAX_PREFETCH_FRAMES, MAX_PREFETCH_BYTES = 32, 32 * 2**20

RequestFrames = Callable[[int, tuple[int, int], list[int]], NDArray[np.uint8]]  # video, (width, height), numbers


class FrameArray(np.ndarray):
    """Pixels, uint8 RGB [height, width, 3] or [n, height, width, 3]: an array with decord's `asnumpy()`."""

    def asnumpy(self) -> NDArray[Any]:
        """Copy to a plain array."""
        return np.array(self, copy=True, subok=False)

    def __array_wrap__(self, array: NDArray[Any], *_: Any) -> Any:
        return array.view(FrameArray) if array.ndim else array[()]  # reductions return scalars


class VideoSource:
    """One video, opened at first use."""

    def __init__(
        self, number: int, request_metadata: Callable[[int], VideoMetadata], request_frames: RequestFrames
    ) -> None:
        self.number, self._request_metadata, self.request_frames = number, request_metadata, request_frames

    @functools.cached_property
    def metadata(self) -> VideoMetadata:
        """Its metadata. Raises RuntimeError if the video can't be read."""
        return self._request_metadata(self.number)


class VideoReader:
    """A video as a sequence of frames: `len`, indices, slices, `get_batch`, times, iteration."""

    def __init__(
        self, uri: Any, ctx: Any = None, width: int = -1, height: int = -1, num_threads: int = 0, **_: Any
    ) -> None:
        if not isinstance(uri, VideoSource | VideoReader):
            raise FileNotFoundError(f"there is no video {uri!r} here; use the variables video_clue_0, video_clue_1, …")
        self._source: VideoSource = uri if isinstance(uri, VideoSource) else uri._source
        self._given_size = (width, height)
        self._next, self._last_read, self._prefetch_count = 0, -2, 1
        self._prefetched: dict[int, NDArray[np.uint8]] = {}

    @property
    def _size(self) -> tuple[int, int]:
        """The width and height of its frames."""
        metadata = self._source.metadata
        return self._given_size if min(self._given_size) > 0 else (metadata.width, metadata.height)

    def __len__(self) -> int:
        return len(self._source.metadata.times)

    def __repr__(self) -> str:
        return f"VideoReader(video_clue_{self._source.number})"

    def __getitem__(self, index: Any) -> FrameArray:
        if isinstance(index, slice):
            return self.get_batch(range(*index.indices(len(self))))
        if isinstance(index, list | tuple | range | np.ndarray) and np.ndim(index) == 1:
            return self.get_batch(index)
        return self._read_frame(self._resolve_indices([index])[0])

    def __iter__(self) -> Iterator[FrameArray]:
        return (self._read_frame(number) for number in range(len(self)))

    def _resolve_indices(self, indices: Iterable[Any]) -> list[int]:
        count, numbers = len(self), []
        for index in indices:
            number = operator.index(index)
            if not -count <= number < count:
                raise IndexError(f"frame {number} of a video with {count} frames")
            numbers.append(number % count)
        return numbers

    def _read_frame(self, number: int) -> FrameArray:
        frames = self._prefetched  # a local reference: another thread may replace the attribute
        if number not in frames:
            # Consecutive reads double the number of prefetched frames; a jump resets it.
            self._prefetch_count = (
                min(self._prefetch_count * 2, MAX_PREFETCH_FRAMES) if number == self._last_read + 1 else 1
            )
            width, height = self._size
            count = max(1, min(self._prefetch_count, MAX_PREFETCH_BYTES // (3 * width * height), len(self) - number))
            numbers = list(range(number, number + count))
            pixels = self._source.request_frames(self._source.number, (width, height), numbers)
            self._prefetched = frames = dict(zip(numbers, pixels, strict=True))
        self._last_read = number
        return frames[number].copy().view(FrameArray)

    def get_batch(self, indices: Any) -> FrameArray:
        """Return the frames at these indices, in order: uint8 [n, height, width, 3]."""
        # Like decord, truncate floats, such as those of linspace.
        numbers = self._resolve_indices(np.asarray(indices, dtype=np.int64).reshape(-1).tolist())
        if not numbers:
            return np.zeros((0, *self._size[::-1], 3), np.uint8).view(FrameArray)
        unique = sorted(set(numbers))
        pixels = self._source.request_frames(self._source.number, self._size, unique)
        if unique != numbers:
            pixels = pixels[np.searchsorted(unique, numbers)]
        return pixels.view(FrameArray)

    def next(self) -> FrameArray:
        """Return the next frame. Raises StopIteration at the end."""
        if self._next >= len(self):
            raise StopIteration
        self._next += 1
        return self._read_frame(self._next - 1)

    __next__ = next

    def get_avg_fps(self) -> float:
        """Return the average number of frames per second."""
        return self._source.metadata.fps

    def get_frame_timestamp(self, index: Any) -> NDArray[np.float32]:
        """Return (start, end) of a frame in seconds, float32 [2]; of several frames, [n, 2]."""
        index = range(*index.indices(len(self))) if isinstance(index, slice) else index
        times = np.append(self._source.metadata.times, self._source.metadata.duration)
        spans = np.stack([times[:-1], times[1:]], axis=1).astype(np.float32)
        numbers = self._resolve_indices(np.asarray(index, dtype=np.int64).reshape(-1).tolist())
        selected: NDArray[np.float32] = spans[numbers]
        return selected if np.ndim(index) else selected[0]

    def get_key_indices(self) -> list[int]:
        """Return the numbers of the keyframes."""
        return self._source.metadata.keyframes.tolist()

    def seek(self, position: int) -> None:
        """Move to the keyframe at or before this frame."""
        number = self._resolve_indices([position])[0]
        self._next = max([key for key in self.get_key_indices() if key <= number], default=0)

    def seek_accurate(self, position: int) -> None:
        """Move to exactly this frame."""
        self._next = self._resolve_indices([position])[0]

    def skip_frames(self, count: int = 1) -> None:
        """Skip some frames."""
        self._next = max(0, self._next + count)


def cpu(number: int = 0) -> str:
    """Return the only device."""
    return "cpu"


def install_decord_stub() -> ModuleType:
    """Register a module for `from decord import VideoReader, cpu, gpu, bridge`."""
    module, bridge = ModuleType("decord"), ModuleType("decord.bridge")
    vars(bridge).update(set_bridge=lambda name: None, reset_bridge=lambda: None)
    vars(module).update(VideoReader=VideoReader, cpu=cpu, gpu=cpu, bridge=bridge, __version__="0.6.0")
    sys.modules.update({"decord": module, "decord.bridge": bridge})
    return module
