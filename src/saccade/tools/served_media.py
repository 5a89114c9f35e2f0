"""The media of a task, as the tool python serves them to its interpreter: cached images and videos, without paths.

The interpreter holds no descriptor, path or decoder of a media file, and the rollouts of a group share decoded frames.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from saccade.errors import MediaError, convert_errors
from saccade.media import hashing, video
from saccade.media.cache import LRUCache
from saccade.media.image import read_image
from saccade.sandbox import SealedImage, VideoMetadata, seal_images

_CACHE_BYTES = 256 * 2**20
_MAX_CACHED_IMAGES = 512  # each has a descriptor

_frame_cache: LRUCache[tuple[str, int, tuple[int, int]], NDArray[np.uint8]] = LRUCache(_CACHE_BYTES)
_image_cache: LRUCache[tuple[str, int, int], SealedImage] = LRUCache(_CACHE_BYTES)


@contextlib.contextmanager
def _redact_path(path: str, name: str) -> Iterator[None]:
    """Raise every failure as a MediaError without the path: the model may read it, and a path can contain the label."""
    try:
        with convert_errors(MediaError, f"{name} can't be read"):
            yield
    except MediaError as error:
        raise MediaError(str(error).replace(path, name), key=name) from error


def load_image(path: str, name: str) -> SealedImage:
    """Load an image file, cached. Raises MediaError, which gives `name` in place of the path."""
    with _redact_path(path, name):
        key = hashing.get_file_identity(path)
        image = _image_cache.get(key)
        if image is None:
            [image] = seal_images([read_image(path)])
            _image_cache.put(key, image, max(image.num_bytes, _CACHE_BYTES // _MAX_CACHED_IMAGES))
        return image


class ServedVideo:
    """A video file, a `sandbox.Video`; `name` replaces its path in every message that the model may read."""

    def __init__(self, path: str, name: str) -> None:
        self._path, self._name = path, name

    def read_metadata(self) -> VideoMetadata:
        """Return the metadata. Raises MediaError."""
        with _redact_path(self._path, self._name):
            return _index_video(*hashing.get_file_identity(self._path))[1]

    def load_frames(
        self, numbers: Sequence[int], size: tuple[int, int], is_cancelled: Callable[[], bool]
    ) -> list[NDArray[np.uint8]]:
        """Return frames by number, scaled to `size` (width, height), uint8 [height, width, 3].

        Raises MediaError, also soon after `is_cancelled()` has become true.
        """
        with _redact_path(self._path, self._name):
            index, _ = _index_video(*hashing.get_file_identity(self._path))
            frames = {number: _frame_cache.get((index.info.digest, number, size)) for number in numbers}
            missing = sorted(number for number, pixels in frames.items() if pixels is None)
            times = index.times[missing].tolist()
            decoded = video.decode_frames(index, times, size=size, is_cancelled=is_cancelled) if missing else []
            for number, frame in zip(missing, decoded, strict=True):
                frames[number] = frame.pixels
                _frame_cache.put((index.info.digest, number, size), frame.pixels, frame.pixels.nbytes)
            return [pixels for number in numbers if (pixels := frames[number]) is not None]


@functools.lru_cache(maxsize=256)
def _index_video(path: str, modified_ns: int, size: int) -> tuple[video.VideoIndex, VideoMetadata]:
    index = video.index_video(path)
    info = index.info
    # A video without timestamps can only be decoded from its start.
    key_pts = [pts for pts, _ in index.keyframes if pts >= index.frame_ids[0] and not index.uses_frame_numbers]
    key_pts = key_pts or [int(index.frame_ids[0])]
    return index, VideoMetadata(
        fps=info.num_frames / info.duration if info.duration else 0.0,
        duration=info.duration,
        width=info.width,
        height=info.height,
        times=index.times,
        keyframes=np.unique(np.searchsorted(index.frame_ids, key_pts)).astype(np.uint32),
    )
