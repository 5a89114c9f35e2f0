"""Check media files, detect their changes, and compute digests of their content."""

import hashlib
import os
import stat
from functools import lru_cache

from saccade.errors import MediaError, convert_errors
from saccade.utils.files import open_file

FULL_DIGEST_MAX_BYTES = 8 * 2**20  # bytes; a larger file is sampled
DIGEST_SAMPLE_BYTES = 2**20  # bytes each at the head, the middle and the tail of a sampled file


def get_file_identity(path: str) -> tuple[str, int, int]:
    """Return (path, modification time in ns, size in bytes), which identify a file's content without reading it.

    Raises MediaError unless the path is a readable, non-empty regular file.
    """
    try:
        status = os.stat(path)
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        message = f"{path} can't be opened ({reason.lower()}); check the path in the task's media"
        raise MediaError(message, key=path) from error
    if not stat.S_ISREG(status.st_mode):
        raise MediaError(f"{path} is not a file; give the path of a video or an image", key=path)
    if not status.st_size:
        raise MediaError(f"{path} is empty; download or copy it again", key=path)
    return path, status.st_mtime_ns, status.st_size


def compute_file_digest(path: str) -> str:
    """Return the content digest of a file, 32 hex digits of SHA-256, cached until the file changes.

    Files up to 8 MiB are hashed whole; of larger ones the size and one MiB each at the head, the middle and the tail.
    """
    return _compute_file_digest(*get_file_identity(path))


@lru_cache(maxsize=65536)
def _compute_file_digest(path: str, modified_ns: int, size: int) -> str:
    content = hashlib.sha256(str(size).encode())
    with convert_errors(MediaError, f"{path} can't be read; check its permissions", key=path), open_file(path) as file:
        if size <= FULL_DIGEST_MAX_BYTES:
            content.update(file.read())
        else:
            for start in (0, (size - DIGEST_SAMPLE_BYTES) // 2, size - DIGEST_SAMPLE_BYTES):
                file.seek(start)
                content.update(file.read(DIGEST_SAMPLE_BYTES))
    return content.hexdigest()[:32]
