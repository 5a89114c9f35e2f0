"""The media library: pictures in time for everyone, each decoded once.

    agents, tools ──frames, image──> [asked before?] ──> [being decoded now?] ──> pool of threads ──> LRU of pixels
         ^                                 |                     |                     |
         └──────── Picture, at once <──────┘      waits for that one job <─────────────┘ (also wakes it on an error)

Requests come from an event loop; jobs run on the pool's threads and never wait for each other, so that every job ends
and wakes whoever waits for it. Without workers a job runs at once where it is asked for. Files are taken to stay as
they are for the life of a library; where one is found changed, that is an error, not a mixture.
"""

import asyncio
import os
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from saccade.errors import MediaError
from saccade.ledger import Picture
from saccade.media import files
from saccade.media.image import fit, read, resized
from saccade.media.video import Reel, decode, rounded, survey
from saccade.protocols import Budget, Clip

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


class Library:
    """Pictures in time (see protocols.MediaLibrary), decoded once and kept for a while.

    `workers` threads decode (0: inline, in the order of the calls); `cache_bytes` bound the pixels that are kept.
    """

    def __init__(self, *, workers: int = 0, cache_bytes: int = 512 * 2**20) -> None:
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
        size = fit(reel.clip.width, reel.clip.height, factor, budget)
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

    async def image(self, path: str, *, factor: int, budget: Budget) -> Picture:
        """The picture in a file, sized like a frame. Raises MediaError."""
        key = (path, factor, budget)
        still = self._stills.get(key)
        if still and self._ready(still):
            return still
        return await _result(self._jobs.get(key) or self._start([key], lambda: self._open(path, factor, budget)))

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
            return self._keep(picture, resized(read(picture.path), *size))
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
        width, height = fit(opened.width, opened.height, factor, budget)
        still = Picture(path=path, digest=content, time=None, width=width, height=height)
        self._keep(still, resized(opened, width, height))
        self._stills.put((path, factor, budget), still)
        return still

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


async def _result(job: Future[V]) -> V:
    """The job's result; who stops waiting for a shared job doesn't stop the job."""
    return job.result() if job.done() else await asyncio.shield(asyncio.wrap_future(job))
