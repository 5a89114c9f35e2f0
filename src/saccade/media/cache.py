"""The media library: pictures in time for everyone, each decoded once.

    agents, tools ──frames, image──> [asked before?] ──> [being decoded now?] ──> pool of threads ──> LRU of pixels
         ^                                 |                     |                     |
         └──────── Picture, at once <──────┘      waits for that one job <─────────────┘ (also wakes it on an error)

Requests come from an event loop; jobs run on the pool's threads and never wait for each other, so that every job ends
and wakes whoever waits for it. Without workers a job runs at once where it is asked for. Files are taken to stay as
they are for the life of a library; where one is found changed, that is an error, not a mixture.
"""

import asyncio
import atexit
import functools
import os
import shutil
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from saccade.errors import MediaError
from saccade.ledger import Box, Picture
from saccade.media import files
from saccade.media.image import fit, read, resized, store
from saccade.media.video import Reel, decode, rounded, survey
from saccade.protocols import Budget, Clip

MADE_BYTES = 16 * 2**30  # of pictures that tools made; far more than any step of training shows
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
Pixels = NDArray[np.uint8]


class Lru(Generic[K, V]):
    """The most recently used values whose costs add up to at most `room`; safe to use from many threads.

    >>> recent: Lru[str, int] = Lru(2)
    >>> for letter in "abac":
    ...     recent.put(letter, ord(letter))
    >>> recent.get("a"), recent.get("b"), recent.get("c")
    (97, None, 99)
    """

    def __init__(self, room: int) -> None:
        self.room, self.used = room, 0
        self._held: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self._lock = Lock()

    def get(self, key: K) -> V | None:
        """The value, now the most recently used; None if it isn't held."""
        with self._lock:
            held = self._held.get(key)
            if held is None:
                return None
            self._held.move_to_end(key)
            return held[0]

    def put(self, key: K, value: V, cost: int = 1) -> None:
        """Hold `value` if it fits at all, and let go of the least recently used ones that no longer do."""
        with self._lock:
            self.used -= self._held.pop(key, (None, 0))[1]
            if cost > self.room:
                return
            self._held[key], self.used = (value, cost), self.used + cost
            while self.used > self.room:
                self.used -= self._held.popitem(last=False)[1][1]


class Files:
    """Files of which the oldest are deleted when all together take more than `room` bytes."""

    def __init__(self, room: int) -> None:
        self._room, self._used = room, 0
        self._sizes: OrderedDict[str, int] = OrderedDict()
        self._lock = Lock()

    def put(self, path: str, size: int) -> None:
        """Count a file that was written, as the newest."""
        with self._lock:
            self._used += size - self._sizes.pop(path, 0)
            self._sizes[path] = size
            while self._used > self._room and len(self._sizes) > 1:
                oldest, freed = self._sizes.popitem(last=False)
                self._used -= freed
                Path(oldest).unlink(missing_ok=True)


