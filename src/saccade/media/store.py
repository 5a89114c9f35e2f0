"""Store decoded, scaled images by the digest of their content: in memory, and in a folder that processes share.

    get ──> memory ──> disk ──> (the caller decodes)          put ──> memory, disk
              │           └─ one file per image: checksum, pixels; the oldest are deleted when the folder is full
              └─ least recently used first; pinned images stay: a batch needs them until it has been trained on

Processes share a folder without a server: a file is renamed into place whole, so that a reader sees all of it or none;
its checksum finds what a power cut or a bad disk left; a reader of a file that another process deletes keeps its
content. The total size is a number in a file, changed under a lock (`flock`).
"""

import contextlib
import fcntl
import logging
import os
import shutil
import tempfile
import threading
import time
import zlib
from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from saccade.utils.files import create_private_folder, open_file, read_bytes, write_atomically
from saccade.utils.hashing import compute_digest

Pixels = NDArray[np.uint8]
_CHECKSUM_BYTES = 4
_SUFFIX = ".entry"
_KEPT_SHARE = 0.9  # of the bound, after entries have been deleted: a scan of the folder frees room for many
_DRAFT_SECONDS = 3600.0  # an older temporary file belongs to a process that was killed
_logger = logging.getLogger("saccade")


class DiskStore:
    """Entries of bytes in `folder`, of at most `max_bytes` in total, shared by processes and threads.

    `versions` identifies what computed the entries; others' entries are never returned. Nothing here raises: what can't
    be read is missing, and after a failed write, such as on a full disk, nothing more is written, with one warning.
    """

    def __init__(self, folder: Path, max_bytes: int, *, versions: Sequence[str] = ()) -> None:
        self.folder, self.max_bytes, self._versions = folder, max_bytes, tuple(versions)
        self._lock = threading.Lock()  # some file systems' locks exclude other processes only
        self._is_writable = True

    def read(self, key: str, num_bytes: int | None = None) -> memoryview | None:
        """Return an entry's content; None if there is none, or none that is whole and of `num_bytes` bytes."""
        file = self._locate(key)
        try:
            content = memoryview(read_bytes(file))
        except OSError:  # missing, or a failing disk: it is computed again
            return None
        checksum, body = content[:_CHECKSUM_BYTES], content[_CHECKSUM_BYTES:]
        is_whole = num_bytes is None or len(body) == num_bytes
        if not is_whole or zlib.crc32(body).to_bytes(_CHECKSUM_BYTES, "big") != checksum:
            with contextlib.suppress(OSError):
                file.unlink()
            return None
        with contextlib.suppress(OSError):
            os.utime(file)  # the entries unused for longest are deleted first
        return body

    def write(self, key: str, content: bytes | memoryview) -> None:
        """Write an entry, unless it exists or is larger than the bound."""
        file, num_bytes = self._locate(key), len(content) + _CHECKSUM_BYTES
        if not self._is_writable or num_bytes > self.max_bytes:
            return
        try:
            if file.exists():
                return
            file.parent.mkdir(parents=True, exist_ok=True)
            if not self._reserve(num_bytes):
                return
            try:
                with (
                    write_atomically(file, is_durable=False, is_shared=True) as draft,
                    open_file(draft, "wb") as output,
                ):
                    output.write(zlib.crc32(content).to_bytes(_CHECKSUM_BYTES, "big"))
                    output.write(content)
            except BaseException:
                with contextlib.suppress(OSError):
                    self._reserve(-num_bytes)
                raise
        except OSError as error:
            self._stop_writing(error)

    def read_total_bytes(self) -> int:
        """Return the size of all entries, as their writers count it. Raises OSError."""
        with self._open_total() as file:
            return int.from_bytes(file.read(8), "big")

    def compute_total_bytes(self) -> int:
        """Return the size of all entries by a scan of the folder."""
        return sum(size for _, size, _ in self._scan())

    def _locate(self, key: str) -> Path:
        digest = compute_digest(key, self._versions)
        return self.folder / digest[:2] / f"{digest[2:34]}{_SUFFIX}"

    def _stop_writing(self, error: OSError) -> None:
        if self._is_writable:
            self._is_writable = False
            _logger.warning(
                "%s can't be written (%s): from now on this process stores decoded images in memory only. Free some "
                "space, lower media.disk_bytes, or choose another media.folder",
                self.folder,
                (error.strerror or str(error)).lower(),
            )

    def _reserve(self, num_bytes: int) -> bool:
        """Add to the total; delete old entries if it exceeds the bound. Return False if there is no room."""
        with self._open_total() as file:
            content = file.read(8)
            total = int.from_bytes(content, "big") if len(content) == 8 else self.compute_total_bytes()
            if total + num_bytes > self.max_bytes:
                total = self._delete_oldest(total, int(_KEPT_SHARE * self.max_bytes) - num_bytes)
            has_room = total + num_bytes <= self.max_bytes
            file.seek(0)
            file.write(max(0, total + (num_bytes if has_room else 0)).to_bytes(8, "big"))
            return has_room

    @contextlib.contextmanager
    def _open_total(self) -> Iterator[BinaryIO]:
        file_descriptor = os.open(self.folder / "total", os.O_RDWR | os.O_CREAT, 0o644)
        with self._lock, os.fdopen(file_descriptor, "r+b", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield file

    def _delete_oldest(self, total: int, target: int) -> int:
        """Delete entries, the least recently used first, until the total is at most `target`; return the total.

        The total includes entries that others are writing now, 1 % of the bound at most; what it exceeds the entries by
        beyond that was written twice, deleted by hand, or not written by processes that were killed.
        """
        entries = sorted(self._scan())
        total = min(total, sum(size for _, size, _ in entries) + self.max_bytes // 100)
        for _, size, path in entries:
            if total <= target:
                break
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
                total -= size
        return total

    def _scan(self) -> Iterator[tuple[float, int, str]]:
        """Yield (time of last use, size, path) of each entry; delete temporary files of killed processes."""
        for number in range(256):
            try:
                files = list(os.scandir(self.folder / f"{number:02x}"))
            except FileNotFoundError:
                continue
            for file in files:
                with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                    status = file.stat()
                    if file.name.endswith(_SUFFIX):
                        yield status.st_mtime, status.st_size, file.path
                    elif file.name.endswith(".draft") and status.st_mtime < time.time() - _DRAFT_SECONDS:
                        os.unlink(file.path)


def open_node_store(max_bytes: int, *, versions: Sequence[str] = ()) -> DiskStore | None:
    """Return the store that all processes of this user on this machine share, in its folder of temporary files.

    It takes at most `max_bytes`, and half of the room that it finds. None, with a warning, if the folder can't be used.
    """
    folder = Path(tempfile.gettempdir(), f"saccade-media-{os.getuid()}")
    try:
        create_private_folder(folder)
        store = DiskStore(folder, max_bytes, versions=versions)
        room = shutil.disk_usage(folder).free + store.read_total_bytes()
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        _logger.warning("%s can't be used (%s): decoded images aren't shared. Set media.folder", folder, reason)
        return None
    store.max_bytes = min(max_bytes, room // 2)
    return store


class PixelStore:
    """Decoded images by key: at most `memory_bytes` in memory, more of them in `disk`, if there is one. Thread-safe.

    Images of pinned keys are never evicted; while they fill the memory, others aren't kept. If they exceed it
    themselves, the last ones are not kept either, with one warning.
    """

    def __init__(self, memory_bytes: int, disk: DiskStore | None = None) -> None:
        self.memory_bytes, self.disk, self.total_bytes = memory_bytes, disk, 0
        self._pinned: dict[str, Pixels] = {}
        self._pinned_bytes = 0
        self._unpinned: OrderedDict[str, Pixels] = OrderedDict()
        self._num_pins: Counter[str] = Counter()
        self._released: deque[Collection[str]] = deque()
        self._lock = threading.Lock()
        self._is_warned = False

    def get(self, key: str) -> Pixels | None:
        """Return an image that is in memory, and mark it as most recently used."""
        with self._lock:
            self._unpin_released()
            if key in self._unpinned:
                self._unpinned.move_to_end(key)
                return self._unpinned[key]
            return self._pinned.get(key)

    def read(self, key: str, width: int, height: int) -> Pixels | None:
        """Return an image of a known size from the disk; it is then in memory, too."""
        if self.disk is None:
            return None
        content = self.disk.read(key, 3 * width * height)
        return None if content is None else self.put(key, np.frombuffer(content, np.uint8).reshape(height, width, 3))

    def put(self, key: str, pixels: Pixels, *, to_disk: bool = False) -> Pixels:
        """Keep an image, read-only from now on, and return it."""
        pixels.flags.writeable = False
        with self._lock:
            self._unpin_released()
            self._remove(key)
            is_pinned = self._num_pins[key] > 0
            if self._pinned_bytes + pixels.nbytes <= self.memory_bytes:
                while self.total_bytes + pixels.nbytes > self.memory_bytes:
                    self.total_bytes -= self._unpinned.popitem(last=False)[1].nbytes
                self.total_bytes += pixels.nbytes
                (self._pinned if is_pinned else self._unpinned)[key] = pixels
                self._pinned_bytes += pixels.nbytes if is_pinned else 0
            elif is_pinned and not self._is_warned:
                self._is_warned = True
                _logger.warning(
                    "The images of the batches that wait for training exceed media.memory_bytes=%d: those beyond it "
                    "are read or decoded once more. Raise it if the machine has room",
                    self.memory_bytes,
                )
        if to_disk and self.disk is not None:
            self.disk.write(key, np.ascontiguousarray(pixels).data.cast("B"))
        return pixels

    def pin(self, keys: Collection[str]) -> None:
        """Keep the images of these keys in memory until `release` is called with the same keys."""
        with self._lock:
            for key in keys:
                self._num_pins[key] += 1
                if (pixels := self._unpinned.pop(key, None)) is not None:
                    self._pinned[key] = pixels
                    self._pinned_bytes += pixels.nbytes

    def release(self, keys: Collection[str]) -> None:
        """Undo a `pin`. A finalizer may call it, which interrupts other methods: it takes no lock."""
        self._released.append(keys)

    def _unpin_released(self) -> None:
        while self._released:
            for key in self._released.popleft():
                self._num_pins[key] -= 1
                if self._num_pins[key] <= 0:
                    del self._num_pins[key]
                    if (pixels := self._pinned.pop(key, None)) is not None:
                        self._unpinned[key] = pixels
                        self._pinned_bytes -= pixels.nbytes

    def _remove(self, key: str) -> None:
        if (pixels := self._pinned.pop(key, None)) is not None:
            self._pinned_bytes -= pixels.nbytes
        else:
            pixels = self._unpinned.pop(key, None)
        self.total_bytes -= 0 if pixels is None else pixels.nbytes
