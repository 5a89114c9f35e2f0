"""Working folders on the machine's disk, for workers without a private file system."""

import contextlib
import fcntl
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

_PREFIX, _LOCK = "saccade-sandbox-", ".lock"
_OPEN_DIR_FLAGS = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MAX_DEPTH = 64  # of nested folders
_UNBOUNDED_BYTES = 2**60  # counted for anything nested deeper; exceeds every limit


def create_work_root() -> str:
    """Create a folder for the workers of this process, locked while it is in use; remove those of dead processes."""
    for old_root in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # in use
            if old_root.lstat().st_uid != os.geteuid():  # root could open another user's folder, or a link in it
                continue
            lock_fd = os.open(old_root / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove_tree(str(old_root))
            finally:
                os.close(lock_fd)
    work_root = tempfile.mkdtemp(prefix=_PREFIX)
    os.chmod(work_root, 0o711)
    # This process and, through inheritance, its children hold the lock until the last of them exits.
    lock_fd = os.open(Path(work_root) / _LOCK, os.O_CREAT | os.O_RDWR, 0o600)
    fcntl.flock(lock_fd, fcntl.LOCK_SH)
    return work_root


def remove_tree(folder: str) -> None:
    """Remove a folder of any depth and any permissions, without following links."""
    prefix, count = secrets.token_hex(8), 0
    while subfolders := _delete_files(folder):
        # Nested folders move up one level at a time, so that no path becomes too long.
        for subfolder in subfolders:
            for nested in _delete_files(subfolder):
                os.rename(nested, f"{folder}/{prefix}-{count}")
                count += 1
            os.rmdir(subfolder)
    os.rmdir(folder)


def _delete_files(folder: str) -> list[str]:
    """Delete the files in a folder; return its subfolders, made accessible."""
    folders = []
    for entry in list(os.scandir(folder)):
        if entry.is_dir(follow_symlinks=False):
            os.chmod(entry.path, 0o700)
            folders.append(entry.path)
        else:
            os.unlink(entry.path)
    return folders


def measure_usage(folder: str, max_entries: int, proc_dir: str = "") -> tuple[int, int]:
    """Return (bytes, entries) below a folder that may change concurrently; stop counting at `max_entries`.

    Unlinked files that the process of `proc_dir` (in /proc) has open or mapped count too, as far as the kernel lists
    them: open ones for a host of the same user or with CAP_SYS_PTRACE, mapped ones also with CAP_CHECKPOINT_RESTORE.
    """
    total = count = 0
    if proc_dir:
        unlinked = _find_unlinked_sizes(folder, proc_dir)
        total, count = sum(unlinked.values()), len(unlinked)
    for size in _iter_sizes(folder, None, _MAX_DEPTH):
        total, count = total + size, count + 1
        if count >= max_entries:
            break
    return total, count


def is_small(folder: str, max_entries: int) -> bool:
    """Return whether a folder holds fewer files and folders than that, none of them deeply nested."""
    size, count = measure_usage(folder, max_entries)
    return count < max_entries and size < _UNBOUNDED_BYTES


def _find_unlinked_sizes(folder: str, proc_dir: str) -> dict[int, int]:
    """Return the bytes of unlinked files on the device of `folder` that a process has open or mapped, by inode."""
    sizes: dict[int, int] = {}
    for name in ("fd", "map_files"):
        with contextlib.suppress(OSError):  # not permitted, or the process or the folder is gone
            device = os.stat(folder).st_dev
            for entry in os.scandir(f"{proc_dir}/{name}"):
                with contextlib.suppress(OSError):
                    status = entry.stat()
                    if status.st_dev == device and not status.st_nlink and stat.S_ISREG(status.st_mode):
                        sizes[status.st_ino] = status.st_blocks * 512
    return sizes


def _iter_sizes(name: str, parent_fd: int | None, depth: int) -> Iterator[int]:
    """Yield the size in bytes of every entry below a folder, which is opened by name relative to `parent_fd`.

    A path would be resolved again at each use, and the code could replace its parts by links in between.
    """
    fd = _open_dir(name, parent_fd)
    if fd is None:
        return
    try:
        for entry in list(os.scandir(fd)):
            try:
                status = entry.stat(follow_symlinks=False)
            except OSError:  # deleted meanwhile
                continue
            yield status.st_blocks * 512
            if stat.S_ISDIR(status.st_mode):
                yield from _iter_sizes(entry.name, fd, depth - 1) if depth else [_UNBOUNDED_BYTES]
    finally:
        os.close(fd)


def _open_dir(name: str, parent_fd: int | None) -> int | None:
    """Open a folder, adding permissions if they are missing; return None if it is no folder, or was deleted."""
    try:
        return os.open(name, os.O_RDONLY | _OPEN_DIR_FLAGS, dir_fd=parent_fd)
    except PermissionError:
        pass
    except OSError:
        return None
    try:
        path_fd = os.open(name, os.O_PATH | _OPEN_DIR_FLAGS, dir_fd=parent_fd)
    except OSError:
        return None
    try:
        os.chmod(f"/proc/self/fd/{path_fd}", 0o700)
        return os.open(f"/proc/self/fd/{path_fd}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:  # another user's
        return None
    finally:
        os.close(path_fd)
