"""Working folders on the machine's own disk, for guests without a private file system."""

import fcntl
import os
import secrets
import tempfile
from pathlib import Path

_PREFIX, _LOCK = "saccade-sandbox-", ".lock"


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
    """(bytes, entries) below a folder that somebody may be changing meanwhile; counting ends at `most` entries."""
    total, count, left = 0, 0, [folder]
    while left and count < most:
        place = left.pop()
        try:
            entries = list(os.scandir(place))
        except OSError as error:
            if len(place) > os.pathconf("/", "PC_PATH_MAX") - 300:
                return total, most  # deeper than any path reaches
            _open_up(place, error)
            continue
        for entry in entries:
            count += 1
            try:
                total += entry.stat(follow_symlinks=False).st_blocks * 512
                left += [entry.path] if entry.is_dir(follow_symlinks=False) else []
            except OSError:  # gone meanwhile
                continue
    return total, count


def _open_up(place: str, error: OSError) -> None:
    if isinstance(error, PermissionError) and not os.path.islink(place):
        try:
            os.chmod(place, 0o700)
        except OSError:  # gone meanwhile
            return
