"""Folders of temporary files: the next process removes those of processes that were killed.

    make_scratch_dir ──> remove_abandoned ──> a new folder, locked until the process ends ──> remove_scratch_dir
                           └─ the folders of the same prefix that no process has locked

A process that ends by itself removes its own.
"""

import contextlib
import fcntl
import glob
import os
import shutil
import tempfile
from pathlib import Path

_lock_fds: dict[str, int] = {}  # by folder, of this process


def make_scratch_dir(prefix: str, parent: str = "") -> str:
    """Create a folder in `parent` ("": the one for temporary files), and remove those that killed processes left there.

    It is locked until `remove_scratch_dir`, or until this process and those that it has forked have ended.
    """
    parent = parent or tempfile.gettempdir()
    remove_abandoned(prefix, parent)
    while True:
        folder = tempfile.mkdtemp(prefix=prefix, dir=parent)
        with contextlib.suppress(FileNotFoundError):  # another process removed it before it was locked
            lock_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            with contextlib.suppress(OSError):  # a file system without locks: no process removes the folder
                fcntl.flock(lock_fd, fcntl.LOCK_EX)
            if os.path.isdir(folder):
                _lock_fds[folder] = lock_fd
                return folder
            os.close(lock_fd)


def remove_scratch_dir(folder: str) -> None:
    """Remove a folder of `make_scratch_dir`, if it is still there."""
    shutil.rmtree(folder, ignore_errors=True)
    lock_fd = _lock_fds.pop(folder, None)
    if lock_fd is not None:
        os.close(lock_fd)


def remove_abandoned(prefix: str, parent: str) -> None:
    """Remove the folders of `make_scratch_dir` whose processes have ended without removing them."""
    for folder in Path(parent).glob(f"{glob.escape(prefix)}{'?' * 8}"):  # 8 characters are random
        with contextlib.suppress(OSError):  # in use, or removed meanwhile
            if folder.lstat().st_uid != os.geteuid():  # root could follow another user's links
                continue
            lock_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock_fd)
