"""Keep two processes from writing the same files of a run folder: advisory locks, one per kind of work.

A lock is a POSIX record lock on RUN/.locks/NAME.lock: the kernel releases it when its process ends, however it ends,
children don't inherit it, and on network file systems it holds between machines.
"""

import contextlib
import fcntl
import json
import logging
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from saccade.errors import RunError
from saccade.utils.files import convert_file_errors, create_folder, require_regular

# Names of locks; that of an evaluation is `eval-NAME`.
TRAINING, REPORT, DATA_BUILD, ABLATION, CREATION = "training", "report", "data-build", "ablation", "creation"
_logger = logging.getLogger("saccade")
_held: dict[Path, int] = {}  # how often this process holds each lock: to the kernel, a process never waits for itself


@contextlib.contextmanager
def hold_lock(folder: Path, name: str, *, waits: bool = False) -> Iterator[None]:
    """Create a folder and hold one of its locks inside the block; with `waits`, block until it is released.

    Raises what `RunLock` raises.
    """
    with RunLock(folder, name, waits=waits) as lock:
        lock.acquire()
        yield


class RunLock:
    """A context manager that holds the lock `name` of a run folder from `acquire` on; at entry if the folder exists.

    Raises RunError, with the folder as key and the holder's pid as value, if another process holds it; with `waits`,
    blocks until that process releases it.
    """

    def __init__(self, folder: Path, name: str, *, waits: bool = False) -> None:
        self._folder, self._name, self._waits = folder, name, waits
        self._path = _locate(folder, name)
        self._file_descriptor: int | None = None
        self._is_held = False

    def __enter__(self) -> Self:
        if self._folder.is_dir():
            self.acquire()
        return self

    def acquire(self) -> None:
        """Acquire the lock unless this object holds it."""
        if self._is_held:
            return
        if not _held.get(self._path):
            self._lock_file()
        _held[self._path] = _held.get(self._path, 0) + 1
        self._is_held = True

    def _lock_file(self) -> None:
        with convert_file_errors(self._path):
            create_folder(self._path.parent)
            require_regular(self._path)
            file_descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.lockf(file_descriptor, fcntl.LOCK_EX | (0 if self._waits else fcntl.LOCK_NB))
        except (BlockingIOError, PermissionError) as error:
            refusal = self._build_refusal(os.pread(file_descriptor, 4096, 0))
            os.close(file_descriptor)
            raise refusal from error
        except OSError as error:  # a file system without locks: the run is no worse off than without this module
            _logger.warning("%s can't be locked (%s); start no second process with this run", self._folder, error)
            os.close(file_descriptor)
            return
        holder = json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode()
        with convert_file_errors(self._path):
            os.ftruncate(file_descriptor, 0)
            os.pwrite(file_descriptor, holder, 0)
        self._file_descriptor = file_descriptor

    def _build_refusal(self, content: bytes) -> RunError:
        holder = {}
        with contextlib.suppress(ValueError, RecursionError):  # of a process that hasn't written it yet
            holder = json.loads(content)
        pid, host = (holder.get(key) for key in ("pid", "host")) if isinstance(holder, dict) else (None, None)
        return RunError(
            f"{self._folder} is in use ({self._name}) by process {pid or 'unknown'} on {host or 'an unknown host'}; "
            "wait for it or stop it, or choose another folder",
            key=str(self._folder),
            value=pid,
        )

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._is_held:
            return
        self._is_held = False
        _held[self._path] -= 1
        if not _held[self._path]:
            del _held[self._path]
        if self._file_descriptor is not None:
            os.close(self._file_descriptor)
            self._file_descriptor = None


def is_locked(folder: Path, name: str) -> bool:
    """Return whether another process of this machine holds the lock `name` of a run folder, without acquiring it."""
    path = _locate(folder, name)
    # struct flock: type, whence, start, length, pid; the kernel sets the type to F_UNLCK if no process holds the lock.
    query = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    try:
        file_descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        answer = fcntl.fcntl(file_descriptor, fcntl.F_GETLK, query)
    except OSError:  # a file system without locks
        return False
    finally:
        if not _held.get(path):  # closing any descriptor of the file would release this process's own lock
            os.close(file_descriptor)
    return bool(struct.unpack("hhqqi", answer)[0] != fcntl.F_UNLCK)


def _locate(folder: Path, name: str) -> Path:
    # Resolved: closing a file that is opened by another path of the folder would release this process's own lock.
    return Path(os.path.realpath(folder), ".locks", f"{name}.lock")
