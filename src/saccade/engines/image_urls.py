"""Images as data URLs, the format in which servers accept them: each encoded once, in threads.

request ──> [in memory?] ──> [being encoded?] ──> a thread: [on disk?] ──> pixels ──> PNG, to disk ──> data URL
"""

import asyncio
import base64
import contextlib
import functools
import json
import secrets
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from saccade.errors import EngineError, MediaError
from saccade.ledger import ImageRef
from saccade.media.cache import LRUCache
from saccade.media.image import encode_png
from saccade.protocols import MediaLoader
from saccade.utils.cpus import count_cpus
from saccade.utils.files import read_bytes
from saccade.utils.hashing import compute_digest
from saccade.utils.scratch import make_scratch_dir, remove_scratch_dir

_MEMORY_BYTES, _DISK_BYTES = 2**28, 2**32  # of encoded images
_MARKER = f"image-{secrets.token_hex(16)}-"  # a text that no message contains


def encode_data_url(png: bytes) -> str:
    """Encode a PNG as a data URL.

    >>> encode_data_url(b"png")
    'data:image/png;base64,cG5n'
    """
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


class ImageUrls:
    """Encodes a media loader's images as data URLs: the newest are kept in memory, more of them on disk.

    `disk_bytes` bounds its files, in a temporary folder that is deleted at exit.
    """

    def __init__(self, media: MediaLoader, *, memory_bytes: int = _MEMORY_BYTES, disk_bytes: int = _DISK_BYTES) -> None:
        self._media = media
        self._urls: LRUCache[str, bytes] = LRUCache(memory_bytes)
        self._files: LRUCache[Path, None] = LRUCache(disk_bytes, functools.partial(Path.unlink, missing_ok=True))
        self._jobs: dict[str, Future[bytes]] = {}
        self._threads = ThreadPoolExecutor(count_cpus(), thread_name_prefix="saccade-png")

    async def encode(self, images: Sequence[ImageRef]) -> dict[str, bytes]:
        """Return the data URL of each image, by its key.

        Raises EngineError, which ends the episode, if an image's pixels can't be loaded.
        """
        jobs: dict[str, Future[bytes]] = {}
        urls: dict[str, bytes] = {}
        for image in {image.key: image for image in images}.values():
            key = image.key
            if (url := self._urls.get(key)) is not None:
                urls[key] = url
            elif key in self._jobs:
                jobs[key] = self._jobs[key]
            else:
                jobs[key] = self._jobs[key] = self._threads.submit(self._load_url, image)
                jobs[key].add_done_callback(lambda _, key=key: self._jobs.pop(key, None))  # type: ignore[misc]
        for key, job in jobs.items():
            urls[key] = await asyncio.shield(asyncio.wrap_future(job))  # other requests may wait for it, too
        return urls

    @functools.cached_property
    def _folder(self) -> str:
        folder = make_scratch_dir("saccade-png-")
        weakref.finalize(self, remove_scratch_dir, folder)  # at exit, too
        return folder

    def _load_url(self, image: ImageRef) -> bytes:
        url = self._urls.get(image.key)
        if url is None:
            file = Path(self._folder, f"{compute_digest(image.key)}.png")
            try:
                png = read_bytes(file)
            except OSError:
                try:
                    png = encode_png(self._media.load_pixels(image))
                except MediaError as error:  # the file may have changed or been deleted
                    raise EngineError(str(error), key=error.key, value=error.value) from error
                with contextlib.suppress(OSError):  # a full disk: it is encoded again when it is needed
                    partial = file.with_suffix(f".{secrets.token_hex(4)}")
                    partial.write_bytes(png)
                    partial.rename(file)
                    self._files.put(file, None, len(png))
                    if file not in self._files:  # larger than the limit
                        file.unlink()
            url = encode_data_url(png).encode()
            self._urls.put(image.key, url, len(url))
        return url


# ---- JSON with images ------------------------------------------------------------------------------------------------


def mark_image(image: ImageRef) -> str:
    """Return a text that stands for an image's data URL in a body, until `join_json` replaces it."""
    return f"{_MARKER}{compute_digest(image.key)}"


def join_json(body: Mapping[str, Any], urls: Mapping[str, bytes]) -> list[bytes]:
    """Return a body as JSON in parts: texts of `mark_image` become the URLs, by the images' keys, not copied.

    Megabytes of URLs are neither searched for characters to escape nor joined.
    """
    by_digest = {compute_digest(key): url for key, url in urls.items()}
    head, *rest = json.dumps(body).split(_MARKER)
    parts = [head.encode()]
    for text in rest:
        digest, quote, tail = text.partition('"')
        parts += [by_digest[digest], f"{quote}{tail}".encode()]
    return parts