@functools.cache
def _own_folder() -> str:
    folder = tempfile.mkdtemp(prefix="saccade-pictures-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


class Library:
    """Pictures in time (see protocols.MediaLibrary), decoded once and kept for a while.

    `workers` threads decode (0: inline, in the order of the calls); `cache_bytes` bound the pixels that are kept;
    `made` is the folder for pictures that tools make ("": one that is gone at the end of the process).
    """

    def __init__(self, *, workers: int = 0, cache_bytes: int = 512 * 2**20, made: str = "") -> None:
        self.made = made
        self._written = Files(MADE_BYTES)
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="saccade-media") if workers else None
        self._threads = max(1, (os.cpu_count() or 1) // max(1, workers))  # of one job, for large pictures
        self._pixels: Lru[str, Pixels] = Lru(cache_bytes)
        self._reels: Lru[str, Reel] = Lru(10_000_000)  # frames in all; 16 bytes each
        self._stills: Lru[Hashable, Picture] = Lru(100_000)
        self._moved: Lru[str, Picture] = Lru(100_000)  # what was found where a file isn't as surveyed
        self._jobs: dict[Hashable, Future[Any]] = {}

    # ---- asking --------------------------------------------------------------------------------------------------

    async def probe(self, path: str) -> Clip:
        """What the video at `path` is. Raises MediaError."""
        return (await self._reel(path)).clip

    async def frames(self, path: str, times: Sequence[float], *, factor: int, budget: Budget) -> list[Picture]:
        """One picture per time (seconds), in the order of `times`; `time` is the frame's true one, to the millisecond.

        Sides are multiples of `factor` and the area lies within `budget`. Raises MediaError.
        """
        reel = await self._reel(path)
        size = _fit(path, reel.clip.width, reel.clip.height, factor, budget)
        pictures = [self._named(reel, reel.moment(time), size) for time in times]
        # no await from here to `_start`: nobody can begin the same frames in between
        absent = {picture.key: picture for picture in pictures if not self._ready(picture)}
        flying = {job for key in absent if (job := self._jobs.get(key))}
        fresh = {key: picture for key, picture in absent.items() if key not in self._jobs}
        if fresh:
            flying.add(self._start(list(fresh), lambda: self._decode(reel, list(fresh.values()))))
        for job in flying:
            await _result(job)
        return [self._moved.get(picture.key) or picture for picture in pictures]

    async def size(self, path: str) -> tuple[int, int]:
        """Width and height (pixels) of the picture in a file. Raises MediaError."""
        whole = await self._whole(path)
        return whole.width, whole.height

    async def image(self, path: str, *, factor: int, budget: Budget, box: Box | None = None) -> Picture:
        """The picture in a file, or a box of it (pixels of the file), sized like a frame. Raises MediaError."""
        if box is None:
            return await self._still((path, factor, budget), lambda: self._open(path, factor, budget))
        # The boxes of one turn are cut out of one decoded picture, however large it is.
        whole = await self._whole(path)
        return await self._still((path, factor, budget, box), lambda: self._cut(whole, box, factor, budget))

    async def keep(self, pixels: Pixels, *, factor: int, budget: Budget) -> Picture:
        """A picture that somebody made (uint8 RGB [height, width, 3]), sized like a frame, as a file in `made`.

        Whoever reads the episode later finds it there, as long as the files written since take no more than
        MADE_BYTES. Raises MediaError.
        """
        return await _result(self._start([object()], lambda: self._store(pixels, factor, budget)))

    def pixels(self, picture: Picture) -> Pixels:
        """The pixels, uint8 RGB [height, width, 3], not to be written to; decoded again if no longer held.

        Raises MediaError where the file has changed since the picture was made.
        """
        held = self._pixels.get(picture.key)
        if held is not None:
            return held
        if files.digest(picture.path) != picture.digest:
            raise MediaError(f"{picture.path} has changed since it was first read; restore it, or start again")
        size = picture.width, picture.height
        if picture.time is None:
            still = read(picture.path)
            return self._keep(picture, resized(still.crop(picture.box) if picture.box else still, *size))
        reel = self._reels.get(picture.path) or survey(picture.path)
        return self._keep(picture, decode(reel, [picture.time], size=size, threads=self._threads)[0].pixels)

    # ---- work, on any thread -------------------------------------------------------------------------------------

    def _survey(self, path: str) -> Reel:
        reel = survey(path)
        self._reels.put(path, reel, reel.clip.frames)
        return reel

    def _decode(self, reel: Reel, pictures: list[Picture]) -> None:
        size = pictures[0].width, pictures[0].height
        frames = decode(reel, [picture.time or 0.0 for picture in pictures], size=size, threads=self._threads)
        for picture, frame in zip(pictures, frames, strict=True):
            found = self._named(reel, frame.time, size)
            self._keep(found, frame.pixels)
            if found != picture:
                self._moved.put(picture.key, found)

    def _open(self, path: str, factor: int, budget: Budget) -> Picture:
        content, opened = files.digest(path), read(path)
        width, height = _fit(path, opened.width, opened.height, factor, budget)
        still = Picture(path=path, digest=content, time=None, width=width, height=height)
        self._keep(still, resized(opened, width, height))
        return still

    def _read(self, path: str) -> Picture:
        """The picture at its own size."""
        content, opened = files.digest(path), read(path)
        whole = Picture(path=path, digest=content, time=None, width=opened.width, height=opened.height)
        self._keep(whole, np.array(opened))
        return whole

    def _cut(self, whole: Picture, box: Box, factor: int, budget: Budget) -> Picture:
        left, top, right, bottom = box
        if not (0 <= left < right <= whole.width and 0 <= top < bottom <= whole.height):
            raise MediaError(f"{whole.path}: the box {list(box)} is no part of its {whole.width}x{whole.height} pixels")
        width, height = _fit(whole.path, right - left, bottom - top, factor, budget)
        part = Image.fromarray(self.pixels(whole)[top:bottom, left:right])
        found = replace(whole, width=width, height=height, box=box)
        self._keep(found, resized(part, width, height))
        return found

    def _store(self, pixels: Pixels, factor: int, budget: Budget) -> Picture:
        height, width, _ = pixels.shape
        width, height = fit(width, height, factor, budget)
        scaled = resized(Image.fromarray(pixels), width, height)
        path = store(scaled, self.made or _own_folder())
        self._written.put(path, os.path.getsize(path))
        picture = Picture(path=path, digest=files.digest(path), time=None, width=width, height=height)
        self._keep(picture, scaled)
        return picture

    def _keep(self, picture: Picture, pixels: Pixels) -> Pixels:
        pixels.flags.writeable = False
        self._pixels.put(picture.key, pixels, pixels.nbytes)
        return pixels

    # ---- sharing -------------------------------------------------------------------------------------------------

    async def _reel(self, path: str) -> Reel:
        reel = self._reels.get(path)
        if reel is not None:
            return reel
        return await _result(self._jobs.get(path) or self._start([path], lambda: self._survey(path)))

    async def _whole(self, path: str) -> Picture:
        return await self._still((path,), lambda: self._read(path))

    async def _still(self, key: Hashable, work: Callable[[], Picture]) -> Picture:
        """The still picture that was found under `key`, if its pixels are held, else what `work` finds."""
        still = self._stills.get(key)
        if still and self._ready(still):
            return still

        def found() -> Picture:
            self._stills.put(key, made := work())
            return made

        return await _result(self._jobs.get(key) or self._start([key], found))

    def _named(self, reel: Reel, time: float, size: tuple[int, int]) -> Picture:
        clip = reel.clip
        return Picture(path=clip.path, digest=clip.digest, time=rounded(time), width=size[0], height=size[1])

    def _ready(self, picture: Picture) -> bool:
        return self._pixels.get((self._moved.get(picture.key) or picture).key) is not None

    def _start(self, keys: Sequence[Hashable], work: Callable[[], V]) -> Future[V]:
        """Begin `work`; until it ends, whoever asks for one of `keys` waits for it instead of beginning anew."""
        if self._pool is None:
            job: Future[V] = Future()
            job.set_result(work())
            return job
        # entered before the callback is set, so that a job that is done at once is taken out again
        job = self._pool.submit(work)
        self._jobs.update(dict.fromkeys(keys, job))
        job.add_done_callback(lambda _: [self._jobs.pop(key, None) for key in keys])
        return job


def _fit(path: str, width: int, height: int, factor: int, budget: Budget) -> tuple[int, int]:
    try:
        return fit(width, height, factor, budget)
    except MediaError as error:
        raise MediaError(f"{path}: {error}") from None


async def _result(job: Future[V]) -> V:
    """The job's result; who stops waiting for a shared job doesn't stop the job."""
    return job.result() if job.done() else await asyncio.shield(asyncio.wrap_future(job))
