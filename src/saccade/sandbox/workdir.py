"""Working folders on the machine's own disk, for guests without a private file system."""

import fcntl
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

_PREFIX, _LOCK = "saccade-sandbox-", ".lock"
_FOLDER = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_DEPTH, _ENDLESS = 64, 2**60  # folders in each other; what lies deeper counts as more than there is room for


def make_base() -> str:
    """A folder for the guests of this process, others' left behind swept away; it is whole while its lock is held."""
    for old in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        try:
            lock = os.open(old / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            clear(str(old))
            os.close(lock)
        except OSError:  # in use, or another user's
            continue
    base = tempfile.mkdtemp(prefix=_PREFIX)
    os.chmod(base, 0o711)
    # Held by this process and, through inheritance, by its children: until the last of them is gone.
    lock = os.open(Path(base) / _LOCK, os.O_CREAT | os.O_RDWR, 0o600)
    fcntl.flock(lock, fcntl.LOCK_SH)
    return base


def clear(folder: str) -> None:
    """Remove a folder with everything in it, however deep, whatever its permissions; links are not followed."""
    mark, count = secrets.token_hex(8), 0
    while folders := _without_files(folder):
        # What lies in a folder moves up one level, so that no path ever grows long.
        for each in folders:
            for inner in _without_files(each):
                os.rename(inner, f"{folder}/{mark}-{count}")
                count += 1
            os.rmdir(each)
    os.rmdir(folder)


def _without_files(folder: str) -> list[str]:
    """The folders in a folder, when its files are deleted; each can be entered and changed."""
    folders = []
    for entry in list(os.scandir(folder)):
        if entry.is_dir(follow_symlinks=False):
            os.chmod(entry.path, 0o700)
            folders.append(entry.path)
        else:
            os.unlink(entry.path)
    return folders


def used(folder: str, most: int) -> tuple[int, int]:
    """(bytes, entries) below a folder that somebody may be changing meanwhile; counting ends at `most` entries.

    Files that have lost their names but are still open or mapped aren't seen: of a process that can't be traced, the
    kernel shows them to nobody without that right.
    """
    total = count = 0
    for size in _sizes(folder, None, _DEPTH):
        total, count = total + size, count + 1
        if count >= most:
            break
    return total, count


def _sizes(name: str, above: int | None, depth: int) -> Iterator[int]:
    """The bytes of whatever lies below a folder, which is found by its name in the open folder above it.

    A path would be followed anew at each use, to wherever somebody has let it lead meanwhile.
    """
    place = _entered(name, above)
    if place is None:
        return
    try:
        for entry in list(os.scandir(place)):
            try:
                status = entry.stat(follow_symlinks=False)
            except OSError:  # gone meanwhile
                continue
            yield status.st_blocks * 512
            if stat.S_ISDIR(status.st_mode):
                yield from _sizes(entry.name, place, depth - 1) if depth else [_ENDLESS]
    finally:
        os.close(place)


def _entered(name: str, above: int | None) -> int | None:
    """A folder as a descriptor, opened to us where its permissions forbid it; None where it is none, or gone."""
    try:
        return os.open(name, os.O_RDONLY | _FOLDER, dir_fd=above)
    except PermissionError:
        return _opened_up(name, above)
    except OSError:
        return None


def _opened_up(name: str, above: int | None) -> int | None:
    try:
        handle = os.open(name, os.O_PATH | _FOLDER, dir_fd=above)
    except OSError:
        return None
    try:
        os.chmod(f"/proc/self/fd/{handle}", 0o700)
        return os.open(f"/proc/self/fd/{handle}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:  # another user's
        return None
    finally:
        os.close(handle)
