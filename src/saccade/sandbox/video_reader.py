"""Videos inside a guest, under the names and manners of decord's `VideoReader`; every frame is decoded by the host.

The guest has no descriptor and no path of a video, and no decoder: it names frames, and pixels come back. Whoever reads
frames one after the other is given some more ahead, since each request begins with a search for the keyframe before.
"""

import operator
import sys
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

AHEAD_FRAMES, AHEAD_BYTES = 32, 32 * 2**20

Ask = Callable[[int, int, int, list[int]], NDArray[np.uint8]]  # video, width, height (0: its own), numbers


class Facts:
    """What is known of a video: frames per second, size, the time of each frame (seconds), the keyframes' numbers."""

    def __init__(
        self, fps: float, seconds: float, size: tuple[int, int], times: NDArray[np.float64], keys: list[int]
    ) -> None:
        self.fps, self.seconds, self.size, self.times, self.keys = fps, seconds, size, times, keys


class Frames(np.ndarray):
    """Pixels, uint8 RGB [height, width, 3] or [n, height, width, 3]: an array that also answers to `asnumpy()`."""

    def asnumpy(self) -> NDArray[Any]:
        """A plain array of the same values."""
        return np.array(self, copy=True, subok=False)

    def __array_wrap__(self, array: NDArray[Any], *_: Any) -> Any:
        return array.view(Frames) if array.ndim else array[()]  # a mean is a number


class Film:
    """One video as a guest knows it; opened at first use."""

    def __init__(self, number: int, facts: Callable[[int], Facts], ask: Ask) -> None:
        self.number, self.ask = number, ask
        self._find = facts
        self._facts: Facts | None = None

    @property
    def facts(self) -> Facts:
        """What is known of it. Raises RuntimeError where it can't be read."""
        if self._facts is None:
            self._facts = self._find(self.number)
        return self._facts


class VideoReader:
    """A video as a sequence of frames: `len`, indices, slices, `get_batch`, times, iteration."""

    def __init__(
        self, uri: Any, ctx: Any = None, width: int = -1, height: int = -1, num_threads: int = 0, **_: Any
    ) -> None:
        if not isinstance(uri, Film | VideoReader):
            raise FileNotFoundError(f"there is no video {uri!r} here; use the variables video_clue_0, video_clue_1, …")
        self._film: Film = uri if isinstance(uri, Film) else uri._film
        self._size = (width, height) if width > 0 and height > 0 else (0, 0)
        self._next, self._last, self._run = 0, -2, 1
        self._held: dict[int, NDArray[np.uint8]] = {}

    def __len__(self) -> int:
        return len(self._film.facts.times)

    def __repr__(self) -> str:
        return f"VideoReader(video_clue_{self._film.number})"

    def __getitem__(self, index: Any) -> Frames:
        if isinstance(index, slice):
            return self.get_batch(range(*index.indices(len(self))))
        if isinstance(index, list | tuple | range | np.ndarray) and np.ndim(index) == 1:
            return self.get_batch(index)
        return self._frame(self._numbers([index])[0])

    def __iter__(self) -> Iterator[Frames]:
        return (self._frame(number) for number in range(len(self)))

    def _numbers(self, indices: Iterable[Any]) -> list[int]:
        count, found = len(self), []
        for index in indices:
            number = operator.index(index)
            if not -count <= number < count:
                raise IndexError(f"frame {number} of a video with {count} frames")
            found.append(number % count)
        return found

    def _frame(self, number: int) -> Frames:
        held = self._held  # another thread may put others there
        if number not in held:
            # Each step forward in a row doubles what is fetched; a jump begins anew.
            self._run = min(self._run * 2, AHEAD_FRAMES) if number == self._last + 1 else 1
            width, height = self._size if self._size[0] else self._film.facts.size
            most = max(1, min(self._run, AHEAD_BYTES // (3 * width * height), len(self) - number))
            numbers = list(range(number, number + most))
            self._held = held = dict(zip(numbers, self._film.ask(self._film.number, *self._size, numbers), strict=True))
        self._last = number
        return held[number].copy().view(Frames)

    def get_batch(self, indices: Any) -> Frames:
        """The frames of these numbers, in their order: uint8 [n, height, width, 3]."""
        # Like decord's, it takes what linspace gives, and leaves out the fractions.
        numbers = self._numbers(np.asarray(indices, dtype=np.int64).reshape(-1).tolist())
        if not numbers:
            return np.zeros((0, *self._film.facts.size[::-1], 3), np.uint8).view(Frames)
        wanted = sorted(set(numbers))
        pixels = self._film.ask(self._film.number, *self._size, wanted)
        if wanted != numbers:
            pixels = pixels[np.searchsorted(wanted, numbers)]
        return pixels.view(Frames)

    def next(self) -> Frames:
        """The frame after the last one that `next` gave. Raises StopIteration at the end."""
        if self._next >= len(self):
            raise StopIteration
        self._next += 1
        return self._frame(self._next - 1)

    __next__ = next

    def get_avg_fps(self) -> float:
        """Frames per second, on average."""
        return self._film.facts.fps

    def get_frame_timestamp(self, index: Any) -> NDArray[np.float32]:
        """(start, end) of a frame in seconds, float32 [2]; of several, [n, 2]."""
        index = range(*index.indices(len(self))) if isinstance(index, slice) else index
        times = np.append(self._film.facts.times, self._film.facts.seconds)
        spans = np.stack([times[:-1], times[1:]], axis=1).astype(np.float32)
        chosen: NDArray[np.float32] = spans[self._numbers(np.asarray(index, dtype=np.int64).reshape(-1).tolist())]
        return chosen if np.ndim(index) else chosen[0]

    def get_key_indices(self) -> list[int]:
        """The numbers of the keyframes."""
        return list(self._film.facts.keys)

    def seek(self, position: int) -> None:
        """Let `next` go on from the keyframe at or before this frame."""
        number = self._numbers([position])[0]
        self._next = max([key for key in self._film.facts.keys if key <= number], default=0)

    def seek_accurate(self, position: int) -> None:
        """Let `next` go on from this frame."""
        self._next = self._numbers([position])[0]

    def skip_frames(self, count: int = 1) -> None:
        """Let `next` leave out some frames."""
        self._next = max(0, self._next + count)


def cpu(number: int = 0) -> str:
    """A device: there is only this one."""
    return "cpu"


def stand_in() -> ModuleType:
    """A module for `from decord import VideoReader, cpu, gpu, bridge`."""
    module, bridge = ModuleType("decord"), ModuleType("decord.bridge")
    vars(bridge).update(set_bridge=lambda name: None, reset_bridge=lambda: None)
    vars(module).update(VideoReader=VideoReader, cpu=cpu, gpu=cpu, bridge=bridge, __version__="0.6.0")
    sys.modules.update({"decord": module, "decord.bridge": bridge})
    return module
