"""Files as media: whether they can be read, when they changed, and a digest of their content."""

import hashlib
import os
import stat
from functools import lru_cache

from saccade.errors import MediaError, boundary

WHOLE = 8 * 2**20  # bytes up to which a file is digested whole
SAMPLE = 2**20  # bytes taken at the head, the middle and the tail of a larger one


def identity(path: str) -> tuple[str, int, int]:
    """(path, time of change in ns, size in bytes): what tells that a file is still the same, without reading it.

    Raises MediaError where the path is no readable, non-empty regular file.
    """
    try:
        status = os.stat(path)
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise MediaError(f"{path} can't be opened ({reason.lower()}); check the path in the task's media") from error
    if not stat.S_ISREG(status.st_mode):
        raise MediaError(f"{path} is not a file; give the path of a video or a picture")
    if not status.st_size:
        raise MediaError(f"{path} is empty; download or copy it again")
    return path, status.st_mtime_ns, status.st_size


def digest(path: str) -> str:
    """The content digest of a file: 32 hex digits of SHA-256, remembered until the file changes.

    Up to 8 MiB the whole content counts; beyond, the size and one MiB each at the head, the middle and the tail do.
    """
    return _digest(*identity(path))


@lru_cache(maxsize=65536)
def _digest(path: str, changed: int, size: int) -> str:
    content = hashlib.sha256(str(size).encode())
    with boundary(MediaError, f"{path} can't be read; check its permissions"), open(path, "rb") as file:
        if size <= WHOLE:
            content.update(file.read())
        else:
            for start in (0, (size - SAMPLE) // 2, size - SAMPLE):
                file.seek(start)
                content.update(file.read(SAMPLE))
    return content.hexdigest()[:32]
